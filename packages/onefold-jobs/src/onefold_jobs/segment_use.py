"""The job segment: how its runs are used, and the `Job` itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from onefold.files import aside_of
from onefold_jobs import require
from onefold_jobs.data.augment import LabeledPictures
from onefold_jobs.data.classes import test_folder
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label
from onefold_jobs.data.maskclasses import colored_mask
from onefold_jobs.data.masks import MaskRule
from onefold_jobs.data.pairs import Pair, read_pairs_to_test
from onefold_jobs.data.pictures import require_folder
from onefold_jobs.data.scan import Scanning
from onefold_jobs.data.tables import Columns
from onefold_jobs.job import (
    Batch,
    EvaluateOptions,
    Input,
    Job,
    Labeled,
    LoadedModel,
    Predicted,
    RunFacts,
    Usage,
    Use,
)
from onefold_jobs.options import read_config
from onefold_jobs.picture_use import (
    files_of,
    noise,
    numbers_of,
    paths_of,
    read_pictures,
    tensors_of,
)
from onefold_jobs.predictions import MASK_NOTE, mask_name
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import CONFIG, kept_facts, read_run
from onefold_jobs.scores import Measured
from onefold_jobs.segment_job import (
    EVALUATION_BATCH_SIZE,
    HELP,
    JOB,
    MaskModel,
    SegmentOptions,
    check_early,
    loss_and_measure,
    make_task,
    prepare,
    settle,
)
from onefold_jobs.segment_pictures import (
    Padded,
    PicturePairs,
    class_ious,
    mask_baseline,
    mask_scores,
    mask_scores_of_each,
    predicted_numbers,
    whole_logits,
)
from onefold_jobs.target_use import compared

__all__ = ["SEGMENT"]

_RULE = "foreground", "void"

_PADDED = (
    "zeros after normalization, on the right and below, to a common height and width that are "
    "multiples of side_multiple, and twice it at least"
)


class _Weight(msgspec.Struct):
    """What is needed of a run's ``run.json``."""

    pos_weight: float = 1.0


def _read(run: Path, paths: Sequence[Path], columns: Columns) -> tuple[list[Input], list[BadFile]]:
    return read_pictures(MaskModel.of_run(run), run, paths, columns, unique=False)


def _predict(use: Use) -> Predicted:
    """Masks, which are written, and the share of each that is foreground."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("Software", MASK_NOTE)
    kind, model = MaskModel.built(use.run)
    padded, folder = Padded(model.stride), use.options.output or Path()

    def draw(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Write the masks of a shard where it is computed; return the share of each."""
        logits = whole_logits(model, batch, padded.stride)
        masks = predicted_numbers(logits, kind.threshold)
        shares = []
        # The mask's first pixel; float32 holds numbers exactly up to 16,777,216 pictures.
        numbers = batch["masks"][:, 0, 0].to(torch.int64).tolist()
        for mask, number, size in zip(masks, numbers, batch["sizes"].tolist(), strict=True):
            pixels = mask[: size[0], : size[1]].cpu()
            path = folder / mask_name(use.inputs[number].name)
            path.parent.mkdir(parents=True, exist_ok=True)
            levels = pixels.numpy().astype(np.uint8)
            if kind.classes:
                drawn = colored_mask(levels, kind.classes, values=True)
            else:
                drawn = Image.fromarray(levels * np.uint8(255))
            # Whole or not at all, so that nothing half-written lies there after a stop.
            with aside_of(path) as file:
                drawn.save(file, format="PNG", pnginfo=note)
            counts = torch.bincount(pixels.flatten(), minlength=max(2, len(kind.classes)))
            shares.append(counts.to(torch.float64) / pixels.numel())
        return {"share": torch.stack(shares)}

    numbers = range(len(use.inputs))
    data = LabeledPictures(files_of(use, kind), numbers, "RGB", (), kind.normalize)
    collate = partial(_numbered, padded=padded)
    size = EVALUATION_BATCH_SIZE
    found = use.measured(model, draw, data, collate, batch_size=size)
    # Of two values, the share of the foreground.
    names = [f"share {each.name}" for each in kind.classes] or ["share"]
    shares = found["share"][:, 0 if kind.classes else 1 :].tolist()
    return [
        {**each.row, "mask": mask_name(each.name), **dict(zip(names, own, strict=True))}
        for each, own in zip(use.inputs, shares, strict=True)
    ], found


def _numbered(samples: list[tuple[torch.Tensor, int]], padded: Padded) -> dict[str, torch.Tensor]:
    """Make a shard of pictures, each with its number in the place of a mask."""
    return padded([(image, torch.full((1, 1), float(number))) for image, number in samples])


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read pictures and masks."""
    del options  # masks are in no table
    require("reading pictures", "images", "PIL")
    require_folder(data, "a folder with images and masks")
    folder = test_folder(data, choosing=False) if (data / "train").is_dir() else data
    bad: list[BadFile] = []
    with reading_bar() as watch:
        scanning = Scanning(watch=watch, white=MaskModel.of_run(run).white or 0)
        pairs = read_pairs_to_test(folder, _mask_rule(run), bad, scanning)
    inputs = [
        Input(pair.image, str(pair.image.relative_to(folder / "images")), mask=pair.mask)
        for pair in pairs
    ]
    return Labeled(folder, inputs, bad)


def _mask_rule(run: Path) -> MaskRule:
    options = read_config(run / CONFIG, JOB)
    kind = MaskModel.of_run(run)
    # Not those of the options: the masks that classes came from may be elsewhere by now.
    classes = tuple(f"{each.name}={'|'.join(each.values)}" for each in kind.classes)
    with kept_facts(run):
        foreground, void = (
            msgspec.convert(options.get(name, ()), tuple[str, ...]) for name in _RULE
        )
        return MaskRule(foreground, void, classes)


def _score(use: Use) -> Predicted:
    """Compare the masks of all pictures with those that they should have; on every device."""
    kind, model = MaskModel.built(use.run)
    kept = msgspec.convert(read_run(use.run, shape=_Weight), _Weight)
    weight = torch.tensor(kept.pos_weight)
    _, measure = loss_and_measure(weight, kind.threshold, model.stride)
    pairs = [Pair(each.path, each.mask) for each in use.inputs if each.mask is not None]
    data = PicturePairs(pairs, kind.normalize, _mask_rule(use.run), kind.white)
    size = EVALUATION_BATCH_SIZE
    found = use.measured(model, measure, data, Padded(model.stride), batch_size=size)
    scores = (each.tolist() for each in mask_scores_of_each(found))
    return [
        {**each.row, "iou": iou, "dice": dice}
        for each, iou, dice in zip(use.inputs, *scores, strict=True)
    ], found


def _sum_up(found: Measured, labels: list[Label], facts: RunFacts) -> dict[str, Any]:
    classes = MaskModel.of_run(facts.run).classes
    weight = msgspec.convert(read_run(facts.run, shape=_Weight), _Weight).pos_weight
    baseline, counts = None, facts.class_counts
    if counts is not None:
        given = [int(each) for each in found["given"].sum(dim=0, keepdim=True).flatten()]
        test = given if classes else [int(found["counted"].sum()) - given[0], given[0]]
        baseline = mask_baseline(counts[0], test, classes, weight)
    by_class = class_ious(found, classes) if classes else []
    summed = {"scores": mask_scores(found, classes), "by_class": by_class}
    return compared(summed, baseline, facts)


def _load(run: Path) -> LoadedModel:
    kind, model = MaskModel.built(run)

    def preprocess(pictures: Sequence[Any]) -> Batch:
        images = tensors_of(pictures, kind, "RGB", ())
        mask = torch.zeros(1, 1)
        return {"images": Padded(model.stride)([(image, mask) for image in images])["images"]}

    before = {"mode": "RGB", "side_multiple": model.stride, **numbers_of(kind), "padded": _PADDED}
    facts = {"threshold": kind.threshold, "classes": [each.name for each in kind.classes]}
    return LoadedModel(model, model, preprocess, {**facts, "preprocessing": before})


SEGMENT = Job(
    name=JOB,
    help=HELP,
    example="cracks",
    options=SegmentOptions,
    check_early=check_early,
    prepare=prepare,
    settle=settle,
    make_task=make_task,
    use=Usage(
        sample="image",
        read=_read,
        predict=_predict,
        labeled=_labeled,
        score=_score,
        sum_up=_sum_up,
        tested=lambda data: paths_of(each.image for each in data.test),
        load=_load,
        noise=noise,
        free=(0, 2, 3),
        draws=True,
    ),
)

"""Uses a trained run on new files, and writes the predictions: the same on any number of devices.

`as_csv` and `as_json` format predictions. `require_predictions` and `require_mask` protect files
that are not predictions.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import onefold
from onefold.errors import CheckpointError, DataError, OnefoldError
from onefold.jobs import classify, segment, text
from onefold.jobs.data.augment import LabelledPictures, Normalise
from onefold.jobs.data.decoding import open_picture, require_pillow
from onefold.jobs.data.files import BadFile, refuse, require_ours
from onefold.jobs.data.pictures import PictureFiles, made_here, picture_paths
from onefold.jobs.data.scan import Scanning, scan_pictures
from onefold.jobs.data.tsv import decoded, read_lines
from onefold.jobs.finetune import best_checkpoint, load_finite
from onefold.jobs.options import MOST_SAMPLES, MOST_SHARDS, MOST_WORKERS, expect
from onefold.jobs.progress import ReadingBar
from onefold.jobs.runfolder import CHECKPOINTS, kept_facts, read_run, require_writable
from onefold.jobs.segment_pictures import Padded, whole_logits
from onefold.jobs.tokens import EncodedTexts
from onefold.system.ownfiles import aside_of, write_whole
from onefold.weights.file import check_weights

__all__ = ["PredictOptions", "predict_run", "write_prediction"]


Format = Literal["csv", "json"]
_STEP = re.compile(r"step-([0-9]{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """How to use a run."""

    devices: str = "auto"
    """As for training."""
    output: Path | None = None
    """File for the predictions, or folder for the masks; None prints them."""
    format: Format | None = None
    """None chooses by the ending of ``output``; CSV if it has another."""
    weights: Literal["best", "last"] = "best"
    """Which checkpoint of the run to use."""
    top: int = 1
    """How many classes to report for each file, the most probable first."""
    batch_size: int | None = None
    """Samples of a batch, over all devices; None takes what the job's evaluation uses."""
    workers: int = 0
    """Processes that read ahead, for each device."""
    skip_bad: bool = False
    """Leave out what cannot be read, rather than refuse it."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("top", 1, MOST_SAMPLES),
            ("batch_size", 1, MOST_SAMPLES),
            ("workers", 0, MOST_WORKERS),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
            if value is not None and value > most:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected {most:,} or less")

    @property
    def chosen_format(self) -> Format:
        """The format, with None decided."""
        if self.format:
            return self.format
        return "json" if self.output and self.output.suffix == ".json" else "csv"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result of `predict_run`."""

    rows: list[dict[str, Any]]
    """One row for each sample, in the order of the input."""
    left_out: list[BadFile]
    """Files and lines that could not be read."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What to predict: pictures, or lines of text files."""

    paths: list[Path]
    names: list[str]
    """The name of each, counted from the path that was given."""
    texts: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    left_out: list[BadFile] = field(default_factory=list)


def predict_run(run: Path, paths: Sequence[Path], options: PredictOptions) -> Prediction:
    """Use a run's model on files and folders.

    Args:
        run: folder of a run.
        paths: files or folders of pictures; for texts, files with one text a line.
        options: devices, checkpoint, output and the like.

    Raises:
        DataError: the folder is not that of a run, or a path is missing or cannot be read.
        CheckpointError: the run has no weights yet, or they are damaged or not finite.
        ValueError: an option does not suit the run.
    """
    job = str(read_run(run).get("job"))
    if job not in _PREDICTORS:
        raise DataError(f"{run}: expected a run of {', '.join(_PREDICTORS)}, got {job}")
    weights = best_checkpoint(run) if options.weights == "best" else _last_checkpoint(run)
    # Every byte is compared with the digests now, rather than by each device after all the rest.
    check_weights(weights)
    _check_output(job, options.output)
    # The inputs are read whole only after everything that is quickly refused.
    inputs = _read(job, paths)
    if not options.skip_bad:
        refuse(inputs.left_out)
    if not inputs.paths:
        raise DataError(f"{', '.join(map(str, paths))}: expected something to look at, found none")
    _check_inputs_stay(job, inputs, options.output)
    rows: list[dict[str, Any]] | OnefoldError = onefold.launch(
        _predict, devices=options.devices, args=(job, run, weights, inputs, options)
    )
    if isinstance(rows, OnefoldError):
        raise rows
    return Prediction(rows, inputs.left_out)


def _last_checkpoint(run: Path) -> Path:
    """Find the folder of a run's newest weights."""
    # By number and not by name: beyond 99,999,999 steps names grow longer.
    steps = map(_STEP.fullmatch, os.listdir(run / CHECKPOINTS) if _has_checkpoints(run) else ())
    names = {int(step[1]): step[0] for step in steps if step is not None}
    if not names:
        raise CheckpointError(f"{run / CHECKPOINTS}: expected the run's checkpoints, found none")
    return run / CHECKPOINTS / names[max(names)]


def _has_checkpoints(run: Path) -> bool:
    return (run / CHECKPOINTS).is_dir()


def write_prediction(
    prediction: Prediction, options: PredictOptions, screen: TextIO
) -> Path | None:
    """Write the rows where the options say; return the file, or None if they were printed."""
    json_wanted = options.chosen_format == "json"
    content = as_json(prediction.rows) if json_wanted else as_csv(prediction.rows)
    if options.output is None:
        # A file name that is not UTF-8 has lone surrogates in it, which no screen can print.
        screen.write(content.encode(errors="backslashreplace").decode())
        return None
    path = options.output
    if prediction.rows and "mask" in prediction.rows[0]:
        path = path / f"masks.{options.chosen_format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    require_predictions(path)
    # File names may not be UTF-8: CSV takes their bytes as they are, JSON cannot.
    encoded = content.encode(errors="backslashreplace" if json_wanted else "surrogateescape")
    # Not synced: after a power failure, predictions can be made again.
    write_whole(path, encoded, sync=False)
    return path


def _read(job: str, paths: Sequence[Path]) -> _Inputs:
    if job == text.JOB:
        return _read_texts(paths)
    return _read_pictures(paths, masks=job == segment.JOB)


def _read_pictures(paths: Sequence[Path], *, masks: bool) -> _Inputs:
    """Find all pictures, and read each once to see whether it can be read."""
    require_pillow()
    found: dict[Path, str] = {}
    bad: list[BadFile] = []
    # By path, so that a file that was named, and its folder as well, counts once.
    for path in paths:
        if path.is_dir():
            for each in picture_paths(path, bad):
                found.setdefault(each, str(each.relative_to(path)))
        elif path.is_file():
            found.setdefault(path, path.name)
        else:
            raise DataError(f"{path}: expected a file or folder, there is none")
    if not masks and len(set(found.values())) < len(found):
        # Of one name in several folders: nobody could tell their rows apart.
        found = {path: str(path) for path in found}
    files = list(found)
    with ReadingBar() as bar:
        facts = scan_pictures(files, scanning=Scanning(watch=bar.watch))
    valid = [files[number] for number in facts.sound]
    return _Inputs(valid, [found[path] for path in valid], left_out=[*bad, *facts.bad])


def _read_texts(paths: Sequence[Path]) -> _Inputs:
    """Read one text from each line: what comes before the first tab, if there is one."""
    inputs = _Inputs([], [])
    for path in paths:
        if not path.is_file():
            came = "a folder" if path.is_dir() else "nothing there"
            raise DataError(f"{path}: expected a file with one text a line, got {came}")
        for number, content in enumerate(read_lines(path), start=1):
            try:
                line = decoded(content).partition("\t")[0]
            except ValueError as wrong:
                inputs.left_out.append(BadFile(path, str(wrong), number))
                continue
            if not line.strip():
                inputs.left_out.append(BadFile(path, "expected a text, got none", number))
                continue
            inputs.paths.append(path)
            inputs.names.append(str(path))
            inputs.texts.append(line)
            inputs.lines.append(number)
    return inputs


def _check_output(job: str, output: Path | None) -> None:
    """Refuse an output that could not be written after all the work."""
    if job != segment.JOB:
        if output is not None and output.is_dir():
            raise ValueError(
                f"--output {output}: expected a file for the predictions, not a folder"
            )
    elif output is None:
        raise ValueError("expected --output with a folder for the masks")
    elif output.exists() and not output.is_dir():
        raise ValueError(f"--output {output}: expected a folder for the masks, this is a file")
    if output is None:
        return
    if job == segment.JOB:
        require_writable(output, "--output names another one")
    else:
        require_writable(output.parent, "--output names another one")


def _check_inputs_stay(job: str, inputs: _Inputs, output: Path | None) -> None:
    """Refuse to write over the inputs, or over files that are not ours."""
    if output is None:
        return
    if job == segment.JOB:
        _check_masks(inputs)
        masks = [output / _mask_name(name) for name in inputs.names]
        written = {mask.resolve() for mask in masks}
    else:
        written = {output.resolve()}
    # Resolved: the same file may have been named by two paths, or by a link.
    for path in inputs.paths:
        if path.resolve() in written:
            raise ValueError(f"--output {output}: expected another place, {path} would be lost")
    if job == segment.JOB:
        for mask in masks:
            require_mask(mask, output)
        for each in ("csv", "json"):
            require_predictions(output / f"masks.{each}")
    else:
        require_predictions(output)


def _check_masks(inputs: _Inputs) -> None:
    # Masks are PNG files: a.jpg and a.png in one folder would share a single one.
    masks: dict[str, Path] = {}
    for path, name in zip(inputs.paths, inputs.names, strict=True):
        other = masks.setdefault(_mask_name(name), path)
        if other != path:
            raise DataError(
                f"{path} and {other} would have a mask of the same name, {_mask_name(name)}: "
                f"predict them into folders of their own"
            )


def _mask_name(name: str) -> str:
    return str(Path(name).with_suffix(".png"))


def _predict(
    job: str, run: Path, weights: Path, inputs: _Inputs, options: PredictOptions
) -> list[dict[str, Any]] | OnefoldError:
    """Predict, on every device; weights that cannot be used come back as a value."""
    # Raised, the error would end this device's process, and the user would see a traceback.
    try:
        return _PREDICTORS[job](run, weights, inputs, options)
    except (CheckpointError, DataError) as error:
        return error


def _trainer(model: nn.Module, run: Path, weights: Path) -> onefold.Trainer:
    """Make a trainer that holds a model and never makes a step."""
    load_finite(model, weights)
    *others, last = model.parameters()
    # A trainer sets memory aside for the gradients of all that is trained; something must be.
    for parameter in others:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([last], lr=0.0)
    # As in training: as many devices may share a batch as could then.
    with kept_facts(run):
        shards = int(read_run(run)["shards"])
        expect(1 <= shards <= MOST_SHARDS, "shards", shards, "a number of shards")
    return onefold.Trainer(model, optimizer, _no_loss, shards=shards)


def _no_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    raise NotImplementedError("a run that only predicts makes no step")


def _classes(said: torch.Tensor, classes: Sequence[str], top: int) -> list[list[dict[str, Any]]]:
    """Choose the most probable classes of each sample, the first of equal ones.

    Args:
        said: (n, classes) float32, the probability of every class.
        classes: the names of the classes.
        top: how many to choose.
    """
    # topk may return equal ones in any order, and in another one on a GPU; a stable sort does not.
    order = said.argsort(dim=1, descending=True, stable=True)[:, :top]
    sure = said.gather(1, order)
    return [
        [{"class": classes[c], "confidence": p} for c, p in zip(cs, ps, strict=True)]
        for cs, ps in zip(order.tolist(), sure.tolist(), strict=True)
    ]


def _predict_pictures(
    run: Path, weights: Path, inputs: _Inputs, options: PredictOptions
) -> list[dict[str, Any]]:
    kind = classify.PictureModel.of_run(run)
    with kept_facts(run):
        model = kind.build()
    trainer = _trainer(model, run, weights)
    pictures = PictureFiles(inputs.paths, Path(), kind.white)
    data = LabelledPictures(
        pictures, [0] * len(pictures), kind.mode, kind.test_changes, kind.normalise
    )
    found = trainer.predict(
        classify.confidences,
        data,
        batch_size=options.batch_size or classify.EVALUATION_BATCH_SIZE,
        workers=options.workers,
    )["confidence"]
    rows = zip(inputs.names, _classes(found, kind.classes, options.top), strict=True)
    return [{"file": name, "classes": classes} for name, classes in rows]


def _predict_texts(
    run: Path, weights: Path, inputs: _Inputs, options: PredictOptions
) -> list[dict[str, Any]]:
    kind = text.TextModel.of_run(run)
    trainer = _trainer(kind.build(run), run, weights)
    data = EncodedTexts(kind.encode(inputs.texts), [0] * len(inputs.texts))
    probabilities = trainer.predict(
        text.confidences,
        data,
        batch_size=options.batch_size or text.EVALUATION_BATCH_SIZE,
        workers=options.workers,
        collate=kind.collate,
    )["confidence"]
    found = _classes(probabilities, kind.classes, options.top)
    columns = zip(inputs.names, inputs.lines, inputs.texts, found, strict=True)
    return [
        {"file": name, "line": line, "text": words, "classes": classes}
        for name, line, words, classes in columns
    ]


class _NumberedPictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Whole pictures, each with its number in the place of a mask."""

    def __init__(self, paths: Sequence[Path], normalise: Normalise, white: int | None) -> None:
        self._paths = paths
        self._normalise = normalise
        self._white = white

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = open_picture(self._paths[index], white=self._white)
        image = self._normalise(picture.convert("RGB"))
        return image, torch.full((1, 1), float(index))


def _predict_masks(
    run: Path, weights: Path, inputs: _Inputs, options: PredictOptions
) -> list[dict[str, Any]]:
    from PIL import Image

    kind = segment.MaskModel.of_run(run)
    with kept_facts(run):
        model = kind.build()
    trainer = _trainer(model, run, weights)
    folder = options.output or Path()
    padded = Padded(model.stride)

    def draw(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Write the masks of a shard where it is computed; the share of each that is foreground."""
        masks = whole_logits(model, batch, padded.stride).sigmoid() >= kind.threshold
        shares = []
        # The mask's first pixel; float32 holds numbers exactly up to 16,777,216 pictures.
        numbers = batch["masks"][:, 0, 0].to(torch.int64).tolist()
        for mask, number, size in zip(masks, numbers, batch["sizes"].tolist(), strict=True):
            pixels = mask[: size[0], : size[1]].cpu()
            path = folder / _mask_name(inputs.names[number])
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = Image.fromarray(np.where(pixels.numpy(), 255, 0).astype(np.uint8))
            # Whole or not at all, so that nothing half-written lies there after a stop.
            with aside_of(path) as file:
                drawn.save(file, format="PNG", pnginfo=made_here(MASK_NOTE))
            shares.append(pixels.to(torch.float64).mean())
        return {"share": torch.stack(shares)}

    shares = trainer.predict(
        draw,
        _NumberedPictures(inputs.paths, kind.normalise, kind.white),
        batch_size=options.batch_size or 8,
        workers=options.workers,
        collate=padded,
    )["share"]
    return [
        {"file": name, "mask": _mask_name(name), "share": share}
        for name, share in zip(inputs.names, shares.tolist(), strict=True)
    ]


_PREDICTORS: dict[str, Callable[[Path, Path, _Inputs, PredictOptions], list[dict[str, Any]]]] = {
    classify.JOB: _predict_pictures,
    segment.JOB: _predict_masks,
    text.JOB: _predict_texts,
}


_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet takes for the start of a formula; the last four are East Asian wide forms."""
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_QUOTED = ',;"\t\r\n'
_BEGINNINGS = (
    b"file,class,confidence", b"file,line,text,class,confidence", b"file,mask,share",
    b'[\n {\n  "file": ', b"[]",
)  # fmt: skip
"""How files of predictions begin."""
MASK_NOTE = "onefold predict"
"""Stands in the PNG of each mask as the software that made it, and so marks our own."""


def as_json(rows: list[dict[str, Any]]) -> str:
    """Format predictions as a JSON list of objects."""
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Format predictions as CSV, one line a sample; each further class has columns of its own."""
    # All rows have the names of the first: a run has one number of classes, and --top is one.
    flat = [_flat(row) for row in rows]
    lines = [list(flat[0]) if flat else [], *(list(row.values()) for row in flat)]
    return "".join(",".join(_cell(value) for value in line) + "\n" for line in lines)


def _cell(value: object) -> str:
    """Format a value as a cell that no spreadsheet takes for a formula.

    Texts that look like one get an apostrophe in front, unless they are plain numbers. Characters
    that could end the cell are quoted.

    Source: OWASP, CSV Injection.
    """
    text = str(value)
    formula = isinstance(value, str) and text.startswith(_FORMULAS) and not _NUMBER.fullmatch(text)
    if formula:
        text = f"'{text}"
    if formula or any(letter in text for letter in _QUOTED):
        return '"' + text.replace('"', '""') + '"'
    return text


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    # The surest class has the plain names, so that a file of one class has no numbered columns.
    values = {name: value for name, value in row.items() if name != "classes"}
    for place, each in enumerate(row.get("classes", ()), start=1):
        suffix = "" if place == 1 else f"_{place}"
        values[f"class{suffix}"] = each["class"]
        values[f"confidence{suffix}"] = f"{each['confidence']:.6f}"
    return values


def require_predictions(path: Path) -> None:
    """Refuse to write over a file that holds something other than predictions."""
    require_ours(
        path,
        lambda head: head.startswith(_BEGINNINGS),
        f"--output {path}: expected a new file, or predictions of before",
    )


def require_mask(path: Path, folder: Path) -> None:
    """Refuse to write over a file that is not one of our masks, or through a link."""
    # Each folder on the way, as a linked one would take the masks out of the output folder. What is
    # above that is the user's choice.
    for above in path.parents:
        if above == folder:
            break
        if above.is_symlink():
            raise ValueError(
                f"--output {folder}: expected folders of its own, {above} is a link: remove it, or "
                f"name another folder"
            )
    require_ours(
        path,
        lambda head: MASK_NOTE.encode() in head,
        f"--output {folder}: expected new masks, or masks of before",
    )

"""Uses a trained run on new files, on any number of devices: the output does not depend on it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import onefold
from onefold.data.augment import LabelledPictures, Normalise
from onefold.data.bad import BadFile, refuse
from onefold.data.pictures import PictureFiles, open_picture, require_pillow
from onefold.data.scan import Scanning, scan_pictures
from onefold.data.tsv import split_lines
from onefold.data.walk import picture_paths
from onefold.errors import CheckpointError, DataError
from onefold.jobs import classify, segment, text
from onefold.jobs.finetune import best_checkpoint
from onefold.jobs.progress import ReadingBar
from onefold.jobs.runfolder import CHECKPOINTS, read_run, require_writable
from onefold.jobs.segment_pictures import Padded, whole_logits
from onefold.jobs.tokens import EncodedTexts

__all__ = ["Format", "PredictOptions", "Prediction", "predict_run", "write_prediction"]

Format = Literal["csv", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """How to use a run."""

    devices: str = "auto"
    """As for training."""
    output: Path | None = None
    """File of the predictions, or folder of the masks; None for the screen."""
    format: Format | None = None
    """None: by the ending of ``output``, else CSV."""
    weights: Literal["best", "last"] = "best"
    """Which checkpoint of the run."""
    top: int = 1
    """How many classes are told of each file, the surest first."""
    batch_size: int | None = None
    """Samples of a batch, over all devices; None for that of the job's tests."""
    workers: int = 0
    """Processes that read ahead, for each device."""
    skip_bad: bool = False
    """Leave out what cannot be read."""

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("batch_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected {least} or more")

    @property
    def chosen_format(self) -> Format:
        """CSV or JSON."""
        if self.format:
            return self.format
        return "json" if self.output and self.output.suffix == ".json" else "csv"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What came of it."""

    rows: list[dict[str, Any]]
    """One for each sample, in the order of the input."""
    left_out: list[BadFile]
    """What could not be read."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What is to be looked at: files, or lines of files."""

    paths: list[Path]
    names: list[str]
    """Of each, from where it was found."""
    texts: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    left_out: list[BadFile] = field(default_factory=list)


def predict_run(run: Path, paths: Sequence[Path], options: PredictOptions) -> Prediction:
    """Use a run's model on files and folders.

    Args:
        run: folder of a run.
        paths: files or folders of pictures; for texts, files with one text a line.
        options: how.

    Raises:
        DataError: it is no run, a path is not there, or a file cannot be read.
        CheckpointError: the run has no weights yet.
        ValueError: an option does not suit the run.
    """
    job = str(read_run(run).get("job"))
    if job not in _PREDICTORS:
        raise DataError(f"{run}: expected a run of {', '.join(_PREDICTORS)}, got {job}")
    weights = best_checkpoint(run) if options.weights == "best" else _last_checkpoint(run)
    _check_output(job, options.output)
    inputs = _read(job, paths)
    if not options.skip_bad:
        refuse(inputs.left_out)
    if not inputs.paths:
        raise DataError(f"{', '.join(map(str, paths))}: expected something to look at, found none")
    _check_inputs_stay(job, inputs, options.output)
    rows: list[dict[str, Any]] = onefold.launch(
        _predict, devices=options.devices, args=(job, run, weights, inputs, options)
    )
    return Prediction(rows, inputs.left_out)


def _last_checkpoint(run: Path) -> Path:
    """The folder of a run's newest weights."""
    files = (run / CHECKPOINTS).glob("step-*/model.safetensors")
    folders = [file.parent for file in files if file.parent.name[len("step-") :].isdecimal()]
    if not folders:
        raise CheckpointError(f"{run / CHECKPOINTS}: expected the run's checkpoints, found none")
    return max(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def write_prediction(
    prediction: Prediction, options: PredictOptions, screen: TextIO
) -> Path | None:
    """Write the rows where the options say: the file, or None for the screen."""
    json_wanted = options.chosen_format == "json"
    content = _as_json(prediction.rows) if json_wanted else _as_csv(prediction.rows)
    if options.output is None:
        screen.write(content.encode(errors="backslashreplace").decode())
        return None
    path = options.output
    if prediction.rows and "mask" in prediction.rows[0]:
        path = path / f"masks.{options.chosen_format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    # Names of files may be no UTF-8: CSV takes their bytes as they are, JSON cannot.
    aside.write_bytes(
        content.encode(errors="backslashreplace" if json_wanted else "surrogateescape")
    )
    os.replace(aside, path)
    return path


def _as_json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def _as_csv(rows: list[dict[str, Any]]) -> str:
    """One line a sample; further classes have columns of their own."""
    flat = [_flat(row) for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in row.items() if name != "classes"}
    for place, each in enumerate(row.get("classes", ()), start=1):
        suffix = "" if place == 1 else f"_{place}"
        values[f"class{suffix}"] = each["class"]
        values[f"confidence{suffix}"] = f"{each['confidence']:.6f}"
    return values


def _read(job: str, paths: Sequence[Path]) -> _Inputs:
    if job == text.JOB:
        return _read_texts(paths)
    return _read_pictures(paths, masks=job == segment.JOB)


def _read_pictures(paths: Sequence[Path], *, masks: bool) -> _Inputs:
    """All pictures of files and folders; each is read once, to see whether it can be."""
    require_pillow()
    found: dict[Path, str] = {}
    bad: list[BadFile] = []
    for path in paths:
        if path.is_dir():
            for each in picture_paths(path, bad):
                found.setdefault(each, str(each.relative_to(path)))
        elif path.is_file():
            found.setdefault(path, path.name)
        else:
            raise DataError(f"{path}: expected a file or folder, there is none")
    if not masks and len(set(found.values())) < len(found):
        found = {path: str(path) for path in found}  # or nobody could tell them apart
    files = list(found)
    with ReadingBar() as bar:
        facts = scan_pictures(files, scanning=Scanning(watch=bar.watch))
    sound = [files[number] for number in facts.sound]
    return _Inputs(sound, [found[path] for path in sound], left_out=[*bad, *facts.bad])


def _read_texts(paths: Sequence[Path]) -> _Inputs:
    """One text from each line; in a line with a tab, what is before it."""
    inputs = _Inputs([], [])
    for path in paths:
        if not path.is_file():
            came = "a folder" if path.is_dir() else "nothing there"
            raise DataError(f"{path}: expected a file with one text a line, got {came}")
        for number, content in enumerate(split_lines(path.read_bytes()), start=1):
            try:
                line = content.decode().partition("\t")[0]
            except UnicodeDecodeError:
                inputs.left_out.append(BadFile(path, "expected UTF-8", number))
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
    """Refuse now what could not be written after all the work."""
    if job != segment.JOB:
        if output is not None and output.is_dir():
            raise ValueError(
                f"--output {output}: expected a file for the predictions, not a folder"
            )
    elif output is None:
        raise ValueError("expected --output with a folder for the masks")
    elif output.exists() and not output.is_dir():
        raise ValueError(f"--output {output}: expected a folder for the masks, this is a file")
    if output is not None:
        folder = output if job == segment.JOB else output.parent
        require_writable(folder, "--output names another one")


def _check_inputs_stay(job: str, inputs: _Inputs, output: Path | None) -> None:
    """Refuse to write over what is read."""
    if output is None:
        return
    if job == segment.JOB:
        _check_masks(inputs)
        written = {(output / _mask_name(name)).resolve() for name in inputs.names}
    else:
        written = {output.resolve()}
    for path in inputs.paths:
        if path.resolve() in written:
            raise ValueError(f"--output {output}: expected another place, {path} would be lost")


def _check_masks(inputs: _Inputs) -> None:
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
) -> list[dict[str, Any]]:
    """On every device."""
    return _PREDICTORS[job](run, weights, inputs, options)


def _trainer(model: nn.Module, run: Path, weights: Path) -> onefold.Trainer:
    """A trainer that holds a model and never makes a step."""
    onefold.load_weights(model, weights)
    *others, last = model.parameters()
    for parameter in others:
        parameter.requires_grad_(False)  # or there would be room for their gradients
    optimizer = torch.optim.SGD([last], lr=0.0)
    shards = int(read_run(run)["shards"])
    return onefold.Trainer(model, optimizer, _no_loss, shards=shards)


def _no_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    raise NotImplementedError("a run that only predicts makes no step")


def _classes(said: torch.Tensor, classes: Sequence[str], top: int) -> list[list[dict[str, Any]]]:
    """For each sample the surest classes; of equals the first.

    Args:
        said: (n, classes) float32.
        classes: their names.
        top: how many.
    """
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
    trainer = _trainer(kind.build(), run, weights)
    pictures = PictureFiles(inputs.paths, Path(), kind.white)
    data = LabelledPictures(
        pictures, [0] * len(pictures), kind.mode, kind.test_changes, kind.normalise
    )
    said = trainer.predict(
        classify.confidences,
        data,
        batch_size=options.batch_size or classify.EVALUATION_BATCH_SIZE,
        workers=options.workers,
    )["confidence"]
    rows = zip(inputs.names, _classes(said, kind.classes, options.top), strict=True)
    return [{"file": name, "classes": classes} for name, classes in rows]


def _predict_texts(
    run: Path, weights: Path, inputs: _Inputs, options: PredictOptions
) -> list[dict[str, Any]]:
    kind = text.TextModel.of_run(run)
    trainer = _trainer(text.build_of_run(run), run, weights)
    data = EncodedTexts(kind.encode(inputs.texts), [0] * len(inputs.texts))
    said = trainer.predict(
        text.confidences,
        data,
        batch_size=options.batch_size or text.EVALUATION_BATCH_SIZE,
        workers=options.workers,
        collate=kind.collate,
    )["confidence"]
    found = _classes(said, kind.classes, options.top)
    columns = zip(inputs.names, inputs.lines, inputs.texts, found, strict=True)
    return [
        {"file": name, "line": line, "text": words, "classes": classes}
        for name, line, words, classes in columns
    ]


class _NumberedPictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Whole pictures with their number where a mask would be."""

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
    model = kind.build()
    trainer = _trainer(model, run, weights)
    folder = options.output or Path()
    padded = Padded(model.stride)

    def draw(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Write the masks of a shard where it is computed; the share of each that is foreground."""
        said = whole_logits(model, batch, padded.stride).sigmoid() >= kind.threshold
        shares = []
        numbers = batch["masks"][:, 0, 0].to(torch.int64).tolist()
        for mask, number, size in zip(said, numbers, batch["sizes"].tolist(), strict=True):
            pixels = mask[: size[0], : size[1]].cpu()
            path = folder / _mask_name(inputs.names[number])
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = Image.fromarray(np.where(pixels.numpy(), 255, 0).astype(np.uint8))
            aside = path.with_name(f".{path.name}.new")
            drawn.save(aside, format="PNG")
            os.replace(aside, path)
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

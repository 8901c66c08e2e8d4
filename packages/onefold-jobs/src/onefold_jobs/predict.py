"""Uses a trained run on new files, and writes what it predicts: the same on any devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import msgspec
import numpy as np
import torch
from torch import nn

import onefold
from onefold.errors import CheckpointError, DataError, OnefoldError
from onefold.files import aside_of, write_whole
from onefold.weights import check_weights
from onefold_jobs import classify_job, require, segment_job, text_job
from onefold_jobs.data.augment import LabeledPictures
from onefold_jobs.data.classes import listed_files
from onefold_jobs.data.files import BadFile, name_below, refuse
from onefold_jobs.data.labels import Label, numbered, spelled
from onefold_jobs.data.maskclasses import colored_mask
from onefold_jobs.data.pictures import ArrayPictures, PictureFiles, picture_paths
from onefold_jobs.data.scan import Scanning, Seen, notes_of, scan_pictures
from onefold_jobs.data.tables import Columns, is_table, read_table
from onefold_jobs.data.tsv import decoded, read_lines
from onefold_jobs.finetune import KeptModel, chosen_checkpoint, load_finite
from onefold_jobs.options import COUNT, MOST_SHARDS, again, check_limits, option, read_config
from onefold_jobs.predictions import (
    MASK_NOTE,
    as_csv,
    as_json,
    require_mask,
    require_predictions,
)
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import CONFIG, kept_facts, read_run, require_writable
from onefold_jobs.scores import Measured
from onefold_jobs.segment_pictures import Padded, predicted_numbers, whole_logits
from onefold_jobs.targets import Answer, Target, target_measure, target_rows, targets
from onefold_jobs.text_models import EncodedTexts
from onefold_jobs.words import tell

__all__ = [
    "Input",
    "PredictOptions",
    "Predicted",
    "Prediction",
    "Use",
    "check_files_stay",
    "chosen_weights",
    "columns_of",
    "predict_run",
    "readable_pictures",
    "require_output",
    "start",
    "white_of_run",
    "write_prediction",
]


Format = Literal["csv", "json"]
_OF_RUN = "that of the run, or the one of a usual name"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """How to use a run."""

    devices: str = again("devices", "auto")
    output: Path | None = option(
        None, "File for the predictions, or folder for masks.", shown="the screen"
    )
    format: Format | None = option(
        None, "Format of the predictions.", shown="by the ending of --output, or csv"
    )
    json: bool = option(False, "Print JSON: short for --format json.")
    weights: Literal["best", "last"] = option("best", "Checkpoint of the run to use.")
    top: int = option(1, "How many classes to report for each, the surest first.", COUNT)
    batch_size: int | None = again(
        "batch_size", shown="that of the job's evaluation", heading="Devices"
    )
    workers: int = again("workers", 0)
    text_column: str | None = option(
        None, "Column of the texts in a table, or several: title,body.", shown=_OF_RUN
    )
    image_column: str | None = option(
        None, "Column with the paths of the pictures in a table.", shown=_OF_RUN
    )
    skip_bad: bool = option(False, "Leave out what cannot be read, rather than refuse it.")

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result of `predict_run`."""

    rows: list[dict[str, Any]]
    """One row for each sample, in the order of the input."""
    left_out: list[BadFile]
    """Files and lines that could not be read."""


@dataclass(frozen=True, slots=True)
class Input:
    """What to predict: a picture, or a line of a text file."""

    path: Path
    name: str
    """The name of the file, counted from the path that was given."""
    text: str = ""
    line: int = 0
    label: Label = ""
    """The name of its class, or what else it is labeled with; empty where that is not known."""
    mask: Path | None = None
    """The mask that it should have, where that is known."""

    @property
    def row(self) -> dict[str, Any]:
        """What its prediction begins with."""
        where = {"line": self.line, "text": self.text} if self.line else {}
        return {"file": self.name, **where}


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
    masks = job == segment_job.JOB
    weights = chosen_weights(run, options)
    require_output(options.output, masks=masks)
    # The inputs are read whole only after everything that is quickly refused.
    columns = columns_of(run, "text" if job == text_job.JOB else "image", options)
    if job == text_job.JOB:
        inputs, left_out = _read_texts(paths, columns)
    else:
        inputs, left_out = _read_pictures(run, paths, columns, masks=masks)
    if not options.skip_bad:
        refuse(left_out, inputs)
    if not inputs:
        raise DataError(f"{', '.join(map(str, paths))}: expected {columns.kind}s, found none")
    if options.output is not None:
        check_files_stay(inputs, options.output, masks=masks)
    rows, _ = start(Use(job, run, weights, inputs, options))
    return Prediction(rows, left_out)


def chosen_weights(run: Path, options: PredictOptions) -> Path:
    """Find the checkpoint of a run that is to be used, and compare it with its digests.

    Raises:
        CheckpointError: the run has no weights yet, or they are damaged.
        DataError: the folder is not that of a run, or its ``run.json`` is damaged.
        ValueError: the run has not one class for each sample, of which several could be reported.
    """
    if options.top > 1:
        job = str(read_run(run).get("job"))
        task = "masks" if job == segment_job.JOB else read_config(run / CONFIG, job).get("task")
        if task not in (None, "single-label"):
            raise ValueError(f"--top {options.top}: expected a run of one class for each sample")
    weights = chosen_checkpoint(run, options.weights)
    # Every byte is compared now, rather than by each device after all the rest.
    check_weights(weights)
    return weights


def start(use: Use) -> Predicted:
    """Use a run on the devices that the options name.

    Returns:
        One row for each input, in their order, and what was measured of each.

    Raises:
        CheckpointError: the weights are not finite, or do not fit.
        DataError: the run's description of its model is damaged.
    """
    found: Predicted | OnefoldError = onefold.launch(
        _predict, devices=use.options.devices, args=(use,)
    )
    if isinstance(found, OnefoldError):
        raise found
    return found


def write_prediction(
    prediction: Prediction, options: PredictOptions, screen: TextIO
) -> Path | None:
    """Write the rows where the options say; return the file, or None if they were printed."""
    path = options.output
    is_json = options.json or (path is not None and path.suffix == ".json")
    format = options.format or ("json" if is_json else "csv")
    content = as_json(prediction.rows) if format == "json" else as_csv(prediction.rows)
    if path is None:
        # A file name that is not UTF-8 has lone surrogates in it, which no screen can print.
        screen.write(content.encode(errors="backslashreplace").decode())
        return None
    if prediction.rows and "mask" in prediction.rows[0]:
        path /= f"masks.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    require_predictions(path)
    # File names may not be UTF-8: CSV takes their bytes as they are, JSON cannot.
    encoded = content.encode(errors="backslashreplace" if format == "json" else "surrogateescape")
    # Not synced: after a power failure, predictions can be made again.
    write_whole(path, encoded, sync=False)
    return path


def _read_pictures(
    run: Path, paths: Sequence[Path], columns: Columns, *, masks: bool
) -> tuple[list[Input], list[BadFile]]:
    """Find all pictures, and read each once; return those that can be read, and the others."""
    require("reading pictures", "images", "PIL")
    classes = {*map(str, read_run(run).get("classes") or ())}
    found: dict[Path, Input] = {}
    bad: list[BadFile] = []
    # By path, so that a file that was named, and its folder as well, counts once.
    for path in paths:
        if is_table(path):
            rows, wrong, _ = read_table(path, columns, None)
            bad += wrong
            for each, label in listed_files(rows, path, bad):
                found.setdefault(each, Input(each, name_below(each, path.parent), label=str(label)))
        elif path.is_dir():
            for each in picture_paths(path, bad):
                name = each.relative_to(path)
                # The innermost folder that is named as a class.
                label = next((part for part in name.parts[-2::-1] if part in classes), "")
                found.setdefault(each, Input(each, str(name), label=label))
        elif path.is_file():
            found.setdefault(path, Input(path, path.name))
        else:
            raise DataError(f"{path}: expected a file or folder, there is none")
    inputs = [*found.values()]
    if not masks and len({each.name for each in inputs}) < len(inputs):
        # Of one name in several folders: nobody could tell their rows apart.
        inputs = [replace(each, name=str(each.path)) for each in inputs]
    return readable_pictures(run, inputs, bad), bad


def readable_pictures(run: Path, inputs: Sequence[Input], bad: list[BadFile]) -> list[Input]:
    """Read each picture once; return those that the run can use, and add the others to ``bad``."""
    with reading_bar() as watch:
        scanning = Scanning(watch=watch, white=white_of_run(run))
        seen = scan_pictures([each.path for each in inputs], scanning=scanning)
    bad += [each for each in seen if isinstance(each, BadFile)]
    for note in notes_of([each.look for each in seen if isinstance(each, Seen)]):
        tell(note)
    return [one for one, each in zip(inputs, seen, strict=True) if isinstance(each, Seen)]


def white_of_run(run: Path) -> int:
    """The white of a run's pictures; 0, for the usual one of each, if they have 8 bits."""
    masks = read_run(run).get("job") == segment_job.JOB
    kind = segment_job.MaskModel if masks else classify_job.PictureModel
    return kind.of_run(run).white or 0


def columns_of(run: Path, kind: str, options: PredictOptions) -> Columns:
    """The columns that were named, and otherwise those of the tables that a run was trained on.

    Args:
        run: folder of the run.
        kind: what the samples are.
        options: the names of columns are read.

    Raises:
        DataError: the run's ``run.json`` is damaged.
    """
    kept = read_run(run).get("columns")
    with kept_facts(run):
        columns = msgspec.convert(kept, Columns) if kept else Columns(kind)
    named = options.text_column if kind == "text" else options.image_column
    return columns._replace(sample=named or columns.sample)


def _read_texts(paths: Sequence[Path], columns: Columns) -> tuple[list[Input], list[BadFile]]:
    """Read one text from each line, and the label behind its tab, if it has one.

    Args:
        paths: of the files; a table has a text in each row.
        columns: where they are in a table.
    """
    inputs: list[Input] = []
    bad: list[BadFile] = []
    for path in paths:
        if is_table(path):
            rows, wrong_rows, _ = read_table(path, columns, None)
            inputs += [Input(path, str(path), x.text, x.line_number, str(x.label)) for x in rows]
            bad += wrong_rows
            continue
        if not path.is_file():
            came = "a folder" if path.is_dir() else "nothing there"
            raise DataError(f"{path}: expected a file with one text a line, got {came}")
        for number, content in enumerate(read_lines(path), start=1):
            try:
                line, *labels = decoded(content).split("\t")
                if not line.strip():
                    raise ValueError("expected a text, got none")
                # More columns are something else.
                label = labels[0].strip() if len(labels) == 1 else ""
                inputs.append(Input(path, str(path), line, number, label))
            except ValueError as wrong:
                bad.append(BadFile(path, str(wrong), number))
    return inputs, bad


def require_output(output: Path | None, *, masks: bool) -> None:
    """Refuse an output that could not be written after all the work."""
    if output is None:
        if masks:
            raise ValueError("expected --output with a folder for the masks")
        return
    if output.exists() and output.is_dir() != masks:
        kinds = "a file for the predictions, not a folder", "a folder for the masks, this is a file"
        raise ValueError(f"--output {output}: expected {kinds[masks]}")
    require_writable(output if masks else output.parent, "--output names another one")


def check_files_stay(inputs: Sequence[Input], output: Path, *, masks: bool) -> None:
    """Refuse to write over the inputs, or over files that are not ours."""
    drawn = _mask_paths(inputs, output) if masks else {}
    # Resolved: the same file may have been named by two paths, or by a link.
    written = {path.resolve() for path in drawn or [output]}
    for each in inputs:
        if each.path.resolve() in written:
            raise ValueError(
                f"--output {output}: expected another place, {each.path} would be lost"
            )
    for mask in drawn:
        require_mask(mask, output)
    for table in [output / f"masks.{each}" for each in ("csv", "json")] if masks else [output]:
        require_predictions(table)


def _mask_paths(inputs: Sequence[Input], output: Path) -> dict[Path, Input]:
    """The input of every mask that is to be written; refuses two of one name."""
    # Masks are PNG files: a.jpg and a.png in one folder would share a single one.
    masks: dict[Path, Input] = {}
    for each in inputs:
        name = _mask_name(each.name)
        other = masks.setdefault(output / name, each)
        if other is not each:
            raise DataError(
                f"{each.path} and {other.path} would have a mask of the same name, {name}: predict "
                f"them into folders of their own"
            )
    return masks


def _mask_name(name: str) -> str:
    return str(Path(name).with_suffix(".png"))


Predicted = tuple[list[dict[str, Any]], Measured]
"""A row for each sample, and what it was made of."""


class _Kept(msgspec.Struct):
    """What is needed of any run's ``run.json``."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=MOST_SHARDS)]


@dataclass(frozen=True, slots=True)
class Use:
    """What every device needs to use a run."""

    job: str
    run: Path
    weights: Path
    inputs: list[Input]
    options: PredictOptions
    scored: Callable[[Use], Predicted] | None = None
    """What computes the rows, if they are for scores; None predicts as the job does."""
    arrays: ArrayPictures | None = None
    """The pictures, where they lie in no files."""

    def pictures(self) -> Predicted:
        """The classes of pictures."""
        kind, model = classify_job.PictureModel.built(self.run)
        data = LabeledPictures(
            self.arrays or self._files(kind),
            self._labels(kind.classes, kind.target),
            kind.mode,
            kind.test_changes,
            kind.normalize,
        )
        return self._rows(model, classify_job.answer, data, kind)

    def texts(self) -> Predicted:
        """The classes of texts."""
        kind = text_job.TextModel.of_run(self.run)
        ids = kind.encode([each.text for each in self.inputs])
        data = EncodedTexts(ids, self._labels(kind.classes, kind.target))
        return self._rows(kind.build(self.run), text_job.answer, data, kind, kind.collate)

    def _rows(
        self,
        model: nn.Module,
        answer: Answer,
        data: LabeledPictures | EncodedTexts,
        kind: classify_job.PictureModel | text_job.TextModel,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Predicted:
        """Report the number of each sample, or its classes: all that it has, or the surest."""
        found = self.measured(model, target_measure(answer, kind.target), data, collate)
        rows = target_rows(found, kind.target, kind.classes, self.options.top)
        labeled = any(each.label != "" for each in self.inputs)
        return [
            {**each.row, **({"label": spelled(each.label)} if labeled else {}), **own}
            for each, own in zip(self.inputs, rows, strict=True)
        ], found

    def masks(self) -> Predicted:
        """Masks, which are written, and the share of each that is foreground."""
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        note = PngInfo()
        note.add_text("Software", MASK_NOTE)
        kind, model = segment_job.MaskModel.built(self.run)
        padded, folder = Padded(model.stride), self.options.output or Path()

        def draw(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            """Write the masks of a shard where it is computed; return the share of each."""
            logits = whole_logits(model, batch, padded.stride)
            masks = predicted_numbers(logits, kind.threshold)
            shares = []
            # The mask's first pixel; float32 holds numbers exactly up to 16,777,216 pictures.
            numbers = batch["masks"][:, 0, 0].to(torch.int64).tolist()
            for mask, number, size in zip(masks, numbers, batch["sizes"].tolist(), strict=True):
                pixels = mask[: size[0], : size[1]].cpu()
                path = folder / _mask_name(self.inputs[number].name)
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

        numbers = range(len(self.inputs))
        data = LabeledPictures(self._files(kind), numbers, "RGB", (), kind.normalize)
        collate = partial(_numbered, padded=padded)
        size = segment_job.EVALUATION_BATCH_SIZE
        found = self.measured(model, draw, data, collate, batch_size=size)
        # Of two values, the share of the foreground.
        names = [f"share {each.name}" for each in kind.classes] or ["share"]
        shares = found["share"][:, 0 if kind.classes else 1 :].tolist()
        return [
            {**each.row, "mask": _mask_name(each.name), **dict(zip(names, own, strict=True))}
            for each, own in zip(self.inputs, shares, strict=True)
        ], found

    def _labels(self, classes: Sequence[str], target: Target) -> Any:
        """The number of each input's class; 0 where it is not known, so that its loss is void."""
        if target.task != "single-label":
            nothing = torch.zeros(len(self.inputs), len(classes))
            if not self.scored:
                return nothing if classes else nothing.sum(dim=1)
            return targets(numbered([each.label for each in self.inputs], classes))
        numbers = {name: number for number, name in enumerate(classes)}
        return [numbers.get(spelled(each.label), 0) for each in self.inputs]

    def _files(self, kind: KeptModel) -> PictureFiles:
        return PictureFiles([each.path for each in self.inputs], Path(), kind.white)

    def measured(
        self,
        model: nn.Module,
        measure: Callable[[nn.Module, Any], Measured],
        data: Any,
        collate: Callable[[list[Any]], Any] | None,
        batch_size: int = 256,
    ) -> Measured:
        """Load the weights into the model, and measure all data by a trainer without any step."""
        load_finite(model, self.weights)
        *others, last = model.parameters()
        # A trainer sets memory aside for the gradients of all that is trained; something must be.
        for parameter in others:
            parameter.requires_grad_(False)
        # As in training: as many devices may share a batch as could then.
        shards = read_run(self.run, shape=_Kept)["shards"]
        optimizer = torch.optim.SGD([last], lr=0.0)
        return onefold.Trainer(model, optimizer, _no_loss, shards=shards).predict(
            measure,
            data,
            batch_size=self.options.batch_size or batch_size,
            workers=self.options.workers,
            collate=collate,
        )


_PREDICTORS = {classify_job.JOB: Use.pictures, segment_job.JOB: Use.masks, text_job.JOB: Use.texts}


def _predict(use: Use) -> Predicted | OnefoldError:
    """Predict, on every device; weights that cannot be used come back as a value."""
    # Raised, the error would end this device's process, and the user would see a traceback.
    try:
        return (use.scored or _PREDICTORS[use.job])(use)
    except (CheckpointError, DataError) as error:
        return error


def _no_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    raise NotImplementedError("a run that only predicts makes no step")


def _numbered(samples: list[tuple[torch.Tensor, int]], padded: Padded) -> dict[str, torch.Tensor]:
    """Make a shard of pictures, each with its number in the place of a mask."""
    return padded([(image, torch.full((1, 1), float(number))) for image, number in samples])

"""Uses a trained run: predicts new files and scores labeled data, on any number of devices.

`predict_run` and `evaluate_run` make the predictions, and `write_prediction` writes their rows, but
never over an unrelated file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

import onefold
from onefold.cli import visible
from onefold.errors import CheckpointError, DataError, OnefoldError
from onefold.files import json_text, write_whole
from onefold.weights import check_weights
from onefold_jobs.catalog import job_of
from onefold_jobs.data.files import BadFile, readable, refuse, require_ours
from onefold_jobs.data.masks import MASK_NOTE, mask_name
from onefold_jobs.data.scan import Scanning, content_of, read_scan
from onefold_jobs.data.splits import find_folders
from onefold_jobs.finetune import chosen_checkpoint
from onefold_jobs.job import (
    EvaluateOptions,
    Input,
    Job,
    Labeled,
    Predicted,
    PredictOptions,
    RunFacts,
    Use,
    columns_of,
)
from onefold_jobs.options import from_mapping, read_config
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import CONFIG, SCAN, kept_facts, read_run, require_writable
from onefold_jobs.scores import Baseline

__all__ = [
    "EvaluateOptions",
    "Evaluation",
    "PredictOptions",
    "Prediction",
    "as_csv",
    "evaluate_run",
    "predict_run",
    "write_prediction",
]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Result of `predict_run`."""

    rows: list[dict[str, Any]]
    """One row per sample, in the order of the input."""
    left_out: list[BadFile]
    """Unreadable files and lines."""


def predict_run(run: Path, paths: Sequence[Path], options: PredictOptions) -> Prediction:
    """Predict files and folders with a run's model.

    Args:
        run: folder of the run.
        paths: files or folders of images; for text, files with one text per line.
        options: devices, checkpoint, output and so on.

    Raises:
        DataError: the folder does not contain a run, or a path is missing or cannot be read.
        CheckpointError: the run has no weights yet, or they are damaged or not finite.
        ValueError: an option does not suit the run.
    """
    job = job_of(run)
    weights = chosen_weights(run, options)
    require_output(options.output, masks=job.draws)
    # Everything that is checked quickly is checked before the inputs are read.
    columns = columns_of(run, job.sample, options)
    inputs, left_out = job.read(run, paths, columns)
    if not options.skip_bad:
        refuse(left_out, inputs)
    if not inputs:
        raise DataError(f"{', '.join(map(str, paths))}: expected {columns.kind}s, found none")
    if options.output is not None:
        check_files_stay(inputs, options.output, masks=job.draws)
    rows, _ = start(Use(run, weights, inputs, options, job.predict))
    return Prediction(rows, left_out)


def chosen_weights(run: Path, options: PredictOptions) -> Path:
    """Find the checkpoint of a run to use, and verify its digests.

    Raises:
        CheckpointError: the run has no weights yet, or they are damaged.
        DataError: the folder does not contain a run, or its ``run.json`` is damaged.
        ValueError: ``top`` is above 1, but the run does not predict one class per sample.
    """
    if options.top > 1:
        job = job_of(run)
        task = read_config(run / CONFIG, job.name).get("task")
        if job.draws or task not in (None, "single-label"):
            raise ValueError(f"--top {options.top} requires a run with one class per sample")
    weights = chosen_checkpoint(run, options.weights)
    # Verify every byte here once, rather than on each device after all the other work.
    check_weights(weights)
    return weights


def start(use: Use) -> Predicted:
    """Use a run on the devices that the options name.

    Returns:
        One row per input, in order, and the measurements.

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
    """Write the rows as the options say; return the file, or None if they were printed."""
    path = options.output
    is_json = options.json or (path is not None and path.suffix == ".json")
    format = options.format or ("json" if is_json else "csv")
    content = as_json(prediction.rows) if format == "json" else as_csv(prediction.rows)
    if path is None:
        screen.write(visible(content, "\n"))
        return None
    if prediction.rows and "mask" in prediction.rows[0]:
        path /= f"masks.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    require_predictions(path)
    # File names may not be UTF-8: CSV keeps their bytes, but JSON cannot.
    encoded = content.encode(errors="backslashreplace" if format == "json" else "surrogateescape")
    # Do not sync, because predictions can be repeated after a power failure.
    write_whole(path, encoded, sync=False)
    return path


def require_output(output: Path | None, *, masks: bool) -> None:
    """Reject an output that could not be written after all the work."""
    if output is None:
        if masks:
            raise ValueError("masks require --output with a folder")
        return
    if output.exists() and output.is_dir() != masks:
        kinds = "a file for the predictions, not a folder", "a folder for the masks, not a file"
        raise ValueError(f"--output {output}: expected {kinds[masks]}")
    require_writable(output if masks else output.parent, "name another one with --output")


def check_files_stay(inputs: Sequence[Input], output: Path, *, masks: bool) -> None:
    """Reject overwriting the inputs, or files that onefold did not write."""
    drawn = _mask_paths(inputs, output) if masks else {}
    # Resolved, because two paths or a link may name the same file.
    written = {path.resolve() for path in drawn or [output]}
    for each in inputs:
        if each.path.resolve() in written:
            raise ValueError(
                f"--output {output}: would overwrite the input {each.path}; name another one"
            )
    for mask in drawn:
        require_mask(mask, output)
    for table in [output / f"masks.{each}" for each in ("csv", "json")] if masks else [output]:
        require_predictions(table)


def _mask_paths(inputs: Sequence[Input], output: Path) -> dict[Path, Input]:
    """Return the input of every mask to write; reject two masks with the same name."""
    # Masks are PNG files: a.jpg and a.png in one folder would share one mask.
    masks: dict[Path, Input] = {}
    for each in inputs:
        name = mask_name(each.name)
        other = masks.setdefault(output / name, each)
        if other is not each:
            raise DataError(
                f"{each.path} and {other.path} would have the same mask, {name}: predict "
                f"them into separate folders"
            )
    return masks


def _predict(use: Use) -> Predicted | OnefoldError:
    """Predict, on every device. Errors about the weights are returned."""
    # Raising would end this device's process, and the user would see a traceback.
    try:
        return use.compute(use)
    except (CheckpointError, DataError) as error:
        return error


_SIGNS = "-=+@\uff1d\uff0b\uff0d\uff20"  # the last four are East Asian wide forms
_FORMULA = re.compile(
    rf"\A(?=[{_SIGNS}\t\r\n])|(?<=[,;|\t])(?=[{_SIGNS}\t\r])|(?<=[\r\n])(?=[{_SIGNS}\t])"
)
"""Positions where a spreadsheet may find the start of a formula: at the start of a cell, or after a
character that it takes for a separator, because quotes only protect our own separator."""
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_QUOTED = ',;"\t\r\n'
_BEGINNING = re.compile(
    rb"file(,line,text)?(,label)?,(class,confidence|labels,|value|mask,share|iou,dice)"
    rb'|\[\n \{\n  "file": |\[\]'
)
"""The possible beginnings of prediction files."""


def as_json(rows: list[dict[str, Any]]) -> str:
    """Format predictions as a JSON list of objects."""
    text = json.dumps(rows, indent=1, ensure_ascii=False)
    for each in {each for each in set(text) if visible(each, "\n") != each}:
        text = text.replace(each, json_text(each)[1:-1])
    return text + "\n"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Format predictions as CSV, one line per sample; each additional class has its own columns."""
    # All rows have the same names: a run has one number of classes, and --top is the same for all.
    flat = [_flat(row) for row in rows]
    lines = [list(flat[0]) if flat else [], *(list(row.values()) for row in flat)]
    return "".join(",".join(_cell(value) for value in line) + "\n" for line in lines)


def _cell(value: object) -> str:
    """Format a value as a cell that no spreadsheet takes for a formula.

    A possible start of a formula gets an apostrophe in front, unless the cell is a plain number.
    Characters that could end the cell are quoted.

    Source: OWASP, CSV Injection.
    """
    text = given = str(value)
    if isinstance(value, str) and not _NUMBER.fullmatch(text):
        text = _FORMULA.sub("'", text)
    if text != given or any(letter in text for letter in _QUOTED):
        return '"' + text.replace('"', '""') + '"'
    return text


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    # The most probable class has plain names, so that a file with one class has no numbered
    # columns.
    values = {name: value for name, value in row.items() if name != "classes"}
    for place, each in enumerate(row.get("classes", ()), start=1):
        suffix = "" if place == 1 else f"_{place}"
        values[f"class{suffix}"] = each["class"]
        values[f"confidence{suffix}"] = f"{each['confidence']:.6f}"
    return values


def require_predictions(path: Path) -> None:
    """Reject overwriting a file that does not contain predictions."""
    require_ours(
        path,
        lambda head: _BEGINNING.match(head) is not None,
        f"--output {path}: expected a new file, or earlier predictions",
    )


def require_mask(path: Path, folder: Path) -> None:
    """Reject overwriting a file that is not one of our masks, or writing through a link."""
    # Check each folder below the output folder, because a link would lead the masks out of it. The
    # folders above are the user's choice.
    for above in path.parents:
        if above == folder:
            break
        if above.is_symlink():
            raise ValueError(
                f"--output {folder}: {above} is a link, and masks are not written through links. "
                f"Remove it, or name another folder"
            )
    require_ours(
        path,
        lambda head: MASK_NOTE.encode() in head,
        f"--output {folder}: expected new masks, or earlier masks",
    )


_PATHS = ("run", "data", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of `evaluate_run`."""

    run: Path
    """Folder of the run."""
    data: Path
    """Source of the samples: a folder, or a file of texts."""
    weights: Path
    """Checkpoint that was scored."""
    prediction: Prediction
    """Predictions of all samples."""
    scores: dict[str, float]
    """Overall scores, by the job's names."""
    by_class: Sequence[dict[str, Any]] = ()
    """Scores of each class; empty for regression and for foreground masks."""
    confusion: Sequence[Sequence[int]] = ()
    """Number of samples by true class (rows) and predicted class, for single-label tasks."""
    baseline: Baseline | None = None
    """Scores of a constant prediction; None if there is no baseline."""
    warning: str | None = None
    """Warning that the model is no better than the baseline."""
    note: str | None = None
    """Note that the run was trained on these samples, or on others of the same data."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the samples, for JSON."""
        found: dict[str, Any] = {name: str(getattr(self, name)) for name in _PATHS}
        found["samples"] = len(self.prediction.rows)
        found["left_out"] = [str(each) for each in self.prediction.left_out]
        found["scores"] = self.scores
        baseline = self.baseline and msgspec.to_builtins(self.baseline)
        some = {"classes": self.by_class, "confusion": self.confusion, "baseline": baseline}
        found |= {name: value for name, value in some.items() if value}
        return {**found, "warning": self.warning, "note": self.note}


def evaluate_run(run: Path, data: Path, options: EvaluateOptions) -> Evaluation:
    """Score a run's model on labeled samples.

    Args:
        run: folder of the run.
        data: a dataset in the format of the run's job, whose test set is used, or else the share
            that the run held out; or only class folders, or ``images`` and ``masks``; for text, a
            TSV file or a folder with dev.tsv.
        options: devices, checkpoint, output and so on.

    Raises:
        DataError: the folder does not contain a run, or the data are missing, cannot be read, or
            have labels that the run does not know.
        CheckpointError: the run has no weights yet, or they are damaged or not finite.
        ValueError: an option does not suit the run.
    """
    job = job_of(run)
    facts = msgspec.convert({**read_run(run, shape=RunFacts), "run": run}, RunFacts)
    weights = chosen_weights(run, options)
    require_output(options.output, masks=False)
    found = job.labeled(run, data, facts, options)
    found, note = _unseen(job, run, data, facts, found)
    if not options.skip_bad:
        refuse(found.left_out, found.inputs)
    if not found.inputs:
        raise DataError(f"{readable(found.where)}: expected labeled samples, found none")
    if options.output is not None:
        check_files_stay(found.inputs, options.output, masks=False)
    use = Use(run, weights, found.inputs, options, job.score, True, found.arrays)
    rows, measured = start(use)
    with kept_facts(run):
        scores = job.sum_up(measured, [each.label for each in found.inputs], facts)
    prediction = Prediction(rows, found.left_out)
    return Evaluation(
        run=run, data=found.where, weights=weights, prediction=prediction, note=note, **scores
    )


def _seen_before(run: Path, found: Labeled) -> str | None:
    """Note how many images are those of the run's own data, whatever their names."""
    contents = {seen.content for seen in read_scan(run / SCAN).values()} - {""}
    files = [each.path for each in found.inputs] if contents and found.arrays is None else []
    seen = sum(content_of(path) in contents for path in files)
    if not seen:
        return None
    return (
        f"{seen:,} of {len(files):,} images are also in the data that the run was trained and "
        f"chosen with, so it scores better here than on new images"
    )


def _unseen(
    job: Job, run: Path, data: Path, facts: RunFacts, found: Labeled
) -> tuple[Labeled, str | None]:
    """Keep only the share that the run held out of its data, and note what it was trained on."""
    config = read_config(run / CONFIG, job.name)
    # Arrays have a test set, which is scored.
    if found.arrays is None and len(found.inputs) == facts.train_samples + facts.test_samples:
        options = from_mapping(job.options, {**config, "data": str(data)}, str(run / CONFIG))
        # The job may not accept other data.
        with suppress(OnefoldError, OSError, ValueError), reading_bar() as watch:
            scanning = Scanning(known=read_scan(run / SCAN), watch=watch)
            prepared = job.prepare(options, scanning)
            tested = set(job.tested(prepared))
            unseen = [each for each in found.inputs if (each.path.resolve(), each.line) in tested]
            if prepared.digest == facts.data and unseen:
                # All other samples were left out of the run.
                return replace(found, inputs=unseen, left_out=[]), (
                    f"Only the samples of {readable(data)} that the run held out were scored, "
                    f"because it was trained on the others"
                )
    where, trained = found.where.resolve(), Path(str(config.get("data"))).resolve()
    sets = {trained}
    with suppress(OnefoldError, OSError):
        sets.add(find_folders(trained, masks=job.draws, as_is=True).train)
    if where not in sets and (where.parent, where.stem) != (trained, "train"):
        own = [trained, Path(str(config.get("dev"))).resolve()]
        return found, None if any(map(where.is_relative_to, own)) else _seen_before(run, found)
    return found, (
        f"The run was trained on samples of {readable(found.where)}, so it scores better here than "
        f"on new samples: evaluate it on samples that it has not seen"
    )

"""Uses a trained run: predicts new files, and scores labeled data; the same on any devices.

`predict_run` and `evaluate_run` do so, and `write_prediction` writes the rows of either, over no
file that is something else.
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
from onefold_jobs.data.scan import Scanning, read_scan
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
    """The result of `predict_run`."""

    rows: list[dict[str, Any]]
    """One row for each sample, in the order of the input."""
    left_out: list[BadFile]
    """Files and lines that could not be read."""


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
    job = job_of(run)
    weights = chosen_weights(run, options)
    require_output(options.output, masks=job.draws)
    # The inputs are read whole only after everything that is quickly refused.
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
    """Find the checkpoint of a run that is to be used, and compare it with its digests.

    Raises:
        CheckpointError: the run has no weights yet, or they are damaged.
        DataError: the folder is not that of a run, or its ``run.json`` is damaged.
        ValueError: the run has not one class for each sample, of which several could be reported.
    """
    if options.top > 1:
        job = job_of(run)
        task = read_config(run / CONFIG, job.name).get("task")
        if job.draws or task not in (None, "single-label"):
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
        screen.write(visible(content, "\n"))
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
        name = mask_name(each.name)
        other = masks.setdefault(output / name, each)
        if other is not each:
            raise DataError(
                f"{each.path} and {other.path} would have a mask of the same name, {name}: predict "
                f"them into folders of their own"
            )
    return masks


def _predict(use: Use) -> Predicted | OnefoldError:
    """Predict, on every device; weights that cannot be used come back as a value."""
    # Raised, the error would end this device's process, and the user would see a traceback.
    try:
        return use.compute(use)
    except (CheckpointError, DataError) as error:
        return error


_SIGNS = "-=+@\uff1d\uff0b\uff0d\uff20"  # the last four are East Asian wide forms
_FORMULA = re.compile(
    rf"\A(?=[{_SIGNS}\t\r\n])|(?<=[,;|\t])(?=[{_SIGNS}\t\r])|(?<=[\r\n])(?=[{_SIGNS}\t])"
)
"""Where a spreadsheet may find the start of a formula: in a cell, or behind what it takes for the
end of one, as quotes keep together only what is read with our own separator."""
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_QUOTED = ',;"\t\r\n'
_BEGINNING = re.compile(
    rb"file(,line,text)?(,label)?,(class,confidence|labels,|value|mask,share|iou,dice)"
    rb'|\[\n \{\n  "file": |\[\]'
)
"""How files of predictions begin."""


def as_json(rows: list[dict[str, Any]]) -> str:
    """Format predictions as a JSON list of objects."""
    text = json.dumps(rows, indent=1, ensure_ascii=False)
    for each in {each for each in set(text) if visible(each, "\n") != each}:
        text = text.replace(each, json_text(each)[1:-1])
    return text + "\n"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Format predictions as CSV, one line a sample; each further class has columns of its own."""
    # All rows have the names of the first: a run has one number of classes, and --top is one.
    flat = [_flat(row) for row in rows]
    lines = [list(flat[0]) if flat else [], *(list(row.values()) for row in flat)]
    return "".join(",".join(_cell(value) for value in line) + "\n" for line in lines)


def _cell(value: object) -> str:
    """Format a value as a cell that no spreadsheet takes for a formula.

    What looks like the start of one gets an apostrophe in front, unless the cell is a plain number.
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
        lambda head: _BEGINNING.match(head) is not None,
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


_PATHS = ("run", "data", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of `evaluate_run`."""

    run: Path
    """Folder of the run."""
    data: Path
    """Where the samples were found: a folder, or a file of texts."""
    weights: Path
    """The checkpoint that was scored."""
    prediction: Prediction
    """What was predicted of each sample."""
    scores: dict[str, float]
    """Of all samples, by the names that the job has for them."""
    by_class: Sequence[dict[str, Any]] = ()
    """Each class with its scores; none for numbers, and for masks of one foreground."""
    confusion: Sequence[Sequence[int]] = ()
    """Number of samples by true class (rows) and predicted class, where a sample has one."""
    baseline: Baseline | None = None
    """What answering alike for every sample scores here; None if there is no such thing."""
    warning: str | None = None
    """That the model is no better than the baseline."""
    note: str | None = None
    """That the run was trained on these samples, or on others of the same data."""

    def as_dict(self) -> dict[str, Any]:
        """All but the samples, for JSON."""
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
        run: folder of a run.
        data: a data set as the run's job reads it, of which the test set is used, or the share that
            the run held out; or class folders, or ``images`` and ``masks``, alone; for texts, a TSV
            file or a folder with dev.tsv.
        options: devices, checkpoint, output and the like.

    Raises:
        DataError: the folder is not that of a run, or the data are missing, cannot be read, or have
            labels that the run does not know.
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


def _unseen(
    job: Job, run: Path, data: Path, facts: RunFacts, found: Labeled
) -> tuple[Labeled, str | None]:
    """Of the data of a run, the share that it held out; and a note of what it was trained with."""
    config = read_config(run / CONFIG, job.name)
    # Of arrays, those of the test set are scored.
    if found.arrays is None and len(found.inputs) == facts.train_samples + facts.test_samples:
        options = from_mapping(job.options, {**config, "data": str(data)}, str(run / CONFIG))
        # Other data may be none that the job takes.
        with suppress(OnefoldError, OSError, ValueError), reading_bar() as watch:
            scanning = Scanning(known=read_scan(run / SCAN), watch=watch)
            prepared = job.prepare(options, scanning)
            tested = set(job.tested(prepared))
            unseen = [each for each in found.inputs if (each.path.resolve(), each.line) in tested]
            if prepared.digest == facts.data and unseen:
                # Whatever else is there was left out of the run.
                return replace(found, inputs=unseen, left_out=[]), (
                    f"Only the samples of {readable(data)} that the run held out were scored: it "
                    f"was trained on the others"
                )
    where, trained = found.where.resolve(), Path(str(config.get("data"))).resolve()
    sets = {trained}
    with suppress(OnefoldError, OSError):
        sets.add(find_folders(trained, masks=job.draws, as_is=True).train)
    if where not in sets and (where.parent, where.stem) != (trained, "train"):
        return found, None
    return found, (
        f"The run was trained with samples of {readable(found.where)}, so that it scores better "
        f"here than on new ones: evaluate it on samples that it has not seen"
    )

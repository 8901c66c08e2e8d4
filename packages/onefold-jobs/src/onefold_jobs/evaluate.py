"""Scores a trained run on samples whose labels are known: the same on any number of devices.

The samples are predicted as by `onefold_jobs.predict`; here are their labels, and what the
predictions amount to. `evaluate_run` does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from onefold.errors import DataError, OnefoldError
from onefold_jobs import classify_job, require, segment_job, text_job
from onefold_jobs.catalog import JOBS
from onefold_jobs.data.arrays import read_labeled
from onefold_jobs.data.classes import class_files, listed_files, test_folder
from onefold_jobs.data.files import BadFile, name_below, readable, refuse
from onefold_jobs.data.labels import Label, divided, numbered, parts_of, separator, spelled
from onefold_jobs.data.maskclasses import MaskClass
from onefold_jobs.data.masks import MaskRule
from onefold_jobs.data.pairs import Pair, read_pairs_to_test
from onefold_jobs.data.pictures import ArrayPictures, require_folder
from onefold_jobs.data.samples import files_to_test, read_to_score
from onefold_jobs.data.scan import Scanning, read_scan
from onefold_jobs.data.tsv import Line
from onefold_jobs.options import from_mapping, option, read_config
from onefold_jobs.predict import (
    Input,
    Predicted,
    Prediction,
    PredictOptions,
    Use,
    check_files_stay,
    chosen_weights,
    columns_of,
    readable_pictures,
    require_output,
    start,
    white_of_run,
)
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import CONFIG, SCAN, kept_facts, read_run
from onefold_jobs.scores import Baseline, Measured, class_baseline, no_better
from onefold_jobs.segment_pictures import (
    Padded,
    PicturePairs,
    class_ious,
    mask_baseline,
    mask_scores,
    mask_scores_of_each,
)
from onefold_jobs.targets import (
    Target,
    class_scores,
    label_baseline,
    label_table,
    number_baseline,
    scores_of,
)
from onefold_jobs.words import listed

__all__ = ["EvaluateOptions", "Evaluation", "evaluate_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions(PredictOptions):
    """How to score a run."""

    output: Path | None = option(
        None, "File for the label and the prediction of every sample.", shown="none"
    )
    label_column: tuple[str, ...] = option(
        (), "Column of the labels in a table.", shown="that of the run, or the one of a usual name"
    )
    json: bool = option(False, "Print the scores as JSON.")


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
        found: dict[str, Any] = {
            "run": str(self.run),
            "data": str(self.data),
            "weights": str(self.weights),
            "samples": len(self.prediction.rows),
            "left_out": [str(each) for each in self.prediction.left_out],
            "scores": self.scores,
        }
        if self.by_class:
            found["classes"] = self.by_class
        if self.confusion:
            found["confusion"] = self.confusion
        if self.baseline is not None:
            found["baseline"] = msgspec.to_builtins(self.baseline)
        return {**found, "warning": self.warning, "note": self.note}


class _Facts(msgspec.Struct):
    """What is needed of a run's ``run.json``."""

    job: str
    data: str = ""
    classes: tuple[str, ...] = ()
    score: str = ""
    class_counts: tuple[list[int], list[int]] | None = None
    train_samples: int = 0
    test_samples: int = 0
    pos_weight: float = 1.0
    mask_model: dict[str, Any] = {}
    picture_model: dict[str, Any] = {}
    text_model: dict[str, Any] = {}

    @property
    def target(self) -> Target:
        """What is predicted."""
        kept = (self.picture_model or self.text_model).get("target", {})
        return msgspec.convert(kept, Target)

    def known(self, label: Label) -> bool:
        """Whether a label is of classes of the run, or a number."""
        return all(name in self.classes for name in parts_of(label))

    def divided(self, labels: Sequence[Label]) -> Sequence[Label]:
        """Divide labels of several classes as in training: at a sign that is in no class."""
        if self.target.task != "multi-label":
            return labels
        sign = separator(labels, spaces=False) or " "
        sign = "" if any(sign in name for name in self.classes) else sign
        return [divided(label, sign) for label in labels]


@dataclass(frozen=True, slots=True)
class _Labeled:
    """Samples whose labels are known."""

    where: Path
    inputs: list[Input]
    left_out: list[BadFile]
    arrays: ArrayPictures | None = None


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
    facts = msgspec.convert(read_run(run, shape=_Facts), _Facts)
    if facts.job not in _JOBS:
        raise DataError(f"{run}: expected a run of {', '.join(_JOBS)}, got {facts.job}")
    job = _JOBS[facts.job]
    weights = chosen_weights(run, options)
    require_output(options.output, masks=False)
    found = job.read(run, data, facts, options)
    found, note = _unseen(run, data, facts, found)
    if not options.skip_bad:
        refuse(found.left_out, found.inputs)
    if not found.inputs:
        raise DataError(f"{readable(found.where)}: expected labeled samples, found none")
    if options.output is not None:
        check_files_stay(found.inputs, options.output, masks=False)
    use = Use(facts.job, run, weights, found.inputs, options, job.score, found.arrays)
    rows, measured = start(use)
    with kept_facts(run):
        scores = job.sum_up(measured, [each.label for each in found.inputs], facts)
    prediction = Prediction(rows, found.left_out)
    return Evaluation(
        run=run, data=found.where, weights=weights, prediction=prediction, note=note, **scores
    )


def _unseen(run: Path, data: Path, facts: _Facts, found: _Labeled) -> tuple[_Labeled, str | None]:
    """Of the data of a run, the share that it held out; and a note of what it was trained with."""
    config = read_config(run / CONFIG, facts.job)
    # Of arrays, those of the test set are scored.
    if found.arrays is None and len(found.inputs) == facts.train_samples + facts.test_samples:
        (job,) = (each for each in JOBS if each.name == facts.job)
        options = from_mapping(job.options, {**config, "data": str(data)}, str(run / CONFIG))
        # Other data may be none that the job takes.
        with suppress(OnefoldError, OSError, ValueError), reading_bar() as watch:
            scanning = Scanning(known=read_scan(run / SCAN), watch=watch)
            prepared = job.prepare(options, scanning)
            tested = set(_JOBS[facts.job].tested(prepared))
            unseen = [each for each in found.inputs if (each.path.resolve(), each.line) in tested]
            if prepared.digest == facts.data and unseen:
                # Whatever else is there was left out of the run.
                return replace(found, inputs=unseen, left_out=[]), (
                    f"Only the samples of {readable(data)} that the run held out were scored: it "
                    f"was trained on the others"
                )
    where, trained = found.where.resolve(), Path(str(config.get("data"))).resolve()
    if where != trained and (where.parent, where.stem) != (trained, "train"):
        return found, None
    return found, (
        f"The run was trained with samples of {readable(found.where)}, so that it scores better "
        f"here than on new ones: evaluate it on samples that it has not seen"
    )


def _sum_up_targets(found: Measured, labels: list[Label], facts: _Facts) -> dict[str, Any]:
    """Score one class for each sample, several, or a number; and the baseline if there is one."""
    target, classes, counts = facts.target, facts.classes, facts.class_counts
    baseline = None
    truth = np.array(numbered(labels, classes))
    summed: dict[str, Any] = {"scores": scores_of(found, truth, target)}
    if target.task == "regression":
        baseline = number_baseline(truth, target)
    # Runs of earlier versions do not say how frequent their classes were.
    elif target.task == "multi-label":
        summed["by_class"] = label_table(truth, found["confidence"].numpy(), classes)
        if counts is not None:
            baseline = label_baseline(counts[0], facts.train_samples, truth, classes)
    else:
        scores = class_scores(found, truth, len(classes))
        summed["by_class"] = [*scores.rows(classes)]
        summed["confusion"] = scores.counts.tolist()
        if counts is not None:
            baseline = class_baseline(counts[0], scores.support.tolist(), classes)
    return _compared(summed, baseline, facts)


def _compared(summed: dict[str, Any], baseline: Baseline | None, facts: _Facts) -> dict[str, Any]:
    """Add the baseline, and whether the score of the run is no better."""
    name = facts.score.partition(" ")[2]
    if baseline is None or name not in summed["scores"]:
        return {**summed, "baseline": baseline}
    warning = no_better(facts.score, summed["scores"][name], baseline)
    return {**summed, "baseline": baseline, "warning": warning}


def _sum_up_masks(found: Measured, labels: list[Label], facts: _Facts) -> dict[str, Any]:
    classes = msgspec.convert(facts.mask_model.get("classes", ()), tuple[MaskClass, ...])
    baseline, counts = None, facts.class_counts
    if counts is not None:
        given = [int(each) for each in found["given"].sum(dim=0, keepdim=True).flatten()]
        test = given if classes else [int(found["counted"].sum()) - given[0], given[0]]
        baseline = mask_baseline(counts[0], test, classes, facts.pos_weight)
    by_class = class_ious(found, classes) if classes else []
    summed = {"scores": mask_scores(found, classes), "by_class": by_class}
    return _compared(summed, baseline, facts)


def _strange(path: Path, label: str, facts: _Facts, line: int | None = None) -> BadFile:
    expected = f"expected a class of the run ({listed(facts.classes)})"
    return BadFile(path, f"{expected}, got {label!r}", line)


def _pictures(run: Path, data: Path, facts: _Facts, options: EvaluateOptions) -> _Labeled:
    """Read pictures in class folders or a table, or the IDX files of a test set."""
    require("reading pictures", "images", "PIL")
    if files_to_test(data):
        return _listed(run, facts, *_read_to_score(run, "image", data, facts, options))
    require_folder(data, "a folder of class folders, or a table")
    if any(data.glob("*-images-idx3-ubyte*")):
        return _arrays(data, facts)
    folder = test_folder(data, choosing=False) if (data / "train").is_dir() else data
    bad: list[BadFile] = []
    inputs = []
    strange: dict[str, BadFile] = {}
    for path, named in class_files(folder, {}, bad, facts.target.task):
        label = spelled(named)
        if facts.known(named):
            inputs.append(Input(path, str(path.relative_to(folder)), label=named))
        else:
            strange.setdefault(label, _strange(folder / label, label, facts))
    bad += strange.values()
    return _Labeled(folder, readable_pictures(run, inputs, bad), bad)


def _read_to_score(
    run: Path, kind: str, data: Path, facts: _Facts, options: EvaluateOptions
) -> tuple[Path, list[Line], list[BadFile]]:
    columns = columns_of(run, kind, options)
    columns = columns._replace(label=options.label_column or columns.label)
    path, lines, bad = read_to_score(
        data, columns, facts.target.task, lambda x: facts.known(*facts.divided([x]))
    )
    labels = facts.divided([line.label for line in lines])
    return path, [replace(line, label=x) for line, x in zip(lines, labels, strict=True)], bad


def _listed(
    run: Path, facts: _Facts, table: Path, rows: list[Line], bad: list[BadFile]
) -> _Labeled:
    found = listed_files(rows, table, bad)
    inputs = []
    for path, label in found:
        if facts.known(label):
            inputs.append(Input(path, name_below(path, table.parent), label=label))
        else:
            bad.append(_strange(path, spelled(label), facts))
    return _Labeled(table, readable_pictures(run, inputs, bad), bad)


def _arrays(data: Path, facts: _Facts) -> _Labeled:
    pixels, labels = read_labeled(data, "t10k")
    if int(labels.max()) >= len(facts.classes):
        raise DataError(
            f"{readable(data)}: expected labels of the run, 0 to {len(facts.classes) - 1}, got "
            f"{int(labels.max())}"
        )
    pictures = ArrayPictures(pixels, "test picture")
    inputs = [
        Input(data, pictures.name(number), label=facts.classes[label])
        for number, label in enumerate(labels.tolist())
    ]
    return _Labeled(data, inputs, [], pictures)


def _texts(run: Path, data: Path, facts: _Facts, options: EvaluateOptions) -> _Labeled:
    """Read the texts of a file, or of the one to test with in a folder."""
    path, lines, bad = _read_to_score(run, "text", data, facts, options)
    inputs = []
    for line in lines:
        if facts.known(line.label):
            inputs.append(Input(path, str(path), line.text, line.line_number, line.label))
        else:
            bad.append(_strange(path, spelled(line.label), facts, line.line_number))
    return _Labeled(path, inputs, bad)


def _masks(run: Path, data: Path, facts: _Facts, options: EvaluateOptions) -> _Labeled:
    """Read pictures and masks."""
    del options  # masks are in no table
    require("reading pictures", "images", "PIL")
    require_folder(data, "a folder with images and masks")
    folder = test_folder(data, choosing=False) if (data / "train").is_dir() else data
    bad: list[BadFile] = []
    with reading_bar() as watch:
        scanning = Scanning(watch=watch, white=white_of_run(run))
        pairs = read_pairs_to_test(folder, _mask_rule(run), bad, scanning)
    inputs = [
        Input(pair.image, str(pair.image.relative_to(folder / "images")), mask=pair.mask)
        for pair in pairs
    ]
    return _Labeled(folder, inputs, bad)


def _mask_rule(run: Path) -> MaskRule:
    options = read_config(run / CONFIG, segment_job.JOB)
    kind = segment_job.MaskModel.of_run(run)
    # Not those of the options: the masks that classes came from may be elsewhere by now.
    classes = tuple(f"{each.name}={'|'.join(each.values)}" for each in kind.classes)
    with kept_facts(run):
        foreground, void = (
            msgspec.convert(options.get(name, ()), tuple[str, ...]) for name in _RULE
        )
        return MaskRule(foreground, void, classes)


_RULE = "foreground", "void"


def _score_masks(use: Use) -> Predicted:
    """Compare the masks of all pictures with those that they should have; on every device."""
    kind, model = segment_job.MaskModel.built(use.run)
    facts = msgspec.convert(read_run(use.run, shape=_Facts), _Facts)
    weight = torch.tensor(facts.pos_weight)
    _, measure = segment_job.loss_and_measure(weight, kind.threshold, model.stride)
    pairs = [Pair(each.path, each.mask) for each in use.inputs if each.mask is not None]
    data = PicturePairs(pairs, kind.normalize, _mask_rule(use.run), kind.white)
    size = segment_job.EVALUATION_BATCH_SIZE
    found = use.measured(model, measure, data, Padded(model.stride), batch_size=size)
    scores = (each.tolist() for each in mask_scores_of_each(found))
    return [
        {**each.row, "iou": iou, "dice": dice}
        for each, iou, dice in zip(use.inputs, *scores, strict=True)
    ], found


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    return ((path.resolve(), 0) for path in paths)


class _Job(NamedTuple):
    """What a job's evaluation is made of."""

    read: Callable[[Path, Path, _Facts, EvaluateOptions], _Labeled]
    """Finds the samples, of a run and in the data."""
    score: Callable[[Use], Predicted]
    """Predicts them, on every device."""
    sum_up: Callable[[Measured, list[Label], _Facts], dict[str, Any]]
    """What was measured amounts to, with these labels: the scores of an `Evaluation`."""
    tested: Callable[[Any], Iterable[tuple[Path, int]]]
    """Path and line of what a run with these data was tested on."""


_JOBS = {
    classify_job.JOB: _Job(
        _pictures, Use.pictures, _sum_up_targets, lambda data: _files(data.test.pictures.paths)
    ),
    text_job.JOB: _Job(
        _texts,
        Use.texts,
        _sum_up_targets,
        lambda data: ((data.paths[1].resolve(), line.line_number) for line in data.dev),
    ),
    segment_job.JOB: _Job(
        _masks, _score_masks, _sum_up_masks, lambda data: _files(x.image for x in data.test)
    ),
}

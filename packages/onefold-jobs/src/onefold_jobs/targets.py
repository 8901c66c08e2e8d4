"""Models that predict one class per sample, several classes, or a number: losses and scores.

`label_task` builds the `Task` of a job, and `target_examples` the examples of its report. `rows_of`
makes predictions with a run, and `sum_up_targets` scores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label, TaskName, numbered, spelled
from onefold_jobs.data.samples import known_samples, read_to_score
from onefold_jobs.data.tables import Line
from onefold_jobs.job import EvaluateOptions, Predicted, RunFacts, Target, Use, columns_of
from onefold_jobs.options import SHARE, again, expect, option
from onefold_jobs.runfolder import RunFolder
from onefold_jobs.scores import (
    Baseline,
    ClassScores,
    Measure,
    Measured,
    Predict,
    class_baseline,
    frequent_confusions,
    no_better,
)
from onefold_jobs.training import Task

__all__ = [
    "LabelOptions",
    "best_by_of",
    "compared",
    "description_of",
    "label_task",
    "labels_of",
    "lines_to_score",
    "rows_of",
    "spread",
    "sum_up_targets",
    "target_measure",
    "target_of",
    "targets",
]

SHOWN = 24
"""Number of examples of each kind in a report."""
CONFUSIONS, OF_EACH = 12, 4
"""Number of confusions with examples in a report, and maximum number of examples of each."""

BestBy = Literal[
    "accuracy", "balanced-accuracy", "macro-f1", "loss", "micro-f1", "mean-average-precision",
    "rmse", "mae", "r2",
]  # fmt: skip
"""Names of the scores, over all tasks."""
ClassWeights = Literal["none", "auto"]
Answer = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]
"""Returns the logits of a shard, (n, classes) float32, and its labels, (n,) int64."""
_THRESHOLD = 0.5
"""Probability from which a class is predicted, for multi-label tasks."""
_SCORES: dict[TaskName, tuple[BestBy, ...]] = {
    "single-label": ("accuracy", "balanced-accuracy", "macro-f1", "loss"),
    "multi-label": ("micro-f1", "macro-f1", "mean-average-precision", "loss"),
    "regression": ("rmse", "mae", "r2", "loss"),
}
"""Scores that can select the best epoch; the first is the default."""
_Array = np.ndarray[Any, Any]


class LabelModel(Protocol):
    """A model that predicts labels or numbers, as described in its run."""

    @property
    def target(self) -> Target:
        """Meaning of the outputs."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the outputs; empty for regression."""


def target_of(task: TaskName, train_labels: Sequence[Any]) -> Target:
    """Determine the meaning of a model's outputs.

    >>> target_of("regression", [1.0, 3.0])
    Target(task='regression', mean=2.0, std=1.0)
    """
    if task != "regression":
        return Target(task)
    # fsum rounds only once: both numbers enter every output.
    mean = math.fsum(train_labels) / len(train_labels)
    variance = math.fsum((label - mean) ** 2 for label in train_labels) / len(train_labels)
    return Target(task, mean, math.sqrt(variance) or 1.0)


def targets(labels: Sequence[Any]) -> Any:
    """Convert the labels of a dataset, as returned by `numbered`, for a loss.

    Returns:
        Class numbers unchanged; all other labels as (n,) or (n, classes) float32.
    """
    return labels if isinstance(labels[0], int) else torch.tensor(labels, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Options of jobs with labeled samples, in addition to `TrainOptions`."""

    best_by: BestBy | None = again("best_by", shown="by task")
    task: TaskName = option(
        "single-label", "Task: single-label (default), multi-label, regression.", shown=""
    )
    label_column: tuple[str, ...] = option((), "Table column of labels.", shown="a usual name")
    label_smoothing: float = option(0.0, "Label smoothing.", SHARE)
    class_weights: ClassWeights = option("none", "Class weights.")
    balanced: bool = option(False, "Sample classes equally often in training.")
    labels_as_is: bool = option(False, "Accept all labels as class names.")

    def __post_init__(self) -> None:
        # Both options together would compensate for class frequency twice.
        once = not (self.balanced and self.class_weights == "auto")
        expect(once, "balanced", "", "it without --class-weights auto, because either is enough")
        known, scores = self.best_by is None, _SCORES[self.task]
        expected = f"with --task {self.task}: {', '.join(scores)}"
        expect(known or self.best_by in scores, "best_by", self.best_by, expected)
        # An option without effect is more likely a mistake than intended.
        unused = {"class_weights": "none", "balanced": False}
        unused |= dict.fromkeys(("label_smoothing", "mixup", "cutmix"), 0.0)
        for name, nothing in unused.items():
            useful = self.task == "single-label" or getattr(self, name, nothing) == nothing
            expect(useful, name, "", f"--task single-label with it, got --task {self.task}")


def best_by_of(options: LabelOptions) -> BestBy:
    """Return the score that selects the best epoch."""
    # A user who compensates for class frequency wants rare classes recognized, too.
    balanced = options.balanced or options.class_weights == "auto"
    return options.best_by or ("balanced-accuracy" if balanced else _SCORES[options.task][0])


def label_task(
    noun: str,
    kind: LabelModel,
    answer: Answer,
    options: Any,
    *,
    labels: tuple[Sequence[Any], Sequence[Any]],
    show: Callable[[RunFolder, int], dict[str, Any]],
    facts: dict[str, Any],
    **parts: Any,
) -> Task:
    """Build the `Task` of a job with labeled samples.

    Args:
        noun: type of the samples, for the purpose of the run.
        kind: description of the model.
        answer: returns outputs (n, classes or 1) float32 and labels in the form of `targets`.
        options: options of the run.
        labels: labels of the training and test samples, as returned by `numbered`.
        show: returns the report's entries of a test sample, given its number, without its labels.
        facts: entries of ``run.json`` about the model.
        parts: other fields of the task.
    """
    target, classes = kind.target, kind.classes
    train, truth = labels[0], np.array(labels[1])
    counts = weight = by_sample = None
    if target.task != "regression":
        counts = _class_counts(train, len(classes)), _class_counts(truth, len(classes))
    if counts is not None and target.task == "single-label":
        # Inversely proportional to the class frequency: the mean weight over all samples is 1.
        samples = torch.tensor(counts[0]).clamp(min=1).to(torch.float32)
        weights = len(train) / (len(classes) * samples)
        weight = weights if options.class_weights == "auto" else None
        by_sample = weights[torch.tensor(train)].tolist() if options.balanced else None

    def loss(model: nn.Module, batch: Any) -> Any:
        (outputs, given), smoothing = answer(model, batch), options.label_smoothing
        if weight is None:
            return _losses(outputs, given, target, smoothing)
        # Divides by the weights of the whole batch, as PyTorch does.
        own = weight.to(outputs.device)
        return onefold.losses.cross_entropy(outputs, given, own, label_smoothing=smoothing)

    return Task(
        loss=loss,
        measure=target_measure(answer, target, brief=True),
        score=lambda found: scores_of(found, truth, target, len(classes)),
        baseline=baseline_of(target, counts, len(train), truth, classes),
        class_counts=counts,
        class_weights=None if weight is None else weight.tolist(),
        sample_weights=by_sample,
        examples=lambda predict, folder: target_examples(
            predict, answer, kind, parts["test_set"], partial(show, folder)
        ),
        facts={
            "classes": list(classes),
            "purpose": f"{noun} {purpose_of(target)}",
            "target": msgspec.to_builtins(target),
            **facts,
        },
        **parts,
    )


def _class_counts(labels: Any, classes: int) -> list[int]:
    """Count the samples of each class."""
    array = np.array(labels)
    counts = array.sum(axis=0) if array.ndim > 1 else np.bincount(array, minlength=classes)
    return [int(count) for count in counts]


def _losses(
    outputs: torch.Tensor, labels: torch.Tensor, target: Target, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the loss of each sample, (n,) float32."""
    if target.task == "regression":
        return (outputs.squeeze(1) - (labels - target.mean) / target.std) ** 2
    if target.task == "single-label":
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(dim=1)


def baseline_of(
    target: Target, counts: Any, samples: int, truth: _Array, classes: Sequence[str]
) -> Baseline | None:
    """Compute the test scores of a constant prediction.

    Args:
        target: target of the predictions.
        counts: number of training samples of each class, and of test samples; None if unknown, as
            in runs of earlier versions.
        samples: number of training samples.
        truth: labels of the test samples.
        classes: class names.
    """
    if target.task == "regression":
        return number_baseline(truth, target)
    if counts is None:
        return None
    if target.task == "multi-label":
        return label_baseline(counts[0], samples, truth, classes)
    return class_baseline(counts[0], _class_counts(truth, len(classes)), classes)


def number_baseline(truth: _Array, target: Target) -> Baseline:
    """Return the regression baseline: always predict the mean of the training targets."""
    least = number_scores(truth, np.full(len(truth), target.mean))
    errors = ((truth - target.mean) / target.std) ** 2
    return Baseline(f"{target.mean:.4g}", {"loss": float(errors.mean()), **least})


def target_measure(answer: Answer, target: Target, *, brief: bool = False) -> Measure:
    """Make the measure of a model's predictions.

    It returns the ``loss`` (n,) float32, and the probability of each class, ``confidence`` (n,
    classes) float32, or the number, ``value`` (n,) float64. If ``brief`` is set, single-label
    models return the most probable class, ``predicted`` (n,) int32, instead of the probabilities.
    """
    single = target.task == "single-label"

    def measure(model: nn.Module, batch: Any) -> Measured:
        outputs, labels = answer(model, batch)
        losses = _losses(outputs, labels, target)
        if target.task == "regression":
            value = outputs.squeeze(1).to(torch.float64) * target.std + target.mean
            return {"loss": losses, "value": value}
        if single and brief:
            return {"loss": losses, "predicted": outputs.argmax(dim=1).to(torch.int32)}
        return {"loss": losses, "confidence": outputs.softmax(1) if single else outputs.sigmoid()}

    return measure


def purpose_of(target: Target) -> str:
    """Return the task in words, for a report.

    >>> [purpose_of(Target(task)) for task in ("single-label", "multi-label", "regression")]
    ['classification', 'multi-label classification', 'regression']
    """
    kinds = {"multi-label": "multi-label classification", "regression": "regression"}
    return kinds.get(target.task, "classification")


def _target_rows(found: Measured, kind: LabelModel, top: int) -> list[dict[str, Any]]:
    """Convert measurements to the columns of a prediction.

    Args:
        found: measurements of `target_measure`.
        kind: description of the model.
        top: number of most probable classes to report, for single-label models.
    """
    target, classes = kind.target, kind.classes
    if target.task == "regression":
        return [{"value": value} for value in found["value"].tolist()]
    said = found["confidence"]
    if target.task == "single-label":
        # topk may return ties in any order, which may differ on a GPU; a stable sort does not.
        order = said.argsort(dim=1, descending=True, stable=True)[:, :top]
        return [
            {"classes": [{"class": classes[n], "confidence": p} for n, p in zip(*row, strict=True)]}
            for row in zip(order.tolist(), said.gather(1, order).tolist(), strict=True)
        ]
    return [
        {
            "labels": "|".join(n for n, p in zip(classes, sure, strict=True) if p >= _THRESHOLD),
            # Confidences of all classes, so that users can choose their own threshold.
            **{f"confidence {n}": round(p, 6) for n, p in zip(classes, sure, strict=True)},
        }
        for sure in said.tolist()
    ]


def class_scores(found: Measured, truth: _Array, classes: int) -> ClassScores:
    """Compare the most probable class of each sample with its true class."""
    # NumPy's argmax returns the first of several ties.
    said = found["predicted"] if "predicted" in found else found["confidence"].numpy().argmax(1)
    return ClassScores.of(truth, np.asarray(said), classes)


def scores_of(found: Measured, truth: _Array, target: Target, classes: int) -> dict[str, float]:
    """Compute test scores from the measurements of all samples and their true labels."""
    if target.task == "regression":
        scores = number_scores(truth, found["value"].numpy())
    elif target.task == "multi-label":
        scores = label_scores(truth, found["confidence"].numpy())
    else:
        scores = class_scores(found, truth, classes).overall
    return {"loss": float(found["loss"].to(torch.float64).mean()), **scores}


def number_scores(truth: _Array, predicted: _Array) -> dict[str, float]:
    """Compute the regression scores: root mean squared error, mean absolute error and R2.

    >>> number_scores(np.array([1.0, 3.0]), np.array([1.0, 2.0]))["r2"]
    0.5
    """
    errors = np.asarray(predicted, dtype=np.float64) - truth
    # Without variance, R2 is undefined.
    spread = float(((truth - truth.mean()) ** 2).sum())
    return {
        "rmse": float(np.sqrt((errors**2).mean())),
        "mae": float(np.abs(errors).mean()),
        "r2": 1 - float((errors**2).sum()) / spread if spread else math.nan,
    }


def label_scores(truth: _Array, confidence: _Array) -> dict[str, float]:
    """Compute the multi-label scores: micro and macro F1, and mean average precision.

    The values match scikit-learn's functions of the same names, except that means leave out classes
    without samples.

    Args:
        truth: (n, classes), 1 for each class of a sample, otherwise 0.
        confidence: (n, classes), probability of each class.
    """
    table = _by_class(truth, confidence)
    right, both = table["right"].sum(), (table["support"] + table["predicted"]).sum()
    return {
        "micro-f1": float(2 * right / both) if both else math.nan,
        "macro-f1": _mean(table["f1"]),
        "mean-average-precision": _mean(table["average-precision"]),
    }


def label_baseline(
    counts: Sequence[int], samples: int, truth: _Array, classes: Sequence[str]
) -> Baseline:
    """Compute the scores of always predicting the classes that at least half of the samples have.

    The confidence in each class is its share of the training samples.

    Args:
        counts: number of training samples that have each class.
        samples: number of training samples.
        truth: (n, classes), 1 for each class of a test sample, otherwise 0.
        classes: class names.

    >>> baseline = label_baseline([3, 2], 4, np.array([[1.0, 0.0], [1.0, 1.0]]), ["cat", "dog"])
    >>> baseline.answer, round(baseline.scores["micro-f1"], 2)
    ('cat|dog', 0.86)
    """
    shares = np.asarray(counts) / samples
    often = [name for name, share in zip(classes, shares, strict=True) if share >= _THRESHOLD]
    confidence = np.tile(shares, (len(truth), 1))
    given = torch.from_numpy(np.asarray(truth, dtype=np.float64))
    loss = float(F.binary_cross_entropy(torch.from_numpy(confidence), given))
    scores = {"loss": loss, **label_scores(truth, confidence)}
    return Baseline(spelled(tuple(often)) or "no class", scores)


def label_table(truth: _Array, confidence: _Array, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the scores of each class; None for undefined scores."""
    table = _by_class(truth, confidence)
    names = ("precision", "recall", "f1", "average-precision")
    return [
        {
            "class": name,
            **{
                each: None if math.isnan(table[each][n]) else float(table[each][n])
                for each in names
            },
            "support": int(table["support"][n]),
        }
        for n, name in enumerate(classes)
    ]


def _by_class(truth: _Array, confidence: _Array) -> dict[str, _Array]:
    given, said = truth > 0.5, confidence >= _THRESHOLD
    right, support, predicted = ((x).sum(axis=0) for x in (given & said, given, said))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "right": right,
            "support": support,
            "predicted": predicted,
            "precision": right / predicted,
            "recall": right / support,
            "f1": np.where(support > 0, 2 * right / (support + predicted), np.nan),
            "average-precision": np.array(
                [_average_precision(given[:, n], confidence[:, n]) for n in range(given.shape[1])]
            ),
        }


def _average_precision(given: _Array, confidence: _Array) -> float:
    """Compute the mean precision over all thresholds that raise recall; ties count together."""
    if not given.any():
        return math.nan
    order = np.argsort(-confidence, kind="stable")
    found = np.cumsum(given[order])
    ends = np.flatnonzero(np.append(np.diff(confidence[order]) != 0, True))
    precision, recall = found[ends] / (ends + 1), found[ends] / found[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def _mean(values: _Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def choose_examples(
    truth: torch.Tensor, predicted: torch.Tensor, confidence: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Choose samples evenly from the test set, and the worst mistakes, by their numbers.

    Args:
        truth: (n,) int64, true classes.
        predicted: (n,) int64, predicted classes.
        confidence: (n,) float32, probability of the predicted class.

    >>> truth, predicted = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])
    >>> choose_examples(truth, predicted, torch.tensor([0.9, 0.6, 0.8]))
    ([0, 1, 2], [2, 1])
    """
    wrong = (truth != predicted).nonzero().flatten()
    # A stable sort puts equally confident mistakes in the same order on every device.
    order = confidence[wrong].argsort(descending=True, stable=True)
    return spread(len(truth)), wrong[order][:SHOWN].tolist()


def choose_confused(
    truth: _Array, predicted: _Array, confidence: _Array, counts: Sequence[Sequence[int]]
) -> dict[tuple[int, int], list[int]]:
    """Choose the most confident mistakes for each frequent confusion.

    Args:
        truth: (n,) int64, true classes.
        predicted: (n,) int64, predicted classes.
        confidence: (n,) float32, probability of the predicted class.
        counts: number of samples by true class (rows) and predicted class.

    Returns:
        Numbers of samples by true and predicted class.

    >>> truth, predicted = np.array([0, 1, 1, 1]), np.array([0, 0, 0, 1])
    >>> choose_confused(truth, predicted, np.array([0.9, 0.6, 0.8, 0.9]), [[1, 0], [2, 1]])
    {(1, 0): [2, 1]}
    """
    found = {}
    for label, wrong, _ in frequent_confusions(counts)[:CONFUSIONS]:
        numbers = np.flatnonzero((truth == label) & (predicted == wrong))
        # A stable sort chooses the same samples on every device.
        order = np.argsort(-confidence[numbers], kind="stable")
        found[label, wrong] = numbers[order][:OF_EACH].tolist()
    return found


def spread(samples: int, most: int = SHOWN) -> list[int]:
    """Choose sample numbers evenly from a test set."""
    # Evenly, because a test set is usually sorted by class.
    count = min(most, samples)
    return [number * samples // count for number in range(count)]


def target_examples(
    predict: Predict,
    answer: Answer,
    kind: LabelModel,
    data: Any,
    show: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """Collect a report's examples of a trained model: samples, mistakes and confusion matrix.

    Args:
        predict: predicts a dataset.
        answer: returns outputs and labels of a shard.
        kind: description of the model.
        data: test set, with ``labels`` in the form of `targets`.
        show: returns the entries of a sample in addition to its labels, given its number.
    """
    target, classes = kind.target, kind.classes
    found = predict(target_measure(answer, target), data)
    truth = np.asarray(data.labels)
    # A stable sort puts equal losses in the same order on every device.
    worst = found["loss"].argsort(descending=True, stable=True)[:SHOWN].tolist()
    samples, of_all = spread(len(truth)), {}
    confused: dict[tuple[int, int], list[int]] = {}
    if target.task == "single-label":
        sure, predicted = found["confidence"].max(dim=1)
        samples, worst = choose_examples(torch.from_numpy(truth), predicted, sure)
        counts = ClassScores.of(truth, predicted.numpy(), len(classes)).counts.tolist()
        of_all = {"classes": list(classes), "confusion": counts}
        confused = choose_confused(truth, predicted.numpy(), sure.numpy(), counts)
    elif target.task == "multi-label":
        of_all["labels"] = label_table(truth, found["confidence"].numpy(), classes)

    def described(number: int) -> dict[str, Any]:
        true = truth[number]
        if target.task == "regression":
            value = float(found["value"][number])
            error = value - float(true)
            return {"label": f"{true:.4g}", "predicted": f"{value:.4g}", "error": error}
        if target.task == "single-label":
            names = {"label": classes[true], "predicted": classes[int(predicted[number])]}
            return {**names, "confidence": float(sure[number])}
        said = found["confidence"][number].numpy() >= _THRESHOLD
        return {
            name: spelled(tuple(c for c, has in zip(classes, row, strict=True) if has))
            or "no class"
            for name, row in (("label", true), ("predicted", said))
        }

    shown = {
        name: [{**show(number), **described(number)} for number in numbers]
        for name, numbers in (("samples", samples), ("worst", worst))
    }
    if confused:
        of_all["confused"] = [
            {
                "label": label,
                "predicted": wrong,
                "samples": [{**show(number), **described(number)} for number in numbers],
            }
            for (label, wrong), numbers in confused.items()
        ]
    return {**of_all, **shown}


def rows_of(
    use: Use,
    kind: LabelModel,
    model: nn.Module,
    answer: Answer,
    data: Any,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Predicted:
    """Predict the number of each sample, its classes, or its most probable class."""
    found = use.measured(model, target_measure(answer, kind.target), data, collate)
    rows = _target_rows(found, kind, use.options.top)
    labeled = any(each.label != "" for each in use.inputs)
    return [
        {**each.row, **({"label": spelled(each.label)} if labeled else {}), **own}
        for each, own in zip(use.inputs, rows, strict=True)
    ], found


def labels_of(use: Use, kind: LabelModel) -> Any:
    """Return the class number of each input; 0 if unknown, in which case its loss is unused."""
    classes = kind.classes
    if kind.target.task != "single-label":
        nothing = torch.zeros(len(use.inputs), len(classes))
        if not use.scored:
            return nothing if classes else nothing.sum(dim=1)
        return targets(numbered([each.label for each in use.inputs], classes))
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers.get(spelled(each.label), 0) for each in use.inputs]


def sum_up_targets(found: Measured, labels: list[Label], facts: RunFacts) -> dict[str, Any]:
    """Score the predictions, and compute the baseline if there is one."""
    target, classes = facts.target, facts.classes
    truth = np.array(numbered(labels, classes))
    summed: dict[str, Any] = {"scores": scores_of(found, truth, target, len(classes))}
    if target.task == "multi-label":
        summed["by_class"] = label_table(truth, found["confidence"].numpy(), classes)
    elif target.task == "single-label":
        scores = class_scores(found, truth, len(classes))
        summed["by_class"] = [*scores.rows(classes)]
        summed["confusion"] = scores.counts.tolist()
    baseline = baseline_of(target, facts.class_counts, facts.train_samples, truth, classes)
    return compared(summed, baseline, facts)


def compared(summed: dict[str, Any], baseline: Baseline | None, facts: RunFacts) -> dict[str, Any]:
    """Add the baseline, and a warning if the run's score is no better."""
    name = facts.score.partition(" ")[2]
    if baseline is None or name not in summed["scores"]:
        return {**summed, "baseline": baseline}
    warning = no_better(facts.score, summed["scores"][name], baseline)
    return {**summed, "baseline": baseline, "warning": warning}


def lines_to_score(
    run: Path, kind: Literal["image", "text"], data: Path, facts: RunFacts, options: EvaluateOptions
) -> tuple[Path, list[Line], list[BadFile]]:
    """Read a table, or the test file of a folder, and split labels as in training.

    Returns:
        Path of the file, samples of known classes, and the bad lines.
    """
    columns = columns_of(run, kind, options)
    columns = columns._replace(label=options.label_column or columns.label)
    path, lines, bad = read_to_score(
        data, columns, facts.target.task, lambda x: facts.known(*facts.divided([x]))
    )
    labels = facts.divided([line.label for line in lines])
    lines = [replace(line, label=x) for line, x in zip(lines, labels, strict=True)]
    known, strange = known_samples(lines, facts.classes, path, "the run")
    return path, known, [*bad, *strange]


def description_of(kind: LabelModel, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """Describe a model for programs without onefold."""
    facts = {
        "target": msgspec.to_builtins(kind.target),
        "classes": list(kind.classes),
        "preprocessing": preprocessing,
    }
    number = kind.target.task == "regression"
    return {**facts, "value": "logits * target.std + target.mean"} if number else facts

"""Models that predict several classes of a sample, or a number: losses, scores and examples.

One class for each sample is `onefold.jobs.classifier`'s. `target_task` makes what a `Task` needs,
whichever it is, and `target_examples` what a report shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from onefold.jobs.classifier import (
    Answer,
    BestBy,
    class_task,
    classifier_examples,
    spread,
    usual_best_by,
)
from onefold.jobs.data.labels import TaskName
from onefold.jobs.options import expect
from onefold.jobs.scores import Baseline, Measure, Measured, Predict

__all__ = [
    "Target",
    "best_by_of",
    "check_task_options",
    "label_baseline",
    "label_scores",
    "label_table",
    "number_baseline",
    "number_scores",
    "target_examples",
    "target_measure",
    "target_of",
    "target_rows",
    "target_task",
    "targets",
]

_THRESHOLD = 0.5
"""Probability from which a sample has a class, where it may have several."""
_SCORES: dict[TaskName, tuple[BestBy, ...]] = {
    "single-label": ("accuracy", "balanced-accuracy", "macro-f1", "loss"),
    "multi-label": ("micro-f1", "macro-f1", "mean-average-precision", "loss"),
    "regression": ("rmse", "mae", "r2", "loss"),
}
"""By which scores the best epoch may be chosen; the first is the usual one."""
_Array = np.ndarray[Any, Any]


class Target(msgspec.Struct, frozen=True):
    """What a model's outputs stand for; kept with the model."""

    task: TaskName = "single-label"
    mean: float = 0.0
    """Of the numbers that were trained on: an output of 0 stands for it."""
    std: float = 1.0
    """How far from it a number is with an output of 1."""


def target_of(task: TaskName, train_labels: Sequence[Any]) -> Target:
    """Settle what a model's outputs stand for.

    >>> target_of("regression", [1.0, 3.0])
    Target(task='regression', mean=2.0, std=1.0)
    """
    if task != "regression":
        return Target(task)
    # Added up exactly: the two end up in every output.
    mean = math.fsum(train_labels) / len(train_labels)
    variance = math.fsum((label - mean) ** 2 for label in train_labels) / len(train_labels)
    return Target(task, mean, math.sqrt(variance) or 1.0)


def targets(labels: Sequence[Any]) -> Any:
    """Make the labels of a data set, as `numbered` returned them, ready for a loss.

    Returns:
        Numbers of classes as they are; all others as (n,) or (n, classes) float32.
    """
    return labels if isinstance(labels[0], int) else torch.tensor(labels, dtype=torch.float32)


def check_task_options(options: Any) -> None:
    """Refuse options that are not for a task.

    Raises:
        ValueError: an option does nothing, or names no score of the task.
    """
    task: TaskName = options.task
    known = options.best_by is None or options.best_by in _SCORES[task]
    expect(known, "best_by", options.best_by, f"with --task {task}: {', '.join(_SCORES[task])}")
    unused = {"class_weights": "none", "balanced": False}
    unused |= dict.fromkeys(("label_smoothing", "mixup", "cutmix"), 0.0)
    for name, nothing in unused.items():
        useful = task == "single-label" or getattr(options, name, nothing) == nothing
        expect(useful, name, "", f"--task single-label with it, got --task {task}")


def best_by_of(options: Any) -> BestBy:
    """By which score the best epoch is chosen."""
    usual = usual_best_by(options) if options.task == "single-label" else _SCORES[options.task][0]
    chosen: BestBy = options.best_by or usual
    return chosen


def target_task(
    answer: Answer,
    options: Any,
    target: Target,
    *,
    train_labels: Sequence[Any],
    test_labels: Sequence[Any],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Make the parts of a `Task` that depend on what is predicted.

    Args:
        answer: of the model: outputs (n, classes or 1) float32, and labels as of `targets`.
        options: of the run.
        target: what the outputs stand for.
        train_labels: of the training samples, as `numbered` returned them.
        test_labels: of the test samples.
        classes: their names; none for a number.
    """
    if target.task == "single-label":
        return class_task(
            answer, options, train_labels=train_labels, test_labels=test_labels, classes=classes
        )
    measure, truth = target_measure(answer, target), np.array(test_labels)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return _losses(*answer(model, batch), target)

    if target.task == "regression":
        baseline, counts = number_baseline(truth, target), None
    else:
        sums = (np.array(each).sum(axis=0) for each in (train_labels, test_labels))
        counts = tuple(each.astype(int).tolist() for each in sums)
        baseline = label_baseline(counts[0], len(train_labels), truth, classes)
    return {
        "loss": loss,
        "measure": measure,
        "score": lambda found: scores_of(found, truth, target),
        "baseline": baseline,
        "class_counts": counts,
    }


def _losses(outputs: torch.Tensor, labels: torch.Tensor, target: Target) -> torch.Tensor:
    """The loss of each sample, (n,) float32."""
    if target.task == "regression":
        return (outputs.squeeze(1) - (labels - target.mean) / target.std) ** 2
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(dim=1)


def target_measure(answer: Answer, target: Target) -> Measure:
    """Make the measure of several classes, or of a number.

    It has the ``loss`` (n,) float32, and the probability of each class, ``confidence`` (n, classes)
    float32, or the number, ``value`` (n,) float64.
    """

    def measure(model: nn.Module, batch: Any) -> Measured:
        outputs, labels = answer(model, batch)
        losses = _losses(outputs, labels, target)
        if target.task == "regression":
            value = outputs.squeeze(1).to(torch.float64) * target.std + target.mean
            return {"loss": losses, "value": value}
        return {"loss": losses, "confidence": outputs.sigmoid()}

    return measure


def target_rows(found: Measured, classes: Sequence[str]) -> list[dict[str, Any]]:
    """What was measured of each sample, as the columns of a prediction."""
    if "value" in found:
        return [{"value": value} for value in found["value"].tolist()]
    return [
        {
            "labels": ", ".join(n for n, p in zip(classes, sure, strict=True) if p >= _THRESHOLD),
            # Of all classes, so that everybody may choose a threshold of his own.
            **{f"confidence {n}": round(p, 6) for n, p in zip(classes, sure, strict=True)},
        }
        for sure in found["confidence"].tolist()
    ]


def scores_of(found: Measured, truth: _Array, target: Target) -> dict[str, float]:
    """The scores of a test set, from what was measured of its samples and their true labels."""
    if target.task == "regression":
        scores = number_scores(truth, found["value"].numpy())
    else:
        scores = label_scores(truth, found["confidence"].numpy())
    return {"loss": float(found["loss"].to(torch.float64).mean()), **scores}


def number_scores(truth: _Array, predicted: _Array) -> dict[str, float]:
    """The scores of predicted numbers: root mean squared and mean absolute error, and R2.

    >>> number_scores(np.array([1.0, 3.0]), np.array([1.0, 2.0]))["r2"]
    0.5
    """
    errors = np.asarray(predicted, dtype=np.float64) - truth
    # Where all numbers are the same nothing can be explained.
    spread = float(((truth - truth.mean()) ** 2).sum())
    return {
        "rmse": float(np.sqrt((errors**2).mean())),
        "mae": float(np.abs(errors).mean()),
        "r2": 1 - float((errors**2).sum()) / spread if spread else math.nan,
    }


def number_baseline(truth: _Array, target: Target) -> Baseline:
    """The scores of answering the mean of the training set for every sample."""
    errors = ((truth - target.mean) / target.std) ** 2
    least = number_scores(truth, np.full(len(truth), target.mean))
    return Baseline(f"{target.mean:.4g}", {"loss": float(errors.mean()), **least})


def label_scores(truth: _Array, confidence: _Array) -> dict[str, float]:
    """The scores of several classes: F1 of all decisions and by class, and average precision.

    They have the values of scikit-learn's functions of the same names, but means leave out classes
    that no sample has.

    Args:
        truth: (n, classes), 1 for each class of a sample, and 0.
        confidence: (n, classes), the probability of each.
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
    """The scores of answering the classes that half of the training samples have, for each sample.

    Its confidence in each class is the share of the training samples that have it.

    Args:
        counts: number of training samples that have each class.
        samples: number of training samples.
        truth: (n, classes), 1 for each class of a test sample, and 0.
        classes: their names.

    >>> baseline = label_baseline([3, 1], 4, np.array([[1.0, 0.0], [1.0, 1.0]]), ["cat", "dog"])
    >>> baseline.answer, round(baseline.scores["micro-f1"], 2)
    ('cat', 0.8)
    """
    shares = np.asarray(counts) / samples
    often = [name for name, share in zip(classes, shares, strict=True) if share >= _THRESHOLD]
    confidence = np.tile(shares, (len(truth), 1))
    given = torch.from_numpy(np.asarray(truth, dtype=np.float64))
    loss = float(F.binary_cross_entropy(torch.from_numpy(confidence), given))
    return Baseline(
        ", ".join(often) or "no class", {"loss": loss, **label_scores(truth, confidence)}
    )


def label_table(truth: _Array, confidence: _Array, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The scores of each class; None for one that it does not have."""
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
    """The mean precision at the thresholds where one more is found; ties count together."""
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


def target_examples(
    kind: str,
    predict: Predict,
    answer: Answer,
    target: Target,
    data: Any,
    classes: Sequence[str],
    show: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """Collect what a report shows of a trained model; as `classifier_examples` for one class.

    Args:
        kind: name of the job.
        predict: reads and predicts a data set.
        answer: of the model.
        target: what its outputs stand for.
        data: the data set to test with; its ``labels`` are as of `targets`.
        classes: the names of the classes.
        show: returns what is shown of a sample besides its labels, by the sample's number.
    """
    if target.task == "single-label":
        return classifier_examples(kind, predict, answer, data, classes, show)
    found = predict(target_measure(answer, target), data)
    truth = data.labels.numpy()

    def entry(number: int) -> dict[str, Any]:
        if target.task == "regression":
            value, true = float(found["value"][number]), float(truth[number])
            shown = {"label": f"{true:.4g}", "predicted": f"{value:.4g}", "error": value - true}
        else:
            said = found["confidence"][number].numpy() >= _THRESHOLD
            shown = {
                name: ", ".join(c for c, has in zip(classes, row, strict=True) if has) or "no class"
                for name, row in (("label", truth[number]), ("predicted", said))
            }
        return {**show(number), **shown}

    # Stable, so that equal losses come in the same order on every device.
    order = found["loss"].argsort(descending=True, stable=True)
    samples = spread(len(truth))
    examples = {
        "kind": kind,
        "samples": [entry(number) for number in samples],
        "worst": [entry(number) for number in order[: len(samples)].tolist()],
    }
    if target.task == "multi-label":
        examples["labels"] = label_table(truth, found["confidence"].numpy(), classes)
    return examples

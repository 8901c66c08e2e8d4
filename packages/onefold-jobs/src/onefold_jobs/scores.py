"""Scores of a model, by class and overall, and those of a model that has learned nothing.

`ClassScores` derives the scores of a classifier from its confusion matrix. A `Baseline` has the
scores of answering alike for every sample, which a model must beat to be of use: where the classes
are unbalanced, a high accuracy alone says nothing. `no_better` compares the two.

A job reports its scores by name, as `Trainer.save` stores them. `rule_of` says of each whether the
highest or the lowest is the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from torch import nn

__all__ = [
    "Baseline",
    "ClassScores",
    "Measure",
    "Measured",
    "Predict",
    "class_baseline",
    "class_tables",
    "count_line",
    "is_share",
    "no_better",
    "rule_of",
    "spell",
]

Measured = dict[str, torch.Tensor]
"""Values by name, with a row for each sample of a data set."""
Measure = Callable[[nn.Module, Any], Measured]
"""Computes them for a shard, as ``Trainer.predict`` takes it."""
Predict = Callable[[Measure, Any], Measured]
"""``Trainer.predict`` of a measure and a data set, read as in the evaluation of the run."""

_LOWEST = frozenset({"loss", "mae", "rmse"})
_UNITS = _LOWEST | {"r2"}
"""Scores that are no shares of 1."""
_SHOWN = 6
"""With more than twice as many classes, only so many of the largest and the smallest are listed."""
_IN_TABLES, _IN_MATRIX = 20, 10
"""The most classes that a terminal shows in a list, and in a matrix."""
_HEADINGS = {"f1": "F1", "iou": "IoU", "share": "share of pixels"}
_Numbers = np.ndarray[Any, Any]


def rule_of(name: str) -> str:
    """Which value of a score is the best, as ``Trainer.save`` takes it.

    >>> rule_of("macro-f1"), rule_of("loss")
    ('highest macro-f1', 'lowest loss')
    """
    return f"{'lowest' if name in _LOWEST else 'highest'} {name}"


def is_share(name: str) -> bool:
    """Whether a score is shown in percent."""
    return name not in _UNITS


def spell(name: str, value: float) -> str:
    """Spell a score.

    >>> spell("macro-f1", 0.44781), spell("loss", 0.25)
    ('44.8%', '0.25')
    """
    return f"{value:.1%}" if is_share(name) else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class ClassScores:
    """The scores of a classifier; those by class are (classes,) float64.

    They have the values of scikit-learn's functions of the same names. NaN stands for the scores of
    a class that they say nothing about, and means leave it out.

    >>> found = ClassScores(np.array([[8, 0], [1, 1]]))
    >>> found.recall, found.overall["balanced-accuracy"]
    (array([1. , 0.5]), 0.75)
    """

    counts: _Numbers
    """(classes, classes) int64: number of samples by true class (rows) and predicted class."""

    @classmethod
    def of(cls, truth: _Numbers, predicted: _Numbers, classes: int) -> ClassScores:
        """Count predictions.

        Args:
            truth: (n,) integers, the class of each sample.
            predicted: (n,) integers, what was predicted.
            classes: number of classes.
        """
        # Each pair of classes as one number; the least length, or the last rows could be missing.
        pairs = np.asarray(truth, dtype=np.int64) * classes + predicted
        return cls(np.bincount(pairs, minlength=classes * classes).reshape(classes, classes))

    @property
    def support(self) -> _Numbers:
        """(classes,) int64: number of samples of each class."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def predicted(self) -> _Numbers:
        """(classes,) int64: how often each class was predicted."""
        return np.asarray(self.counts.sum(axis=0))

    @property
    def precision(self) -> _Numbers:
        """Share of the predictions of a class that are right; 0 if there are none."""
        met = (self.support > 0) | (self.predicted > 0)
        return np.where(met, _ratio(self._right, np.maximum(self.predicted, 1)), np.nan)

    @property
    def recall(self) -> _Numbers:
        """Share of the samples of a class that are recognized; NaN if there are none."""
        return _ratio(self._right, self.support)

    @property
    def f1(self) -> _Numbers:
        """Harmonic mean of precision and recall; NaN if a class has neither."""
        return _ratio(2 * self._right, self.support + self.predicted)

    @property
    def overall(self) -> dict[str, float]:
        """Accuracy, the mean recall of the classes (balanced accuracy), and their mean F1."""
        return {
            "accuracy": float(self._right.sum() / self.counts.sum()),
            "balanced-accuracy": float(np.nanmean(self.recall)),
            "macro-f1": float(np.nanmean(self.f1)),
        }

    def rows(self, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield each class with its scores; None for a score that it does not have.

        Args:
            classes: their names.
        """
        scores = {name: getattr(self, name).tolist() for name in ("precision", "recall", "f1")}
        for number, (name, support) in enumerate(zip(classes, self.support.tolist(), strict=True)):
            own = {score: values[number] for score, values in scores.items()}
            yield {
                "class": name,
                **{score: None if math.isnan(value) else value for score, value in own.items()},
                "support": support,
            }

    @property
    def _right(self) -> _Numbers:
        return np.diagonal(self.counts)


def class_tables(
    rows: Sequence[Mapping[str, Any]], counts: Sequence[Sequence[int]] = ()
) -> Iterator[Text | Table]:
    """Yield what a terminal shows: the scores of each class, and the confusion matrix.

    Of many classes there are those of the lowest scores, and no matrix.

    Args:
        rows: the name of each ``class``, and its scores; None or NaN for one that it does not have.
        counts: number of samples by true class (rows) and predicted class.
    """
    if not rows:
        return
    names = [name for name in rows[0] if name not in ("class", "color")]
    classes = [row["class"] for row in rows]
    title = "Scores by class, on the test set"
    if len(rows) > _IN_TABLES:
        worst = "f1" if "f1" in names else names[0]
        tested = [row for row in rows if _known(row[worst])]
        rows = sorted(tested, key=lambda row: row[worst])[:_IN_TABLES]
        title = f"The {len(rows)} classes with the lowest {_HEADINGS.get(worst, worst)}"
        title += f", of {len(classes)}"
    yield Text(title)
    table = _table("class", [_HEADINGS.get(name, name) for name in names])
    for row in rows:
        table.add_row(row["class"], *(_cell(row[name]) for name in names))
    yield table
    if counts and len(classes) <= _IN_MATRIX:
        yield Text("Test samples by true class (rows) and predicted class (columns)")
        matrix = _table("true", classes)
        for name, row_counts in zip(classes, counts, strict=True):
            matrix.add_row(name, *map(_cell, row_counts))
        yield matrix


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _cell(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1%}"


def _table(first: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _ratio(part: _Numbers, whole: _Numbers) -> _Numbers:
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The scores on the test set of answering alike for every sample."""

    answer: str
    """What is always answered."""
    scores: Mapping[str, float]
    """By name, those of the job."""
    each: str = "sample"
    """What is answered: every sample, or every pixel."""

    def __str__(self) -> str:
        return f"{self.answer!r} for every {self.each}"


def count_line(
    classes: Sequence[str], train: Sequence[int], test: Sequence[int], each: str = "sample"
) -> str:
    """Describe how many samples the classes have, the most frequent first.

    Args:
        classes: their names.
        train: number of training samples of each.
        test: number of test samples of each.
        each: what is counted.

    >>> count_line(["cat", "dog"], [30, 90], [3, 9])
    'samples by class, to train + to test: dog: 90 + 9; cat: 30 + 3'
    """
    order = sorted(range(len(classes)), key=lambda number: -train[number])
    # Of many, the ends are shown: what is rare is what a score may hide.
    shown = [*order[:_SHOWN], *order[-_SHOWN:]] if order[2 * _SHOWN + 1 :] else order
    told = [f"{classes[number]}: {train[number]:,} + {test[number]:,}" for number in shown]
    if len(shown) < len(order):
        told.insert(_SHOWN, f"... {len(order) - len(shown):,} others ...")
    return f"{each}s by class, to train + to test: {'; '.join(told)}"


def class_baseline(
    train_counts: Sequence[int], test_counts: Sequence[int], classes: Sequence[str]
) -> Baseline:
    """The baseline of a classifier: the class that is most frequent in training.

    The loss is that of predicting the classes' shares of the training set as their probabilities.

    Args:
        train_counts: number of training samples of each class.
        test_counts: number of test samples of each class.
        classes: names of the classes.

    >>> baseline = class_baseline([90, 10], [8, 2], ["dog", "cat"])
    >>> baseline.answer, baseline.scores["accuracy"], baseline.scores["balanced-accuracy"]
    ('dog', 0.8, 0.5)
    """
    train, test = np.asarray(train_counts), np.asarray(test_counts)
    most = int(train.argmax())
    counts = np.zeros((len(test), len(test)), dtype=np.int64)
    counts[:, most] = test
    with np.errstate(divide="ignore"):
        losses = -np.log(train / train.sum())
    met = test > 0
    loss = float((losses[met] * test[met]).sum() / test.sum())
    return Baseline(classes[most], {"loss": loss, **ClassScores(counts).overall})


def no_better(rule: str, value: float, baseline: Baseline) -> str | None:
    """Warn of a model that is no better than answering alike for every sample.

    Args:
        rule: how the best score is chosen, such as ``"highest accuracy"``.
        value: the model's best score.
        baseline: the scores to beat.

    Returns:
        The warning; None if the model is better, or the baseline has no such score.

    >>> no_better("highest accuracy", 0.81, Baseline("dog", {"accuracy": 0.8})) is None
    True
    >>> print(no_better("highest accuracy", 0.8, Baseline("dog", {"accuracy": 0.8})))
    This model is no better than the baseline, which answers 'dog' for every sample: its test \
accuracy is 80.0%, that of the baseline 80.0%
    """
    direction, _, name = rule.partition(" ")
    least = baseline.scores.get(name, math.nan)
    sign = 1 if direction == "highest" else -1
    # A model whose score is NaN is no better; a baseline whose score is NaN says nothing.
    if math.isnan(least) or sign * value > sign * least:
        return None
    return (
        f"This model is no better than the baseline, which answers {baseline}: its test {name} is "
        f"{spell(name, value)}, that of the baseline {spell(name, least)}"
    )

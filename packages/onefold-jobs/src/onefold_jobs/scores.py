"""Scores of a model, by class and overall, and scores of a constant prediction.

`ClassScores` derives the scores of a classifier from its confusion matrix. A `Baseline` contains
the scores of a constant prediction, which a useful model must beat: with unbalanced classes, a high
accuracy alone means nothing. `no_better` compares the two.

A job reports its scores by name, as `Trainer.save` stores them. `rule_of` returns whether the
highest or the lowest value of a score is the best.
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

from onefold.cli import counted

__all__ = [
    "FEW_STEPS",
    "Baseline",
    "ClassScores",
    "Measure",
    "Measured",
    "Predict",
    "class_baseline",
    "class_tables",
    "count_line",
    "frequent_confusions",
    "is_share",
    "no_better",
    "rule_of",
    "saved_rule",
    "spell",
    "verdict_of",
]

Measured = dict[str, torch.Tensor]
"""Values by name, with a row for each sample of a dataset."""
Measure = Callable[[nn.Module, Any], Measured]
"""Computes these values for a shard, as in ``Trainer.predict``."""
Predict = Callable[[Measure, Any], Measured]
"""``Trainer.predict`` of a measure and a dataset, which is read as in the run's evaluation."""

_LOWEST = frozenset({"loss", "mae", "rmse"})
_UNITS = _LOWEST | {"r2"}
"""Scores that are not fractions of 1."""
_SHOWN = 6
"""Number of largest and of smallest classes that a long list shows."""
_IN_TABLES, _IN_MATRIX = 20, 10
"""Maximum number of classes that a terminal shows in a list, and in a matrix."""
FEW_STEPS = 100
"""Number of steps below which a model learns hardly anything."""
_HEADINGS = {"f1": "F1", "iou": "IoU", "share": "share of pixels"}
_Numbers = np.ndarray[Any, Any]


def rule_of(name: str) -> str:
    """Return the rule that selects the best value of a score, as in ``Trainer.save``.

    >>> rule_of("macro-f1"), rule_of("loss")
    ('highest macro-f1', 'lowest loss')
    """
    return f"{'lowest' if name in _LOWEST else 'highest'} {name}"


def saved_rule(rule: str) -> str:
    """Return the rule by which checkpoints are kept: the lowest loss decides between equal scores.

    >>> saved_rule("highest accuracy"), saved_rule("lowest loss")
    ('highest accuracy, lowest loss', 'lowest loss')
    """
    return rule if rule == rule_of("loss") else f"{rule}, {rule_of('loss')}"


def is_share(name: str) -> bool:
    """Whether a score is displayed in percent."""
    return name not in _UNITS


def spell(name: str, value: float) -> str:
    """Format a score.

    >>> spell("macro-f1", 0.44781), spell("loss", 0.25)
    ('44.8%', '0.25')
    """
    return f"{value:.1%}" if is_share(name) else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Scores of a classifier; scores by class are (classes,) float64.

    The values match scikit-learn's functions of the same names. Undefined scores of a class are
    NaN, and means leave them out.

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
            predicted: (n,) integers, predicted class of each sample.
            classes: number of classes.
        """
        # Encode each pair of classes as one number. minlength keeps rows that would otherwise be
        # missing.
        pairs = np.asarray(truth, dtype=np.int64) * classes + predicted
        return cls(np.bincount(pairs, minlength=classes * classes).reshape(classes, classes))

    @property
    def support(self) -> _Numbers:
        """(classes,) int64: number of samples of each class."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def predicted(self) -> _Numbers:
        """(classes,) int64: number of predictions of each class."""
        return np.asarray(self.counts.sum(axis=0))

    @property
    def precision(self) -> _Numbers:
        """Fraction of a class's predictions that are right; 0 if there are none."""
        met = (self.support > 0) | (self.predicted > 0)
        return np.where(met, _ratio(self._right, np.maximum(self.predicted, 1)), np.nan)

    @property
    def recall(self) -> _Numbers:
        """Fraction of a class's samples that are recognized; NaN if there are none."""
        return _ratio(self._right, self.support)

    @property
    def f1(self) -> _Numbers:
        """Harmonic mean of precision and recall; NaN if a class has neither."""
        return _ratio(2 * self._right, self.support + self.predicted)

    @property
    def overall(self) -> dict[str, float]:
        """Accuracy, mean recall of the classes (balanced accuracy), and mean F1 of the classes."""
        return {
            "accuracy": float(self._right.sum() / self.counts.sum()),
            "balanced-accuracy": float(np.nanmean(self.recall)),
            "macro-f1": float(np.nanmean(self.f1)),
        }

    def rows(self, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield each class with its scores; None for undefined scores.

        Args:
            classes: class names.
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
    """Yield the terminal output: the scores of each class, and the confusion matrix.

    With many classes, only those with the lowest scores are shown, and no matrix.

    Args:
        rows: name of each ``class``, and its scores; None or NaN for undefined scores.
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


Counts = Sequence[Sequence[int]]  # (classes, classes): rows: true class, columns: predicted class


def frequent_confusions(counts: Counts) -> list[tuple[int, int, int]]:
    """List mistakes as (true class, predicted class, count), most frequent first.

    >>> frequent_confusions([[5, 1], [3, 7]])
    [(1, 0, 3), (0, 1, 1)]
    """
    mistakes = [
        (true, predicted, count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count > 0
    ]
    # Negated instead of reversed: sorting is stable, so equal counts keep the order of classes.
    return sorted(mistakes, key=lambda mistake: -mistake[2])


@dataclass(frozen=True, slots=True)
class Baseline:
    """Test scores of a constant prediction."""

    answer: str
    """The constant prediction."""
    scores: Mapping[str, float]
    """Scores by the job's names."""
    each: str = "sample"
    """Unit of prediction: sample or pixel."""

    def __str__(self) -> str:
        return f"{self.answer!r} for every {self.each}"


def count_line(
    classes: Sequence[str], train: Sequence[int], test: Sequence[int], each: str = "sample"
) -> str:
    """Describe the number of samples of each class, in descending order.

    Args:
        classes: class names.
        train: number of training samples of each class.
        test: number of test samples of each class.
        each: unit that is counted.

    >>> count_line(["cat", "dog"], [30, 90], [3, 9])
    'samples by class, training + test: dog: 90 + 9; cat: 30 + 3'
    """
    order = sorted(range(len(classes)), key=lambda number: -train[number])
    # With many classes, show both ends, because a score may hide rare classes.
    shown = [*order[:_SHOWN], *order[-_SHOWN:]] if order[2 * _SHOWN + 1 :] else order
    counts = [f"{classes[number]}: {train[number]:,} + {test[number]:,}" for number in shown]
    if len(shown) < len(order):
        counts.insert(_SHOWN, f"... {len(order) - len(shown):,} others ...")
    return f"{each}s by class, training + test: {'; '.join(counts)}"


def class_baseline(
    train_counts: Sequence[int], test_counts: Sequence[int], classes: Sequence[str]
) -> Baseline:
    """Return the baseline of a classifier: the most frequent training class.

    Its loss is that of predicting the class frequencies of the training set as probabilities.

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
    """Warn about a model that is no better than a constant prediction.

    Args:
        rule: rule that selects the best score, such as ``"highest accuracy"``.
        value: best score of the model.
        baseline: scores to beat.

    Returns:
        The warning; None if the model is better, or the baseline lacks this score.

    >>> no_better("highest accuracy", 0.81, Baseline("dog", {"accuracy": 0.8})) is None
    True
    >>> warning = no_better("highest accuracy", 0.8, Baseline("dog", {"accuracy": 0.8}))
    >>> print(warning.partition(":")[0])
    This model is no better than the baseline, which predicts 'dog' for every sample
    """
    direction, _, name = rule.partition(" ")
    least = baseline.scores.get(name, math.nan)
    sign = 1 if direction == "highest" else -1
    # A model with a score of NaN is no better; a baseline score of NaN cannot be compared.
    if math.isnan(least) or sign * value > sign * least:
        return None
    return (
        f"This model is no better than the baseline, which predicts {baseline}: its test {name} is "
        f"{spell(name, value)}, and the baseline's is {spell(name, least)}"
    )


def verdict_of(
    rule: str,
    value: float,
    baseline: Baseline,
    *,
    steps: int,
    examples: Mapping[str, object] | None = None,
    shrunk: bool = False,
) -> str | None:
    """Return the headline of a run that learned nothing, with advice; None for any other run.

    Args:
        rule: rule that selects the best score.
        value: best score of the run.
        baseline: scores to beat.
        steps: the run's number of steps.
        examples: contents of ``examples.json``, which show whether the run has classes.
        shrunk: whether the images were larger than the model takes.

    >>> baseline = Baseline("dog", {"accuracy": 0.8})
    >>> verdict_of("highest accuracy", 0.81, baseline, steps=9) is None
    True
    >>> print(verdict_of("highest accuracy", 0.8, baseline, steps=9).rpartition(". ")[2])
    The run made only 9 steps: use more --epochs
    """
    no = no_better(rule, value, baseline)
    if no is None:
        return None
    # Class weights are rejected for multi-label tasks, for regression, and for foreground masks.
    examples, also = examples or {}, " or --batch-size"
    if examples.get("confusion"):
        also = ", --class-weights auto or --balanced"
    elif examples.get("ious"):
        also = " or --class-weights auto"
    larger = " a larger --image-size," if shrunk else ""
    advice = f"More --epochs,{larger} another --lr{also} may help"
    if steps < FEW_STEPS:
        advice = f"The run made only {counted(steps, 'step')}: use more --epochs"
    return f"This run learned nothing. {no}. {advice}"

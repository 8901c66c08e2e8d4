"""Chooses the examples that a report shows of a classifier at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["classifier_examples", "spread"]

SHOWN = 24
"""How many examples of each kind a report shows."""


def classifier_examples(
    kind: str,
    said: torch.Tensor,
    labels: Sequence[int],
    classes: Sequence[str],
    show: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """Collect what a report shows of a trained classifier: its confusions, examples and mistakes.

    Args:
        kind: name of the job.
        said: (n, classes) float32, the predicted probability of every class.
        labels: the true classes of the n samples, as numbers.
        classes: the names of the classes.
        show: returns what is shown of a sample besides its classes, by the sample's number.
    """
    sure, predicted = said.max(dim=1)
    truth = torch.tensor(labels)
    samples, worst = choose_examples(truth, predicted, sure)

    def entry(number: int) -> dict[str, Any]:
        return {
            **show(number),
            "label": classes[int(truth[number])],
            "predicted": classes[int(predicted[number])],
            "confidence": float(sure[number]),
        }

    return {
        "kind": kind,
        "classes": list(classes),
        "confusion": confusion_matrix(truth, predicted, len(classes)),
        "samples": [entry(number) for number in samples],
        "worst": [entry(number) for number in worst],
    }


def choose_examples(
    truth: torch.Tensor, predicted: torch.Tensor, confidence: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Choose samples from all over the test set, and the worst mistakes, by their numbers.

    Args:
        truth: (n,) int64, the true classes.
        predicted: (n,) int64, the predicted classes.
        confidence: (n,) float32, the probability of the predicted class.

    >>> truth, predicted = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])
    >>> choose_examples(truth, predicted, torch.tensor([0.9, 0.6, 0.8]))
    ([0, 1, 2], [2, 1])
    """
    wrong = (truth != predicted).nonzero().flatten()
    # Stable, so that equally confident mistakes come in the same order on every device.
    order = confidence[wrong].argsort(descending=True, stable=True)
    return spread(len(truth)), wrong[order][:SHOWN].tolist()


def spread(samples: int) -> list[int]:
    """Choose the numbers of samples from all over a test set."""
    # Evenly: a test set is mostly in the order of its classes.
    count = min(SHOWN, samples)
    return [number * samples // count for number in range(count)]


def confusion_matrix(truth: torch.Tensor, predicted: torch.Tensor, classes: int) -> list[list[int]]:
    """Count how often each class (row) was taken for each class (column).

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
    [[1, 0], [1, 1]]
    """
    # Each pair of classes as one number; the least length, or the last rows could be missing.
    counts = torch.bincount(truth * classes + predicted, minlength=classes * classes)
    table: list[list[int]] = counts.view(classes, classes).tolist()
    return table

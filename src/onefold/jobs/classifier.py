"""What jobs that classify share: the loss, the score, and the examples that a report shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "Answer",
    "Measured",
    "Predict",
    "classifier_examples",
    "confidences",
    "loss_and_score",
    "spread",
]

SHOWN = 24
"""How many examples of each kind a report shows."""


Measured = dict[str, torch.Tensor]
Answer = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]
Measure = Callable[[nn.Module, Any], Measured]
Predict = Callable[[Measure, Any], Measured]
"""``Trainer.predict`` of a measure and a data set, read as in the evaluation of the run."""


def loss_and_score(answer: Answer, smoothing: float) -> tuple[Callable[..., torch.Tensor], Measure]:
    """Make the loss and the score of a classifier.

    Args:
        answer: returns the logits for a shard, (n, classes) float32, and its labels, (n,) int64.
        smoothing: share of a label that is spread over all classes in the loss.
    """

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits, labels = answer(model, batch)
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)

    def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        logits, labels = answer(model, batch)
        right = logits.argmax(dim=1) == labels
        return {"loss": F.cross_entropy(logits, labels, reduction="none"), "accuracy": right}

    return loss, score


def confidences(answer: Answer) -> Measure:
    """Make the measure of a classifier: the probability of every class, (n, classes) float32."""

    def measure(model: nn.Module, batch: Any) -> Measured:
        return {"confidence": answer(model, batch)[0].softmax(dim=1)}

    return measure


def classifier_examples(
    kind: str,
    predict: Predict,
    answer: Answer,
    data: Any,
    classes: Sequence[str],
    show: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """Collect what a report shows of a trained classifier: its confusions, examples and mistakes.

    Args:
        kind: name of the job.
        predict: reads and predicts a data set.
        answer: as `loss_and_score` takes it.
        data: the data set to test with; its ``labels`` are the true classes, as numbers.
        classes: the names of the classes.
        show: returns what is shown of a sample besides its classes, by the sample's number.
    """
    sure, predicted = predict(confidences(answer), data)["confidence"].max(dim=1)
    truth = torch.tensor(data.labels)
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

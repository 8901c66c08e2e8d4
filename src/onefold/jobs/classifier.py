"""One class for each sample: the loss, the scores, and the samples that a report shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.jobs.scores import ClassScores, Measured, class_baseline

__all__ = ["Answer", "BestBy", "ClassWeights", "choose_examples", "class_task", "spread"]

SHOWN = 24
"""How many examples of each kind a report shows."""

BestBy = Literal[
    "accuracy", "balanced-accuracy", "macro-f1", "loss", "micro-f1", "mean-average-precision",
    "rmse", "mae", "r2",
]  # fmt: skip
"""Of all tasks; `onefold.jobs.targets` has those of each."""
ClassWeights = Literal["none", "auto"]
Answer = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]
"""Returns the logits for a shard, (n, classes) float32, and its labels, (n,) int64."""


def class_task(
    answer: Answer,
    options: Any,
    *,
    train_labels: Sequence[int],
    test_labels: Sequence[int],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Make the parts of a `Task` that every classifier has.

    Args:
        answer: of the model.
        options: of the run.
        train_labels: number of the class of each training sample.
        test_labels: number of the class of each test sample.
        classes: names of the classes.
    """
    truth = torch.tensor(test_labels)
    counts = [
        torch.bincount(labels, minlength=len(classes))
        for labels in (torch.tensor(train_labels), truth)
    ]
    train, test = (each.tolist() for each in counts)
    # As many times as a class has fewer samples: the mean over all samples is 1.
    weights = len(train_labels) / (len(classes) * counts[0].clamp(min=1).to(torch.float32))
    weight = weights if options.class_weights == "auto" else None
    by_sample = weights[torch.tensor(train_labels)] if options.balanced else None

    def loss(model: nn.Module, batch: Any) -> Any:
        logits, labels = answer(model, batch)
        smoothing = options.label_smoothing
        if weight is None:
            return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        # By the weights of the whole batch, as PyTorch divides them.
        own = weight.to(logits.device)
        return onefold.losses.cross_entropy(logits, labels, own, label_smoothing=smoothing)

    def measure(model: nn.Module, batch: Any) -> Measured:
        logits, labels = answer(model, batch)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": losses, "predicted": logits.argmax(dim=1).to(torch.int32)}

    def score(found: Measured) -> dict[str, float]:
        scores = ClassScores.of(truth.numpy(), found["predicted"].numpy(), len(classes))
        return {"loss": float(found["loss"].to(torch.float64).mean()), **scores.overall}

    return {
        "loss": loss,
        "measure": measure,
        "score": score,
        "baseline": class_baseline(train, test, classes),
        "class_counts": (train, test),
        "class_weights": None if weight is None else weight.tolist(),
        "sample_weights": None if by_sample is None else by_sample.tolist(),
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


def spread(samples: int, most: int = SHOWN) -> list[int]:
    """Choose the numbers of samples from all over a test set."""
    # Evenly: a test set is mostly in the order of its classes.
    count = min(most, samples)
    return [number * samples // count for number in range(count)]

"""Chooses what a report shows of a classifier at work."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onefold.system.ownfiles import aside_of

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["choose_examples", "classifier_examples", "confusion_matrix", "save_picture"]

SHOWN = 24
"""Examples of each kind."""
_LARGEST = 224
"""Pixels of a picture's longer side in a report."""


def classifier_examples(
    kind: str,
    said: torch.Tensor,
    labels: Sequence[int],
    classes: Sequence[str],
    show: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """What a trained classifier says of its test set.

    Args:
        kind: name of the job.
        said: (n, classes) float32, the probability of every class.
        labels: of the n samples.
        classes: their names.
        show: what is shown of the sample of a number.
    """
    sure, predicted = said.max(dim=1)
    truth = torch.tensor(labels)
    samples, worst = choose_examples(truth, predicted, sure)

    def told(number: int) -> dict[str, Any]:
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
        "samples": [told(number) for number in samples],
        "worst": [told(number) for number in worst],
    }


def choose_examples(
    truth: torch.Tensor, predicted: torch.Tensor, confidence: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Numbers of samples from all over the test set, and of the worst mistakes.

    Args:
        truth: (n,) int64.
        predicted: (n,) int64.
        confidence: (n,) float32, in what was predicted.

    >>> label, said = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])
    >>> choose_examples(label, said, torch.tensor([0.9, 0.6, 0.8]))
    ([0, 1, 2], [2, 1])
    """
    count = min(SHOWN, len(truth))
    samples = [number * len(truth) // count for number in range(count)]
    wrong = (truth != predicted).nonzero().flatten()
    order = confidence[wrong].argsort(descending=True, stable=True)
    return samples, wrong[order][:SHOWN].tolist()


def confusion_matrix(truth: torch.Tensor, predicted: torch.Tensor, classes: int) -> list[list[int]]:
    """How often each class (row) was taken for each (column).

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
    [[1, 0], [1, 1]]
    """
    counts = torch.bincount(truth * classes + predicted, minlength=classes * classes)
    table: list[list[int]] = counts.view(classes, classes).tolist()
    return table


def save_picture(picture: Image, folder: Path, name: object) -> str:
    """Write a picture small enough for a report; its path from the run's folder."""
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "a link, and no folder of the run", str(folder))
    folder.mkdir(exist_ok=True)
    small = picture.copy()
    small.thumbnail((_LARGEST, _LARGEST))
    path = folder / f"{name}.png"
    with aside_of(path) as file:
        small.save(file, format="PNG")
    return f"{folder.name}/{path.name}"

"""Losses whose targets are classes or truth values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onefold.core.mean import Mean, sees_whole_batch
from onefold.losses.denominators import (
    Loss,
    Tensor,
    Weight,
    common_numel,
    counted,
    per_class,
    reduced,
    widened,
)

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "ctc_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "soft_margin_loss",
]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Loss:
    """Cross entropy of logits and classes, or of logits and class probabilities.

    A mean is divided by the number of targets that are not ``ignore_index``, or by the sum of the
    weights of their classes if there are weights; with probabilities it is divided by the number of
    targets, whatever the weights are. Label smoothing changes none of these. If every target is
    ignored, the total and the weight are 0.

    Args:
        input: (C,), (n, C) or (n, C, ...) logits.
        target: (), (n,) or (n, ...) int64 classes, or probabilities in the shape of ``input``.
        weight: (C,) weight of each class.
        ignore_index: the class of targets that do not count.
        reduction: ``mean``, ``sum`` or ``none``.
        label_smoothing: how much of each target is spread over all classes, from 0 to 1.

    Raises:
        ValueError: the reduction is unknown.

    >>> logits, targets = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    >>> cross_entropy(logits, targets, weight=torch.tensor([1.0, 4.0]))
    Mean(total=tensor(6.2383), weight=tensor(9.))
    """

    def denominator() -> Weight:
        # PyTorch, too, tells probabilities from classes by the shape alone.
        if target.shape == input.shape:
            return per_class(input)
        return counted(target, weight, ignore_index)

    return reduced(
        F.cross_entropy,
        (input, target),
        reduction,
        denominator,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Loss:
    """Negative log likelihood of classes.

    A mean is divided by the number of targets that are not ``ignore_index``, or by the sum of the
    weights of their classes.

    Args:
        input: (C,), (n, C) or (n, C, ...) log probabilities.
        target: (), (n,) or (n, ...) int64 classes.
        weight: (C,) weight of each class.
        ignore_index: the class of targets that do not count.
        reduction: ``mean``, ``sum`` or ``none``.

    Raises:
        ValueError: the reduction is unknown.

    >>> nll_loss(torch.full((3, 2), -0.5), torch.tensor([0, 1, 5]), ignore_index=5)
    Mean(total=tensor(1.), weight=tensor(2))
    """
    return reduced(
        F.nll_loss,
        (input, target),
        reduction,
        lambda: counted(target, weight, ignore_index),
        weight=weight,
        ignore_index=ignore_index,
    )


def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Loss:
    """Cross entropy of probabilities and targets between 0 and 1, both of the same shape.

    A mean is divided by the number of elements; ``weight`` scales them, and is not divided by.

    >>> binary_cross_entropy(torch.full((2, 3), 0.5), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    return reduced(F.binary_cross_entropy, (input, target), reduction, input.numel, weight=weight)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Loss:
    """Cross entropy of logits and targets between 0 and 1, both of the same shape.

    A mean is divided by the number of elements; ``weight`` and ``pos_weight`` scale them, and are
    not divided by.

    >>> binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    return reduced(
        F.binary_cross_entropy_with_logits,
        (input, target),
        reduction,
        input.numel,
        weight=weight,
        pos_weight=pos_weight,
    )


def soft_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Loss:
    """Logistic loss with targets that are 1 or -1; a mean is over the elements.

    >>> soft_margin_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    numel = common_numel(input, target)
    return reduced(F.soft_margin_loss, (input, target), reduction, lambda: numel)


def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    *,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Loss:
    """Hinge loss of classes; a mean is over the samples, and is not divided by ``weight``.

    >>> multi_margin_loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    Mean(total=tensor(1.5000), weight=3)
    """
    options = {"p": p, "margin": margin, "weight": weight}
    return reduced(F.multi_margin_loss, (input, target), reduction, target.numel, **options)


def multilabel_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Loss:
    """Hinge loss of several classes per sample; a mean is over the samples.

    Args:
        input: (C,) or (n, C) scores.
        target: int64 in the shape of ``input``: the classes, and -1 after the last one.
        reduction: ``mean``, ``sum`` or ``none``.

    >>> multilabel_margin_loss(torch.zeros(3, 2), torch.tensor([[0, -1], [1, -1], [1, 0]]))
    Mean(total=tensor(1.), weight=3)
    """
    samples = input.shape[0] if input.dim() == 2 else 1
    return reduced(F.multilabel_margin_loss, (input, target), reduction, lambda: samples)


def multilabel_soft_margin_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Loss:
    """Binary cross entropy averaged over the last dimension (classes); a mean is over the rest.

    >>> multilabel_soft_margin_loss(torch.zeros(3, 2), torch.ones(3, 2))
    Mean(total=tensor(2.0794), weight=3)
    """
    # PyTorch's total is averaged over the classes already: the rows are left to divide by.
    rows = common_numel(input, target) // max(input.shape[-1], 1)
    return reduced(
        F.multilabel_soft_margin_loss, (input, target), reduction, lambda: rows, weight=weight
    )


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Loss:
    """Connectionist temporal classification: a loss of sequences whose alignment is unknown.

    A mean is over the sequences, each divided by the length of its target. Note that ``log_probs``
    has time first, (T, n, C), while a batch is cut along its first dimension: pass batches with
    samples first, and transpose in the loss.

    >>> log_probs = torch.full((5, 2, 3), 1 / 3).log()
    >>> ctc_loss(log_probs, torch.ones(2, 2, dtype=torch.int64), [5, 5], [1, 2])
    Mean(total=tensor(4.1775), weight=2)
    """
    arguments = (log_probs, targets, input_lengths, target_lengths)
    options: dict[str, Any] = {"blank": blank, "zero_infinity": zero_infinity}
    if reduction != "mean" or sees_whole_batch():
        sequences = log_probs.shape[1] if log_probs.dim() == 3 else 1
        return reduced(F.ctc_loss, arguments, reduction, lambda: sequences, **options)
    # Each sequence has a divisor of its own inside the mean, so the total has to be added up here;
    # PyTorch counts an empty target as one of length 1.
    each = F.ctc_loss(widened(log_probs), *arguments[1:], reduction="none", **options)
    lengths = torch.as_tensor(target_lengths, device=each.device).clamp(min=1)
    return Mean((each / lengths).sum(), each.numel())

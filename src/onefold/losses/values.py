"""Losses of values, distributions and distances."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F

from onefold.losses.denominators import (
    Loss,
    Tensor,
    common_numel,
    distance,
    reduced,
)

__all__ = [
    "cosine_embedding_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "triplet_margin_loss",
]


def mse_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Loss:
    """Squared differences between two tensors of the same shape.

    A mean is divided by the number of elements, or by the sum of ``weight``, one per element.

    Raises:
        ValueError: the target would broadcast the input, as one of (n,) does with (n, 1).

    >>> mse_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(6.), weight=6)
    """
    return distance(F.mse_loss, input, target, reduction, weight)


def l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Loss:
    """Absolute differences between two tensors of the same shape.

    A mean is divided by the number of elements, or by the sum of ``weight``, one per element.

    Raises:
        ValueError: the target would broadcast the input, as one of (n,) does with (n, 1).

    >>> l1_loss(torch.zeros(2, 3), torch.full((2, 3), 0.5))
    Mean(total=tensor(3.), weight=6)
    """
    return distance(F.l1_loss, input, target, reduction, weight)


def smooth_l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0
) -> Loss:
    """Squared differences below ``beta``, absolute ones above; a mean is over the elements.

    Raises:
        ValueError: the target would broadcast the input, as one of (n,) does with (n, 1).

    >>> smooth_l1_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(3.), weight=6)
    """
    numel = common_numel(input, target)
    return reduced(F.smooth_l1_loss, (input, target), reduction, lambda: numel, beta=beta)


def huber_loss(
    input: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Loss:
    """Squared differences below ``delta``, absolute ones above.

    A mean is divided by the number of elements, even with a ``weight``: it scales them, and unlike
    the one of `mse_loss` is not divided by.

    Raises:
        ValueError: the target would broadcast the input, as one of (n,) does with (n, 1).

    >>> huber_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(3.), weight=6)
    """
    numel = common_numel(input, target)
    options = {} if weight is None else {"weight": weight}
    return reduced(F.huber_loss, (input, target), reduction, lambda: numel, delta=delta, **options)


def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False
) -> Loss:
    """Kullback-Leibler divergence of log probabilities from probabilities.

    ``reduction="batchmean"`` divides by the first dimension, which is what the definition asks for;
    ``mean`` divides by the number of elements.

    Raises:
        ValueError: the reduction is unknown, or the target would broadcast the input.

    >>> kl_div(torch.full((2, 2), -1.0), torch.full((2, 2), 0.5), reduction="batchmean")
    Mean(total=tensor(0.6137), weight=2)
    """
    numel = common_numel(input, target)
    function: Callable[..., Tensor] = _kl_div
    # PyTorch's own batchmean is a sum divided by the number of rows, so a mean with that divisor.
    if reduction == "batchmean":
        numel, reduction = input.shape[0] if input.dim() else 1, "mean"
        function = functools.partial(_kl_div, rows=numel)
    return reduced(function, (input, target), reduction, lambda: numel, log_target=log_target)


def _kl_div(
    input: Tensor, target: Tensor, *, reduction: str, log_target: bool, rows: int | None = None
) -> Tensor:
    if reduction != "mean":
        return F.kl_div(input, target, reduction=reduction, log_target=log_target)
    # PyTorch computes both so, and warns of the mean.
    each = F.kl_div(input, target, reduction="none", log_target=log_target)
    return each.mean() if rows is None else each.sum() / rows


def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Loss:
    """Negative log likelihood of Poisson-distributed counts; a mean is over the elements.

    Raises:
        ValueError: the target would broadcast the input, as one of (n,) does with (n, 1).

    >>> poisson_nll_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(6.), weight=6)
    """
    numel = common_numel(input, target)
    options = {"log_input": log_input, "full": full, "eps": eps}
    return reduced(F.poisson_nll_loss, (input, target), reduction, lambda: numel, **options)


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Loss:
    """Negative log likelihood of a Gaussian with mean ``input``; a mean is over the elements.

    Raises:
        ValueError: the target would broadcast the input, as one of (n,) does with (n, 1).

    >>> gaussian_nll_loss(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 1))
    Mean(total=tensor(3.), weight=6)
    """
    numel = common_numel(input, target)
    options = {"full": full, "eps": eps}
    return reduced(F.gaussian_nll_loss, (input, target, var), reduction, lambda: numel, **options)


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: str = "mean"
) -> Loss:
    """How far two inputs are from the order given by targets of 1 or -1; a mean is over elements.

    >>> margin_ranking_loss(torch.zeros(3), torch.ones(3), torch.ones(3))
    Mean(total=tensor(3.), weight=3)
    """
    numel = common_numel(input1, input2, target)
    tensors = (input1, input2, target)
    return reduced(F.margin_ranking_loss, tensors, reduction, lambda: numel, margin=margin)


def hinge_embedding_loss(
    input: Tensor, target: Tensor, *, margin: float = 1.0, reduction: str = "mean"
) -> Loss:
    """The distance of similar pairs (1), and by how much that of others (-1) is below the margin.

    A mean is over the elements.

    >>> hinge_embedding_loss(torch.full((3,), 0.25), torch.tensor([1, -1, -1]))
    Mean(total=tensor(1.7500), weight=3)
    """
    numel = common_numel(input, target)
    return reduced(F.hinge_embedding_loss, (input, target), reduction, lambda: numel, margin=margin)


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: str = "mean"
) -> Loss:
    """Compare the angles of pairs: similar ones have targets of 1, and others of -1.

    The loss of a similar pair is 1 minus its cosine, that of any other by how much its cosine
    exceeds the margin. A mean is over the pairs.

    >>> cosine_embedding_loss(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([1, -1, -1]))
    Mean(total=tensor(2.), weight=3)
    """
    tensors = (input1, input2, target)
    return reduced(F.cosine_embedding_loss, tensors, reduction, target.numel, margin=margin)


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Loss:
    """By how much the negative is closer to the anchor than the margin allows.

    A mean is over the triplets.

    >>> anchor, other = torch.zeros(3, 2), torch.ones(3, 2)
    >>> triplet_margin_loss(anchor, other, other, margin=0.5)
    Mean(total=tensor(1.5000), weight=3)
    """
    rows = common_numel(anchor, positive, negative) // max(anchor.shape[-1], 1)
    options = {"margin": margin, "p": p, "eps": eps, "swap": swap}
    tensors = (anchor, positive, negative)
    return reduced(F.triplet_margin_loss, tensors, reduction, lambda: rows, **options)

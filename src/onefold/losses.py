"""PyTorch's losses with the denominators that they have over the whole batch.

Each function is the one of the same name in `torch.nn.functional`, with its arguments. The loss of
one shard cannot be divided by what the whole batch has (the weights of its classes, its targets
that are not ignored), so the division is left to the engine:

- ``reduction="mean"`` returns a `Mean`: the total, and what PyTorch divides it by,
- ``reduction="sum"`` returns a `Sum`,
- ``reduction="none"`` returns PyTorch's own tensor.

>>> import torch
>>> from onefold import losses
>>> logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, -100, -100])
>>> losses.cross_entropy(logits, targets)
Mean(total=tensor(1.3863), weight=tensor(2))
>>> losses.cross_entropy(logits, targets) + 0.1 * losses.mse_loss(logits, logits, reduction="sum")
Means(terms=(Mean(total=tensor(1.3863), weight=tensor(2)), Sum(total=tensor(0.))))

Not here: losses that compare samples with each other (contrastive ones), whose value over a batch
is no sum over its shards. Totals of half precision are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onefold.core.mean import Mean, Sum

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
]

Tensor = torch.Tensor
Weight = Tensor | float

Loss = Any
"""A `Mean`, a `Sum` or a tensor, as ``reduction`` says; a union would refuse every ``+``."""


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Loss:
    """Cross entropy of logits and classes, or of logits and probabilities of classes.

    A mean is divided by the number of targets that are not ``ignore_index``, by the sum of their
    classes' weights where there are any, and for probabilities by their number whatever the
    weights are. Label smoothing changes none of these. Where every target is ignored, the total and
    the weight are 0.

    Args:
        input: (C,), (n, C) or (n, C, ...) logits.
        target: (), (n,) or (n, ...) int64 classes, or probabilities of the shape of ``input``.
        weight: (C,) of each class.
        ignore_index: targets that do not count.
        reduction: ``mean``, ``sum`` or ``none``.
        label_smoothing: how much of each target is spread over all classes, from 0 to 1.

    Raises:
        ValueError: an unknown reduction.

    >>> logits, targets = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    >>> cross_entropy(logits, targets, weight=torch.tensor([1.0, 4.0]))
    Mean(total=tensor(6.2383), weight=tensor(9.))
    """

    def denominator() -> Weight:
        if target.shape == input.shape:
            return _per_class(input)
        return _counted(target, weight, ignore_index)

    return _reduced(
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

    A mean is divided by the number of targets that are not ``ignore_index``, or by the sum of their
    classes' weights.

    Args:
        input: (C,), (n, C) or (n, C, ...) log probabilities.
        target: (), (n,) or (n, ...) int64 classes.
        weight: (C,) of each class.
        ignore_index: targets that do not count.
        reduction: ``mean``, ``sum`` or ``none``.

    Raises:
        ValueError: an unknown reduction.

    >>> nll_loss(torch.full((3, 2), -0.5), torch.tensor([0, 1, 5]), ignore_index=5)
    Mean(total=tensor(1.), weight=tensor(2))
    """
    return _reduced(
        F.nll_loss,
        (input, target),
        reduction,
        lambda: _counted(target, weight, ignore_index),
        weight=weight,
        ignore_index=ignore_index,
    )


def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Loss:
    """Cross entropy of probabilities and targets between 0 and 1, both of any one shape.

    A mean is divided by the number of elements; ``weight`` scales them and does not divide.

    >>> binary_cross_entropy(torch.full((2, 3), 0.5), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    return _reduced(F.binary_cross_entropy, (input, target), reduction, input.numel, weight=weight)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Loss:
    """Cross entropy of logits and targets between 0 and 1, both of any one shape.

    A mean is divided by the number of elements; ``weight`` and ``pos_weight`` scale them and do not
    divide.

    >>> binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    return _reduced(
        F.binary_cross_entropy_with_logits,
        (input, target),
        reduction,
        input.numel,
        weight=weight,
        pos_weight=pos_weight,
    )


def mse_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Loss:
    """Squared differences of two tensors of one shape.

    A mean is divided by the number of elements, or by the sum of ``weight``, one for each of them.

    Raises:
        ValueError: the target would make the input larger, as (n,) does with (n, 1).

    >>> mse_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(6.), weight=6)
    """
    return _distance(F.mse_loss, input, target, reduction, weight)


def l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Loss:
    """Absolute differences of two tensors of one shape.

    A mean is divided by the number of elements, or by the sum of ``weight``, one for each of them.

    Raises:
        ValueError: the target would make the input larger, as (n,) does with (n, 1).

    >>> l1_loss(torch.zeros(2, 3), torch.full((2, 3), 0.5))
    Mean(total=tensor(3.), weight=6)
    """
    return _distance(F.l1_loss, input, target, reduction, weight)


def smooth_l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0
) -> Loss:
    """Squared differences below ``beta``, absolute ones above; a mean is over the elements.

    Raises:
        ValueError: the target would make the input larger, as (n,) does with (n, 1).

    >>> smooth_l1_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(3.), weight=6)
    """
    numel = _common_numel(input, target)
    return _reduced(F.smooth_l1_loss, (input, target), reduction, lambda: numel, beta=beta)


def huber_loss(
    input: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Loss:
    """Squared differences below ``delta``, absolute ones above.

    A mean is divided by the number of elements, with ``weight`` as well, which scales them and,
    unlike that of `mse_loss`, does not divide.

    Raises:
        ValueError: the target would make the input larger, as (n,) does with (n, 1).

    >>> huber_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(3.), weight=6)
    """
    numel = _common_numel(input, target)
    options = {} if weight is None else {"weight": weight}
    return _reduced(F.huber_loss, (input, target), reduction, lambda: numel, delta=delta, **options)


def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False
) -> Loss:
    """Kullback-Leibler divergence of log probabilities from probabilities.

    ``reduction="batchmean"`` divides by the first dimension, which is what the definition asks for;
    ``mean`` divides by the number of elements.

    Raises:
        ValueError: an unknown reduction; the target would make the input larger.

    >>> kl_div(torch.full((2, 2), -1.0), torch.full((2, 2), 0.5), reduction="batchmean")
    Mean(total=tensor(0.6137), weight=2)
    """
    numel = _common_numel(input, target)
    if reduction == "batchmean":
        numel, reduction = input.shape[0] if input.dim() else 1, "mean"
    return _reduced(F.kl_div, (input, target), reduction, lambda: numel, log_target=log_target)


def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Loss:
    """Negative log likelihood of counts that are Poisson distributed; a mean is over the elements.

    Raises:
        ValueError: the target would make the input larger, as (n,) does with (n, 1).

    >>> poisson_nll_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(6.), weight=6)
    """
    numel = _common_numel(input, target)
    options = {"log_input": log_input, "full": full, "eps": eps}
    return _reduced(F.poisson_nll_loss, (input, target), reduction, lambda: numel, **options)


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
        ValueError: the target would make the input larger, as (n,) does with (n, 1).

    >>> gaussian_nll_loss(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 1))
    Mean(total=tensor(3.), weight=6)
    """
    numel = _common_numel(input, target)
    options = {"full": full, "eps": eps}
    return _reduced(F.gaussian_nll_loss, (input, target, var), reduction, lambda: numel, **options)


def soft_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Loss:
    """Logistic loss of targets that are 1 or -1; a mean is over the elements.

    >>> soft_margin_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    numel = _common_numel(input, target)
    return _reduced(F.soft_margin_loss, (input, target), reduction, lambda: numel)


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: str = "mean"
) -> Loss:
    """How far two inputs are from the order that targets of 1 or -1 name; a mean is over elements.

    >>> margin_ranking_loss(torch.zeros(3), torch.ones(3), torch.ones(3))
    Mean(total=tensor(3.), weight=3)
    """
    numel = _common_numel(input1, input2, target)
    tensors = (input1, input2, target)
    return _reduced(F.margin_ranking_loss, tensors, reduction, lambda: numel, margin=margin)


def hinge_embedding_loss(
    input: Tensor, target: Tensor, *, margin: float = 1.0, reduction: str = "mean"
) -> Loss:
    """Distances of like pairs (1), and the margin's rest of unlike ones (-1); a mean of elements.

    >>> hinge_embedding_loss(torch.full((3,), 0.25), torch.tensor([1, -1, -1]))
    Mean(total=tensor(1.7500), weight=3)
    """
    numel = _common_numel(input, target)
    return _reduced(
        F.hinge_embedding_loss, (input, target), reduction, lambda: numel, margin=margin
    )


def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    *,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Loss:
    """Hinge loss of classes; a mean is over the samples, and ``weight`` does not divide.

    >>> multi_margin_loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    Mean(total=tensor(1.5000), weight=3)
    """
    options = {"p": p, "margin": margin, "weight": weight}
    return _reduced(F.multi_margin_loss, (input, target), reduction, target.numel, **options)


def multilabel_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Loss:
    """Hinge loss of several classes a sample; a mean is over the samples.

    Args:
        input: (C,) or (n, C).
        target: of its shape, int64: classes, and -1 after the last one.
        reduction: ``mean``, ``sum`` or ``none``.

    >>> multilabel_margin_loss(torch.zeros(3, 2), torch.tensor([[0, -1], [1, -1], [1, 0]]))
    Mean(total=tensor(1.), weight=3)
    """
    samples = input.shape[0] if input.dim() == 2 else 1
    return _reduced(F.multilabel_margin_loss, (input, target), reduction, lambda: samples)


def multilabel_soft_margin_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Loss:
    """Binary cross entropy averaged over the classes, which come last; a mean is over the rest.

    >>> multilabel_soft_margin_loss(torch.zeros(3, 2), torch.ones(3, 2))
    Mean(total=tensor(2.0794), weight=3)
    """
    rows = _common_numel(input, target) // max(input.shape[-1], 1)
    return _reduced(
        F.multilabel_soft_margin_loss, (input, target), reduction, lambda: rows, weight=weight
    )


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: str = "mean"
) -> Loss:
    """Angles of like pairs (1), and what unlike ones (-1) have above the margin; a mean of pairs.

    >>> cosine_embedding_loss(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([1, -1, -1]))
    Mean(total=tensor(2.), weight=3)
    """
    tensors = (input1, input2, target)
    return _reduced(F.cosine_embedding_loss, tensors, reduction, target.numel, margin=margin)


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
    """How much nearer the negative is than the margin allows; a mean is over the triplets.

    >>> anchor, other = torch.zeros(3, 2), torch.ones(3, 2)
    >>> triplet_margin_loss(anchor, other, other, margin=0.5)
    Mean(total=tensor(1.5000), weight=3)
    """
    rows = _common_numel(anchor, positive, negative) // max(anchor.shape[-1], 1)
    options = {"margin": margin, "p": p, "eps": eps, "swap": swap}
    tensors = (anchor, positive, negative)
    return _reduced(F.triplet_margin_loss, tensors, reduction, lambda: rows, **options)


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
    """Connectionist temporal classification: sequences whose alignment is not known.

    A mean is over the sequences, each divided by the length of its target. Mind that ``log_probs``
    has time first, (T, n, C), and a batch is cut along its first dimension: hand batches over with
    samples first, and transpose in the loss.

    >>> log_probs = torch.full((5, 2, 3), 1 / 3).log()
    >>> ctc_loss(log_probs, torch.ones(2, 2, dtype=torch.int64), [5, 5], [1, 2])
    Mean(total=tensor(4.1775), weight=2)
    """
    arguments = (log_probs, targets, input_lengths, target_lengths)
    options: dict[str, Any] = {"blank": blank, "zero_infinity": zero_infinity}
    if reduction != "mean":
        return _reduced(F.ctc_loss, arguments, reduction, lambda: 0, **options)
    each = F.ctc_loss(_wide(log_probs), *arguments[1:], reduction="none", **options)
    lengths = torch.as_tensor(target_lengths, device=each.device).clamp(min=1)
    return Mean((each / lengths).sum(), each.numel())


def _distance(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    reduction: str,
    weight: Tensor | None,
) -> Loss:
    numel = _common_numel(input, target)
    if weight is None:
        return _reduced(function, (input, target), reduction, lambda: numel)
    return _reduced(function, (input, target), reduction, lambda: _added(weight), weight=weight)


def _reduced(
    function: Callable[..., Tensor],
    tensors: tuple[object, ...],
    reduction: str,
    denominator: Callable[[], Weight],
    **options: Any,
) -> Loss:
    if reduction == "none":
        return function(*tensors, reduction=reduction, **options)
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"expected reduction to be 'mean', 'sum' or 'none' ('batchmean' as well for kl_div), "
            f"got {reduction!r}"
        )
    wide = {name: _wide(option) for name, option in options.items()}
    total = function(*map(_wide, tensors), reduction="sum", **wide)
    return Sum(total) if reduction == "sum" else Mean(total, denominator())


def _wide(value: Any) -> Any:
    """Half precision in float32: the sum over a shard would soon be beyond float16's 65504."""
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if half else value


def _counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """() how many targets count, or the sum of their classes' weights; nobody waits for a GPU."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    weights = weight.detach()[target.where(counts, 0)]
    return _added(weights.where(counts, 0))


def _per_class(input: Tensor) -> int:
    """How many distributions over classes there are."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    return input.numel() // max(classes, 1)


def _added(weights: Tensor) -> Tensor:
    wide: Tensor = _wide(weights.detach())
    return wide.sum()


def _common_numel(input: Tensor, *others: Tensor) -> int:
    """How many elements a loss of tensors has that are broadcast to the first one's shape.

    Were the first one to grow, a target of (n,) beside an input of (n, 1) would compare every
    sample with every other, and the whole batch would be no sum of its shards.
    """
    for other in others:
        if other.shape != input.shape and not _fits(other.shape, input.shape):
            raise ValueError(
                f"expected tensors of one shape, got {tuple(input.shape)} and "
                f"{tuple(other.shape)}, which would compare samples with each other. Give both the "
                f"same shape, such as with squeeze(1) or unsqueeze(1)"
            )
    return input.numel()


def _fits(shape: torch.Size, larger: torch.Size) -> bool:
    """Whether the one is broadcast to the other."""
    ends = zip(reversed(shape), reversed(larger), strict=False)
    return len(shape) <= len(larger) and all(size in (1, other) for size, other in ends)

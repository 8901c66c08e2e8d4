"""PyTorch's losses, with the denominators that they have over the whole batch.

Each function takes the arguments of its namesake in `torch.nn.functional`. A shard does not know
the denominator of the whole batch's loss (the weights of its classes, the number of targets that
are not ignored), so the engine divides:

- ``reduction="mean"`` returns a `Mean`: the total, and the shard's part of PyTorch's denominator,
- ``reduction="sum"`` returns a `Sum`,
- ``reduction="none"`` returns PyTorch's own tensor.

>>> import torch
>>> from onefold import losses
>>> logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, -100, -100])
>>> losses.cross_entropy(logits, targets)
Mean(total=tensor(1.3863), weight=tensor(2))
>>> losses.cross_entropy(logits, targets) + 0.1 * losses.mse_loss(logits, logits, reduction="sum")
LossTerms(terms=(Mean(total=tensor(1.3863), weight=tensor(2)), Sum(total=tensor(0.))))

Losses that compare samples with each other (contrastive ones) are missing, because their value over
a batch is not a sum over its shards. Totals of half precision are summed in float32.

Note: denominators without blocking
-----------------------------------
A denominator that depends on the targets stays a tensor on their device. Reading it as a number
would block on a GPU in the middle of the user's loss. For the same reason it is computed by
operations with a fixed output shape: indexing with a boolean mask would block on the number of true
values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch
import torch.nn.functional as F

from onefold.core.mean import PASS, Mean, Sum, mean_of_whole

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
# () tensor without gradient, or a number.
Weight = Tensor | float
Loss = Mean | Sum | Tensor
_P = ParamSpec("_P")


class _ByReduction(Protocol[_P]):
    """Type of a loss: ``reduction`` determines that of its result."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the last one is for calls without reduction
        self, *args: Any, reduction: Literal["sum"], **named: Any
    ) -> Sum: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, reduction: Literal["none"], **named: Any
    ) -> Tensor: ...
    @overload
    def __call__(
        self, *args: Any, reduction: Literal["mean", "batchmean"], **named: Any
    ) -> Mean: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, reduction: str, **named: Any
    ) -> Loss: ...
    @overload
    def __call__(self, *args: _P.args, **named: _P.kwargs) -> Mean: ...


def by_reduction(function: Callable[_P, Loss]) -> _ByReduction[_P]:
    """Return the function itself, with a type for each ``reduction``."""
    return cast(_ByReduction[_P], function)


def distance(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    reduction: str,
    weight: Tensor | None,
) -> Loss:
    if weight is None:
        return by_element(function, (input, target), reduction)
    # This weighted mean is one of the few that PyTorch divides by the sum of weights.
    common_numel(input, target)
    return reduced(function, (input, target), reduction, lambda: _added(weight), weight=weight)


def by_element(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], reduction: str, **options: Any
) -> Loss:
    """Compute a loss whose mean is over the elements of the tensors."""
    numel = common_numel(*tensors)
    return reduced(function, tensors, reduction, lambda: numel, **options)


def reduced(
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
            f"reduction must be 'mean', 'sum' or 'none' (or 'batchmean' for kl_div), but got "
            f"{reduction!r}"
        )
    if PASS.whole:
        # The bits of a plain loop: no other shard is added to this value.
        value = function(*tensors, reduction=reduction, **options)
        return Sum(value) if reduction == "sum" else mean_of_whole(value, denominator())
    # The loss function itself sums, in float32 or better. Compute the denominator only if it is
    # needed: on a GPU it takes several kernels.
    wide = {name: widened(option) for name, option in options.items()}
    total = function(*map(widened, tensors), reduction="sum", **wide)
    return Sum(total) if reduction == "sum" else Mean(total, denominator())


def widened(value: Any) -> Any:
    """Convert half precision to float32: a shard's sum would soon exceed float16's 65504."""
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if half else value


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Count the targets that are not ignored, or sum the weights of their classes: ()."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    # An ignored target, such as -100, is not a valid index. Replace it before the lookup, and its
    # weight by 0 afterwards.
    weights = weight.detach()[target.where(counts, 0)]
    return _added(weights.where(counts, 0))


def per_class(input: Tensor) -> int:
    """Return the number of distributions over classes in ``input``."""
    classes = input.shape[0 if input.dim() == 1 else 1]
    return input.numel() // max(classes, 1)


def _added(weights: Tensor) -> Tensor:
    wide: Tensor = widened(weights.detach())
    return wide.sum()


def common_numel(input: Tensor, *others: Tensor) -> int:
    """Return the number of elements of a loss, with all tensors broadcast to the first one's shape.

    The first tensor must not be broadcast itself. A target of (n,) with an input of (n, 1) would
    give (n, n): it would compare every sample with every other, and the loss of the whole batch
    would not be a sum over its shards.
    """
    for other in others:
        if other.shape != input.shape and not _fits(other.shape, input.shape):
            raise ValueError(
                f"tensors must have the same shape, but got {tuple(input.shape)} and "
                f"{tuple(other.shape)}, which would compare samples with each other. Reshape one, "
                f"for instance with squeeze(1) or unsqueeze(1)"
            )
    return input.numel()


def _fits(shape: torch.Size, larger: torch.Size) -> bool:
    """Whether ``shape`` can be broadcast to ``larger`` without changing the latter."""
    ends = zip(reversed(shape), reversed(larger), strict=False)
    return len(shape) <= len(larger) and all(size in (1, other) for size, other in ends)


@by_reduction
def mse_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Loss:
    """Squared differences between two tensors of the same shape.

    A mean is divided by the number of elements, or by the sum of ``weight``, one per element.

    Raises:
        ValueError: the target would broadcast the input, as (n,) does with (n, 1).

    >>> mse_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(6.), weight=6)
    """
    return distance(F.mse_loss, input, target, reduction, weight)


@by_reduction
def l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Loss:
    """Absolute differences between two tensors of the same shape.

    A mean is divided by the number of elements, or by the sum of ``weight``, one per element.

    Raises:
        ValueError: the target would broadcast the input, as (n,) does with (n, 1).

    >>> l1_loss(torch.zeros(2, 3), torch.full((2, 3), 0.5))
    Mean(total=tensor(3.), weight=6)
    """
    return distance(F.l1_loss, input, target, reduction, weight)


@by_reduction
def smooth_l1_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0
) -> Loss:
    """Squared differences below ``beta``, absolute ones above; a mean is over the elements.

    Raises:
        ValueError: the target would broadcast the input, as (n,) does with (n, 1).

    >>> smooth_l1_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(3.), weight=6)
    """
    return by_element(F.smooth_l1_loss, (input, target), reduction, beta=beta)


@by_reduction
def huber_loss(
    input: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Loss:
    """Squared differences below ``delta``, absolute ones above.

    A mean is divided by the number of elements, even with a ``weight``, which only scales them. In
    `mse_loss`, in contrast, the mean is divided by the sum of weights.

    Raises:
        ValueError: the target would broadcast the input, as (n,) does with (n, 1).

    >>> huber_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(3.), weight=6)
    """
    return by_element(F.huber_loss, (input, target), reduction, delta=delta, weight=weight)


@by_reduction
def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False
) -> Loss:
    """Kullback-Leibler divergence of log probabilities from probabilities.

    ``reduction="batchmean"`` divides by the first dimension, as the definition requires; ``mean``
    divides by the number of elements.

    Raises:
        ValueError: the reduction is unknown, or the target would broadcast the input.

    >>> kl_div(torch.full((2, 2), -1.0), torch.full((2, 2), 0.5), reduction="batchmean")
    Mean(total=tensor(0.6137), weight=2)
    """
    numel = common_numel(input, target)
    function: Callable[..., Tensor] = _kl_div
    # PyTorch's own batchmean is a sum divided by the number of rows: a mean with that denominator.
    if reduction == "batchmean":
        numel, reduction = input.shape[0] if input.dim() else 1, "mean"
        function = functools.partial(_kl_div, rows=numel)
    return reduced(function, (input, target), reduction, lambda: numel, log_target=log_target)


def _kl_div(
    input: Tensor, target: Tensor, *, reduction: str, log_target: bool, rows: int | None = None
) -> Tensor:
    if reduction != "mean":
        return F.kl_div(input, target, reduction=reduction, log_target=log_target)
    # Computed as PyTorch does, which warns about its own mean.
    each = F.kl_div(input, target, reduction="none", log_target=log_target)
    return each.mean() if rows is None else each.sum() / rows


@by_reduction
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
        ValueError: the target would broadcast the input, as (n,) does with (n, 1).

    >>> poisson_nll_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(6.), weight=6)
    """
    options = {"log_input": log_input, "full": full, "eps": eps}
    return by_element(F.poisson_nll_loss, (input, target), reduction, **options)


@by_reduction
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
        ValueError: the target would broadcast the input, as (n,) does with (n, 1).

    >>> gaussian_nll_loss(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 1))
    Mean(total=tensor(3.), weight=6)
    """
    options = {"var": var, "full": full, "eps": eps}
    return by_element(F.gaussian_nll_loss, (input, target), reduction, **options)


@by_reduction
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, *, margin: float = 0.0, reduction: str = "mean"
) -> Loss:
    """Distance of two inputs from the order that targets of 1 or -1 give; a mean is over elements.

    >>> margin_ranking_loss(torch.zeros(3), torch.ones(3), torch.ones(3))
    Mean(total=tensor(3.), weight=3)
    """
    return by_element(F.margin_ranking_loss, (input1, input2, target), reduction, margin=margin)


@by_reduction
def hinge_embedding_loss(
    input: Tensor, target: Tensor, *, margin: float = 1.0, reduction: str = "mean"
) -> Loss:
    """Distance of similar pairs (1); for other pairs (-1), the margin minus it, at least 0.

    A mean is over the elements.

    >>> hinge_embedding_loss(torch.full((3,), 0.25), torch.tensor([1, -1, -1]))
    Mean(total=tensor(1.7500), weight=3)
    """
    return by_element(F.hinge_embedding_loss, (input, target), reduction, margin=margin)


@by_reduction
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


@by_reduction
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
    """Amount by which the negative is closer to the anchor than the margin allows.

    A mean is over the triplets.

    >>> anchor, other = torch.zeros(3, 2), torch.ones(3, 2)
    >>> triplet_margin_loss(anchor, other, other, margin=0.5)
    Mean(total=tensor(1.5000), weight=3)
    """
    rows = common_numel(anchor, positive, negative) // max(anchor.shape[-1], 1)
    options = {"margin": margin, "p": p, "eps": eps, "swap": swap}
    tensors = (anchor, positive, negative)
    return reduced(F.triplet_margin_loss, tensors, reduction, lambda: rows, **options)


@by_reduction
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
        # PyTorch also tells probabilities from classes by the shape alone.
        if target.shape == input.shape:
            return per_class(input)
        return counted(target, weight, ignore_index)

    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return reduced(
        F.cross_entropy, (input, target), reduction, denominator, weight=weight, **options
    )


@by_reduction
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
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index}
    denominator = functools.partial(counted, target, weight, ignore_index)
    return reduced(F.nll_loss, (input, target), reduction, denominator, **options)


@by_reduction
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Loss:
    """Cross entropy of probabilities and targets between 0 and 1, both of the same shape.

    A mean is divided by the number of elements; ``weight`` only scales them.

    >>> binary_cross_entropy(torch.full((2, 3), 0.5), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    return reduced(F.binary_cross_entropy, (input, target), reduction, input.numel, weight=weight)


@by_reduction
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Loss:
    """Cross entropy of logits and targets between 0 and 1, both of the same shape.

    A mean is divided by the number of elements; ``weight`` and ``pos_weight`` only scale them.

    >>> binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    function, options = F.binary_cross_entropy_with_logits, {"pos_weight": pos_weight}
    return reduced(function, (input, target), reduction, input.numel, weight=weight, **options)


@by_reduction
def soft_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Loss:
    """Logistic loss with targets that are 1 or -1; a mean is over the elements.

    >>> soft_margin_loss(torch.zeros(2, 3), torch.ones(2, 3))
    Mean(total=tensor(4.1589), weight=6)
    """
    return by_element(F.soft_margin_loss, (input, target), reduction)


@by_reduction
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    *,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Loss:
    """Hinge loss of classes; a mean is over the samples, and ``weight`` only scales them.

    >>> multi_margin_loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    Mean(total=tensor(1.5000), weight=3)
    """
    options = {"p": p, "margin": margin, "weight": weight}
    return reduced(F.multi_margin_loss, (input, target), reduction, target.numel, **options)


@by_reduction
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


@by_reduction
def multilabel_soft_margin_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Loss:
    """Binary cross entropy averaged over the last dimension (classes); a mean is over the rest.

    >>> multilabel_soft_margin_loss(torch.zeros(3, 2), torch.ones(3, 2))
    Mean(total=tensor(2.0794), weight=3)
    """
    # PyTorch's total is already averaged over the classes. It remains to divide by the rows.
    rows = common_numel(input, target) // max(input.shape[-1], 1)
    return reduced(
        F.multilabel_soft_margin_loss, (input, target), reduction, lambda: rows, weight=weight
    )


@by_reduction
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Loss:
    """Connectionist temporal classification: a loss of sequences whose alignment is unknown.

    A mean is over the sequences, each divided by the length of its target. ``log_probs`` has time
    first, (T, n, C), but a batch is cut along its first dimension: pass batches with samples first,
    and transpose in the loss.

    >>> log_probs = torch.full((5, 2, 3), 1 / 3).log()
    >>> ctc_loss(log_probs, torch.ones(2, 2, dtype=torch.int64), [5, 5], [1, 2])
    Mean(total=tensor(4.1775), weight=2)
    """
    arguments: tuple[Any, Any, Any, Any] = (log_probs, targets, input_lengths, target_lengths)
    options: dict[str, Any] = {"blank": blank, "zero_infinity": zero_infinity}
    if reduction != "mean" or PASS.whole:
        sequences = log_probs.shape[1] if log_probs.dim() == 3 else 1
        return reduced(F.ctc_loss, arguments, reduction, lambda: sequences, **options)
    # Each sequence has its own denominator inside the mean, so sum here. PyTorch counts an empty
    # target as one of length 1.
    each = F.ctc_loss(widened(log_probs), *arguments[1:], reduction="none", **options)
    lengths = torch.as_tensor(target_lengths, device=each.device).clamp(min=1)
    return Mean((each / lengths).sum(), each.numel())

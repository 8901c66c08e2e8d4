"""Detects losses that onefold would misread, from their autograd graphs.

`LossWatch` inspects the losses of a run. It raises if it is certain, and otherwise warns once.

A tensor does not record its denominator. onefold reads a scalar as the mean over the shard's
samples, and divides (n,) values by n. If the loss is a sum, or a mean by class weights or by
targets that are not ignored, the bits are the same on any number of devices, but the loss is not
the intended one. The autograd node that made the tensor often tells: `inspect_loss` reads it, and
reports only certain findings. For sums that the script computes by hand it can only guess
(``maybe-sum``).

The sum and the mean of one sample have the same value. But a division by 1 also leaves a node, so a
sum over one sample without any division is detected as for two samples.

PyTorch does not guarantee the nodes' ``_saved_`` attributes. If one is missing, nothing is found,
and ``tests/shard/test_loss_watch.py`` fails.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.late import load
from onefold.core.structure import Count
from onefold.errors import LossError

__all__ = ["LOSSES", "LossFinding", "LossWatch", "finding_of", "inspect_loss", "places_in", "saved"]

_log = logging.getLogger("onefold")


FindingKind = Literal[
    "sum",
    "maybe-sum",
    "maybe-whole",
    "weights",
    "ignored",
    "tokens",
    "weights-none",
    "ignored-none",
    "mean-total",
]

_NODES_LOOKED_AT = 48
"""Maximum number of nodes visited; a loss with more terms is not searched completely."""
_MEAN, _SUM = 1, 2
"""PyTorch's codes of reductions; 0 is none."""

LOSSES = {
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "HuberLossBackward0": "huber_loss",
    "MseLossBackward0": "mse_loss",
    "MultiMarginLossBackward0": "multi_margin_loss",
    "MultilabelMarginLossBackward0": "multilabel_margin_loss",
    "NllLoss2DBackward0": "cross_entropy",
    "NllLossBackward0": "cross_entropy",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "SoftMarginLossBackward0": "soft_margin_loss",
}
_OF_CLASSES = {"NllLossBackward0", "NllLoss2DBackward0"}
_SUMS = {"SumBackward0", "SumBackward1"}
_SCALES = (10.0, 100.0)
"""Reciprocals of factors that are more often a scale (0.1, 0.01) than one over a count."""
_ADDING = ("AddBackward", "SubBackward", "StackBackward")
_REDUCED = {*_SUMS, "MeanBackward0"}
_SAME_VALUES = {
    "AliasBackward0",
    "CloneBackward0",
    "NegBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}


@dataclass(frozen=True, slots=True)
class LossFinding:
    """A loss that onefold would misread."""

    kind: FindingKind
    text: str
    """The end of a sentence that begins with the loss and a verb."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A node of the graph, with the operations between it and the result."""

    node: Any
    whole: bool = True
    """Whether the node is the whole result, not one of several added terms."""
    divisor: float | None = None
    """Denominator between node and result; None without division, NaN if only a GPU knows it,
    infinity if a factor may be either a scale or one over a count."""
    divisions: int = 0
    """Number of divisions by a count."""
    enlarged: bool = False
    """Whether a factor is larger than 1."""


def inspect_loss(result: object, samples: int, batch_samples: int = 0) -> LossFinding | None:
    """Report how a loss differs from what onefold would read it as.

    For losses with class targets, this reads one number from the loss's device.

    Args:
        result: return value of a loss for a shard; nothing is found unless it is a tensor.
        samples: number of samples in the shard.
        batch_samples: number of samples in the whole batch; 0 if not known.

    Returns:
        The first finding, or None.

    >>> outputs = torch.zeros(4, 2, requires_grad=True)
    >>> loss = torch.nn.functional.mse_loss(outputs, torch.ones(4, 2), reduction="sum")
    >>> inspect_loss(loss, 4).kind
    'sum'
    >>> inspect_loss(loss / 4, 4)
    """
    if not isinstance(result, torch.Tensor) or result.grad_fn is None or samples < 1:
        return None
    scalar = result.dim() == 0
    # List all places first: a finding at one depends on whether another is a mean.
    places = list(places_in(result.grad_fn, samples, scalar=scalar))
    for place in places:
        found = _inspect_scalar(place, samples) if scalar else _inspect_each(place)
        if found is not None and found.kind == "sum" and any(map(_is_mean, places)):
            # Next to a mean, a sum may be a penalty on the parameters.
            return _maybe_sum(samples)
        if found is not None:
            return found
    for place in places:
        if _may_be_of_batch(place, samples, batch_samples):
            divided = f"{abs(place.divisor or 0):g}"
            return finding_of("maybe-whole", divided=divided, samples=samples, batch=batch_samples)
    return None


def _is_mean(place: _Place) -> bool:
    name = place.node.name()
    return name == "MeanBackward0" or (name in LOSSES and saved(place.node, "reduction") == _MEAN)


def places_in(node: Any, samples: int, *, scalar: bool) -> Iterator[_Place]:
    """Yield the nodes whose values make up the result, apart from signs, factors and shapes."""
    waiting = [_Place(node)]
    for _ in range(_NODES_LOOKED_AT):
        if not waiting:
            return
        place = waiting.pop()
        name = place.node.name()
        inner = [child for child, _ in place.node.next_functions if child is not None]
        if _keeps_values(place.node, samples, scalar=scalar):
            waiting += [replace(place, node=child) for child in inner]
        elif name.startswith(_ADDING) or (scalar and _adds_losses(place.node, samples)):
            waiting += [replace(place, node=child, whole=False) for child in reversed(inner)]
        elif name.startswith(("MulBackward", "DivBackward")):
            number = _number_beside(place.node)
            # A graph on both sides means a product of two results, not a scaled one.
            if number is not None and len(inner) == 1:
                divides = name.startswith("Div")
                by = number if divides else _inverse(number, samples)
                # A divisor below 1 is a scale. A count may be 1 if there is a single sample, or if
                # the script has computed it: it is a tensor then.
                computed = divides and isinstance(saved(place.node, "other"), torch.Tensor)
                is_scale = abs(by) < 1.0 or (abs(by) == 1.0 and samples > 1 and not computed)
                divisor = place.divisor if is_scale else by * (place.divisor or 1.0)
                waiting.append(
                    replace(
                        place,
                        node=inner[0],
                        divisor=divisor,
                        divisions=place.divisions + (divisor != place.divisor),
                        enlarged=place.enlarged or 1.0 < abs(number) != abs(by),
                    )
                )
        else:
            yield place


def _keeps_values(node: Any, samples: int, *, scalar: bool) -> bool:
    """Whether a node only changes signs or shapes, or averages within each sample."""
    name = node.name()
    if not scalar:
        return name in _SAME_VALUES or name == "MeanBackward1"
    if name in _REDUCED and _numel_of(node) == 1:
        # With one sample, reducing one value may be the plain loop's reduction of its batch. If the
        # input is a scalar, it is not.
        return samples > 1 or not saved(node, "self_sym_sizes")
    return name in _SAME_VALUES


def _adds_losses(node: Any, samples: int) -> bool:
    """Whether a node adds up or averages stacked losses, not samples."""
    inner = node.next_functions[0][0] if node.name() in _REDUCED else None
    if inner is None or inner.name() != "StackBackward0":
        return False
        # A stack as long as the batch may hold one loss per sample, from a Python loop.
    return len(inner.next_functions) == _numel_of(node) != samples


def _inverse(factor: float, samples: int) -> float:
    """Return the divisor equal to a factor; 0 if it is a scale, infinity if it may be either."""
    divisor = 1 / abs(factor) if factor else math.nan
    # With one sample, every integer is a multiple, so the test below would prove nothing.
    if math.isnan(divisor) or (samples > 1 and _is_multiple(divisor, samples)):
        return divisor
    is_scale = divisor <= 2.0 or divisor in _SCALES
    return 0.0 if is_scale and (samples > 1 or factor != 1.0) else math.inf


def _inspect_scalar(place: _Place, samples: int) -> LossFinding | None:
    name = place.node.name()
    function = LOSSES.get(name)
    reduction = saved(place.node, "reduction") if function else None
    if reduction == _SUM and place.divisor is None:
        return finding_of("sum", function, samples=_of(samples))
    if reduction == _SUM:
        return _quotient(place.divisor, samples, function)
    if reduction == _MEAN and name in _OF_CLASSES:
        return _inspect_classes(place.node, samples, mean=True)
    # A sum or mean among other terms is most likely a penalty on the parameters, which is the same
    # in every shard.
    if not place.whole:
        return None
    if name == "MeanBackward0":
        numel = _numel_of(place.node)
        return _tokens(f"a mean over {numel} values", numel or samples, samples)
    if name in _SUMS and (_numel_of(place.node) > 1 or samples == 1):
        if place.divisor is None:
            return _maybe_sum(samples)
        return _quotient(place.divisor, samples)
    return None


def _inspect_each(place: _Place) -> LossFinding | None:
    """Inspect a loss with one value per sample, (n,)."""
    node = place.node
    of_classes = node.name() in _OF_CLASSES and saved(node, "reduction") == 0
    return _inspect_classes(node, 0, mean=False) if of_classes else None


def _inspect_classes(node: Any, samples: int, *, mean: bool) -> LossFinding | None:
    """Inspect a classification loss: a mean, or one value per sample."""
    function = LOSSES[node.name()]
    if saved(node, "weight") is not None:
        return finding_of("weights" if mean else "weights-none", function)
    targets, index = saved(node, "target"), _ignored_index(node)
    if targets is None or index is None:
        return None
    ignored = _ignored(targets, index, saved(node, "total_weight") if mean else None)
    if ignored > 0:
        return finding_of("ignored" if mean else "ignored-none", function, ignored=ignored)
    numel = targets.numel()
    return _tokens(f"a mean over {numel} targets", numel, samples, function) if mean else None


def _ignored(targets: torch.Tensor, index: int, kept: torch.Tensor | None) -> int:
    """Count the ignored targets; ``kept``, if given, is PyTorch's count of the others."""
    # ``kept`` has the loss's dtype: 16 bits round it, and so do 32 bits from 2**24 on.
    if kept is None or kept.itemsize < 4 or targets.numel() > 2**24:
        return int((targets == index).sum())
    return targets.numel() - int(kept)


def _ignored_index(node: Any) -> int | None:
    index = saved(node, "ignore_index")
    # PyTorch returns the index as an unsigned number: -100 becomes 2**64 - 100.
    return None if index is None else index - 2**64 if index >= 2**63 else index


def _quotient(
    divisor: float | None, samples: int, function: str | None = None
) -> LossFinding | None:
    if divisor == math.inf and samples == 1:
        return _maybe_sum(samples)
    if divisor is None or not math.isfinite(divisor):
        return None
    return _tokens(f"a scalar divided by {abs(divisor):g}", abs(divisor), samples, function)


def _may_be_of_batch(place: _Place, samples: int, batch_samples: int) -> bool:
    """Whether a sum was divided by a count of the whole batch: of its samples or their values."""
    if batch_samples <= samples or place.divisions != 1 or place.enlarged:
        return False
    of_function = saved(place.node, "reduction") == _SUM
    # Among other terms, a sum is most likely a penalty on the parameters.
    if not of_function and (place.node.name() not in _SUMS or not place.whole):
        return False
    values = saved(place.node, "target")
    values = saved(place.node, "self") if values is None else values
    sizes = saved(place.node, "self_sym_sizes") if values is None else values.shape
    # The shard's own counts; `count` is scaled to the size of the shard before the comparison.
    counts = [samples, *accumulate(sizes or (), mul)]

    def is_of_shard(number: float) -> bool:
        return any(math.isclose(number, each, rel_tol=1e-5) for each in counts)

    count = abs(place.divisor or 0.0)
    return is_of_shard(count * samples / batch_samples) and not is_of_shard(count)


def _is_multiple(count: float, samples: int) -> bool:
    """Whether a count is a multiple of the samples, that is, a fixed number of values each."""
    # Use a tolerance, because divisors may be float32 tensors.
    share = count / samples
    return share > 0.5 and math.isclose(share, round(share), rel_tol=1e-5)


def _tokens(
    seen: str, count: float, samples: int, function: str | None = None
) -> LossFinding | None:
    if _is_multiple(count, samples):
        return None
    losses = f"onefold.losses.{function}(...) or " if function else ""
    return finding_of("tokens", function, seen=seen, samples=samples, losses=losses)


def _maybe_sum(samples: int) -> LossFinding:
    return finding_of("maybe-sum", samples=_of(samples))


def _of(samples: int) -> str:
    return "one sample" if samples == 1 else f"{samples} samples"


def finding_of(kind: FindingKind, function: str | None = None, **names: object) -> LossFinding:
    shown = "cross_entropy or nll_loss" if function == "cross_entropy" else function
    words = load("shard.advice").FINDINGS[kind]
    return LossFinding(kind, words.format(function=function, shown=shown, **names))


def _number_beside(node: Any) -> float | None:
    """Return the number by which a product or quotient scales the model's output.

    Returns None if there is none, and NaN if reading it would block on a GPU.
    """
    # A node saves only the operands that its backward needs: a constant factor is saved alone.
    # A node keeps only the operands that its backward needs: of a constant factor, that alone.
    kept = [saved(node, "other"), saved(node, "self")]
    numbers = [value for value in kept if value is not None]
    if len(numbers) != 1:
        return None
    number = numbers[0]
    if not isinstance(number, torch.Tensor):
        return float(number) if isinstance(number, int | float) else None
    if number.dim() != 0:
        return None
    return float(number) if number.device.type == "cpu" else math.nan


def _numel_of(node: Any) -> int:
    """Return the number of values that a sum or mean reduces; 0 if the node does not save it."""
    sizes = saved(node, "self_sym_sizes")
    return math.prod(sizes) if sizes is not None else 0


def saved(node: Any, name: str) -> Any:
    """Return an attribute that a node saves for backward; None if it is missing or freed."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        # The script already ran backward, which frees saved tensors.
        return None


_CERTAIN: tuple[FindingKind, ...] = ("sum", "weights", "ignored", "mean-total")
"""Kinds that are certainly misread with several shards; the other kinds may be intended."""


class LossWatch:
    """Inspects the losses of a run.

    Inspects scalars in every step, because any step may have an ignored target, and values per
    sample only in the steps of `CheckInterval`.
    """

    def __init__(self) -> None:
        self.refuses = True
        """Whether a loss that is certainly misread raises."""
        self.findings: list[FindingKind] = []
        """Kinds found so far; each is reported once."""
        self._doubted = False

    def inspect(
        self, result: object, *, samples: int, batch_samples: int, run_checks: bool, where: str
    ) -> None:
        """Inspect the loss of one of several shards. A single shard's loss cannot be misread.

        Args:
            result: what the loss returned.
            samples: number of samples in the shard.
            batch_samples: number of samples in the batch.
            run_checks: whether to run the costly checks.
            where: step and shard, for errors.

        Raises:
            LossError: the loss is certainly not the loss that the script intends.
        """
        device = result.device if isinstance(result, torch.Tensor) and not result.dim() else None
        # Inspecting a GPU's loss blocks on its queued work.
        if not run_checks and (device is None or device.type != "cpu"):
            return
        finding = inspect_loss(result, samples, batch_samples) or (
            None
            if isinstance(result, torch.Tensor)
            else load("shard.advice").inspect_totals(result)
        )
        if finding is None:
            return
        if self.refuses and finding.kind in _CERTAIN:
            raise LossError(f"the loss of {where} is {finding.text}")
        # Report each kind once: the same loss would be found in every step.
        if finding.kind not in self.findings:
            self.findings.append(finding.kind)
            _log.warning(
                "the loss of %s is %s. To check whether this is intended, run onefold verify",
                where,
                finding.text,
            )

    def look_at_count(self, result: object, count: Count, where: str) -> None:
        """Warn once if a scalar is read as the mean of all samples, but some may be left out.

        Args:
            result: return value of the loss.
            count: number of samples in the shard's payload.
            where: step and shard.
        """
        is_scalar = isinstance(result, torch.Tensor) and not result.dim()
        if count.sure or self._doubted or not is_scalar:
            return
        self._doubted = True
        _log.warning(load("shard.advice").COUNTED, where, count.samples)


def refuse_uneven(batch: ShardedBatch, found: Iterable[object], where: str) -> None:
    """Refuse scalars if the batch's parts are cut unevenly: they are not means of the batch.

    Raises:
            LossError: a loss, or a value returned with it, is a scalar.
    """
    if (length := batch.uneven) is not None:
        for value in found:
            if isinstance(value, torch.Tensor) and not value.dim():
                raise LossError(load("shard.advice").uneven(batch, length, where))

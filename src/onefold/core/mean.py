"""Return values of losses and metric functions, and the contribution of a shard to the batch.

A value over the batch is a *term* or a sum of several: a `Mean` (sum of totals over sum of weights)
or a `Sum` (sum of totals). The ordinary operators scale and add terms. Terms with different weights
have no common denominator, so a loss of several terms has no gradient until the weights of the
whole batch are known: see `Contribution.combine`.

Note: the bits of the plain loop
--------------------------------
A run with one shard must give the bits of an ordinary training loop that calls ``backward()`` on a
mean. So a shard's root is the tensor that the user returned, not a sum computed from it, and the
division happens in the initial gradient of backward, with autograd's own formula for a mean.
Dividing the finished gradients instead would round every element once more.

If one forward pass sees the whole batch (`PASS`), `onefold.losses` let PyTorch
compute the mean, and a `Mean` stores it next to its total. Arithmetic is applied to both, so a sum
of several terms also holds the scalar expression of a plain loop, and its bits are used as the
root. A `Mean` that the script makes from a total and a weight stores only these two.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self, TypeVar

import torch

from onefold.errors import LossError
from onefold.system.accelerator import HostCopy
from onefold.system.compat import version_of

__all__ = [
    "PASS",
    "Contribution",
    "LateWeight",
    "LossTerms",
    "Mean",
    "Sum",
    "known",
    "weigh",
]

Kind = Literal["mean", "sum", "means"]


class _Pass:
    """State of the forward pass in progress; one at a time in a process."""

    whole = False
    """Whether the pass sees a whole batch, as in a plain loop."""
    captured = False
    """Whether the pass is captured for replays, so that no value may be read or cached."""


PASS = _Pass()
"""State of this process, or of the simulated device that is running."""


@dataclass(frozen=True, slots=True)
class _Arithmetic(ABC):
    """Arithmetic of terms: add terms and scale their totals; weights do not change."""

    # init=False, because `dataclasses.replace` of a total must not keep the old mean.
    _whole: torch.Tensor | None = field(init=False, default=None, repr=False, compare=False)
    # NumPy would wrap a term on the right in an object array. None makes NumPy return
    # NotImplemented, so that Python calls our reflected method.
    __array_ufunc__: ClassVar[None] = None

    @property
    def terms(self) -> tuple[Mean | Sum, ...]:
        """The terms of the sum, from left to right: itself, if this is a single term."""
        return (self,)  # type: ignore[return-value]  # `LossTerms` has a field

    @abstractmethod
    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Apply ``change`` to every total, and keep the weights."""

    @abstractmethod
    def _quotient(self) -> torch.Tensor:
        """() the value, if this covers the whole batch."""

    def _plain(self) -> torch.Tensor:
        """() the scalar that a plain loop would compute, if this covers the whole batch."""
        return self._quotient() if self._whole is None else self._whole

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed = self._with_totals(change)
        return changed if self._whole is None else _with_whole(changed, change(self._whole))

    def __add__(self, other: object) -> LossTerms:
        if not isinstance(other, _Arithmetic):
            raise self._cannot_add(other)
        added = LossTerms(self.terms + other.terms)
        return _with_whole(added, self._plain() + other._plain()) if PASS.whole else added

    def __radd__(self, other: object) -> Self:
        # The built-in sum() starts with 0. Reject any other number, which has no weight.
        if not isinstance(other, int) or other != 0:
            raise self._cannot_add(other)
        return self

    def __sub__(self, other: object) -> LossTerms:
        return self + (-other if isinstance(other, _Arithmetic) else other)

    def __rsub__(self, other: object) -> NoReturn:
        raise self._cannot_add(other)

    def __neg__(self) -> Self:
        return self._changed(torch.neg)

    def __mul__(self, factor: object) -> Self:
        number = _factor(factor)
        return NotImplemented if number is None else self._changed(lambda total: total * number)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Self:
        number = _factor(divisor)
        return NotImplemented if number is None else self._changed(lambda total: total / number)

    def _cannot_add(self, other: object) -> TypeError:
        came = repr(other)
        if isinstance(other, torch.Tensor):
            came = f"a tensor of shape {tuple(other.shape)}"
        return TypeError(
            f"expected onefold.Mean or onefold.Sum as the other operand of "
            f"onefold.{type(self).__name__}, but got {came}, which has no denominator. For one "
            f"loss per sample, use onefold.Mean(losses.sum(), len(losses)); for a value that is "
            f"the same in every shard, such as a penalty on the parameters, onefold.Mean(penalty, "
            f"1); for an undivided sum, onefold.Sum(total)"
        )


@dataclass(frozen=True, slots=True)
class Mean(_Arithmetic):
    """A value that is averaged by its own weight, such as a loss per token.

    The value over the whole batch is the sum of totals over the sum of weights.

    >>> Mean(torch.tensor(6.0), 3)
    Mean(total=tensor(6.), weight=3)

    Means with different weights can be scaled and added:

    >>> words, pictures = Mean(torch.tensor(6.0), 3), Mean(torch.tensor(8.0), 2)
    >>> (words + 0.5 * pictures).terms
    (Mean(total=tensor(6.), weight=3), Mean(total=tensor(4.), weight=2))
    """

    total: torch.Tensor
    """() any floating dtype: sum over the shard."""
    weight: torch.Tensor | float
    """Denominator of the total: () tensor without gradient, or a number; not negative."""

    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Mean:
        return Mean(change(self.total), self.weight)

    def _quotient(self) -> torch.Tensor:
        return self.total / self.weight


@dataclass(frozen=True, slots=True)
class Sum(_Arithmetic):
    """A value that is summed over the batch and not divided, as with ``reduction="sum"``.

    The value over the whole batch is the sum of the shards' totals.

    >>> Sum(torch.tensor(6.0))
    Sum(total=tensor(6.))
    >>> (Mean(torch.tensor(6.0), 3) + Sum(torch.tensor(1.0)) / 4).terms
    (Mean(total=tensor(6.), weight=3), Sum(total=tensor(0.2500)))
    """

    total: torch.Tensor
    """() any floating dtype: sum over the shard."""

    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sum:
        return Sum(change(self.total))

    def _quotient(self) -> torch.Tensor:
        return self.total


@dataclass(frozen=True, slots=True)
class LossTerms(_Arithmetic):
    """Several terms, each with its own weight: the result of adding `Mean` and `Sum`.

    The value over the whole batch is the sum of the terms' values over the whole batch.

    >>> both = Mean(torch.tensor(6.0), 3) + Mean(torch.tensor(8.0), 2)
    >>> len((both - 2 * both).terms)
    4
    """

    terms: tuple[Mean | Sum, ...]
    """The terms of the sum, from left to right."""

    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LossTerms:
        return LossTerms(tuple(term._changed(change) for term in self.terms))

    def _quotient(self) -> torch.Tensor:
        return functools.reduce(torch.add, [term._plain() for term in self.terms])


_Term = TypeVar("_Term", bound=_Arithmetic)


def detached(value: object) -> object:
    """Detach a tensor, or the totals of terms, from the graph; return anything else unchanged."""

    def detach(total: Any) -> Any:
        return total.detach() if isinstance(total, torch.Tensor) else total

    return value._changed(detach) if isinstance(value, _Arithmetic) else detach(value)


def mean_of_whole(value: torch.Tensor, weight: torch.Tensor | float) -> Mean:
    """Make a `Mean` from a mean that PyTorch computed in a pass that sees the whole batch.

    Args:
        value: () the mean; NaN if the weight is 0.
        weight: PyTorch's denominator.
    """
    # In float32 or better, like all totals; and 0 instead of NaN if the weight is 0.
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    if isinstance(weight, torch.Tensor):
        total = (wide * weight).where(weight != 0, 0.0)
    else:
        total = wide * weight if weight else torch.zeros_like(wide)
    return _with_whole(Mean(total, weight), value)


def _with_whole(term: _Term, value: torch.Tensor) -> _Term:
    object.__setattr__(term, "_whole", value)
    return term


class LateWeight:
    """A weight on an accelerator, copied to the host while backward is queued.

    Args:
        weight: tensor with one element.
        what: name of the value in errors.
        divided: whether the total is already divided by the weight. The weight then counts as 1, or
            as 0 if it is 0.
    """

    def __init__(self, weight: torch.Tensor, what: str, *, divided: bool = False) -> None:
        self._there, self._what = weight.detach().reshape(()), what
        self._copy = None if PASS.captured else HostCopy(self._there)
        self._divided = divided
        self._changes: tuple[Callable[[float], float], ...] = ()

    def then(self, change: Callable[[float], float]) -> LateWeight:
        """Return the same weight, with a function to apply to its value."""
        changed = copy.copy(self)
        changed._changes = (*self._changes, change)
        return changed

    def again(self) -> LateWeight:
        """Return the weight that a replay has computed."""
        return LateWeight(self._there.clone(), self._what, divided=self._divided)

    def read(self) -> float:
        """Wait for the copy and return the weight.

        Raises:
            LossError: the weight is negative or not finite.
        """
        assert self._copy is not None  # a captured weight is read by `again`
        weight = _checked(float(self._copy.read()), self._what)
        weight = float(weight > 0) if self._divided else weight
        return functools.reduce(lambda found, change: change(found), self._changes, weight)

    def divisor(self, scale: float) -> float | torch.Tensor:
        """Return the denominator for backward if this is the weight of the whole batch: () float64.

        Args:
            scale: factor of the loss: a power of two.
        """
        if self._divided:
            return 1.0 / scale
        weight = self._there.double()
        return weight if scale == 1.0 else weight / scale

    def counted(self, total: torch.Tensor) -> torch.Tensor:
        """Return a total, or 0 if it was divided by a weight of 0."""
        return total.where(self._there != 0, 0.0) if self._divided else total


def known(weight: float | LateWeight) -> float:
    """Return a weight as a number; on an accelerator this may block."""
    return weight.read() if isinstance(weight, LateWeight) else weight


class Contribution(NamedTuple):
    """One shard's part of a value over the whole batch.

    If ``kind`` is ``mean`` or ``sum``, there is one denominator, and backward can start at once. If
    ``kind`` is ``means``, each of ``parts`` has its own denominator. Once the weights of the whole
    batch are known, ``combine`` merges the parts into one contribution, and backward starts there.
    """

    root: torch.Tensor
    """(n,) or (): start of backward; for ``means`` the undivided sum of the terms."""
    share: float
    """Weight of one element of ``root`` in the total: 1, or n if ``root`` is a mean over n."""
    weight: float | LateWeight
    """The shard's part of the denominator; 1 for ``sum``, never added up; NaN for ``means``."""
    kind: Kind = "mean"
    """Whether the denominator is the batch's weight, 1, or each term's own weight."""
    terms: tuple[Contribution, ...] = ()
    """Contributions of the terms of ``means``, of kind ``mean`` or ``sum``; otherwise empty."""

    @property
    def parts(self) -> tuple[Contribution, ...]:
        """Contributions with a denominator each: the terms, or this contribution itself."""
        return self.terms or (self,)

    def kinds_and_weights(self) -> list[tuple[str, float | LateWeight]]:
        """Return the kind and weight of each of ``parts``."""
        return [(part.kind, part.weight) for part in self.parts]

    @property
    def known_weight(self) -> float:
        """The weight; on an accelerator this may block."""
        return known(self.weight)

    def without_graph(self) -> Contribution:
        """Drop the graph and the terms of a loss, and keep its values."""
        return self._replace(root=self.root.detach(), terms=())

    def total(self) -> torch.Tensor:
        """Return the shard's part of the numerator: () float64 on the shard's device.

        Raises:
            TypeError: there are several terms. Use each of ``parts``, or call ``combine`` first.
        """
        self._expect_one_divisor("total()")
        # In float64, because the batch's loss is folded from these totals: float32 would round at
        # every node of the tree.
        root = self.root.detach()
        total = root.sum(dtype=torch.float64) if root.dim() else root.to(torch.float64)
        if isinstance(self.weight, LateWeight):
            return self.weight.counted(total)
        return total if self.share == 1.0 else total * self.share

    def backward(
        self,
        divisor: float | torch.Tensor,
        beside: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Add the gradient of (total / divisor) to the parameters' ``.grad``.

        Backward starts from the same gradient that autograd would compute for a mean, so a single
        shard with the whole batch gives the bits of the plain loop.

        Args:
            divisor: denominator; () float64 if only an accelerator knows it yet.
            beside: other tensors to start from in the same pass, and their gradients.

        Raises:
            TypeError: there are several terms. Call ``combine`` first.
        """
        self._expect_one_divisor("backward()")
        # A graph owns its seed: the cache may free one, or return one that is not computed yet.
        root, seed_of = self.root, _seed.__wrapped__ if PASS.captured else _seed
        if isinstance(divisor, torch.Tensor):
            # Divide as kernels divide by a number: in float32 at least, rounded once.
            wide = torch.promote_types(root.dtype, torch.float32)
            one = seed_of(self.share, 1.0, wide, root.device, torch.Size())
            start = (one / divisor.to(wide)).to(root.dtype).expand_as(root)
        else:
            start = seed_of(self.share, divisor, root.dtype, root.device, root.shape)
            # The seed is cached, and a hook may write to the gradient that it receives. PyTorch
            # rejects in-place writes to an expanded tensor, but a single element is not expanded.
            start = start if root.numel() > 1 else start.clone()
        tensors, gradients = [t for t, _ in beside], [g for _, g in beside]
        torch.autograd.backward([root, *tensors], [start, *gradients])

    def combine(self, divisors: Sequence[float]) -> Contribution:
        """Divide every part by its own denominator, and add the quotients to one contribution.

        Args:
            divisors: denominator of each of ``parts``: the weight of the whole batch, or 1 for a
                sum. A part with denominator 0 is skipped, whatever its total, just as a batch
                without weight is: parameters get no gradient from it.

        Returns:
            A contribution of kind ``sum``, with denominator 1. Its root does not require a gradient
            if all parts that do are skipped.

        Raises:
            ValueError: the number of divisors is not the number of parts.
        """
        if len(divisors) != len(self.parts):
            raise ValueError(f"expected {len(self.parts)} denominators, but got {len(divisors)}")
        # Skip parts instead of multiplying by 0: a total of NaN or infinity would stay NaN.
        pairs = [(part, d) for part, d in zip(self.parts, divisors, strict=True) if d]
        ratios = [part._numerator() / divisor for part, divisor in pairs]
        nothing = torch.zeros((), dtype=self.root.dtype, device=self.root.device)
        root = functools.reduce(torch.add, ratios) if ratios else nothing
        return Contribution(root, share=1.0, weight=1.0, kind="sum")

    def _numerator(self) -> torch.Tensor:
        """Return the total, still attached to the graph: ()."""
        total = self.root.sum() if self.root.dim() else self.root
        return total if self.share == 1.0 else total * self.share

    def _expect_one_divisor(self, asked: str) -> None:
        if self.terms:
            raise TypeError(
                f"{asked} requires a single denominator, but got {len(self.terms)} terms, each "
                f"with its own. Call combine(divisors) first"
            )


@functools.lru_cache(maxsize=64)
def _seed(
    share: float, divisor: float, dtype: torch.dtype, device: torch.device, shape: torch.Size
) -> torch.Tensor:
    """Return the initial gradient of backward, expanded; cached, as most steps use the same one."""
    # Divide a tensor in the root's own dtype, as autograd does for a mean: a quotient of Python
    # floats may differ in the last bit.
    return (torch.full((), share, dtype=dtype, device=device) / divisor).expand(shape)


def weigh(result: object, samples: int, what: str, *, late: bool = False) -> Contribution:
    """Interpret the return value of a user's function for a shard of ``samples`` samples.

    Args:
        result: (n,) or (n, 1) one value per sample, () a mean over the samples, a `Mean`, a `Sum`,
            or a sum of several of the latter two.
        samples: n, at least 1.
        what: name of the value in errors, such as ``the loss of shard 3 in step 7``.
        late: whether a weight on an accelerator may be read later, as `LateWeight`.

    Raises:
        LossError: the result is anything else, or a weight is negative, infinite or has a gradient.
    """
    if not isinstance(result, torch.Tensor):
        if isinstance(result, Mean | Sum):
            return _weigh_term(result, what, late=late)
        if isinstance(result, LossTerms):
            return _weigh_terms(result, what, late=late)
        raise LossError(
            f"{what}: expected a tensor of shape ({samples},), a scalar tensor, onefold.Mean or "
            f"onefold.Sum, but got {type(result).__name__}. Return the tensor itself, not .item(); "
            f"a function without a return statement returns None"
        )
    # A shape of (1,) is one value per sample if n is 1, and an error otherwise. It is never
    # expanded, which would hide that a loss lost its samples on the way.
    if result.shape == (samples,):
        return Contribution(root=result, share=1.0, weight=float(samples))
    if not samples and result.dim() == 0:
        # No sample is left: PyTorch's mean over an empty tensor is NaN, but it counts as 0.
        return Contribution(root=result.new_zeros(()), share=1.0, weight=0.0)
    if result.dim() == 0:
        # A mean over the whole batch is the loss: multiplying and dividing by n would round it.
        count = 1.0 if PASS.whole else float(samples)
        return Contribution(root=result, share=count, weight=count)
    if result.shape == (samples, 1):
        return Contribution(root=result.squeeze(1), share=1.0, weight=float(samples))
    raise LossError(
        f"{what}: expected shape ({samples},), one value per sample of the shard, or a scalar, but "
        f"got shape {tuple(result.shape)}. Average over the other dimensions, or return "
        f"onefold.Mean(total, weight). If collate drops samples, return onefold.Mean(losses.sum(), "
        f"len(losses))"
    )


def _weigh_terms(means: LossTerms, what: str, *, late: bool) -> Contribution:
    terms = means.terms if isinstance(means.terms, tuple) else ()
    if not terms or not all(isinstance(term, Mean | Sum) for term in terms):
        raise LossError(
            f"{what}: onefold.LossTerms requires a tuple of onefold.Mean or onefold.Sum, but got "
            f"{means.terms!r}"
        )
    # Errors number the terms from 1, in the order of the user's additions.
    parts = [
        _weigh_term(term, f"{what}, term {number}", late=late)
        for number, term in enumerate(means.terms, 1)
    ]
    whole = _untouched(means)
    if whole is not None and all(part.known_weight for part in parts):
        return Contribution(whole, share=1.0, weight=1.0, kind="sum")
    root = functools.reduce(torch.add, (part.root for part in parts))
    return Contribution(root, share=1.0, weight=math.nan, kind="means", terms=tuple(parts))


def _untouched(term: Mean | LossTerms) -> torch.Tensor | None:
    """Return the mean over the whole batch if it is stored and its totals are unmodified."""
    # An in-place write to a total makes the stored mean obsolete.
    totals = [each.total for each in term.terms]
    if term._whole is None or any(map(version_of, totals)):
        return None
    return term._whole


def _weigh_term(term: Mean | Sum, what: str, *, late: bool = False) -> Contribution:
    name = type(term).__name__
    if not isinstance(term.total, torch.Tensor) or term.total.dim() != 0:
        came = tuple(term.total.shape) if isinstance(term.total, torch.Tensor) else term.total
        raise LossError(f"{what}: the total of onefold.{name} must be a scalar tensor, got {came}")
    if isinstance(term, Sum):
        return Contribution(root=term.total, share=1.0, weight=1.0, kind="sum")
    number = _number(term.weight, what)
    whole = _untouched(term)
    if late and isinstance(number, torch.Tensor) and number.device.type != "cpu":
        coming = LateWeight(number, what, divided=whole is not None)
        return Contribution(term.total if whole is None else whole, share=1.0, weight=coming)
    # Converting a weight on a GPU to float blocks here.
    weight = _checked(float(number), what)
    if whole is not None and weight:
        return Contribution(root=whole, share=1.0, weight=1.0)
    return Contribution(root=term.total, share=1.0, weight=weight)


def _checked(weight: float, what: str) -> float:
    if not 0 <= weight < float("inf"):
        raise LossError(f"{what}: the weight of onefold.Mean must be finite and >= 0, got {weight}")
    return weight


def _number(weight: object, what: str) -> float | torch.Tensor:
    # Reject bools, of Python and of tensors: the caller passed a mask instead of its sum.
    if isinstance(weight, torch.Tensor):
        if weight.requires_grad:
            raise LossError(
                f"{what}: the weight of onefold.Mean requires grad, but onefold does not "
                f"differentiate through the denominator, which is known only after all shards. To "
                f"treat the weight as a constant, pass weight.detach()"
            )
        if weight.numel() == 1 and weight.dtype != torch.bool and not weight.is_complex():
            return weight
        came = f"{tuple(weight.shape)} {weight.dtype}"
    elif isinstance(weight, Real) and not isinstance(weight, bool):
        return float(weight)
    else:
        came = repr(weight)
    raise LossError(
        f"{what}: the weight of onefold.Mean must be a number or a scalar tensor, got {came}"
    )


def _factor(value: object) -> float | torch.Tensor | None:
    """Return the factor of totals: a number, or a scalar tensor such as a learned weight."""
    if isinstance(value, Real):
        return float(value)
    return value if isinstance(value, torch.Tensor) and value.dim() == 0 else None

"""What a loss or a score function may return, and what a shard contributes to the whole batch.

A value over the batch is a *term*, or the sum of several: a `Mean` (sum of totals over sum of
weights), or a `Sum` (sum of totals). Terms are scaled and added with the ordinary operators. The
weights of several terms cannot be added up into one, so a loss of several terms has no gradient
until the weights of the whole batch are known: see `Contribution.combine`.

Note: the bits of the plain loop
--------------------------------
A run with one shard must give the bits of an ordinary training loop that calls ``backward()`` on a
mean. So a shard's root is what the user returned, not a sum that we computed from it, and the
division happens in the gradient that backward starts from, computed the way autograd's own formula
for a mean computes it. Dividing the finished gradients instead would round every element once more.

Where one pass sees the whole batch (`seeing_whole_batch`), `onefold.losses` have PyTorch itself
compute the mean, and a `Mean` keeps it beside its total. Arithmetic is applied to both, so that a
sum of several terms is also the expression of scalars that a plain loop has; its bits are the
root's. Whoever makes a `Mean` of a total and a weight has those alone.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

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
    "seeing_whole_batch",
    "weigh",
]

Kind = Literal["mean", "sum", "means"]


class _Pass:
    """What the forward pass that is under way sees; one at a time in a process."""

    whole = False
    """Whether it is that of a whole batch, as in a plain loop."""


PASS = _Pass()
"""Of this process, or of the simulated device that goes on."""


@contextmanager
def seeing_whole_batch(sees: bool) -> Iterator[None]:
    """Have losses know whether the pass inside this context sees the whole batch."""
    PASS.whole = sees
    try:
        yield
    finally:
        PASS.whole = False


@dataclass(frozen=True, slots=True)
class _Arithmetic(ABC):
    """Arithmetic of terms: adding them, and scaling their totals; weights stay as they are."""

    # Not for `__init__`: `dataclasses.replace` of a total must not keep the mean of another one.
    _whole: torch.Tensor | None = field(init=False, default=None, repr=False, compare=False)
    # A NumPy number on the left would otherwise wrap a term in an array of objects; None makes it
    # leave the operation to our reflected method.
    __array_ufunc__: ClassVar[None] = None

    @property
    def terms(self) -> tuple[Mean | Sum, ...]:
        """The terms that are added up, from left to right: itself, if it is one."""
        return (self,)  # type: ignore[return-value]  # `LossTerms` has a field

    @abstractmethod
    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Apply ``change`` to every total, and keep the weights."""

    @abstractmethod
    def _quotient(self) -> torch.Tensor:
        """() the value, if this is of the whole batch."""

    def _plain(self) -> torch.Tensor:
        """() the scalar that a plain loop has in its place, if this is of the whole batch."""
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
        # The built-in sum() begins with 0. Any other number has no weight, and is refused.
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
            f"expected onefold.Mean or onefold.Sum beside onefold.{type(self).__name__}, got "
            f"{came}, which does not say what it is divided by. For one loss a sample write "
            f"onefold.Mean(losses.sum(), len(losses)); for what every shard computes alike, such "
            f"as a penalty on the parameters, onefold.Mean(penalty, 1); for what is not divided "
            f"at all, onefold.Sum(total)"
        )


@dataclass(frozen=True, slots=True)
class Mean(_Arithmetic):
    """Something that averages by its own weight, such as a loss by tokens.

    The value over the whole batch is the sum of totals over the sum of weights.

    >>> Mean(torch.tensor(6.0), 3)
    Mean(total=tensor(6.), weight=3)

    Means with different weights may be scaled and added:

    >>> words, pictures = Mean(torch.tensor(6.0), 3), Mean(torch.tensor(8.0), 2)
    >>> (words + 0.5 * pictures).terms
    (Mean(total=tensor(6.), weight=3), Mean(total=tensor(4.), weight=2))
    """

    total: torch.Tensor
    """() any floating dtype: the sum over the shard."""
    weight: torch.Tensor | float
    """What the total is divided by: () tensor without gradient, or a number; not negative."""

    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Mean:
        return Mean(change(self.total), self.weight)

    def _quotient(self) -> torch.Tensor:
        return self.total / self.weight


@dataclass(frozen=True, slots=True)
class Sum(_Arithmetic):
    """Something that adds up over the batch and is not divided, as with ``reduction="sum"``.

    The value over the whole batch is the sum of the shards' totals.

    >>> Sum(torch.tensor(6.0))
    Sum(total=tensor(6.))
    >>> (Mean(torch.tensor(6.0), 3) + Sum(torch.tensor(1.0)) / 4).terms
    (Mean(total=tensor(6.), weight=3), Sum(total=tensor(0.2500)))
    """

    total: torch.Tensor
    """() any floating dtype: the sum over the shard."""

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
    """The terms, added up from left to right."""

    def _with_totals(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LossTerms:
        return LossTerms(tuple(term._changed(change) for term in self.terms))

    def _quotient(self) -> torch.Tensor:
        return functools.reduce(torch.add, [term._plain() for term in self.terms])


_Term = TypeVar("_Term", bound=_Arithmetic)


def detached(value: object) -> object:
    """Take a tensor, or the totals of terms, out of the graph; leave anything else as it is."""

    def detach(total: Any) -> Any:
        return total.detach() if isinstance(total, torch.Tensor) else total

    return value._changed(detach) if isinstance(value, _Arithmetic) else detach(value)


def mean_of_whole(value: torch.Tensor, weight: torch.Tensor | float) -> Mean:
    """Make a `Mean` of what PyTorch has divided already; for a pass that sees the whole batch.

    Args:
        value: () the mean; NaN where the weight is 0.
        weight: what PyTorch divided by.
    """
    # In float32 or better, as totals are; and 0 where there is nothing to count.
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
    """A weight on an accelerator, on its way to the host while backward is queued.

    Args:
        weight: of one element.
        what: what the value is called in errors.
        divided: whether the total is divided by it already; then it counts as 1, or as 0 if it is.
    """

    def __init__(self, weight: torch.Tensor, what: str, *, divided: bool = False) -> None:
        self._there, self._what = weight.detach().reshape(()), what
        self._copy, self._divided = HostCopy(self._there), divided
        self._changes: tuple[Callable[[float], float], ...] = ()

    def then(self, change: Callable[[float], float]) -> LateWeight:
        """The same weight, changed once it has been read."""
        changed = copy.copy(self)
        changed._changes = (*self._changes, change)
        return changed

    def read(self) -> float:
        """Wait for it.

        Raises:
            LossError: it is negative or not finite.
        """
        weight = _checked(float(self._copy.read()), self._what)
        weight = float(weight > 0) if self._divided else weight
        return functools.reduce(lambda found, change: change(found), self._changes, weight)

    def divisor(self, scale: float) -> float | torch.Tensor:
        """What backward divides by where this is the weight of the whole batch, () float64.

        Args:
            scale: what the loss is multiplied by: a power of two.
        """
        if self._divided:
            return 1.0 / scale
        weight = self._there.double()
        return weight if scale == 1.0 else weight / scale

    def counted(self, total: torch.Tensor) -> torch.Tensor:
        """A total, which counts as 0 if it was divided by a weight of 0."""
        return total.where(self._there != 0, 0.0) if self._divided else total


def known(weight: float | LateWeight) -> float:
    """A weight as a number; on an accelerator this may wait for it."""
    return weight.read() if isinstance(weight, LateWeight) else weight


@dataclass(frozen=True, slots=True)
class Contribution:
    """One shard's part of a value over the whole batch.

    If ``kind`` is ``mean`` or ``sum``, there is one divisor, and backward can begin at once. If it
    is ``means``, each of ``parts`` has its own; once the weights of the whole batch are known,
    ``combine`` makes one contribution of them, and backward begins there.
    """

    root: torch.Tensor
    """(n,) or (): what backward starts from; for ``means`` the undivided sum of the terms."""
    share: float
    """Weight of one element of ``root`` in the total: 1, or n if ``root`` is a mean over n."""
    weight: float | LateWeight
    """The shard's part of the divisor; 1 for ``sum``, never added up; NaN for ``means``."""
    kind: Kind = "mean"
    """Whether it is divided by the batch's weight, by nothing, or each term by its own weight."""
    terms: tuple[Contribution, ...] = ()
    """For ``means``, one for each term, of kind ``mean`` or ``sum``; otherwise empty."""

    @property
    def parts(self) -> tuple[Contribution, ...]:
        """Everything that has a divisor of its own: the terms, or else this contribution itself."""
        return self.terms or (self,)

    def kinds_and_weights(self) -> list[tuple[str, float | LateWeight]]:
        """The kind and the weight of each of ``parts``."""
        return [(part.kind, part.weight) for part in self.parts]

    @property
    def known_weight(self) -> float:
        """The weight; on an accelerator this may wait for it."""
        return known(self.weight)

    def without_graph(self) -> Contribution:
        """Drop the graph of a loss, and its terms, and keep its values."""
        return replace(self, root=self.root.detach(), terms=())

    def total(self) -> torch.Tensor:
        """() float64 on the shard's device: the shard's part of the numerator.

        Raises:
            TypeError: there are several terms; ask each of ``parts``, or ``combine`` first.
        """
        self._expect_one_divisor("total()")
        # In float64: the loss of the batch is folded from these, and float32 would round it again
        # at every node of the tree.
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

        Backward starts from the same gradient that autograd would compute for a mean, so that one
        shard that is the whole batch gives the bits of the plain loop.

        Args:
            divisor: of the total; () float64 if only an accelerator knows it yet.
            beside: other tensors to start from in the same pass, and their gradients.

        Raises:
            TypeError: there are several terms; ``combine`` first.
        """
        self._expect_one_divisor("backward()")
        root = self.root
        if isinstance(divisor, torch.Tensor):
            # As kernels divide by a number: in float32 at least, rounded once.
            wide = torch.promote_types(root.dtype, torch.float32)
            one = _seed(self.share, 1.0, wide, root.device)
            seed = (one / divisor.to(wide)).to(root.dtype)
        else:
            seed = _seed(self.share, divisor, root.dtype, root.device)
        # The seed is cached, and a hook may write into the gradient that it is given. An expanded
        # tensor refuses that; with a single element nothing is expanded, so it is cloned.
        start = seed.expand_as(root) if root.numel() > 1 else seed.clone().expand_as(root)
        tensors, gradients = [t for t, _ in beside], [g for _, g in beside]
        torch.autograd.backward([root, *tensors], [start, *gradients])

    def combine(self, divisors: Sequence[float]) -> Contribution:
        """Divide every part by its own divisor, and add them up into one contribution.

        Args:
            divisors: one for each of ``parts``: the weight of the whole batch, or 1 for a sum. A
                part whose divisor is 0 is left out, whatever its total is, just as a batch without
                weight is: parameters get no gradient from it.

        Returns:
            A contribution of kind ``sum``, whose divisor is 1. Its root does not require a gradient
            if all parts that do are left out.

        Raises:
            ValueError: the number of divisors is not the number of parts.
        """
        if len(divisors) != len(self.parts):
            raise ValueError(f"expected {len(self.parts)} divisors, got {len(divisors)}")
        # Left out rather than multiplied by 0: a total of NaN or infinity would stay NaN.
        pairs = [(part, d) for part, d in zip(self.parts, divisors, strict=True) if d]
        ratios = [part._numerator() / divisor for part, divisor in pairs]
        nothing = torch.zeros((), dtype=self.root.dtype, device=self.root.device)
        root = functools.reduce(torch.add, ratios) if ratios else nothing
        return Contribution(root, share=1.0, weight=1.0, kind="sum")

    def _numerator(self) -> torch.Tensor:
        """() the total, still attached to the graph."""
        total = self.root.sum() if self.root.dim() else self.root
        return total if self.share == 1.0 else total * self.share

    def _expect_one_divisor(self, asked: str) -> None:
        if self.terms:
            raise TypeError(
                f"expected one divisor for {asked}, got {len(self.terms)} terms, each with its "
                f"own: combine(divisors) comes first"
            )


@functools.lru_cache(maxsize=64)
def _seed(share: float, divisor: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """() the gradient that backward begins with, cached because it is the same in most steps."""
    # Divided as a tensor in the root's own dtype, as autograd does for a mean: a quotient of
    # Python's floats may differ in the last bit.
    return torch.full((), share, dtype=dtype, device=device) / divisor


def weigh(result: object, samples: int, what: str, *, late: bool = False) -> Contribution:
    """Read what a user's function returned for a shard of ``samples`` samples.

    Args:
        result: (n,) or (n, 1) one value per sample, () a mean over the samples, a `Mean`, a `Sum`,
            or several of the latter two added up.
        samples: n, at least 1.
        what: what the value is called in errors, such as ``the loss of shard 3 in step 7``.
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
            f"onefold.Sum, got {type(result).__name__}. Return the tensor itself, not .item(); a "
            f"function that ends without return gives None"
        )
    # A shape of (1,) is one value per sample if n is 1, and otherwise an error: it is never
    # stretched, for a loss that lost its samples on the way would go unnoticed.
    if result.shape == (samples,):
        return Contribution(root=result, share=1.0, weight=float(samples))
    if not samples and result.dim() == 0:
        # All samples were left out: PyTorch's mean over none is NaN, and counts for nothing.
        return Contribution(root=result.new_zeros(()), share=1.0, weight=0.0)
    if result.dim() == 0:
        # Of the whole batch it is the loss: in float64, times n and by n would round it.
        count = 1.0 if PASS.whole else float(samples)
        return Contribution(root=result, share=count, weight=count)
    if result.shape == (samples, 1):
        return Contribution(root=result.squeeze(1), share=1.0, weight=float(samples))
    raise LossError(
        f"{what}: expected shape ({samples},), one value for each of the shard's samples, or a "
        f"scalar; got shape {tuple(result.shape)}. Average over the other dimensions, or return "
        f"onefold.Mean(total, weight): where collate leaves out some of the samples, "
        f"onefold.Mean(losses.sum(), len(losses))"
    )


def _weigh_terms(means: LossTerms, what: str, *, late: bool) -> Contribution:
    terms = means.terms if isinstance(means.terms, tuple) else ()
    if not terms or not all(isinstance(term, Mean | Sum) for term in terms):
        raise LossError(
            f"{what}: expected a tuple of terms in onefold.LossTerms, each a onefold.Mean or "
            f"onefold.Sum, got {means.terms!r}"
        )
    # Errors count terms from 1, in the order in which the user added them.
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
    """The value over the whole batch, where it is known and still that of the totals."""
    # A total that the script has written to says something else now.
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
    # A weight on a GPU is waited for here.
    weight = _checked(float(number), what)
    if whole is not None and weight:
        return Contribution(root=whole, share=1.0, weight=1.0)
    return Contribution(root=term.total, share=1.0, weight=weight)


def _checked(weight: float, what: str) -> float:
    if not 0 <= weight < float("inf"):
        raise LossError(f"{what}: the weight of onefold.Mean must be finite and >= 0, got {weight}")
    return weight


def _number(weight: object, what: str) -> float | torch.Tensor:
    # A bool is refused, of Python as of tensors: a mask was passed where its sum was intended.
    if isinstance(weight, torch.Tensor):
        if weight.requires_grad:
            raise LossError(
                f"{what}: the weight of onefold.Mean depends on parameters, and no gradient goes "
                f"through what the batch's total is divided by, which is known only when all "
                f"shards are done. If the weight is to count as a constant: weight.detach()"
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
    """Read what totals are scaled by: a number, or a scalar tensor such as a learned weight."""
    if isinstance(value, Real):
        return float(value)
    return value if isinstance(value, torch.Tensor) and value.dim() == 0 else None

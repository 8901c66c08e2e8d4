"""What a loss or a score function may return, and what a shard contributes to the whole batch.

A value over the batch is a *term*, or the sum of several: a `Mean` (sum of totals over sum of
weights), or a `Sum` (sum of totals). Terms are scaled and added with the ordinary operators. The
weights of several terms cannot be added up into one, so a loss of several terms has no gradient
until the weights of the whole batch are known: see `Contribution.combine`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, NoReturn, Self

import torch

from onefold.errors import LossError

__all__ = ["Contribution", "Kind", "Mean", "Means", "Sum", "weigh"]

Kind = Literal["mean", "sum", "means"]


class _Arithmetic(ABC):
    """Adds terms, and scales their totals; weights stay as they are."""

    __slots__ = ()
    __array_ufunc__: ClassVar[None] = None  # a NumPy number on the left leaves the work to us

    @property
    @abstractmethod
    def terms(self) -> tuple[Mean | Sum, ...]:
        """What is added up."""

    @abstractmethod
    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with every total changed."""

    def __add__(self, other: object) -> Means:
        if not isinstance(other, _Arithmetic):
            raise self._cannot_add(other)
        return Means(self.terms + other.terms)

    def __radd__(self, other: object) -> Self:
        if not isinstance(other, int) or other != 0:
            raise self._cannot_add(other)
        return self  # the built-in sum() begins with 0

    def __sub__(self, other: object) -> Means:
        if not isinstance(other, _Arithmetic):
            raise self._cannot_add(other)
        return self + -other

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

    Means that are divided by different weights may be scaled and added:

    >>> words, pictures = Mean(torch.tensor(6.0), 3), Mean(torch.tensor(8.0), 2)
    >>> (words + 0.5 * pictures).terms
    (Mean(total=tensor(6.), weight=3), Mean(total=tensor(4.), weight=2))
    """

    total: torch.Tensor
    """() any floating dtype: the sum over the shard."""
    weight: torch.Tensor | float
    """What the total is to be divided by: () tensor without gradient, or number; not negative."""

    @property
    def terms(self) -> tuple[Mean | Sum, ...]:
        """This one."""
        return (self,)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Mean:
        return Mean(change(self.total), self.weight)


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

    @property
    def terms(self) -> tuple[Mean | Sum, ...]:
        """This one."""
        return (self,)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sum:
        return Sum(change(self.total))


@dataclass(frozen=True, slots=True)
class Means(_Arithmetic):
    """Several terms, each with its own weight; adding `Mean` and `Sum` makes one.

    The value over the whole batch is the sum of the terms' values over the whole batch.

    >>> both = Mean(torch.tensor(6.0), 3) + Mean(torch.tensor(8.0), 2)
    >>> len((both - 2 * both).terms)
    4
    """

    terms: tuple[Mean | Sum, ...]
    """Added up from left to right."""

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Means:
        return Means(tuple(term._changed(change) for term in self.terms))


@dataclass(frozen=True, slots=True)
class Contribution:
    """One shard's part of a value over the whole batch.

    Where ``kind`` is ``mean`` or ``sum``, there is one divisor, and backward can begin at once.
    Where it is ``means``, every one of ``parts`` has its own; once the weights of the whole batch
    are known, ``combine`` makes one contribution of them, and backward begins there.
    """

    root: torch.Tensor
    """(n,) or (): what backward starts from; of ``means`` the terms' undivided sum."""
    share: float
    """Weight of one element of ``root`` in the total: 1, or n where ``root`` is a mean over n."""
    weight: float
    """The shard's part of the divisor; of ``sum`` 1, never added up; of ``means`` not a number."""
    kind: Kind = "mean"
    """Divided by the batch's weight, by nothing, or each term by its own."""
    terms: tuple[Contribution, ...] = ()
    """Of ``means``: one for each term, of kind ``mean`` or ``sum``; otherwise empty."""

    @property
    def parts(self) -> tuple[Contribution, ...]:
        """What has a divisor of its own: the terms, or this contribution where it is one."""
        return self.terms or (self,)

    def total(self) -> torch.Tensor:
        """() float64 on the shard's device: the shard's part of the numerator.

        Raises:
            TypeError: of several terms; ask each of ``parts``, or ``combine`` first.
        """
        self._expect_one_divisor("total()")
        total = self.root.detach().sum(dtype=torch.float64)
        return total if self.share == 1.0 else total * self.share

    def backward(self, divisor: float) -> None:
        """Add the gradient of (total / divisor) to the parameters' ``.grad``.

        The seed is computed as autograd itself would for a mean, so that one shard that is the
        whole batch gives the bits of the plain loop.

        Raises:
            TypeError: of several terms; ``combine`` first.
        """
        self._expect_one_divisor("backward()")
        root = self.root
        seed = _seed(self.share, divisor, root.dtype, root.device)
        # What has one element could be written to on its way; a stretched one cannot.
        torch.autograd.backward(
            root, seed.expand_as(root) if root.numel() > 1 else seed.clone().expand_as(root)
        )

    def combine(self, divisors: Sequence[float]) -> Contribution:
        """This shard's part of the finished value: the sum of (total / divisor) over the parts.

        Args:
            divisors: one for each of ``parts``: the weight of the whole batch, and 1 for a sum. A
                part whose divisor is 0 is left out, whatever its total is, as a batch without
                weight is: its parameters get no gradient from it.

        Returns:
            Of kind ``sum``, so that its divisor is 1. Its root does not require a gradient where
            all parts that do are left out.

        Raises:
            ValueError: another number of divisors than of parts.
        """
        if len(divisors) != len(self.parts):
            raise ValueError(f"expected {len(self.parts)} divisors, got {len(divisors)}")
        pairs = [(part, d) for part, d in zip(self.parts, divisors, strict=True) if d]
        ratios = [part._numerator() / divisor for part, divisor in pairs]
        nothing = torch.zeros((), dtype=self.root.dtype, device=self.root.device)
        root = functools.reduce(torch.add, ratios) if ratios else nothing
        return Contribution(root, share=1.0, weight=1.0, kind="sum")

    def _numerator(self) -> torch.Tensor:
        """() the total through which backward can go."""
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
    """() the gradient that backward begins with; the same in most steps."""
    return torch.full((), share, dtype=dtype, device=device) / divisor


def weigh(result: object, samples: int, what: str) -> Contribution:
    """Read what a user's function returned for a shard of ``samples`` samples.

    Args:
        result: (n,) or (n, 1) one value a sample, () a mean over the samples, a `Mean`, a `Sum`, or
            several of the latter two added up.
        samples: n, at least 1.
        what: how the value is called in errors, such as ``the loss of shard 3 in step 7``.

    Raises:
        LossError: anything else, or a weight that is negative, infinite or has a gradient.
    """
    if isinstance(result, Mean | Sum):
        return _weigh_term(result, what)
    if isinstance(result, Means):
        return _weigh_terms(result, what)
    if not isinstance(result, torch.Tensor):
        raise LossError(
            f"{what}: expected a tensor of shape ({samples},), a scalar tensor, onefold.Mean or "
            f"onefold.Sum, got {type(result).__name__}. Return the tensor itself, not .item()"
        )
    if result.shape == (samples,):
        return Contribution(root=result, share=1.0, weight=float(samples))
    if result.dim() == 0:
        return Contribution(root=result, share=float(samples), weight=float(samples))
    if result.shape == (samples, 1):
        return Contribution(root=result.squeeze(1), share=1.0, weight=float(samples))
    raise LossError(
        f"{what}: expected shape ({samples},), one value for each of the shard's samples, or a "
        f"scalar; got shape {tuple(result.shape)}. Average over the other dimensions, or return "
        f"onefold.Mean(total, weight)"
    )


def _weigh_terms(means: Means, what: str) -> Contribution:
    if not isinstance(means.terms, tuple) or not means.terms:
        raise LossError(f"{what}: expected a tuple of terms in onefold.Means, got {means.terms!r}")
    for term in means.terms:
        if not isinstance(term, Mean | Sum):
            raise LossError(
                f"{what}: the terms of onefold.Means must be onefold.Mean or onefold.Sum, got "
                f"{type(term).__name__}"
            )
    parts = [
        _weigh_term(term, f"{what}, term {number}") for number, term in enumerate(means.terms, 1)
    ]
    root = functools.reduce(torch.add, (part.root for part in parts))
    return Contribution(root, share=1.0, weight=math.nan, kind="means", terms=tuple(parts))


def _weigh_term(term: Mean | Sum, what: str) -> Contribution:
    name = type(term).__name__
    if not isinstance(term.total, torch.Tensor) or term.total.dim() != 0:
        came = tuple(term.total.shape) if isinstance(term.total, torch.Tensor) else term.total
        raise LossError(f"{what}: the total of onefold.{name} must be a scalar tensor, got {came}")
    if isinstance(term, Sum):
        return Contribution(root=term.total, share=1.0, weight=1.0, kind="sum")
    weight = _number(term.weight, what)
    if not 0 <= weight < float("inf"):
        raise LossError(f"{what}: the weight of onefold.Mean must be finite and >= 0, got {weight}")
    return Contribution(root=term.total, share=1.0, weight=weight)


def _number(weight: object, what: str) -> float:
    if isinstance(weight, torch.Tensor):
        if weight.requires_grad:
            raise LossError(
                f"{what}: the weight of onefold.Mean depends on parameters, and no gradient goes "
                f"through what the batch's total is divided by, which is known only when all "
                f"shards are done. If the weight is to count as a constant: weight.detach()"
            )
        if weight.numel() == 1 and weight.dtype != torch.bool and not weight.is_complex():
            return float(weight)
        came = f"{tuple(weight.shape)} {weight.dtype}"
    elif isinstance(weight, Real) and not isinstance(weight, bool):
        return float(weight)
    else:
        came = repr(weight)
    raise LossError(
        f"{what}: the weight of onefold.Mean must be a number or a scalar tensor, got {came}"
    )


def _factor(value: object) -> float | torch.Tensor | None:
    """What totals may be scaled by: a number, or a scalar tensor such as a learned weight."""
    if isinstance(value, Real):
        return float(value)
    return value if isinstance(value, torch.Tensor) and value.dim() == 0 else None

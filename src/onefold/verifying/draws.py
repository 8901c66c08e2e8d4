"""Randomness switched off for a comparison: a sample's random numbers are its own.

Note: what is replayed
----------------------
A loss that draws noise gives other numbers for a shard than for the whole batch, whatever it
computes. So the draws of the whole batch are recorded first. Where the same draw comes again for
some of its samples, it gets those samples' rows; a draw of the same shape gets the same values. A
draw that has no counterpart, such as a permutation of the shard, keeps its own values and is
listed: what depends on it cannot be compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onefold.system.compat import TorchDispatchMode

__all__ = ["Draws", "seed_alike", "without_dropout"]

_DROPOUTS = (
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)
_DRAWS = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "normal_functional",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "_sample_dirichlet",
        "_standard_gamma",
        "uniform_",
    }
)
"""Those that give random numbers, and no result that happens to be computed with some."""


@dataclass(frozen=True, slots=True)
class _Draw:
    name: str
    numbers: tuple[object, ...]
    """Its arguments that are numbers, such as the bounds."""
    values: torch.Tensor


class Draws:
    """The random draws of one evaluation, for others of the same samples."""

    def __init__(self) -> None:
        self._recorded: list[_Draw] = []
        self._samples = 0
        self.unmatched: set[str] = set()
        """Names of draws that had no counterpart."""

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """Note what is drawn in here, for the whole batch."""
        self._recorded.clear()
        self._samples = samples
        with _Recorder(self._recorded):
            yield

    @contextmanager
    def replaying(self, rows: Sequence[int]) -> Iterator[None]:
        """Hand out again what was noted.

        Args:
            rows: which samples of the whole batch are computed in here.
        """
        with _Player(self, rows):
            yield

    def find(self, place: int, draw: _Draw, rows: Sequence[int]) -> torch.Tensor | None:
        """The values of the draw in this place; None if it was not drawn for these samples."""
        known = self._recorded[place] if place < len(self._recorded) else None
        if known is None or (known.name, known.numbers) != (draw.name, draw.numbers):
            self.unmatched.add(draw.name.strip("_"))
            return None
        wanted, values = draw.values.shape, known.values
        ordered = list(rows) == list(range(self._samples))
        if ordered and wanted == values.shape:
            return values
        share, rest = divmod(values.shape[0], self._samples) if values.dim() else (0, 1)
        by_sample = share > 0 and not rest and draw.name not in ("randperm",)
        if by_sample and tuple(wanted) == (share * len(rows), *values.shape[1:]):
            by_sample_values = values.reshape(self._samples, share, *values.shape[1:])
            return by_sample_values[list(rows)].flatten(0, 1)
        if wanted == values.shape:
            return values
        self.unmatched.add(draw.name.strip("_"))
        return None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorded: list[_Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (draw := _read(func, args, result)) is not None:
            self._recorded.append(draw)
        return result


class _Player(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, draws: Draws, rows: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._rows = rows
        self._place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (draw := _read(func, args, result)) is not None:
            known = self._draws.find(self._place, draw, self._rows)
            self._place += 1
            if known is not None:
                result.copy_(known)
        return result


def _read(func: Any, args: Sequence[Any], result: Any) -> _Draw | None:
    name = func._schema.name.removeprefix("aten::")
    if name not in _DRAWS or not isinstance(result, torch.Tensor):
        return None
    numbers = tuple(a for a in args if isinstance(a, int | float | bool))
    return _Draw(name, numbers, result.detach().clone())


@contextmanager
def without_dropout() -> Iterator[None]:
    """PyTorch's functions that drop values out return what they were given."""

    def keep(input: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        return input

    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def attend(*args: Any, **settings: Any) -> torch.Tensor:
        positional = list(args)
        if len(positional) > 4:
            positional[4] = 0.0
        settings.pop("dropout_p", None)
        return attention(*positional, **settings)

    before = {name: getattr(functional, name) for name in _DROPOUTS}
    try:
        for name in _DROPOUTS:
            setattr(functional, name, keep)
        functional.scaled_dot_product_attention = attend
        yield
    finally:
        functional.scaled_dot_product_attention = attention
        for name, function in before.items():
            setattr(functional, name, function)


def seed_alike(seed: int) -> None:
    """Begin all global generators at the same numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)

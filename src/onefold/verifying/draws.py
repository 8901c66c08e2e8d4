"""Neutralises randomness for a comparison: each sample has random numbers of its own.

Note: what is replayed
----------------------
A loss that draws noise gives other numbers for a shard than for the whole batch, whatever it
computes. So the draws of the whole batch are recorded first. Where the same draw is made again for
some of its samples, it gets those samples' rows; a draw of the same shape gets the same values. A
draw that has no counterpart, such as a permutation of the shard, keeps its own values and is
listed: what depends on it cannot be compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onefold.system.compat import TorchDispatchMode

__all__ = ["Draws", "seed_alike", "without_dropout"]

_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_COMPUTED = re.compile("attention|dropout|gru|lstm|rnn|rrelu|sdp|softmax")
"""Operators that draw, whose result is no random numbers, but something computed with some."""


@dataclass(frozen=True, slots=True)
class _Draw:
    name: str
    numbers: tuple[object, ...]
    """Those of its arguments that are numbers, such as the bounds."""
    values: torch.Tensor
    """A copy of its result, of any shape and dtype."""


class Draws:
    """The random draws of one evaluation, to be replayed in others of the same samples."""

    def __init__(self) -> None:
        self._recorded: list[_Draw] = []
        self._samples = 0
        self.unmatched: set[str] = set()
        """Names of draws that had no counterpart."""
        self.rounded: set[torch.dtype] = set()
        """What numbers in float64 were rounded to on the way, by the script or what it calls."""

    def recording(self, samples: int) -> _Watch:
        """Have a context record what is drawn in it, for the whole batch."""
        self._recorded.clear()
        self._samples = samples
        return _Watch(self, None)

    def replaying(self, rows: Sequence[int]) -> _Watch:
        """Have a context replay what was recorded.

        Args:
            rows: which samples of the whole batch are computed inside the context, in order.
        """
        return _Watch(self, rows)

    def add(self, draw: _Draw) -> None:
        """Record a draw."""
        self._recorded.append(draw)

    def find(self, place: int, draw: _Draw, rows: Sequence[int]) -> torch.Tensor | None:
        """Return the values for the draw in this place; None if it has no counterpart.

        Args:
            place: how many draws came before it in this evaluation.
            draw: the draw, with values of its own.
            rows: which samples of the whole batch are computed.
        """
        values = self._values(place, draw, rows)
        if values is None:
            self.unmatched.add(draw.name.strip("_"))
        return values

    def _values(self, place: int, draw: _Draw, rows: Sequence[int]) -> torch.Tensor | None:
        known = self._recorded[place] if place < len(self._recorded) else None
        if known is None or (known.name, known.numbers) != (draw.name, draw.numbers):
            return None
        wanted, values = draw.values.shape, known.values
        # The whole batch in its own order gets everything as it was, also what is not by sample.
        ordered = list(rows) == list(range(self._samples))
        if ordered and wanted == values.shape:
            return values
        # By sample if the first dimension is a multiple of the samples: some losses draw several
        # rows for each. A permutation's values are places in the batch, and mean nothing in a part.
        share, rest = divmod(values.shape[0], self._samples) if values.dim() else (0, 1)
        by_sample = share > 0 and not rest and draw.name != "randperm"
        if by_sample and tuple(wanted) == (share * len(rows), *values.shape[1:]):
            by_sample_values = values.reshape(self._samples, share, *values.shape[1:])
            return by_sample_values[list(rows)].flatten(0, 1)
        return values if wanted == values.shape else None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records draws, or replays them for these rows."""

    def __init__(self, draws: Draws, rows: Sequence[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._rows = rows
        self._place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Drawn in any case: the generator must move as it did when the draw was recorded, and the
        # result has the shape and strides that the caller expects.
        result = func(*args, **(kwargs or {}))
        draw = _read(func, args, result)
        if self._rows is None:
            converts = func._schema.name == "aten::_to_copy" and args[0].dtype == torch.float64
            if converts and result.is_floating_point():
                self._draws.rounded.add(result.dtype)
            if draw is not None:
                self._draws.add(draw)
        elif draw is not None:
            known = self._draws.find(self._place, draw, self._rows)
            self._place += 1
            if known is not None:
                result.copy_(known)
        return result


def _read(func: Any, args: Sequence[Any], result: Any) -> _Draw | None:
    name = func._schema.name.removeprefix("aten::")
    draws = torch.Tag.nondeterministic_seeded in func.tags and not _COMPUTED.search(name)
    if not draws or not isinstance(result, torch.Tensor):
        return None
    numbers = tuple(a for a in args if isinstance(a, int | float | bool))
    return _Draw(name, numbers, result.detach().clone())


@contextmanager
def without_dropout() -> Iterator[None]:
    """Have PyTorch's dropout functions return their input unchanged.

    Modules are put into evaluation mode; this is for losses that call the functions themselves.
    """

    def keep(input: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        return input

    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def attend(*args: Any, **settings: Any) -> torch.Tensor:
        # dropout_p is the fifth argument, where it is not given by name.
        settings.pop("dropout_p", None)
        return attention(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **settings)

    replaced = {**dict.fromkeys(_DROPOUTS, keep), "scaled_dot_product_attention": attend}
    before = {name: getattr(functional, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(functional, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


def seed_alike(seed: int) -> None:
    """Seed all global generators alike."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)

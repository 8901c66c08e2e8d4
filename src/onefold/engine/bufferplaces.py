"""Where a module keeps its buffers, and what becomes of each when shards change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, get_args

import torch

from onefold.core.flat import lay_out
from onefold.core.settings import BufferRule
from onefold.errors import StateError
from onefold.system.tables import buffers_of

__all__ = ["BufferPlaces"]


class BufferPlaces:
    """Where a module keeps its buffers, and what becomes of each.

    Args:
        module: the user's own.
        rules: the rules of buffers, by name or pattern.

    Raises:
        ValueError: a rule is unknown, or its pattern matches no buffer.
    """

    def __init__(
        self, module: torch.nn.Module, rules: Mapping[str, BufferRule] | None = None
    ) -> None:
        places = _places(module)
        self.names = [place.name for place in places]
        self.tensors = [place.tensor for place in places]
        self.homes = [place.homes for place in places]
        self.layout = lay_out({place.name: place.tensor for place in places})
        self.rules = _rules_of(self.names, rules or {})
        self._known = [
            (prefix, buffers_of(owner), {n for n, b in buffers_of(owner).items() if b is not None})
            for prefix, owner in module.named_modules()
        ]
        # The modules' own tables: in most steps their lengths are all that is looked at.
        self._held = [buffers for _, buffers, _ in self._known]
        self._number = sum(map(len, self._held))
        self._some_are_none = self._number != sum(len(known) for _, _, known in self._known)

    def check(self) -> None:
        """Refuse buffers that were not there when Trainer was made.

        Raises:
            StateError: a buffer was added, or one that was None got a value.
        """
        # Where none was None at the start, a new one shows in their number.
        if self._some_are_none or sum(map(len, self._held)) != self._number:
            self._look_closer()

    def checked(self, index: int, value: torch.Tensor | None) -> torch.Tensor:
        """Return what has come in the place of a buffer, if it can take that place.

        Raises:
            StateError: the replacement has another shape or dtype.
        """
        expected = self.layout.entries[index]
        dtype = self.layout.dtypes[expected.section]
        if value is None or tuple(value.shape) != expected.shape or value.dtype != dtype:
            came = "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise StateError(
                f"buffer {self.names[index]}: expected {dtype} {expected.shape} as when Trainer "
                f"was made, got {came}. A buffer keeps its shape and type through a run: where the "
                f"first forward pass gives it its shape (observers of quantisation do), run one "
                f"before Trainer is made"
            )
        return value

    def _look_closer(self) -> None:
        """Name the buffer that is new; one that is None takes no part as long as it is."""
        for prefix, buffers, known in self._known:
            for name, value in buffers.items():
                if value is not None and name not in known:
                    full = f"{prefix}.{name}" if prefix else name
                    raise StateError(
                        f"buffer {full} was not there, or None, when Trainer was made: a shard "
                        f"that makes it keeps it to itself, and devices would differ. Register it "
                        f"with a value, or run one forward pass, before Trainer is made"
                    )


class _Place(NamedTuple):
    name: str
    tensor: torch.Tensor
    homes: list[tuple[torch.nn.Module, str]]
    """Every module that holds it, with the name it has there."""


def _places(module: torch.nn.Module) -> list[_Place]:
    found: dict[int, _Place] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in buffers_of(owner).items():
            if buffer is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                place = found.setdefault(id(buffer), _Place(full_name, buffer, []))
                place.homes.append((owner, name))
    return list(found.values())


def _rules_of(
    names: Sequence[str], rules: Mapping[str, BufferRule]
) -> tuple[BufferRule | None, ...]:
    """Find the rule of each buffer; a later pattern takes precedence."""
    found: list[BufferRule | None] = [None] * len(names)
    for pattern, rule in rules.items():
        if rule not in get_args(BufferRule):
            raise ValueError(
                f"expected the rule of buffers {pattern!r} to be one of {get_args(BufferRule)}, "
                f"got {rule!r}"
            )
        matching = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"buffers has a rule for {pattern!r}, which names no buffer of the model: it has "
                f"{', '.join(names) or 'none'}"
            )
        for index in matching:
            found[index] = rule
    return tuple(found)

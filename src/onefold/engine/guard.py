"""Notices values that somebody else has changed since the engine looked at them last.

Note: what can be seen, and what it costs
-----------------------------------------
PyTorch counts what happens to a parameter in place, but not what happens through ``.data``. So a
few hundred values, spread over all parameters, are looked at as well: an average that is swapped
in, or a scaling, changes nearly all of them. A change through ``.data`` of a few values elsewhere
stays unseen. On a GPU a look would wait for the work that is under way, so there the values are
looked at only when they are `due`. Where every process has memory of its own, all values are
added up when they are due, so that a difference of a single one does not last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onefold.core.flat import FlatTensors
from onefold.core.head import checksum
from onefold.system.compat import version_of

__all__ = ["Samples", "Turns", "ValueGuard"]

_SPREAD = 192
"""Values looked at in each section, spread evenly over it."""
_OF_ENTRIES = 256
"""Entries whose middle value is looked at as well."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST_STEPS = 3
_EVERY_STEPS = 50


class Turns:
    """Says when what costs more is looked at: in the first few steps, and then now and then.

    Steps count from where this process has begun or the run was loaded, alike on all devices.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The next step is the first again."""
        self._steps = 0
        self.due = True

    def advance(self) -> None:
        """A step begins."""
        self._steps += 1
        self.due = self._steps <= _FIRST_STEPS or self._steps % _EVERY_STEPS == 0


class Samples:
    """A few values of flat memory, always the same ones.

    Args:
        flats: what to look at.
    """

    def __init__(self, flats: Sequence[FlatTensors]) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._words: list[torch.Tensor] = []
        self.on_host = all(flat.device.type == "cpu" for flat in flats)
        for flat in flats:
            for number, section in enumerate(flat.sections):
                places = _places(flat, number)
                if places:
                    # Complex numbers count as two words.
                    words = section.view(_WORDS[min(8, section.element_size())])
                    scale = section.element_size() // words.element_size()
                    index = torch.tensor(places, device=section.device) * scale
                    self._parts.append((words, index))
                    self._words.append(words)
        self._host = (
            [(words.numpy(), index.numpy()) for words, index in self._parts] if self.on_host else []
        )

    def add_up(self) -> bytes:
        """The sums of all values, read as whole numbers; on a GPU this waits as well."""
        return b"".join(_sum_of(words) for words in self._words)

    def read(self) -> bytes:
        """Their bytes; on a GPU this waits for the work that is under way."""
        if self.on_host:
            return b"".join([words.take(index).tobytes() for words, index in self._host])
        parts = [words[index].cpu().numpy().tobytes() for words, index in self._parts]
        return b"".join(parts)


def _sum_of(words: torch.Tensor) -> bytes:
    total: bytes = words.sum(dtype=torch.int64).cpu().numpy().tobytes()
    return total


def _places(flat: FlatTensors, section: int) -> list[int]:
    entries = [e for e in flat.layout.entries if e.section == section and e.numel]
    numel = flat.layout.numels[section]
    if not entries:
        return []
    step = max(1, -(-len(entries) // _OF_ENTRIES))
    middles = [entry.offset + entry.numel // 2 for entry in entries[::step]]
    spread = [numel * part // _SPREAD for part in range(_SPREAD)] if numel > _SPREAD else []
    return sorted({*middles, *(spread or range(numel))})


class ValueGuard:
    """Knows the parameters as the engine left them.

    Args:
        parameters: of the user's module, by name.
        flats: the memory in which they lie.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], flats: Sequence[FlatTensors]
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._samples = Samples(flats)
        self._values = b""
        self.note()

    @property
    def samples(self) -> Samples:
        """The values that are looked at."""
        return self._samples

    def note(self, *, values: bool = True) -> None:
        """The parameters are as they ought to be.

        Args:
            values: whether somebody will look at values.
        """
        self._versions = self._count()
        if values and self._samples.on_host:
            self._values = self._samples.read()

    def changed(self, *, values: bool = True) -> int:
        """The number, from 1, of a parameter that was changed since; 0 for none that is seen.

        Where only values tell it, the number behind the last.

        Args:
            values: whether to look at values as well, and not only at what PyTorch counts.
        """
        if values and self._samples.on_host:
            return self._changed(self._samples.read())
        return self._changed(self._values)

    def look(
        self, *, also: Samples | None = None, due: bool, of_all: bool = False
    ) -> tuple[int, int]:
        """What `changed` finds, and a checksum of sampled values.

        The checksum is 0 where the values are on a GPU and it is not due.

        Args:
            also: other values of which to make the checksum.
            due: whether it is.
            of_all: whether to add up all values as well, if it is due.
        """
        if not (self._samples.on_host or due):
            return self.changed(values=False), 0
        read = self._samples.read()
        changed = self._changed(read if self._samples.on_host else self._values)
        text = read if also is None else read + also.read()
        if due and of_all:
            text += b"".join(s.add_up() for s in (self._samples, also) if s is not None)
        return changed, checksum(text)

    def _changed(self, sampled: bytes) -> int:
        versions = self._count()
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            return next(number for number, (now, then) in enumerate(pairs, 1) if now != then)
        return len(self._names) + 1 if sampled != self._values else 0

    def name_of(self, number: int) -> str:
        """What `changed` has found, for a message."""
        if number > len(self._names):
            return "parameters (through .data)"
        return f"parameter {self._names[number - 1]}"

    def _count(self) -> list[int]:
        return list(map(version_of, self._parameters))

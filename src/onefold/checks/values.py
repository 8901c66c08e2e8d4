"""Detects changes of parameters that the engine did not make.

Note: what can be detected, and the cost
----------------------------------------
PyTorch counts in-place changes of a parameter, but not changes through ``.data``. A few hundred
values, spread over all parameters, are therefore sampled as well: swapping in an average, or
scaling weights, changes nearly all of them. A change of a few other values through ``.data``
remains undetected. On a GPU, reading values blocks on queued work, so they are read only when a
check is *due*, see `CheckInterval`. If every process has its own memory, due checks also compare
the sums of all values, so that a difference in a single value does not persist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from onefold.core.call_digest import checksum
from onefold.core.flat import FlatTensors, as_words
from onefold.errors import StateError
from onefold.system.compat import version_of

__all__ = ["CheckInterval", "Samples", "ValueGuard", "sum_of"]

_SPREAD = 192
"""Number of sampled values per section, evenly spread."""
_OF_ENTRIES = 256
"""Maximum number of entries per section whose middle value is sampled, too."""
_SLICE = 1 << 22
"""Number of elements summed at a time."""
_FIRST_STEPS = 3
_EVERY_STEPS = 50


class CheckInterval:
    """Decides in which steps to run costly checks: in the first few, and then at intervals.

    Steps are counted from the start of the run or from a load, so they are the same on all devices:
    checks that compare values between devices must be due on all of them at once.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count the next step as the first one again."""
        self._steps = 0
        self.run_checks = True

    def advance(self) -> None:
        """Start a step, and decide whether to run costly checks in it."""
        self._steps += 1
        self.run_checks = self._steps <= _FIRST_STEPS or self._steps % _EVERY_STEPS == 0


class Samples:
    """Reads a fixed set of values from flat memory.

    Args:
        flats: the memory to sample.
    """

    def __init__(self, flats: Sequence[FlatTensors]) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.on_host = all(flat.device.type == "cpu" for flat in flats)
        for flat in flats:
            for number, section in enumerate(flat.sections):
                places = _places(flat, number)
                if places:
                    words = as_words(section)
                    scale = section.element_size() // words.element_size()
                    index = torch.tensor(places, device=section.device) * scale
                    self._parts.append((words, index))
        # Keep NumPy views of the same memory: indexing through PyTorch would dominate the cost.
        self._host = (
            [(words.numpy(), index.numpy()) for words, index in self._parts] if self.on_host else []
        )

    def add_up(self) -> bytes:
        """Return the sums of all values, read as integers; on a GPU this blocks."""
        return b"".join(sum_of(words) for words, _ in self._parts)

    def read(self) -> bytes:
        """Return the bytes of the sampled values; on a GPU this blocks on queued work."""
        if self.on_host:
            return b"".join([words.take(index).tobytes() for words, index in self._host])
        parts = [words[index].cpu().numpy().tobytes() for words, index in self._parts]
        return b"".join(parts)


def sum_of(words: torch.Tensor) -> bytes:
    """Add up integers; on a GPU this blocks on queued work."""
    # Integer sums wrap around, so they do not depend on the order or the device. Sum in slices:
    # `sum` would otherwise convert all small integers to int64 at once.
    starts = range(0, max(len(words), 1), _SLICE)
    sums = [words[start : start + _SLICE].sum(dtype=torch.int64) for start in starts]
    total: bytes = torch.stack(sums).sum().cpu().numpy().tobytes()
    return total


def _places(flat: FlatTensors, section: int) -> list[int]:
    """List the sampled elements of a section: the middles of entries, and evenly spread ones.

    They depend only on the layout, and are therefore the same on every device.
    """
    entries = [e for e in flat.layout.entries if e.section == section and e.numel]
    numel = flat.layout.numels[section]
    if not entries:
        return []
    step = max(1, -(-len(entries) // _OF_ENTRIES))
    middles = [entry.offset + entry.numel // 2 for entry in entries[::step]]
    spread = [numel * part // _SPREAD for part in range(_SPREAD)] if numel > _SPREAD else []
    return sorted({*middles, *(spread or range(numel))})


class ValueGuard:
    """Stores the state of the parameters after each step, and detects later changes.

    Args:
        parameters: the parameters of the user's module, by name.
        flats: the memory of the parameters.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], flats: Sequence[FlatTensors]
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self.samples = Samples(flats)
        """The sampled values."""
        self._values = b""
        self.note()

    def note(self, *, values: bool = True) -> None:
        """Store the present state of the parameters as the correct one.

        Args:
            values: whether `changed` will compare values before the next `note`.
        """
        self._versions = self._count()
        # Do not read values of a GPU: this runs at the end of a step, and would block on the
        # update.
        if values and self.samples.on_host:
            self._values = self.samples.read()

    def changed(self, *, values: bool = True) -> int:
        """Find a parameter that changed since the last `note`.

        Args:
            values: whether to compare values as well, not only PyTorch's version counters.

        Returns:
            The parameter's number, from 1; the number after the last one if only values changed; 0
            if no change is detected.
        """
        # Without reading values, compare the stored ones with themselves: only versions can differ.
        looks = values and self.samples.on_host
        return self._changed(self.samples.read() if looks else self._values)

    def refuse_writing(self, step: int | None, *, values: bool) -> None:
        """Refuse changes of parameters while shards run: only the optimizer may update them.

        Args:
            step: number of the step; None in an evaluation.
            values: as for `changed`.

        Raises:
            StateError: a parameter was changed since the last `note`.
        """
        changed = self.changed(values=values)
        if changed:
            where, what = f"step {step}", "the loss was"
            if step is None:
                where, what = "an evaluation", "scores were"
            raise StateError(
                f"{where}: {self.name_of(changed)} was written to while {what} computed, possibly "
                f"by max_norm of an embedding, a masked weight, a momentum encoder, or weights "
                f"that a model scales for evaluation. Only later shards on the same device would "
                f"see the change. Write to parameters between steps, in `with "
                f"trainer.modifying():`, or store values that change with every batch in a buffer"
            )

    @contextmanager
    def refusing_writing(self, *, values: bool) -> Iterator[None]:
        """Refuse changes of parameters inside this context, in which scores are computed.

        The state stored by the last `note` is kept.

        Args:
            values: as for `changed`.

        Raises:
            StateError: a parameter was changed inside the context.
        """
        noted = self._versions, self._values
        self.note(values=values)
        try:
            yield
            self.refuse_writing(None, values=values)
        finally:
            self._versions, self._values = noted

    def inspect(
        self, *, also: Samples | None = None, run_checks: bool, of_all: bool = False
    ) -> tuple[int, int]:
        """Find a changed parameter, and compute a checksum of sampled values, in one read.

        Args:
            also: other values to include in the checksum.
            run_checks: whether costly checks are due.
            of_all: whether the checksum includes the sums of all values, if checks are due.

        Returns:
            The result of `changed`, and the checksum; the checksum is 0 if the values are on a GPU
            and no check is due.
        """
        if not (self.samples.on_host or run_checks):
            return self.changed(values=False), 0
        read = self.samples.read()
        # `note` stores no values of a GPU: there, only checksums are compared, between devices.
        changed = self._changed(read if self.samples.on_host else self._values)
        text = read if also is None else read + also.read()
        if run_checks and of_all:
            text += b"".join(s.add_up() for s in (self.samples, also) if s is not None)
        return changed, checksum(text)

    def _changed(self, sampled: bytes) -> int:
        versions = self._count()
        # Compare versions first: they identify the parameter, values do not.
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            return next(number for number, (now, then) in enumerate(pairs, 1) if now != then)
        return len(self._names) + 1 if sampled != self._values else 0

    def name_of(self, number: int) -> str:
        """Name a changed parameter for a message, given the result of `changed`."""
        if number > len(self._names):
            return "a parameter (through .data)"
        return f"parameter {self._names[number - 1]}"

    def _count(self) -> list[int]:
        return list(map(version_of, self._parameters))

"""Notices values that somebody else has changed since the engine last looked at them.

Note: what can be seen, and what it costs
-----------------------------------------
PyTorch counts what happens to a parameter in place, but not what happens through ``.data``. So a
few hundred values, spread over all parameters, are looked at as well: an average that is swapped
in, or a scaling, changes nearly all of them. A change through ``.data`` of a few values elsewhere
stays unseen. Reading values on a GPU would wait for the work that is under way, so there they are
read only when a check is *due*, see `CheckInterval`. Where every process has memory of its own, all
values are added up when a check is due, so that even a difference in a single one does not last.
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
"""Values looked at in each section, spread evenly over it."""
_OF_ENTRIES = 256
"""Entries whose middle value is looked at as well."""
_SLICE = 1 << 22
"""Elements that are added up at a time."""
_FIRST_STEPS = 3
_EVERY_STEPS = 50


class CheckInterval:
    """Decides in which steps costly checks are due: in the first few, and then now and then.

    Steps are counted from where the run began or was loaded, which is the same on all devices: a
    check in which devices compare values must be due on all of them at once.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count the next step as the first again."""
        self._steps = 0
        self.run_checks = True

    def advance(self) -> None:
        """Begin a step, and decide whether checks are due in it."""
        self._steps += 1
        self.run_checks = self._steps <= _FIRST_STEPS or self._steps % _EVERY_STEPS == 0


class Samples:
    """Reads a few values of flat memory, always the same ones.

    Args:
        flats: the memory to look at.
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
        # NumPy views of the same memory: picking values through PyTorch costs more than all else.
        self._host = (
            [(words.numpy(), index.numpy()) for words, index in self._parts] if self.on_host else []
        )

    def add_up(self) -> bytes:
        """Return the sums of all values, read as whole numbers; on a GPU this waits as well."""
        return b"".join(sum_of(words) for words, _ in self._parts)

    def read(self) -> bytes:
        """Return the bytes of the few values; on a GPU this waits for the work under way."""
        if self.on_host:
            return b"".join([words.take(index).tobytes() for words, index in self._host])
        parts = [words[index].cpu().numpy().tobytes() for words, index in self._parts]
        return b"".join(parts)


def sum_of(words: torch.Tensor) -> bytes:
    """Add up whole numbers; on a GPU this waits for the work under way."""
    # Whole numbers wrap around, and so add up to the same in any order, on any device. In slices,
    # as the sum of small ones would convert all of them to large ones first.
    starts = range(0, max(len(words), 1), _SLICE)
    sums = [words[start : start + _SLICE].sum(dtype=torch.int64) for start in starts]
    total: bytes = torch.stack(sums).sum().cpu().numpy().tobytes()
    return total


def _places(flat: FlatTensors, section: int) -> list[int]:
    """List the elements of a section to look at: the middles of entries, and others evenly spread.

    They depend on the layout alone, and so are the same on every device.
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
    """Remembers the parameters as the engine left them, and finds those changed since.

    Args:
        parameters: the user's module's, by name.
        flats: the memory in which they lie.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], flats: Sequence[FlatTensors]
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self.samples = Samples(flats)
        """The values that are looked at."""
        self._values = b""
        self.note()

    def note(self, *, values: bool = True) -> None:
        """Remember the parameters as they are now, which is how they ought to be.

        Args:
            values: whether `changed` will be asked about values before the next `note`.
        """
        self._versions = self._count()
        # Never on a GPU: this runs at the end of a step, and would wait for the update.
        if values and self.samples.on_host:
            self._values = self.samples.read()

    def changed(self, *, values: bool = True) -> int:
        """Find a parameter that was changed since the last `note`.

        Args:
            values: whether to look at values as well, and not only at what PyTorch counts.

        Returns:
            Its number, counted from 1; the number after the last where only values show a change;
            0 where none is seen.
        """
        # Compared with themselves, values differ in nothing: only the counts decide.
        looks = values and self.samples.on_host
        return self._changed(self.samples.read() if looks else self._values)

    def refuse_writing(self, step: int | None, *, values: bool) -> None:
        """Refuse changes to parameters while shards run: they belong to the optimizer.

        Args:
            step: number of the step that is computed; None in an evaluation.
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
                f"{where}: {self.name_of(changed)} was written to while {what} computed (max_norm "
                f"of an embedding, a masked weight, a momentum encoder, weights that a model "
                f"scales for evaluation do so): the shards that follow on the same device would "
                f"see it, and others would not. Write to parameters between steps, in `with "
                f"trainer.modifying():`, or keep what changes with every batch in a buffer"
            )

    @contextmanager
    def refusing_writing(self, *, values: bool) -> Iterator[None]:
        """Refuse changes to parameters inside this context, in which scores are computed.

        What is remembered of the last `note` stays.

        Args:
            values: as for `changed`.

        Raises:
            StateError: a parameter was changed in it.
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
        """Find a changed parameter, and compute a checksum of sampled values, in one reading.

        Args:
            also: other values to include in the checksum.
            run_checks: whether costly checks are due.
            of_all: whether to add up all values as well, where checks are due.

        Returns:
            The number that `changed` returns, and the checksum; 0 where the values are on a GPU and
            no check is due.
        """
        if not (self.samples.on_host or run_checks):
            return self.changed(values=False), 0
        read = self.samples.read()
        # `note` keeps no values of a GPU, so there these are compared with other devices' only.
        changed = self._changed(read if self.samples.on_host else self._values)
        text = read if also is None else read + also.read()
        if run_checks and of_all:
            text += b"".join(s.add_up() for s in (self.samples, also) if s is not None)
        return changed, checksum(text)

    def _changed(self, sampled: bytes) -> int:
        versions = self._count()
        # The counts first, as they name the parameter; values do not.
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            return next(number for number, (now, then) in enumerate(pairs, 1) if now != then)
        return len(self._names) + 1 if sampled != self._values else 0

    def name_of(self, number: int) -> str:
        """Put what `changed` has found into words, for a message."""
        if number > len(self._names):
            return "parameters (through .data)"
        return f"parameter {self._names[number - 1]}"

    def _count(self) -> list[int]:
        return list(map(version_of, self._parameters))

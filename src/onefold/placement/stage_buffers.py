"""The parameters that a device has only while it needs them: all trained ones, and frozen ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onefold.checks.values import sum_of
from onefold.core.flat import as_words, same_bits
from onefold.core.stages import ROOT, StageLayout
from onefold.core.storage import Storage
from onefold.deferred.access import AccessHook
from onefold.errors import StateError
from onefold.placement.base import StepContext

__all__ = ["StageBuffers"]


class StageBuffers:
    """Parameters that come in memory for their stage, and are without values otherwise.

    They are numbered as `Storage.partitioned_layout` numbers them.

    Args:
        context: this process's part of the run; its only device keeps a partition.
        used: see `AccessHook`.
    """

    def __init__(self, context: StepContext, used: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        parts, self._device = context.parts, context.first.trained.device
        self._update, self.frozen = context.update, context.exchange.memory.frozen
        storage: Storage = context.update.storage
        self.layout: StageLayout = storage.partitioned_layout()
        self.parameters = [*parts.trained.values(), *parts.frozen.values()]
        self.trained = len(parts.trained)
        """How many of them are trained; these are the first."""
        self._names = [*parts.trained, *parts.frozen]
        self._numbers = {id(parameter): n for n, parameter in enumerate(self.parameters)}
        self._segments = len(storage.segments)
        entries = enumerate(self.layout.layout.entries)
        self._placeholders = [
            _placeholder(self.layout.layout.dtype_of(n), self._device).expand(e.shape)
            for n, e in entries
        ]
        self._elsewhere = AccessHook(used)
        self._places = [0] * len(self.parameters)
        """Where each of them was shown last."""
        self._written: int | None = None
        self._sums: dict[int, dict[int, bytes]] = {}
        """Of stages that this device keeps, the sums of their trained parameters, by number."""
        self._own_buffers: dict[int, torch.Tensor | None] | None = None
        """Of the stages that `own_buffer` is about; None until it is asked first."""

    def stage_of(self, tensor: torch.Tensor) -> int | None:
        """The stage of a parameter, if the tensor is one of these."""
        number = self._numbers.get(id(tensor))
        return None if number is None else self.layout.stages.stage_of[number]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of one of them."""
        return self._names[self._numbers[id(tensor)]]

    def values_of(self, number: int) -> torch.Tensor:
        """(numel,) a segment that this device keeps, as models see it."""
        if number < self._segments or self.frozen is None:
            return self._update.values_of(number)
        return self.frozen.part(number)

    def new_buffer(self, stage: int) -> torch.Tensor:
        """(bytes,) uint8 memory for what this device does not keep as it is needed, of a stage."""
        nbytes = self.layout.stage_bytes[stage]
        if self.frozen is not None and self.frozen.has_all_of(stage):
            nbytes = self.frozen.bytes_before(stage)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def own_buffer(self, stage: int) -> torch.Tensor | None:
        """The memory of a stage that this device of a pipeline keeps, of which nobody has a part.

        The very values that the optimizer updates lie there, so that there are none beside them.
        """
        if self._own_buffers is None:
            self._own_buffers = dict.fromkeys(self._kept_stages())
        if stage in self._own_buffers and self._own_buffers[stage] is None:
            buffer = self._own_buffers[stage] = self.new_buffer(stage)
            for item in self._update.owned:
                if item.number in self.layout.segments[stage]:
                    place = self.layout.in_room(item.number, buffer)
                    values = item.values.detach()
                    item.values.data = place.as_strided(values.shape, values.stride()).copy_(values)
        return self._own_buffers.get(stage)

    def _kept_stages(self) -> list[int]:
        # Where lines are side by side, the other devices of a column must hear of each stage.
        alone = self._update.storage.devices == self.layout.stages.pipeline
        if not (alone and self._update.in_place):
            return []
        rounds = self._update.storage.rounds_entry
        own = {item.number for item in self._update.owned if not rounds(item.segment.entry)}
        own |= set() if self.frozen is None else set(self.frozen.numbers)
        numbers = enumerate(self.layout.segments)
        return [stage for stage, of in numbers if stage != ROOT and own.issuperset(of)]

    def show(self, stage: int, buffer: torch.Tensor) -> None:
        """Have the parameters of a stage lie in memory for it."""
        for number in self.layout.stages.entries[stage]:
            self._elsewhere.show([self.parameters[number]])
            view = self._view(number, stage, buffer)
            self.parameters[number].data = view
            self._places[number] = view.data_ptr()

    def hide(self, numbers: Iterable[int]) -> None:
        """Have parameters be without values."""
        for number in numbers:
            self.parameters[number].data = self._placeholders[number]
            self._elsewhere.hide([self.parameters[number]])

    def hide_all(self) -> None:
        """Have all be without values, and free the memory of the frozen ones."""
        self.hide(range(len(self.parameters)))
        if self.frozen is not None:
            self.frozen.flat.let_go()

    def show_all(self) -> None:
        """Have all be plain parameters again, the frozen ones in the memory for all of them."""
        self._elsewhere.show(self.parameters)
        views = [] if self.frozen is None else self.frozen.flat.views
        for parameter, view in zip(self.parameters[self.trained :], views, strict=True):
            parameter.data = view

    def copy_frozen(self, numbers: Iterable[int]) -> None:
        """Copy frozen ones, which are here, to the memory for all of them."""
        for number in numbers:
            if number >= self.trained and self.frozen is not None:
                view = self.frozen.flat.views[number - self.trained]
                view.copy_(self.parameters[number].detach())

    def note(self, stage: int) -> None:
        """Note the values of a stage that was just shown, for `refuse_foreign_writes`."""
        if self.own_buffer(stage) is not None:
            self._sums[stage] = self._sums_of(stage)

    def refuse_foreign_writes(self, stage: int, buffer: torch.Tensor, *, trained: bool) -> None:
        """Look, before a stage goes, whether somebody else has written to what is kept elsewhere.

        Args:
            stage: its number.
            buffer: its memory.
            trained: whether to look at trained parameters as well as at frozen ones.
        """
        numbers = self.layout.stages.entries[stage]
        moved = (n for n in numbers if self.parameters[n].data_ptr() != self._places[n])
        found = next(moved, None)
        if found is None and self.frozen is not None:
            found = self.frozen.written(stage, buffer)
        if found is None and trained:
            found = self._trained_written(stage, buffer)
        self._written = found if self._written is None else self._written

    def _trained_written(self, stage: int, buffer: torch.Tensor) -> int | None:
        """Find a trained parameter that was written to, by what this device keeps of it."""
        if stage in self._sums:
            before, now = self._sums.pop(stage), self._sums_of(stage)
            return next((number for number in now if now[number] != before[number]), None)
        for item in self._update.owned:
            if item.number in self.layout.segments[stage]:
                came = self.layout.in_room(item.number, buffer)
                if not same_bits(came, self._update.values_of(item.number)):
                    return item.segment.entry
        return None

    def _sums_of(self, stage: int) -> dict[int, bytes]:
        numbers = [n for n in self.layout.stages.entries[stage] if n < self.trained]
        return {n: sum_of(as_words(self.parameters[n].detach())) for n in numbers}

    def refuse_written(self) -> None:
        """Refuse what was written where it is not kept.

        Raises:
            StateError: `refuse_foreign_writes` found a parameter, or frozen ones differ where all
            are here.
        """
        if self.frozen is not None and self.frozen.flat.is_there:
            self._written = self.frozen.written_in_flat()
        written, self._written = self._written, None
        if written is not None:
            trained = written < self.trained
            what = "a masked weight" if trained else "a momentum encoder"
            instead = (
                "keep what changes with every batch in a buffer"
                if trained
                else "use --placement replicate"
            )
            raise StateError(
                f"parameter {self._names[written]} was written to while it was computed with "
                f"({what} does so), and not where it is kept: other shards would not follow. "
                f"Write to it between steps, in `with trainer.modifying():`, or {instead}"
            )

    def refuse_changed(self) -> None:
        """Refuse what a script has written to trained parameters while all of them were here.

        Raises:
            StateError: one that this device keeps a part of has other values than that.
        """
        found = self._update.shown_otherwise()
        if found is not None:
            raise StateError(
                f"parameter {self._names[found.segment.entry]} was written to in `with "
                f"trainer.gathered():`, in which the model is read: other devices would not "
                f"follow. Change it in `with trainer.modifying():`"
            )

    def _view(self, number: int, stage: int, buffer: torch.Tensor) -> torch.Tensor:
        if number >= self.trained and self.frozen is not None and self.frozen.has_all_of(stage):
            return self.frozen.view(number)
        return self.layout.whole(number, buffer)


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """() of a dtype, not a number where there is such a value."""
    unknown = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.tensor(unknown, device=device).to(dtype)

"""The parameters that a device has only temporarily: all trained and partitioned frozen ones."""

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
    """Parameters whose values are in the memory of their stage, and absent otherwise.

    They are numbered as in `Storage.partitioned_layout`.

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
        """Number of trained parameters, which come first."""
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
        """Address at which each parameter was last shown."""
        self._written: int | None = None
        self._sums: dict[int, dict[int, bytes]] = {}
        """Checksums of trained parameters, by number, for stages that this device keeps."""
        self._own_buffers: dict[int, torch.Tensor | None] | None = None
        """Stages of `own_buffer`; None until its first call."""

    def stage_of(self, tensor: torch.Tensor) -> int | None:
        """Return the stage of a parameter; None if the tensor is not one of these parameters."""
        number = self._numbers.get(id(tensor))
        return None if number is None else self.layout.stages.stage_of[number]

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of one of these parameters."""
        return self._names[self._numbers[id(tensor)]]

    def values_of(self, number: int) -> torch.Tensor:
        """Return the values that models use of a segment that this device keeps: (numel,)."""
        if number < self._segments or self.frozen is None:
            return self._update.values_of(number)
        return self.frozen.part(number)

    def new_buffer(self, stage: int) -> torch.Tensor:
        """Allocate (bytes,) uint8 for the part of a stage that this device does not keep in that
        form."""
        nbytes = self.layout.stage_bytes[stage]
        if self.frozen is not None and self.frozen.has_all_of(stage):
            nbytes = self.frozen.bytes_before(stage)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def own_buffer(self, stage: int) -> torch.Tensor | None:
        """Return the memory of a stage that only this device of a pipeline keeps; None otherwise.

        It holds the very values that the optimizer updates, so that there is no second copy.
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
        # With several pipelines, the other devices of a column must also receive each stage.
        alone = self._update.storage.devices == self.layout.stages.pipeline
        if not (alone and self._update.in_place):
            return []
        rounds = self._update.storage.rounds_entry
        own = {item.number for item in self._update.owned if not rounds(item.segment.entry)}
        own |= set() if self.frozen is None else set(self.frozen.numbers)
        numbers = enumerate(self.layout.segments)
        return [stage for stage, of in numbers if stage != ROOT and own.issuperset(of)]

    def show(self, stage: int, buffer: torch.Tensor) -> None:
        """Point the parameters of a stage to its memory."""
        for number in self.layout.stages.entries[stage]:
            self._elsewhere.show([self.parameters[number]])
            view = self._view(number, stage, buffer)
            self.parameters[number].data = view
            self._places[number] = view.data_ptr()

    def hide(self, numbers: Iterable[int]) -> None:
        """Replace parameters with empty placeholders."""
        for number in numbers:
            self.parameters[number].data = self._placeholders[number]
            self._elsewhere.hide([self.parameters[number]])

    def hide_all(self) -> None:
        """Replace all parameters with placeholders, and free the memory of the frozen ones."""
        self.hide(range(len(self.parameters)))
        if self.frozen is not None:
            self.frozen.flat.let_go()

    def show_all(self) -> None:
        """Make all parameters plain again, with the frozen ones in the memory for all of them."""
        self._elsewhere.show(self.parameters)
        views = [] if self.frozen is None else self.frozen.flat.views
        for parameter, view in zip(self.parameters[self.trained :], views, strict=True):
            parameter.data = view

    def copy_frozen(self, numbers: Iterable[int]) -> None:
        """Copy resident frozen parameters to the memory for all of them."""
        for number in numbers:
            if number >= self.trained and self.frozen is not None:
                view = self.frozen.flat.views[number - self.trained]
                view.copy_(self.parameters[number].detach())

    def note(self, stage: int) -> None:
        """Record the values of a stage that was just shown, for `refuse_foreign_writes`."""
        if self.own_buffer(stage) is not None:
            self._sums[stage] = self._sums_of(stage)

    def refuse_foreign_writes(self, stage: int, buffer: torch.Tensor, *, trained: bool) -> None:
        """Detect writes to values that are kept elsewhere, before the stage is freed.

        Args:
            stage: stage number.
            buffer: memory of the stage.
            trained: whether to check trained parameters in addition to frozen ones.
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
        """Find a trained parameter that was written to, from the part that this device keeps."""
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
        """Raise an error for writes that would be lost.

        Raises:
            StateError: `refuse_foreign_writes` found a parameter, or frozen ones differ while all
                are resident.
        """
        if self.frozen is not None and self.frozen.flat.is_there:
            self._written = self.frozen.written_in_flat()
        written, self._written = self._written, None
        if written is not None:
            trained = written < self.trained
            what = "a masked weight" if trained else "a momentum encoder"
            instead = (
                "keep values that change with every batch in a buffer"
                if trained
                else "use --placement replicate"
            )
            raise StateError(
                f"parameter {self._names[written]} was written to during its computation ({what} "
                f"does so), but not where its values are kept, so other shards would not see the "
                f"change. Write to it between steps, in `with trainer.modifying():`, or {instead}"
            )

    def refuse_changed(self) -> None:
        """Raise an error if the script wrote to trained parameters while all of them were resident.

        Raises:
            StateError: a parameter differs from the part of it that this device keeps.
        """
        found = self._update.shown_otherwise()
        if found is not None:
            raise StateError(
                f"parameter {self._names[found.segment.entry]} was written to in `with "
                f"trainer.gathered():`, which only allows reading: other devices would not see the "
                f"change. Change it in `with trainer.modifying():`"
            )

    def _view(self, number: int, stage: int, buffer: torch.Tensor) -> torch.Tensor:
        if number >= self.trained and self.frozen is not None and self.frozen.has_all_of(stage):
            return self.frozen.view(number)
        return self.layout.whole(number, buffer)


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a () placeholder of a dtype: NaN if the dtype has it, else 0."""
    unknown = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.tensor(unknown, device=device).to(dtype)

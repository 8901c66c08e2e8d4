"""Runs the user's own optimizer on the partitions of this process.

If a model is updated stage by stage, the optimizer's ``step()`` is called once for each stage, with
the segments of that stage in its groups, so that its other memory is needed for one stage at a
time.

Note: how an optimizer is divided
---------------------------------
The user's optimizer object is kept, so that schedulers, hooks and parameter groups keep working.
During ``step`` its groups hold this process's segments instead of parameters; its state is keyed by
segments permanently. A whole segment is the parameter itself; any other segment is a flat view of a
part of it, so that updating the segment updates the parameter in place. An optimizer finds a
segment's state by the identity of the tensor object. So as long as this process owns a segment, the
same object must represent it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from onefold.core.assignment import Assignment
from onefold.core.flat import FlatTensors, Segment, laid_out, same_bits, storage_order
from onefold.core.storage import Storage
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.compat import copy_each, limit_each, multiply_each
from onefold.system.internals import has_own_step
from onefold.update.averages import AVERAGE, Averages
from onefold.update.norms import SegmentNorms, clipping_each
from onefold.update.optimizers import (
    StateView,
    UpdateDraws,
    explain_state_dict,
    name_of,
    optimizers_in,
    refuse_own_steps,
    steps_by_parameter,
)
from onefold.update.staging import DeviceStaging, OwnedSegment, SegmentState, Staging, is_by_element

__all__ = ["MASTER", "PartitionedOptimizer"]


MASTER = "onefold.master"
"""Key of a segment's float32 values, saved with its state if models hold rounded values."""


class PartitionedOptimizer:
    """Runs the user's optimizer on the segments that this process owns.

    Args:
        optimizer: the user's optimizer, already checked.
        users: the user's parameters, in the order of the layouts.
        storage: the layouts, and the segments.
        memory: the trained parameters on each device of this process, by the device's number.
        assignment: which device owns and updates which segments.
        allocator: allocates state, averages and masters. If it is on a disk, the model is updated
            one stage at a time; if it is apart from the device, as `onefold.update.staging`
            describes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        users: Sequence[torch.nn.Parameter],
        storage: Storage,
        memory: Mapping[int, FlatTensors],
        assignment: Assignment,
        allocator: TensorAllocator = DEFAULT_ALLOCATOR,
    ) -> None:
        self.optimizer, self._name = optimizer, name_of(optimizer)
        self._allocator = allocator
        self._device = next(iter(memory.values())).device
        staging = DeviceStaging if allocator.apart else Staging
        self._staging = staging(self._device, allocator, optimizer)
        self.averages = Averages(allocator, self._staging)
        """Averages of these segments, if the run keeps any."""
        self.users = users
        """The user's parameters, in the order of the layouts."""
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        # Copy the lists: add_param_group and scripts change them in place.
        self._held = [list(group["params"]) for group in optimizer.param_groups]
        self._each = optimizers_in(optimizer).values()
        self.view = StateView(optimizer)
        """The optimizer's state as the script sees it."""
        self.state = self.view.kept
        """The optimizer's state, by segment."""
        self._draws = UpdateDraws(self._each, {flat.device for flat in memory.values()})
        self.around: Callable[[torch.optim.Optimizer, Sequence[torch.Tensor]], None] | None = None
        """Makes the optimizer's step for some segments; None for a plain call."""
        self._stepping: bool | None = False
        """Whether this object is running the optimizer; None once no caller may run it."""
        # Divide the parameters first, then the state, which is cut as they are.
        whole = dict(self.state)
        self.divide(storage, memory, assignment)
        self._divide_state(whole)
        self.view.hide(undivided=self.is_undivided)
        view = self.view
        explain_state_dict(self._each, lambda: view.is_whole)
        # A weak reference: the optimizer, which a script may keep, must not keep the run's memory
        # alive.
        this = weakref.ref(self)
        refuse_own_steps(view.optimizers, lambda: None if (it := this()) is None else it._stepping)

    def divide(
        self, storage: Storage, memory: Mapping[int, FlatTensors], assignment: Assignment
    ) -> None:
        """Adopt the segments that an assignment gives to this process's devices.

        Called between two steps, or by the constructor. It drops the state of segments: read
        `states` before, send each to its new owner, and pass them to `take_states`.

        Args:
            storage: the layouts and segments. The segments never change, because their bounds
                depend only on the model.
            memory: the trained parameters on each device of this process, by the device's number.
            assignment: which device owns and updates which segments.
        """
        self._forget()
        self.storage, self._memory, allocator = storage, memory, self._allocator
        self._cuts = not all(segment.whole for segment in storage.segments)
        self.owned = [self._own_segment(d, n) for d in memory for n in assignment.partitions[d]]
        """Segments of this process."""
        self._own = {item.number for item in self.owned}
        self.updated = self._with_others(next(iter(memory))) if storage.mirrors else self.owned
        """Segments that this process updates: all with `Storage.mirrors`, else its own."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.updated)
        """Gradient of each of these segments, from `load_gradients` to the end of `step`, in the
        segment's shape and the dtype of sums; None if no shard gave one."""
        self._by_number = {item.number: item for item in self.updated}
        self._apart = [(item, item.home) for item in self.owned if item.home is not None]
        self.norms = SegmentNorms(storage, memory, assignment.partitions, self.owned)
        self._entries = [item.segment.entry for item in self.updated]
        self._whole = self._part(range(len(self.updated)))
        self._parts = [self._whole]
        # Several calls of the optimizer are slower than one, so cut only if state is on a disk.
        if storage.stages and allocator.on_disk and self.owned:
            of_stage: dict[int, list[int]] = defaultdict(list)
            for place, entry in enumerate(self._entries):
                of_stage[storage.stages.stage_of[entry]].append(place)
            self._parts = [self._part(places) for places in of_stage.values()]

    def _with_others(self, device: int) -> list[OwnedSegment]:
        """List all segments. The device owns some of them, and updates all."""
        own = {item.number: item for item in self.owned}
        numbers = range(len(self.storage.segments))
        return [own[n] if n in own else self._own_segment(device, n) for n in numbers]

    @property
    def owned_gradients(self) -> list[torch.Tensor | None]:
        """Gradients of owned segments."""
        if self.updated is self.owned:
            return self.gradients
        pairs = zip(self.updated, self.gradients, strict=True)
        return [gradient for item, gradient in pairs if item.number in self._own]

    def _part(self, places: Sequence[int]) -> Part:
        """Divide some of this process's updated segments among the optimizer's groups."""
        divided: list[list[torch.Tensor]] = [[] for _ in self.optimizer.param_groups]
        for item in (self.updated[place] for place in places):
            divided[self._group_of[id(item.parameter)]].append(item.values)
        return Part(places, divided)

    @property
    def in_place(self) -> bool:
        """Whether the device computes in the memory of the segments."""
        return not self._staging.moves

    @property
    def has_masters(self) -> bool:
        """Whether models hold copies of some of the updated values."""
        return bool(self._apart)

    def exact_values(self) -> dict[int, torch.Tensor]:
        """Return values of the owned segments by number, each in its segment's shape."""
        return {item.number: item.values.detach() for item in self.owned}

    @property
    def is_whole(self) -> bool:
        """Whether there is memory for all parameters, through which models see the segments."""
        return all(flat.is_there for flat in self._memory.values())

    def values_of(self, number: int) -> torch.Tensor:
        """Return an owned segment's values as models see them: (numel,) in storage order."""
        item = self._by_number[number]
        entry = self.storage.parameters.entries[item.segment.entry]
        values = item.values.detach().to(self.storage.parameters.dtypes[entry.section])
        return storage_order(values)

    def shown_otherwise(self) -> OwnedSegment | None:
        """Find a segment whose values in the model differ from the stored ones."""
        for item in self.owned:
            assert item.shown is not None
            shown, kept = storage_order(item.shown.detach()), self.values_of(item.number)
            if same_bits(shown, kept):
                continue
            # A zero with the other sign does not count as a change: owners keep their own zero.
            kept = kept.to(shown.device)
            if bool(((shown != kept) & ~(shown.isnan() & kept.isnan())).any()):
                return item
        return None

    def _own_segment(self, device: int, number: int) -> OwnedSegment:
        segment, home = self.storage.segments[number], self._memory[device]
        user = self.users[segment.entry]
        if not self.is_whole or self.storage.rounds_entry(segment.entry):
            # A parameter, because optimizers may expect one. Its exact values come with the state.
            return OwnedSegment(number, device, segment, user, self._master(segment, home), home)
        values: torch.Tensor = home.segment(segment)
        if segment.whole:
            # Between calls the user's parameter points at the first device's memory. Other devices
            # need a stand-in, or the update would go to the wrong memory.
            values = user if device == next(iter(self._memory)) else torch.nn.Parameter(values)
        return OwnedSegment(number, device, segment, user, values)

    def _master(self, segment: Segment, home: FlatTensors) -> torch.Tensor:
        entry = self.storage.masters.entries[segment.entry]
        dtype = self.storage.masters.dtypes[entry.section]
        if home.is_there:
            values = home.segment(segment)
            return torch.nn.Parameter(self._allocator.like(values, dtype).copy_(values))
        shape, stride = (entry.shape, entry.stride) if segment.whole else ((segment.numel,), (1,))
        return torch.nn.Parameter(self._staging.new(shape, stride, dtype))

    def load_gradients(
        self, totals: Sequence[torch.Tensor | None], gave: Sequence[int], *, shards: int
    ) -> None:
        """Load the gradients of a step.

        Args:
            totals: one summed gradient for each segment of `updated`, in its shape; changed in
                place.
            gave: for each trained parameter, the number of shards that gave it a gradient. A
                parameter without one is left alone, as in plain PyTorch.
            shards: number of shards of the batch. If fewer gave a gradient, the missing ones count
                as zeros.
        """
        # Nearly always every shard gives a gradient to every parameter.
        if gave.count(shards) == len(gave):
            self.gradients = list(totals)
            return
        for number, (entry, total) in enumerate(zip(self._entries, totals, strict=True)):
            given = gave[entry]
            # Without a gradient from any shard, flat memory holds zeros, not None: momentum and
            # weight decay would move the parameter. Hence the count.
            if total is None or not given:
                self.gradients[number] = None
                continue
            # Inside a block a missing gradient is left out, but a partial sum holds +0 for it, and
            # adding +0 turns -0 into +0. The shares decide which of the two happens, so add +0 here
            # in any case.
            if given < shards:
                total.add_(0.0)
            self.gradients[number] = total

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients of this process's segments by a factor.

        Args:
            factor: a number, or a () tensor, which the host does not read.
        """
        gradients = [gradient for gradient in self.gradients if gradient is not None]
        if not gradients:
            # No parameter of this partition got a gradient.
            return
        if isinstance(factor, float):
            multiply_each(gradients, factor)
        else:
            self._staging.change(lambda tensors, _: _scale(tensors, factor), gradients)

    def limit(self, magnitude: float) -> None:
        """Clamp each element of all gradients of this process's segments to a magnitude."""
        gradients = [gradient for gradient in self.gradients if gradient is not None]
        if gradients:
            limit_each(gradients, magnitude)

    def drop(self) -> None:
        """Drop the loaded gradients of a skipped step."""
        self.gradients = [None] * len(self.updated)

    def step(self) -> None:
        """Run the user's optimizer on the segments that this process updates."""
        # Keep the list objects themselves: other code may hold them, and gets the same ones back.
        self._given = [group["params"] for group in self.optimizer.param_groups]
        cut = len(self._parts) > 1 and steps_by_parameter(self._each)
        parts = self._parts if cut else [self._whole]
        # Before the segments are put into the groups: a script may have assigned a new state.
        self.adopt_assigned()
        self._stepping = True
        self.view.step()
        try:
            with self._draws.watched(), clipping_each(self._name):
                for part in parts:
                    self._step(part)
            self.show()
        finally:
            # Do this after a failure too: a script may catch the error and continue to use its
            # groups.
            self.end_step()

    def end_step(self) -> None:
        """Give the optimizer back to the script. Does nothing if that has already happened."""
        if not self._stepping:
            return
        self.view.end_step()
        self.view.hide(undivided=self.is_undivided)
        for group, parameters in zip(self.optimizer.param_groups, self._given, strict=True):
            group["params"] = parameters
        # The totals belong to the exchange again, and the next step overwrites them, so no
        # parameter may keep pointing at them.
        for item in self.updated:
            item.values.grad = None
            if item.segment.whole and item.values is not item.parameter:
                item.parameter.grad = None
        self.gradients = [None] * len(self.updated)
        self._stepping = False

    def _step(self, part: Part) -> None:
        """Call the optimizer for a part of the segments."""
        for group, segments in zip(self.optimizer.param_groups, part.divided, strict=True):
            group["params"] = segments
        with self._staging.updating(partial(self._visitors, part)):
            self._update(part)
        # Move the state of this stage to the disk before the next one needs the memory.
        if self._allocator.on_disk:
            for place in part.places:
                values = self.owned[place].values
                values.grad = self.gradients[place] = None
                self._keep(self.state.get(values, {}))
            self._allocator.trim()

    def _visitors(self, part: Part) -> Sequence[Sequence[torch.Tensor]]:
        """List, for each group, the segments that the optimizer reads."""
        # PyTorch's own optimizers skip segments without a gradient, so do not move these.
        idle = {id(self.updated[p].values) for p in part.places if self.gradients[p] is None}
        idle = idle if steps_by_parameter(self._each) else set()
        return [[each for each in segments if id(each) not in idle] for segments in part.divided]

    def _update(self, part: Part) -> None:
        moves = self._staging.moves
        for place in part.places:
            item, gradient = self.updated[place], self.gradients[place]
            values = item.values
            # Round only now: scaling and clipping use the precision of the sum.
            if gradient is not None and (moves or gradient.dtype is not values.dtype):
                gradient = gradient.to(values.device, values.dtype)
            values.grad = gradient
            # Other devices of this process have stand-ins. A hook may visit the model instead of
            # the groups, and what it does to the gradient there must reach the stand-in.
            shown = values is not item.parameter and item.segment.whole and item.home is None
            if shown and values.device == item.parameter.device:
                item.parameter.grad = gradient
        if self.around is not None and not moves and steps_by_parameter(self._each):
            self.around(self.optimizer, [self.updated[place].values for place in part.places])
        else:
            self.optimizer.step()

    def _keep(self, state: dict[str, Any]) -> None:
        """Move the large tensors of a segment's state to the allocator's memory."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = self._allocator.kept(value)

    def states(self) -> list[SegmentState]:
        """List the current state of the owned segments, with masters and averages.

        The tensors are the optimizer's own.

        Raises:
            TypeError: the optimizer keeps state under a key that is not a parameter, or an inner
                optimizer keeps it.
        """
        self.adopt_assigned()
        self.view.hide(undivided=self.is_undivided)
        found = self.averages.states()
        if self.view.others:
            raise TypeError(
                f"{self._name} works with {', '.join(self.view.others)}, whose state onefold "
                f"cannot save. Use an optimizer that keeps all state itself"
            )
        if self._loose():
            raise TypeError(
                f"the optimizer keeps {', '.join(map(repr, self._loose()))} in its state, under no "
                f"parameter, which onefold cannot save. Use an optimizer that keeps its state by "
                f"parameter"
            )
        for item in self.owned if self.storage.rounds else ():
            values = storage_order(item.values.detach())
            found.append(SegmentState(item.number, MASTER, values, True))
        return found + self.optimizer_states()

    def optimizer_states(self) -> list[SegmentState]:
        """List the optimizer's own state of the owned segments; the tensors are its own."""
        found = []
        for item in self.owned:
            for key, value in self.state.get(item.values, {}).items():
                stride = item.values.stride() if item.segment.whole else None
                by_element = is_by_element(key, value, item.values.shape, stride)
                # In storage order, so that the states of neighboring segments join as their values
                # do.
                if by_element:
                    value = storage_order(laid_out(value, item.values.stride()))
                found.append(SegmentState(item.number, key, value, by_element))
        return found

    def take_states(
        self, states: Iterable[SegmentState], shown: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Replace the state of all segments that this process updates.

        Args:
            states: the states of these segments; tensors are copied.
            shown: their values as models see them, (numel,) by number, if these have no memory.
        """
        self.view.hide(undivided=self.is_undivided)
        self._forget()
        self.averages.segments.clear()
        # Without masters in the states, the models' own values are the best that there is.
        seen = self._shown() if shown is None else shown
        for number, values in seen.items():
            storage_order(self._by_number[number].values.data).copy_(values)
        self.adopt_states(states)
        self._follow(seen)

    def adopt_states(self, states: Iterable[SegmentState]) -> None:
        """Add the states of segments that have none yet.

        Args:
            states: states of segments that this process updates. Tensors are copied, because they
                may be in memory that is reused.
        """
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for state in states:
            item, value = self._by_number[state.segment], state.value
            values = item.values
            if state.key == MASTER:
                # A run whose models have full precision does not need masters.
                if item.home is not None:
                    storage_order(values.data).copy_(value)
            elif state.key == AVERAGE:
                # Averages are kept by owners only.
                if state.segment in self._own:
                    self.averages.adopt(state.segment, values.detach(), value)
            elif state.by_element:
                # In the segment's own strides: fused kernels read state and values in parallel.
                value = self._allocator.like(values.detach(), value.dtype)
                storage_order(value).copy_(state.value)
            elif isinstance(value, torch.Tensor):
                value = value.to(self._home(state.key, values), copy=True)
            if state.key not in (MASTER, AVERAGE):
                found.setdefault(values, {})[state.key] = value
        self.state.update(found)

    def show(self) -> None:
        """Copy this process's segments to the models, rounded to their precision."""
        if self.is_whole and self._apart:
            exact = [item.values.data for item, _ in self._apart]
            copy_each([home.segment(item.segment) for item, home in self._apart], exact)

    def end(self) -> None:
        """Drop the partitioned state, and let no caller use the optimizer."""
        self._forget()
        self.averages.end()
        self._stepping = None

    def follow_parameters(self) -> None:
        """Adopt changes to parameters that models hold in a lower precision.

        An element that still equals its rounded master keeps the precision of the master.
        """
        self._follow(self._shown())

    def _shown(self) -> dict[int, torch.Tensor]:
        """View the values that models see, (numel,) in storage order, if stored separately."""
        pairs = [(item.number, item.shown) for item in self.owned]
        return {number: storage_order(shown) for number, shown in pairs if shown is not None}

    def _follow(self, seen: Mapping[int, torch.Tensor]) -> None:
        for number, values in seen.items():
            exact = storage_order(self._by_number[number].values.data)
            shown = values.to(exact.device)
            # Compare in the low precision: an unchanged element equals its rounded master.
            exact.copy_(torch.where(exact.to(shown.dtype) == shown, exact, shown))

    def _forget(self) -> None:
        """Drop the state of all parameters; state under other keys stays."""
        for key in [key for key in self.state if isinstance(key, torch.Tensor)]:
            del self.state[key]

    def _loose(self) -> list[Any]:
        """List the keys of the optimizer's state that are not tensors; the same on every device."""
        return [key for key in self.state if not isinstance(key, torch.Tensor)]

    def _home(self, key: str, values: torch.Tensor) -> torch.device:
        """Return the device where the optimizer expects a value: PyTorch's rule for loading."""
        if key != "step":
            return values.device
        # A step count is stored on the host, because kernels need it as a number. Fused and
        # capturable kernels read it on the device, and fail otherwise.
        held = zip(self.optimizer.param_groups, self._whole.divided, strict=True)
        group = next(group for group, segments in held if any(p is values for p in segments))
        there = group.get("capturable") or group.get("fused")
        return values.device if there else torch.device("cpu")

    def check_groups(self) -> None:
        """Refuse parameter groups and steps that changed after Trainer was created.

        Raises:
            ValueError: a group was added or removed, or its number of parameters changed; or
                ``step()`` got a hook that would see parts of parameters.
        """
        if self._cuts and any(map(has_own_step, self._each)):
            raise ValueError(
                f"{self._name} got a hook on its step, or another step, after Trainer was created, "
                f"which cut parameters into segments that are updated separately. Register it "
                f"before: then step() and its hooks see whole parameters"
            )
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != list(map(len, self._held)):
            raise ValueError(
                "the optimizer's parameter groups changed after Trainer was created. To train a "
                "group later, add it to the optimizer, create Trainer, then freeze its parameters "
                "with requires_grad_(False), and unfreeze them between two steps, on every device"
            )

    def _divide_state(self, whole: Mapping[Any, Any]) -> None:
        """Cut the existing state of parameters into segments."""
        self.adopt_states(self.cut(whole, self._by_number))
        for item in self.updated:
            self._keep(self.state.get(item.values, {}))

    def cut(self, whole: Mapping[Any, Any], numbers: Iterable[int]) -> Iterator[SegmentState]:
        """Cut the state of the user's parameters, for segments with the given numbers."""
        for number in numbers:
            segment = self.storage.segments[number]
            entry = self.storage.masters.entries[segment.entry]
            for key, value in whole.get(self.users[segment.entry], {}).items():
                stride = entry.stride if segment.whole else None
                by_element = is_by_element(key, value, entry.shape, stride)
                if by_element:
                    value = storage_order(laid_out(value, entry.stride))[
                        segment.start : segment.stop
                    ]
                yield SegmentState(number, key, value, by_element)

    @property
    def is_undivided(self) -> bool:
        """Whether the stored state is the complete state of whole parameters."""
        own = [item for item in self.owned if item.values is item.parameter]
        return len(own) == len(self.users)

    def replace_states(self, states: Iterable[SegmentState]) -> None:
        """Replace the state of all updated segments, but not their values and averages.

        Args:
            states: states of all segments; tensors are copied.
        """
        self._forget()
        self.adopt_states(state for state in states if state.segment in self._by_number)

    def adopt_assigned(self) -> None:
        """Adopt a state that a script assigned to an optimizer, for instance to reset it."""
        for held, whole in self.view.assigned():
            for item in self.updated:
                if id(item.parameter) in held:
                    self.state.pop(item.values, None)
            self._divide_state(dict(whole))
            for key in self._loose() if len(self._each) == 1 else ():
                del self.state[key]
            self.state.update({k: v for k, v in whole.items() if not isinstance(k, torch.Tensor)})


def _scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    # PyTorch falls back to one kernel per tensor if a list has several devices or dtypes.
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    # The factor keeps its dtype, as in clip_grad_norm_; rounded to bfloat16 it would be coarse.
    for (device, _), group in alike.items():
        multiply_each(group, factor.to(device))


@dataclass(frozen=True, slots=True)
class Part:
    """The segments of one call of ``step()``."""

    places: Sequence[int]
    """Indices among the segments that this process updates."""
    divided: Sequence[Sequence[torch.Tensor]]
    """Values of these segments, for each group of the optimizer."""

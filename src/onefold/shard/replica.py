"""The model on one device: computes one shard at a time and returns its gradients.

Note: one module for all devices of a process
---------------------------------------------
The user's module exists once. If one process drives several devices, each device has its own memory
for parameters and buffers, and the module's tensors point to that memory while the device runs its
shards. Hooks, attributes, modes and a loss that closes over the model are therefore the same on
every device: there is no copy that could become stale. Between calls the module points to the first
device.

Note: `compute` as a pure function
----------------------------------
A shard's result may depend on parameters, samples, seed, step and shard, but not on earlier work on
the same device: with other shares, the device would have run other shards. Every shard therefore
starts from the step's buffers and its own seeds, without gradients, in the modes and with the
frozen parameters of the start of the step. Buffers, gradients and seeds are reset before a shard.
Modes and frozen parameters are reset after it, even if it fails, so that a script that catches the
error keeps its model unchanged. With one shard, modes and frozen parameters are not reset: changes
made by the loss persist, as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from onefold.core.batch import move
from onefold.core.flat import FlatTensors
from onefold.core.gatherer import Gatherer, GatherRequest, Refusing, gathering
from onefold.core.late import load
from onefold.core.mean import PASS, Contribution, LateWeight, known, weigh
from onefold.core.randomness import OwnGenerators, derive_seed, seed_generators
from onefold.core.results import GATHERS, LATE, Gradients, ShardResult, code_of, split
from onefold.core.settings import AS_GIVEN, Precision, added_up_in
from onefold.core.shard import microbatch_bounds, rows_of
from onefold.errors import LossError
from onefold.shard.buffers import BufferSet
from onefold.shard.gradients import (
    ParameterSet,
    drop_gradients,
    gradients_of,
    take_gradients,
    widened,
)
from onefold.shard.kernels import computing_in
from onefold.shard.loss_watch import LossWatch, refuse_uneven
from onefold.shard.model_parts import ModelParts
from onefold.shard.task import (
    LossFunction,
    Microbatch,
    ShardTask,
    add_microbatch,
    end_notes,
)
from onefold.system.internals import hooked
from onefold.watch.timing import Stopwatch

if TYPE_CHECKING:
    from onefold.core.values import ShardValues
    from onefold.shard.stage_modules import GradientHooks, StageModules

__all__ = ["LossFunction", "Replica", "ShardTask", "Weighed"]


Read = TypeVar("Read")

_NOTHING = nullcontext()

Weighed = Mapping[int, Sequence[tuple[str, float]]]
"""Kind and weight of each term of the loss, by shard."""


class Replica:
    """The model on one device.

    Args:
        number: the device's number in the run.
        device: the device that computes.
        parts: the user's module, shared by all replicas of the process.
        trained: this device's memory of the trained parameters.
        other: this device's memory of all other parameters.
        buffers: this device's memory of the module's buffers.
        precision: the dtypes of parameters and of operations.
        stages: the model's stages, if gradients are sent stage by stage.
    """

    def __init__(
        self,
        number: int,
        device: torch.device,
        parts: ModelParts,
        trained: FlatTensors,
        other: FlatTensors,
        buffers: BufferSet,
        precision: Precision = AS_GIVEN,
        stages: StageModules | None = None,
    ) -> None:
        self.number = number
        self.device = device
        self.parts = parts
        self.trained = trained
        self.other = other
        self.buffers = buffers
        self.stages = stages
        """The model's stages, if gradients are sent stage by stage."""
        self.watch = Stopwatch(device)
        self.loss_watch = LossWatch()
        self.replay: Callable[[Microbatch, Any], ShardResult | None] = lambda microbatch, payload: (
            None
        )
        """Replays a microbatch that was captured; returns None if it must run eagerly."""
        self.own_generators = OwnGenerators()
        """Generators reachable from the loss and the model; seeded for each shard."""
        self.note_shard: Callable[[int], None] = lambda shard: None
        """Called with the number of each shard that starts, and with -1 after the last one."""
        self._parameters = list(parts.trained.values())
        layout = trained.layout
        strides = [entry.stride for entry in layout.entries]
        self.trained_set = ParameterSet(self._parameters, strides, [*parts.trained])
        """All trained parameters."""
        self.of_stages = [self.trained_set.some(n) for n in stages.stages.entries] if stages else []
        dtypes = map(layout.dtype_of, range(len(layout.entries)))
        self._narrow = [n for n, dtype in enumerate(dtypes) if added_up_in(dtype) != dtype]
        self._compute_in, self._kind = precision.compute, device.type
        self._rounds = precision.parameters is not None
        self._watched = [parameter for parameter in parts.other.values() if parameter.requires_grad]
        # Skip tensors without elements: they may report any address.
        placed = (*parts.trained, *parts.other, *parts.frozen)
        self._placed_names = [name for name in placed if parts.named[name].numel()]
        self._placed = [parts.named[name] for name in self._placed_names]
        views = [*trained.views, *other.views, *parts.frozen.values()]
        # If placement frees and gathers parameters, it calls `note_places` after each change.
        self._places = [view.data_ptr() for view in views if view.numel()]

    @property
    def module(self) -> torch.nn.Module:
        """The user's module, shared by all devices of this process."""
        return self.parts.module

    def attach(self) -> None:
        """Point the module to this device's memory; parameters keep their identity."""
        parts = self.parts
        for parameters, flat in ((parts.trained, self.trained), (parts.other, self.other)):
            views = flat.views if flat.is_there else ()
            for parameter, view in zip(parameters.values(), views, strict=flat.is_there):
                # Assign .data, so that everything that holds this Parameter object (the optimizer,
                # hooks, other modules) follows. onefold owns the memory; the parameter is a view.
                parameter.data = view
                # Drop the gradient: the previous device computed it, in its own memory.
                parameter.grad = None
        self.buffers.attach()

    def note_places(self) -> None:
        """Accept the present addresses of the parameters as correct."""
        self._places = list(map(torch.Tensor.data_ptr, self._placed))

    def check_places(self) -> None:
        """Refuse parameters that were replaced or moved to other memory.

        Raises:
            ValueError: a parameter was replaced, or is not in this device's memory.
        """
        self.parts.check_held()
        places = list(map(torch.Tensor.data_ptr, self._placed))
        if places != self._places:
            triples = zip(self._placed_names, places, self._places, strict=True)
            moved = next(name for name, now, before in triples if now != before)
            raise ValueError(
                f"parameter {moved} was moved to other memory after Trainer was created, by "
                f"model.to(), .data = ... or a second Trainer. Change values in place, or create "
                f"Trainer afterwards"
            )

    def start_step(self, task: ShardTask) -> None:
        """Prepare for the first shard of a step."""
        drop_gradients(self._parameters)
        # Parameters with hooks that may put their own tensor into ``.grad``. Search in every step:
        # hooks may be registered between steps.
        several = task.shards > 1 or task.microbatch is not None
        self._may_be_kept = hooked(self._parameters) if several else []

    def end(self) -> None:
        """Clean up after the last shard of a step."""
        self.note_shard(-1)
        # `taken` removed the gradients of trained parameters. Other gradients would hold memory
        # between steps, and a parameter that is unfrozen later would add to its old gradient.
        drop_gradients([*self.parts.other.values(), *self.parts.frozen.values()])

    def compute(self, shard: int, task: ShardTask) -> ShardResult:
        """Run one shard forward and backward. Call it between `start_step` and `end`.

        See the note on pure functions at the top of this file.

        Raises:
            LossError: the loss function returned an invalid loss.
            GradientError: a gradient is sparse, or an inner backward of the loss left a gradient.
        """
        where = self.begin_shard(shard, task)
        samples = task.batch.count_of(shard).samples
        result: ShardResult | None = None
        try:
            for start, stop in microbatch_bounds(samples, task.microbatch):
                given = self.compute_microbatch(
                    Microbatch(shard, start, stop, samples, task, where)
                )
                result = add_microbatch(result, given, task.step) if result else given
        except GatherRequest:
            drop_gradients(self._parameters)
            self.put_back(task)
            return ShardResult(self.nothing, None, GATHERS)
        except Exception as error:
            self.put_back(task)
            load("shard.advice").explain(error, self, shard, task, where)
            raise
        # Read buffers after backward, which may change them: checkpointed layers rerun forward.
        buffers = self.buffers.changed()
        self.put_back(task)
        assert result is not None  # a shard that runs has samples
        # Build the result by hand: `replace` would look up every field by name in every shard.
        left_out, values = task.batch.size_of(shard) - samples, result.values
        return ShardResult(
            result.gradients,
            result.total,
            result.weight,
            buffers,
            values,
            left_out,
            result.given,
            end_notes(task, shard, result.total),
        )

    def compute_microbatch(self, microbatch: Microbatch) -> ShardResult:
        """Run a microbatch forward and backward; usually it is the whole shard."""
        payload = self.on_device(microbatch)
        return self.replay(microbatch, payload) or self.run_eagerly(microbatch, payload)

    def run_eagerly(self, microbatch: Microbatch, payload: Any) -> ShardResult:
        """Run a microbatch forward and backward, kernel by kernel."""
        task, gatherer = microbatch.task, microbatch.gatherer
        handing: GradientHooks | None = None
        if task.send is not None and self.stages is not None:  # else shards keep their gradients
            handing = load("shard.stage_modules").GradientHooks(
                self.stages,
                microbatch,
                lambda stage: self.taken(self.of_stages[stage], microbatch),
                task.send,
            )
        start = self.watch.now()
        if handing is None and task.gathered is None:
            with gathering(gatherer):
                part, values = self.loss_of(microbatch, payload, gatherer)
                middle = self.watch.now()
                task.backward(part, gatherer.roots if gatherer else ())
        else:
            with (
                gathering(gatherer),
                handing.watched() if handing else _NOTHING,
                task.gathered() if task.gathered else _NOTHING as begin_backward,
            ):
                part, values = self.loss_of(microbatch, payload, gatherer)
                middle = self.watch.now()
                if handing:
                    handing.begin_backward()
                if begin_backward:
                    begin_backward()
                task.backward(part, gatherer.roots if gatherer else ())
        if gatherer is None or not gatherer.takes_turns:
            self.watch.note("forward", f"forward shard {microbatch.shard}", start, middle)
            self.watch.note("backward", f"backward shard {microbatch.shard}", middle)
        gradients: Gradients = []
        if handing:
            handing.finish()
        else:
            gradients = self.taken(self.trained_set, microbatch)
        # kind "means": backward did not run. The step starts over once the denominators are known.
        total = None if part.kind == "means" else part.total()
        given = handing.given if handing else ()
        weight = LATE if handing and handing.is_late else code_of(part)
        return ShardResult(gradients, total, weight, values=values, given=given)

    def taken(self, taken: ParameterSet, microbatch: Microbatch) -> Gradients:
        """Take some parameters' gradients out of ``.grad``, in the dtype of their sum."""
        task = microbatch.task
        gradients = take_gradients(taken, microbatch.where, task.left_out)
        for notes in task.notes:
            notes.add(microbatch.shard, taken.numbers, gradients)
        # Skip a whole batch: nothing is added to its gradients, and they keep a plain loop's bits.
        if self._narrow and (self._rounds or not task.is_plain):
            gradients = widened(gradients, taken.places_of(self._narrow))
        # Clone gradients that a hook may own: it may write to its tensor in the next shard while
        # the fold still adds to this one.
        for place in taken.places_of(self._may_be_kept):
            kept = gradients[place]
            gradients[place] = None if kept is None else kept.clone()
        return gradients

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the run's precision inside this context."""
        # Open a new context for each shard: autocast caches converted weights until it ends, and a
        # shard must not depend on values cached by another one.
        if self._compute_in is None:
            return _NOTHING
        return computing_in(self._compute_in, self.device, self.module)

    @property
    def nothing(self) -> Gradients:
        """Gradients of a shard without samples: None for every parameter."""
        return [None] * len(self._parameters)

    def on_device(self, microbatch: Microbatch) -> Any:
        batch = microbatch.task.batch
        payload = batch.shards[microbatch.shard]
        if microbatch.samples < microbatch.of:
            payload = rows_of(payload, microbatch[1:3], microbatch.of, dim=batch.dim)
        if self._kind == "cpu":
            return payload
        start = self.watch.now()
        payload = move(payload, self.device)
        self.watch.note("data", f"move shard {microbatch.shard}", start)
        return payload

    def loss_of(
        self, microbatch: Microbatch, payload: Any, gatherer: Gatherer | None
    ) -> tuple[Contribution, ShardValues | None]:
        """Run forward; return the loss's part of the batch's loss, and the logged values."""
        part, values, outputs = self.forward(microbatch, payload, gatherer)
        # Read values before backward: until they are read, they keep their part of the graph alive.
        if not values and not outputs:
            return part, None
        read = load("core.values").read_values
        return part, read(values, outputs, microbatch.samples, microbatch.where)

    def forward(
        self, microbatch: Microbatch, payload: Any, gatherer: Gatherer | None
    ) -> tuple[Contribution, Mapping[str, object], Mapping[str, object]]:
        """Run forward; return the loss's part of the batch's loss, metrics and outputs."""
        task, where = microbatch.task, microbatch.where
        PASS.whole = task.is_plain
        try:
            with self.autocast():
                result = task.loss(self.module, payload)
            # Check before our backward, which adds its gradients to those of an inner backward.
            self._refuse_leftovers(where)
            loss, values, outputs = split(result, f"the loss of {where}")
            if task.batch.others:
                refuse_uneven(task.batch, (loss, *values.values()), where)
            late = gatherer is None or isinstance(gatherer, Refusing)
            part = weigh(loss, microbatch.samples, f"the loss of {where}", late=late)
        finally:
            PASS.whole = False
        if not task.is_plain and not (gatherer and gatherer.sees_batch):
            self._inspect(loss, microbatch, run_checks=task.run_checks)
            if task.run_checks:
                self.loss_watch.look_at_count(loss, task.batch.count_of(microbatch.shard), where)
        if gatherer is not None and not isinstance(gatherer, Refusing):
            divisors = gatherer.end_forward([(k, known(w)) for k, w in part.kinds_and_weights()])
            task = task if divisors is None else replace(task, divisors=divisors)
        if part.kind == "means":
            part = task.of_one_divisor(part)
        return part, values, outputs

    def weigh_shards(self, task: ShardTask) -> Weighed:
        """Compute the kind and weight of each loss term, for each of this device's shards.

        Runs forward only. The weights yield the denominators that backward needs. The same shards
        run again afterwards, from the same buffers and seeds.
        """
        rows: dict[int, list[list[tuple[str, float | LateWeight]]]] = {}
        for shard in task.batch.shares.shards_of(self.number):
            if shard in task.batch.shards:
                read = Contribution.kinds_and_weights
                try:
                    rows[shard] = self.forward_alone(shard, task, read)
                except GatherRequest:
                    # The loss gathers. The shards run next and find the same. One term of kind
                    # "sum" requests no denominators.
                    rows[shard] = [[("sum", 1.0)]]
        # Read weights after all forward passes are queued: the first read blocks on the
        # accelerator.
        return {
            shard: _added_weights(each, f"step {task.step}, shard {shard}")
            for shard, each in rows.items()
        }

    def forward_alone(
        self,
        shard: int,
        task: ShardTask,
        read: Callable[[Contribution], Read],
        *,
        inspected: bool = False,
    ) -> list[Read]:
        """Run a shard's microbatches forward (only the first if ``inspected``); read the losses.

        The shard runs again afterwards, from the same buffers and seeds.
        """
        drop_gradients(self._parameters)
        where, samples = self.begin_shard(shard, task), task.batch.count_of(shard).samples
        microbatches, found = microbatch_bounds(samples, task.microbatch), []
        try:
            for start, stop in microbatches[:1] if inspected else microbatches:
                microbatch = Microbatch(shard, start, stop, samples, task, where)
                # Read now, to release this microbatch's graph before the next one starts.
                found.append(read(self.run_forward(microbatch, inspected)))
                drop_gradients(self._parameters)
        except Exception as error:
            load("shard.advice").explain(error, self, shard, task, where)
            raise
        finally:
            drop_gradients(self._parameters)
            self.put_back(task)
        return found

    def run_forward(self, microbatch: Microbatch, inspected: bool = False) -> Contribution:
        """Run one microbatch forward; return its loss with the graph."""
        payload, what = self.on_device(microbatch), f"the loss of {microbatch.where}"
        # Keep grad enabled: a loss with a gradient penalty needs a graph, and would fail here
        # instead of in the step itself.
        with gathering(microbatch.gatherer), self.autocast():
            result = microbatch.task.loss(self.module, payload)
        loss = split(result, what)[0]
        if inspected:
            self._inspect(loss, microbatch, run_checks=True)
        return weigh(loss, microbatch.samples, what, late=not inspected)

    def _inspect(self, loss: object, part: Microbatch, *, run_checks: bool) -> None:
        sizes = {"samples": part.samples, "batch_samples": part.task.batch.samples}
        self.loss_watch.inspect(loss, **sizes, run_checks=run_checks, where=part.where)

    def begin_shard(self, shard: int, task: ShardTask) -> str:
        """Reset the state that a shard depends on; return the shard's name for errors."""
        self.note_shard(shard)
        for notes in task.notes:
            notes.begin(shard)
        self.buffers.restore(shard)
        if torch.is_autocast_enabled(self._kind):
            # An autocast context around the script's loop caches weights of earlier steps.
            torch.clear_autocast_cache()
        # Untrained parameters: the optimizer ignores these gradients and `taken` leaves them, but a
        # hook or the loss may read them, and would see those of the device's previous shard.
        drop_gradients(self._watched)
        common = "step", (task.seed, task.step)
        seed = derive_seed("shard", task.seed, task.step, shard)
        seed_generators(seed, self.device, common=common)
        self.own_generators.seed(seed, "held by a loss")
        return f"step {task.step}, shard {shard}"

    def put_back(self, task: ShardTask) -> None:
        """Restore modes and frozen parameters if the batch has several shards."""
        if task.shards > 1:
            self.parts.modes.restore(task.modes)
            self.parts.restore_frozen(task.trainable)

    def _refuse_leftovers(self, where: str) -> None:
        """Refuse gradients of an inner backward, which would be added to the shard's gradient."""
        left = gradients_of(self._parameters)
        if left.count(None) < len(left):
            load("shard.advice").refuse_gradients(self.trained_set.names, left, where)


def _added_weights(
    rows: Sequence[Sequence[tuple[str, float | LateWeight]]], where: str
) -> list[tuple[str, float]]:
    """Add up the weights of each loss term over a shard's microbatches."""
    if any([kind for kind, _ in row] != [kind for kind, _ in rows[0]] for row in rows):
        raise LossError(
            f"the loss of {where} has different terms in different microbatches. Return the same "
            f"terms in each microbatch, with weight 0 for a term that has nothing to count"
        )
    return [(of[0][0], sum(known(weight) for _, weight in of)) for of in zip(*rows, strict=True)]

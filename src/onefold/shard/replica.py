"""The model on one device: computes one shard at a time and hands over its gradients.

Note: one module for all devices of a process
---------------------------------------------
The user's module exists once. Where one process drives several devices, each has memory of its own
for parameters and buffers, and the module's are pointed at it while that device's shards run. So
hooks, attributes, modes and a loss that closes over the model are the same for every device: there
is no copy that could fall out of date. Between calls the module points at the first device.

Note: `compute` as a pure function
----------------------------------
A shard's result may depend on parameters, samples, seed, step and shard, and on nothing that ran
before it on the same device: other shares would have run something else. So every shard starts from
the step's buffers, from its own seeds, without gradients, and in the modes and with the frozen
parameters that the step began with. Buffers, gradients and seeds are reset before a shard. Modes
and frozen parameters are reset after it, also when it fails, so that a script that catches the
error goes on with the model as it was; with one shard they are not, and what the loss does to them
lasts, as it would in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from onefold.core.batch import move
from onefold.core.flat import FlatTensors
from onefold.core.gatherer import Gatherer, GatherRequest, Refusing, gathering
from onefold.core.late import load
from onefold.core.mean import Contribution, LateWeight, known, seeing_whole_batch, weigh
from onefold.core.randomness import OwnGenerators, derive_seed, seed_generators
from onefold.core.results import GATHERS, LATE, Gradients, ShardResult, code_of, split
from onefold.core.settings import AS_GIVEN, Precision, added_up_in
from onefold.core.shard import microbatch_bounds, rows_of
from onefold.errors import GradientError, LossError
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
"""For each shard, the kind and weight of each term of its loss."""


class Replica:
    """The model on one device.

    Args:
        number: the device's number among all devices of the run.
        device: where it computes.
        parts: the user's module, shared by all replicas of the process.
        trained: this device's memory of the trained parameters.
        other: this device's memory of all other parameters.
        buffers: the module's buffers on this device.
        precision: what is computed in which dtype.
        stages: those of the model, if gradients are handed over stage by stage.
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
        """Those of the model, if gradients are handed over stage by stage."""
        self.watch = Stopwatch(device)
        self.loss_watch = LossWatch()
        self.own_generators = OwnGenerators()
        """Those that the loss and the model reach, which are seeded for each shard."""
        self.note_shard: Callable[[int], None] = lambda shard: None
        """Called with each shard that begins, and -1 after the last one of a step or batch."""
        self._names = list(parts.trained)
        self._parameters = list(parts.trained.values())
        layout = trained.layout
        strides = [entry.stride for entry in layout.entries]
        self._all = ParameterSet(self._parameters, strides, self._names)
        self.of_stages = [self._all.some(n) for n in stages.stages.entries] if stages else []
        dtypes = map(layout.dtype_of, range(len(layout.entries)))
        self._narrow = [n for n, dtype in enumerate(dtypes) if added_up_in(dtype) != dtype]
        self._compute_in = precision.compute
        self._rounds = precision.parameters is not None
        self._watched = [parameter for parameter in parts.other.values() if parameter.requires_grad]
        # A tensor without elements may report any address, so it has no place to compare.
        placed = (*parts.trained, *parts.other, *parts.frozen)
        self._placed_names = [name for name in placed if parts.named[name].numel()]
        self._placed = [parts.named[name] for name in self._placed_names]
        views = [*trained.views, *other.views, *parts.frozen.values()]
        # Where parameters come and go, `note_places` is called whenever they have.
        self._places = [view.data_ptr() for view in views if view.numel()]

    @property
    def module(self) -> torch.nn.Module:
        """The user's own, the same for all devices of this process."""
        return self.parts.module

    def attach(self) -> None:
        """Have the module compute in this device's memory; parameters keep their identity."""
        parts = self.parts
        for parameters, flat in ((parts.trained, self.trained), (parts.other, self.other)):
            views = flat.views if flat.is_there else ()
            for parameter, view in zip(parameters.values(), views, strict=flat.is_there):
                # Through .data, so that the optimizer, hooks and other modules that hold this very
                # Parameter follow. The memory stays ours: the parameter is only a window onto it.
                parameter.data = view
                # What is there was computed in the memory of the device before.
                parameter.grad = None
        self.buffers.attach()

    def note_places(self) -> None:
        """Take it that parameters lie where they ought to lie."""
        self._places = list(map(torch.Tensor.data_ptr, self._placed))

    def check_places(self) -> None:
        """Refuse parameters that have been moved to other memory, or replaced.

        Raises:
            ValueError: a parameter was replaced, or no longer lies in this device's memory.
        """
        self.parts.check_held()
        places = list(map(torch.Tensor.data_ptr, self._placed))
        if places != self._places:
            triples = zip(self._placed_names, places, self._places, strict=True)
            moved = next(name for name, now, before in triples if now != before)
            raise ValueError(
                f"parameter {moved} has been given other memory since Trainer was made, by "
                f"model.to(), .data = ... or a second Trainer. Change values in place, or make "
                f"Trainer afterwards"
            )

    def start_step(self, task: ShardTask) -> None:
        """Prepare for the first shard of a step."""
        drop_gradients(self._parameters)
        # Those with hooks that may put a tensor of their own into ``.grad``. They may be registered
        # between any two steps, so they are looked for anew.
        several = task.shards > 1 or task.microbatch is not None
        self._may_be_kept = hooked(self._parameters) if several else []

    def end(self) -> None:
        """Clean up after the last shard of a step."""
        self.note_shard(-1)
        # Those of trained parameters were taken shard by shard. These nobody takes: they would hold
        # memory between steps, and parameters unfrozen since Trainer was made would go on adding.
        drop_gradients([*self.parts.other.values(), *self.parts.frozen.values()])

    def compute(self, shard: int, task: ShardTask) -> ShardResult:
        """Run one shard forward and backward; called between `start_step` and `end`.

        See the note on pure functions at the head of this file.

        Raises:
            LossError: the loss function returned something that is not a loss.
            GradientError: a gradient is sparse, or the loss left one behind by a backward of its
                own.
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
            self.explain(error, shard, task, where)
            raise
        # Only now: backward may change buffers as well, as checkpointed layers run forward again.
        buffers = self.buffers.changed()
        self.put_back(task)
        assert result is not None  # a shard that runs has samples
        # By hand: `replace` looks at every field by its name, in every shard.
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
        """Run a microbatch of a shard, mostly all of it, forward and backward."""
        payload, task, gatherer = self.on_device(microbatch), microbatch.task, microbatch.gatherer
        handing: GradientHooks | None = None
        if task.send is not None and self.stages is not None:  # else shards keep their gradients
            handing = load("shard.stage_modules").GradientHooks(
                self.stages,
                microbatch,
                lambda stage: self.taken(self.of_stages[stage], microbatch),
                task.send,
            )
        start = self.watch.now()
        with (
            gathering(gatherer) if gatherer else _NOTHING,
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
            gradients = self.taken(self._all, microbatch)
        # Without divisors backward has not run: the step is begun again once they are known.
        total = None if part.kind == "means" else part.total()
        given = handing.given if handing else ()
        weight = LATE if handing and handing.is_late else code_of(part)
        return ShardResult(gradients, total, weight, values=values, given=given)

    def taken(self, taken: ParameterSet, microbatch: Microbatch) -> Gradients:
        """Take the gradients of some parameters, as they are added up, out of ``.grad``."""
        task = microbatch.task
        gradients = take_gradients(taken, microbatch.where, task.left_out)
        for notes in task.notes:
            notes.add(microbatch.shard, taken.numbers, gradients)
        # The whole batch: nothing is added to it, and its bits are a plain loop's.
        if self._narrow and (self._rounds or not task.is_plain):
            gradients = widened(gradients, taken.places_of(self._narrow))
        # A hook that put a tensor of its own into .grad may write to it in the next shard, while
        # the fold still adds to this one.
        for place in taken.places_of(self._may_be_kept):
            kept = gradients[place]
            gradients[place] = None if kept is None else kept.clone()
        return gradients

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the run's precision inside this context."""
        # For each shard anew: it keeps the weights that it has converted until it ends, and a
        # shard must not depend on what another one has left.
        if self._compute_in is None:
            return nullcontext()
        return computing_in(self._compute_in, self.device, self.module)

    @property
    def nothing(self) -> Gradients:
        """The gradients of a shard without samples: none for any parameter."""
        return [None] * len(self._parameters)

    def on_device(self, microbatch: Microbatch) -> Any:
        batch = microbatch.task.batch
        payload = batch.shards[microbatch.shard]
        if microbatch.samples < microbatch.of:
            payload = rows_of(payload, microbatch[1:3], microbatch.of, dim=batch.dim)
        if self.device.type == "cpu":
            return payload
        start = self.watch.now()
        payload = move(payload, self.device)
        self.watch.note("data", f"move shard {microbatch.shard}", start)
        return payload

    def loss_of(
        self, microbatch: Microbatch, payload: Any, gatherer: Gatherer | None
    ) -> tuple[Contribution, ShardValues | None]:
        """Run the forward pass; read what its result adds to the batch's loss, and the rest."""
        task, where = microbatch.task, microbatch.where
        with seeing_whole_batch(task.is_plain):
            with self.autocast():
                result = task.loss(self.module, payload)
            # Now or never: once our backward has run, the two gradients are one sum.
            self._refuse_leftovers(where)
            loss, values, outputs = split(result, f"the loss of {where}")
            refuse_uneven(task.batch, (loss, *values.values()), where)
            late = gatherer is None or isinstance(gatherer, Refusing)
            part = weigh(loss, microbatch.samples, f"the loss of {where}", late=late)
        if not task.is_plain and not (gatherer and gatherer.sees_batch):
            self._inspect(loss, microbatch, run_checks=task.run_checks)
            if task.run_checks:
                self.loss_watch.look_at_count(loss, task.batch.count_of(microbatch.shard), where)
        if gatherer is not None and not isinstance(gatherer, Refusing):
            divisors = gatherer.end_forward([(k, known(w)) for k, w in part.kinds_and_weights()])
            task = task if divisors is None else replace(task, divisors=divisors)
        if part.kind == "means":
            part = task.of_one_divisor(part)
        # Before backward, which would keep waiting what only they have of the graph.
        if not values and not outputs:
            return part, None
        read = load("core.values").read_values
        return part, read(values, outputs, microbatch.samples, where)

    def weigh_shards(self, task: ShardTask) -> Weighed:
        """Compute the kind and weight of each term of the loss, for each of this device's shards.

        Forward alone: what it returns decides the divisors with which backward can begin. The same
        shards run again afterwards, from the same buffers and seeds.
        """
        rows: dict[int, list[list[tuple[str, float | LateWeight]]]] = {}
        for shard in task.batch.shares.shards_of(self.number):
            if shard in task.batch.shards:
                read = Contribution.kinds_and_weights
                try:
                    rows[shard] = self._forward_alone(shard, task, read)
                except GatherRequest:
                    # The shards run next and find the same; of one term, no divisors are sought.
                    rows[shard] = [[("sum", 1.0)]]
        # An accelerator is waited for once, when all passes are queued.
        return {
            shard: _added_weights(each, f"step {task.step}, shard {shard}")
            for shard, each in rows.items()
        }

    def rehearse(self, shard: int, task: ShardTask) -> Contribution | None:
        """Run a shard, or its first microbatch, without compiled code; inspect what the loss
        returns.

        The shard runs again afterwards, from the same buffers and seeds. Returns None where the
        loss asks for other shards.
        """
        with torch.compiler.set_stance("force_eager"), suppress(GatherRequest):
            read = Contribution.without_graph
            return self._forward_alone(shard, task, read, inspected=True)[0]
        return None

    def _forward_alone(
        self,
        shard: int,
        task: ShardTask,
        read: Callable[[Contribution], Read],
        *,
        inspected: bool = False,
    ) -> list[Read]:
        """Run a shard's microbatches forward, or only the first to inspect it; read the losses."""
        drop_gradients(self._parameters)
        where, samples = self.begin_shard(shard, task), task.batch.count_of(shard).samples
        microbatches, found = microbatch_bounds(samples, task.microbatch), []
        try:
            for start, stop in microbatches[:1] if inspected else microbatches:
                microbatch = Microbatch(shard, start, stop, samples, task, where)
                # Read at once: the next microbatch must not begin while this one's graph is there.
                found.append(read(self.run_forward(microbatch, inspected)))
                drop_gradients(self._parameters)
        except Exception as error:
            self.explain(error, shard, task, where)
            raise
        finally:
            drop_gradients(self._parameters)
            self.put_back(task)
        return found

    def run_forward(self, microbatch: Microbatch, inspected: bool = False) -> Contribution:
        """Run a microbatch forward alone; return what its loss adds, with its graph."""
        payload, what = self.on_device(microbatch), f"the loss of {microbatch.where}"
        # Not under no_grad: a loss that differentiates something itself (a gradient penalty) needs
        # a graph, and would fail here and not in the step proper.
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
        """Reset a shard's surroundings, whatever ran before it; return its name for errors."""
        self.note_shard(shard)
        for notes in task.notes:
            notes.begin(shard)
        self.buffers.restore(shard)
        if torch.is_autocast_enabled(self.device.type):
            # One that the script has opened around its loop keeps the weights of earlier steps.
            torch.clear_autocast_cache()
        # No optimizer updates these and nobody takes their gradients, but a hook or the loss may
        # look at them, and would see those of whichever shard ran before on this device.
        drop_gradients(self._watched)
        common = "step", (task.seed, task.step)
        seed = derive_seed("shard", task.seed, task.step, shard)
        seed_generators(seed, self.device, common=common)
        self.own_generators.seed(seed, "held by a loss")
        return f"step {task.step}, shard {shard}"

    def put_back(self, task: ShardTask) -> None:
        """Restore modes, and which parameters are frozen, where another shard may follow."""
        if task.shards > 1:
            self.parts.modes.restore(task.modes)
            self.parts.restore_frozen(task.trainable)

    def explain(self, error: Exception, shard: int, task: ShardTask, where: str) -> None:
        """Note where an error was raised; raise its cause instead, if a buffer was resized."""
        error.add_note(f"raised in {where}, on device {self.number} ({self.device})")
        samples = task.batch.count_of(shard).samples
        parts = {"loss": task.loss, "module": self.module, "payload": task.batch.shards[shard]}
        advise = load("shard.advice").advice_on
        advice = advise(error, samples=samples, shards=task.shards, **parts)
        if advice:
            error.add_note(advice)
        self.buffers.check_shapes()

    def _refuse_leftovers(self, where: str) -> None:
        """Refuse what an inner backward left: it would be added to the shard's gradient."""
        left = gradients_of(self._parameters)
        if left.count(None) == len(left):
            return
        # zero_grad(set_to_none=False) leaves zeros, which add nothing. To tell zeros from others
        # waits for a GPU, but only where the loss has gone backward itself.
        for name, gradient in zip(self._names, left, strict=True):
            if gradient is not None and bool(gradient.count_nonzero()):
                raise GradientError(
                    f"{where}: the loss function has left a gradient in {name}.grad, by a backward "
                    f"of its own; added to the shard's gradient, it would count another number of "
                    f"times for every number of shards. Call model.zero_grad() before returning, "
                    f"or use torch.autograd.grad"
                )


def _added_weights(
    rows: Sequence[Sequence[tuple[str, float | LateWeight]]], where: str
) -> list[tuple[str, float]]:
    """Add up the weight of each term of a shard's loss over the shard's microbatches."""
    if any([kind for kind, _ in row] != [kind for kind, _ in rows[0]] for row in rows):
        raise LossError(
            f"the loss of {where} has other terms in some microbatches than in others: expected "
            f"the same terms in each, with the weight 0 if there is nothing to count"
        )
    return [(of[0][0], sum(known(weight) for _, weight in of)) for of in zip(*rows, strict=True)]

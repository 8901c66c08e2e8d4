"""Captures the launches of a shard once, and replays them for later shards of the same sizes.

On an accelerator the host launches hundreds of kernels per shard, and V shards need V times as
many. A captured graph launches all kernels of forward, or of backward, in one call. The kernels and
their order are those of the eager shard, and so are the bits.

Note: what a graph fixes
------------------------
A graph has fixed addresses, sizes and Python numbers. Addresses are those of the run's flat memory;
a shard's samples are copied into the graph's own input. Sizes are part of the key of a graph. So is
everything known that Python code may read: modes, frozen parameters, the loss scale, the number of
samples in the batch, and all numbers and strings that the loss and the model hold. If these change
in each step, the key never repeats, nothing is captured, and the bits stay right.

A replay runs no Python code, so other changes stay unseen (an element of a large list, a file that
the loss reads). A graph is therefore compared bit for bit with an eager shard before its first use,
in every step that runs costly checks, and in every 50th step. In these steps the eager results
count. After a difference this device uses no graphs.

Note: who owns which memory
---------------------------
All graphs of a device share one memory pool. A capture may reuse memory that an earlier capture
freed, so a graph keeps every tensor that is read after its replay: the loss, its weight, metrics
and gradients. These are copied out before the next replay overwrites them. The activations are
freed when backward has been captured. That is safe because the two graphs of a shard are replayed
one directly after the other.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from onefold.core.flat import is_dense, same_bits
from onefold.core.mean import PASS, Contribution, LateWeight, detached
from onefold.core.randomness import GeneratorStates, comparable_state
from onefold.core.results import Gradients, ShardResult, code_of
from onefold.core.structure import parts_of, tensors_of, with_tensors
from onefold.core.values import read_values
from onefold.data_order.kept_state import WIDEST, reachable, referents_of
from onefold.shard.replica import Replica
from onefold.shard.task import Microbatch, ShardTask
from onefold.system.accelerator import generator_of
from onefold.system.capture import Graph, captured
from onefold.system.compat import copy_each
from onefold.system.internals import hooked

__all__ = ["COMPARED_EVERY", "ShardGraphs", "capture_shards"]

_log = logging.getLogger("onefold")

_EAGER = 2
"""Number of eager shards of a size before a capture: libraries fill their caches in these."""
_MOST = 16
"""Maximum number of captured sizes."""
COMPARED_EVERY = 50
"""Every how many steps graphs are compared with eager shards."""
_TOLD = 4
"""Number of steps with changed numbers before the change is reported."""
_NUMBERS = (int, float, complex, bool, str, bytes, type(None))


@dataclass
class _Captured:
    """The graphs of shards of one size, and all tensors that outlive a replay."""

    inputs: list[torch.Tensor]
    forward: Graph
    backward: Graph
    part: Contribution
    total: torch.Tensor
    """() float64: the shard's part of the loss."""
    values: tuple[Mapping[str, object], Mapping[str, object]]
    """Metrics and outputs that the loss returned."""
    gradients: Gradients
    captured: int
    """Step of the capture."""
    compared: int = 0
    """Step of the last comparison with an eager shard."""


def capture_shards(replicas: Iterable[Replica], *, gathers: bool) -> None:
    """Let accelerators capture and replay shards.

    Args:
        replicas: the model on each device of the process.
        gathers: whether parameters are gathered during forward and backward, in other memory each
            time.
    """
    for replica in replicas:
        if replica.device.type != "cpu":
            replica.replay = ShardGraphs(replica, gathers=gathers).run


class ShardGraphs:
    """The graphs of one device.

    Args:
        replica: the model on the device.
        gathers: see `capture_shards`.
    """

    def __init__(self, replica: Replica, *, gathers: bool) -> None:
        self.replica, self._gathers = replica, gathers
        self.graphs: dict[tuple[Any, ...], _Captured | None] = {}
        """Graphs by state and sizes; None for sizes that cannot be captured."""
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._pool: tuple[int, int] | None = None
        self._stream: torch.Stream | None = None
        self._said: set[str] = set()
        self._task: ShardTask | None = None
        self._state: tuple[Any, ...] = ()
        self._numbers: dict[int, tuple[object, ...]] = {}
        """Numbers that the loss and the model held in the last step of each loss."""
        self._is_steady = self._is_stopped = False
        self._why_eager = ""
        self._changes = 0
        self._holders: list[object] = []
        self.captures = self.replays = 0

    def run(self, microbatch: Microbatch, payload: Any) -> ShardResult | None:
        """Replay a microbatch, usually a whole shard; None if it must run eagerly.

        Args:
            microbatch: the shard has begun: buffers and generators are reset.
            payload: its samples, on the device.
        """
        if self._is_stopped:
            return None
        task = microbatch.task
        if task is not self._task:
            self._begin(task)
        if self._why_eager:
            self._say(self._why_eager)
            return None
        if task.send is not None:
            self._say("its gradients are sent while backward still runs", what="the last shard")
            return None
        sizes = self._sizes_of(payload)
        if sizes is None:
            return None
        key = (self._state, microbatch.samples, microbatch.of, sizes)
        is_due = task.run_checks or task.step % COMPARED_EVERY == 0
        if key not in self.graphs:
            if not is_due and not microbatch.start and self._is_steady:
                self._learn(key, microbatch, payload)
            return None
        found = self.graphs[key]
        if found is None or task.step == found.captured:
            # The step of a capture ends eagerly, so that a number that changes in each step is
            # noticed before the first replay.
            return None
        if found.compared != task.step and (is_due or not found.compared):
            return None if microbatch.start else self._compare(found, microbatch, payload)
        return None if is_due else self.replay(found, microbatch, payload)

    def _begin(self, task: ShardTask) -> None:
        """Note what holds for all shards of a step."""
        replica = self.replica
        self._task, self._why_eager = task, self._reason(task)
        if task.run_checks or not self._holders:
            owners = reachable((task.loss, replica.module))
            self._holders = [each for each in owners if _numbers_of(each)]
        self._state = self.state_of(task)
        # Steps may take turns: compare with the last step of the same loss.
        before, numbers = self._numbers.get(id(task.loss)), self._state[-1]
        self._numbers[id(task.loss)] = numbers
        self._is_steady = numbers == before
        if before is not None and not self._is_steady and len(before) == len(numbers):
            self._note_change(*next((a, b) for a, b in zip(before, numbers, strict=True) if a != b))

    def _reason(self, task: ShardTask) -> str:
        """Return why no shard of a step can be captured; empty if shards can."""
        if self._gathers:
            return "this placement gathers parameters during forward and backward"
        if task.gatherers is not None:
            return "the loss gathers values from other shards"
        if task.divisors is not None:
            return "the loss has several denominators"
        if hooked(self.replica.parts.trained.values()):
            return "a parameter has a hook, which runs Python code in backward"
        return ""

    def state_of(self, task: ShardTask) -> tuple[Any, ...]:
        """Return all known state, apart from sizes, that a graph of this step would fix."""
        replica = self.replica
        return (
            *(id(task.loss), task.scale, task.shards, task.is_plain, task.batch.samples),
            tuple(map(torch.Tensor.data_ptr, replica.parts.named.values())),
            tuple(replica.parts.trainable()),
            replica.parts.modes.read(),
            torch.is_autocast_enabled(replica.device.type),
            torch.get_float32_matmul_precision(),
            tuple(number for each in self._holders for number in _numbers_of(each)),
        )

    def _note_change(self, before: object, now: object) -> None:
        self._changes += 1
        if self._changes == _TOLD and not self.replays:
            self._say(
                f"a value that the loss or the model holds changes between steps (from {before!r} "
                f"to {now!r}), and a graph would keep the old one. Pass it in the batch, as a "
                f"tensor in onefold.Broadcast"
            )

    def _sizes_of(self, payload: Any) -> tuple[Any, ...] | None:
        """Return what a graph depends on in a payload; None if it cannot be captured."""
        found: list[Any] = []
        for part in _leaves(payload):
            if isinstance(part, torch.Tensor):
                if part.device != self.replica.device or not is_dense(part.shape, part.stride()):
                    self._say(
                        f"the batch has a tensor on {part.device}, or one with gaps in its memory"
                    )
                    return None
                about = part.shape, part.stride(), part.dtype, part.requires_grad, type(part)
                found.append(about)
            elif type(part) in _NUMBERS or isinstance(part, type):
                found.append(part)
            else:
                self._say(f"the batch has a {type(part).__name__}, whose values may change")
                return None
        return tuple(found)

    def _learn(self, key: tuple[Any, ...], microbatch: Microbatch, payload: Any) -> None:
        """Count a shard of a new size, and capture it when the eager ones have run."""
        self._seen[key] += 1
        if self._seen[key] <= _EAGER:
            return
        if len(self.graphs) >= _MOST:
            # Graphs of another state (an earlier loss scale, other modes) may never be used again.
            now = {k: graph for k, graph in self.graphs.items() if k[0] == self._state}
            self.graphs = now
            if len(now) >= _MOST:
                self._say(f"there are graphs of {_MOST} sizes", what="shards of further sizes")
                return
        del self._seen[key]
        self.graphs[key] = self._capture(microbatch, payload)

    def _capture(self, microbatch: Microbatch, payload: Any) -> _Captured | None:
        """Capture a shard without computing it; None if that is impossible."""
        replica, task, device = self.replica, microbatch.task, self.replica.device
        self._stream = self._stream or torch.Stream(device)
        static = with_tensors(payload, _same_place)
        drawn = generator_of(device).get_state()
        hosts, own = GeneratorStates(), replica.own_generators.states()
        own_before = comparable_state(own)
        numbers = [*map(_numbers_of, self._holders)]
        # Collect now: freeing a tensor or a graph during a capture would invalidate it.
        gc.collect()
        why = ""
        try:
            with _capturing():
                with captured(device, self._stream, self._pool) as forward:
                    part, *values = replica.forward(microbatch, static, microbatch.gatherer)
                    total = None if part.kind == "means" else part.total()
                self._pool = forward.pool()
                with captured(device, self._stream, self._pool) as backward:
                    task.backward(part, ())
                    replica.buffers.absorb()
        except Exception as error:  # whatever cannot be captured runs eagerly
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            if total is None:
                why = "the loss has several denominators"
            drawn_from = hosts.drawn_from()
            if drawn_from:
                why = f"the loss or the model draws from {drawn_from}, which a replay would not"
        gradients = [parameter.grad for parameter in replica.parts.trained.values()]
        if own_before != comparable_state(replica.own_generators.states()):
            why = why or "the loss or the model draws from a generator of the script on the host"
        if numbers != [*map(_numbers_of, self._holders)]:
            why = why or "the loss or the model counts its calls, and a replay would not"
        hosts.restore()
        replica.own_generators.put_back(own)
        generator_of(device).set_state(drawn)
        # Reset everything that the capture touched, so that the shard can run eagerly.
        replica.begin_shard(microbatch.shard, task)
        for parameter in replica.parts.trained.values():
            parameter.grad = None
        if why:
            self._say(why)
            return None
        self.captures += 1
        assert total is not None
        detached = part.without_graph()
        return _Captured(
            [*tensors_of(static)],
            forward,
            backward,
            detached,
            total,
            (_detached(values[0]), _detached(values[1])),
            gradients,
            task.step,
        )

    def replay(self, graph: _Captured, microbatch: Microbatch, payload: Any) -> ShardResult:
        replica, watch, part = self.replica, self.replica.watch, graph.part
        start = watch.now()
        copy_each(graph.inputs, [*tensors_of(payload)])
        graph.forward.replay()
        if isinstance(part.weight, LateWeight):
            # Start the copy to the host before backward, which then runs meanwhile.
            part = part._replace(weight=part.weight.again())
        values = read_values(*graph.values, microbatch.samples, microbatch.where)
        middle = watch.now()
        graph.backward.replay()
        watch.note("forward", f"forward shard {microbatch.shard}", start, middle)
        watch.note("backward", f"backward shard {microbatch.shard}", middle)
        self.replays += 1
        given = [gradient for gradient in graph.gradients if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in given]
        copy_each(copies, given)
        coming = iter(copies)
        for parameter, gradient in zip(
            replica.parts.trained.values(), graph.gradients, strict=True
        ):
            parameter.grad = None if gradient is None else next(coming)
        gradients = replica.taken(replica.trained_set, microbatch)
        return ShardResult(gradients, graph.total.clone(), code_of(part), values=values)

    def _compare(self, graph: _Captured, microbatch: Microbatch, payload: Any) -> ShardResult:
        """Run a microbatch both ways, and return the eager result."""
        replica, step = self.replica, microbatch.task.step
        replayed = self.replay(graph, microbatch, payload)
        replica.buffers.absorb()
        buffers = [view.clone() for view in replica.buffers.flat.views]
        drawn = generator_of(replica.device).get_state()
        replica.begin_shard(microbatch.shard, microbatch.task)
        eager = replica.run_eagerly(microbatch, payload)
        replica.buffers.absorb()
        rows = [
            ("the loss", replayed.total, eager.total),
            ("the metrics", _metrics(replayed), _metrics(eager)),
            *zip(
                [f"the gradient of {name}" for name in replica.parts.trained],
                *(replayed.gradients, eager.gradients),
                strict=True,
            ),
            *zip(
                [f"buffer {name}" for name in replica.buffers.places.names],
                *(buffers, replica.buffers.flat.views),
                strict=True,
            ),
            ("the random generator", drawn, generator_of(replica.device).get_state()),
        ]
        different = next((name for name, *pair in rows if not _equal(*pair)), None)
        if different is None:
            graph.compared = step
            return eager
        first, used = graph.compared + 1, ""
        if 1 < first < step:
            used = f"Steps {first} to {step - 1} may have used the old value. "
        _log.warning(
            "graphs=True: %s differs between the captured and the eager shard (%s, on device %d). "
            "The loss or the model reads a value that changed after its capture, and that onefold "
            "does not see. %sTraining continues without graphs. Pass the value in the batch (as a "
            "tensor, in onefold.Broadcast)%s",
            *(different, microbatch.where, replica.number, used),
            f", and load a checkpoint of step {first - 1} or earlier" if used else "",
        )
        self._is_stopped = True
        self.graphs.clear()
        return eager

    def _say(self, why: str, what: str = "shards") -> None:
        """Report once why shards run eagerly."""
        if why not in self._said:
            self._said.add(why)
            _log.warning(
                "graphs=True: device %d runs %s eagerly: %s", self.replica.number, what, why
            )


@contextmanager
def _capturing() -> Iterator[None]:
    """Tell losses that their values are not computed yet."""
    try:
        PASS.captured = True
        yield
    finally:
        PASS.captured = False


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the types of containers and all other parts of a payload, in order."""
    parts = None if isinstance(value, torch.Tensor) else parts_of(value)
    if parts is None:
        yield value
        return
    yield type(value)
    for path, part in parts:
        yield path
        yield from _leaves(part)


def _same_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return torch.empty_like(tensor).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _numbers_of(holder: object) -> tuple[object, ...]:
    return tuple(part for part in islice(referents_of(holder), WIDEST) if type(part) in _NUMBERS)


def _detached(values: Mapping[str, object]) -> dict[str, object]:
    """Drop the graph of metrics or outputs, which would keep the captured one alive."""
    return {
        name: with_tensors(detached(value), torch.Tensor.detach) for name, value in values.items()
    }


def _metrics(result: ShardResult) -> torch.Tensor | None:
    return None if result.values is None else result.values.numbers


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)

"""What devices trade in a step: one algorithm over any memory and any transport.

`join` chooses memory and transport for the devices of a run, and compares before it shares.
`LocalMemory` is the memory of a process that drives all devices.

Note: the order of a step, and who may touch what
-------------------------------------------------
1. ``agree`` returns when every device has begun the same call, with what each of them reports (see
   `onefold.core.call_digest`). Until then nobody computes with the parameters, so whoever changed
   them between two calls has finished.
2. Every device *publishes* its partial sums and fills its own rows of the `ShardTable`.
3. ``collect`` returns when all have published. From then on the whole table may be read, and the
   totals of this process's own partitions are ready.
4. The owner updates its partitions of the parameters, and nobody else touches them.
5. ``publish_parameters`` returns when every device has every partition. From then on partial sums
   and table may be written again. Where the script updates, ``all_gather_gradient`` takes the place
   of 4 and 5.

With `Storage.mirrors` each device has the totals of all segments and updates all parameters in 4,
and nothing is traded in 5.

Every device of the run makes the same calls in the same order. ``agree``, ``collect`` and
``publish_parameters`` may block, for the transport's limit at the most; they raise `PeerError` when
another device is lost, has failed, or does not arrive.

Note: compare first
-------------------
Whatever follows takes for granted that all processes have the same sizes: shared memory is cut and
messages are matched by them. So the descriptions are compared before the first of either, by means
that depend on no size.

Note: why nothing waits in a process that drives all devices
-------------------------------------------------------------
One thread issues all work. Kernels and copies of a device run in the order of its stream, and
PyTorch makes a copy between two GPUs wait for both streams, and both for the copy. So the order of
the calls is the order of reads and writes, though the host never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from onefold.core.assignment import Assignment, Devices
from onefold.core.flat import FlatTensors
from onefold.core.fold import Published
from onefold.core.late import load
from onefold.core.shard import Shares
from onefold.core.storage import Storage
from onefold.exchange.memory import LocalGradients, Memory, Partial, Start
from onefold.exchange.reduction import (
    BlockReduction,
    LocalStageExchange,
    Reduction,
    StageExchange,
    StageReduction,
)
from onefold.exchange.transport import LocalTransport, Transport
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator

__all__ = ["Exchange", "exchange_over", "has_memory_in_common", "join"]


class Exchange:
    """Trades partial sums and parameters between this process's devices and all others of the run.

    Args:
        memory: the memory of this process's devices.
        transport: reaches the other processes.
        reduction: adds up gradients: whole partial sums that are published, or stage by stage.
    """

    def __init__(self, memory: Memory, transport: Transport, reduction: Reduction) -> None:
        self.memory, self.transport, self.reduction = memory, transport, reduction
        self.table = memory.table
        """Own rows may be written before `collect`; all rows may be read after it."""

    def agree(self, step: int, message: bytes) -> Sequence[bytes]:
        """Wait until every process has begun the same call.

        Args:
            step: the step that the run is at, for error messages.
            message: what this process reports about its call; of one length everywhere.

        Returns:
            The messages of all processes, in device order.
        """
        self.transport.begin_step(step)
        return self.transport.all_gather_bytes(message)

    def collect(self, shares: Shares) -> None:
        """Wait until every device has published, and add up this process's partitions.

        Raises:
            LossError: a weight that an accelerator has computed is negative or not finite.
        """
        self.table.await_weights()
        self.reduction.collect(shares)

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        """The gradient of each segment that an own device updates, until ``publish_parameters``.

        A segment has None where no shard gave a gradient.
        """
        return self.reduction.totals(device)

    def publish_parameters(self) -> None:
        """Wait until the updated partitions are in every device's parameters."""
        if not self.memory.storage.mirrors:
            self.memory.publish_parameters()
        self._release()

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        """Bring all gradients to every process, in place of update and `publish_parameters`.

        Args:
            whole: has the layout of gradients, and holds those that this process has added up;
                complete afterwards, and nobody's but the caller's.
        """
        if not self.memory.storage.mirrors:
            self.memory.all_gather_gradient(whole)
        self._release()

    def _release(self) -> None:
        # The totals are views of the partial sums: both go, now that every update is done.
        self.reduction.release()
        self.memory.release()

    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, telling the others why if this process failed. May be called again."""
        self.transport.close(failure)


def join(
    storage: Storage,
    start: Start,
    assignment: Assignment,
    devices: Devices,
    *,
    description: bytes,
    compare: Callable[[Sequence[bytes]], None],
    timeout_s: float,
    allocator: TensorAllocator = DEFAULT_ALLOCATOR,
) -> Exchange:
    """Join the run with this process's devices.

    Args:
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        assignment: who takes part.
        devices: which devices this process drives.
        description: what must be the same in every process, in bytes that can be compared.
        compare: raises if the descriptions of all processes differ.
        timeout_s: the longest wait for another device.
        allocator: where the model of this process lies, if its devices are the processor or keep
            nothing.

    Raises:
        DisagreementError: another device has another description, or is of another kind.
        PeerError: another device did not join, or failed while it did.
        ValueError: the exchange that was asked for cannot serve these devices.
    """
    if len(devices.own) == len(devices.all):
        alone = LocalTransport(assignment.devices[0], allocator)
        return exchange_over(alone, storage, start, assignment)
    others, in_common = load("exchange.others"), has_memory_in_common(devices)
    transport = others.join_others(assignment, devices, timeout_s, allocator, in_common=in_common)
    try:
        compare(transport.all_gather_objects({devices.own[0]: description}))
        return exchange_over(transport, storage, start, assignment)
    # Also for KeyboardInterrupt: the others must not wait for the limit.
    except BaseException as error:
        transport.close(error)
        raise


def has_memory_in_common(devices: Devices) -> bool:
    """Whether all devices of a run use the same memory."""
    if len(devices.own) == len(devices.all):
        return True
    can_share = devices.all[devices.own[0]].type == "cpu" and devices.context.one_host
    return can_share and devices.context.options.exchange != "collective"


def exchange_over(
    transport: Transport, storage: Storage, start: Start, assignment: Assignment
) -> Exchange:
    """Make the exchange that goes with a transport; all processes must call this together.

    Args:
        transport: to the other processes; closed with the exchange. Its allocator has this
            process's model, if its devices are the processor or keep nothing.
        storage: the sizes.
        start: this process's values, replaced by the lead's.
        assignment: who takes part.
    """
    has_stages = storage.stages is not None
    if isinstance(transport, LocalTransport):
        allocator = transport.allocator
        memory: Memory = LocalMemory(storage, start, assignment, allocator)
        stages: StageExchange | None = None
        if has_stages:
            stages = LocalStageExchange(storage, assignment, copies=allocator.on_disk)
    else:
        others = load("exchange.others")
        memory, stages = others.memory_with_others(transport, storage, start, assignment)
    reduction = BlockReduction(memory) if stages is None else StageReduction(stages, memory)
    return Exchange(memory, transport, reduction)


class LocalMemory(Memory):
    """All devices driven by one process, each with flat memory of its own.

    A single device uses gradients where backward left them.

    Args:
        storage: the sizes.
        start: the values of the lead's model.
        assignment: names all D devices.
        allocator: where the model lies, if the devices are the processor, or keep nothing.
    """

    def __init__(
        self, storage: Storage, start: Start, assignment: Assignment, allocator: TensorAllocator
    ) -> None:
        super().__init__(storage, assignment, allocator)
        self._devices = assignment.devices
        self.is_partitioned = allocator.apart and len(self._devices) == 1
        self._make_private(start, dict(enumerate(self._devices)))
        self._own: dict[Published, Partial | LocalGradients] = {}

    def broadcast_from_lead(self, buffers: FlatTensors) -> None:
        # Copies of the first device's model follow it at the next step. But what it keeps of frozen
        # parameters is not what it computes with.
        if self.frozen is not None:
            self.frozen.keep()

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self.partial(Published(device, slot)).write(gradients)

    def collect(self, shares: Shares, *, partials: bool = True) -> None:
        pass  # all is here

    def partial(self, place: Published) -> Partial | LocalGradients:
        """The memory of a partial sum, allocated when shares first need this slot."""
        if place not in self._own:
            layout, device = self.storage.gradients, self._devices[place.device]
            is_alone = len(self._devices) == 1
            self._own[place] = (
                LocalGradients(layout) if is_alone else Partial.private(layout, device)
            )
        return self._own[place]

    def home(self, device: int) -> FlatTensors | None:
        # The total may stay in anyone's partial sum where all devices are the processor, or parts
        # of one GPU; among several GPUs the owner needs it in memory of its own.
        if len(set(self._devices)) == 1:
            return None
        own = self.partial(Published(device, 0))
        return own.flat if isinstance(own, Partial) else None

    def publish_parameters(self) -> None:
        # Non-blocking: the next kernels of both devices come after the copy in their streams.
        for owner, chunks in enumerate(self._updated):
            source = self.trained[owner]
            for receiver, parameters in self.trained.items():
                for chunk in chunks if receiver != owner else ():
                    parameters.chunk(chunk).copy_(source.chunk(chunk), non_blocking=True)

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        pass  # one process has all partitions, so it is complete already

"""Exchanges the data of a step between devices: one algorithm over any memory and any transport.

`join` chooses memory and transport for the devices of a run. `LocalMemory` is the memory of a
process that drives all devices.

Note: the order of a step, and who may touch what
-------------------------------------------------
1. ``agree`` returns when every device has started the same call, with the reports of all devices
   (see `onefold.core.call_digest`). No device reads the parameters before that, so all changes that
   devices made to them between two calls are complete by then.
2. Every device *publishes* its partial sums and fills its own rows of the `ShardTable`.
3. ``collect`` (a reduce-scatter) returns when all devices have published. From then on the whole
   table may be read, and the totals of this process's own partitions are ready.
4. The owner updates its partitions of the parameters; no other device touches them.
5. ``publish_parameters`` (an all-gather) returns when every device has every partition. From then
   on partial sums and table may be overwritten. If the script makes the update,
   ``all_gather_gradient`` replaces 4 and 5.

With `Storage.mirrors` each device has the totals of all segments, updates all parameters in 4, and
sends nothing in 5.

Every device of the run makes the same calls in the same order. ``agree``, ``collect`` and
``publish_parameters`` may block, at most for the timeout of the transport. They raise `PeerError`
if another device is lost, fails, or does not arrive.

Note: why nothing waits in a process that drives all devices
-------------------------------------------------------------
One thread issues all work. Kernels and copies of a device run in the order of its stream, and
PyTorch orders a copy between two GPUs in both streams. So the order of calls is the order of reads
and writes, although the host never waits.
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
    """Exchanges partial sums and parameters between this process's devices and all others.

    Args:
        memory: the memory of this process's devices.
        transport: connects this process to the others.
        reduction: sums gradients: whole partial sums that are published, or stage by stage.
    """

    def __init__(self, memory: Memory, transport: Transport, reduction: Reduction) -> None:
        self.memory, self.transport, self.reduction = memory, transport, reduction
        self.table = memory.table
        """This process's rows may be written before `collect`; all rows may be read after it."""

    def agree(self, step: int, message: bytes) -> Sequence[bytes]:
        """Wait until every process has started the same call.

        Args:
            step: the step of the run, for error messages.
            message: this process's report about its call; of the same length in every process.

        Returns:
            The messages of all processes, in device order.
        """
        self.transport.begin_step(step)
        return self.transport.all_gather_bytes(message)

    def collect(self, shares: Shares) -> None:
        """Wait until every device has published, and sum this process's partitions.

        Raises:
            LossError: an accelerator computed a weight that is negative or not finite.
        """
        # Read the weights that a GPU computes here, and only once, because reading blocks on the
        # GPU.
        self.table.await_weights()
        self.reduction.collect(shares)

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        """Gradient of each segment that a device of this process updates.

        Valid until ``publish_parameters``. None for a segment without a gradient from any shard.
        """
        return self.reduction.totals(device)

    def publish_parameters(self) -> None:
        """Wait until the updated partitions are in every device's parameters."""
        # Every mirror makes the same update of all parameters, so there is nothing to send.
        if not self.memory.storage.mirrors:
            self.memory.publish_parameters()
        self._release()

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        """Gather all gradients in every process, instead of an update and `publish_parameters`.

        Args:
            whole: memory with the layout of gradients, which holds this process's sums and is
                complete afterwards. It belongs to the caller.
        """
        if not self.memory.storage.mirrors:
            self.memory.all_gather_gradient(whole)
        self._release()

    def _release(self) -> None:
        # The totals are views of the partial sums. Release both, after every update is finished.
        self.reduction.release()
        self.memory.release()

    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, and report a failure of this process. May be called again."""
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
        start: this process's values; the lead's replace them.
        assignment: which device runs which shards and owns which parameters.
        devices: the devices that this process drives.
        description: what must be the same in every process, as bytes to compare.
        compare: raises if the descriptions differ between processes.
        timeout_s: the longest wait for another device.
        allocator: allocates the model of this process if its devices are the CPU or keep no
            parameters.

    Raises:
        DisagreementError: another device has another description, or is of another type.
        PeerError: another device did not join, or failed while joining.
        ValueError: the requested exchange does not support these devices.
    """
    if len(devices.own) == len(devices.all):
        alone = LocalTransport(assignment.devices[0], allocator)
        return exchange_over(alone, storage, start, assignment)
    others, in_common = load("exchange.others"), has_memory_in_common(devices)
    transport = others.join_others(assignment, devices, timeout_s, allocator, in_common=in_common)
    try:
        # Compare before anything else is sent: cutting shared memory and matching messages require
        # equal sizes on all devices; comparing does not.
        compare(transport.all_gather_objects({devices.own[0]: description}))
        return exchange_over(transport, storage, start, assignment)
    # Close on KeyboardInterrupt too: the other processes must not wait for the whole timeout.
    except BaseException as error:
        transport.close(error)
        raise


def has_memory_in_common(devices: Devices) -> bool:
    """Whether all devices of a run can use the same memory."""
    if len(devices.own) == len(devices.all):
        return True
    can_share = devices.all[devices.own[0]].type == "cpu" and devices.context.one_host
    return can_share and devices.context.options.exchange != "collective"


def exchange_over(
    transport: Transport, storage: Storage, start: Start, assignment: Assignment
) -> Exchange:
    """Make the exchange for a transport. All processes must call this together.

    Args:
        transport: connects this process to the others; closed with the exchange. Its allocator
            allocates this process's model if its devices are the CPU or keep no parameters.
        storage: the sizes.
        start: this process's values; the lead's replace them.
        assignment: which device runs which shards and owns which parameters.
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
    """Memory of a process that drives all devices, each with its own flat memory.

    A single device uses gradients where backward left them.

    Args:
        storage: the sizes.
        start: the values of the lead's model.
        assignment: names all D devices.
        allocator: allocates the model if the devices are the CPU or keep no parameters.
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
        # The other devices of this process get the first one's values at the next step. Frozen
        # parameters are kept in separate memory, so store them now.
        if self.frozen is not None:
            self.frozen.keep()

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self.partial(Published(device, slot)).write(gradients)

    def collect(self, shares: Shares, *, partials: bool = True) -> None:
        # All partial sums are in this process already.
        pass

    def partial(self, place: Published) -> Partial | LocalGradients:
        """The memory of a partial sum, allocated when shares first need this slot."""
        if place not in self._own:
            layout, device = self.storage.gradients, self._devices[place.device]
            is_alone = len(self._devices) == 1
            # Nothing is added to a single partial sum, so backward's tensors can stay in place.
            self._own[place] = (
                LocalGradients(layout) if is_alone else Partial.private(layout, device)
            )
        return self._own[place]

    def home(self, device: int) -> FlatTensors | None:
        # If all devices are the CPU, or the same GPU, the total may stay in any partial sum. With
        # several GPUs the owner needs the total in its own memory.
        if len(set(self._devices)) == 1:
            return None
        own = self.partial(Published(device, 0))
        return own.flat if isinstance(own, Partial) else None

    def publish_parameters(self) -> None:
        # The copies do not block: the next kernels of both devices are queued behind them.
        for owner, chunks in enumerate(self._updated):
            source = self.trained[owner]
            for receiver, parameters in self.trained.items():
                for chunk in chunks if receiver != owner else ():
                    parameters.chunk(chunk).copy_(source.chunk(chunk), non_blocking=True)

    def all_gather_gradient(self, whole: FlatTensors) -> None:
        # This process has all partitions, so the gradient is complete already.
        pass

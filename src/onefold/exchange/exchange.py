"""What devices trade in a step: one algorithm over any memory and any transport.

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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.core.flat import FlatTensors
from onefold.core.shard import Shares
from onefold.exchange.memory import Memory
from onefold.exchange.reduction import Reduction
from onefold.exchange.transport import Transport

__all__ = ["Exchange"]


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

    def start_step(self, shares: Shares) -> None:
        """Note the shares of a step, before the first `publish`."""
        self.memory.start_step(shares)

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand over the partial sum of one of ``device``'s blocks; never blocks.

        Args:
            device: a device of this process.
            slot: number of the block among those of the device, from the left.
            gradients: one tensor for each trained parameter, shaped like it, or None. They belong
                to the exchange until ``publish_parameters`` returns: it may add to them in place.
        """
        self.memory.publish(device, slot, gradients)

    def publish_stage(
        self, slot: int, stage: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Hand over a stage of a partial sum of this process's device; see `Memory.publish_stage`.

        It may raise what `collect` raises.
        """
        self.memory.publish_stage(slot, stage, gradients)

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

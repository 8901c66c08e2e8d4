"""What devices trade in a step: one algorithm over any memory and any transport.

Note: the order of a step, and who may touch what
-------------------------------------------------
1. ``agree`` returns when every device has begun the same call, with what each of them reports (see
   `onefold.core.head`). Until then nobody computes with the parameters, so whoever changed them
   between two calls has finished.
2. Every device *publishes* its partial sums and fills its own rows of the `Board`.
3. ``collect`` returns when all have published. From then on the whole board may be read, and the
   totals of this process's own spans are ready.
4. The owner updates its spans of the parameters, and nobody else touches them.
5. ``spread`` returns when every device has every span. From then on partial sums and board may be
   written again. Where the script updates, ``share_gradient`` takes the place of 4 and 5.

Every device of the run makes the same calls in the same order. ``agree``, ``collect`` and
``spread`` may block, for the transport's limit at the most; they raise `PeerError` when another
device is lost, has failed, or does not arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.core.flat import FlatTensors
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.storage import Storage
from onefold.exchange.carrier import Carrier
from onefold.exchange.memory import Memory
from onefold.exchange.relay import Relay
from onefold.exchange.spans import SpanFold
from onefold.exchange.stagefold import StageFold
from onefold.exchange.transport import Transport

__all__ = ["Exchange"]


class Exchange:
    """Trades partial sums and parameters between this process's devices and all others of the run.

    Args:
        storage: the sizes.
        memory: the memory of this process's devices.
        transport: reaches the other processes.
        roster: who takes part.
        carrier: brings gradients stage by stage; None where whole partial sums are published.
        relay: between the devices of a line; None if each computes whole shards.
    """

    def __init__(
        self,
        storage: Storage,
        memory: Memory,
        transport: Transport,
        roster: Roster,
        carrier: Carrier | None = None,
        relay: Relay | None = None,
    ) -> None:
        self.memory = memory
        self.transport = transport
        self.board = memory.board
        """Own rows may be written before `collect`; all rows may be read after it."""
        self.stages = (
            None if carrier is None else StageFold(carrier, list(memory.trained), memory.heap)
        )
        """Takes gradients stage by stage, in place of `publish`; None if they are published."""
        self.relay = relay
        """Between the devices of a line; None if each computes whole shards."""
        self._storage = storage
        self._folds: dict[int, SpanFold] = {}
        self.bind(roster)

    def bind(self, roster: Roster) -> None:
        """Adopt a roster, which says who owns which span. Called between steps, on all devices."""
        storage = self._storage
        if self.stages is not None:
            self.stages.bind(roster)
        else:
            self._folds = {
                device: SpanFold(
                    storage.gradients, storage.pieces_of(roster.spans[device]), storage.shards
                )
                for device in self.memory.trained
            }
        self.memory.bind(roster)

    def agree(self, step: int, word: bytes) -> Sequence[bytes]:
        """Wait until every process has begun the same call.

        Args:
            step: the step that the run is at, for error messages.
            word: what this process reports about its call; of one length everywhere.

        Returns:
            The words of all processes, in device order.
        """
        self.transport.begin_step(step)
        return self.transport.meet(word)

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand over the partial sum of one of ``device``'s blocks; never blocks.

        Args:
            device: a device of this process.
            slot: number of the block among those of the device, from the left.
            gradients: one tensor for each trained parameter, shaped like it, or None. They belong
                to the exchange until ``spread`` returns: it may add to them in place.
        """
        self.memory.publish(device, slot, gradients)

    def collect(self, plan: Plan) -> None:
        """Wait until every device has published, and add up the totals of this process's spans."""
        memory = self.memory
        if self.stages is not None:
            memory.collect_board(plan)
            return
        # Before any addition: it is in place, so everybody must have finished writing.
        arrivals = memory.collect(plan)
        arrived = None if arrivals is None else arrivals.wait_for
        for device, span_fold in self._folds.items():
            span_fold.fold(plan, memory.partial, home=memory.home(device), arrived=arrived)
        # Only now: our partial sums may still be on their way out while our spans are added up, as
        # no other device is sent these stretches.
        if arrivals is not None:
            arrivals.finish()

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        """The summed gradient of each piece of an own device's span, valid until ``spread``.

        A piece has None where no shard gave a gradient.
        """
        if self.stages is not None:
            return self.stages.totals(device)
        return self._folds[device].totals

    def spread(self) -> None:
        """Wait until the updated spans are in every device's parameters."""
        self.memory.hand_on()
        self._release()

    def share_gradient(self, whole: FlatTensors) -> None:
        """Bring the gradient of every span to every process, in place of update and `spread`.

        Args:
            whole: has the layout of gradients, and holds those of this process's spans; complete
                afterwards, and nobody's but the caller's.
        """
        self.memory.share_gradient(whole)
        self._release()

    def _release(self) -> None:
        # The totals are views of the partial sums: both go, now that every update is done.
        for span_fold in self._folds.values():
            span_fold.release()
        if self.stages is not None:
            self.stages.release()
        self.memory.release()

    def close(self, failure: BaseException | None = None) -> None:
        """Leave the run, telling the others why if this process failed. May be called again."""
        self.transport.close(failure)

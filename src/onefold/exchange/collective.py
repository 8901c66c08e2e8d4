"""Exchange over torch.distributed: for GPUs of several processes, and for several hosts.

Partial sums go from every device straight to the owner of each span, point to point, and the
updated spans straight back to everybody: nothing is added in an order that a library chooses, and
every device hears from every other one, so the one that is gone can be named.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from onefold.errors import PeerError, PeerFailed, PeerLost
from onefold.exchange.base import Board, Exchange, Ranged, SpanFold, Start, Storage
from onefold.exchange.group import break_off, who_left
from onefold.flat import FlatTensors, SpanTensors
from onefold.fold import Published, blocks_of
from onefold.shard import Plan

__all__ = ["CollectiveExchange"]

_log = logging.getLogger("onefold")
_FAILURE_KEY = "onefold/failure"
_LAST_WORDS_S = 1.0


class CollectiveExchange(Exchange):
    """One process of several, which all make it at the same time.

    Args:
        storage: the sizes.
        start: this process's values; those of the lead become everybody's.
        device: what this process drives.
        group: a process group whose ranks are the devices' numbers, with a backend for the host and
            for ``device``.
        store: of the group; carries word of failures.
    """

    def __init__(
        self,
        storage: Storage,
        start: Start,
        device: torch.device,
        group: dist.ProcessGroup,
        store: Store,
    ) -> None:
        self._storage = storage
        self._device = device
        self._group = group
        self._store = store
        self._rank = group.rank()
        self._step = 1
        self._spans = [[storage.pieces[i] for i in span] for span in storage.spans]
        self._fold = SpanFold(self._spans[self._rank], storage.shards)
        self._own: dict[int, FlatTensors] = {}
        self._received: dict[Published, SpanTensors] = {}
        self.board = Board.private(storage.board, device)
        self._incoming = Board.private(storage.board, device)
        self.trained = {self._rank: FlatTensors(storage.trained, device=device)}
        self.other = {self._rank: FlatTensors(storage.other, device=device)}
        self.trained[self._rank].write(start.trained)
        self.other[self._rank].write(start.other)
        with self._naming_the_lost():
            for flat in (self.trained[self._rank], self.other[self._rank], start.buffers):
                for section in flat.sections:
                    dist.broadcast(section, group=group, group_src=0)

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._slot(slot).write(gradients)

    def _slot(self, slot: int) -> FlatTensors:
        if slot not in self._own:
            self._own[slot] = FlatTensors(self._storage.trained, device=self._device)
        return self._own[slot]

    def collect(self, plan: Plan) -> None:
        self._step = int(self.board.heads[self._rank, 0])
        with self._naming_the_lost():
            moving = self._send_partials(plan)
            self._gather_board(plan)
            for work in moving:
                work.wait()
            self._gather_buffers(plan)
        self._fold.fold(plan, self._partial, self._slot(0))

    def _partial(self, place: Published) -> Ranged:
        if place.device == self._rank:
            return self._slot(place.slot)
        if place not in self._received:
            span = self._spans[self._rank]
            self._received[place] = SpanTensors(self._storage.trained, span, self._device)
        return self._received[place]

    def _send_partials(self, plan: Plan) -> list[dist.Work]:
        slots = [len(blocks_of(plan.shards_of(d), plan.shards)) for d in range(plan.devices)]
        operations = []
        for peer in self._peers():
            for slot in range(slots[self._rank]):
                for part in self._slot(slot).ranges(self._spans[peer]):
                    operations.append(self._operation(dist.isend, part, peer))
            for slot in range(slots[peer]):
                for part in self._partial(Published(peer, slot)).ranges(self._spans[self._rank]):
                    operations.append(self._operation(dist.irecv, part, peer))
        return _start(operations)

    def _gather_board(self, plan: Plan) -> None:
        """Bring the others' rows in, but for the buffers'."""
        known = self._gather(self.board.known)
        totals = self._gather(self.board.totals)
        for peer in self._peers():
            shards = plan.shards_of(peer)
            rows = slice(shards.start, shards.stop)
            self._incoming.known.copy_(known[peer])
            self.board.copy_known(self._incoming, peer, shards)
            self.board.totals[rows].copy_(totals[peer][rows])

    def _gather_buffers(self, plan: Plan) -> None:
        """Bring the others' buffers in, if a shard changed any."""
        if not self.board.changed.any():
            return
        rows = self.board.rows_memory
        most = max(plan.counts)
        own = plan.shards_of(self._rank)
        padded = torch.zeros(most, rows.shape[1], dtype=torch.uint8, device=rows.device)
        padded[: len(own)] = rows[own.start : own.stop]
        for peer, part in enumerate(self._gather(padded)):
            theirs = plan.shards_of(peer)
            rows[theirs.start : theirs.stop] = part[: len(theirs)]

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        return self._fold.totals

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        (row,) = rows.values()
        with self._naming_the_lost():
            return torch.stack(self._gather(row))

    def spread(self) -> None:
        flat = self.trained[self._rank]
        operations = []
        for peer in self._peers():
            for part in flat.ranges(self._spans[self._rank]):
                operations.append(self._operation(dist.isend, part, peer))
            for part in flat.ranges(self._spans[peer]):
                operations.append(self._operation(dist.irecv, part, peer))
        with self._naming_the_lost():
            for work in _start(operations):
                work.wait()
        self._step += 1

    def close(self, failure: BaseException | None = None) -> None:
        if failure is None:
            return
        break_off()
        if isinstance(failure, PeerError):
            return
        told = {"device": self._rank, "step": self._step, "kind": type(failure).__name__}
        text = json.dumps({**told, "text": str(failure)[:4000]})
        try:
            self._store.compare_set(_FAILURE_KEY, "", text)
        except RuntimeError as error:  # the store is gone, and with it everybody to tell
            _log.warning(
                "device %d could not tell the others of its failure: %s", self._rank, error
            )

    def _peers(self) -> list[int]:
        """The other devices, each beginning with its neighbour, so that no one is swamped."""
        size = self._storage.devices
        return [(self._rank + distance) % size for distance in range(1, size)]

    def _operation(self, kind: object, part: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, part, group=self._group, group_peer=peer)  # type: ignore[arg-type]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._storage.devices)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Turn an error of the backend into one that says which device is gone, where known."""
        try:
            yield
        except RuntimeError as error:
            raise self._explain(error) from error

    def _explain(self, error: RuntimeError) -> PeerError:
        step = self._step
        told = self._failure_told()
        if told is not None:
            return PeerFailed(
                f"device {told['device']} failed in step {told['step']}: "
                f"{told['kind']}: {told['text']}",
                device=told["device"],
                step=told["step"],
            )
        gone = self._gone()
        if gone:
            return PeerLost(
                f"device {gone[0]} ended: its script came to an end before the others'; device "
                f"{self._rank} waits for it in step {step}",
                device=gone[0],
                step=step,
            )
        return PeerLost(
            f"device {self._rank} lost the connection to another device in step {step}: "
            f"{str(error).splitlines()[0]}",
            step=step,
        )

    def _gone(self) -> list[int]:
        try:
            return who_left(self._store, self._storage.devices)
        except RuntimeError:  # the store went with the device that is lost
            return []

    def _failure_told(self) -> dict[str, Any] | None:
        try:
            self._store.wait([_FAILURE_KEY], timedelta(seconds=_LAST_WORDS_S))
            return json.loads(self._store.get(_FAILURE_KEY))  # type: ignore[no-any-return]
        except RuntimeError:  # nobody said anything, or the store went with the one that is lost
            return None


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []

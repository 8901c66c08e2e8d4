"""Exchange over torch.distributed: for GPUs of several processes, and for several hosts.

Partial sums go from every device straight to the owner of each span, point to point, and the
updated spans straight back to everybody: nothing is added in an order that a library chooses, and
every device hears from every other one, so the one that is gone can be named.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onefold.core.flat import Chunk, FlatTensors, cut_chunks
from onefold.core.fold import Published, blocks_of
from onefold.core.shard import Plan
from onefold.errors import OnefoldError, PeerError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange.base import LEFT, Board, Exchange, Start, Storage, roomy
from onefold.exchange.group import Joined, break_off, who_left
from onefold.exchange.spans import Partial, SpanFold, Spanned, SpanTensors

__all__ = ["CollectiveExchange"]

_log = logging.getLogger("onefold")
_FAILURE_KEY = "onefold/failure"
_LAST_WORDS_S = 1.0
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "peer")


class CollectiveExchange(Exchange):
    """One process of several, which all make it at the same time.

    Args:
        storage: the sizes.
        start: this process's values; those of the lead become everybody's.
        device: what this process drives.
        joined: a process group whose ranks are the devices' numbers, with a backend for the host
            and for ``device``.
        timeout_s: the limit of the group, for errors.
    """

    def __init__(
        self,
        storage: Storage,
        start: Start,
        device: torch.device,
        joined: Joined,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._storage = storage
        self._device = device
        self._joined: dist.ProcessGroup | None = joined.group
        self._store = joined.store
        self._connections = joined.connections
        self._watch = joined.watch
        self._lateness = joined.lateness
        self._rank = joined.group.rank()
        self._step = 1
        self._spans = [[storage.pieces[i] for i in span] for span in storage.spans]
        self._fold = SpanFold(storage.trained, self._spans[self._rank], storage.shards)
        self._chunks = [cut_chunks(storage.trained, span) for span in self._spans]
        self._own: dict[int, Partial] = {}
        self._received: dict[Published, SpanTensors] = {}
        self.board = Board.private(storage.board, device)
        self.trained = {self._rank: FlatTensors(storage.trained, device=device)}
        self.other = {self._rank: FlatTensors(storage.other, device=device)}
        self.trained[self._rank].write(start.trained)
        self.other[self._rank].write(start.other)
        self._room: torch.Tensor | None = None
        self.follow_lead(start.buffers)

    def follow_lead(self, buffers: FlatTensors) -> None:
        with self._naming_the_lost():
            for flat in (self.trained[self._rank], self.other[self._rank], buffers):
                for section in flat.sections:
                    # As bytes: backends know fewer types than tensors have.
                    dist.broadcast(section.view(torch.uint8), group=self._group, group_src=0)

    def agree(self, step: int, word: bytes) -> Sequence[bytes]:
        self._step = step
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        with self._naming_the_lost():
            return [bytes(said.numpy()) for said in self._gather(own)]

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._slot(slot).write(gradients)

    def _slot(self, slot: int) -> Partial:
        if slot not in self._own:
            self._own[slot] = Partial.private(self._storage.trained, self._device)
        return self._own[slot]

    def collect(self, plan: Plan) -> None:
        own = self.board.row(self._rank, plan.shards_of(self._rank))
        rows = {peer: self.board.empty_row(peer, plan.shards_of(peer)) for peer in self._peers()}
        partials = self._partials_to_move(plan)
        with self._naming_the_lost():
            talk = self._start([op for peer, row in rows.items() for op in _swap(peer, own, row)])
            moving = self._start(partials)
            talk.wait()
        for peer, row in rows.items():
            self.board.take_row(peer, plan.shards_of(peer), row)

        def arrived(chunk: int) -> None:
            with self._naming_the_lost():
                moving.wait_for(chunk)

        self._fold.fold(plan, self._partial, arrived=arrived)
        with self._naming_the_lost():
            moving.wait()
            self._gather_buffers(plan)

    def _partial(self, place: Published) -> Spanned:
        if place.device == self._rank:
            return self._slot(place.slot)
        if place not in self._received:
            span = self._spans[self._rank]
            self._received[place] = SpanTensors(self._storage.trained, span, self._device)
        return self._received[place]

    def _partials_to_move(self, plan: Plan) -> list[_Operation]:
        """The others' spans of our partial sums leave, our span of theirs comes."""
        own = plan.shards_of(self._rank)
        operations = []
        for peer in self._peers():
            theirs = plan.shards_of(peer)
            if not self.board.on_host:
                leaving = self.board.totals[own.start : own.stop]
                coming = self.board.totals[theirs.start : theirs.stop]
                operations += _swap(peer, leaving, coming)
            for slot in range(len(blocks_of(own, plan.shards))):
                operations += _sends(peer, self._slot(slot), self._chunks[peer])
            for slot in range(len(blocks_of(theirs, plan.shards))):
                partial = self._partial(Published(peer, slot))
                operations += _receipts(peer, partial, self._chunks[self._rank])
        return operations

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
            operations += _sends(peer, flat, self._chunks[self._rank])
            operations += _receipts(peer, flat, self._chunks[peer])
        with self._naming_the_lost():
            self._start(operations).wait()
        self._fold.release()
        for partial in self._own.values():
            partial.release()

    def room(self, nbytes: int) -> torch.Tensor:
        self._room = roomy(self._room, nbytes, self._device)
        return self._room

    def bring(self) -> list[torch.Tensor]:
        if self._room is None:
            raise ValueError("there is nothing to bring: fill a room first")
        if self._rank != 0:
            self._send_sized(self._room, 0)
            return []
        others = range(1, self._storage.devices)
        return [self._room, *(self._receive_sized(peer) for peer in others)]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return self._receive_sized(0)
        for peer in range(1, self._storage.devices):
            self._send_sized(make(peer), peer)
        return make(0)

    def _send_sized(self, tensor: torch.Tensor, peer: int) -> None:
        with self._naming_the_lost():
            dist.send(torch.tensor([tensor.numel()]), group=self._group, group_dst=peer)
            if tensor.numel():
                dist.send(tensor, group=self._group, group_dst=peer)

    def _receive_sized(self, peer: int) -> torch.Tensor:
        size = torch.empty(1, dtype=torch.int64)
        with self._naming_the_lost():
            dist.recv(size, group=self._group, group_src=peer)
            tensor = torch.empty(int(size), dtype=torch.uint8)
            if tensor.numel():
                dist.recv(tensor, group=self._group, group_src=peer)
        return tensor

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._joined is None:
            raise OnefoldError(LEFT)
        return self._joined

    def close(self, failure: BaseException | None = None) -> None:
        self._joined = None  # its threads end with the last who holds it, while Python still runs
        self._watch.close()
        if failure is None:
            return
        break_off()
        if not isinstance(failure, PeerError):
            self._tell(failure)
        self._connections.cut()  # or who waits for us would wait up to the limit

    def _tell(self, failure: BaseException) -> None:
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

    def _start(self, operations: Sequence[_Operation]) -> _Moving:
        """Begin to receive and to send: the first chunks of all first.

        Of equal chunks the receipts come first: gloo lets the two directions of a connection go one
        after the other where both ends start with what they send.
        """
        ordered = sorted(
            (op for op in operations if op.part.numel()),
            key=lambda op: (-1 if op.chunk is None else op.chunk, op.kind is dist.isend),
        )
        started = [
            dist.P2POp(op.kind, op.part.view(torch.uint8), group=self._group, group_peer=op.peer)
            for op in ordered
        ]
        works = dist.batch_isend_irecv(started) if started else []
        return _Moving(ordered, works)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._storage.devices)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Turn an error of the backend into one that says which device is gone, where known."""
        try:
            with self._lateness.waiting():
                yield
        except RuntimeError as error:
            if not _is_of_connection(error):
                error.add_note(f"raised in step {self._step}, on device {self._rank}")
                raise
            raise self._explain(error) from error

    def _explain(self, error: RuntimeError) -> PeerError:
        step = self._step
        if self._watch.stopped is not None:  # before the store is asked, which it may hold
            rank = self._watch.stopped
            pid = self._watch.pids[rank]
            return PeerLost.stopped(rank, pid, waiting=self._rank, step=step)
        timed_out = "timed out" in str(error).lower()
        self._say_that_it_waits(timed_out)
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
        late = self._late()
        if timed_out or late:
            who = f"device {', '.join(map(str, late))}" if late else "another device"
            return PeerTimeout.in_step(
                who,
                device=late[0] if late else -1,
                timeout_s=self._timeout_s,
                waiting=self._rank,
                step=step,
            )
        return PeerLost(
            f"device {self._rank} lost the connection to another device in step {step}: "
            f"{str(error).splitlines()[0]}",
            step=step,
        )

    def _say_that_it_waits(self, in_vain: bool) -> None:
        """Say so in the store, for others that ask who does; and ask, if it was in vain."""
        try:
            if in_vain:
                self._lateness.ask()
            self._lateness.answer()
        except RuntimeError as gone:  # the store went with the device that is lost
            _log.info("the other devices cannot be asked: %s", gone)

    def _late(self) -> list[int]:
        """Devices for whom all wait in vain, where one has found so, this one or another.

        A backend that gives up closes its connections, so that whoever waits for this device hears
        of a lost connection, though nothing is wrong with it.
        """
        try:
            return self._lateness.late() if self._lateness.is_asked() else []
        except RuntimeError:  # as above
            return []

    def _gone(self) -> list[int]:
        try:
            return who_left()
        except RuntimeError:  # the store went with the device that is lost
            return []

    def _failure_told(self) -> dict[str, Any] | None:
        try:
            self._store.wait([_FAILURE_KEY], timedelta(seconds=_LAST_WORDS_S))
            return json.loads(self._store.get(_FAILURE_KEY))  # type: ignore[no-any-return]
        except RuntimeError:  # nobody said anything, or the store went with the one that is lost
            return None


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether a backend has lost a peer or waited in vain; PyTorch has no type of error for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)


class _Operation(NamedTuple):
    """One tensor on its way to a peer or from it."""

    kind: Callable[..., Any]
    peer: int
    part: torch.Tensor
    chunk: int | None
    """Which chunk of a span it is, if it is one."""


def _swap(peer: int, leaving: torch.Tensor, coming: torch.Tensor) -> list[_Operation]:
    return [_Operation(dist.isend, peer, leaving, None), _Operation(dist.irecv, peer, coming, None)]


def _sends(peer: int, memory: Spanned, chunks: Sequence[Chunk]) -> list[_Operation]:
    return [_Operation(dist.isend, peer, memory.chunk(c), n) for n, c in enumerate(chunks)]


def _receipts(peer: int, memory: Spanned, chunks: Sequence[Chunk]) -> list[_Operation]:
    return [_Operation(dist.irecv, peer, memory.chunk(c), n) for n, c in enumerate(chunks)]


class _Moving:
    """Tensors that are on their way.

    Args:
        operations: what was started, in this order.
        works: one for each of them, or a single one for all (NCCL).
    """

    def __init__(self, operations: Sequence[_Operation], works: Sequence[dist.Work]) -> None:
        self._left: list[dist.Work] = []
        self._coming: dict[int, list[dist.Work]] = {}
        self._as_one = len(works) != len(operations)
        if self._as_one:
            self._left = list(works)
            return
        for operation, work in zip(operations, works, strict=True):
            if operation.kind is dist.irecv and operation.chunk is not None:
                self._coming.setdefault(operation.chunk, []).append(work)
            else:
                self._left.append(work)

    def wait_for(self, chunk: int) -> None:
        """Until the chunk of this number has come from all peers."""
        if self._as_one:
            self.wait()
        _wait_once(self._coming.pop(chunk, []))

    def wait(self) -> None:
        """Until all has come and gone."""
        for chunk in list(self._coming):
            self.wait_for(chunk)
        _wait_once(self._left)


def _wait_once(works: list[dist.Work]) -> None:
    """Wait for each and forget it: gloo would wait forever for a message that was taken before."""
    while works:
        works.pop(0).wait()

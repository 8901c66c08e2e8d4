"""Reaches processes through torch.distributed: those of other hosts, and those that drive GPUs.

Tensors go from every device straight to the one that needs them, point to point: no library chooses
an order of addition, and every device hears from every other one, so the one that is gone can be
named.

Note: how sends and receipts are matched
----------------------------------------
Nothing names a message: between two devices the n-th send meets the n-th receipt. So both ends list
what they trade in the same order (see `PrivateMemory._partials_to_move`), and the sort in `move` is
stable and goes by chunk, which both ends number alike.

Note: every wait says its limit
-------------------------------
gloo waits for a message as long as was said when the group was made, which is the limit of that
attempt to connect, and not of the run; what is said later holds for collective calls alone. So a
wait for a tensor of the host names the limit. On a GPU a wait only has the stream wait.

Note: the order of a failure
----------------------------
A device that fails first writes why into the store, then cuts its connections. Whoever is woken by
the cut then finds the reason there. A failure that another device caused is not written: the first
cause must stay.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onefold.errors import PeerError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange.group import Joined, break_off
from onefold.exchange.transport import Transport, has_left, roomy
from onefold.system.heap import ORDINARY, Heap
from onefold.system.words import words_of_failure

__all__ = ["GroupTransport", "Moving", "Operation"]

_log = logging.getLogger("onefold")
_FAILURE_KEY = "onefold/failure"
_LAST_WORDS_S = 1.0
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "peer")


class GroupTransport(Transport):
    """One process of a group, which drives one device.

    Args:
        device: the device that this process drives.
        joined: a process group whose ranks are the devices' numbers, with a backend for the host
            and for ``device``.
        timeout_s: the limit of the group, for error messages.
    """

    frame_bytes = 16 << 20

    def __init__(
        self, device: torch.device, joined: Joined, timeout_s: float, heap: Heap = ORDINARY
    ) -> None:
        self.rank = joined.group.rank()
        self.size = joined.group.size()
        self.device = device
        self._timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._joined: dist.ProcessGroup | None = joined.group
        self._failure = ""
        self._store = joined.store
        self._connections = joined.connections
        self._watch = joined.watch
        self._lateness = joined.lateness
        self._who_left = joined.left
        self._heap = heap
        self._room: torch.Tensor | None = None
        self._leaving: list[tuple[torch.Tensor, dist.Work]] = []

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        # torch.frombuffer refuses an empty buffer, so an empty word travels as one byte.
        own = torch.frombuffer(bytearray(word or b"\0"), dtype=torch.uint8)
        return [bytes(part.numpy())[: len(word)] for part in self.gather(own)]

    def meet_among(self, devices: Sequence[int], word: bytes) -> Sequence[bytes]:
        """As `meet`, of some devices alone, which are named in ascending order."""
        if len(devices) == self.size:
            return self.meet(word)
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        words = {peer: torch.empty_like(own) for peer in devices if peer != self.rank}
        operations = [Operation(True, peer, own) for peer in words]
        operations += [Operation(False, peer, room) for peer, room in words.items()]
        self.move(operations).finish()
        words[self.rank] = own
        return [words[peer].numpy().tobytes() for peer in devices]

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        (row,) = rows.values()
        return torch.stack(self.gather(row))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather one tensor from every process, all of one shape and dtype, in device order."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._naming_the_lost():
            dist.all_gather(parts, tensor, group=self._group)
        return parts

    def follow_lead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors of every process with the lead's."""
        with self._naming_the_lost():
            for tensor in tensors:
                # As bytes: backends know fewer dtypes than PyTorch, and must not round any.
                dist.broadcast(tensor.view(torch.uint8), group=self._group, group_src=0)

    def peers(self) -> list[int]:
        """The other devices, from the next one on, so that not all send to device 0 first."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def move(self, operations: Sequence[Operation]) -> Moving:
        """Begin to receive and to send: everybody's first chunks first.

        What belongs to no chunk goes ahead of all chunks. Within a chunk the receipts come first:
        gloo runs the two directions of a connection one after the other if both ends begin by
        sending.
        """
        # The sort must be stable: parts of one chunk are matched by their place in the list.
        ordered = sorted(
            (op for op in operations if op.part.numel()),
            key=lambda op: (-1 if op.chunk is None else op.chunk, op.sends),
        )
        with self._naming_the_lost():
            started = [
                dist.P2POp(
                    dist.isend if op.sends else dist.irecv,
                    op.part.view(torch.uint8),
                    group=self._group,
                    group_peer=op.peer,
                )
                for op in ordered
            ]
            works = dist.batch_isend_irecv(started) if started else []
        return Moving(ordered, works, self._limit, self._naming_the_lost)

    def begin_sending(self, peer: int, tensor: torch.Tensor) -> None:
        """Begin to send a tensor of the host, which must stay as it is until `finish_sending`."""
        if not tensor.numel():
            return
        with self._naming_the_lost():
            # What has left by now need not be kept any longer.
            self._leaving = [(t, work) for t, work in self._leaving if not work.is_completed()]
            work = dist.isend(tensor.view(torch.uint8), group=self._group, group_dst=peer)
        assert work is not None  # this process is one of the group
        self._leaving.append((tensor, work))

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Fill a tensor of the host with what a device has begun to send."""
        if tensor.numel():
            with self._naming_the_lost():
                self._receive(tensor.view(torch.uint8), peer)

    def finish_sending(self) -> None:
        """Wait until everything has left that `begin_sending` was given."""
        with self._naming_the_lost():
            for _, work in self._leaving:
                work.wait(self._limit)
        self._leaving = []

    def room(self, nbytes: int) -> torch.Tensor:
        self._room = roomy(self._room, nbytes, self.device, self._heap)
        return self._room

    def bring(self) -> list[torch.Tensor]:
        if self._room is None:
            raise ValueError("there is nothing to bring: fill a room first")
        if self.rank != 0:
            self._send_sized(self._room, 0)
            return []
        others = range(1, self.size)
        return [self._room, *(self._receive_sized(peer) for peer in others)]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return self._receive_sized(0)
        for peer in range(1, self.size):
            self._send_sized(make(peer), peer)
        return make(0)

    def _send_sized(self, tensor: torch.Tensor, peer: int) -> None:
        # The length first: a receiver must know the size of what it receives.
        with self._naming_the_lost():
            self._send(torch.tensor([tensor.numel()]), peer)
            if tensor.numel():
                self._send(tensor, peer)

    def _receive_sized(self, peer: int) -> torch.Tensor:
        size = torch.empty(1, dtype=torch.int64)
        with self._naming_the_lost():
            self._receive(size, peer)
            tensor = torch.empty(int(size), dtype=torch.uint8)
            if tensor.numel():
                self._receive(tensor, peer)
        return tensor

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor of the host, and wait until it has left."""
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None  # this process is one of the group
        work.wait(self._limit)

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Fill a tensor of the host."""
        work = dist.irecv(tensor, group=self._group, group_src=peer)
        assert work is not None
        work.wait(self._limit)

    @property
    def _group(self) -> dist.ProcessGroup:
        # Asked for at every call, so that none keeps the group alive after `close`.
        if self._joined is None:
            raise has_left(self._failure)
        return self._joined

    def close(self, failure: BaseException | None = None) -> None:
        # The group's threads end with its last reference; let that be while Python still runs.
        self._joined = None
        self._watch.close()
        if failure is None:
            return
        self._failure = self._failure or words_of_failure(failure, self.step)
        break_off()
        # Write why before the cut that makes the others look for it; see the note at the head.
        if not isinstance(failure, PeerError):
            self._tell(failure)
        self._connections.cut()  # or whoever waits for us would wait up to the limit

    def _tell(self, failure: BaseException) -> None:
        words = words_of_failure(failure, self.step)
        text = json.dumps({"device": self.rank, "step": self.step, "words": words})
        # Only if nobody has written yet: the first failure is the one to report.
        try:
            self._store.compare_set(_FAILURE_KEY, "", text)
        except RuntimeError as error:  # the store is gone, and with it everybody to tell
            _log.warning("device %d could not tell the others of its failure: %s", self.rank, error)

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Turn an error of the backend into one that names the lost device, where it is known."""
        try:
            with self._lateness.waiting():
                yield
        except RuntimeError as error:
            # An error of this device's own, such as a lack of memory, is not the peers' doing.
            if not _is_of_connection(error):
                error.add_note(f"raised in step {self.step}, on device {self.rank}")
                raise
            raise self._explain(error) from error

    def _explain(self, error: RuntimeError) -> PeerError:
        step = self.step
        # Ask the store only after this: a stopped peer may be the one that serves it.
        if self._watch.stopped is not None:
            rank = self._watch.stopped
            pid = self._watch.pids[rank]
            return PeerLost.stopped(rank, pid, waiting=self.rank, step=step)
        timed_out = "timed out" in str(error).lower()
        # Before the wait for a reason, which gives the others time to say that they wait, too.
        self._say_that_it_waits(timed_out)
        word = self._failure_told()
        if word is not None:
            return PeerFailed(
                f"device {word['device']} {word['words']}",
                device=word["device"],
                step=word["step"],
            )
        # No reason was given: either a script has ended in order, or nobody could write one.
        gone = self._gone()
        if gone:
            return PeerLost(
                f"device {gone[0]} ended: its script came to an end before the others'; device "
                f"{self.rank} waits for it in step {step}",
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
                waiting=self.rank,
                step=step,
            )
        return PeerLost(
            f"device {self.rank} lost the connection to another device in step {step}: "
            f"{str(error).splitlines()[0]}",
            step=step,
        )

    def _say_that_it_waits(self, in_vain: bool) -> None:
        """Note in the store that this device waits; if it waited in vain, ask who else does."""
        try:
            if in_vain:
                self._lateness.ask()
            self._lateness.answer()
        except RuntimeError as gone:  # the store went with the device that is lost
            _log.info("the other devices cannot be asked: %s", gone)

    def _late(self) -> list[int]:
        """Devices that everybody else waits for, if any device's wait has timed out.

        A backend that times out closes its connections, so the others see a lost connection to a
        device that has nothing wrong with it. So the question is asked for either error.
        """
        try:
            return self._lateness.late() if self._lateness.is_asked() else []
        except RuntimeError:  # as above
            return []

    def _gone(self) -> list[int]:
        try:
            return self._who_left()
        except RuntimeError:  # the store went with the device that is lost
            return []

    def _failure_told(self) -> dict[str, Any] | None:
        try:
            self._store.wait([_FAILURE_KEY], timedelta(seconds=_LAST_WORDS_S))
            return json.loads(self._store.get(_FAILURE_KEY))  # type: ignore[no-any-return]
        except RuntimeError:  # no failure was written, or the store went with the lost device
            return None


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether a backend lost a peer or timed out; PyTorch has no error type of its own for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # gloo raises plain RuntimeErrors, so there is only the message to go by.
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)


class Operation(NamedTuple):
    """One tensor on its way to a peer or from it."""

    sends: bool
    """Whether this process sends it; otherwise it receives it."""
    peer: int
    part: torch.Tensor  # (n,), contiguous; sent or overwritten in place
    chunk: int | None = None
    """Number of the chunk within its span; None for what is no chunk."""


class Moving:
    """Tensors that are on their way; they must stay as they are until `finish`.

    Args:
        operations: what was started, in this order.
        works: one for each of them, or a single one for all (NCCL).
        limit: how long to wait for each tensor of the host.
        naming: makes the context in which to wait, which explains errors.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        works: Sequence[dist.Work],
        limit: timedelta,
        naming: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._naming = naming
        self._parts = [operation.part for operation in operations]
        self._left: list[Callable[[], object]] = []
        self._coming: dict[int, list[Callable[[], object]]] = {}
        # NCCL fuses a batch into one work, so a single chunk cannot be waited for by itself.
        self._as_one = len(works) != len(operations)
        if self._as_one:
            self._left = [work.wait for work in works]
            return
        for operation, work in zip(operations, works, strict=True):
            on_host = operation.part.device.type == "cpu"
            wait = partial(work.wait, limit) if on_host else work.wait
            if not operation.sends and operation.chunk is not None:
                self._coming.setdefault(operation.chunk, []).append(wait)
            else:
                self._left.append(wait)

    def wait_for(self, chunk: int) -> None:
        """Wait until the chunk of this number has come from all peers."""
        # With NCCL this only has the current stream wait, so nothing is lost by waiting for all.
        if self._as_one:
            self.finish()
        self._wait_once(self._coming.pop(chunk, []))

    def finish(self) -> None:
        """Wait until everything is received and sent."""
        for chunk in list(self._coming):
            self._wait_once(self._coming.pop(chunk))
        self._wait_once(self._left)
        self._parts = []

    def _wait_once(self, waits: list[Callable[[], object]]) -> None:
        """Wait for each and forget it: gloo never returns from a second wait for a receipt."""
        with self._naming():
            while waits:
                waits.pop(0)()

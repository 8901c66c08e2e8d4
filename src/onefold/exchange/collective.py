"""Reaches processes through torch.distributed: those of other hosts, and those that drive GPUs.

Tensors go from every device straight to the one that needs them, point to point: no library chooses
an order of addition, and every device hears from every other one, so the one that is gone can be
named.

Note: how sends and receipts are matched
----------------------------------------
Nothing names a message: between two devices the n-th send meets the n-th receipt. So both ends list
what they trade in the same order (see `CollectiveMemory.publish`), and the sort in `move` is
stable and goes by chunk, which both ends number alike.

Note: groups of messages on accelerators
----------------------------------------
NCCL starts a batch of messages as one group, and hangs if the group is very large. So a batch is
started in several groups: each has a few messages for each pair of devices and direction, taken in
their order. The other end counts the same messages, so both have each of them in the same group.

Note: every wait says its limit
-------------------------------
gloo waits for a message as long as was said when the group was made, which is the limit of that
attempt to connect, and not of the run; what is said later holds for collective calls alone. So a
wait for a tensor of the host names the limit. On a GPU a wait only has the stream wait.

Note: by way of the host
------------------------
Between two neighbors of a pipeline messages go both ways at one time, which NCCL cannot have
without both ends naming them in one order (it would wait for ever); the host's connections can. So
tensors of a GPU are copied to the host and sent from there.

Note: the order of a failure
----------------------------
A device that fails first writes why into the store, then cuts its connections. Whoever is woken by
the cut then finds the reason there. A failure that another device caused is not written: the first
cause must stay.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from onefold.errors import DisagreementError, PeerError, PeerLost, PeerTimeout
from onefold.exchange.group import JoinedGroup, break_off
from onefold.exchange.progress import NoteWait
from onefold.exchange.transport import (
    Failure,
    Message,
    Ranks,
    Transport,
    has_left,
    packed_message,
    read_message,
)
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator

__all__ = ["MOST_OF_A_GROUP", "CollectiveTransport", "Moving", "Operation", "groups_of"]

T = TypeVar("T")
_log = logging.getLogger("onefold")
_FAILURE_KEY = "onefold/failure"
_LAST_WORDS_S = 1.0
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "peer")


def _nobody(peer: int | None) -> None:
    """Take no note of a wait."""


class CollectiveTransport(Transport):
    """One process of a group, which drives one device.

    Args:
        device: the device that this process drives.
        joined: a process group whose ranks are the devices' numbers, with a backend for the host
            and for ``device``.
        timeout_s: the limit of the group, for error messages.
        allocator: where its `buffer` lies.
        note_wait: called when a wait begins, and when it ends.
    """

    frame_bytes = 16 << 20

    def __init__(
        self,
        device: torch.device,
        joined: JoinedGroup,
        timeout_s: float,
        allocator: TensorAllocator = DEFAULT_ALLOCATOR,
        note_wait: NoteWait = _nobody,
    ) -> None:
        self._note_wait = note_wait
        super().__init__(device, allocator)
        self.rank, self.size = joined.group.rank(), joined.group.size()
        self._timeout_s, self._limit = timeout_s, timedelta(seconds=timeout_s)
        self._joined: dist.ProcessGroup | None = joined.group
        self._failure = ""
        self._store, self._connections = joined.store, joined.connections
        self._watch, self._lateness, self._who_left = joined.watch, joined.lateness, joined.left
        self._leaving: list[tuple[torch.Tensor, dist.Work]] = []

    def all_gather_bytes(self, message: bytes = b"", among: Ranks = None) -> Sequence[bytes]:
        # torch.frombuffer refuses an empty buffer, so an empty message travels as one byte.
        own = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)
        if among is None or len(among) == self.size:
            found = [*self.gather(own)]
        else:
            parts = {peer: torch.empty_like(own) for peer in among if peer != self.rank}
            operations = [Operation(True, peer, own) for peer in parts]
            operations += [Operation(False, peer, part) for peer, part in parts.items()]
            self.move(operations).finish()
            parts[self.rank] = own
            found = [parts[peer] for peer in among]
        return [part.numpy().tobytes()[: len(message)] for part in found]

    def all_gather_rows(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        (row,) = rows.values()
        return self.gather(row)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather one contiguous tensor from each process, all of a shape and dtype: (D, *shape)."""
        rows = tensor.new_empty(self.size, *tensor.shape)
        with self._naming_the_lost():
            dist.all_gather([*rows], tensor, group=self._group)
        return rows

    def broadcast_from_lead(self, tensors: Iterable[torch.Tensor]) -> None:
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
        works: list[dist.Work] = []
        with self._naming_the_lost():
            for group in groups_of(ordered, self.size):
                started = [
                    dist.P2POp(
                        dist.isend if op.sends else dist.irecv,
                        op.part.view(torch.uint8),
                        group=self._group,
                        group_peer=op.peer,
                    )
                    for op in group
                ]
                works += dist.batch_isend_irecv(started)
        return Moving(ordered, works, self._limit, self._naming_the_lost)

    def begin_sending(self, peer: int, tensor: torch.Tensor) -> None:
        """Begin to send bytes of the host, which must stay as they are until `finish_sending`."""
        with self._naming_the_lost():
            # What has left by now need not be kept any longer.
            self._leaving = [(t, work) for t, work in self._leaving if not work.is_completed()]
            # The length first: a receiver must know the size of what it receives.
            for part in (torch.tensor([tensor.numel()]), *([tensor] if tensor.numel() else [])):
                work = dist.isend(part, group=self._group, group_dst=peer)
                assert work is not None  # this process is one of the group
                self._leaving.append((part, work))

    def receive_bytes(self, peer: int) -> torch.Tensor:
        """Wait for bytes that a device has begun to send: (n,) uint8 on the host."""
        size = torch.empty(1, dtype=torch.int64)
        with self._naming_the_lost():
            self._receive(size, peer)
            tensor = torch.empty(int(size), dtype=torch.uint8)
            if tensor.numel():
                self._receive(tensor, peer)
        return tensor

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        work = dist.irecv(tensor, group=self._group, group_src=peer)
        assert work is not None
        work.wait(self._limit)

    def finish_sending(self) -> None:
        with self._naming_the_lost():
            for _, work in self._leaving:
                work.wait(self._limit)
        self._leaving = []

    def gather_to_lead(self) -> list[torch.Tensor]:
        own = self.buffer(0)
        if self.rank == 0:
            return [own, *map(self.receive_bytes, range(1, self.size))]
        self.begin_sending(0, own)
        self.finish_sending()
        return []

    def scatter_from_lead(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return self.receive_bytes(0)
        for peer in range(1, self.size):
            self.begin_sending(peer, make(peer))
            self.finish_sending()  # one at a time: the lead never holds more than one device's part
        return make(0)

    def send(self, device: int, target: int, message: Message) -> None:
        self.begin_sending(target, packed_message(message))

    def receive(self, device: int, source: int) -> Message:
        return read_message(self.receive_bytes(source))

    def forget_messages(self) -> None:
        self.finish_sending()

    @property
    def _group(self) -> dist.ProcessGroup:
        # Asked for at every call, so that none keeps the group alive after `close`.
        if self._joined is None:
            raise has_left(self._failure)
        return self._joined

    def close(self, failure: BaseException | None = None) -> None:
        # The group's threads end with its last reference; let that be while Python still runs.
        group, self._joined = self._joined, None
        self._watch.close()
        if failure is None:
            return
        told = Failure.of(failure, device=self.rank, step=self.step)
        self._failure = self._failure or told.words
        break_off()
        # Write why before the cut that makes the others look for it; see the note at the head.
        if not isinstance(failure, PeerError):
            self._tell(told)
        self._connections.cut()  # or whoever waits for us would wait up to the limit
        if group is not None and self.device.type != "cpu":
            # What is queued behind a message that never comes would keep the device for ever, and
            # with it a script that saves its model after the error.
            try:
                group.abort()
            except RuntimeError as error:  # the failure that led here is the one to report
                _log.warning("messages under way could not be given up: %s", error)

    def _tell(self, told: Failure) -> None:
        text = msgspec.json.encode(told).decode()
        # Only if nobody has written yet: the first failure is the one to report.
        try:
            self._store.compare_set(_FAILURE_KEY, "", text)
        except RuntimeError as error:  # the store is gone, and with it everybody to tell
            _log.warning("device %d could not tell the others of its failure: %s", self.rank, error)

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Turn an error of the backend into one that names the lost device, where it is known."""
        self._note_wait(-1)
        try:
            with self._lateness.waiting():
                yield
        except RuntimeError as error:
            # An error of this device's own, such as a lack of memory, is not the peers' doing.
            if not _is_of_connection(error):
                error.add_note(f"raised in step {self.step}, on device {self.rank}")
                raise
            raise self._explain(error) from error
        finally:
            self._note_wait(None)

    def _explain(self, error: RuntimeError) -> PeerError | DisagreementError:
        step = self.step
        # Ask the store only after this: a stopped peer may be the one that serves it.
        if self._watch.stopped is not None:
            rank = self._watch.stopped
            pid = self._watch.pids[rank]
            return PeerLost.stopped(rank, pid, waiting=self.rank, step=step)
        timed_out = "timed out" in str(error).lower()
        # Before the wait for a reason, which gives the others time to say that they wait, too.
        _asked(lambda: self._lateness.say_waiting(in_vain=timed_out), None)
        told = _asked(self._failure_told, None)
        if told is not None:
            return told.error()
        # No reason was given: either a script has ended in order, or nobody could write one.
        gone: list[int] = _asked(self._who_left, [])
        if gone:
            what = "ended: its script came to an end before the others'"
            return PeerLost.in_step(gone[0], what, waiting=self.rank, step=step)
        # A backend that times out closes its connections, so the others see a lost connection to a
        # device that has nothing wrong with it. So the question is asked for either error.
        late: list[int] = _asked(self._lateness.late, [])
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

    def _failure_told(self) -> Failure | None:
        self._store.wait([_FAILURE_KEY], timedelta(seconds=_LAST_WORDS_S))
        return msgspec.json.decode(self._store.get(_FAILURE_KEY), type=Failure)


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """Ask the store, which may have gone with the device that is lost, or not have the answer."""
    try:
        return question()
    except RuntimeError as error:
        _log.info("the store of the run has no answer: %s", error)
        return otherwise


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
    """Number of the chunk within its partition; None for what is no chunk."""


MOST_OF_A_GROUP = 128
"""Messages that are started at one time on accelerators."""


def groups_of(operations: Sequence[Operation], size: int) -> list[list[Operation]]:
    """Split a batch into groups that are started one after the other; see the note on groups.

    Args:
        operations: all of them on one kind of device.
        size: how many devices there are; with more than 64, each device trades one message with
            each other one in a group.
    """
    if not operations or operations[0].part.device.type == "cpu":
        return [list(operations)] if operations else []
    each = max(1, MOST_OF_A_GROUP // (2 * (size - 1)))
    counts = Counter[tuple[int, bool]]()
    groups: defaultdict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        pair = operation.peer, operation.sends
        groups[counts[pair] // each].append(operation)
        counts[pair] += 1
    return [groups[number] for number in sorted(groups)]


class Moving:
    """Tensors that are on their way; they must stay as they are until `finish`.

    Args:
        operations: what was started, in this order.
        works: one for each of them, or one for each group (NCCL).
        limit: how long to wait for each tensor of the host.
        naming: makes the context in which to wait, which explains errors.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        works: Sequence[dist.Work],
        limit: timedelta,
        naming: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._naming = naming
        self._parts = [operation.part for operation in operations]
        self._waits: dict[int | None, list[Callable[[], object]]] = {}
        """By the chunk that comes; None for all else."""
        # NCCL fuses a batch into one work, so a single chunk cannot be waited for by itself.
        self._as_one = len(works) != len(operations)
        if self._as_one:
            self._waits[None] = [work.wait for work in works]
            return
        for operation, work in zip(operations, works, strict=True):
            on_host = operation.part.device.type == "cpu"
            wait = partial(work.wait, limit) if on_host else work.wait
            chunk = None if operation.sends else operation.chunk
            self._waits.setdefault(chunk, []).append(wait)

    def wait_for(self, chunk: int) -> None:
        """Wait until the chunk of this number has come from all peers."""
        # With NCCL this only has the current stream wait, so nothing is lost by waiting for all.
        self._wait_once(None if self._as_one else chunk)

    def finish(self) -> None:
        """Wait until everything is received and sent."""
        for chunk in [*(chunk for chunk in self._waits if chunk is not None), None]:
            self._wait_once(chunk)
        self._parts = []

    def _wait_once(self, chunk: int | None) -> None:
        """Wait for each and forget it: gloo never returns from a second wait for a receipt."""
        waits = self._waits.pop(chunk, [])
        with self._naming():
            while waits:
                waits.pop(0)()

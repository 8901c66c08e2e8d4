"""Connects processes through torch.distributed: those on other hosts, and those that drive GPUs.

Every device sends tensors point to point to the devices that need them, so that no library chooses
an order of addition. Every device also hears from every other one, so that it can name a lost one.

Note: how sends and receives are matched
----------------------------------------
Messages have no tags: between two devices the n-th send is matched with the n-th receive. So both
ends list their messages in the same order (see `CollectiveMemory.publish`).

Note: groups of messages on accelerators
----------------------------------------
NCCL starts a batch of messages as one group, and hangs if the group is very large. So a batch is
started in several groups: each has a few messages for each pair of devices and direction, in their
order. Both ends of a pair count the same messages, so they put each message into the same group.

Note: through the host
----------------------
Neighbors in a pipeline send to each other at the same time. NCCL would hang, because it needs both
ends to issue these messages in one order; the host's connections do not. So tensors of a GPU are
copied to the host and sent from there.
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
# How long this process looks for the reason that a failing device writes to the store.
_LAST_WORDS_S = 1.0
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "peer")


def _ignore_wait(peer: int | None) -> None:
    """Ignore a wait."""


class CollectiveTransport(Transport):
    """Transport of one process of a group, which drives one device.

    Args:
        device: the device that this process drives.
        joined: a process group whose ranks are the devices' numbers, with a backend for the host
            and for ``device``.
        timeout_s: the timeout of the group, for error messages.
        allocator: allocates its `buffer`.
        note_wait: called when a wait begins, and when it ends.
    """

    frame_bytes = 16 << 20

    def __init__(
        self,
        device: torch.device,
        joined: JoinedGroup,
        timeout_s: float,
        allocator: TensorAllocator = DEFAULT_ALLOCATOR,
        note_wait: NoteWait = _ignore_wait,
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
        # torch.frombuffer rejects an empty buffer, so an empty message is sent as one byte.
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
        """Gather a contiguous tensor, of one shape and dtype, from each process: (D, *shape)."""
        rows = tensor.new_empty(self.size, *tensor.shape)
        with self._naming_the_lost():
            dist.all_gather([*rows], tensor, group=self._group)
        return rows

    def broadcast_from_lead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors of every process with the lead's."""
        with self._naming_the_lost():
            for tensor in tensors:
                # Send bytes: backends know fewer dtypes than PyTorch, and convert no bytes.
                dist.broadcast(tensor.view(torch.uint8), group=self._group, group_src=0)

    def peers(self) -> list[int]:
        """List the other devices, from the next one on, so that not all send to device 0 first."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def move(self, operations: Sequence[Operation]) -> Moving:
        """Start receives and sends, in the order of their chunks' numbers.

        Operations without a chunk come first.
        """
        # Within a chunk, start receives first: gloo runs the two directions of a connection one
        # after the other if both ends start by sending. The sort must be stable, because parts of
        # one chunk are matched by their place in the list.
        ordered = sorted(
            (op for op in operations if op.part.numel()),
            key=lambda op: (-1 if op.chunk is None else op.chunk, op.sends),
        )
        works: list[dist.Work] = []
        with self._naming_the_lost():
            # Both ends form the same groups; see the note on groups.
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
        """Start to send bytes of the host, which must not change until `finish_sending`."""
        with self._naming_the_lost():
            # Keep tensors alive only while they are being sent.
            self._leaving = [(t, work) for t, work in self._leaving if not work.is_completed()]
            # Send the length first, because the receiver must allocate memory.
            for part in (torch.tensor([tensor.numel()]), *([tensor] if tensor.numel() else [])):
                work = dist.isend(part, group=self._group, group_dst=peer)
                # isend returns None only outside of the group.
                assert work is not None
                self._leaving.append((part, work))

    def receive_bytes(self, peer: int) -> torch.Tensor:
        """Wait for bytes that a device started to send: (n,) uint8 on the host."""
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
        # gloo's default here is the timeout of the attempt that made the group; a timeout set later
        # applies only to collective calls. So pass the run's limit. On a GPU only the stream waits.
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
            # Send one part at a time, so that the lead never holds more than one.
            self.finish_sending()
        return make(0)

    def send(self, device: int, target: int, message: Message) -> None:
        self.begin_sending(target, packed_message(message))

    def receive(self, device: int, source: int) -> Message:
        return read_message(self.receive_bytes(source))

    def forget_messages(self) -> None:
        self.finish_sending()

    @property
    def _group(self) -> dist.ProcessGroup:
        # A property, so that no caller keeps the group alive after `close`.
        if self._joined is None:
            raise has_left(self._failure)
        return self._joined

    def close(self, failure: BaseException | None = None) -> None:
        # The group's threads end with its last reference. Drop it while Python still runs.
        group, self._joined = self._joined, None
        self._watch.close()
        if failure is None:
            return
        report = Failure.of(failure, device=self.rank, step=self.step)
        self._failure = self._failure or report.words
        break_off()
        # Write the reason before cutting connections: the cut makes the others look for it. Do not
        # write a failure that another device caused, because the first cause must stay.
        if not isinstance(failure, PeerError):
            self._tell(report)
        # Without the cut, a device that waits for this one would wait for the whole timeout.
        self._connections.cut()
        if group is not None and self.device.type != "cpu":
            # Work queued behind a message that never arrives would occupy the GPU forever, and
            # block a script that saves its model after the error.
            try:
                group.abort()
            except RuntimeError as error:
                # Do not raise: the failure that led here is the one to report.
                _log.warning("pending messages could not be aborted: %s", error)

    def _tell(self, report: Failure) -> None:
        text = msgspec.json.encode(report).decode()
        # Write only if the key is unset: the first failure is the one to report.
        try:
            self._store.compare_set(_FAILURE_KEY, "", text)
        except RuntimeError as error:
            # The store is gone, and with it every device that could read the report.
            _log.warning(
                "device %d could not report its failure to the others: %s", self.rank, error
            )

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Replace an error of the backend by one that names the lost device, if it is known."""
        self._note_wait(-1)
        try:
            with self._lateness.waiting():
                yield
        except RuntimeError as error:
            # This device's own errors, such as running out of memory, are not caused by a peer.
            if not _is_of_connection(error):
                error.add_note(f"raised in step {self.step}, on device {self.rank}")
                raise
            raise self._explain(error) from error
        finally:
            self._note_wait(None)

    def _explain(self, error: RuntimeError) -> PeerError | DisagreementError:
        step = self.step
        # Check this before asking the store: the stopped peer may be the process that serves it.
        if self._watch.stopped is not None:
            rank = self._watch.stopped
            pid = self._watch.pids[rank]
            return PeerLost.stopped(rank, pid, waiting=self.rank, step=step)
        timed_out = "timed out" in str(error).lower()
        # Report the wait before looking for a reason, so that others have time to answer.
        _asked(lambda: self._lateness.say_waiting(in_vain=timed_out), None)
        report = _asked(self._reported_failure, None)
        if report is not None:
            return report.error()
        # There is no reason in the store: a script ended normally, or no device could write one.
        gone: list[int] = _asked(self._who_left, [])
        if gone:
            what = "ended: its script finished before the others'"
            return PeerLost.in_step(gone[0], what, waiting=self.rank, step=step)
        # A backend that times out closes its connections, so that other devices see a lost
        # connection to a device without a fault. So ask which device is late for either error.
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

    def _reported_failure(self) -> Failure | None:
        self._store.wait([_FAILURE_KEY], timedelta(seconds=_LAST_WORDS_S))
        return msgspec.json.decode(self._store.get(_FAILURE_KEY), type=Failure)


def _asked(question: Callable[[], T], otherwise: T) -> T:
    """Query the store, which may have ended with the lost device, or not answer."""
    try:
        return question()
    except RuntimeError as error:
        _log.info("the store of the run did not answer: %s", error)
        return otherwise


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether a backend lost a peer or timed out; PyTorch has no error type for this."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # gloo raises plain RuntimeErrors, so only the message shows the cause.
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)


class Operation(NamedTuple):
    """A tensor to send to a peer or to receive from it."""

    sends: bool
    """Whether this process sends the tensor; otherwise it receives it."""
    peer: int
    part: torch.Tensor  # (n,), contiguous; sent or overwritten in place
    chunk: int | None = None
    """Number of the chunk within its partition; None if the tensor is not a chunk."""


MOST_OF_A_GROUP = 128
"""Maximum number of messages that an accelerator starts at once."""


def groups_of(operations: Sequence[Operation], size: int) -> list[list[Operation]]:
    """Split a batch into groups that are started one after the other; see the note on groups.

    Args:
        operations: tensors of one type of device.
        size: the number of devices; with more than 64, a group has one message for each other
            device and direction.
    """
    if not operations or operations[0].part.device.type == "cpu":
        return [list(operations)] if operations else []
    # Two directions for each peer. The number depends on the size alone, so both ends agree on it.
    each = max(1, MOST_OF_A_GROUP // (2 * (size - 1)))
    counts = Counter[tuple[int, bool]]()
    groups: defaultdict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        pair = operation.peer, operation.sends
        groups[counts[pair] // each].append(operation)
        counts[pair] += 1
    return [groups[number] for number in sorted(groups)]


class Moving:
    """Tensors in flight, which must not change until `finish`.

    Args:
        operations: the started operations, in this order.
        works: one for each operation, or one for each group (NCCL).
        limit: the timeout for each tensor of the host.
        naming: makes a context manager for waiting that explains errors.
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
        """Waits by the chunk that arrives; None for all others."""
        # NCCL fuses a batch into one work, so it cannot wait for a single chunk.
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
        """Wait until the chunk of this number has arrived from all peers."""
        # Under NCCL only the current stream waits, so waiting for all costs the host nothing.
        self._wait_once(None if self._as_one else chunk)

    def finish(self) -> None:
        """Wait until everything is received and sent."""
        for chunk in [*(chunk for chunk in self._waits if chunk is not None), None]:
            self._wait_once(chunk)
        self._parts = []

    def _wait_once(self, chunk: int | None) -> None:
        """Wait for a chunk, and drop its waits: gloo hangs in a second wait for a receive."""
        waits = self._waits.pop(chunk, [])
        with self._naming():
            while waits:
                waits.pop(0)()

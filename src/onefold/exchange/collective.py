"""Reaches processes through torch.distributed: those of other hosts, and those that drive GPUs.

Tensors go from every device straight to the one that needs them, point to point: nothing is added
in an order that a library chooses, and every device hears from every other one, so the one that is
gone can be named.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onefold.errors import OnefoldError, PeerError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange.group import Joined, break_off, who_left
from onefold.exchange.transport import LEFT, Transport, roomy

__all__ = ["GroupTransport", "Moving", "Operation"]

_log = logging.getLogger("onefold")
_FAILURE_KEY = "onefold/failure"
_LAST_WORDS_S = 1.0
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "peer")


class GroupTransport(Transport):
    """One process of a group, which drives one device.

    Args:
        device: what this process drives.
        joined: a process group whose ranks are the devices' numbers, with a backend for the host
            and for ``device``.
        timeout_s: the limit of the group, for errors.
    """

    frame_bytes = 16 << 20

    def __init__(self, device: torch.device, joined: Joined, timeout_s: float) -> None:
        self.rank = joined.group.rank()
        self.size = joined.group.size()
        self.device = device
        self._timeout_s = timeout_s
        self._joined: dist.ProcessGroup | None = joined.group
        self._store = joined.store
        self._connections = joined.connections
        self._watch = joined.watch
        self._lateness = joined.lateness
        self._room: torch.Tensor | None = None

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        own = torch.frombuffer(bytearray(word or b"\0"), dtype=torch.uint8)
        return [bytes(said.numpy())[: len(word)] for said in self.gather(own)]

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        (row,) = rows.values()
        return torch.stack(self.gather(row))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all processes, alike in shape and dtype, in the order of the devices."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._naming_the_lost():
            dist.all_gather(parts, tensor, group=self._group)
        return parts

    def follow_lead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors of every process with those of the lead's."""
        with self._naming_the_lost():
            for tensor in tensors:
                # As bytes: backends know fewer types than tensors have.
                dist.broadcast(tensor.view(torch.uint8), group=self._group, group_src=0)

    def peers(self) -> list[int]:
        """The other devices, each beginning with its neighbour, so that no one is swamped."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def move(self, operations: Sequence[Operation]) -> Moving:
        """Begin to receive and to send: the first chunks of all first.

        Of equal chunks the receipts come first: gloo lets the two directions of a connection go one
        after the other where both ends start with what they send.
        """
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
        return Moving(ordered, works, self._naming_the_lost)

    def room(self, nbytes: int) -> torch.Tensor:
        self._room = roomy(self._room, nbytes, self.device)
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
        told = {"device": self.rank, "step": self.step, "kind": type(failure).__name__}
        text = json.dumps({**told, "text": str(failure)[:4000]})
        try:
            self._store.compare_set(_FAILURE_KEY, "", text)
        except RuntimeError as error:  # the store is gone, and with it everybody to tell
            _log.warning("device %d could not tell the others of its failure: %s", self.rank, error)

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Turn an error of the backend into one that says which device is gone, where known."""
        try:
            with self._lateness.waiting():
                yield
        except RuntimeError as error:
            if not _is_of_connection(error):
                error.add_note(f"raised in step {self.step}, on device {self.rank}")
                raise
            raise self._explain(error) from error

    def _explain(self, error: RuntimeError) -> PeerError:
        step = self.step
        if self._watch.stopped is not None:  # before the store is asked, which it may hold
            rank = self._watch.stopped
            pid = self._watch.pids[rank]
            return PeerLost.stopped(rank, pid, waiting=self.rank, step=step)
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


class Operation(NamedTuple):
    """One tensor on its way to a peer or from it."""

    sends: bool
    """It leaves this process; else it comes here."""
    peer: int
    part: torch.Tensor
    chunk: int | None = None
    """Which chunk of a span it is, if it is one."""


class Moving:
    """Tensors that are on their way.

    Args:
        operations: what was started, in this order.
        works: one for each of them, or a single one for all (NCCL).
        naming: makes the surroundings in which this waits.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        works: Sequence[dist.Work],
        naming: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._naming = naming
        self._left: list[dist.Work] = []
        self._coming: dict[int, list[dist.Work]] = {}
        self._as_one = len(works) != len(operations)
        if self._as_one:
            self._left = list(works)
            return
        for operation, work in zip(operations, works, strict=True):
            if not operation.sends and operation.chunk is not None:
                self._coming.setdefault(operation.chunk, []).append(work)
            else:
                self._left.append(work)

    def wait_for(self, chunk: int) -> None:
        """Until the chunk of this number has come from all peers."""
        if self._as_one:
            self.finish()
        self._wait_once(self._coming.pop(chunk, []))

    def finish(self) -> None:
        """Until all has come and gone."""
        for chunk in list(self._coming):
            self._wait_once(self._coming.pop(chunk))
        self._wait_once(self._left)

    def _wait_once(self, works: list[dist.Work]) -> None:
        """Wait for each and forget it: gloo would wait forever for a message taken before."""
        with self._naming():
            while works:
                works.pop(0).wait()

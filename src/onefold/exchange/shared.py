"""Exchange between processes of one host through memory that they share.

The parameters exist once, and every process computes with them where they are. The memory is an
anonymous file that the lead makes and hands to the others over a socket: it has no name, so there
is nothing that could be left behind, and the kernel frees it with the last process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from onefold.core.flat import FlatTensors, cut_chunks
from onefold.core.fold import Published
from onefold.core.shard import Plan
from onefold.exchange.base import Board, Exchange, Start, Storage
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.spans import Partial, SpanFold, Spanned

__all__ = ["SharedExchange"]

_PAGE_BYTES = 4096
_SHARE_BYTES = 1 << 20


class SharedExchange(Exchange):
    """One process of several on this host; all of them make it at the same time.

    Args:
        storage: the sizes.
        start: this process's values; those of the lead become everybody's.
        mailbox: connects the processes; closed with this exchange.
    """

    def __init__(self, storage: Storage, start: Start, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._rank = mailbox.rank
        self.one_memory = True
        shape = storage.board
        sizes = [
            storage.trained.nbytes,
            storage.other.nbytes,
            sum(shape.host_bytes),
            shape.device_bytes,
            mailbox.size * _SHARE_BYTES,
        ] + [storage.trained.nbytes] * (storage.slots * storage.devices)
        memories = iter(_map_shared(mailbox, sizes))
        self.trained = {self._rank: FlatTensors(storage.trained, memory=next(memories))}
        self.other = {self._rank: FlatTensors(storage.other, memory=next(memories))}
        self.board = Board(shape, next(memories), next(memories))
        self._shared_rows = next(memories).view(torch.float64).view(mailbox.size, -1)
        spans = [[storage.pieces[i] for i in span] for span in storage.spans]
        self._fold = SpanFold(storage.trained, spans[self._rank], storage.shards)
        others = [span for rank, span in enumerate(spans) if rank != self._rank]
        visible = [chunk for span in others for chunk in cut_chunks(storage.trained, span)]
        self._own: list[Partial] = []
        self._partials: dict[Published, Spanned] = {}
        for device in range(storage.devices):
            for slot in range(storage.slots):
                flat = FlatTensors(storage.trained, memory=next(memories))
                if device == self._rank:
                    self._own.append(Partial(flat, visible))
                self._partials[Published(device, slot)] = (
                    self._own[slot] if device == self._rank else flat
                )
        self._room: tuple[int, torch.Tensor] | None = None
        if self._rank == 0:
            self.trained[0].write(start.trained)
            self.other[0].write(start.other)
        self.follow_lead(start.buffers)

    def follow_lead(self, buffers: FlatTensors) -> None:
        row = self.board.buffer_rows[0]  # the parameters lie in one place for all
        if self._rank == 0:
            row.write(buffers.views)
        self._mailbox.meet()
        buffers.write(row.views)
        self._mailbox.meet()

    def agree(self, step: int, word: bytes) -> Sequence[bytes]:
        self._mailbox.step = step
        return self._mailbox.meet(word)

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._own[slot].write(gradients)

    def collect(self, plan: Plan) -> None:
        self._mailbox.meet()
        self._fold.fold(plan, self._partials.__getitem__)

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        return self._fold.totals

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        (row,) = rows.values()
        limit = self._shared_rows.shape[1]
        parts = []
        for part in torch.split(row, limit) if row.numel() else (row,):
            self._shared_rows[self._rank, : part.numel()] = part
            self._mailbox.meet()
            parts.append(self._shared_rows[:, : part.numel()].clone())
            self._mailbox.meet()
        return torch.cat(parts, dim=1)

    def spread(self) -> None:
        self._mailbox.meet()
        self._fold.release()
        for partial in self._own:
            partial.release()

    def room(self, nbytes: int) -> torch.Tensor:
        if self._room is None or self._room[1].numel() < nbytes:
            self._drop_room()
            self._room = _new_file(nbytes)
        return self._room[1]

    def bring(self) -> list[torch.Tensor]:
        if self._room is None:
            raise ValueError("there is nothing to bring: fill a room first")
        descriptor, memory = self._room
        if self._rank != 0:
            self._mailbox.send_file(0, descriptor)
            return []
        return [memory, *(_take_file(self._mailbox, peer) for peer in range(1, self._mailbox.size))]

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        if make is None:
            return _take_file(self._mailbox, 0)
        for peer in range(1, self._mailbox.size):
            made = make(peer)
            descriptor, memory = _new_file(made.numel())
            memory[: made.numel()] = made
            try:
                self._mailbox.send_file(peer, descriptor)
            finally:
                os.close(descriptor)
        return make(0)

    def close(self, failure: BaseException | None = None) -> None:
        if failure is not None:
            self._mailbox.tell_failure(failure)
        self._mailbox.close()
        self._drop_room()

    def _drop_room(self) -> None:
        if self._room is not None:
            os.close(self._room[0])
            self._room = None


def _map_shared(mailbox: Mailbox, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Stretches of memory, each (size,) uint8 of zeros, that all processes share.

    Pages that nobody touches take no memory, so room for plans that never come costs nothing.
    """
    rounded = [-(-max(size, 1) // _PAGE_BYTES) * _PAGE_BYTES for size in sizes]
    starts = list(accumulate(rounded, initial=0))
    memory = _common_memory(mailbox, starts[-1])
    return [memory[a : a + size] for a, size in zip(starts[:-1], sizes, strict=True)]


def _common_memory(mailbox: Mailbox, size_bytes: int) -> torch.Tensor:
    if mailbox.rank != 0:
        return _take_file(mailbox, 0)
    descriptor, memory = _new_file(size_bytes)
    try:
        for rank in range(1, mailbox.size):
            mailbox.send_file(rank, descriptor)
    finally:
        os.close(descriptor)
    return memory


def _new_file(size_bytes: int) -> tuple[int, torch.Tensor]:
    """A file without a name, and its memory: (size,) uint8 of zeros."""
    descriptor = os.memfd_create("onefold", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(size_bytes, 1))
        return descriptor, _memory_of(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"expected {size_bytes:,} bytes of memory that all devices of this host share, got: "
            f"{error.strerror}. The limits for files (ulimit -f) and for memory hold for it",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise


def _take_file(mailbox: Mailbox, rank: int) -> torch.Tensor:
    """The memory of a file that another process sends."""
    descriptor = mailbox.receive_file(rank)
    try:
        return _memory_of(descriptor)
    finally:
        os.close(descriptor)


def _memory_of(descriptor: int) -> torch.Tensor:
    size_bytes = os.fstat(descriptor).st_size
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)

"""Memory in files: of the processes of a host, on the disk, or without values yet.

`MmapAllocator` is a file of which the system keeps a part in memory. `SparseAllocator` takes no
space until it is provided, and reads as NaN until then. `naming_limits` makes an error name the
size that was wanted, and the limit of the system that refused it.

Note: what a file is for
------------------------
Pages of a mapped file that nobody needs just now go back to the disk when memory is short, while
those of ordinary memory stay until the process is killed. The file has no name, so it is gone with
the last process that has it open, whatever ended that process. Room on the disk is reserved before
it is mapped: writing to a page for which there is no room would end the process without a word.

Note: what is read too early
----------------------------
Nobody is to read bare memory before `SparseAllocator.provide`, and all that goes through PyTorch's
functions is kept from it. What goes past them (a compiled extension, an address) must not find
zeros, which look like values. So one small piece of memory, each byte of which is 0xFF, is mapped
again and again: that is a NaN in every floating point dtype, and -1 in integers. Written to, a page
becomes the writer's own.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from onefold.system.allocator import TensorAllocator
from onefold.system.safe_files import memory_file

__all__ = [
    "LEAST_BYTES",
    "MmapAllocator",
    "SparseAllocator",
    "home_of",
    "map_over",
    "naming_limits",
    "new_disk_file",
    "warn_of_memory",
]


_FULL = (
    "Name a folder on a larger disk by --offload-dir or ONEFOLD_OFFLOAD_DIR; `onefold plan` shows "
    "how large a model becomes there"
)


_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "The limit for the size of files holds for it (ulimit -f)",
    errno.ENOMEM: "The limits for memory (ulimit -v) and for the number of mappings hold for it",
}


@contextmanager
def naming_limits(wanted: str) -> Iterator[None]:
    """Have an error of the system inside this block say what was wanted, and what to do.

    Args:
        wanted: what follows "expected".

    Raises:
        OSError: the same one, in these words.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        advice = f". {_ADVICE[number]}" if number in _ADVICE else ""
        raise OSError(number, f"expected {wanted}, got: {error.strerror}{advice}") from error


_log = logging.getLogger("onefold")


_IN_MEMORY = ("tmpfs", "ramfs")


_LEAST_PART_BYTES = 64 << 20


LEAST_BYTES = mmap.PAGESIZE
"""Of a tensor that goes to the file, where each takes whole pages."""


class MmapAllocator(TensorAllocator):
    """A file without a name. What is small is PyTorch's all the same.

    A tensor's place in the file is used again once nothing refers to its memory any more. The file
    is mapped in few parts, each as large as all before it: a process may have so many mappings,
    and each of Python's holds a descriptor.

    Args:
        folder: where the file is; on a file system that is itself in memory nothing is gained.
        apart: whether what is on a GPU is copied here when it is to be kept; otherwise it stays
            there.

    Raises:
        OSError: no file can be made there.
    """

    on_disk = True

    def __init__(self, folder: Path, *, apart: bool = False) -> None:
        self.folder, self.apart = folder, apart
        self._descriptor = new_disk_file(folder, 0)
        weakref.finalize(self, os.close, self._descriptor)
        self._nbytes = 0
        """Of the file up to here there are places, used or free."""
        self._mapped = 0
        """Up to here it is mapped."""
        self._newest: memoryview | None = None
        """The part that is mapped last."""
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._live: set[int] = set()

    @classmethod
    def at(cls, folder: str, *, apart: bool = False) -> MmapAllocator:
        """Make one in a folder; in that of temporary files if none is named.

        Says so if that is no disk.
        """
        made = cls(home_of(folder), apart=apart)
        warn_of_memory(made.folder)
        return made

    def empty(self, nbytes: int) -> torch.Tensor:
        if nbytes < LEAST_BYTES:
            return super().empty(nbytes)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free[size]
        return self._tensor(free.pop() if free else self._grown(size), nbytes)

    def zeros(self, nbytes: int) -> torch.Tensor:
        # A new place: the pages of one that was used before would all have to be written.
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._tensor(self._grown(size), nbytes)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        # On the meta device nothing is allocated, and the rules for strides are PyTorch's own.
        shape = torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
        if tensor.device.type != "cpu" and not self.apart:
            return super().like(tensor, dtype)
        if shape.nbytes < LEAST_BYTES:
            return torch.empty_like(shape, device="cpu")
        return self.empty(shape.nbytes).view(shape.dtype).as_strided(shape.shape, shape.stride())

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            is_here = tensor.untyped_storage().data_ptr() in self._live
            stays = is_here or tensor.nbytes < LEAST_BYTES
        else:
            stays = not self.apart
        return tensor if stays else self.copy(tensor.detach())

    def trim(self) -> None:
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)

    def _grown(self, size: int) -> memoryview:
        """A new place, of zeros."""
        if self._newest is None or self._mapped - self._nbytes < size:
            # What was left of the part before has no room on the disk yet, and takes none.
            self._nbytes = self._mapped
            self._newest = self._next_part(size)
            self._mapped = self._nbytes + len(self._newest)
        _reserve(self._descriptor, self._nbytes, size, self.folder)
        self._nbytes += size
        stop = len(self._newest) - (self._mapped - self._nbytes)
        return self._newest[stop - size : stop]

    def _next_part(self, size: int) -> memoryview:
        """Map the file from where it ends: much of it, or as little as must be."""
        try:
            return self._part(max(_LEAST_PART_BYTES, size, self._nbytes))
        except OSError:
            # A limit of the process may leave room for what is needed, and for no more.
            with naming_limits(_words_of(size, self._nbytes, self.folder)):
                return self._part(size)

    def _part(self, nbytes: int) -> memoryview:
        os.ftruncate(self._descriptor, self._nbytes + nbytes)
        return memoryview(mmap.mmap(self._descriptor, nbytes, offset=self._nbytes))

    def _tensor(self, place: memoryview, nbytes: int) -> torch.Tensor:
        # A view of its own, which the tensor keeps alive, and nobody else: so it is known when the
        # last tensor there is gone, and the place can be used again as it is.
        view = place[:]
        memory = torch.frombuffer(view, dtype=torch.uint8)
        self._live.add(memory.data_ptr())
        gone = weakref.finalize(view, _let_go, self._free, self._live, place, memory.data_ptr())
        gone.atexit = False
        return memory[:nbytes]


def home_of(folder: str) -> Path:
    """The folder of a model's files; that of temporary files if none is named."""
    return Path(folder or tempfile.gettempdir())


def warn_of_memory(folder: Path) -> None:
    """Warn if files in a folder are in memory themselves, as far as the system says so."""
    device, lines = folder.stat().st_dev, list[str]()
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # Number, parent, device, ..., a hyphen, the kind of file system; see proc(5).
    found = (line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted)
    kind = next(found, "")
    if kind in _IN_MEMORY:
        _log.warning(
            "the model is to lie in a file in %s, which is itself in memory (%s): nothing is "
            "saved by that. Name a folder on a disk by --offload-dir or ONEFOLD_OFFLOAD_DIR",
            folder,
            kind,
        )


def new_disk_file(folder: Path, nbytes: int) -> int:
    """Make a file without a name, of zeros; return its descriptor, which the caller closes.

    Raises:
        OSError: no file can be made there, or the disk has no room for it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="onefold-") as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise OSError(
            error.errno,
            f"expected a folder in which files can be made, got {folder}: {error.strerror}. Name "
            f"another one, on a disk, by --offload-dir or ONEFOLD_OFFLOAD_DIR",
        ) from error
    with ExitStack() as leaving:
        leaving.callback(os.close, descriptor)
        if nbytes:
            _reserve(descriptor, 0, nbytes, folder)
        leaving.pop_all()
    return descriptor


def _reserve(descriptor: int, start: int, nbytes: int, folder: Path) -> None:
    with naming_limits(_words_of(nbytes, start, folder)):
        os.posix_fallocate(descriptor, start, nbytes)


def _words_of(nbytes: int, before: int, folder: Path) -> str:
    beside = f", beside {before:,} that it has there" if before else ""
    return f"room for {nbytes:,} more bytes of the model in {folder}{beside}"


def _let_go(
    free: dict[int, list[memoryview]], live: set[int], place: memoryview, address: int
) -> None:
    live.discard(address)
    free[len(place)].append(place)


_PIECE_BYTES = 4 << 20
"""A process may have some 65,000 mappings."""


_MAP_FIXED = 0x10
"""As Linux has it on all processors that PyTorch runs on; Python does not name it."""


_FAILED = ctypes.c_void_p(-1).value


class SparseAllocator:
    """Tensors without room, which is made in files without names when they are to have values.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unknown = memory_file()
        weakref.finalize(self, os.close, self._unknown)
        with naming_limits(f"{_PIECE_BYTES:,} bytes of memory without values"):
            os.ftruncate(self._unknown, _PIECE_BYTES)
        with mmap.mmap(self._unknown, _PIECE_BYTES) as piece:
            piece[:] = b"\xff" * _PIECE_BYTES
        self._warned = False

    def room(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of 0xFF, to be read and written by nobody before `provide`.

        Raises:
            OSError: this process may have no more memory, or mappings.
        """
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with naming_limits(f"{size:,} bytes for a tensor without values"):
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            for start in range(0, size, _PIECE_BYTES):
                piece = memory[start : start + _PIECE_BYTES]
                map_over(piece.data_ptr(), piece.numel(), mmap.MAP_PRIVATE, self._unknown)
        return memory[:nbytes]

    def provide(self, memory: torch.Tensor) -> None:
        """Make room on the disk for what `room` has returned: it holds zeros now.

        Raises:
            OSError: the disk has no room.
        """
        if not self._warned:
            warn_of_memory(self.folder)
        self._warned = True
        whole = memory.untyped_storage()
        file = new_disk_file(self.folder, whole.nbytes())
        try:
            with naming_limits(f"{whole.nbytes():,} bytes of a file to be mapped"):
                map_over(whole.data_ptr(), whole.nbytes(), mmap.MAP_SHARED, file)
        finally:
            os.close(file)  # the mapping keeps it


def map_over(address: int, nbytes: int, kind: int, descriptor: int) -> None:
    """Map the beginning of a file in the place of memory that this process has mapped before.

    Python's object for that memory unmaps this as well.

    Raises:
        OSError: this process may have no more memory, or mappings.
    """
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    integer = ctypes.c_int
    map_at.restype = ctypes.c_void_p
    map_at.argtypes = (ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_long)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if map_at(address, nbytes, access, kind | _MAP_FIXED, descriptor, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

"""Memory in files: shared by the processes of a host, on a disk, or without values yet.

`MmapAllocator` allocates tensors in a file that the kernel caches in memory. `SparseAllocator`
allocates tensors that use no space until they are provided, and that read as NaN until then.
`naming_limits` adds to an error the requested size and the limit that was exceeded.

Note: why files
---------------
If memory is short, the kernel writes unused pages of a mapped file back to the disk, but it keeps
pages of ordinary memory until the process is killed. The file has no name, so it disappears with
the last process that has it open, however that process ends. Space on the disk is reserved before
it is mapped: writing to a page without space would kill the process without a message.

Note: reading too early
-----------------------
Memory without values must not be read before `SparseAllocator.provide`; reads through PyTorch's
functions are prevented. Other reads (a compiled extension, an address) must not find zeros, which
look like values. So one small block of memory, in which each byte is 0xFF, is mapped over and over:
this is NaN in every floating point dtype, and -1 in integers. A page that is written to becomes a
private copy.
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
    "Choose a folder on a larger disk with --offload-dir or ONEFOLD_OFFLOAD_DIR; `onefold plan` "
    "shows how much space a model needs there"
)


_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "It exceeds the limit for file sizes (ulimit -f)",
    errno.ENOMEM: "It exceeds the limit for memory (ulimit -v) or for the number of mappings",
}


@contextmanager
def naming_limits(wanted: str) -> Iterator[None]:
    """Add to system errors of this block what was requested, and advice.

    Args:
        wanted: the request, as a noun phrase.

    Raises:
        OSError: the original error, with a longer message.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        advice = f". {_ADVICE[number]}" if number in _ADVICE else ""
        raise OSError(number, f"cannot get {wanted}: {error.strerror}{advice}") from error


_log = logging.getLogger("onefold")


_IN_MEMORY = ("tmpfs", "ramfs")


_LEAST_PART_BYTES = 64 << 20


LEAST_BYTES = mmap.PAGESIZE
"""Minimum size of a tensor that is stored in the file, where each one occupies whole pages."""


class MmapAllocator(TensorAllocator):
    """A file without a name. Small tensors use PyTorch's own memory.

    A tensor's place in the file is reused once nothing refers to its memory. The file is mapped in
    few parts, each as large as all earlier ones together, because the number of mappings is
    limited and each of Python's holds a descriptor.

    Args:
        folder: folder of the file. A file system in memory would save nothing.
        apart: whether tensors on a GPU are copied to the file in order to be kept; otherwise they
            stay on the GPU.

    Raises:
        OSError: the file cannot be created there.
    """

    on_disk = True

    def __init__(self, folder: Path, *, apart: bool = False) -> None:
        self.folder, self.apart = folder, apart
        self._descriptor = new_disk_file(folder, 0)
        weakref.finalize(self, os.close, self._descriptor)
        self._nbytes = 0
        """Bytes of the file that belong to places, used or free."""
        self._mapped = 0
        """Bytes of the file that are mapped."""
        self._newest: memoryview | None = None
        """The part that was mapped last."""
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._live: set[int] = set()

    @classmethod
    def at(cls, folder: str, *, apart: bool = False) -> MmapAllocator:
        """Create an allocator in a folder; by default in that of temporary files.

        Warns if the folder is not on a disk.
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
        # A new place: a used one would have to be filled with zeros, page by page.
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._tensor(self._grown(size), nbytes)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        # The meta device allocates nothing, and applies PyTorch's own rules for strides.
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
        """Return a new place, filled with zeros."""
        if self._newest is None or self._mapped - self._nbytes < size:
            # The rest of the previous part is not reserved on the disk yet, so it wastes nothing.
            self._nbytes = self._mapped
            self._newest = self._next_part(size)
            self._mapped = self._nbytes + len(self._newest)
        _reserve(self._descriptor, self._nbytes, size, self.folder)
        self._nbytes += size
        stop = len(self._newest) - (self._mapped - self._nbytes)
        return self._newest[stop - size : stop]

    def _next_part(self, size: int) -> memoryview:
        """Map the next part of the file: a large one, or the smallest possible one."""
        try:
            return self._part(max(_LEAST_PART_BYTES, size, self._nbytes))
        except OSError:
            # A limit of the process may allow no more than the requested size.
            with naming_limits(_words_of(size, self._nbytes, self.folder)):
                return self._part(size)

    def _part(self, nbytes: int) -> memoryview:
        os.ftruncate(self._descriptor, self._nbytes + nbytes)
        return memoryview(mmap.mmap(self._descriptor, nbytes, offset=self._nbytes))

    def _tensor(self, place: memoryview, nbytes: int) -> torch.Tensor:
        # Create a separate view that only the tensor keeps alive. Its end shows that no tensor uses
        # the place any more, so that the place can be reused.
        view = place[:]
        memory = torch.frombuffer(view, dtype=torch.uint8)
        self._live.add(memory.data_ptr())
        gone = weakref.finalize(view, _let_go, self._free, self._live, place, memory.data_ptr())
        gone.atexit = False
        return memory[:nbytes]


def home_of(folder: str) -> Path:
    """Return the folder for a model's files; by default that of temporary files."""
    return Path(folder or tempfile.gettempdir())


def warn_of_memory(folder: Path) -> None:
    """Warn if files in a folder are themselves in memory, as far as the kernel shows it."""
    device, lines = folder.stat().st_dev, list[str]()
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # Number, parent, device, ..., a hyphen, the file system type; see proc(5).
    found = (line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted)
    kind = next(found, "")
    if kind in _IN_MEMORY:
        _log.warning(
            "the file for the model is in %s, which is itself in memory (%s), so it saves no "
            "memory. Choose a folder on a disk with --offload-dir or ONEFOLD_OFFLOAD_DIR",
            folder,
            kind,
        )


def new_disk_file(folder: Path, nbytes: int) -> int:
    """Create a file of zeros without a name; return its descriptor, which the caller closes.

    Raises:
        OSError: the file cannot be created there, or the disk has no space for it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="onefold-") as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot create a file in {folder}: {error.strerror}. Choose another folder, on a "
            f"disk, with --offload-dir or ONEFOLD_OFFLOAD_DIR",
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
    beside = f", in addition to {before:,} bytes there" if before else ""
    return f"{nbytes:,} more bytes for the model in {folder}{beside}"


def _let_go(
    free: dict[int, list[memoryview]], live: set[int], place: memoryview, address: int
) -> None:
    live.discard(address)
    free[len(place)].append(place)


_PIECE_BYTES = 4 << 20
"""Size of a mapped block. Few blocks: a process may have about 65,000 mappings."""


_MAP_FIXED = 0x10
"""Value on Linux on all CPUs that PyTorch supports; Python does not define it."""


_FAILED = ctypes.c_void_p(-1).value


class SparseAllocator:
    """Tensors without disk space; files without names provide the space once they get values.

    Args:
        folder: folder of the files.
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
        """Return (nbytes,) uint8 of 0xFF, not to be read or written before `provide`.

        Raises:
            OSError: this process may not use more memory or mappings.
        """
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with naming_limits(f"{size:,} bytes for a tensor without values"):
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            for start in range(0, size, _PIECE_BYTES):
                piece = memory[start : start + _PIECE_BYTES]
                map_over(piece.data_ptr(), piece.numel(), mmap.MAP_PRIVATE, self._unknown)
        return memory[:nbytes]

    def provide(self, memory: torch.Tensor) -> None:
        """Reserve disk space for memory returned by `room`, which then holds zeros.

        Raises:
            OSError: the disk has no space.
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
    """Map the beginning of a file over memory that this process mapped before.

    Python's object for that memory will unmap this as well.

    Raises:
        OSError: this process may not use more memory or mappings.
    """
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    integer = ctypes.c_int
    map_at.restype = ctypes.c_void_p
    map_at.argtypes = (ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_long)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if map_at(address, nbytes, access, kind | _MAP_FIXED, descriptor, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

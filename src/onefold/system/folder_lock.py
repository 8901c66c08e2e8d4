"""Prevents two processes from working in the folder of one run.

Note: which kind of lock
------------------------
Linux has three. A ``lockf`` lock belongs to the process, and is lost as soon as the process closes
any descriptor of the file: a script that reads or copies the folder would release it. ``flock``
locks are not shared between hosts by all file servers. A lock of the *open file description*
(``F_OFD_SETLK``) has neither problem, and is used here. It lasts until every copy of the descriptor
is closed, so a forked child, such as a loader worker, closes its copy at once: otherwise it could
hold the lock after the run ends. The kernel does not report the holder of such a lock, so the
holder writes its process id and host into the file.

Note: other users
-----------------
A user who can open a file for reading can hold a shared lock on it, and thus block the run forever.
So the lock is on a separate file that only its owner can open; no other file of the folder is ever
locked.

Note: a lock without a process
------------------------------
The kernel releases a lock when its process ends. A lock that a crashed host held on a file server
may stay for a while, and on old servers forever, so the error names the file, which may be removed.
On a file server without locks (NFS with ``nolock`` or ``local_lock``), hosts do not see each
other's locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from onefold.errors import LaunchError
from onefold.system.safe_files import NO_LOCKS, open_regular

__all__ = ["FolderLock", "lock_of_checkpoints"]

LOCK = ".lock"
"""Name of the lock file in the folder."""

_log = logging.getLogger("onefold")
_TRIES = 5
_PAUSE_S = 0.2
_FLOCK = struct.Struct("hhqqi4x")
"""A ``struct flock`` of 64-bit Linux: type, whence, start, length, process."""
_ASKED = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""An exclusive lock of the whole file. A query with it finds holders of both lock types."""
_MOST_BYTES = 512


class FolderLock:
    """The lock of a folder, held by at most one process.

    Args:
        folder: the folder.
        instead: what the user can do if another process holds the lock, for errors.
        strict: whether to refuse another user's lock file. False if several users may work in turn,
            or if the file system assigns all files to one user.
        name: name of the lock file.
    """

    def __init__(
        self, folder: Path, *, instead: str, strict: bool = True, name: str = LOCK
    ) -> None:
        self._path = folder / name
        self._instead = instead
        self._strict = strict
        self._release: weakref.finalize[[int, Path], FolderLock] | None = None
        """Releases the lock: on request, with this object, or when the process ends."""

    def refuse_held(self, within_s: float = 0.0) -> None:
        """Raise if another process is working in the folder; take no lock.

        Args:
            within_s: seconds to wait for that process. It may end soon, because a run that was
                stopped saves itself while the next run starts.

        Raises:
            LaunchError: another process is working in the folder, or another user owns the file.
        """
        self._in_time(self._find_holder, within_s)

    def acquire(self, within_s: float = 0.0) -> None:
        """Take the lock until `let_go`, or until this process ends.

        Arguments and errors are those of `refuse_held`.
        """
        self._in_time(self._acquire, within_s)

    def let_go(self) -> None:
        """Remove the lock file and release the lock, if this process holds it."""
        if self._release is not None:
            self._release()
            self._release = None

    def _in_time(self, holder_after: Callable[[], str | None], within_s: float) -> None:
        """Repeat an action until it finds no other holder of the lock, or until time is up."""
        end_s, said = time.monotonic() + within_s, False
        while (holder := holder_after()) is not None:
            if time.monotonic() >= end_s:
                waited = f"; waited for {within_s:g} s" if within_s else ""
                raise LaunchError(
                    f"{self._path.parent}: another process is using this folder "
                    f"({holder}){waited}. Wait until it ends, or {self._instead}. If its host has "
                    f"crashed, remove {self._path}"
                )
            if not said:
                _log.warning("waiting for %s, which is using %s", holder, self._path.parent)
            said = True
            time.sleep(_PAUSE_S)

    def _find_holder(self) -> str | None:
        try:
            descriptor = self._open_own(os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            return _holder(descriptor)
        finally:
            os.close(descriptor)

    def _acquire(self) -> str | None:
        # Limited: a process that keeps replacing the file would block this one forever.
        for _ in range(_TRIES):
            with contextlib.ExitStack() as leaving:
                descriptor = self._open_own(os.O_RDWR | os.O_CREAT)
                leaving.callback(os.close, descriptor)
                try:
                    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _ASKED)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        if (holder := _holder(descriptor)) is not None:
                            return holder
                        time.sleep(_PAUSE_S / 10)  # it was released in the meantime
                        continue
                    _log.warning(
                        "%s is on a file system without locks, so onefold would not notice two "
                        "simultaneous runs there",
                        self._path.parent,
                    )
                # Another process may have removed the file after this one opened it. That process
                # would then lock a new file, and both would appear to be alone.
                if _is_at(descriptor, self._path):
                    with contextlib.suppress(OSError):  # full disk: only messages need this text
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
                    leaving.pop_all()
                    self._release = weakref.finalize(self, _release, descriptor, self._path)
                    _held[self] = descriptor
                    return None
        raise LaunchError(f"{self._path} was replaced by another file at each attempt to lock it")

    def _open_own(self, flags: int) -> int:
        try:
            descriptor = open_regular(self._path, flags, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LaunchError(
                f"{self._path}: {error.strerror}. onefold needs a lock file that this user owns. "
                f"If no other user's run is active there, remove the file; if one is, "
                f"{self._instead}"
            ) from error
        # Another user could lock a file that they own at any time.
        owner = os.fstat(descriptor).st_uid
        if self._strict and owner != os.geteuid():
            os.close(descriptor)
            raise LaunchError(
                f"{self._path} must belong to user {os.geteuid()}, but belongs to user {owner}, "
                f"whose run may be active. Wait until it ends, or {self._instead}"
            )
        if owner == os.geteuid():
            # A user who can open the file could block the run. A copied file may have other modes.
            with contextlib.suppress(PermissionError):  # some file systems have no modes
                os.fchmod(descriptor, 0o600)
        return descriptor


def lock_of_checkpoints(directory: Path) -> FolderLock:
    """Return the lock of a directory in which one run saves itself (``--checkpoint``)."""
    # Several users may resume a run in turn, and a file server may assign files to one user.
    return FolderLock(directory, instead="give this run another --checkpoint", strict=False)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str | None:
    """Describe the process that holds the lock; None if no other process does."""
    try:
        kind = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _ASKED))[0]
    except OSError as error:
        return None if error.errno in NO_LOCKS else "an unknown process"
    if kind == fcntl.F_UNLCK:
        return None
    pid, _, host = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").partition(" ")
    if not (pid.isdecimal() and host.isprintable()):  # its holder is still writing it
        return "an unknown process"
    if host != socket.gethostname():
        return f"process {pid} on {host}"
    return "this process itself" if int(pid) == os.getpid() else f"process {pid}"


def _release(descriptor: int, path: Path) -> None:
    # Remove the name before the lock: the next process to lock this file sees that it is unlinked.
    # The folder may not exist any more.
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)


_held: weakref.WeakKeyDictionary[FolderLock, int] = weakref.WeakKeyDictionary()
"""Descriptors of the locks that this process holds."""


def _leave_to_parent() -> None:
    """Close a forked child's copies of the descriptors, which would keep the locks."""
    for lock, descriptor in list(_held.items()):
        if lock._release is not None and lock._release.detach():
            os.close(descriptor)
        lock._release = None


os.register_at_fork(after_in_child=_leave_to_parent)

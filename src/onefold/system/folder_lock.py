"""Keeps two processes from working in the folder of one run.

Note: which kind of lock
------------------------
Linux has three. One by ``lockf`` belongs to the process, and is lost as soon as the process closes
any descriptor of the file: a script that reads or copies the folder would give it up. One by
``flock`` is not shared between hosts by all file servers. One of the *open file description*
(``F_OFD_SETLK``) is neither, and is used here. It lasts until every copy of the descriptor is
closed, so a forked child, such as a loader's worker, closes its copy at once: else it could hold
the lock for longer than the run lasts. The kernel does not say who holds such a lock, so the holder
writes its process and host into the file.

Note: strangers
---------------
Whoever may open a file for reading may hold a shared lock on it, and so keep the run from starting
for ever. So the lock is on a file of its own, which only its owner can open; no other file of the
folder is ever locked.

Note: a lock without a process
------------------------------
The kernel frees a lock with its process. What a host that has crashed held on a file server may
stay for a while, and with old servers for ever: so the error names the file, which may be removed.
A file server without locks (NFS with ``nolock`` or ``local_lock``) keeps hosts from seeing each
other's.
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
"""Name of the file in the folder."""

_log = logging.getLogger("onefold")
_TRIES = 5
_PAUSE_S = 0.2
_FLOCK = struct.Struct("hhqqi4x")
"""A ``struct flock`` of 64-bit Linux: type, whence, start, length, process."""
_ASKED = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""An exclusive lock of the whole file; asked about, it finds the holders of both kinds."""
_MOST_BYTES = 512


class FolderLock:
    """The lock of a folder, which one process may hold.

    Args:
        folder: the folder.
        instead: what the user may do if another one has it, for errors.
        strict: whether to refuse a file of another user; not where several users may work in turn,
            or where the system gives all files to somebody else.
        name: of the file in the folder.
    """

    def __init__(
        self, folder: Path, *, instead: str, strict: bool = True, name: str = LOCK
    ) -> None:
        self._path = folder / name
        self._instead = instead
        self._strict = strict
        self._release: weakref.finalize[[int, Path], FolderLock] | None = None
        """Lets go of the lock: when it is asked to, with this object, or as the process ends."""

    def refuse_held(self, within_s: float = 0.0) -> None:
        """Refuse a folder in which another process is at work; locks nothing.

        Args:
            within_s: how long to wait for its end. It may be near: a run that was stopped saves
                itself while the next one starts.

        Raises:
            LaunchError: another process is working in the folder, or the file is not ours.
        """
        self._in_time(self._find_holder, within_s)

    def acquire(self, within_s: float = 0.0) -> None:
        """Take the lock, until `let_go` or until this process ends; shut out everybody else.

        Arguments and errors are those of `refuse_held`.
        """
        self._in_time(self._acquire, within_s)

    def let_go(self) -> None:
        """Remove the file and let others take the lock, if this process holds it."""
        if self._release is not None:
            self._release()
            self._release = None

    def _in_time(self, holder_after: Callable[[], str | None], within_s: float) -> None:
        """Repeat an action until no other process holds the lock after it, or time is up."""
        end_s, said = time.monotonic() + within_s, False
        while (holder := holder_after()) is not None:
            if time.monotonic() >= end_s:
                waited = f"; waited for {within_s:g} s" if within_s else ""
                raise LaunchError(
                    f"{self._path.parent}: another process is at work in this folder ({holder}); "
                    f"wait for its end, or {self._instead}{waited}. If its host has crashed, "
                    f"remove {self._path}"
                )
            if not said:
                _log.warning("%s is at work in %s: waiting", holder, self._path.parent)
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
        # With a limit, or somebody who keeps exchanging the file would keep us here for ever.
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
                        time.sleep(_PAUSE_S / 10)  # it was let go of meanwhile
                        continue
                    _log.warning(
                        "%s is on a file system without locks: two runs there at once would not be "
                        "noticed",
                        self._path.parent,
                    )
                # Another process may have removed the file between its opening and the lock. It
                # would then lock a new one, and both would believe that they are alone.
                if _is_at(descriptor, self._path):
                    with contextlib.suppress(OSError):  # a full disk: only messages need it
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
                    leaving.pop_all()
                    self._release = weakref.finalize(self, _release, descriptor, self._path)
                    _held[self] = descriptor
                    return None
        raise LaunchError(
            f"{self._path}: expected a file that stays where it is, got another one each time"
        )

    def _open_own(self, flags: int) -> int:
        try:
            descriptor = open_regular(self._path, flags, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LaunchError(
                f"{self._path}: {error.strerror}. onefold needs a file of this user's own there, "
                f"and another user's run may be at work: remove it if not, or {self._instead}"
            ) from error
        # A file of another user could be held by that user at any time.
        owner = os.fstat(descriptor).st_uid
        if self._strict and owner != os.geteuid():
            os.close(descriptor)
            raise LaunchError(
                f"{self._path}: expected a file of user {os.geteuid()}, got one of user {owner}: "
                f"another user's run is there. Wait for its end, or {self._instead}"
            )
        if owner == os.geteuid():
            # Whoever may open it could hold it, and so hold up the run. It may have been copied.
            with contextlib.suppress(PermissionError):  # there are file systems without modes
                os.fchmod(descriptor, 0o600)
        return descriptor


def lock_of_checkpoints(directory: Path) -> FolderLock:
    """The lock of a directory in which one run saves itself (``--checkpoint``)."""
    # Several users may go on with a run in turn, and a file server may give files to one user.
    return FolderLock(directory, instead="give this run another --checkpoint", strict=False)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str | None:
    """Find out who keeps us from locking, in words; None if nobody does."""
    try:
        kind = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _ASKED))[0]
    except OSError as error:
        return None if error.errno in NO_LOCKS else "an unknown process"
    if kind == fcntl.F_UNLCK:
        return None
    pid, _, host = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").partition(" ")
    if not (pid.isdecimal() and host.isprintable()):  # it is being written
        return "an unknown process"
    if host != socket.gethostname():
        return f"process {pid} on {host}"
    return "this process itself" if int(pid) == os.getpid() else f"process {pid}"


def _release(descriptor: int, path: Path) -> None:
    # The name goes before the lock: whoever gets it afterwards finds that it is at no path.
    # The folder may be gone by now.
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)


_held: weakref.WeakKeyDictionary[FolderLock, int] = weakref.WeakKeyDictionary()
"""The descriptors of the locks of this process."""


def _leave_to_parent() -> None:
    """In a child that was just forked: close its copies of descriptors, which hold the locks."""
    for lock, descriptor in list(_held.items()):
        if lock._release is not None and lock._release.detach():
            os.close(descriptor)
        lock._release = None


os.register_at_fork(after_in_child=_leave_to_parent)

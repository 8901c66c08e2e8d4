"""Keeps two processes from working in the folder of one run.

Note: which kind of lock
------------------------
Linux has two. One by ``flock`` belongs to the open file: every process that was forked meanwhile,
such as a loader's worker, holds it too, and may outlive the run. One by ``lockf`` belongs to the
process and ends with it, and the kernel tells who holds it, so the error can name a process. Its
trap: it is lost as soon as the process closes any descriptor of the file. So the file is opened
here and nowhere else, and the early look at it is over before the lock is taken.

Note: strangers
---------------
Whoever may open the file for reading may hold a shared lock on it, and so keep the run from
starting for ever. So the file is made readable for its owner alone. One that an earlier version
left open to all may be held by a stranger: it is removed, and a new one is made in its place.

Note: a lock without a process
------------------------------
The kernel frees a lock with its process. What a host that has crashed held on a file server may
stay for a while, and with old servers for ever: so the error names the file, which may be removed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import time
from pathlib import Path

from onefold.errors import LaunchError

__all__ = ["LOCK", "FolderLock", "lock_of_checkpoints"]

LOCK = ".lock"
"""Name of the file in the folder."""

_log = logging.getLogger("onefold")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 5
_PAUSE_S = 0.2
_FLOCK = struct.Struct("hhqqi4x")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """The lock of a folder, which one process may hold.

    Args:
        folder: the folder.
        instead: what the user may do if another one has it, for errors.
    """

    def __init__(self, folder: Path, *, instead: str) -> None:
        self._path = folder / LOCK
        self._instead = instead
        self._descriptor: int | None = None
        self._process = 0

    def look(self) -> None:
        """Refuse a folder in which another process is at work; several may look at once.

        Raises:
            LaunchError: another process is working in the folder, or the file is not ours.
        """
        try:
            descriptor = self._locked(fcntl.LOCK_SH, make=False)
        except FileNotFoundError:
            return
        os.close(descriptor)

    def look_in_time(self, limit_s: float) -> None:
        """Do as `look`, and wait for another process that is at work for so many seconds.

        It may be about to end: a run that was stopped saves itself while the next one starts.

        Raises:
            LaunchError: it has not ended by then, or the file is not ours.
        """
        end_s, said = time.monotonic() + limit_s, False
        while True:
            try:
                return self.look()
            except _Held as held:
                if time.monotonic() >= end_s:
                    raise LaunchError(f"{held}; waited for {limit_s:g} s") from held
                if not said:
                    _log.warning("%s is at work in %s: waiting", held.who, self._path.parent)
                said = True
            time.sleep(_PAUSE_S)

    def take(self) -> None:
        """Take the lock, until `let_go` or until this process ends; shut out everybody else.

        Raises:
            LaunchError: another process is working in the folder, or the file is not ours.
        """
        self._descriptor = self._locked(fcntl.LOCK_EX, make=True)
        self._process = os.getpid()
        atexit.register(self.let_go)

    def let_go(self) -> None:
        """Remove the file and let others take the lock, if this process holds it."""
        if self._descriptor is None or os.getpid() != self._process:
            return
        descriptor, self._descriptor = self._descriptor, None
        atexit.unregister(self.let_go)
        # The name goes before the lock: whoever gets it afterwards finds that it is at no path.
        # The folder may be gone by now.
        with contextlib.suppress(OSError):
            if _is_at(descriptor, self._path):
                self._path.unlink()
        os.close(descriptor)

    def _locked(self, kind: int, *, make: bool) -> int:
        """Return a descriptor that holds the lock until it is closed."""
        # With a limit, or somebody who keeps exchanging the file would keep us here for ever.
        for _ in range(_TRIES):
            descriptor = self._open_own(make=make)
            try:
                if self._lock(descriptor, kind):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise LaunchError(
            f"{self._path}: expected a file that stays where it is, got another one each time"
        )

    def _lock(self, descriptor: int, kind: int) -> bool:
        """Lock an open file; return whether it is locked, and still the one at the path."""
        try:
            fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _log.warning(
                    "%s is on a file system without locks: two runs there at once would not be "
                    "noticed",
                    self._path.parent,
                )
                return True
            self._replace_if_a_strangers(descriptor, error)
            return False
        # Another process may have removed the file between its opening and the lock. It would then
        # lock a new one, and both would believe that they are alone.
        return _is_at(descriptor, self._path)

    def _open_own(self, *, make: bool) -> int:
        try:
            descriptor = os.open(self._path, _FLAGS | (os.O_CREAT if make else 0), 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            came = "a link" if error.errno == errno.ELOOP else error.strerror
            raise LaunchError(
                f"{self._path}: expected a file of this user's own, got {came}: another user's run "
                f"may be there. Remove it if not, or {self._instead}"
            ) from error
        try:
            self._require_own(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _require_own(self, descriptor: int) -> None:
        """Refuse what is no file, or that of another user; keep others from opening it."""
        # Asked of what is open: the path may stand for something else by now. A file of another
        # user could be held by him at any time.
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode):
            raise LaunchError(
                f"{self._path}: expected a file, got a FIFO or a device: remove it, or "
                f"{self._instead}"
            )
        if there.st_uid != os.geteuid():
            raise LaunchError(
                f"{self._path}: expected a file of user {os.geteuid()}, got one of user "
                f"{there.st_uid}: another user's run is there. Wait for its end, or {self._instead}"
            )
        # An earlier version left the file readable for all; see the note on strangers.
        try:
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise LaunchError(
                f"{self._path}: expected a file that can be kept from other users, got "
                f"{error.strerror}: choose a folder on another file system"
            ) from error

    def _replace_if_a_strangers(self, descriptor: int, error: OSError) -> None:
        """Remove a lock's file that a stranger holds; refuse any other holder."""
        holder = _holder(descriptor)
        if holder and _user_of(holder) not in (None, 0, os.geteuid()):
            path = self._path
            _log.warning("%s was held by process %d of another user: it is replaced", path, holder)
            try:
                # Unless somebody else has done the same: the new file is not a stranger's.
                if _is_at(descriptor, path):
                    path.unlink(missing_ok=True)
            except OSError as failure:
                raise LaunchError(
                    f"{path}: process {holder} of another user holds this file, and it cannot be "
                    f"removed ({failure.strerror}): {self._instead}"
                ) from failure
            return
        who = f"process {holder}" if holder else f"{error.strerror}; after a crash, remove {LOCK}"
        raise _Held(
            who,
            f"{self._path.parent}: another process is at work in this folder ({who}); wait for its "
            f"end, or {self._instead}",
        ) from error


class _Held(LaunchError):
    """Another process has the lock."""

    def __init__(self, who: str, message: str) -> None:
        super().__init__(message)
        self.who = who


def lock_of_checkpoints(directory: Path) -> FolderLock:
    """The lock of a directory in which one run saves itself (``--checkpoint``)."""
    return FolderLock(directory, instead="give this run another --checkpoint")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> int:
    """Find the process that keeps us from locking; 0 if the system does not know."""
    # Asking for an exclusive lock finds the holders of both kinds. It is a struct flock of 64-bit
    # Linux: type, whence, start, length, process.
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return 0
    return pid if kind != fcntl.F_UNLCK and pid > 0 else 0


def _user_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None

"""Keeps two processes from working in the folder of one run. Nothing here waits.

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
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import struct
from pathlib import Path

from onefold.errors import LaunchError

__all__ = ["open_lock"]

_log = logging.getLogger("onefold")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 5
_FLOCK = struct.Struct("hhqqi4x")


def open_lock(path: Path, *, make: bool) -> int:
    """Take the lock of a folder, and return a descriptor that holds it until it is closed.

    Args:
        path: path of the lock's file.
        make: whether to create the file if it is missing, and shut out everybody else. Otherwise
            this is only a look at whether the lock is free, which several may take at once.

    Raises:
        FileNotFoundError: the file is missing, and ``make`` is False.
        LaunchError: another process is working in the folder, or the file is not ours.
    """
    # With a limit, or somebody who keeps exchanging the file would keep us here for ever.
    for _ in range(_TRIES):
        descriptor = _open_own(path, make=make)
        try:
            if _lock(path, descriptor, fcntl.LOCK_EX if make else fcntl.LOCK_SH):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise LaunchError(f"{path}: expected a file that stays where it is, got another one each time")


def _lock(path: Path, descriptor: int, kind: int) -> bool:
    """Lock an open file; return whether it is locked, and still the one at the path.

    Raises:
        LaunchError: another process holds it.
    """
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
        # Another process may have removed the file between its opening and the lock. It would
        # then lock a new one, and both would believe that they are alone.
        return _is_at(descriptor, path)
    except OSError as error:
        _replace_if_a_strangers(path, descriptor, error)
        return False


def _open_own(path: Path, *, make: bool) -> int:
    try:
        descriptor = os.open(path, _FLAGS | (os.O_CREAT if make else 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        came = "a link" if error.errno == errno.ELOOP else error.strerror
        raise LaunchError(
            f"{path}: expected a file of this user's own, got {came}: another user's run may be "
            f"there. Remove it if not, or give this run another --name"
        ) from error
    try:
        _require_own(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(path: Path, descriptor: int) -> None:
    """Refuse what is no file, or that of another user; keep others from opening it.

    Raises:
        LaunchError: it is not a file of this user's, or its permissions cannot be set.
    """
    # Asked of what is open: the path may stand for something else by now. A file of another user
    # could be held by him at any time.
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode):
        raise LaunchError(
            f"{path}: expected a file, got a FIFO or a device: remove it, or give this run another "
            f"--name"
        )
    if there.st_uid != os.geteuid():
        raise LaunchError(
            f"{path}: expected a file of user {os.geteuid()}, got one of user {there.st_uid}: "
            f"another user's run is there. Give this run another --name"
        )
    # An earlier version left the file readable for all; see the note on strangers.
    try:
        os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise LaunchError(
            f"{path}: expected a file that can be kept from other users, got {error.strerror}: "
            f"--runs names a folder on another file system"
        ) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _replace_if_a_strangers(path: Path, descriptor: int, error: OSError) -> None:
    """Remove a lock's file that a stranger holds.

    Raises:
        LaunchError: the holder is a process of ours, of root, or unknown; or the file cannot be
            removed.
    """
    holder = _holder(descriptor)
    if holder and _user_of(holder) not in (None, 0, os.geteuid()):
        _log.warning("%s was held by process %d of another user: it is replaced", path, holder)
        try:
            # Unless somebody else has done the same: the new file is not a stranger's.
            if _is_at(descriptor, path):
                path.unlink(missing_ok=True)
        except OSError as failure:
            raise LaunchError(
                f"{path}: process {holder} of another user holds this file, and it cannot be "
                f"removed ({failure.strerror}): give this run another --name"
            ) from failure
        return
    who = f"process {holder}" if holder else error.strerror
    raise LaunchError(
        f"{path.parent}: another process is at work in this folder ({who}); wait for its end, or "
        f"give this run another --name"
    ) from error


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

"""Keeps two processes from being at work in the folder of one run.

The lock's file can be opened by its owner alone, so nobody else can hold it; where one of a former
version could be, and somebody does, another file takes its place. Nothing here waits.
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
    """Take the lock of a folder; closing what comes back, or the end of the process, lets go of it.

    Args:
        path: of the lock's file.
        make: the file where it is not there; if not, this is a look, which several may take.

    Raises:
        FileNotFoundError: there is none, and none was to be made.
        LaunchError: another process is at work in the folder, or the file is not ours.
    """
    kind = fcntl.LOCK_EX if make else fcntl.LOCK_SH
    for _ in range(_TRIES):
        descriptor = _open_own(path, make=make)
        try:
            fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except OSError as error:
            _replace_if_a_strangers(path, descriptor, error)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise LaunchError(f"{path}: expected a file that stays where it is, got another one each time")


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
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid():
        os.close(descriptor)
        raise LaunchError(
            f"{path}: expected a file of user {os.geteuid()}, got one of user {there.st_uid}: "
            f"another user's run is there. Give this run another --name"
        )
    os.fchmod(descriptor, 0o600)
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _replace_if_a_strangers(path: Path, descriptor: int, error: OSError) -> None:
    """Remove a file that another user's process holds; one of ours is at work.

    Raises:
        LaunchError: one of ours is.
    """
    holder = _holder(descriptor)
    if holder and _user_of(holder) not in (None, 0, os.geteuid()):
        _log.warning("%s was held by process %d of another user: it is replaced", path, holder)
        if _is_at(descriptor, path):
            path.unlink()
        return
    os.close(descriptor)
    who = f"process {holder}" if holder else error.strerror
    raise LaunchError(
        f"{path.parent}: another process is at work in this folder ({who}); wait for its end, or "
        f"give this run another --name"
    ) from error


def _holder(descriptor: int) -> int:
    """The process that holds a lock which cannot be had; 0 where the system does not know."""
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

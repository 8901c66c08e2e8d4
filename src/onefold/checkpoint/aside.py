"""Names beside a checkpoint, under which it comes and goes; see `onefold.checkpoint.folder`.

Note: a lock file that is removed
---------------------------------
A lock lies on the inode, not on the name. Between opening a lock file and locking it, its owner may
have removed it, and another process may have made a new one under the same name: then two processes
hold locks on two inodes, and each takes the name for its own. So after locking, the inode of the
descriptor is compared with what lies under the name (`_locked`), and the owner removes the name
*before* it unlocks: whoever gets the lock afterwards finds nothing there, or another inode.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from onefold.checkpoint.manifest import RUN, TENSOR_FILES
from onefold.system.safe_files import NO_LOCKS

__all__ = ["BESIDE", "check_ours", "delete", "names_beside", "sweep", "sync"]

BESIDE = re.compile(r"\.(step-[0-9]{8,})\.([0-9a-f]{8})\.(part|old|gone|lock)")


def delete(folder: Path) -> None:
    """Remove a checkpoint, unless its folder holds anything else."""
    if folder.is_symlink() or _strange_files(folder):
        return
    # Renamed first, so that no half of it is ever found under a checkpoint's name. Another process
    # may be deleting it as well: one rename succeeds.
    with contextlib.suppress(FileNotFoundError), names_beside(folder) as beside:
        os.rename(folder, beside("gone"))
        shutil.rmtree(beside("gone"))


def sweep(directory: Path) -> None:
    """Tidy up after processes that were killed while writing; what cannot be tidied up stays."""
    left: dict[tuple[str, str], list[Path]] = {}
    for path in directory.iterdir():
        match = BESIDE.fullmatch(path.name)
        if match is not None:
            folders = left.setdefault((match[1], match[2]), [])
            if match[3] != "lock":
                folders.append(path)
    for (name, word), folders in left.items():
        lock = _lock_of(directory / name, word)
        # Under the lock, so that a folder of a living process is never touched.
        with contextlib.suppress(OSError):
            if (descriptor := _locked(lock, is_new=False)) is None:
                continue
            try:
                for folder in filter(_is_our_leftover, folders):
                    # Killed between the two renames of a replacement: the old checkpoint is the
                    # only one there is.
                    if folder.suffix == ".old" and not (directory / name).exists():
                        os.rename(folder, directory / name)
                    else:
                        shutil.rmtree(folder)
            finally:
                _let_go(descriptor, lock)


def _is_our_leftover(folder: Path) -> bool:
    """Whether it is a folder of this user that holds nothing but parts of a checkpoint."""
    # Not `stat`, which would follow a link to a folder that was never ours.
    there = folder.lstat()
    ours = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()
    return ours and not _strange_files(folder)


def _lock_of(folder: Path, word: str) -> Path:
    return folder.with_name(f".{folder.name}.{word}.lock")


@contextlib.contextmanager
def names_beside(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Yield a function from endings to names beside a folder that are this process's alone."""
    descriptor = None
    # Between making the file and locking it, a sweep may have taken it for abandoned.
    while descriptor is None:
        word = uuid.uuid4().hex[:8]
        lock = _lock_of(folder, word)
        descriptor = _locked(lock, is_new=True)
    try:
        yield lambda ending: folder.with_name(f".{folder.name}.{word}.{ending}")
    finally:
        _let_go(descriptor, lock)


def _locked(lock: Path, *, is_new: bool) -> int | None:
    """Open and lock a lock file, of a new name or of one that somebody may have left behind.

    Returns:
        Its descriptor; None if the file is another process's, or no longer under its name.

    Raises:
        OSError: it cannot be opened, or whether somebody holds it cannot be found out.
    """
    # O_CREAT, as an abandoned lock may be gone already; O_NOFOLLOW and O_NONBLOCK, as anyone may
    # have put a link or a pipe under this name.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(lock, flags | (os.O_EXCL if is_new else 0), 0o600)
    with contextlib.ExitStack() as leaving:
        leaving.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Some file systems have no locks: what is new there is written all the same.
                if not is_new or error.errno not in NO_LOCKS:
                    raise
            there = os.fstat(descriptor)
            # A file server may give a new file to another user.
            is_ours = is_new or there.st_uid == os.geteuid()
            if is_ours and os.path.samestat(there, lock.lstat()):
                leaving.pop_all()
                return descriptor
    return None


def _let_go(descriptor: int, lock: Path) -> None:
    # The name goes before the lock; see the note at the head. The folder may be gone by now.
    with contextlib.suppress(OSError):
        lock.unlink()
    # Closing is not enough: a process forked meanwhile shares the open file, and so the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def check_ours(folder: Path) -> None:
    """Refuse to write a checkpoint in place of anything else.

    Raises:
        FileExistsError: the folder is a link, or holds files that are no part of a checkpoint.
    """
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link: expected a folder of its own. Save elsewhere")
    if folder.exists() and (strange := _strange_files(folder)):
        raise FileExistsError(
            f"{folder} holds {', '.join(strange)}, which is no part of a checkpoint: expected a "
            f"folder of its own. Save elsewhere, or move these away"
        )


def _strange_files(folder: Path) -> list[str]:
    return sorted({path.name for path in folder.iterdir()} - {RUN, *TENSOR_FILES})


def sync(directory: Path) -> None:
    """Bring the names in a directory to the disk: a file's own sync does not include its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

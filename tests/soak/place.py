"""Where a run takes place: folders with files of others, and a disk and a shared memory of its own.

The disk and the memory are small, and seen by this process and its children alone. Only root can
have them; for others both are a folder and what the host has.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Place", "can_mount", "has_own_mounts", "separate_mounts"]

_CLONE_NEWNS = 0x00020000
_DISK, _MEMORY = "6m", "64m"
_FOREIGN = "of somebody else\n"
_separate = False


def can_mount() -> bool:
    """Whether this process may have mounts of its own."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def has_own_mounts() -> bool:
    """Whether it has."""
    return _separate


def separate_mounts() -> None:
    """Have mounts of its own from now on, with an empty shared memory."""
    global _separate
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "expected to be able to have mounts of its own")
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", f"size={_MEMORY}", "shm", "/dev/shm")
    _separate = True


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


class Place:
    """Folders for one run and those that go on from it.

    Args:
        name: no other one has it; all processes of the runs have it in their environment.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.root = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
        self.disk = self.root / "disk"
        self.temporary = self.root / "temporary"
        self.logs = self.root / "logs"
        self.profile = self.root / "profile"
        self.checkpoints = self.disk / "checkpoints"
        self.said = ""
        """What runs have said here; they may have named what they keep, such as logs."""
        for folder in (self.disk, self.temporary, self.logs, self.profile):
            folder.mkdir()
        if has_own_mounts():
            _mount("-t", "tmpfs", "-o", f"size={_DISK}", "disk", str(self.disk))
        self.checkpoints.mkdir()
        self._notes = [folder / "notes.txt" for folder in self._all()]
        for note in self._notes:
            note.write_text(_FOREIGN)
        self._bystander = subprocess.Popen(["sleep", "3600"])

    def _all(self) -> list[Path]:
        return [self.root, self.temporary, self.logs, self.profile, self.checkpoints]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._bystander.kill()
        self._bystander.wait()
        if has_own_mounts():
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)
            for name in os.listdir("/dev/shm"):
                Path("/dev/shm", name).unlink()
        shutil.rmtree(self.root)

    def forget(self, folder: Path) -> None:
        """The fault itself has removed this one."""
        self._notes = [note for note in self._notes if folder not in note.parents]

    def processes(self) -> list[int]:
        """Those of the runs that are still there."""
        mark = f"SOAK={self.name}\0".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError):
                    if mark in Path("/proc", entry, "environ").read_bytes():
                        found.append(int(entry))
        return found

    def touched(self) -> list[str]:
        """What of others is not as it was."""
        wrong = [
            f"{note.relative_to(self.root)} of somebody else was touched"
            for note in self._notes
            if not note.is_file() or note.read_text() != _FOREIGN
        ]
        if self._bystander.poll() is not None:
            wrong.append("a process of somebody else was ended")
        return wrong

    def left(self, *, killed: bool, ended_well: bool = False) -> list[str]:
        """What the runs have left behind where nothing of them should be.

        Args:
            killed: nobody was left to tidy up; what has a name in the temporary folder may stay.
            ended_well: no device was killed; else a folder of Python's own (pymp-...) may stay,
                which the process of a loader's worker removes at its end.
        """
        wrong = [f"process {pid} is left" for pid in self.processes()]
        if not killed and self.temporary.is_dir():
            names = {path.name for path in self.temporary.iterdir()} - {"notes.txt"}
            names = {name for name in names if ended_well or not name.startswith("pymp-")}
            names = {name for name in names if f"devices: {self.temporary / name}" not in self.said}
            wrong += [f"{name} is left among temporary files" for name in sorted(names)]
        if has_own_mounts():
            names = set(os.listdir("/dev/shm"))
            if "filled" in names:  # PyTorch does not remove a file for which there was no room
                names = {name for name in names if not name.startswith(("filled", "torch_"))}
            wrong += [f"{name} is left in shared memory" for name in sorted(names)]
        return wrong

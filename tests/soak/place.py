"""Where a run takes place: folders with files of others, and a disk and a shared memory of its own.

The disk and the memory are small, and seen by this process and its children alone. Only root can
have them; for others both are a folder and what the host has.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

__all__ = ["Place", "has_own_mounts", "separate_mounts"]

_CLONE_NEWNS = 0x00020000
_FOREIGN = "of somebody else\n"
_separate = False


def has_own_mounts() -> bool:
    return _separate


def separate_mounts() -> None:
    """Have mounts of its own from now on, with an empty shared memory, if this process may."""
    global _separate
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "expected to be able to have mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    _mount("64m", "/dev/shm")
    _separate = True


def _mount(size: str, place: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", place], check=True)


class Place:
    """Folders for one run and those that go on from it.

    Args:
        name: no other one has it; all processes of the runs have it in their environment.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.root = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
        names = ("disk", "temporary", "logs", "profile")
        self.disk, self.temporary, self.logs, self.profile = (self.root / each for each in names)
        self.checkpoints = self.disk / "checkpoints"
        self.said = ""
        """What runs have said here; they may have named what they keep, such as logs."""
        for folder in (self.disk, self.temporary, self.logs, self.profile):
            folder.mkdir()
        if has_own_mounts():
            _mount("6m", str(self.disk))
        self.checkpoints.mkdir()
        own = (self.root, self.temporary, self.logs, self.profile, self.checkpoints)
        self._notes = [folder / "notes.txt" for folder in own]
        for note in self._notes:
            note.write_text(_FOREIGN)
        self._bystander = subprocess.Popen(["sleep", "3600"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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

    def remove(self, folder: Path) -> None:
        """Remove one of the folders, and no longer expect the note in it."""
        self._notes = [note for note in self._notes if folder not in note.parents]
        shutil.rmtree(folder, ignore_errors=True)

    def processes(self) -> list[int]:
        """Those of the runs that are still there."""
        mark = f"SOAK={self.name}\0".encode()
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if mark in Path("/proc", entry, "environ").read_bytes():
                    found.append(int(entry))
        return found

    def wrong(self, *, killed: bool, ended_well: bool) -> list[str]:
        """What of others is not as it was, and what the runs have left behind.

        Args:
            killed: nobody was left to tidy up; what has a name in the temporary folder may stay.
            ended_well: no device was killed; else a folder of Python's own (pymp-...) may stay,
                which the process of a loader's worker removes at its end.
        """
        wrong = [
            f"{note.relative_to(self.root)} of somebody else was touched"
            for note in self._notes
            if not note.is_file() or note.read_text() != _FOREIGN
        ]
        if self._bystander.poll() is not None:
            wrong.append("a process of somebody else was ended")
        wrong += [f"process {pid} is left" for pid in self.processes()]
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

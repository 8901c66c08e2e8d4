"""Finds a folder for PyTorch's compiled code that no other user can write to.

A compiler's cached code is loaded into this process. By default PyTorch uses a folder of the
temporary directory whose name is predictable, and the user who creates it first owns it.

Note: who can change a folder
-----------------------------
Its owner and root, users with write permission, and users who could replace the folder. So each
folder on the path counts, including folders that links on the path lead through. In a folder with
the sticky bit, such as ``/tmp``, other users can add names but cannot replace ours.

Note: one cache per type of host
--------------------------------
Several hosts often share a home directory, and compiled code depends on the CPU and the compiler,
which PyTorch's keys do not include. So the folder's name depends on both, and on the instructions
that ``ATEN_CPU_CAPABILITY`` allows: code for other instructions reads and writes past the end of
arrays.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

__all__ = [
    "INDUCTOR",
    "check_named",
    "default_of_torch",
    "other_caches",
    "place_of_code",
    "place_of_copy",
]

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
"""Variable for the folder of ``torch.compile``: graphs, kernels, tuning results, and locks."""
_MOST_LINKS = 40


def place_of_code(environment: Mapping[str, str]) -> Path:
    """Return the user's folder for compiled code; create it if necessary.

    Raises:
        ValueError: another user could change it.
        OSError: it cannot be created.
    """
    place = _cache_home(environment) / "onefold" / "compiled" / _kind_of_host(environment)
    check_cache(place, create=True)
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{place} cannot be written to")
    return place


def place_of_copy(environment: Mapping[str, str], url: str) -> Path:
    """Return the user's folder for a copy of checkpoints in object storage; create it if necessary.

    Raises:
        ValueError: another user could change it.
        OSError: it cannot be created.
    """
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    place = _cache_home(environment) / "onefold" / "checkpoints" / name
    check_cache(place, create=True)
    return place


def other_caches(environment: Mapping[str, str], place: Path) -> dict[str, str]:
    """Check PyTorch's other caches, and return new variables for those that are not safe.

    Args:
        environment: variables that the user set.
        place: folder that only this user can write to.

    Raises:
        ValueError: the user chose a folder that another user could change.
    """
    home, cache = Path(os.path.expanduser("~")), _cache_home(environment)
    # The folder used if the variable is not set; None for one in the temporary directory.
    defaults = {
        "TRITON_CACHE_DIR": place,  # under Inductor's
        "TRITON_HOME": home / ".triton",
        "TORCH_EXTENSIONS_DIR": cache / "torch_extensions",
        "PYTORCH_KERNEL_CACHE_PATH": cache / "torch" / "kernels",
        "QUACK_CACHE_DIR": None,
        "TORCH_VENDOR_QUACK_CACHE_DIR": home / ".torch_vendor_quack",
    }
    changes = {}
    for name, default in defaults.items():
        if environment.get(name):
            check_named(name, environment[name])
        elif default is None or not _is_safe(default):
            changes[name] = str(place / name.lower())
    return changes


def check_named(name: str, folder: str) -> None:
    """Refuse a cache folder that the user set in a variable if another user could change it.

    Raises:
        ValueError: another user could change it, or it is not a folder.
    """
    try:
        check_cache(Path(os.path.abspath(folder)), create=True)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{name}={folder} is not safe to load compiled code from: {error}. Choose a folder "
            f"that only you can write to (chmod 700), or unset {name}"
        ) from None


def default_of_torch() -> str:
    """Return the folder that PyTorch chooses by default, and sets in the environment."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), name)


def check_cache(folder: Path, *, create: bool) -> None:
    """Refuse a folder that another user could change; see the note above.

    Args:
        folder: an absolute path.
        create: whether to create missing folders, for this user only; otherwise only the existing
            part of the path is checked.

    Raises:
        ValueError: another user could change it, or it is not a folder.
        OSError: it cannot be created or checked.
    """
    if not folder.is_absolute():
        raise ValueError(f"{folder} is not an absolute path")
    at, names, links = Path("/"), list(folder.parts[1:]), 0
    while names:
        name = names.pop(0)
        if name == "..":
            at = at.parent
            continue
        entry = at / name
        if create and not os.path.lexists(entry):
            with suppress(FileExistsError):  # another device of the run was faster
                os.mkdir(entry, 0o700)
        try:
            found = os.lstat(entry)
        except FileNotFoundError:
            return
        if found.st_uid not in (0, os.getuid()):
            raise ValueError(f"{entry} belongs to user {found.st_uid}, not to you or to root")
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise ValueError(f"{entry} leads through more than {_MOST_LINKS} links")
            target = Path(os.readlink(entry))
            names = [*target.parts[target.is_absolute() :], *names]
            at = Path("/") if target.is_absolute() else at
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise ValueError(f"{entry} is not a folder")
        # Sticky is safe only for parents: in the cache itself, others could add code to be loaded.
        is_sticky = found.st_mode & stat.S_ISVTX and names
        if found.st_mode & 0o022 and not is_sticky:
            raise ValueError(f"others may write to {entry} (mode {found.st_mode & 0o7777:o})")
        at = entry


def _is_safe(folder: Path) -> bool:
    try:
        check_cache(folder, create=False)
    except (ValueError, OSError):
        return False
    return True


def _cache_home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def _kind_of_host(environment: Mapping[str, str]) -> str:
    """Return a name derived from everything but the source that compiled code depends on."""
    with open("/proc/cpuinfo") as file:
        first = file.read().split("\n\n", 1)[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    parts = [line for line in first if line.startswith(wanted)]
    compiler = shutil.which(environment.get("CXX") or "g++")
    if compiler is not None:
        real = os.path.realpath(compiler)
        parts += [real, str(os.stat(real).st_size), str(os.stat(real).st_mtime_ns)]
    parts += [version("torch"), sys.version, environment.get("ATEN_CPU_CAPABILITY", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

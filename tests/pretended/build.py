"""Compiles the pretended accelerator, once for each content of its sources and each PyTorch.

It lies in ``onefold-tests`` in the user's cache, with what has other processes load it when they
import PyTorch.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

__all__ = ["EXTENSION", "NUMBER", "built", "environment", "missing"]

EXTENSION = "onefold_pretended"
NUMBER = "ONEFOLD_PRETENDED"
"""The environment variable with how many devices there are; without it there are none."""
NAME = f"{EXTENSION}{sysconfig.get_config_var('EXT_SUFFIX')}"
SOURCE = Path(__file__).parent / "source"
ROOT = Path(__file__).resolve().parents[2]
OLDEST = (2, 10)
FLAGS = ("-O1", "-g0", "-w", "-std=c++20", "-fPIC", "-DUSE_C10D_GLOO")
ENTRY = f"[torch.backends]\n{EXTENSION} = tests.pretended.device:load\n"
METADATA = "Metadata-Version: 2.1\nName: onefold-pretended\nVersion: 1.0\n"


def missing() -> str | None:
    """Why it cannot be built here, or None."""
    if _compiler() is None:
        return "a C++ compiler"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        return f"PyTorch {'.'.join(map(str, OLDEST))} or later"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "the headers of Python"
    return None


def built() -> Path:
    """Return the folder of the extension, which is compiled if it has to be; takes a minute.

    Raises:
        RuntimeError: the compiler fails; its messages are in it.
    """
    folder = _folder()
    with _alone(folder):
        if not (folder / "done").exists():
            with TemporaryDirectory(dir=folder) as aside:  # those of a build that was killed go on
                _compile(Path(aside)).rename(folder / NAME)
            about = folder / f"{EXTENSION}-1.0.dist-info"
            about.mkdir(exist_ok=True)
            (about / "entry_points.txt").write_text(ENTRY, encoding="utf-8")
            (about / "METADATA").write_text(METADATA, encoding="utf-8")
            (folder / "done").touch()
    return folder


def environment(devices: int, before: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that has so many devices as soon as it imports PyTorch."""
    found = dict(os.environ if before is None else before)
    paths = [str(built()), str(ROOT), str(ROOT / "src"), found.get("PYTHONPATH", "")]
    return {**found, NUMBER: str(devices), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _folder() -> Path:
    digest = hashlib.sha256(repr((torch.__version__, sys.version, FLAGS, ENTRY)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "onefold-tests" / f"pretended-{digest.hexdigest()[:16]}"


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Several test workers start at a time: one compiles, and the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(folder: Path) -> Path:
    torch_folder = Path(torch.__file__).parent
    places = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    places.append(Path(sysconfig.get_paths()["include"]))
    include = [f"-I{place}" for place in places]
    names = [path.stem for path in sorted(SOURCE.glob("*.cpp"))]
    options = [*FLAGS, f"-DTORCH_EXTENSION_NAME={EXTENSION}", *include]
    compiling = []
    for name in names:
        command = [_compiler() or "", *options, "-c", f"{SOURCE}/{name}.cpp", "-o", f"{name}.o"]
        compiling.append(_started(command, folder))
    for process in compiling:
        _finish(process)
    library = torch_folder / "lib"
    parts = [f"{name}.o" for name in names]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{library}"]
    linking = [_compiler() or "", "-shared", *parts, "-o", NAME, f"-L{library}", *libraries]
    _finish(_started(linking, folder))
    return folder / NAME


def _started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the pretended accelerator could not be compiled:\n{output[-8000:]}")

"""What happens to a run. Each fault is a function of the run, called at some moment of it."""

import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Protocol

from tests.soak.place import Place

__all__ = ["FAULTS", "Fault", "Running"]


class Running(Protocol):
    """A run that was started."""

    place: Place
    rng: random.Random
    pid: int
    """Of the launcher."""

    def workers(self) -> list[int]: ...


Happens = Callable[[Running], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind."""

    happens: Happens = lambda run: None
    mended: Happens = lambda run: None
    """Done before the run goes on without faults."""
    limit: tuple[int, int] | None = None
    """A resource that the launcher has so much of."""
    script: str = ""
    """What the script does wrong, see train.py."""
    kills: bool = False
    """The launcher is killed, so nobody can say or tidy up anything."""
    needs_mounts: bool = False
    between: bool = False
    """Happens after the first run has stopped, and before the next one begins."""
    must_end_well: bool = False
    """A run that goes on as if nothing had happened."""


def _signals(whom: str, *names: str, wait_s: float = 0.0) -> Happens:
    """To the launcher, to one worker, or to all, as the terminal does it on Ctrl-C."""

    def send(run: Running) -> None:
        workers = run.workers()
        chosen = {
            "launcher": [run.pid],
            "worker": [run.rng.choice(workers)] if workers else [],
            "all": [run.pid, *workers],
        }[whom]
        for name in names:
            for pid in chosen:
                with suppress(ProcessLookupError):
                    os.kill(pid, Signals[f"SIG{name}"])
            time.sleep(wait_s)

    return send


def _then(*each: Happens) -> Happens:
    def both(run: Running) -> None:
        for one in each:
            one(run)
            time.sleep(run.rng.uniform(0, 0.3))

    return both


def _remove(folder: str) -> Happens:
    return lambda run: run.place.remove(getattr(run.place, folder))


def _clean_temporary(run: Running) -> None:
    for path in run.place.temporary.iterdir():
        if path.name != "notes.txt":
            shutil.rmtree(path, ignore_errors=True)


def _newest(run: Running) -> list[Path]:
    return sorted(run.place.checkpoints.glob("step-*"))[-1:]


def _remove_newest(run: Running) -> None:
    for folder in _newest(run):
        shutil.rmtree(folder, ignore_errors=True)


def _file_for_folder(run: Running) -> None:
    run.place.remove(run.place.checkpoints)
    with suppress(OSError):
        run.place.checkpoints.write_text("a file\n")


def _folder_again(run: Running) -> None:
    if run.place.checkpoints.is_file():
        run.place.checkpoints.unlink()


def _fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filled").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def _fill_disk(run: Running) -> None:
    _fill(run.place.disk)


def _free_disk(run: Running) -> None:
    (run.place.disk / "filled").unlink(missing_ok=True)


def _fill_for_a_moment(run: Running) -> None:
    _fill_disk(run)
    time.sleep(run.rng.uniform(0.05, 0.6))
    _free_disk(run)


def _free_memory(_: Running) -> None:
    for name in os.listdir("/dev/shm"):  # of this run alone, see place.py
        Path("/dev/shm", name).unlink()


def _damage(how: Callable[[Path, random.Random], None]) -> Fault:
    def damage(run: Running) -> None:
        files = [path for folder in _newest(run) for path in sorted(folder.rglob("*"))]
        files = [path for path in files if path.is_file()]
        if files:
            how(run.rng.choice(files), run.rng)

    return Fault(happens=damage, mended=_remove_newest, between=True)


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))


def _replace(make: Callable[[Path], object]) -> Fault:
    def replace(path: Path, _: random.Random) -> None:
        path.unlink()
        make(path)

    return _damage(replace)


TERM, KILL = _signals("launcher", "TERM"), _signals("worker", "KILL")

FAULTS: dict[str, Fault] = {
    "nothing": Fault(must_end_well=True),
    "launcher TERM": Fault(happens=TERM),
    "launcher INT": Fault(happens=_signals("launcher", "INT")),
    "launcher HUP": Fault(happens=_signals("launcher", "HUP")),
    "launcher QUIT": Fault(happens=_signals("launcher", "QUIT"), kills=True),
    "launcher KILL": Fault(happens=_signals("launcher", "KILL"), kills=True),
    "launcher TERM twice": Fault(happens=_signals("launcher", "TERM", "TERM", wait_s=0.05)),
    "launcher stopped a while": Fault(
        happens=_signals("launcher", "STOP", "CONT", wait_s=1.5), must_end_well=True
    ),
    "all INT": Fault(happens=_signals("all", "INT")),
    "worker KILL": Fault(happens=KILL),
    "worker TERM": Fault(happens=_signals("worker", "TERM")),
    "worker SEGV": Fault(happens=_signals("worker", "SEGV")),
    "worker stopped": Fault(happens=_signals("worker", "STOP")),
    "worker stopped a while": Fault(
        happens=_signals("worker", "STOP", "CONT", wait_s=1.5), must_end_well=True
    ),
    "TERM and a worker KILL": Fault(happens=_then(TERM, KILL)),
    "worker stopped and TERM": Fault(happens=_then(_signals("worker", "STOP"), TERM)),
    "checkpoints removed": Fault(happens=_remove("checkpoints")),
    "newest checkpoint removed": Fault(happens=_remove_newest),
    "a file for checkpoints": Fault(happens=_file_for_folder, mended=_folder_again),
    "temporary files removed": Fault(happens=_clean_temporary, must_end_well=True),
    "logs removed": Fault(happens=_remove("logs")),
    "profile removed": Fault(happens=_remove("profile")),
    "disk full": Fault(happens=_fill_disk, mended=_free_disk, needs_mounts=True),
    "disk full a while": Fault(happens=_fill_for_a_moment, needs_mounts=True),
    "memory full": Fault(
        happens=lambda run: _fill(Path("/dev/shm")), mended=_free_memory, needs_mounts=True
    ),
    "disk full and worker KILL": Fault(
        happens=_then(_fill_disk, KILL), mended=_free_disk, needs_mounts=True
    ),
    "few descriptors": Fault(limit=(resource.RLIMIT_NOFILE, 24)),
    "30 descriptors": Fault(limit=(resource.RLIMIT_NOFILE, 30)),
    "small files": Fault(limit=(resource.RLIMIT_FSIZE, 40_000)),
    "tiny files": Fault(limit=(resource.RLIMIT_FSIZE, 12_000)),
    "little address space": Fault(limit=(resource.RLIMIT_AS, 700 << 20)),
    **{f"script {kind}": Fault(script=kind) for kind in ("raises", "exits", "leaves")},
    **{f"script {kind}": Fault(script=kind) for kind in ("waits", "poisons")},
    "damage: flipped": _damage(_flip),
    "damage: cut": _damage(lambda p, rng: os.truncate(p, rng.randrange(max(1, p.stat().st_size)))),
    "damage: gone": _replace(lambda path: None),
    "damage: a folder": _replace(Path.mkdir),
    "damage: a pipe": _replace(os.mkfifo),
    "damage: a link": _replace(lambda path: path.symlink_to("/dev/zero")),
}

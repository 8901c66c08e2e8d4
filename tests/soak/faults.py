"""What happens to a run. Each fault is a function of the run, called at some moment of it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
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


def _nothing(_: Running) -> None:
    """A fault that lies in how the run is started."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind."""

    happens: Callable[[Running], None] = _nothing
    mended: Callable[[Running], None] = _nothing
    """Done before the run goes on without faults."""
    limits: Callable[[], None] | None = None
    """Called in the launcher's process before it begins."""
    script: str = ""
    """What the script does wrong, see train.py."""
    kills: bool = False
    """The launcher is killed, so nobody can say or tidy up anything."""
    needs_mounts: bool = False
    between: bool = False
    """Happens after the first run has stopped, and before the next one begins."""
    must_end_well: bool = False
    """A run that goes on as if nothing had happened."""


def _to_launcher(*numbers: signal.Signals, wait_s: float = 0.0) -> Callable[[Running], None]:
    def send(run: Running) -> None:
        for number in numbers:
            os.kill(run.pid, number)
            time.sleep(wait_s)

    return send


def _to_worker(*numbers: signal.Signals, wait_s: float = 0.0) -> Callable[[Running], None]:
    def send(run: Running) -> None:
        workers = run.workers()
        if workers:
            worker = run.rng.choice(workers)
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(worker, number)
                time.sleep(wait_s)

    return send


def _to_all(number: signal.Signals) -> Callable[[Running], None]:
    """As the terminal does it on Ctrl-C."""

    def send(run: Running) -> None:
        for pid in (run.pid, *run.workers()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    return send


def _then(*each: Callable[[Running], None]) -> Callable[[Running], None]:
    def both(run: Running) -> None:
        for one in each:
            one(run)
            time.sleep(run.rng.uniform(0, 0.3))

    return both


def _remove(folder: str) -> Callable[[Running], None]:
    def remove(run: Running) -> None:
        path: Path = getattr(run.place, folder)
        run.place.forget(path)
        shutil.rmtree(path, ignore_errors=True)

    return remove


def _clean_temporary(run: Running) -> None:
    for path in run.place.temporary.iterdir():
        if path.name != "notes.txt":
            shutil.rmtree(path, ignore_errors=True)


def _saved(run: Running) -> list[Path]:
    return sorted(run.place.checkpoints.glob("step-*"))


def _remove_newest(run: Running) -> None:
    for folder in _saved(run)[-1:]:
        shutil.rmtree(folder, ignore_errors=True)


def _file_for_folder(run: Running) -> None:
    _remove("checkpoints")(run)
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


def _fill_memory(_: Running) -> None:
    _fill(Path("/dev/shm"))


def _free_memory(_: Running) -> None:
    for name in os.listdir("/dev/shm"):  # of this run alone, see place.py
        Path("/dev/shm", name).unlink()


def _newest_files(run: Running) -> list[Path]:
    return [path for folder in _saved(run)[-1:] for path in sorted(folder.rglob("*"))]


def _damage(how: Callable[[Path, random.Random], None]) -> Callable[[Running], None]:
    def damage(run: Running) -> None:
        files = [path for path in _newest_files(run) if path.is_file()]
        if files:
            how(run.rng.choice(files), run.rng)

    return damage


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def _unlink(path: Path, _: random.Random) -> None:
    path.unlink()


def _make_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _make_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _make_link(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


FAULTS: dict[str, Fault] = {
    "nothing": Fault(must_end_well=True),
    "launcher TERM": Fault(happens=_to_launcher(signal.SIGTERM)),
    "launcher INT": Fault(happens=_to_launcher(signal.SIGINT)),
    "launcher HUP": Fault(happens=_to_launcher(signal.SIGHUP)),
    "launcher QUIT": Fault(happens=_to_launcher(signal.SIGQUIT), kills=True),
    "launcher KILL": Fault(happens=_to_launcher(signal.SIGKILL), kills=True),
    "launcher TERM twice": Fault(happens=_to_launcher(signal.SIGTERM, signal.SIGTERM, wait_s=0.05)),
    "launcher stopped a while": Fault(
        happens=_to_launcher(signal.SIGSTOP, signal.SIGCONT, wait_s=1.5), must_end_well=True
    ),
    "all INT": Fault(happens=_to_all(signal.SIGINT)),
    "all HUP": Fault(happens=_to_all(signal.SIGHUP)),
    "worker KILL": Fault(happens=_to_worker(signal.SIGKILL)),
    "worker TERM": Fault(happens=_to_worker(signal.SIGTERM)),
    "worker INT": Fault(happens=_to_worker(signal.SIGINT)),
    "worker SEGV": Fault(happens=_to_worker(signal.SIGSEGV)),
    "worker ABRT": Fault(happens=_to_worker(signal.SIGABRT)),
    "worker stopped": Fault(happens=_to_worker(signal.SIGSTOP)),
    "worker stopped a while": Fault(
        happens=_to_worker(signal.SIGSTOP, signal.SIGCONT, wait_s=1.5), must_end_well=True
    ),
    "TERM and a worker KILL": Fault(
        happens=_then(_to_launcher(signal.SIGTERM), _to_worker(signal.SIGKILL))
    ),
    "worker stopped and TERM": Fault(
        happens=_then(_to_worker(signal.SIGSTOP), _to_launcher(signal.SIGTERM))
    ),
    "checkpoints removed": Fault(happens=_remove("checkpoints")),
    "newest checkpoint removed": Fault(happens=_remove_newest),
    "a file for checkpoints": Fault(happens=_file_for_folder, mended=_folder_again),
    "temporary files removed": Fault(happens=_clean_temporary, must_end_well=True),
    "logs removed": Fault(happens=_remove("logs")),
    "profile removed": Fault(happens=_remove("profile")),
    "disk full": Fault(happens=_fill_disk, mended=_free_disk, needs_mounts=True),
    "disk full a while": Fault(happens=_fill_for_a_moment, needs_mounts=True),
    "memory full": Fault(happens=_fill_memory, mended=_free_memory, needs_mounts=True),
    "disk full and worker KILL": Fault(
        happens=_then(_fill_disk, _to_worker(signal.SIGKILL)),
        mended=_free_disk,
        needs_mounts=True,
    ),
    "few descriptors": Fault(limits=_limit(resource.RLIMIT_NOFILE, 24)),
    "30 descriptors": Fault(limits=_limit(resource.RLIMIT_NOFILE, 30)),
    "small files": Fault(limits=_limit(resource.RLIMIT_FSIZE, 40_000)),
    "tiny files": Fault(limits=_limit(resource.RLIMIT_FSIZE, 12_000)),
    "little address space": Fault(limits=_limit(resource.RLIMIT_AS, 700 << 20)),
    "script raises": Fault(script="raises"),
    "script exits": Fault(script="exits"),
    "script leaves": Fault(script="leaves"),
    "script waits": Fault(script="waits"),
    "script poisons": Fault(script="poisons"),
    "damage: flipped": Fault(happens=_damage(_flip), mended=_remove_newest, between=True),
    "damage: cut": Fault(happens=_damage(_truncate), mended=_remove_newest, between=True),
    "damage: gone": Fault(happens=_damage(_unlink), mended=_remove_newest, between=True),
    "damage: a folder": Fault(happens=_damage(_make_folder), mended=_remove_newest, between=True),
    "damage: a pipe": Fault(happens=_damage(_make_pipe), mended=_remove_newest, between=True),
    "damage: a link": Fault(happens=_damage(_make_link), mended=_remove_newest, between=True),
}

"""What a run writes into its folder, and how it goes on there."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from onefold.errors import LaunchError
from onefold.system.folder_lock import lock_of_checkpoints
from onefold_jobs.options import TrainOptions
from onefold_jobs.runfolder import RunFolder, next_name, require_room
from tests.somebody import NOBODY
from tests.tables import for_each

OPTIONS = TrainOptions(data="digits", name="one")
OTHER = TrainOptions(data="digits", name="one", epochs=30, resume=True)


def begun(path: Path, *, is_lead: bool = True, options: TrainOptions = OPTIONS) -> RunFolder:
    folder = RunFolder(path, is_lead=is_lead)
    folder.create(options, "classify", {"words.json": "[1]"})
    folder.say(job="classify", best=None)
    return folder


def files(path: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()
    }


def test_a_run_without_a_name_gets_the_first_free_number(tmp_path: Path) -> None:
    assert next_name(tmp_path / "none", "text") == "text-1"
    for taken in ("text-1", "text-3", "classify-2"):
        (tmp_path / taken).mkdir()
    (tmp_path / "text-2").touch()
    assert next_name(tmp_path, "text") == "text-4"
    assert next_name(tmp_path, "classify") == "classify-1"


def test_only_the_lead_writes(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    before = files(tmp_path)
    for name in ("run", "other"):
        folder = begun(tmp_path / name, is_lead=False, options=OTHER)
        folder.open_events(OTHER, 1)
        folder.add_events("train", 1, {"loss": 0.5})
        folder.go_on(OTHER, "text")
        folder.say(best=3)
        folder.write_examples({})
        folder.close()
    assert files(tmp_path) == before


@for_each("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_written_as_none(tmp_path: Path, number: float) -> None:
    def refuse(name: str) -> None:  # as readers other than Python's do
        raise ValueError(f"{name} is no JSON")

    folder = begun(tmp_path)
    value = {"a": number, "b": [number, 1.0, {"c": number}], "d": (number, 2)}
    told = {"a": None, "b": [None, 1.0, {"c": None}], "d": [None, 2]}
    folder.say(value=value)
    folder.write_examples({"value": value})
    for name in ("run.json", "examples.json"):
        found = json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        assert found["value"] == told


@for_each("name", ["checkpoints", "pictures", "tensorboard", "wandb"])
@for_each("kind", ["link", "dangling"])
def test_a_run_goes_on_through_no_link(tmp_path: Path, name: str, kind: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begun(run).close()
    if kind == "link":
        elsewhere.mkdir()
    (run / name).symlink_to(elsewhere)
    before, words = files(run), f"not followed below a folder, but got {name}"
    with pytest.raises(OSError, match=words):
        require_room(run)
    folder = RunFolder(run, is_lead=True)
    with pytest.raises(OSError, match=words):
        folder.go_on(OPTIONS, "classify")
    if name == "pictures":
        with pytest.raises(OSError, match=words):
            folder.save_picture(Image.new("L", (8, 8)), 1)
    folder.close()
    assert files(run) == before
    assert not list(elsewhere.iterdir()) if kind == "link" else not elsewhere.exists()


def test_ones_own_process_is_named(tmp_path: Path) -> None:
    begun(tmp_path).close()
    child = os.fork()
    if not child:
        os.setuid(os.geteuid())
        folder = RunFolder(tmp_path, is_lead=True)
        folder.go_on(OPTIONS, "classify")
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(
            LaunchError, match=rf"another process is using this folder \(process {child}\)"
        ):
            require_room(tmp_path)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def a_link(path: Path) -> None:
    (path.parent / "else").touch()
    path.symlink_to(path.parent / "else")


def of_somebody_else(path: Path) -> None:
    path.touch()
    os.chown(path, NOBODY, NOBODY)


LOCKS: list[tuple[Callable[[Path], object], str]] = [
    (a_link, "expected a file, got a link. onefold needs a lock file that this user owns"),
    (os.mkfifo, r"\.lock: expected a file, got a FIFO or a device"),
]
if os.geteuid() == 0:
    LOCKS.append((of_somebody_else, f"must belong to user 0, but belongs to user {NOBODY}"))


@for_each(("make", "words"), LOCKS)
def test_a_strange_lock_is_refused(tmp_path: Path, make: Callable[..., object], words: str) -> None:
    make(tmp_path / ".lock")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError, match=words):
        begun(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def is_free(folder: Path) -> bool:
    """Whether another process could take the lock."""
    child = os.fork()
    if not child:
        try:
            lock_of_checkpoints(folder).refuse_held()
        except LaunchError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_lock_outlives_a_look_at_its_file(tmp_path: Path) -> None:
    """A script that copies the folder opens and closes the file."""
    lock, file = lock_of_checkpoints(tmp_path), tmp_path / ".lock"
    file.touch(0o644)  # copied from elsewhere
    lock.acquire()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes().split()[0] == str(os.getpid()).encode()
    assert not is_free(tmp_path)
    lock.let_go()
    assert is_free(tmp_path)
    assert not (tmp_path / ".lock").exists()

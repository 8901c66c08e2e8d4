"""What a run writes into its folder, and how it goes on there."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onefold.errors import LaunchError
from onefold.jobs.options import TrainOptions
from onefold.jobs.runfolder import RunFolder, next_name, require_room
from onefold.system.folderlock import lock_of_checkpoints
from tests.somebody import NOBODY
from tests.tables import for_each

OPTIONS = TrainOptions(data="digits", name="one")
OTHER = TrainOptions(data="digits", name="one", epochs=30, resume=True)


def begun(path: Path, *, is_lead: bool = True, options: TrainOptions = OPTIONS) -> RunFolder:
    folder = RunFolder(path, is_lead=is_lead)
    folder.create(options, "classify", {"words.json": "[1]"})
    folder.say(job="classify", best=None)
    return folder


def gone_on(
    path: Path, *, steps: int = 0, epochs: int = 0, options: TrainOptions = OPTIONS
) -> RunFolder:
    folder = RunFolder(path, is_lead=True)
    folder.go_on(options, "classify", steps=steps, epochs=epochs)
    return folder


def steps_line(step: int, epoch: int = 0) -> dict[str, Any]:
    return {"kind": "steps", "epoch": epoch, "step": step, "loss": 1 / step, "lr": 0.1}


def epoch_line(epoch: int, step: int) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": epoch, "step": step, "loss": 0.5, "scores": {"loss": 0.25}}


def metrics(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


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
    begun(tmp_path / "run").add(steps_line(1))
    before = files(tmp_path)
    for name in ("run", "other"):
        folder = begun(tmp_path / name, is_lead=False, options=OTHER)
        folder.open_events(1)
        folder.add(steps_line(1))
        folder.go_on(OTHER, "text", steps=0, epochs=0)
        folder.say(best=3)
        folder.write_examples({})
        folder.close()
    assert files(tmp_path) == before
    assert folder.lines() == []


@for_each("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_written_as_none(tmp_path: Path, number: float) -> None:
    def refuse(name: str) -> None:  # as readers other than Python's do
        raise ValueError(f"{name} is no JSON")

    folder = begun(tmp_path)
    value = {"a": number, "b": [number, 1.0, {"c": number}], "d": (number, 2)}
    told = {"a": None, "b": [None, 1.0, {"c": None}], "d": [None, 2]}
    folder.add({**steps_line(1), "value": value})
    folder.say(value=value)
    folder.write_examples({"value": value})
    for name in ("metrics.jsonl", "run.json", "examples.json"):
        found = json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        assert found["value"] == told


@for_each("cut", ['{"kind": "ste', "{", '{"kind": "steps", "epoch": 0}'])
@for_each("before", [[], [steps_line(1)]])
def test_a_line_cut_off_is_left_out(tmp_path: Path, cut: str, before: list[dict[str, Any]]) -> None:
    folder = begun(tmp_path)
    for line in before:
        folder.add(line)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    assert folder.lines() == before
    folder.go_on(OPTIONS, "classify", steps=1, epochs=0)
    folder.add(steps_line(2))
    assert metrics(tmp_path) == [*before, steps_line(2)]


@for_each(
    ("steps", "epochs", "kept"),
    [(6, 2, 8), (6, 1, 7), (4, 1, 5), (3, 1, 4), (3, 0, 3), (1, 0, 1), (0, 0, 0)],
)
def test_later_lines_are_taken_back(tmp_path: Path, steps: int, epochs: int, kept: int) -> None:
    """Two epochs of three steps; a step of number 3 may have been saved before its evaluation."""
    lines = [
        *(*(steps_line(step) for step in (1, 2, 3)), epoch_line(0, 3)),
        *(*(steps_line(step, 1) for step in (4, 5, 6)), epoch_line(1, 6)),
    ]
    folder = begun(tmp_path)
    for line in lines:
        folder.add(line)
    gone_on(tmp_path, steps=steps, epochs=epochs)
    assert metrics(tmp_path) == lines[:kept]


def test_ones_own_process_is_named(tmp_path: Path) -> None:
    begun(tmp_path).close()
    child = os.fork()
    if not child:
        os.setuid(os.geteuid())
        folder = RunFolder(tmp_path, is_lead=True)
        folder.go_on(OPTIONS, "classify", steps=0, epochs=0)
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(LaunchError, match=rf"another process is at work .*process {child}\)"):
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
    (a_link, "expected a file, got a link. onefold needs a file of this user's own"),
    (os.mkfifo, r"\.lock: expected a file, got a FIFO or a device"),
]
if os.geteuid() == 0:
    LOCKS.append((of_somebody_else, f"expected a file of user 0, got one of user {NOBODY}"))


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
            lock_of_checkpoints(folder).look()
        except LaunchError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not list its locks")
def test_a_lock_that_was_lost_is_taken_again(tmp_path: Path) -> None:
    """A script that copies the folder reads the file, which gives up the lock."""
    lock, file = lock_of_checkpoints(tmp_path), tmp_path / ".lock"
    file.touch(0o644)  # copied from elsewhere
    lock.take()
    assert file.stat().st_mode & 0o777 == 0o600
    file.read_bytes()
    assert is_free(tmp_path)
    lock.keep()
    assert not is_free(tmp_path)
    lock.let_go()
    lock.keep()  # and nothing is taken that was let go of
    assert not (tmp_path / ".lock").exists()

"""Runs that save to a bucket of a local S3 server: killed, cut off, and short of space."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold
from onefold.checkpoint.folder import find_checkpoint
from onefold.errors import LaunchError
from onefold.tools.remote import ObjectStorage, fetch
from tests.checkpoint.bucket import NEEDS, Bucket, served
from tests.checkpoint.test_remote import save
from tests.warm import SCRIPTS

pytestmark = [NEEDS, pytest.mark.processes, pytest.mark.xdist_group("faults")]
KILLS = 30


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with served(tmp_path, monkeypatch) as found:
        yield found


def test_a_bucket_holds_what_was_uploaded(bucket: Bucket, tmp_path: Path) -> None:
    there = ObjectStorage("s3://bucket/run")
    there.open()
    (tmp_path / "run.record").write_bytes(b"record")
    for step in range(1, 5):
        there.upload(save(tmp_path / "a", step, keep=2), tmp_path / "run.record")
    assert sorted(int(name.split("-")[1]) for name in bucket.complete("run")) == [3, 4]
    (copy := tmp_path / "b").mkdir()
    again = ObjectStorage("s3://bucket/run/")
    assert fetch(again, copy) is None
    assert find_checkpoint(copy).run["step"] == 4
    assert (copy / "run.record").read_bytes() == b"record"
    with pytest.raises(LaunchError, match="The specified bucket does not exist"):
        fetch(ObjectStorage("s3://elsewhere/run"), copy)
    assert {each.partition("/")[0] for each in bucket.files().find("bucket")} == {"bucket"}


class Lives:
    """Starts of one script, each of which may be killed; on machines that share nothing."""

    def __init__(self, folder: Path, bucket: Bucket, run: str) -> None:
        self._folder, self._bucket, self._run = folder, bucket, run
        self.errors = folder / "errors"

    def start(self, machine: str, **variables: str) -> subprocess.Popen[str]:
        home = self._folder / machine
        home.mkdir(exist_ok=True)
        options = {
            "ONEFOLD_CHECKPOINT": f"s3://bucket/{self._run}",
            "ONEFOLD_SAVE_EVERY": "3",
            "XDG_CACHE_HOME": str(home),
        }
        with self.errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, str(SCRIPTS / "stored.py")],
                env={**os.environ, **self._bucket.variables, **options, **variables},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def finish(self, process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, self.errors.read_text()
        return output.splitlines()[-1]

    def newest_step(self, machine: str) -> int:
        """The step of the newest checkpoint, after all of them were fetched and checked."""
        there = ObjectStorage(f"s3://bucket/{self._run}")
        (copy := self._folder / machine).mkdir(exist_ok=True)
        names = there.complete()
        fetch(there, copy, len(names))
        steps = {int(path.name.removeprefix("step-")) for path in copy.glob("step-*")}
        assert steps == {int(name.split("-")[1]) for name in names}  # none is damaged
        return max(steps, default=0)


def whole(**variables: str) -> str:
    command = [sys.executable, str(SCRIPTS / "stored.py")]
    environment = {**os.environ, **variables}
    output = subprocess.check_output(command, env=environment, stderr=subprocess.DEVNULL, text=True)
    return output.strip()


def steps_recorded(folder: Path) -> list[int]:
    (record,) = folder.glob("onefold/checkpoints/*/run.record")
    return onefold.Record(record).steps["step"].tolist()


@pytest.mark.full
def test_killed_at_any_time_of_an_upload(bucket: Bucket, tmp_path: Path) -> None:
    """On this machine and on new ones; whatever was complete stays, and the bits are the same."""
    lives, drawn = Lives(tmp_path, bucket, "run"), random.Random(0)
    steps = {"STEPS": "400", "PAUSE_S": "0.02"}
    newest, machine, killed = 0, "first", 0
    bucket.line.pause_s = 0.005
    while killed < KILLS:
        process, began_bytes = lives.start(machine, **steps), bucket.line.sent_bytes
        until_bytes = began_bytes + drawn.randrange(20_000, 4_000_000)
        while bucket.line.sent_bytes < until_bytes:
            assert process.poll() is None, lives.errors.read_text()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += 1
        time.sleep(0.2)
        found = lives.newest_step(f"looking-{killed}")
        assert found >= newest
        newest = found
        machine = drawn.choice([machine, f"machine-{killed}"])
    assert newest > 0
    bucket.line.pause_s = 0.0
    assert lives.finish(lives.start("last", **steps)) == whole(STEPS="400")
    assert lives.newest_step("looking") == 400
    assert steps_recorded(tmp_path / "last") == list(range(1, 401))
    folders = {each.split("/")[2] for each in bucket.files().find("bucket/run")}
    assert folders == bucket.complete("run").keys()  # nothing partial is left
    print(f"{killed} kills, {len(re.findall('resuming after', lives.errors.read_text()))} resumes")


@pytest.mark.full
@pytest.mark.parametrize("when", ["training", "end"])
def test_the_server_is_gone_for_twenty_seconds(bucket: Bucket, tmp_path: Path, when: str) -> None:
    lives = Lives(tmp_path, bucket, "run")
    process = lives.start("a", PAUSE_S="0.5" if when == "training" else "0.1")
    while not bucket.complete("run"):
        time.sleep(0.05)
    if when == "end":
        time.sleep(3)
    with bucket.line.cut(20.0):
        assert lives.finish(process) == whole()
    assert lives.newest_step("looking") == 60
    reports = re.findall("uploading to .* failed and is repeated", lives.errors.read_text())
    assert len(reports) <= 1  # s3fs repeats requests itself for a while
    assert steps_recorded(tmp_path / "a") == list(range(1, 61))


@pytest.mark.full
def test_the_disk_of_the_machine_is_full(bucket: Bucket, tmp_path: Path) -> None:
    lives = Lives(tmp_path, bucket, "run")
    process = lives.start("a", PAUSE_S="0.1", FULL_AFTER="31")
    process.communicate(timeout=300)
    assert process.returncode == 1
    assert "File too large" in lives.errors.read_text()
    newest = lives.newest_step("looking")
    assert 3 <= newest <= 33
    assert lives.finish(lives.start("a")) == whole()
    assert lives.newest_step("looking-again") == 60
    assert lives.finish(lives.start("b")) == whole()

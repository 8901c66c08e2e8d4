"""Notices that this machine is about to end: files, and metadata servers of clouds."""

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

import onefold
from onefold.launcher.environment import read_context
from onefold.options import CLOUD_NAMES
from onefold.testing import outcomes, simulate
from onefold.tools import stops
from tests.metadata import ENDS, Answer, answered, metadata_server
from tests.small import make_trainer, points
from tests.tables import for_each

Make = Callable[[str], onefold.Trainer]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of notices."""
    return [said for said in caplog.messages if said.startswith(("onefold:", "the notice"))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a Trainer of a process with ``ONEFOLD_STOP_NOTICE``."""
    trainers = []

    def make(source: str, **place: str) -> onefold.Trainer:
        context = read_context({"ONEFOLD_STOP_NOTICE": source, **place})
        monkeypatch.setattr("onefold.trainer.current_context", lambda: context)
        trainers.append(make_trainer())
        return trainers[-1]

    monkeypatch.setattr(stops, "PAUSE_S", 0.01)
    stops.requests_by_signals.cache_clear()
    yield make
    for trainer in trainers:
        trainer.close()
    stops.requests_by_signals.cache_clear()


def is_stopped(trainer: onefold.Trainer, within_s: float = 10.0) -> bool:
    """Whether a step stops the run."""
    limit = time.monotonic() + within_s
    while not trainer.asked_to_stop and time.monotonic() < limit:
        trainer.step(points(8))
        time.sleep(0.01)
    return trainer.asked_to_stop


def test_the_table_has_the_clouds_of_the_option() -> None:
    assert tuple(stops.CLOUDS) == CLOUD_NAMES == tuple(ENDS)


def test_a_file_stops_the_run_once_it_is_written(
    made: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stop"
    trainer = made(str(path))
    assert not is_stopped(trainer, 0.1)
    path.touch()
    assert is_stopped(trainer)
    (said,) = told(caplog)
    assert said == (
        f"onefold: the notice file {path} was written (host {socket.gethostname()}). The run is "
        f"asked to stop after the next step"
    )
    assert is_stopped(made(str(path)))  # a later Trainer of the same script


def test_a_file_that_is_left_over_stops_nothing_until_it_is_written_again(
    made: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stop"
    path.write_text("")
    os.utime(path, ns=(0, 10))
    trainer = made(str(path))
    assert not is_stopped(trainer, 0.1)
    assert told(caplog) == [
        f"the notice file {path} is older than this run: it is ignored until it is written again"
    ]
    os.utime(path, ns=(0, 11))
    assert is_stopped(trainer)


def script(notice: Path | None) -> str:
    """Fifteen steps; the lead writes the notice after the sixth, and waits until it is found."""
    trainer = make_trainer(devices=None)
    loader = trainer.loader(TensorDataset(*points(40)), batch_size=8, shuffle=True)
    for _ in trainer.epochs(3):
        for batch in loader:
            trainer.step(batch)
            if notice and trainer.steps == 6 and trainer.is_lead and not trainer.replaying:
                notice.touch()
                time.sleep(0.3)
    fingerprint = trainer.fingerprint()
    trainer.close()
    return fingerprint


def test_devices_save_themselves_stop_and_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stops, "PAUSE_S", 0.01)
    stops.requests_by_signals.cache_clear()
    (expected,) = {*simulate(script, 2, args=[None])}
    given: dict[str, Any] = {
        "stop_notice": str(tmp_path / "stop"),
        "checkpoint": str(tmp_path / "run"),
    }
    options = onefold.RunOptions(**given, save_every=100)
    ended = outcomes(script, 2, args=[tmp_path / "stop"], options=options)
    assert [getattr(each.error, "code", None) for each in ended] == [75, 75], ended
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == ["step-00000007"]
    stops.requests_by_signals.cache_clear()
    stops.notice_of.cache_clear()  # as in a new process
    # The lock of the first folder lasts as long as this process.
    copied = shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=lambda *_: [".lock"])
    again = outcomes(script, 3, args=[None], options=replace(options, checkpoint=str(copied)))
    assert {each.value for each in again} == {expected}
    stops.requests_by_signals.cache_clear()


def test_a_folder_that_is_missing_is_refused(made: Make, tmp_path: Path) -> None:
    words = f"the folder of the notice file {tmp_path}/none/stop does not exist"
    with pytest.raises(ValueError, match=words):
        made(str(tmp_path / "none" / "stop"))


def test_one_process_of_a_host_looks(made: Make, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    second = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    second |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}
    made(str(tmp_path / "stop"), **second)
    assert "notices" not in {thread.name for thread in threading.enumerate()}


@for_each("cloud", CLOUD_NAMES)
def test_a_metadata_server_announces_the_end(cloud: str) -> None:
    ends: list[bool] = []
    with metadata_server(lambda handler: answered(cloud, bool(ends), handler)) as address:
        _, find = stops.notice_of(cloud, address)
        assert find() == find() == ""
        ends.append(True)
        assert find() == ENDS[cloud]


DEEP = "[" * 10_000
WRONG: dict[str, Answer] = {
    "status 302": (302, "", {"Location": "/latest/api/token"}),
    "status 301": (301, "", {"Location": "file:///etc/hostname"}),
    "status 403": (403, "", {}),
    "status 500": (500, "", {}),
    "16385 bytes": (200, "a" * 100_000, {}),
    "TypeError|JSONDecodeError|ValueError": (200, '"garbage"', {}),
    "KeyError|ValueError": (200, "{}", {}),
    "RecursionError|ValueError": (200, DEEP, {}),
    "UnicodeDecodeError|ValueError": (200, "\udcff", {}),
}


@for_each("words", WRONG)
@for_each("cloud", CLOUD_NAMES)
def test_a_server_that_is_no_metadata_server_gives_no_notice(cloud: str, words: str) -> None:
    """The token of AWS is any text, unless the server redirects."""
    seen: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        seen.append(handler.path)
        is_token = handler.path == "/latest/api/token" and "Location" not in WRONG[words][2]
        return (200, "token", {}) if is_token else WRONG[words]

    with metadata_server(answer) as address, pytest.raises(Exception, match=r".") as caught:
        stops.notice_of(cloud, address)[1]()
    assert re.search(words, f"{caught.typename}: {caught.value}")
    assert len(seen) == 1 + (cloud == "aws" and "Location" not in WRONG[words][2])


@for_each("cloud", CLOUD_NAMES)
def test_garbage_is_reported_once(
    cloud: str, made: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        seen.append(handler.path)
        return 200, "\x1b[2J", {}

    with metadata_server(answer) as address:
        monkeypatch.setattr(stops, "notice_of", partial(stops.notice_of, address=address))
        trainer = made(cloud)
        limit = time.monotonic() + 10
        while len(seen) < 6 and time.monotonic() < limit:
            time.sleep(0.02)
        trainer.step(points(8))
        trainer.close()
    assert not trainer.asked_to_stop
    (said,) = told(caplog)
    name = f"the metadata server of {cloud.upper()} at {address}"
    assert re.match(rf"onefold: cannot read {name}: \w*Error: .*\. No notice stops the run", said)
    assert "\x1b" not in said


def test_a_server_that_is_gone_comes_back(
    made: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works: list[bool] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        return answered("gcp", True, handler) if works else (0, "", {})

    with metadata_server(answer) as address:
        monkeypatch.setattr(stops, "notice_of", partial(stops.notice_of, address=address))
        trainer = made("gcp")
        assert not is_stopped(trainer, 0.1)
        works.append(True)
        assert is_stopped(trainer)
    first, last = told(caplog)
    assert first.startswith(f"onefold: cannot read the metadata server of GCP at {address}: ")
    assert last.startswith(f"onefold: {ENDS['gcp']} (host {socket.gethostname()}). The run ")


def test_a_silent_server_delays_no_step(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(stops, "notice_of", partial(stops.notice_of, address=address))
        monkeypatch.setattr(stops, "ANSWER_S", 3.0)
        trainer = made("gcp")
        before = time.monotonic()
        for _ in range(5):
            trainer.step(points(8))
        trainer.close()
        assert time.monotonic() - before < 3.0


def test_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with metadata_server(partial(answered, "gcp", True)) as address:
        assert stops.notice_of("gcp", address)[1]() == ENDS["gcp"]

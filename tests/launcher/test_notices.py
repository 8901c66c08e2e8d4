"""Signals that announce an end, where another launcher than onefold's has started the devices."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import onefold
from onefold.errors import LaunchError
from onefold.launcher.environment import read_context
from onefold.tools.stops import requests_by_signals
from tests.small import make_trainer, points
from tests.tables import for_each

SCRIPT = Path(__file__).parent.parent / "scripts" / "noticed.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAST = 200


@pytest.fixture
def noticing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], onefold.Trainer]]:
    """Makes a Trainer of a process with ``ONEFOLD_STOP_SIGNAL``."""
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}

    def made(names: str) -> onefold.Trainer:
        context = read_context({"ONEFOLD_STOP_SIGNAL": names})
        monkeypatch.setattr("onefold.trainer.current_context", lambda: context)
        return make_trainer()

    yield made
    requests_by_signals.cache_clear()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("names", ["USR1", "SIGUSR1", "TERM,USR1", "TERM USR1"])
def test_a_notice_is_agreed_on(noticing: Callable[[str], onefold.Trainer], names: str) -> None:
    trainer = noticing(names)
    trainer.step(points(8))
    assert not trainer.asked_to_stop
    for _ in range(3):  # as often as it comes
        os.kill(os.getpid(), signal.SIGUSR1)
    assert not trainer.asked_to_stop
    trainer.step(points(8))
    assert trainer.asked_to_stop
    again = noticing(names)  # a later Trainer of the same script
    again.step(points(8))
    assert again.asked_to_stop


@for_each("names", ["KILL", "usr1", "10", "USR1,STOP"])
def test_a_signal_that_nobody_can_take_is_refused(names: str) -> None:
    words = "ONEFOLD_STOP_SIGNAL=.* is not valid: choose from INT, TERM, HUP, USR1, USR2"
    with pytest.raises(LaunchError, match=words):
        read_context({"ONEFOLD_STOP_SIGNAL": names})


def test_a_trainer_of_another_thread_takes_no_signals(
    noticing: Callable[[str], onefold.Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    thread = threading.Thread(target=lambda: noticing("USR1").close())
    thread.start()
    thread.join()
    assert "signals only in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def written(path: Path, by: subprocess.Popen[str]) -> str:
    for _ in range(1200):
        if path.exists() and (text := path.read_text()):
            return text
        assert by.poll() is None, by.communicate()
        time.sleep(0.05)
    pytest.fail(f"{path} was not written")


def start(folder: Path, seconds: str, launcher: Sequence[str] = TORCHRUN) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, folder, seconds, str(LAST)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ONEFOLD_STOP_SIGNAL": "USR1,TERM"},
    )


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["one", "all", "torchrun"])
def test_a_notice_under_torchrun(who: str, tmp_path: Path) -> None:
    """To the process of one device, to those of all, and to torchrun itself, which ends them."""
    alone, folder = tmp_path / "one", tmp_path / "two"
    alone.mkdir()
    folder.mkdir()
    subprocess.run([sys.executable, SCRIPT, alone, "0", str(LAST)], check=True, timeout=600)
    first = start(folder, "0.1")
    pids = [int(written(folder / f"pid-{rank}", first)) for rank in (0, 1)]
    if who == "torchrun":
        first.send_signal(signal.SIGTERM)
    for pid in pids[: {"one": 1, "all": 2, "torchrun": 0}[who]]:
        os.kill(pid, signal.SIGUSR1)
    said = first.communicate(timeout=120)
    assert first.returncode != 0
    stopped = [(folder / f"stopped-{rank}").read_text() for rank in (0, 1)]
    assert stopped[0] == stopped[1], said
    assert 0 < int(stopped[0]) < LAST
    again = start(folder, "0")
    said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert (folder / "bits").read_text() == (alone / "bits").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "to_launcher"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)]
)
def test_a_notice_under_onefold_run(
    number: signal.Signals, to_launcher: bool, tmp_path: Path
) -> None:
    """Without a checkpoint folder: the launcher gives the script the time to save itself."""
    onefold_run = ("-m", "onefold", "run", "--devices", "cpu:2")
    first = start(tmp_path, "0.1", onefold_run)
    pids = [int(written(tmp_path / f"pid-{rank}", first)) for rank in (0, 1)]
    os.kill(first.pid if to_launcher else pids[1], number)
    said = first.communicate(timeout=120)
    assert first.returncode == 75, said
    assert " and saved" in said[1]
    stopped = {(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)}
    assert len(stopped) == 1
    assert 0 < int(*stopped) < LAST

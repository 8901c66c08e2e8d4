"""A device that waits for long is told of once: who waits for whom, and what everybody does."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold
from onefold.core.call_digest import Call
from onefold.exchange.progress import DevicePlace
from onefold.launcher.hang import DeviceReport, HangWatch, HostDevice, late_of, report_of
from onefold.launcher.workers import RunStatus
from onefold.record import FILE
from onefold.record.entries import FailureEntry, FrameWriter, StepEntry, encode
from tests.started import ended
from tests.tables import for_each

PROGRAM = """
import sys, threading, time
from onefold.launcher.hang import answer_with_stacks

exec(compile("def send(): time.sleep(600)", "/env/site-packages/tracker.py", "exec"))
threading.Thread(target=send, daemon=True).start()

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    if sys.argv[2] == "answers":
        answer_with_stacks(int(sys.argv[1]))
    print("ready", flush=True)
    lock.acquire()

waits_for_a_lock()
"""


@pytest.fixture
def status() -> Iterator[RunStatus]:
    made = RunStatus(2, range(2))
    yield made
    made.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the clock of the launcher is ahead."""
    ahead, real = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    return ahead


@pytest.fixture
def devices(
    status: RunStatus, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[HostDevice]]:
    """Two processes that wait for a lock."""
    (tmp_path / "script.py").write_text(PROGRAM)
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py", str(stacks), getattr(request, "param", "answers")],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            pass_fds=[stacks],
            env={**os.environ, "PYTHONPATH": str(Path(onefold.__file__).parents[1])},
        )
        for stacks in status.stacks.values()
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    yield [
        HostDevice(rank, process.pid, status.progress, status.stacks[rank])
        for rank, process in enumerate(processes)
    ]
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Hung:
    """Device 1 has waited for 11 seconds for device 0, which computes shard 2 of step 7."""

    def __init__(
        self, status: RunStatus, devices: list[HostDevice], later: list[float], record: Path
    ) -> None:
        self.progress, self.devices, self.later = status.progress, devices, later
        self._watch = HangWatch(record)
        for rank in (0, 1):
            self.progress.set_step(rank, 7)
        self.progress.set_shard(0, 2)
        self.progress.set_waiting(1, 0)
        for seconds in (6, 5):
            self.report()
            later[0] += seconds

    def report(self) -> None:
        self._watch.report_hangs(self.devices)


@pytest.fixture
def hung(status: RunStatus, devices: list[HostDevice], later: list[float], tmp_path: Path) -> Hung:
    return Hung(status, devices, later, tmp_path / FILE)


def test_who_waits_for_whom_is_told_once_with_stacks(
    hung: Hung, capsys: pytest.CaptureFixture[str]
) -> None:
    hung.report()
    text = capsys.readouterr().err
    assert re.search(r"device 1 has waited for \d+ s for device 0, in step 7", text)
    assert f"device 0 (process {hung.devices[0].pid}) computes shard 2 in step 7:" in text
    assert f"device 1 (process {hung.devices[1].pid}) waits for others in step 7:" in text
    assert text.count("script.py:14 in waits_for_a_lock") == 2
    assert "another thread" not in text, "that of an installed package"
    hung.later[0] += 100
    hung.report()
    assert not capsys.readouterr().err


def test_a_wait_that_ends_or_is_usual_is_not_told(
    hung: Hung, capsys: pytest.CaptureFixture[str]
) -> None:
    hung.progress.set_waiting(1, None)
    hung.progress.set_waiting(1, 0)
    hung.report()
    for step in range(8, 20):  # steps of 20 seconds
        hung.later[0] += 20
        hung.progress.set_waiting(1, None)
        for rank in (0, 1):
            hung.progress.set_step(rank, step)
        hung.report()
    hung.progress.set_waiting(1, 0)
    hung.report()
    hung.later[0] += 50
    hung.report()
    assert not capsys.readouterr().err
    hung.later[0] += 15
    hung.report()
    assert re.search(r"device 1 has waited for \d+ s", capsys.readouterr().err)


@pytest.mark.parametrize("devices", ["is silent"], indirect=True)
def test_a_process_without_the_handler_lives_on(
    hung: Hung, capsys: pytest.CaptureFixture[str]
) -> None:
    hung.report()
    assert capsys.readouterr().err.count("no stack: it does not answer") == 2
    assert all(Path(f"/proc/{device.pid}").exists() for device in hung.devices)


def test_the_record_has_it_and_its_count_is_as_before(hung: Hung, tmp_path: Path) -> None:
    writer = FrameWriter(tmp_path / FILE)
    writer.append(encode(FailureEntry(step=1, line="a.py:1", error="LossError", text="one")))
    hung.report()
    writer.append(encode(FailureEntry(step=2, line="a.py:1", error="LossError", text="two")))
    writer.close()
    record = onefold.Record(tmp_path)
    assert [each.step for each in record.entries if not isinstance(each, StepEntry)] == [1, 2]
    (told,) = record.hangs
    assert told.step == 7
    assert re.match(r"device 1 has waited for \d+ s for device 0", told.text)


def standing(
    rank: int,
    still_s: float,
    *,
    waits: bool = False,
    call: Call | None = None,
    shard: int = -1,
    busy: bool = False,
) -> DeviceReport:
    place = DevicePlace(7, shard, int(waits), -1, 3, call or 0, 0)
    return DeviceReport(rank, 100 + rank, "", place, still_s, busy, (f"    stack of {rank}",))


WAITING = standing(1, 30, waits=True)


@for_each(
    "others, usual_s, late",
    [
        pytest.param([standing(0, 30)], 0, True, id="hangs in the script"),
        pytest.param([standing(0, 4), standing(2, 40)], 0, False, id="another shard was begun"),
        pytest.param([standing(0, 30, busy=True)], 1, False, id="computes in the script"),
        pytest.param([standing(0, 70, busy=True)], 1, False, id="waits for 30 s alone"),
        pytest.param([standing(0, 30, call=Call.STEP, busy=True)], 1, True, id="endless shard"),
        pytest.param([standing(0, 30, call=Call.STEP, busy=True)], 0, False, id="compiles"),
        pytest.param([standing(0, 30, call=Call.EVALUATE, busy=True)], 1, False, id="evaluates"),
        pytest.param([standing(0, 30, call=Call.EVALUATE)], 1, True, id="hangs in evaluate"),
        pytest.param([standing(0, 30, call=Call.STEP)], 12, False, id="long steps"),
        pytest.param([standing(0, 30, waits=True)], 1, True, id="all wait"),
        pytest.param([], 1, True, id="nobody answers"),
    ],
)
def test_what_moves_is_not_waited_for_in_vain(
    others: list[DeviceReport], usual_s: float, late: bool
) -> None:
    assert (WAITING in late_of([WAITING, *others], usual_s, 1 + max(1, len(others)))) == late


def test_a_report_names_those_that_do_not_answer() -> None:
    late = [WAITING, standing(3, 31, waits=True)]
    reader = DeviceReport(2, 102, "b", DevicePlace(7, -1, 0, -1, 3, 0, 1), 31.0, False)
    lines = report_of([*late, reader, standing(4, 9, call=Call.SAVE)], 6).splitlines()
    assert lines == [
        "devices 1, 3 have waited for 31 s for devices 0, 2, 4, 5, in step 7",
        "no answer from devices 0, 5: suspended, or on a host that cannot be reached",
        "device 2 (process 102 on b) waits for its loader in step 7:",
        "device 4 (process 104) is at trainer.save in step 7:",
        "    stack of 4",
        "device 1 (process 101) waits for others in step 7:",
        "    stack of 1",
        "device 3 (process 103) waits for others in step 7:",
        "    stack of 3",
    ]


SCRIPT = """
import sys, time, torch, onefold

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)

def loss(model, batch):
    if batch[0, 0] == 5:
        time.sleep(60)
    return model(batch).square().mean(1)

trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=2)
for number in range(1, 9):
    trainer.step(torch.cat([torch.ones(1, 2), number * torch.ones(1, 2)]))
"""


@pytest.mark.full
@pytest.mark.fresh
@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_a_run_says_where_it_hangs(tmp_path: Path, exchange: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = f"--devices cpu:2 --exchange {exchange} --record run --timeout 20".split()
    done = ended("run", *options, "train.py", cwd=tmp_path)
    assert done.returncode
    assert "device 0 has waited for 10 s for device 1, in step 5" in done.stderr
    assert "computes shard 1 in step 5:" in done.stderr
    assert "train.py:9 in loss" in done.stderr
    assert len(onefold.Record(tmp_path / "run").hangs) == 1

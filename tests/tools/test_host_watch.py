"""Processes of other launchers watch themselves for devices that wait in vain, on all hosts."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from onefold.core.options import LaunchContext
from onefold.exchange.progress import TABLE_LABEL, WAITING, Progress
from onefold.launcher.hang import STACKS_LABEL, HostDevice
from onefold.system.safe_files import memory_file
from onefold.tools import host_watch
from onefold.tools.host_watch import HostWatch

LIMIT_S, END_S = 60.0, 10.0
RECORDS = Path("/runs")


class Hosts:
    """Devices of this process, each of which believes to be on a host of that name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: Any = HashStore()
        self.tables: list[Progress] = []
        self.ahead_s = 0.0
        self.recorded: list[tuple[Path, int, str]] = []
        monkeypatch.setattr(host_watch, "record_hang", lambda *about: self.recorded.append(about))
        self._patch, self._real = monkeypatch, time.monotonic
        self._descriptors: list[int] = []
        self._watches: list[HostWatch] = []
        monkeypatch.setattr(host_watch, "LOOK_S", 0.1)
        monkeypatch.setattr(time, "monotonic", lambda: self._real() + self.ahead_s)

    def start(self, *names: str) -> None:
        for rank, name in enumerate(names):
            table, stacks = memory_file(TABLE_LABEL), memory_file(STACKS_LABEL)
            self._descriptors += [table, stacks]
            os.ftruncate(table, Progress.nbytes(len(names)))
            progress = Progress(table, len(names))
            progress.set_step(rank, 7)
            self.tables.append(progress)
            self._patch.setattr(host_watch, "host_identity", lambda name=name: name)
            self._patch.setattr(socket, "gethostname", lambda name=name: name)
            own = HostDevice(rank, os.getpid(), progress, stacks)
            store = PrefixStore("waits", self.store)
            record = RECORDS / f"{name}.record"
            self._watches.append(HostWatch(own, table, store=store, size=len(names), record=record))
            progress.set_step(rank, 9)

    def pass_s(self, *seconds: float) -> None:
        """Have these times pass, with a few looks after each."""
        for each in seconds:
            self.ahead_s += each
            time.sleep(0.4)

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Hosts]:
    caplog.set_level(logging.WARNING, WAITING)
    made = Hosts(monkeypatch)
    yield made
    made.close()


def waited(until: Callable[[], bool]) -> bool:
    limit = time.perf_counter() + LIMIT_S
    while not until() and time.perf_counter() < limit:
        time.sleep(0.05)
    return until()


@pytest.mark.parametrize("names", ["aa", "ab", "aab"])
def test_a_wait_in_vain_is_told_once(
    hosts: Hosts, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The last device waits for device 0, on this host or another one."""
    hosts.start(*names)
    hosts.tables[0].set_shard(0, 2)
    last = len(names) - 1
    for rank in range(1, len(names)):
        hosts.tables[rank].set_waiting(rank, 0)
    hosts.pass_s(0, 6, 6)
    assert waited(lambda: bool(caplog.messages))
    hosts.pass_s(2, 70)
    (text,) = caplog.messages
    on = f"process {os.getpid()}" if names == "aa" else f"process {os.getpid()} on a"
    who = "device 1 has" if last == 1 else "devices 1, 2 have"
    assert text.startswith(f"onefold: {who} waited for ")
    assert "for device 0, in step 9\n" in text
    assert f"device 0 ({on}) computes shard 2 in step 9:\n" in text
    assert text.count("waits for others in step 9:\n") == last
    # Device 0 has the record.
    assert hosts.recorded == [(RECORDS / "a.record", 9, text.removeprefix("onefold: "))]


def test_a_device_of_another_host_that_moves_is_not_told_of(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.start("a", "b")
    hosts.tables[1].set_waiting(1, 0)
    for shard in range(16):
        hosts.tables[0].set_shard(0, shard)
        hosts.pass_s(0.5)
    assert hosts.store.check(["waits/1/outcome"])
    assert not caplog.messages


def test_where_the_store_is_silent_the_host_reports(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """As the process that serves it is stopped."""
    silent, real = threading.Event(), PrefixStore("waits", hosts.store)

    class Store:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*given: object) -> Any:
                if name == "compare_set":
                    silent.wait(LIMIT_S)
                return getattr(real, name)(*given)

            return call

    hosts.store = None
    hosts._patch.setattr(sys.modules[__name__], "PrefixStore", lambda *given: Store())
    hosts.start("b", "a")
    hosts.tables[1].set_waiting(1, 0)
    hosts.pass_s(0, 6, 6, 5)
    assert waited(lambda: bool(caplog.messages))
    silent.set()
    assert "no answer from device 0: suspended, or on a host" in caplog.messages[0]


SCRIPT = """
import os, signal, sys, threading, time, torch, onefold

how, device = sys.argv[1], int(sys.argv[2])
mine = int(os.environ["RANK"]) == device

def hang(here):
    if mine and here == how and trainer.steps == 5:
        if how == "loader":  # as of a file server that is gone
            os.mkfifo("gone")
            open("gone").read()
        if how == "script":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if how == "exchange":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        hang("loader")
        return torch.tensor([float(number)])

def loss(model, batch):
    hang("forward")
    if how == "slow" and mine:  # as where it compiles, in the first step
        until = time.monotonic() + (20 if trainer.steps == 0 else 0)
        while time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
    return model(batch).square().mean(1)

def score(model, batch):
    time.sleep(1 if how == "slow" and mine else 0)
    return {"value": model(batch).square().mean(1)}

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss, shards=2)
for batch in trainer.loader(Numbers(), batch_size=8):
    hang("script")
    hang("exchange")
    trainer.step(batch)
trainer.evaluate(score, Numbers(), batch_size=4)
print("trained", trainer.steps, flush=True)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TOLD = {
    "loader": "waits for its loader in step 6:",
    "forward": "computes shard {device} in step 6:",
    "script": "is in the script in step 6:",
}
LINES = {"loader": "in __getitem__", "forward": "in loss", "script": "in <module>"}


def told_by(processes: Sequence[subprocess.Popen[str]], sign: str) -> str:
    """What processes print until they have ended, or a while after a sign; they are then killed."""
    lines: list[str] = []

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        lines.extend(process.stdout)

    readers = [threading.Thread(target=read, args=(process,)) for process in processes]
    for reader in readers:
        reader.start()
    limit = time.monotonic() + 2 * LIMIT_S
    while time.monotonic() < limit and any(process.poll() is None for process in processes):
        if any(sign in line for line in lines):
            time.sleep(5)  # a second report would come now
            break
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its own
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # one that is stopped
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, reader in zip(processes, readers, strict=True):
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
    return "".join(lines)


def started(
    command: Sequence[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.full
@pytest.mark.fresh
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("how", TOLD)
def test_a_hang_under_torchrun_is_told(tmp_path: Path, how: str, device: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *TORCHRUN, "train.py", how, str(device)]
    text = told_by([started(command, tmp_path)], " has waited for ")
    assert text.count(f"device {1 - device} has waited for 1") == 1
    assert f"for device {device}, in step 6" in text
    assert TOLD[how].format(device=device) in text
    assert LINES[how] in text


APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Where processes do not see those of other hosts."""


def on_two_hosts(folder: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    if shutil.which("unshare") is None or subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("processes cannot be hidden from each other here")
    (folder / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    # Not as the first process of its host, which no signal stops.
    shell = ("sh", "-c", '"$@"; exit $?', "sh", sys.executable, "train.py", *arguments)
    return [started((*APART, *shell), folder, {**common, "RANK": str(rank)}) for rank in (0, 1)]


@pytest.mark.full
@pytest.mark.fresh
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("how", [*TOLD, "exchange"])
def test_a_hang_on_another_host_is_told(tmp_path: Path, how: str, device: int) -> None:
    text = told_by(on_two_hosts(tmp_path, how, str(device)), " has waited for ")
    assert text.count(f"device {1 - device} has waited for 1") == 1
    assert f"for device {device}, in step 6" in text
    if how == "exchange":
        assert f"no answer from device {device}: stopped" in text
    else:
        assert TOLD[how].format(device=device) in text
        assert LINES[how] in text


@pytest.mark.full
@pytest.mark.fresh
@pytest.mark.parametrize("hosts", [1, 2])
def test_slow_devices_are_not_told_of(tmp_path: Path, hosts: int) -> None:
    """A first step that takes 20 s longer on one device, and an evaluation that takes 16 s."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *TORCHRUN, "train.py", "slow", "1"]
    one = hosts == 1
    run = [started(command, tmp_path)] if one else on_two_hosts(tmp_path, "slow", "1")
    text = told_by(run, " has waited for ")
    assert "trained 8" in text
    assert "has waited for" not in text


def test_a_report_of_any_device_reaches_the_launchers_terminal() -> None:
    """Its own stderr may be a log that nobody reads."""
    reading, writing = os.pipe()
    screen, before = logging.getLogger(WAITING), list(logging.getLogger(WAITING).handlers)
    host_watch.prepare_process(LaunchContext(rank=1, size=2, screen_descriptor=writing))
    (added,) = [each for each in screen.handlers if each not in before]
    try:
        screen.warning("device 0 hangs")
        assert os.read(reading, 100) == b"device 0 hangs\n"
    finally:
        screen.removeHandler(added)
        added.stream.close()  # type: ignore[attr-defined]
        os.close(reading)

"""Runs in containers that refuse system calls which onefold would rather use."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from onefold.launcher.workers import Worker, wait_for_end
from onefold.system.safe_files import memory_file
from tests.tables import for_each

NUMBERS = (errno.ENOSYS, errno.EPERM)


def refusing(number: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(signal if name == "pidfd_send_signal" else os, name, refuse)


def worker_of(code: str) -> Worker:
    command = [sys.executable, "-S", "-c", code]
    return Worker(0, "cpu", subprocess.Popen(command, start_new_session=True))


@pytest.mark.processes
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["pidfd_open", "pidfd_send_signal"])
def test_workers_without_pidfds(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(number, name, monkeypatch)
    quick, slow = worker_of("raise SystemExit(3)"), worker_of("import time; time.sleep(600)")
    assert wait_for_end([quick], 60)
    assert quick.code == 3
    assert not wait_for_end([slow], 0.01)
    reader, writer = os.pipe()
    os.write(writer, b"1")
    assert not wait_for_end([slow], 600, reader)
    slow.signal(signal.SIGTERM)
    assert wait_for_end([slow], 60)
    assert slow.code == -signal.SIGTERM
    slow.signal(signal.SIGTERM)  # it has ended: nothing to signal
    for worker in (quick, slow):
        worker.kill_all()
        worker.collect()
    os.close(reader)
    os.close(writer)


@for_each("number", NUMBERS)
def test_memory_without_memfds(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/dev/shm"))
    refusing(number, "memfd_create", monkeypatch)
    descriptor = memory_file()
    try:
        os.ftruncate(descriptor, 100)
        assert not os.get_inheritable(descriptor)
        assert os.pread(descriptor, 200, 0) == bytes(100)
        with open(f"/proc/self/fd/{descriptor}", "r+b") as again:
            assert len(again.read()) == 100
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        os.close(descriptor)

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType

import pytest

from onefold.system.process import ctrl_c_as_before, ctrl_c_later


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, as it does in a program that is started by hand, and is given back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press(*, put_off: int, error: Exception | None = None) -> list[str]:
    """Press Ctrl-C in so many blocks; what was reached before it was felt."""
    reached: list[str] = []
    try:
        with ExitStack() as blocks:
            for _ in range(put_off):
                blocks.enter_context(ctrl_c_later())
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")
            if error is not None:
                raise error
        reached.append("what comes after")
    except KeyboardInterrupt as interrupt:
        reached.append(f"Ctrl-C, after {interrupt.__context__}")
    return reached


@pytest.mark.parametrize("put_off", [1, 2])
def test_ctrl_c_comes_when_the_block_is_left(put_off: int) -> None:
    assert press(put_off=put_off) == ["the end of the block", "Ctrl-C, after None"]


def test_it_comes_after_an_exception_too() -> None:
    reached = press(put_off=1, error=ValueError("an error"))
    assert reached == ["the end of the block", "Ctrl-C, after an error"]


def test_without_the_block_it_comes_at_once() -> None:
    assert press(put_off=0) == ["Ctrl-C, after None"]


def test_without_ctrl_c_nothing_happens() -> None:
    with ctrl_c_later():
        pass
    with pytest.raises(ValueError, match="of the block"), ctrl_c_later():
        raise ValueError("of the block")


def test_a_handler_of_the_program_is_called_once() -> None:
    came = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, handler)
    with ctrl_c_later():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert came == []
    assert came == [signal.SIGINT]
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ctrl_c_later():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.signal(signal.SIGINT, signal.default_int_handler) == signal.SIG_IGN


def test_another_thread_puts_nothing_off() -> None:
    found = []

    def look() -> None:
        with ctrl_c_later():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.processes
def test_a_forked_process_is_ended_by_ctrl_c() -> None:
    with ctrl_c_later(), ctrl_c_later():
        pid = os.fork()
        if pid == 0:
            ctrl_c_as_before()
            os._exit(3 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3

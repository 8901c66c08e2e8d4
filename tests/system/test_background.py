"""A child computes as this process does, on another core, and whatever becomes of it is noticed."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from onefold.system.background import Child, ChildError, has_idle_cores, on_other_cores

LIMIT_S = 60.0
_PR_GET_PDEATHSIG = 2
_cores = os.sched_getaffinity(0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gradient(dtype: torch.dtype = torch.bfloat16) -> bytes:
    """Of what PyTorch divides among all threads, under autocast."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(),
        torch.nn.Linear(8 * 30 * 30, 64), torch.nn.Dropout(), torch.nn.Linear(64, 4),
    )  # fmt: skip
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.randn(16, 3, 32, 32)).square().mean()
    loss.backward()
    return b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None)


def test_a_child_computes_the_same_bits(threads: int) -> None:
    here = gradient()
    for _ in range(3):
        assert Child(gradient).result(LIMIT_S) == here
        assert gradient() == here


def test_all_that_belongs_to_the_thread_comes_along(threads: int) -> None:
    local = threading.local()
    local.value = 3

    def state() -> bytes:
        found = torch.is_grad_enabled(), torch.get_autocast_dtype("cpu"), torch.ones(1).dtype
        return repr((found, local.value, torch.get_num_threads())).encode()

    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with torch.no_grad():
            assert Child(state).result(LIMIT_S) == state()
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def test_a_child_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    changed = [0]

    def function() -> bytes:
        changed[0] = 1
        print("printed", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # to all of the terminal: the run decides
        signal_of_parent = ctypes.c_int()
        ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signal_of_parent), 0, 0, 0)
        return str(signal_of_parent.value).encode()

    assert Child(function).result(LIMIT_S) == str(int(signal.SIGKILL)).encode()
    assert changed == [0]
    assert capfd.readouterr() == ("", "")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(
    ("function", "limit_s", "why"),
    [
        (lambda: b"x" * int("none"), LIMIT_S, "ValueError: invalid literal"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), LIMIT_S, "it ended without an answer"),
        (lambda: os._exit(3), LIMIT_S, "it ended without an answer"),
        (lambda: time.sleep(LIMIT_S), 0.1, "it did not answer within"),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), 0.1, "it did not answer within"),
    ],
)
def test_a_child_without_a_result(function: Callable[[], bytes], limit_s: float, why: str) -> None:
    child = Child(function)
    with pytest.raises(ChildError, match=why):
        child.result(limit_s)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    child.end()


def test_a_script_may_collect_children_itself() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert Child(lambda: b"x" * 300_000).result(LIMIT_S) == b"x" * 300_000
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.skipif(len(_cores) < 2, reason="needs a second core")
def test_a_child_computes_on_another_core() -> None:
    torch.set_num_threads(1)
    core = min(_cores)
    os.sched_setaffinity(0, {core})
    try:
        # This process may use no other, and so no child of it.
        assert (
            Child(lambda: repr(os.sched_getaffinity(0)).encode()).result(LIMIT_S) == b"{%d}" % core
        )
        assert not has_idle_cores()
    finally:
        os.sched_setaffinity(0, _cores)
    assert has_idle_cores()
    found = Child(lambda: repr(os.sched_getaffinity(0)).encode()).result(LIMIT_S)
    assert len(_cores) - found.count(b",") == 2
    with on_other_cores():
        assert len(os.sched_getaffinity(0)) == len(_cores) - 1
        gradient()
    assert os.sched_getaffinity(0) == _cores


def test_cores_may_not_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some containers."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert Child(lambda: b"a value").result(limit_s=60.0) == b"a value"
    with on_other_cores():
        pass

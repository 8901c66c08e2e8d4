from __future__ import annotations

import threading

import pytest

from onefold.checkpoint.background import Background, finish_all
from tests.tables import for_each


def fail() -> None:
    raise OSError("the disk is full")


def test_a_job_runs_beside_the_caller() -> None:
    gate, done = threading.Event(), threading.Event()
    background = Background("waiting")
    background.start(lambda: (gate.wait(), done.set()))  # type: ignore[arg-type]
    background.check()
    assert not done.is_set()
    gate.set()
    background.wait()
    assert done.is_set()


@for_each("how", ["check", "wait", "finish all", "tell"])
def test_what_fails_is_raised_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Or written down, where nobody could catch it."""
    background = Background("writing")
    background.start(fail)
    for thread in threading.enumerate():
        if thread.name == "writing":
            thread.join()
    if how == "tell":
        background.tell()
        assert "writing failed: OSError: the disk is full" in caplog.text
    else:
        with pytest.raises(OSError, match="the disk is full"):
            (finish_all if how == "finish all" else getattr(background, how))()
    background.check()
    background.wait()
    finish_all()

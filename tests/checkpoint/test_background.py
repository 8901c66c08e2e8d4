from __future__ import annotations

import logging
import threading

import pytest

from onefold.checkpoint.background import Background, finish_all
from tests.tables import for_each


def test_a_job_runs_beside_the_caller() -> None:
    gate, done = threading.Event(), threading.Event()
    background = Background("waiting")
    background.start(lambda: (gate.wait(), done.set()))  # type: ignore[arg-type]
    background.check()
    assert not done.is_set()
    gate.set()
    background.wait()
    assert done.is_set()


def fail() -> None:
    raise OSError("the disk is full")


@for_each("how", ["check", "wait"])
def test_what_fails_is_raised_once(how: str) -> None:
    background = Background("writing")
    background.start(fail)
    background._thread.join()  # type: ignore[union-attr]
    with pytest.raises(OSError, match="the disk is full"):
        getattr(background, how)()
    background.check()
    background.wait()


def test_all_that_is_under_way_can_be_waited_for() -> None:
    background = Background("writing")
    background.start(fail)
    with pytest.raises(OSError, match="the disk is full"):
        finish_all()
    finish_all()


def test_what_nobody_can_catch_is_written_down(caplog: pytest.LogCaptureFixture) -> None:
    background = Background("writing")
    background.start(fail)
    with caplog.at_level(logging.ERROR, "onefold"):
        background.tell()
    assert "writing failed: OSError: the disk is full" in caplog.text

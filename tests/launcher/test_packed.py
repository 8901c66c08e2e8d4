"""Functions are sent to the devices from wherever they were defined, or refused before any work."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.errors import RunFailed
from tests.small import make_trainer
from tests.tables import for_each


@for_each(
    ("make", "text"),
    [
        (threading.Lock, "cannot pickle '_thread.lock' object. It or one of its arguments refers"),
        (Path(__file__).open, "refers to an open file: open it inside the function"),
        (make_trainer, "refers to a Trainer, which belongs to this process: make it inside"),
    ],
)
def test_what_cannot_be_sent_is_refused(make: Callable[[], object], text: str) -> None:
    made: Any = make()
    with pytest.raises(TypeError, match=f"<lambda> cannot be sent to the devices' .*{text}"):
        onefold.launch(lambda: made, devices="cpu:2")
    if hasattr(made, "close"):
        made.close()


def test_a_notebook_shows_the_message_alone() -> None:
    failure = RunFailed("stopped by Ctrl-C in step 3 (device 0)", 130)
    shown = vars(RunFailed)["_render_traceback_"](failure)
    assert shown == ["RunFailed: stopped by Ctrl-C in step 3 (device 0)"]

"""Functions are sent to the devices from wherever they were defined, or refused before any work."""

import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import RunFailed
from tests.small import make_trainer, points
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


@pytest.mark.processes
def test_what_comes_back_leaves_the_classes_of_the_caller_as_they_are() -> None:
    class Net(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2.0

    class Color(Enum):
        RED = 1

    def main() -> Any:
        class Local(Net):
            pass

        Net.calls += 1
        model = Net(3, 1)
        trainer = make_trainer(model, devices=None)
        trainer.step(points(8))
        return trainer.model, trainer.fingerprint(), Net, Color.RED, Local(3, 1), type(None)

    before = dict(vars(Net)), dict(vars(Color))
    model, fingerprint, kind, color, local, nothing = onefold.launch(main, devices="cpu:2")
    assert (dict(vars(Net)), dict(vars(Color))) == before
    assert (type(model), kind, color, nothing) == (Net, Net, Color.RED, type(None))
    assert type(local).__mro__[1] is Net
    assert make_trainer(model, shards=1).fingerprint() == fingerprint
    assert model(torch.ones(2, 3)).shape == (2, 1)


@pytest.mark.processes
def test_what_cannot_come_back_is_named() -> None:
    with pytest.raises(RunFailed, match=r"returned an object of dict that cannot be sent back: .*"):
        onefold.launch(lambda: {"lock": threading.Lock()}, devices="cpu:1")


def test_a_notebook_shows_the_message_alone() -> None:
    failure = RunFailed("stopped by Ctrl-C in step 3 (device 0)", 130)
    shown = vars(RunFailed)["_render_traceback_"](failure)
    assert shown == ["RunFailed: stopped by Ctrl-C in step 3 (device 0)"]

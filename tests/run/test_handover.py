"""Functions are sent to the devices from wherever they were defined, or refused before any work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import onefold
from tests.small import make_trainer
from tests.tables import for_each


def of_a_lock() -> object:
    lock = threading.Lock()
    return lambda: lock.acquire()


def of_a_trainer() -> object:
    trainer = make_trainer()
    return lambda: trainer.steps


@for_each(
    ("make", "text"),
    [
        (of_a_lock, "cannot pickle '_thread.lock' object. It, or one of its arguments, refers to"),
        (of_a_trainer, "refers to a Trainer, which belongs to this process: make it inside"),
    ],
)
def test_what_cannot_be_sent_is_refused(make: Callable[[], Callable[..., Any]], text: str) -> None:
    with pytest.raises(TypeError, match=f"<lambda> cannot be sent to the devices' .*{text}"):
        onefold.launch(make(), devices="cpu:2")

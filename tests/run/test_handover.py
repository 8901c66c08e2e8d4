"""Functions are sent to the devices from wherever they were defined, or refused before any work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest

import onefold
from onefold.run.handover import pack_call
from tests.small import make_trainer
from tests.tables import for_each


def unpacked(function: Callable[..., Any], *arguments: Any) -> Any:
    sent, values = cloudpickle.loads(pack_call(function, arguments))
    return sent(*values)


def test_what_refers_to_values_is_sent_with_them() -> None:
    number = 40
    assert unpacked(lambda: number + 2) == 42
    assert unpacked(partial(lambda a, b: a + b, number), 2) == 42
    assert unpacked(partial(partial(max, 42), 7)) == 42


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
def test_what_another_process_could_not_have_is_refused_before_any_work(
    make: Callable[[], Callable[..., Any]], text: str
) -> None:
    with pytest.raises(TypeError, match=f"<lambda> cannot be sent to the devices' .*{text}"):
        onefold.launch(make(), devices="cpu:2")


def test_a_trial_or_a_study_itself_is_refused_before_any_work() -> None:
    """Every device would have a copy, and the study would know nothing of what it suggests."""
    optuna = pytest.importorskip("optuna", reason="needs optuna")
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    study = optuna.create_study()
    text = r"refers to an Optuna trial: ask it for values before, pass trial\.params"
    with pytest.raises(TypeError, match=text):
        study.optimize(lambda t: onefold.launch(lambda: t.suggest_float("a", 0, 1)), n_trials=1)
    with pytest.raises(TypeError, match=text):
        study.optimize(lambda trial: onefold.launch(len, args=(trial,)), n_trials=1)
    with pytest.raises(TypeError, match="refers to an Optuna study: call launch from the obj"):
        onefold.launch(lambda: study.best_value)

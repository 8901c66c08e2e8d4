"""Tools around a step: in which order they are told, and what becomes of their errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.shard.task import ShardTask
from onefold.step.hook import Attempt, Hook, Hooks, Make, ScriptCall, Spans, Surrounds
from onefold.step.result import Step
from tests.inside import engine_in
from tests.small import make_trainer, points


class Noting(Hook):
    def __init__(self, name: str, told: list[str], fails: str = "") -> None:
        self._name, self._told, self._fails = name, told, fails

    def _note(self, what: str) -> None:
        self._told.append(f"{self._name} {what}")
        if what == self._fails:
            raise RuntimeError(what)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        self._note("call")
        try:
            return make()
        finally:
            self._note("called")

    @contextmanager
    def around(self, asked: ScriptCall) -> Iterator[None]:
        self._note("around")
        try:
            yield
        finally:
            self._note("left")

    def task(self, task: ShardTask) -> ShardTask:
        self._note("task")
        return task

    @contextmanager
    def around_compute(self, attempt: Attempt) -> Iterator[None]:
        self._note("compute")
        yield
        self._note(f"computed {attempt.whole}")

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        self._note(f"after {step.number}")


ONE_STEP = """
    a call, b call, a around, b around, a task, b task, a compute, b compute, b computed True,
    a computed True, b left, a left, b after 1, a after 1, b called, a called
"""


def with_hooks(*hooks: Hook) -> onefold.Trainer:
    trainer = make_trainer()
    engine_in(trainer).hooks.replace(hooks)
    return trainer


def test_the_first_is_outermost() -> None:
    told: list[str] = []
    with_hooks(Noting("a", told), Noting("b", told)).step(points(8))
    assert told == [each.strip() for each in ONE_STEP.split(",")]


def test_who_has_begun_is_told_of_an_error() -> None:
    told: list[str] = []
    trainer = with_hooks(Noting("a", told), Noting("b", told, "around"), Noting("c", told))
    with pytest.raises(RuntimeError, match="around"):
        trainer.step(points(8))
    assert told[-5:] == ["b around", "a left", "c called", "b called", "a called"]
    assert trainer.steps == 0


def test_a_computation_that_is_refused_is_made_again() -> None:
    class Refusing(Hook):
        times = 0

        @contextmanager
        def around_compute(self, attempt: Attempt) -> Iterator[None]:
            yield
            self.times += 1
            attempt.again = self.times < 3

    plain, again = make_trainer(), with_hooks(hook := Refusing())
    one, other = plain.step(points(8)), again.step(points(8))
    assert hook.times == 3
    assert (one.loss, plain.fingerprint()) == (other.loss, again.fingerprint())


def test_what_nobody_overrides_is_in_no_list() -> None:
    hooks = Hooks()
    hooks.replace([Hook(), Hook()])
    overridden: list[object] = [*hooks.tasks, *hooks.updates, *hooks.after_step]
    assert overridden == []
    assert hooks.call(ScriptCall("result"), lambda: 3) == 3
    with hooks.around(ScriptCall("step")) as nothing:
        assert nothing is None


def test_a_function_that_fails_leaves_its_step_in_the_record(tmp_path: Path) -> None:
    def fail(step: onefold.Step) -> None:
        raise ValueError("of the script")

    class Silent(Hook):
        def around(self, asked: ScriptCall) -> Surrounds:
            return None

    trainer = make_trainer()
    trainer.on_step(fail)
    trainer.record(tmp_path)
    engine_in(trainer).hooks.replace([*engine_in(trainer).hooks.every, Silent()])
    with pytest.raises(ValueError, match="of the script"):
        trainer.step(points(8))
    trainer.close()
    assert onefold.Record(tmp_path).steps["step"].tolist() == [1]

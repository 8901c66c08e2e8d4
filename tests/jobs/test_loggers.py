"""What a job tells the loggers of others; fakes of their modules, as each has its own server."""

import importlib.machinery
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onefold.errors import LaunchError
from onefold_jobs.loggers import require_logger
from tests.capabilities import needs_text
from tests.jobs.tiny import run_here, write_texts
from tests.tables import for_each

needs_text()


class Fake:
    """A module that notes what it is told."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[dict[str, Any]] = []
        self.numbers: list[tuple[int, dict[str, float]]] = []
        self.options: dict[str, Any] = {}
        self.ends = 0
        self.failing = False
        module: Any = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.init = module.start_run = self.begin
        module.log_params = self.options.update
        module.log = module.log_metrics = self.log
        module.finish = module.end_run = self.end
        monkeypatch.setitem(sys.modules, name, module)

    def begin(self, **how: Any) -> Any:
        if self.failing:
            raise RuntimeError("not logged in")
        self.begun.append(how)
        self.options.update(how.get("config", {}))
        run = SimpleNamespace(id="run-1", log=self.log, finish=self.end)
        return SimpleNamespace(**vars(run), info=SimpleNamespace(run_id="run-1"))

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.failing:
            raise ConnectionError("no server")
        self.numbers.append((step, dict(numbers)))

    def end(self) -> None:
        if self.failing:
            raise RuntimeError("not logged in")
        self.ends += 1


@for_each(
    ("name", "again"),
    [
        ("wandb", {"id": "run-1", "resume": "allow"}),
        ("mlflow", {"run_id": "run-1"}),
        ("trackio", {"name": "it", "resume": "allow"}),
    ],
)
def test_a_logger_gets_the_numbers_and_its_run_goes_on(
    name: str, again: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, data, runs = Fake(name, monkeypatch), write_texts(tmp_path / "data"), tmp_path / "runs"
    _, first = run_here("text", data, runs, name="it", log=name)
    assert fake.options["batch_size"] == 8
    assert [step for step, numbers in fake.numbers if "train/loss" in numbers] == [1, 2, 3, 4, 5]
    assert [step for step, numbers in fake.numbers if "test/accuracy" in numbers] == [5]
    assert not {"id", "run_id"} & {n for n, value in fake.begun[0].items() if value}
    run_here("text", data, runs, name="it", resume=True, epochs=2)
    assert fake.ends == 2
    assert fake.begun[1].items() >= again.items()
    assert [step for step, numbers in fake.numbers if "test/accuracy" in numbers] == [5, 10]
    assert first["best"]["value"] == fake.numbers[6][1]["test/accuracy"]


def test_a_logger_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake, data, runs = Fake("wandb", monkeypatch), write_texts(tmp_path / "data"), tmp_path / "runs"
    fake.failing = True
    with pytest.raises(LaunchError, match="--log wandb: cannot open the logger: not logged "):
        run_here("text", data, runs, name="refused", log="wandb")
    sys.modules["wandb"].init = lambda **_: SimpleNamespace(  # type: ignore[attr-defined]
        id="", log=fake.log, finish=fake.end
    )
    with caplog.at_level(logging.WARNING, "onefold"):
        _, said = run_here("text", data, runs, name="kept", log="wandb")
    assert said["finished"]
    told = [each.getMessage() for each in caplog.records]
    assert [each for each in told if "log" in each] == [
        "logging stops: no server",
        "the logger did not close: not logged in",
    ]


def test_a_logger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, extra in (("tensorboard", "report"), ("trackio", "trackio"), ("wandb", "loggers")):
        with pytest.raises(LaunchError, match=rf"--log {name} requires .*onefold-jobs\[{extra}\]"):
            require_logger(name)  # type: ignore[arg-type]
    require_logger(None)

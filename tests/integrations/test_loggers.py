"""Numbers of steps in the loggers that people have: from the lead, with the right steps."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import onefold
from onefold.integrations.loggers import log_steps
from tests import simulated
from tests.conftest import ROOT
from tests.small import Batch, line, points, sgd

Written = list[tuple[int, dict[str, float]]]
STEPS, EVERY = 6, 2


def loss(model: torch.nn.Module, batch: Batch) -> Any:
    inputs, targets = batch
    found = model(inputs)
    return (found - targets).square().mean(dim=1), {"size": found.detach().abs().mean()}


def trainer_of(devices: Sequence[str] | None) -> onefold.Trainer:
    model = line()
    return onefold.Trainer(model, sgd(model), loss, shards=3, devices=devices)


def logged(folder: str, devices: Sequence[str] | None = None) -> None:
    """Write a file in a folder on each device that has a logger of its own."""
    trainer = trainer_of(devices)
    path = Path(folder) / "device-0.log"

    def write(numbers: dict[str, float], step: int) -> None:
        numbers = {name: value for name, value in numbers.items() if "per_s" not in name}
        with path.open("a") as file:
            file.write(json.dumps([step, numbers]) + "\n")

    log_steps(trainer, write if trainer.is_lead else None, every=EVERY)
    for _ in range(STEPS):
        trainer.step(points(8))
    trainer.close()


def test_the_first_step_and_each_nth_is_written() -> None:
    trainer = trainer_of(["cpu"] * 2)
    written: Written = []
    log = log_steps(trainer, lambda numbers, step: written.append((step, numbers)), every=3)
    done = [trainer.step(points(8)) for _ in range(7)]
    assert [step for step, _ in written] == [1, 3, 6]
    for number, numbers in written:
        step = done[number - 1]
        assert numbers["train/loss"] == float(step.loss)
        assert numbers["train/grad_norm"] == step.grad_norm
        assert numbers["train/size"] == float(step.values["size"])
        assert ("train/samples_per_s" in numbers) == (number > 1)
        assert all(math.isfinite(value) for value in numbers.values())
    # Other numbers belong to the step that is done.
    log({"score": torch.tensor(0.25, dtype=torch.float64)})
    assert written[-1] == (7, {"score": 0.25})


def test_rates_have_the_names_of_optimizers_and_groups() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)})
    optimizers = {
        "a": torch.optim.SGD(model["a"].parameters(), lr=0.5),
        "b": torch.optim.SGD([{"params": [p], "lr": 0.1} for p in model["b"].parameters()]),
    }
    losses = {name: lambda m, x, name=name: m[name](x).square().mean(dim=1) for name in optimizers}
    trainer = onefold.Trainer(model, optimizers, losses, shards=2)
    written: Written = []
    to = lambda numbers, step: written.append((step, numbers))  # noqa: E731
    log_steps(trainer, to, every=1, prefix="", optimizer=optimizers)
    trainer.step(torch.ones(4, 2), "a")
    trainer.step(torch.ones(4, 2), "b")
    rates = {"a/lr": 0.5, "b/lr/0": 0.1, "b/lr/1": 0.1}
    assert {name: value for name, value in written[0][1].items() if "lr" in name} == rates
    assert {"a/loss", "a/grad_norm"} < written[0][1].keys()
    assert "b/loss" in written[1][1]


def test_trackio_is_written_to_by_a_run_or_its_module() -> None:
    written: list[tuple[int, float]] = []

    def log(numbers: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        written.append((step, numbers["train/loss"]))

    run = type("Run", (), {"__module__": "trackio.run", "log": staticmethod(log)})()
    module = ModuleType("trackio")
    module.log = log  # type: ignore[attr-defined]
    for logger in (run, module):
        trainer = trainer_of(None)
        log_steps(trainer, logger, every=1)
        trainer.step(points(8))
    assert [step for step, _ in written] == [1, 1]
    other = type("Run", (), {"log": staticmethod(log)})()
    with pytest.raises(TypeError, match="a run of Weights & Biases or trackio, the module mlflow"):
        log_steps(trainer_of(None), other)


def test_what_a_logger_draws_shifts_nothing() -> None:
    def drawn(observed: bool) -> list[float]:
        torch.manual_seed(0)
        trainer = trainer_of(["cpu"] * 2)
        if observed:
            trainer.on_step(lambda step: torch.rand(3))
        found = []
        for _ in range(3):
            trainer.step(points(8))
            found.append(float(torch.rand(1)))
        return found

    assert drawn(True) == drawn(False)


def test_what_a_function_raises_ends_the_step_that_is_counted() -> None:
    trainer = trainer_of(None)

    def full(step: onefold.Step) -> None:
        raise OSError("no space left on device")

    trainer.on_step(full)
    with pytest.raises(OSError, match="no space left"):
        trainer.step(points(8))
    assert trainer.steps == 1


def test_several_devices_have_one_log_of_one_device(tmp_path: Path) -> None:
    simulated.launch(logged, devices="cpu:3", args=(str(tmp_path),))
    assert [path.name for path in tmp_path.iterdir()] == ["device-0.log"]
    alone = tmp_path / "alone"
    alone.mkdir()
    logged(str(alone), ["cpu"])
    expected = (alone / "device-0.log").read_text()
    assert (tmp_path / "device-0.log").read_text() == expected
    assert len(expected.splitlines()) == 1 + STEPS // EVERY


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = trainer_of(None)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        log = log_steps(trainer, writer, every=2)
        losses = [float(trainer.step(points(8)).loss) for _ in range(4)]
        log({"score": 0.5})
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    expected = [(number, losses[number - 1]) for number in (1, 2, 4)]
    assert found == [(number, pytest.approx(loss)) for number, loss in expected]
    assert [(event.step, event.value) for event in events.Scalars("score")] == [(4, 0.5)]


def in_own_process(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script whose library keeps threads; it has a trainer and a folder."""
    words = (
        "import json, pathlib, sys",
        "from onefold.integrations.loggers import log_steps",
        "from tests.integrations.test_loggers import trainer_of",
        "from tests.small import points",
        "folder, trainer = pathlib.Path(sys.argv[1]), trainer_of(None)",
        script,
    )
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(words), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found


MLFLOW = """
import mlflow

mlflow.set_tracking_uri(folder.as_uri())
mlflow.set_experiment("onefold")
with mlflow.start_run() as run:
    log = log_steps(trainer, mlflow, every=2)
    losses = [float(trainer.step(points(8)).loss) for _ in range(4)]
    log({"score": 0.5})
client = mlflow.MlflowClient()
found = [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, "train/loss")]
print(json.dumps([found, losses, client.get_run(run.info.run_id).data.metrics["score"]]))
"""


@pytest.mark.full
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    steps, losses, score = json.loads(in_own_process(MLFLOW, tmp_path).stdout.splitlines()[-1])
    assert steps == [[number, losses[number - 1]] for number in (1, 2, 4)]
    assert score == 0.5


WANDB = """
import wandb

with wandb.init(mode="offline", dir=folder, project="onefold") as run:
    log = log_steps(trainer, run, every=2)
    losses = [float(trainer.step(points(8)).loss) for _ in range(4)]
    log({"score": 0.5})
print(json.dumps(losses))
"""


@pytest.mark.full
def test_weights_and_biases(tmp_path: Path) -> None:
    """What the library says of the run when it ends: the numbers of its last step."""
    pytest.importorskip("wandb")
    found = in_own_process(WANDB, tmp_path)
    losses = json.loads(found.stdout.splitlines()[-1])
    summary = dict(re.findall(r"^wandb: +(\S+) ([\d.]+)$", found.stderr, re.MULTILINE))
    assert float(summary["train/loss"]) == pytest.approx(losses[3], abs=1e-4)
    assert float(summary["score"]) == 0.5

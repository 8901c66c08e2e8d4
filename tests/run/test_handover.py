"""Functions are sent to the devices from wherever they were defined, or refused before any work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import onefold
from onefold.run.handover import pack_call
from tests.small import make_trainer
from tests.tables import for_each

CELLS = [
    """
import torch, onefold
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x)
factor = 2.0
""",
    """
def main(rate):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = lambda model, x: factor * model(x).square().mean(1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    trainer.step(torch.ones(8, 4))
    return model, trainer.fingerprint()
""",
    """
model, two = onefold.launch(lambda: main(0.1), devices="cpu:2")
_, one = onefold.launch(main, devices="cpu:1", args=(0.1,))
print(type(model) is Net, one == two)
""",
]
"""A notebook: a class, a function, a constant and a lambda of its own."""


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


def of_a_generator() -> object:
    numbers = (number for number in range(3))
    return lambda: next(numbers)


def of_a_trainer() -> object:
    trainer = make_trainer()
    return lambda: trainer.steps


@for_each(
    ("make", "text"),
    [
        (of_a_lock, "cannot pickle '_thread.lock' object. It, or one of its arguments, refers to"),
        (of_a_generator, "cannot pickle 'generator' object"),
        (of_a_trainer, "refers to a Trainer, which belongs to this process: make it inside"),
    ],
)
def test_what_another_process_could_not_have_is_refused_before_any_work(
    make: Callable[[], Callable[..., Any]], text: str
) -> None:
    with pytest.raises(TypeError, match=f"<lambda> cannot be sent to the devices' .*{text}"):
        onefold.launch(make(), devices="cpu:2")


@pytest.mark.full
@pytest.mark.processes
def test_what_is_defined_in_an_interactive_session(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input="\n".join(CELLS),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.full
@pytest.mark.processes
def test_what_is_defined_in_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel and nbclient")
    pytest.importorskip("nbclient", reason="needs ipykernel and nbclient")
    script = tmp_path / "notebook.py"
    script.write_text(
        "import nbformat, nbclient\n"
        "from nbformat.v4 import new_code_cell, new_notebook\n"
        f"book = new_notebook(cells=[new_code_cell(cell) for cell in {CELLS!r}])\n"
        "nbclient.NotebookClient(book, timeout=600, kernel_name='python3').execute()\n"
        "print(book.cells[-1].outputs[0]['text'], end='')\n"
    )
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout == "True True\n", done.stderr


def train(rate: float) -> float:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = make_trainer(
        model, lambda m, x: m(x).square().mean(1), optimizer=optimizer, devices=None
    )
    for _ in range(3):
        step = trainer.step(torch.ones(8, 4))
    return float(step.loss)


@pytest.mark.full
@pytest.mark.processes
def test_a_search_of_optuna() -> None:
    optuna = pytest.importorskip("optuna", reason="needs optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

    def rate_of(trial: Any) -> float:
        return float(trial.suggest_float("rate", 1e-3, 0.1, log=True))

    study.optimize(
        lambda trial: onefold.launch(partial(train, rate_of(trial)), devices="cpu:2"), n_trials=1
    )

    def with_a_closure(trial: Any) -> float:
        rate = rate_of(trial)
        return float(onefold.launch(lambda: train(rate), devices="cpu:1"))

    study.optimize(with_a_closure, n_trials=1)
    first, second = study.trials
    assert first.value == onefold.launch(train, devices="cpu:1", args=(first.params["rate"],))
    assert second.state.is_finished()


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


SEARCH = """
import optuna, torch, onefold
optuna.logging.set_verbosity(optuna.logging.ERROR)

def loss(model, x):
    return model(x).square().mean(1)

def objective(trial):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    for step in range(3):
        trainer.step(torch.ones(8, 4))
        scores = trainer.evaluate(lambda m, x: {"loss": loss(m, x)}, torch.ones(9, 4), batch_size=4)
        trial.report(scores["loss"], step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return scores["loss"]

study = optuna.create_study(
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
)
study.optimize(objective, n_trials=6)
pruned = sum(trial.state.name == "PRUNED" for trial in study.trials)
print(pruned, study.best_value, study.best_params)
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_whole_search_on_all_devices_prunes_alike(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs optuna")
    (tmp_path / "search.py").write_text(SEARCH)
    said = []
    for devices in ("cpu:1", "cpu:2"):
        done = subprocess.run(
            [sys.executable, "-m", "onefold", "run", "--devices", devices, "search.py"],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    assert int(said[0].split()[0]) > 0, "nothing was pruned"

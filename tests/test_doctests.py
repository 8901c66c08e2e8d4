"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import tempfile
from pathlib import Path

import pytest
import torch

import onefold

SOURCE = Path(onefold.__file__).parent
STARTS_PROCESSES = {"onefold.run.launch"}

MODULES = sorted(
    ".".join(["onefold", *path.relative_to(SOURCE).with_suffix("").parts])
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text()
)


def test_there_are_examples_of_the_public_interface() -> None:
    assert {
        "onefold.trainer",
        "onefold.core.mean",
        "onefold.run.launch",
        "onefold.core.shard",
    } <= set(MODULES)


WITH_A_TRAINER = ("onefold.trainedmodel", "onefold.trainer", "onefold.integrations.loggers")


def a_trainer() -> dict[str, object]:
    """What the examples of the Trainer's methods begin with, as in the example of its class."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, x: model(x).square().mean(dim=1)  # noqa: E731
    return {"model": model, "trainer": onefold.Trainer(model, optimizer, loss, shards=2)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.processes if name in STARTS_PROCESSES else ())
        for name in MODULES
    ],
)
def test_the_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # some leave their files
    module = importlib.import_module(name)
    names = {
        "onefold": onefold,
        "torch": torch,
        **(a_trainer() if name in WITH_A_TRAINER else {}),
    }
    tests = doctest.DocTestFinder().find(module, extraglobs=names)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    reports: list[str] = []
    for test in tests:
        runner.run(test, out=reports.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(reports)
    assert runner.tries > 0

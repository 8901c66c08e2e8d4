"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import tempfile
from pathlib import Path
from typing import Any

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


WITH_A_TRAINER = (
    "onefold.core.batch",
    "onefold.integrations.loggers",
    "onefold.trainedmodel",
    "onefold.trainer",
)
WITH_PARTS = ("onefold.core.sharing", "onefold.engine.step")


def a_trainer() -> dict[str, object]:
    """What the examples of the Trainer's methods begin with, as in the example of its class."""
    names = parts()
    loss = lambda model, x: model(x).square().mean(dim=1)  # noqa: E731
    trainer = onefold.Trainer(names["model"], names["optimizer"], loss, shards=2)
    return {"model": names["model"], "trainer": trainer}


def parts() -> dict[str, Any]:
    """What a Trainer is made of, for examples that make one with a loss of their own."""
    model = torch.nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


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
    tests = doctest.DocTestFinder().find(module, extraglobs={"onefold": onefold, "torch": torch})
    shared = a_trainer() if name in WITH_A_TRAINER else {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    reports: list[str] = []
    for test in tests:
        test.globs |= parts() if name in WITH_PARTS else shared
        runner.run(test, out=reports.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(reports)
    assert runner.tries > 0

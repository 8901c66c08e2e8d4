"""Steps of a trainer in a comparison, in this process: what onefold verify would have written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.system.safe_files import read_record
from tests.inside import session_in


class Compared:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder = folder / "comparison"
        self.run = folder / "0"
        self.run.mkdir(parents=True)
        self._patch = monkeypatch
        monkeypatch.setattr("onefold.tools.verifying._progress", [])
        self.context = LaunchContext(
            options=RunOptions(tools={"verify": self.options()}), directory=str(self.run)
        )

    def options(self, **changed: Any) -> dict[str, Any]:
        run = {"folder": str(self.folder), "run": self.run.name, "steps": 3}
        return {**run, "mathematics": "float64", **changed}

    def trainer(
        self, model: nn.Module, loss: Callable[..., object], *, shards: int = 4, **settings: Any
    ) -> onefold.Trainer:
        self._patch.setattr("onefold.trainer.current_context", lambda: self.context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"threads": 1, "devices": ["cpu"], **settings}
        return onefold.Trainer(model, optimizer, loss, shards=shards, **settings)

    def step(
        self, model: nn.Module, loss: Callable[..., object], batch: object, **settings: Any
    ) -> dict[str, Any]:
        trainer = self.trainer(model, loss, **settings)
        trainer.step(batch)
        return self.lines(trainer)[1]

    def lines(self, trainer: onefold.Trainer) -> list[dict[str, Any]]:
        number = session_in(trainer).devices.trainer
        return read_record(self.folder, f"0-{number}-mathematics")


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compared:
    return Compared(tmp_path, monkeypatch)

"""Trainers that a search makes one after the other in a process leave nothing behind."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils.data import TensorDataset

import onefold
from onefold.testing import simulate
from tests.conftest import open_files

DATA = TensorDataset(torch.randn(16, 64), torch.arange(16) % 2)
PARTS: tuple[ModuleType, ...] = (module, optimizer)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trial(seed: int, folder: Path) -> str:
    """A training with all that a trial uses; every other Trainer is closed, the rest dropped."""
    torch.manual_seed(seed)
    parts = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 2)
    model = nn.Sequential(*parts)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
    trainer = onefold.Trainer(model, adam, loss, shards=2, seed=seed, scheduler=schedule)
    trainer.average(decay=0.9)
    for batch in trainer.loader(DATA, batch_size=8, shuffle=True):
        trainer.step(batch)
    trainer.evaluate(lambda net, batch: {"loss": loss(net, batch)}, DATA, batch_size=16)
    trainer.gather({"seed": seed})
    if seed % 4 == 1:
        trainer.save(folder / f"{seed}", wait=False)
    found = trainer.fingerprint()
    if seed % 2:
        trainer.close()
    return found


def left() -> dict[str, Any]:
    gc.collect()
    objects = gc.get_objects()
    kinds = Counter(str(type(each).__module__).partition(".")[0] for each in objects)
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    hooks = {
        f"{part.__name__}.{name}": len(value)
        for part in PARTS
        for name, value in vars(part).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    return {
        "objects of onefold": kinds["onefold"],
        "bytes of tensors": sum(each.untyped_storage().nbytes() for each in tensors),
        "threads": sorted(each.name for each in threading.enumerate()),
        "system threads": len(os.listdir("/proc/self/task")),
        "children": Path("/proc/self/task", str(os.getpid()), "children").read_text(),
        "files": open_files(),
        "shared memory": {
            line for line in Path("/proc/self/maps").read_text().splitlines() if "shm" in line
        },
        "hooks": hooks,
    }


@pytest.fixture
def _without_objects_of_other_tests() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # `gc.get_objects` leaves them out
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_without_objects_of_other_tests")
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_twenty_trainers_in_a_process_leave_nothing_behind(devices: int, tmp_path: Path) -> None:
    def run(seed: int) -> str:
        if devices == 1:
            return trial(seed, tmp_path)
        return simulate(trial, devices, args=(seed, tmp_path))[0]

    first = [run(seed) for seed in range(2)]
    before = left()
    assert len(before["hooks"]) > 5
    found = [run(seed) for seed in range(2, 22)]
    # A thread that has been joined stays in the system's list until it is scheduled once more, so
    # that `before` may count one too many.
    most, deadline = before.pop("system threads"), time.monotonic() + 60
    while True:
        after = left()
        threads = after.pop("system threads")
        if (after == before and threads <= most) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert after == before
    assert threads <= most
    assert len({*first, *found}) == 22

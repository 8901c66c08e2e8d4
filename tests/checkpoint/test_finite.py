"""What is not finite is found before it takes the place of what is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.errors import StateError
from tests.checkpoint.folders import steps_in
from tests.small import line, make_trainer, points
from tests.started import ended
from tests.tables import for_each

SCRIPT = Path(__file__).parent.parent / "scripts" / "poisoned.py"


class Acting(torch.optim.SGD):
    """Does something else after its update, once it is told what."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.act: Callable[[torch.Tensor], object] = lambda weight: None

    def step(self, closure: Any = None) -> Any:
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.act(weight.data)


@for_each("devices", [1, 2])
@for_each("wait", [True, False])
def test_a_poisoned_step_replaces_no_good_one(tmp_path: Path, devices: int, wait: bool) -> None:
    model = line()
    optimizer = Acting(model)
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    trainer.step(points(8))
    trainer.save(tmp_path, keep=1, wait=wait)
    good = trainer.fingerprint()
    optimizer.act = lambda weight: weight.fill_(float("nan"))
    trainer.step(points(8))
    message = "parameter weight is not finite after step 2, so no checkpoint was written"
    with pytest.raises(StateError, match=message):
        trainer.save(tmp_path, keep=1, wait=wait)
    assert steps_in(tmp_path) == [1]
    trainer.load(tmp_path)
    assert trainer.fingerprint() == good
    optimizer.act = lambda weight: weight.fill_(3e38)  # so large that a sum of them is infinite
    trainer.step(points(8))
    assert trainer.save(tmp_path, keep=1).name == "step-00000002"


def test_a_buffer_may_be_as_it_was_but_not_become_nan(tmp_path: Path) -> None:
    """As a mask is, a value that is not known yet, and a mean."""
    model = line()
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    model.register_buffer("best", torch.tensor(float("nan")))
    model.register_buffer("mean", torch.zeros(3))
    trainer = make_trainer(model)
    trainer.save(tmp_path)
    trainer.step(points(8))
    mean = model.get_buffer("mean")
    mean.fill_(float("inf"))
    trainer.save(tmp_path)
    mean[1] = float("nan")
    with pytest.raises(StateError, match="buffer mean is not finite after step 1"):
        trainer.save(tmp_path)
    trainer.load(tmp_path)
    trainer.step(points(8))
    trainer.save(tmp_path)


def test_a_step_that_broke_off_in_its_update_is_not_saved(tmp_path: Path) -> None:
    def interrupt(_: object) -> None:
        optimizer.act = lambda weight: None
        raise KeyboardInterrupt

    model = line()
    optimizer = Acting(model)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.save(tmp_path)
    optimizer.act = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.step(points(8))
    for _ in range(2):
        with pytest.raises(StateError, match=r"trainer\.save was called after step 1 was interr"):
            trainer.save(tmp_path)
        with pytest.raises(StateError, match=r"trainer\.step was called after step 1 was interr"):
            trainer.step(points(8))
    assert steps_in(tmp_path) == [0]
    trainer.load(tmp_path)
    trainer.step(points(8))
    trainer.save(tmp_path)
    assert steps_in(tmp_path) == [0, 1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("devices", "exchange"),
    [
        ("cpu:1", "auto"),
        pytest.param("cpu:2", "shared", marks=pytest.mark.full),
        pytest.param("cpu:2", "collective", marks=pytest.mark.full),
    ],
)
def test_what_fails_again_goes_back_further(tmp_path: Path, devices: str, exchange: str) -> None:
    """And ends well, where it fails no longer."""
    (tmp_path / "happened").mkdir()
    options = f"--save-every 1 --keep-last 3 --max-restarts 3 --exchange {exchange}".split()
    folders = ("--devices", devices, "--checkpoint", str(tmp_path / "kept"))
    script = (str(SCRIPT), str(tmp_path / "happened"), "3")
    done = ended("run", *options, *folders, *script, TMPDIR=str(tmp_path))
    errors = done.stderr
    assert done.returncode == 0, errors
    assert done.stdout.splitlines()[-1].startswith("end 8 ")
    assert "StateError: parameter weight is not finite after step 6" in errors
    assert re.findall(r"resuming after step (\d+)", errors) == ["5", "4", "3"]
    assert "restarting (1 of 3)\n" in errors
    back = "1 checkpoint further back than the newest: it failed in step 7 2 times in a row"
    assert f"restarting (2 of 3), {back}" in errors
    assert "restarting (3 of 3), 2 checkpoints further back than the newest" in errors
    assert steps_in(tmp_path / "kept") == [6, 7, 8]

"""What the pages on the time between steps show does what they say."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from tests.conftest import ROOT
from tests.test_docs import blocks

GUIDES = ROOT / "docs" / "guides"


def script_of(page: str, folder: Path, part: slice = slice(None)) -> dict[str, Any]:
    """The names of a page's script, and of the functions that follow it."""
    (folder / "script.py").write_text("\n\n".join(blocks(GUIDES / page)[part]))
    return runpy.run_path(str(folder / "script.py"))


def test_what_may_be_done_between_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("between-steps.md", tmp_path, slice(1))
    assert len(script["main"]()) == 16
    assert capsys.readouterr().out.startswith("run 1 0 [[")


def test_the_state_of_the_optimizer_is_whole_in_a_block(tmp_path: Path) -> None:
    script = script_of("between-steps.md", tmp_path, slice(1, 2))
    saved = script["saved"]["state"][0]["exp_avg"]
    assert saved.shape == (1, 4)
    assert script["largest"] > 0
    assert bool((saved == 0).all())


def test_the_gradient_without_the_update(tmp_path: Path) -> None:
    script = script_of("gradient-without-update.md", tmp_path)
    plain = copy.deepcopy(script["model"])
    value, steps = script["main"]()
    optimizer = torch.optim.LBFGS(plain.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        mean = script["loss"](plain, script["batch"]).mean()
        mean.backward()
        return mean

    for _ in range(3):
        expected = optimizer.step(closure)
    assert steps == 3
    assert value == pytest.approx(float(expected.detach()), rel=1e-6)


def test_the_functions_beside_it(tmp_path: Path) -> None:
    script = script_of("gradient-without-update.md", tmp_path)
    found = []
    for devices in (1, 2):
        torch.manual_seed(1)
        model = copy.deepcopy(script["model"])
        trainer = onefold.Trainer(
            model, None, script["loss"], shards=4, devices=["cpu"] * devices, threads=1
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        script["sam"](trainer, optimizer, [script["batch"], (*script["batch"],)])
        script["noisy"](trainer, optimizer, (*script["batch"],))
        script["save"](trainer, optimizer, tmp_path / "run")
        other = torch.optim.Adam(model.parameters(), lr=0.01)
        script["load"](trainer, other, tmp_path / "run")
        assert str(other.state_dict()) == str(optimizer.state_dict())
        found.append(trainer.fingerprint())
    assert found[0] == found[1]


def test_a_penalty_in_the_loss(tmp_path: Path) -> None:
    script = script_of("gradient-without-update.md", tmp_path)
    critic = script["model"]
    optimizer = torch.optim.Adam(critic.parameters())
    trainer = onefold.Trainer(critic, optimizer, script["critic_loss"], shards=4, devices=["cpu"])
    inputs = script["batch"][0]
    assert trainer.step((inputs, inputs.flip(0))).number == 1


def test_mixing_does_not_depend_on_shards_or_devices(tmp_path: Path) -> None:
    script = script_of("mixup.md", tmp_path)
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double()
    batches = [
        (torch.randn(11, 1, 8, 8, dtype=torch.float64), torch.randint(10, (11,))) for _ in range(6)
    ]

    def trained(shards: int, devices: int) -> tuple[str, torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        trainer = onefold.Trainer(
            own, optimizer, script["loss"], shards=shards, devices=["cpu"] * devices, threads=1
        )
        for batch in batches:
            trainer.step(batch)
        trainer.close()
        return trainer.fingerprint(), own.get_parameter("1.weight").detach().clone()

    one, two, three = (trained(4, devices) for devices in (1, 2, 3))
    assert one[0] == two[0] == three[0]
    torch.testing.assert_close(one[1], trained(1, 1)[1], rtol=1e-12, atol=1e-13)


def test_mixing_by_the_batch(tmp_path: Path) -> None:
    script = script_of("mixup.md", tmp_path)
    assert script["step"].number == 8
    images, targets = script["mixed_batch"](1, torch.Generator().manual_seed(0))
    assert images.shape == (30, 1, 8, 8)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(30))

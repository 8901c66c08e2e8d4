"""What messages advise works, and what every script of several processes meets is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.run.membership import advice_on_one_file
from tests import simulated
from tests.small import line, make_trainer, points, sgd, square
from tests.tables import for_each


def saved_by_the_lead(folder: str) -> None:
    trainer = make_trainer(devices=None)
    trainer.step(points(8))
    if trainer.is_lead:
        trainer.save(folder)


def evaluated_by_the_lead(folder: str) -> None:
    trainer = make_trainer(devices=None, timeout_s=2)
    trainer.step(points(8))
    if trainer.is_lead:
        trainer.barrier()
    else:
        while not Path(folder, "never").exists():
            torch.randn(10_000).sort()


@for_each("exchange", ["shared", "collective"])
def test_a_save_of_the_lead_alone_is_named(tmp_path: Path, exchange: str) -> None:
    """At the end of a script, where the others have ended already."""
    words = r"Device 0 is in trainer.save, which must be called on every device, and so not under"
    with pytest.raises(onefold.errors.PeerError, match=words):
        simulated.launch(
            saved_by_the_lead, devices="cpu:2", args=(str(tmp_path),), exchange=exchange
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.processes
def test_a_call_of_the_lead_that_nobody_else_makes_is_named_at_its_limit(tmp_path: Path) -> None:
    words = r"device 1 .*did not arrive within 2 s.*Device 0 is in trainer.barrier, which must be"
    with pytest.raises(onefold.errors.RunFailed, match=words):
        onefold.launch(evaluated_by_the_lead, devices="cpu:2", args=(str(tmp_path),))


def written_by_all(path: str) -> None:
    make_trainer(devices=None).barrier()
    with open(path, "x") as file:
        file.write("mine")


@pytest.mark.full
@pytest.mark.processes
def test_a_file_that_all_write_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    words = r"FileExistsError.*all 2 processes of this run execute the script. If each of them"
    with pytest.raises(onefold.errors.RunFailed, match=words):
        onefold.launch(written_by_all, devices="cpu:2", args=(str(path),))


def test_only_errors_of_files_that_somebody_else_may_have_made_are_explained() -> None:
    there = FileExistsError(17, "File exists", "run/log")
    moved = FileNotFoundError(2, "No such file", "log.part", None, "log")
    assert "let the lead alone do it" in advice_on_one_file(there, 2)
    assert "writes log.part" in advice_on_one_file(moved, 2)
    for error in (FileNotFoundError(2, "No such file", "log"), OSError("x"), KeyError("x")):
        assert advice_on_one_file(error, 2) == ""
    assert advice_on_one_file(there, 1) == ""


STEPS, UNFROZEN_FROM = 8, 4


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def unfreezing(
    devices: int, *, start: Path | None = None, stop: int = STEPS, to: Path | None = None
) -> nn.Module:
    """As the messages advise: all in the optimizer, frozen after Trainer is made."""
    model = two_layers()
    trainer = make_trainer(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), devices=devices, plan=None
    )
    if start is not None:
        trainer.load(start)
    model[0].requires_grad_(False)
    while trainer.steps < stop:
        if trainer.steps >= UNFROZEN_FROM:
            model[0].requires_grad_(True)
        trainer.step(tuple(t.double() for t in points(8)))
    if to is not None:
        trainer.save(to)
    return model


def plainly() -> nn.Module:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model[0].requires_grad_(False)
    batch = tuple(t.double() for t in points(8))
    for step in range(STEPS):
        model[0].requires_grad_(step >= UNFROZEN_FROM)
        optimizer.zero_grad()
        square(model, batch).mean().backward()
        optimizer.step()
    return model


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_unfreezing_as_advised_is_unfreezing_in_a_plain_loop() -> None:
    one, two, three = (values(unfreezing(devices)) for devices in (1, 2, 3))
    for a, b, c, d in zip(one, two, three, values(plainly()), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        torch.testing.assert_close(a, d, rtol=1e-12, atol=1e-14)


@for_each("stop", [2, UNFROZEN_FROM, 6])
def test_it_goes_on_after_a_stop(tmp_path: Path, stop: int) -> None:
    unfreezing(3, stop=stop, to=tmp_path)
    for a, b in zip(values(unfreezing(1)), values(unfreezing(2, start=tmp_path)), strict=True):
        assert torch.equal(a, b)


def test_a_group_that_comes_later_is_told_what_works() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    trainer = make_trainer(model, optimizer=optimizer)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(
        ValueError, match=r"give it to the optimizer, make Trainer, and then freeze"
    ):
        trainer.step(points(8))


def test_what_was_frozen_before_is_told_what_works() -> None:
    model = line()
    model.bias.requires_grad_(False)
    trainer = make_trainer(model)
    trainer.step(points(8))
    model.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="require a gradient until Trainer is made, and freeze it"):
        trainer.step(points(8))

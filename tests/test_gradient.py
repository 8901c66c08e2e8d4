"""A gradient without an update: the right one, on every device, for whatever update follows."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import onefold
from onefold.errors import GradientError, LossError, OnefoldError, RunFailed
from onefold.testing import outcomes
from tests import averaged, simulated
from tests.averaged import Net, batch_of, loss
from tests.gradients import (
    PROGRAMS,
    Sam,
    digest,
    run,
    run_all,
    run_with_loader,
    trained,
    trainer_of,
)
from tests.small import Batch, line, make_trainer, points, square
from tests.tables import for_each
from tests.test_gather import Towers, batches, of_own_rows, of_terms


def smooth() -> nn.Module:
    """In float64, without anything random; one parameter gets no gradient, one is channels_last."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.double()


def exact(step: int, samples: int = 14) -> Batch:
    inputs, labels = batch_of(step, samples)
    return inputs.double(), labels


# The gradient


@for_each(("devices", "plan"), [(1, None), (2, (1, 3)), (3, (0, 3, 1))])
def test_it_is_plain_pytorchs(devices: int, plan: tuple[int, ...] | None) -> None:
    model, expected = smooth(), smooth()
    trainer = trainer_of(devices, model=model, plan=plan)
    for number in (1, 2):
        step = trainer.gradient(exact(number))
        expected.zero_grad()
        value = loss(expected, exact(number)).mean()
        value.backward()
        assert step.number == number
        assert float(step.loss) == pytest.approx(value.item(), rel=1e-12)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in expected.parameters() if p.grad is not None]
        )
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-12)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            if other.grad is None:
                assert mine.grad is None
            else:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-14)
    assert torch.equal(model.unused, torch.ones(3).double())


@for_each("devices", [1, 2])
def test_it_has_the_shape_strides_and_dtype_of_its_parameter(devices: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 40, 3), nn.Flatten(), nn.Linear(40 * 4, 3, dtype=torch.float32)
    ).to(memory_format=torch.channels_last)
    trainer = trainer_of(devices, model=model, function=lambda m, x: m(x).square().mean(dim=1))
    trainer.gradient(torch.randn(8, 2, 4, 4))
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.dtype == parameter.dtype
    first, second = [p.grad for p in model.parameters()][:2]
    before = first.clone()
    second.fill_(7.0)
    assert torch.equal(first, before)


def test_a_model_in_bfloat16_has_its_gradients_so() -> None:
    model = line().bfloat16()
    batch = tuple(part.bfloat16() for part in points(8))
    trainer = make_trainer(model)
    trainer.gradient(batch)
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_the_next_call_replaces_it_and_leaves_the_old_one_alone() -> None:
    trainer = trainer_of(2)
    trainer.gradient(batch_of(1))
    kept = [p.grad for p in trained(trainer.model)]
    copies = [None if g is None else g.clone() for g in kept]
    before = digest(trainer.model)
    trainer.gradient(batch_of(2))
    assert digest(trainer.model) != before
    for mine, copied in zip(kept, copies, strict=True):
        assert mine is not None
        assert torch.equal(mine, copied)


@for_each("devices", [1, 2])
def test_it_is_what_step_would_have_used(devices: int) -> None:
    """Also with an optimizer, clipped as step clips it."""
    options = {"clip_norm": 0.05, "clip_value": 0.01, "devices": devices}
    stepping, asking = (averaged.trainer_of(**options) for _ in range(2))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(trained(asking.model), lr=1e-2)
    for number in (1, 2, 3):
        ours, theirs = asking.gradient(batch_of(number)), stepping.step(batch_of(number))
        assert float(ours.loss) == float(theirs.loss)
        assert ours.grad_norm == theirs.grad_norm
        with asking.changing():
            optimizer.step()
    assert asking.fingerprint() == stepping.fingerprint()
    stepping.step(batch_of(4))
    assert all(p.grad is None for p in stepping.model.parameters())


@for_each("precision", ["bf16", "fp16"])
def test_low_precision_is_unscaled_and_alike_on_all_devices(precision: str) -> None:
    found = {run("plain updates", devices, precision=precision) for devices in (1, 2, 3)}
    assert len(found) == 1


def test_what_is_not_finite_is_refused_or_skipped() -> None:
    def spoilt(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, batch) * torch.where(batch[0][:, 0] > 1e3, math.inf, 1.0)

    inputs, targets = points(8)
    inputs[5, 0] = 1e4
    trainer = make_trainer(loss=spoilt, devices=2)
    with pytest.raises((LossError, GradientError), match="step 1, shard 2"):
        trainer.gradient((inputs, targets))
    trainer = make_trainer(loss=spoilt, devices=2, on_nonfinite="skip")
    trainer.gradient(points(8))
    step = trainer.gradient((inputs, targets))
    assert "shard 2" in step.skipped
    assert all(p.grad is None for p in trainer.model.parameters())
    # There is nothing to clip, and that is no mistake of the script's.
    assert float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)) == 0.0


@for_each("devices", [1, 2])
def test_an_error_in_a_search_may_be_survived(devices: int) -> None:
    def spoilt(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, batch) * torch.where(model.weight.sum() > 10, math.nan, 1.0)

    trainer = trainer_of(devices, model=line(), function=spoilt)
    weight, batch = trainer.model.weight, points(8)
    with trainer.changing():
        before = float(trainer.gradient(batch).loss)
        start = weight.detach().clone()
        weight.data.fill_(9.0)
        with pytest.raises(LossError, match="step 1, shard 0 is nan"):
            trainer.gradient(batch)
        weight.data.copy_(start)
        assert float(trainer.gradient(batch).loss) == before
        with pytest.raises(RuntimeError, match="was called inside"):
            trainer.save("nowhere")
    assert trainer.gradient(points(8)).number == 2


@for_each("function", [of_own_rows, of_terms])
def test_losses_of_the_whole_batch_have_one_too(function: Any) -> None:
    batch = batches(1, 11)[0]
    found = set()
    for devices in (1, 2, 3):
        model = Towers(restless=True)
        step = trainer_of(devices, model=model, function=function, shards=5).gradient(batch)
        found.add((digest(model), float(step.loss), step.grad_norm))
    assert len(found) == 1
    (_, value, norm) = found.pop()
    step = make_trainer(Towers(restless=True), function, shards=5).step(batch)
    assert (float(step.loss), step.grad_norm) == (value, norm)


@for_each("samples", [1, 2, 5])
def test_shards_may_be_empty_and_run_in_pieces(samples: int) -> None:
    found = set()
    for devices, plan in ((1, None), (2, (1, 3)), (4, None)):
        trainer = trainer_of(
            devices, model=line(), function=square, plan=plan, microbatch=1 if samples > 2 else None
        )
        trainer.gradient(points(samples))
        found.add(digest(trainer.model))
    assert len(found) == 1


# Updates


@for_each("name", PROGRAMS)
def test_the_bits_do_not_depend_on_the_devices(name: str) -> None:
    alone = run(name, 1)
    assert run(name, 2) == alone
    assert run(name, 3, plan=(0, 3, 1)) == alone


@for_each("exchange", ["shared", "collective"])
def test_every_process_has_the_same(exchange: Any) -> None:
    found = simulated.launch(run_all, devices="cpu:3", exchange=exchange)
    assert found == {name: run(name, 1) for name in PROGRAMS}


def plainly(optimizer: torch.optim.Optimizer, model: nn.Module, batch: Batch) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch).mean()
        value.backward()
        return value

    return float(optimizer.step(closure).detach())  # type: ignore[arg-type,attr-defined]


@for_each("search", [None, "strong_wolfe"])
@for_each("devices", [1, 3])
def test_lbfgs_is_that_of_a_plain_loop(search: str | None, devices: int) -> None:
    model, expected = smooth(), smooth()
    options: dict[str, Any] = {"max_iter": 5, "lr": 0.5, "line_search_fn": search}
    ours, theirs = (torch.optim.LBFGS(m.parameters(), **options) for m in (model, expected))
    trainer = trainer_of(devices, model=model)
    for number in range(1, 4):
        batch = exact(number)
        with trainer.changing():
            value = ours.step(lambda batch=batch: trainer.gradient(batch).loss)
        assert float(value) == pytest.approx(plainly(theirs, expected, batch), rel=1e-9)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


@for_each("name", ["two passes", "two blocks"])
def test_sam_is_that_of_a_plain_loop(name: str) -> None:
    model, expected = smooth(), smooth()
    trainer = trainer_of(2, model=model)
    steps = [exact(number) for number in range(1, 5)]
    list(PROGRAMS[name](trainer, steps))
    sam = Sam(torch.optim.SGD(trained(expected), lr=0.1, momentum=0.9))
    for batch in steps:
        for turn in (sam.climb, sam.step):
            expected.zero_grad()
            loss(expected, batch).mean().backward()
            turn()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@for_each("counts", [(1, 3), (3, 2)])
def test_a_stopped_run_goes_on_with_the_same_bits(counts: Sequence[int], tmp_path: Path) -> None:
    whole = run_with_loader(1, str(tmp_path / "none"))
    for devices, stops in zip(counts, [(4,), ()], strict=True):
        result = run_with_loader(devices, str(tmp_path / "run"), stops)
    assert result == whole


@pytest.mark.full
@pytest.mark.processes
def test_verify_finds_it_right() -> None:
    script = Path(__file__).parent / "scripts" / "by_script.py"
    command = [sys.executable, "-m", "onefold", "verify", "--devices", "1,2", "--steps", "2"]
    done = subprocess.run(
        [*command, str(script), "none", "0", "9"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "The bits agree after each of 2 steps" in done.stdout
    assert "The mathematics agree" in done.stdout


# Which calls are one step


def test_the_same_batch_is_one_step_and_one_function() -> None:
    trainer = trainer_of(2)
    batch = batch_of(1)
    first, second = trainer.gradient(batch), trainer.gradient(batch)
    assert (first.number, second.number, trainer.steps) == (1, 1, 1)
    assert float(first.loss) == float(second.loss)
    third = trainer.gradient(batch_of(1))
    assert third.number == 2
    assert float(third.loss) != float(first.loss)  # other dropout


def test_a_step_ends_with_its_block() -> None:
    trainer = trainer_of()
    batch = batch_of(1)
    for number in (1, 2, 3):
        with trainer.changing():
            assert trainer.gradient(batch).number == trainer.gradient(batch).number == number


def test_two_batches_in_a_block_are_refused() -> None:
    trainer = trainer_of(2)
    inputs, labels = batch_of(1)
    words = r"two batches in one block .* the very same object .*Make it before the block"
    optimizer = torch.optim.LBFGS(trained(trainer.model))
    with pytest.raises(RuntimeError, match=words), trainer.changing():
        optimizer.step(lambda: trainer.gradient((inputs, labels)).loss)


def test_the_same_batch_for_ever_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of()
    optimizer = torch.optim.SGD(trained(trainer.model), lr=0.1)
    batch = batch_of(1)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(9):
            trainer.gradient(batch)
            with trainer.changing():
                optimizer.step()
    assert [r.message for r in caplog.records if "same batch object again" in r.message] != []
    assert len([r for r in caplog.records if "same batch object" in r.message]) == 1


def test_a_step_of_the_trainer_begins_another_one() -> None:
    trainer = make_trainer(devices=2)
    batch = points(8)
    numbers = [trainer.gradient(batch).number, trainer.gradient(batch).number]
    numbers += [trainer.step(batch).number, trainer.gradient(batch).number]
    assert numbers == [1, 1, 2, 3]


def test_a_batch_of_a_loader_is_used_once() -> None:
    trainer = trainer_of(2)
    train = trainer.loader(averaged.data(), batch_size=10)
    for epoch in trainer.epochs(2):
        for batch in train:
            for _ in range(3):
                step = trainer.gradient(batch)
            assert step.epoch == epoch
    assert trainer.steps == 6


# What is refused


def test_what_needs_an_optimizer_is_refused() -> None:
    trainer = trainer_of()
    with pytest.raises(RuntimeError, match=r"None for its optimizer.*call trainer.gradient"):
        trainer.step(batch_of(1))
    model = Net()
    schedule = StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with pytest.raises(ValueError, match="step the schedule in the script"):
        trainer_of(model=model, schedule=schedule)
    with pytest.raises(ValueError, match='expected precision="bf16" or "fp32"'):
        trainer_of(precision="bf16-params")
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        trainer_of(model=Net().requires_grad_(False))
    with pytest.raises(TypeError, match="expected model to be"):
        trainer_of(model=3)  # type: ignore[arg-type]


def test_masters_and_averages_are_refused() -> None:
    trainer = averaged.trainer_of(precision="bf16-params")
    with pytest.raises(ValueError, match="would be lost in rounding"):
        trainer.gradient(batch_of(1))
    trainer = averaged.trainer_of()
    trainer.average(decay=0.9)
    with pytest.raises(ValueError, match="would not see the script's"):
        trainer.gradient(batch_of(1))


def test_lbfgs_for_the_trainer_is_told_the_way() -> None:
    model = line()
    words = r"LBFGS needs a closure.*Give Trainer None .*trainer.gradient\(batch\).loss"
    with pytest.raises(TypeError, match=words):
        make_trainer(model, optimizer=torch.optim.LBFGS(model.parameters()))


def another_batch() -> None:
    trainer = trainer_of(None)
    rank = [str(device) for device in trainer.devices].index("cpu")
    trainer.gradient(batch_of(1 if trainer.is_lead else 2 + rank))


def unlike_calls() -> None:
    trainer = trainer_of(None)
    batch = batch_of(1)
    trainer.gradient(batch)
    trainer.gradient(batch if trainer.is_lead else batch_of(1))


def outside_of_the_block() -> None:
    trainer = trainer_of(None)
    batch = batch_of(1)
    trainer.gradient(batch)
    torch.optim.SGD(trained(trainer.model), lr=0.1).step()
    trainer.gradient(batch)


def by_the_lead_alone() -> None:
    trainer = trainer_of(None)
    batch = batch_of(1)
    optimizer = torch.optim.LBFGS(trained(trainer.model))
    with trainer.changing():
        if trainer.is_lead:
            optimizer.step(lambda: trainer.gradient(batch).loss)
    trainer.barrier()


def failing_in_a_search() -> None:
    def spoilt(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5 and os.environ["RANK"] == "1":
            raise ArithmeticError("the fault")
        return loss(model, batch)

    calls: list[int] = []
    trainer = trainer_of(None, function=spoilt)
    batch = batch_of(1)
    optimizer = torch.optim.LBFGS(trained(trainer.model))
    with trainer.changing():
        optimizer.step(lambda: trainer.gradient(batch).loss)


@for_each(
    ("script", "words"),
    [
        (by_the_lead_alone, r"device 1 calls trainer.barrier while device 0 calls .*gradient"),
        (another_batch, r"trainer.gradient: device 1 was given another batch.*fork_rng"),
        (unlike_calls, r"device 1 is in step 2 and device 0 in step 1"),
        (outside_of_the_block, r"outside of `with trainer.changing\(\):`"),
    ],
)
def test_devices_that_differ_are_named(script: Any, words: str) -> None:
    for ended in outcomes(script, 2):
        with pytest.raises(OnefoldError, match=words):
            raise ended.error


@pytest.mark.full
@pytest.mark.processes
def test_a_device_that_fails_in_a_search_is_named() -> None:
    with pytest.raises(RunFailed, match=r"device 1 .*ArithmeticError: the fault"):
        onefold.launch(failing_in_a_search, devices="cpu:2", timeout_s=300)

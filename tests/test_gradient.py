"""A gradient without an update: the right one, on every device, for whatever update follows."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from onefold.errors import GradientError, LossError, OnefoldError
from onefold.launcher.environment import current_context
from onefold.testing import outcomes, simulate
from tests.averaged import Net, batch_of, data, loss, trained, trainer_of
from tests.small import Batch, line, make_trainer, points, square
from tests.tables import for_each


def gradient_of(devices: int | None = 1, **options: Any) -> Any:
    """A trainer without an optimizer."""
    return trainer_of(devices, updates=False, **options)


def smooth() -> Any:
    """In float64, without anything random; one parameter gets no gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.double()


def exact(step: int) -> Batch:
    inputs, labels = batch_of(step)
    return inputs.double(), labels


def gradients_in(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


# The gradient


@for_each(("devices", "shares"), [(1, None), (2, (1, 3)), (3, (0, 3, 1))])
def test_it_is_plain_pytorchs(devices: int, shares: tuple[int, ...] | None) -> None:
    model, expected = smooth(), smooth()
    trainer = gradient_of(devices, model=model, shares=shares)
    for number in (1, 2):
        step = trainer.gradient(exact(number))
        value = plain(expected).gradient(exact(number)).loss
        given = [p.grad for p in expected.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(given))
        assert step.number == number
        assert [float(step.loss), step.grad_norm] == pytest.approx([value.item(), norm], rel=1e-12)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-14)
    assert torch.equal(model.unused, torch.ones(3).double())


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_form_of_its_parameter_and_is_the_scripts_own(dtype: torch.dtype) -> None:
    model: Any = nn.Sequential(nn.Conv2d(2, 40, 3), nn.Flatten(), nn.Linear(40 * 4, 3))
    model.to(dtype=dtype, memory_format=torch.channels_last)
    trainer = gradient_of(2, model=model, function=lambda m, x: m(x).square().mean(dim=1))
    trainer.gradient(torch.randn(8, 2, 4, 4, dtype=dtype))
    kept: list[Any] = [p.grad for p in model.parameters()]
    copies: list[Any] = gradients_in(model)
    trainer.evaluate(lambda m, x: {"x": m(x)[:, 0]}, torch.ones(8, 2, 4, 4).to(dtype), batch_size=8)
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        assert (grad.stride(), grad.dtype) == (parameter.stride(), dtype)
    trainer.gradient(torch.randn(8, 2, 4, 4, dtype=dtype))
    assert all(map(torch.equal, kept, copies))
    assert not any(map(torch.equal, kept, list[Any](gradients_in(model))))
    kept[1].fill_(7.0)
    assert torch.equal(kept[0], copies[0])


@for_each(("devices", "precision"), [(1, None), (2, "fp16"), (3, "bf16")])
def test_it_is_what_step_would_have_used(devices: int, precision: Any) -> None:
    """Also with an optimizer, clipped as step clips it."""
    options: Any = {"clip_norm": 0.05, "clip_value": 0.01, "precision": precision}
    stepping, asking = (trainer_of(devices, **options) for _ in range(2))
    optimizer = torch.optim.AdamW(trained(asking.model), lr=1e-2)
    for number in (1, 2, 3):
        ours, theirs = asking.gradient(batch_of(number)), stepping.step(batch_of(number))
        assert (float(ours.loss), ours.grad_norm) == (float(theirs.loss), theirs.grad_norm)
        with asking.modifying():
            optimizer.step()
    assert asking.fingerprint() == stepping.fingerprint()
    assert all(p.grad is None for p in stepping.model.parameters())


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
    assert "shard 2" in trainer.gradient((inputs, targets)).skipped
    assert all(p.grad is None for p in trainer.model.parameters())
    # There is nothing to clip, and that is no mistake of the script's.
    assert float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)) == 0.0


# Updates


def plain(model: nn.Module) -> Any:
    """What a trainer does of that, with the whole batch in plain PyTorch."""

    def gradient(batch: Batch) -> Any:
        model.zero_grad()
        value = loss(model, batch).mean()
        value.backward()
        return SimpleNamespace(loss=value.detach())

    return SimpleNamespace(model=model, gradient=gradient, modifying=nullcontext)


Losses = Iterator[float]
"""That of each batch."""


def plain_updates(trainer: Any, steps: Sequence[Batch]) -> Losses:
    optimizer = sgd(trainer.model)
    for batch in steps:
        yield float(trainer.gradient(batch).loss)
        with trainer.modifying():
            optimizer.step()


def searches(trainer: Any, steps: Sequence[Batch]) -> Losses:
    """Several gradients of one step, in one block."""
    options: Any = {"line_search_fn": "strong_wolfe", "history_size": 3}
    optimizer = torch.optim.LBFGS(trained(trainer.model), lr=0.5, max_iter=4, **options)
    for batch in steps:
        with trainer.modifying():
            yield float(optimizer.step(lambda batch=batch: trainer.gradient(batch).loss))


Program = Callable[[Any, Sequence[Batch]], Losses]
STEPS = [exact(number) for number in range(1, 5)]


def run(program: Program, devices: int | None, **options: Any) -> list[Any]:
    """The loss of each step, and all values, to the last bit."""
    trainer = gradient_of(devices, model=smooth(), **options)
    losses = list(program(trainer, STEPS))
    assert trainer.steps == len(STEPS)
    return [losses, [p.tolist() for p in trainer.model.parameters()]]


@for_each("program", [plain_updates, searches])
def test_updates_are_those_of_a_plain_loop_on_any_number_of_devices(program: Program) -> None:
    losses, values = alone = run(program, 1)
    assert run(program, 3, shares=(0, 3, 1)) == alone
    for exchange in ("shared", "collective"):
        assert simulate(lambda: run(program, None), 2, exchange=exchange) == [alone] * 2
    expected = smooth()
    assert losses == pytest.approx(list(program(plain(expected), STEPS)), rel=1e-9)
    for mine, other in zip(values, expected.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(mine).double(), other, rtol=1e-6, atol=1e-7)


def run_with_loader(devices: int, folder: Path, stop: int | None = None) -> Any:
    """By Adam, its state in the checkpoint; saved, and left, before a step."""
    trainer = gradient_of(devices)
    optimizer = torch.optim.Adam(trained(trainer.model), lr=1e-2)
    found = trainer.load(folder, if_any=True)
    if found is not None:
        optimizer.load_state_dict(found.extra)
    read = trainer.loader(data(), batch_size=10, shuffle=True)
    for epoch in trainer.epochs(2):
        for batch in read:
            if trainer.steps == stop:
                trainer.save(folder, extra=optimizer.state_dict())
                return None
            assert [trainer.gradient(batch).epoch for _ in range(2)] == [epoch] * 2
            with trainer.modifying():
                optimizer.step()
    assert trainer.steps == 6
    return trainer.fingerprint()


@for_each("devices", [(1, 3), (3, 2)])
def test_a_stopped_run_goes_on_with_the_same_bits(devices: tuple[int, int], tmp_path: Path) -> None:
    run_with_loader(devices[0], tmp_path / "run", stop=4)
    whole = run_with_loader(1, tmp_path / "none")
    assert run_with_loader(devices[1], tmp_path / "run") == whole


# Which calls are one step


def test_the_same_batch_is_one_step_and_one_function() -> None:
    trainer = gradient_of(2)
    batch = batch_of(1)
    first, second, other = (trainer.gradient(b) for b in (batch, batch, batch_of(1)))
    assert (first.number, second.number, other.number, trainer.steps) == (1, 1, 2, 2)
    assert float(first.loss) == float(second.loss) != float(other.loss)  # other dropout
    for number in (3, 4):
        with trainer.modifying():
            assert trainer.gradient(batch).number == trainer.gradient(batch).number == number
    trainer = make_trainer(devices=2)
    batch = points(8)
    calls = (trainer.gradient, trainer.gradient, trainer.step, trainer.gradient)
    assert [call(batch).number for call in calls] == [1, 1, 2, 3]


def test_the_same_batch_for_ever_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    trainer = gradient_of()
    optimizer, batch = sgd(trainer.model), batch_of(1)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(9):
            trainer.gradient(batch)
            with trainer.modifying():
                optimizer.step()
    assert sum("same batch object again" in record.message for record in caplog.records) == 1


# What is refused


def averaged() -> None:
    trainer = trainer_of()
    trainer.average(decay=0.9)
    trainer.gradient(batch_of(1))


def two_batches() -> None:
    trainer = gradient_of(2)
    with trainer.modifying():
        for number in (1, 2):
            trainer.gradient(batch_of(number))


REFUSED: dict[str, Callable[[], object]] = {
    "created with None.*Call trainer.gradient": lambda: gradient_of().step(batch_of(1)),
    'or precision="bf16" or "fp32"': lambda: gradient_of(precision="bf16-params"),
    "no parameter that requires": lambda: gradient_of(model=Net().requires_grad_(False)),
    "discard the script's updates": lambda: trainer_of(precision="bf16-params").gradient(
        batch_of(1)
    ),
    "follows only the updates of trainer.step": averaged,
    "two batches in one block .* same batch object .*Create the batch before the": two_batches,
    "Step the scheduler in the script": (
        lambda: gradient_of(model=(net := Net()), scheduler=StepLR(sgd(net), 1))
    ),
    r"requires a closure.*Pass None to Trainer .*trainer.gradient\(batch\).loss": (
        lambda: make_trainer(net := line(), optimizer=torch.optim.LBFGS(net.parameters()))
    ),
}


@for_each("words", REFUSED)
def test_what_does_not_go_together_is_refused(words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        REFUSED[words]()


def unlike_calls(trainer: Any, rank: int) -> None:
    batch = batch_of(1)
    trainer.gradient(batch)
    trainer.gradient(batch if rank == 0 else batch_of(1))


def outside_of_the_block(trainer: Any, rank: int) -> None:
    for _ in range(2):
        trainer.gradient(batch_of(1))
        sgd(trainer.model).step()


def by_the_lead_alone(trainer: Any, rank: int) -> None:
    with trainer.modifying():
        if rank == 0:
            trainer.gradient(batch_of(1))
    trainer.barrier()


def failing_in_a_search(trainer: Any, rank: int) -> None:
    def give(module: nn.Module, given: Any, made: Any) -> None:
        calls.append(1)
        if len(calls) > 5 and rank == 1:
            raise LossError("the fault")

    calls: list[int] = []
    trainer.model.register_forward_hook(give)
    list(searches(trainer, [batch_of(1)]))


@for_each(
    ("script", "words"),
    [
        (by_the_lead_alone, r"device 1 reached trainer.barrier while device 0 reached .*gradient"),
        (lambda t, rank: t.gradient(batch_of(rank)), r"device 1 received another batch.*fork_rng"),
        (unlike_calls, r"device 1 is in step 2 and device 0 in step 1"),
        (outside_of_the_block, r"outside of `with trainer.modifying\(\):`"),
        (failing_in_a_search, "the fault"),
    ],
)
def test_devices_that_differ_or_fail_are_named(script: Any, words: str) -> None:
    for ended in outcomes(lambda: script(gradient_of(None), current_context().rank), 2):
        assert ended.error is not None
        with pytest.raises(OnefoldError, match=words):
            raise ended.error

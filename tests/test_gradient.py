"""A gradient without an update: the right one, on every device, for whatever update follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from onefold.errors import GradientError, LossError, OnefoldError
from onefold.run.world import current_world
from onefold.testing import outcomes, simulate
from tests.averaged import Net, batch_of, data, loss, trained, trainer_of
from tests.small import Batch, line, make_trainer, points, square
from tests.tables import for_each
from tests.test_gather import Towers, batches, of_own_rows, of_terms
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]


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


def bits_of(model: nn.Module) -> list[bytes | None]:
    """Of everything in ``.grad``."""
    flat = [None if g is None else g.contiguous().view(-1) for g in gradients_in(model)]
    return [None if g is None else g.view(torch.uint8).numpy().tobytes() for g in flat]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


# The gradient


@for_each(("devices", "plan"), [(1, None), (2, (1, 3)), (3, (0, 3, 1))])
def test_it_is_plain_pytorchs(devices: int, plan: tuple[int, ...] | None) -> None:
    model, expected = smooth(), smooth()
    trainer = gradient_of(devices, model=model, plan=plan)
    for number in (1, 2):
        step = trainer.gradient(exact(number))
        expected.zero_grad()
        value = loss(expected, exact(number)).mean()
        value.backward()
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
    kept, copies = [p.grad for p in model.parameters()], gradients_in(model)
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        assert (grad.stride(), grad.dtype) == (parameter.stride(), dtype)
    trainer.gradient(torch.randn(8, 2, 4, 4, dtype=dtype))
    assert all(map(torch.equal, kept, copies))
    assert not any(map(torch.equal, kept, gradients_in(model)))
    kept[1].fill_(7.0)
    assert torch.equal(kept[0], copies[0])


@for_each("devices", [1, 2])
def test_it_is_what_step_would_have_used(devices: int) -> None:
    """Also with an optimizer, clipped as step clips it."""
    options: Any = {"clip_norm": 0.05, "clip_value": 0.01}
    stepping, asking = (trainer_of(devices, **options) for _ in range(2))
    optimizer = torch.optim.AdamW(trained(asking.model), lr=1e-2)
    for number in (1, 2, 3):
        ours, theirs = asking.gradient(batch_of(number)), stepping.step(batch_of(number))
        assert (float(ours.loss), ours.grad_norm) == (float(theirs.loss), theirs.grad_norm)
        with asking.changing():
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


def test_an_error_in_a_search_may_be_survived() -> None:
    def spoilt(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, batch) * torch.where(model.weight.sum() > 10, math.nan, 1.0)

    trainer = gradient_of(2, model=line(), function=spoilt)
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
    step = make_trainer(Towers(restless=True), function, shards=5).step(batch)
    found = []
    for devices in (1, 3):
        model = Towers(restless=True)
        asked = gradient_of(devices, model=model, function=function, shards=5).gradient(batch)
        assert (float(asked.loss), asked.grad_norm) == (float(step.loss), step.grad_norm)
        found.append(bits_of(model))
    assert found[0] == found[1]


# Updates


class Sam:
    """The two passes of sharpness-aware minimisation around an ordinary optimizer."""

    def __init__(self, model: nn.Module, rho: float = 0.05) -> None:
        self._base, self._parameters, self._rho = sgd(model), trained(model), rho
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def climb(self) -> None:
        used = [p for p in self._parameters if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used if p.grad is not None]).norm()
        self._saved = [p.clone() for p in self._parameters]
        for p in used:
            p.add_(p.grad * (self._rho / (norm + 1e-12)))

    @torch.no_grad()
    def step(self) -> None:
        for p, saved in zip(self._parameters, self._saved, strict=True):
            p.copy_(saved)
        self._base.step()


class Plain:
    """What a trainer does of that, with the whole batch in plain PyTorch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0

    def gradient(self, batch: Batch) -> Any:
        self.model.zero_grad()
        value = loss(self.model, batch).mean()
        value.backward()  # type: ignore[no-untyped-call]
        return SimpleNamespace(loss=value.detach())

    def changing(self) -> AbstractContextManager[None]:
        return nullcontext()


Losses = Iterator[float]
"""That of each batch."""


def plain_updates(trainer: Any, steps: Sequence[Batch]) -> Losses:
    optimizer = sgd(trainer.model)
    for batch in steps:
        yield float(trainer.gradient(batch).loss)
        with trainer.changing():
            optimizer.step()


def searches(trainer: Any, steps: Sequence[Batch], **options: Any) -> Losses:
    optimizer = torch.optim.LBFGS(trained(trainer.model), lr=0.5, max_iter=4, **options)
    for batch in steps:
        with trainer.changing():
            yield float(optimizer.step(lambda batch=batch: trainer.gradient(batch).loss))


def line_search(trainer: Any, steps: Sequence[Batch]) -> Losses:
    return searches(trainer, steps, line_search_fn="strong_wolfe", history_size=3)


def two_passes(trainer: Any, steps: Sequence[Batch]) -> Losses:
    """Both passes in one block."""
    sam = Sam(trainer.model)
    for batch in steps:
        with trainer.changing():
            trainer.gradient(batch)
            sam.climb()
            yield float(trainer.gradient(batch).loss)
            sam.step()


def two_blocks(trainer: Any, steps: Sequence[Batch]) -> Losses:
    """The same, with the gradients outside of the blocks."""
    sam = Sam(trainer.model)
    for batch in steps:
        trainer.gradient(batch)
        with trainer.changing():
            sam.climb()
        yield float(trainer.gradient(batch).loss)
        with trainer.changing():
            sam.step()


def surgery(trainer: Any, steps: Sequence[Batch]) -> Losses:
    """Clipped, noisy, and normalised by layer, before the update; evaluated in between."""
    optimizer = torch.optim.Adam(trained(trainer.model), lr=1e-2)
    for batch in steps:
        yield float(trainer.gradient(batch).loss)
        before = bits_of(trainer.model)
        trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, data(), batch_size=9)
        assert bits_of(trainer.model) == before
        torch.nn.utils.clip_grad_value_(trained(trainer.model), 0.01)
        torch.nn.utils.clip_grad_norm_(trained(trainer.model), 1.0)
        with trainer.changing():
            for parameter in trained(trainer.model):
                if parameter.grad is not None:
                    parameter.grad += 1e-3 * torch.randn(parameter.shape)
                    parameter.grad /= parameter.grad.norm() + 1e-3
            optimizer.step()


Program = Callable[[Any, Sequence[Batch]], Losses]
PROGRAMS: list[Program] = [plain_updates, searches, line_search, two_passes, two_blocks]


def run(program: Program, devices: int | None, **options: Any) -> tuple[Any, ...]:
    """The fingerprint, and each step's loss and gradient, to the last bit."""
    trainer = gradient_of(devices, **options)
    steps = [batch_of(number) for number in range(1, 4)]
    seen = [f"{value} {bits_of(trainer.model)}" for value in program(trainer, steps)]
    assert trainer.steps == len(steps)
    trainer.close()
    return trainer.fingerprint(), *seen


@for_each(
    ("program", "exchange", "options"),
    [
        (plain_updates, "shared", {"precision": "fp16"}),
        (plain_updates, "collective", {"precision": "bf16"}),
        (searches, "collective", {}),
        (line_search, "shared", {}),
        (two_passes, "collective", {}),
        (two_blocks, "shared", {}),
        (surgery, "collective", {"microbatch": 3}),
    ],
)
def test_the_bits_do_not_depend_on_the_devices(
    program: Program, exchange: Any, options: dict[str, Any]
) -> None:
    alone = run(program, 1, **options)
    assert run(program, 3, plan=(0, 3, 1), **options) == alone
    assert set(simulate(lambda: run(program, None, **options), 2, exchange=exchange)) == {alone}


@for_each("program", PROGRAMS)
def test_updates_are_those_of_a_plain_loop(program: Program) -> None:
    model, expected = smooth(), smooth()
    steps = [exact(number) for number in range(1, 5)]
    found = list(program(gradient_of(2, model=model), steps))
    assert found == pytest.approx(list(program(Plain(expected), steps)), rel=1e-9)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


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
            with trainer.changing():
                optimizer.step()
    assert trainer.steps == 6
    return trainer.fingerprint()


@for_each("devices", [(1, 3), (3, 2)])
def test_a_stopped_run_goes_on_with_the_same_bits(devices: tuple[int, int], tmp_path: Path) -> None:
    run_with_loader(devices[0], tmp_path / "run", stop=4)
    whole = run_with_loader(1, tmp_path / "none")
    assert run_with_loader(devices[1], tmp_path / "run") == whole


def test_verify_finds_it_right(compared: Compared) -> None:
    trainer = compared.trainer(Net(), loss)
    trainer.gradient(batch_of(1))
    found = compared.lines(trainer)[1]
    assert found["gradient_difference"] < 1e-9
    assert not found["causes"]


# Which calls are one step


def test_the_same_batch_is_one_step_and_one_function() -> None:
    trainer = gradient_of(2)
    batch = batch_of(1)
    first, second, other = (trainer.gradient(b) for b in (batch, batch, batch_of(1)))
    assert (first.number, second.number, other.number, trainer.steps) == (1, 1, 2, 2)
    assert float(first.loss) == float(second.loss) != float(other.loss)  # other dropout
    for number in (3, 4):
        with trainer.changing():
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
            with trainer.changing():
                optimizer.step()
    assert sum("same batch object again" in record.message for record in caplog.records) == 1


# What is refused


def test_two_batches_in_a_block_are_refused() -> None:
    trainer = gradient_of(2)
    inputs, labels = batch_of(1)
    words = r"two batches in one block .* the very same object .*Make it before the block"
    optimizer = torch.optim.LBFGS(trained(trainer.model))
    with pytest.raises(RuntimeError, match=words), trainer.changing():
        optimizer.step(lambda: trainer.gradient((inputs, labels)).loss)


def scheduled() -> None:
    model = Net()
    gradient_of(model=model, schedule=StepLR(sgd(model), 1))


def averaged() -> None:
    trainer = trainer_of()
    trainer.average(decay=0.9)
    trainer.gradient(batch_of(1))


def searching() -> None:
    model = line()
    make_trainer(model, optimizer=torch.optim.LBFGS(model.parameters()))


REFUSED: dict[str, Callable[[], object]] = {
    "None for its optimizer.*call trainer.gradient": lambda: gradient_of().step(batch_of(1)),
    'expected precision="bf16" or "fp32"': lambda: gradient_of(precision="bf16-params"),
    "no parameter that requires": lambda: gradient_of(model=Net().requires_grad_(False)),
    "would be lost in rounding": lambda: trainer_of(precision="bf16-params").gradient(batch_of(1)),
    "would not see the script's": averaged,
    "step the schedule in the script": scheduled,
    r"needs a closure.*Give Trainer None .*trainer.gradient\(batch\).loss": searching,
}


@for_each("words", REFUSED)
def test_what_does_not_go_together_is_refused(words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        REFUSED[words]()


def another_batch(trainer: Any) -> None:
    trainer.gradient(batch_of(1 if trainer.is_lead else 2))


def unlike_calls(trainer: Any) -> None:
    batch = batch_of(1)
    trainer.gradient(batch)
    trainer.gradient(batch if trainer.is_lead else batch_of(1))


def outside_of_the_block(trainer: Any) -> None:
    batch = batch_of(1)
    trainer.gradient(batch)
    sgd(trainer.model).step()
    trainer.gradient(batch)


def by_the_lead_alone(trainer: Any) -> None:
    if trainer.is_lead:
        list(searches(trainer, [batch_of(1)]))
    else:
        with trainer.changing():
            pass
    trainer.barrier()


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
    for ended in outcomes(lambda: script(gradient_of(None)), 2):
        with pytest.raises(OnefoldError, match=words):
            raise ended.error


def failing_in_a_search() -> None:
    def spoilt(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5 and current_world().rank == 1:
            raise ArithmeticError("the fault")
        return loss(model, batch)

    calls: list[int] = []
    list(searches(gradient_of(None, function=spoilt), [batch_of(1)]))


def test_a_device_that_fails_in_a_search_is_named() -> None:
    lead, other = outcomes(failing_in_a_search, 2)
    assert isinstance(other.error, ArithmeticError)
    with pytest.raises(OnefoldError, match=r"device 1 .*ArithmeticError: the fault"):
        raise lead.error

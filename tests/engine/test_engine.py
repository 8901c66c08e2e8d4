"""One step through replicas, exchange and update: its verdict, and who is asked for what."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.head import Call, StepHead, plan_number
from onefold.core.options import RunOptions
from onefold.core.shard import Plan
from onefold.core.world import World
from onefold.errors import LossError
from tests.engine.assembled import Restless, cut_for, engine_of, given_to, pictures
from tests.inside import engine_in, session_in
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 3])


class Weighed:
    """A loss whose samples count for nothing while it is off."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self, model: nn.Module, batch: Batch) -> onefold.Mean:
        values = square(model, batch) * float(self.on)
        return onefold.Mean(values.sum(), float(self.on) * len(values))


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


# The verdict.


@both
def test_a_step_without_weight_is_skipped_by_all(devices: int) -> None:
    """Neither parameters, nor the optimizer's state, nor the schedule move; the step counts."""
    loss, model = Weighed(), line()
    optimizer = sgd(model)
    schedule = halved(optimizer)
    trainer = make_trainer(model, loss, optimizer=optimizer, devices=devices, schedule=schedule)
    given = given_to(engine_in(trainer).update)
    for number, on in enumerate((True, False, True, False), start=1):
        loss.on = on
        before, rate = bits(model), optimizer.param_groups[0]["lr"]
        states = [state.value.clone() for state in engine_in(trainer).update.states()]
        step = trainer.step(points(10))
        assert (step.number, bool(step.skipped)) == (number, not on)
        assert optimizer.param_groups[0]["lr"] == (rate / 2 if on else rate)
        assert (bits(model) == before) is not on
        now = [state.value for state in engine_in(trainer).update.states()]
        if not on:
            assert all(torch.equal(a, b) for a, b in zip(states, now, strict=True))
    assert len(given) == 2
    assert trainer.steps == 4


def test_skipped_steps_have_one_result_on_any_number_of_devices() -> None:
    prints = set()
    for devices in (1, 2, 4):
        loss = Weighed()
        trainer = make_trainer(loss=loss, devices=devices)
        for on in (True, False, True):
            loss.on = on
            trainer.step(points(10))
        prints.add(trainer.fingerprint())
    assert len(prints) == 1


@both
def test_one_shard_with_weight_has_all_devices_update(devices: int) -> None:
    """The others give zeros, and their devices follow."""

    def loss(model: nn.Module, batch: Batch) -> onefold.Mean:
        counts = (batch[0][:, 0] > 50).float()
        return onefold.Mean((square(model, batch) * counts).sum(), counts.sum())

    inputs, targets = points(10)
    inputs[9, 0] = 60.0
    engine = engine_of(loss=loss, devices=devices)
    before = bits(engine.replicas[0].module)
    outcome = engine.step(cut_for(engine, (inputs, targets)), 1)
    assert outcome.verdict.updates
    assert outcome.weight == 1.0
    assert bits(engine.replicas[0].module) != before
    first, *others = engine.replicas
    for other in others:
        assert torch.equal(other.trained.sections[0], first.trained.sections[0])


@both
@for_each("asked", [False, True])
@for_each("on", [False, True])
def test_a_run_that_was_asked_to_stop_stops_after_the_step(
    devices: int, asked: bool, on: bool
) -> None:
    """Which is updated, or skipped, as it would have been."""
    loss = Weighed()
    loss.on = on
    engine = engine_of(loss=loss, devices=devices)
    verdict = engine.step(cut_for(engine, points(10)), 1, asked_to_stop=asked).verdict
    assert (verdict.updates, verdict.stops) == (on, asked)


@both
def test_a_trainer_says_that_it_was_asked_to_stop_once_a_step_has_settled_it(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(options=RunOptions(saves=True))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    trainer = make_trainer(devices=devices)
    trainer.step(points(8))
    assert not trainer.asked_to_stop
    monkeypatch.setattr(session_in(trainer), "_is_asked_to_stop", lambda: True)
    assert not trainer.asked_to_stop
    trainer.step(points(8))
    assert trainer.asked_to_stop
    monkeypatch.setattr(session_in(trainer), "_is_asked_to_stop", lambda: False)
    trainer.step(points(8))
    assert trainer.asked_to_stop  # nobody takes it back


def test_a_run_that_does_not_save_itself_is_not_asked() -> None:
    trainer = make_trainer()
    session_in(trainer)._is_asked_to_stop = lambda: True  # type: ignore[method-assign]
    trainer.step(points(8))
    assert not trainer.asked_to_stop


# What comes of a step.


@both
def test_totals_and_weight_are_those_of_the_shards(devices: int) -> None:
    engine, batch = engine_of(devices=devices), points(10)
    values = square(engine.replicas[0].module, batch).detach().double()
    outcome = engine.step(cut_for(engine, batch), 1)
    expected = [float(part.sum()) for part in torch.tensor_split(values, 4)]
    assert outcome.totals.tolist() == pytest.approx(expected)
    assert outcome.weight == 10.0


@both
def test_an_outcome_does_not_change_with_the_steps_that_follow(devices: int) -> None:
    engine = engine_of(devices=devices)
    first = engine.step(cut_for(engine, points(8)), 1)
    totals = first.totals.tolist()
    engine.step(cut_for(engine, points(9)), 2)
    assert first.totals.tolist() == totals


@both
def test_the_gradient_is_shown_with_its_divisor_before_it_is_clipped(devices: int) -> None:
    engine = engine_of(devices=devices, clip_norm=1e-3)
    given = given_to(engine.update)
    shown: list[Any] = []

    def ready(weight: float) -> None:
        given = [g for g in engine.update.gradients if g is not None]
        norm = sum(float(gradient.double().square().sum()) for gradient in given) ** 0.5
        shown.append((weight, norm))

    engine.gradient_ready = ready
    engine.step(cut_for(engine, points(10)), 1)
    ((weight, norm),) = shown
    assert weight == 10.0
    assert norm > 0.1
    clipped = [torch.frombuffer(bytearray(g), dtype=torch.float32) for g in given[0].values()]
    assert float(torch.linalg.vector_norm(torch.cat(clipped))) == pytest.approx(1e-3, rel=1e-2)


@both
def test_the_notes_of_a_step_are_those_of_each_device_and_are_taken_once(devices: int) -> None:
    engine = engine_of(devices=devices)
    engine.step(cut_for(engine, points(10)), 1)
    spans = engine.take_spans()
    assert list(spans) == list(range(devices))
    for device, noted in spans.items():
        run = [s.label for s in noted if s.phase == "backward"]
        assert run == [f"backward shard {n}" for n in engine.roster.plan.shards_of(device)]
    assert {s.phase for s in spans[0]} == {"forward", "backward", "exchange", "update"}
    assert not any(engine.take_spans().values())


def test_a_loss_that_depends_on_no_parameter_updates_nothing() -> None:
    engine = engine_of(loss=lambda model, batch: batch[1].square().mean(dim=1))
    before = bits(engine.replicas[0].module)
    with pytest.raises(LossError, match="step 4 does not depend on any parameter"):
        engine.step(cut_for(engine, points(8)), 4)
    assert bits(engine.replicas[0].module) == before


def test_several_terms_are_begun_again_with_their_divisors_once() -> None:
    """From then on their weights are asked for first."""
    calls: list[bool] = []

    def loss(model: nn.Module, batch: Batch) -> onefold.Means:
        calls.append(True)
        values = square(model, batch).sum()
        return onefold.Mean(values, len(batch[0])) + onefold.Sum(values)

    engine = engine_of(loss=loss, shards=2)
    engine.step(cut_for(engine, points(8)), 1)
    assert len(calls) == 2 + 2 + 2  # found out, weighed, computed
    engine.step(cut_for(engine, points(8)), 2)
    assert len(calls) == 6 + 2 + 2


# A step that broke off.


class Breaking(torch.optim.SGD):
    """Fails in its update while it is set to."""

    fails = True

    def step(self, closure: object = None) -> None:
        if self.fails:
            raise ArithmeticError("in the update")
        super().step()


def test_a_step_that_broke_off_in_its_update_leaves_the_model_in_no_step() -> None:
    model = line()
    optimizer = Breaking(model.parameters(), lr=0.1)
    engine = engine_of(model, optimizer=optimizer)
    with pytest.raises(ArithmeticError, match="in the update"):
        engine.step(cut_for(engine, points(8)), 1)
    assert engine.is_torn
    optimizer.fails = False
    engine.step(cut_for(engine, points(8)), 1)
    engine.end_step()
    assert engine.is_torn  # what was torn once stays so
    engine.model_loaded()
    assert not engine.is_torn


def test_a_step_that_broke_off_before_its_update_has_torn_nothing() -> None:
    engine = engine_of(loss=lambda model, batch: square(model, batch) * float("nan"))
    with pytest.raises(LossError, match="step 1, shard 0 is nan"):
        engine.step(cut_for(engine, points(8)), 1)
    assert not engine.is_torn
    engine.check_last_step()  # on the processor somebody has looked already


# The devices of a process.


@for_each("fails", [False, True])
def test_the_module_computes_on_one_device_at_a_time_and_then_on_the_first(fails: bool) -> None:
    engine = engine_of(devices=3)
    first, _, third = engine.replicas
    third.trained.sections[0].fill_(7.0)
    try:
        with engine.attached(third):
            assert float(first.module.bias.detach()) == 7.0
            if fails:
                raise ArithmeticError
    except ArithmeticError:
        assert fails
    assert float(first.module.bias.detach()) == 0.25
    first.check_places()


def test_a_device_alone_has_no_others_beside_it() -> None:
    assert not engine_of(devices=1).with_others
    assert not engine_of(devices=3).with_others  # of its own process


def test_models_are_evaluated_in_a_state_that_is_put_back() -> None:
    module = Restless()
    module.drop.eval()
    engine = engine_of(module)
    torch.manual_seed(4)
    expected = torch.rand(2).tolist()
    torch.manual_seed(4)
    with engine.evaluating():
        assert not any(part.training for part in module.modules())
        assert not torch.is_grad_enabled()
        torch.rand(5)
    assert torch.rand(2).tolist() == expected
    assert [module.norm.training, module.drop.training] == [True, False]


def test_the_call_is_agreed_on_by_a_device_alone_as_well() -> None:
    """What would be refused with others is refused here too."""
    engine = engine_of()
    assert engine.agree(StepHead(Call.BARRIER, 1), stop=True).stop
    engine.replicas[0].module.extra = nn.Linear(2, 2)
    with pytest.raises(onefold.errors.StateError, match=r"parameter extra\.weight"):
        engine.agree(StepHead(Call.SAVE, 1))


@both
def test_what_was_changed_in_the_block_is_on_every_device(devices: int) -> None:
    engine = engine_of(devices=devices)
    with engine.changes.block(1):
        engine.replicas[0].module.weight.data.fill_(3.0)
    for replica in engine.replicas:
        assert bool((replica.trained.views[0] == 3.0).all())


def test_plans_have_different_numbers() -> None:
    plans = [Plan(counts) for counts in ((4,), (2, 2), (3, 1), (1, 3), (2, 1, 1))]
    assert len(set(map(plan_number, plans))) == len(plans)
    assert plan_number(Plan((3, 1))) == plan_number(Plan((3, 1)))


@for_each("frozen", ["weight", "bias"])
def test_a_parameter_that_was_frozen_at_the_start_must_stay_so(frozen: str) -> None:
    model = line()
    model.get_parameter(frozen).requires_grad_(False)
    engine = engine_of(model)
    engine.step(cut_for(engine, points(8)), 1)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match=f"^parameter {frozen} was frozen when Trainer was made"):
        engine.step(cut_for(engine, points(8)), 2)


def test_a_parameter_that_the_loss_writes_to_is_named() -> None:
    def writing(model: nn.Module, batch: Batch) -> torch.Tensor:
        values = square(model, batch)
        with torch.no_grad():
            model.bias.add_(1e-3)
        return values

    engine = engine_of(loss=writing)
    with pytest.raises(onefold.errors.StateError, match="step 1: parameter bias was written to"):
        engine.step(cut_for(engine, points(8)), 1)


@both
def test_a_model_in_evaluation_mode_is_mentioned_once(
    devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(Restless().eval(), devices=devices)
    for step in (1, 2):
        engine.step(cut_for(engine, pictures(8)), step)
    mentioned = [r for r in caplog.messages if "the model is in evaluation mode" in r]
    assert len(mentioned) == 1


@pytest.mark.full
@for_each("shards", [1, 2, 5])
@for_each("skipped", [False, True])
def test_no_gradient_is_kept_from_one_step_to_the_next(shards: int, skipped: bool) -> None:
    """They would lie beside those of the next step."""
    before = bytes_of_tensors()
    model = nn.Linear(257, 257, bias=False)
    weight = 0.0 if skipped else 1.0

    def loss(model: nn.Module, batch: tuple[torch.Tensor]) -> onefold.Mean:
        return onefold.Mean(model(batch[0]).square().sum() * weight, weight)

    trainer = make_trainer(model, loss, shards=shards)
    for _ in range(2):
        assert bool(trainer.step((torch.ones(5, 257),)).skipped) == skipped
    # The parameters, and the momentum that the first update makes.
    expected = (1 if skipped else 2) * 257 * 257 * 4
    assert bytes_of_tensors() - before == pytest.approx(expected, rel=0.1)


def bytes_of_tensors() -> int:
    """Of all memory that tensors of this process hold."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    dense = [t for t in tensors if t.layout is torch.strided]  # other tests leave others
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in dense}
    return sum(held.values())

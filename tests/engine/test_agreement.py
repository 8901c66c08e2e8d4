"""Two devices, each with a model of its own, say first what they are about to do and with what.

What they say of each difference, from the beginning of a run on, is in `tests/test_agreement.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from onefold.core.flat import lay_out
from onefold.core.head import Call, Said, StepHead, plan_number
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_pieces
from onefold.engine.agreement import Agreement, GroupSettings
from onefold.engine.guard import Turns
from onefold.engine.modelparts import OutsideModules
from onefold.engine.replica import Replica
from onefold.engine.update import SpanOptimizer
from onefold.errors import DisagreementError, StateError
from onefold.exchange.exchange import Exchange
from onefold.exchange.joining import OneDeviceMemory
from onefold.exchange.memory import Start
from tests.engine.assembled import CPU, Parts, replica_of
from tests.engine.meeting import Seat, Table, together
from tests.small import line, make_trainer, points, sgd, square
from tests.tables import for_each

HEAD = StepHead(call=Call.STEP, step=7, samples=64, batch_size=16, plan=5, loader=2)


@dataclass
class Device:
    """What one of them has."""

    replica: Replica
    optimizer: torch.optim.Optimizer
    teacher: nn.Module
    turns: Turns
    agreement: Agreement

    @property
    def model(self) -> Any:
        return self.replica.module


def device_at(seat: Seat, *, common: bool = False) -> Device:
    """One of two processes, with memory of its own unless all have the same."""
    model, teacher = Parts(), line()
    optimizer = sgd(model)
    replica = replica_of(model)
    trained = lay_out(replica.parts.trained)
    storage = Storage.alike(
        trained,
        other=lay_out(replica.parts.other),
        buffers=replica.buffers.layout,
        pieces=cut_pieces(trained, by_element=True),
        shards=4,
        devices=2,
    )
    start = Start(
        [p.detach() for p in replica.parts.trained.values()],
        [p.detach() for p in replica.parts.other.values()],
        replica.buffers.flat,
    )
    roster = Roster.first([CPU] * 2, plan=Plan((2, 2)), pieces=storage.pieces)
    memory = OneDeviceMemory(storage, start, CPU)
    memory.is_common = common
    exchange = Exchange(storage, memory, seat, roster)
    update = SpanOptimizer(
        optimizer, list(replica.parts.trained.values()), storage, memory.trained, roster
    )
    replica = Replica(0, CPU, replica.parts, memory.trained[0], memory.other[0], replica.buffers)
    replica.attach()

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return square(module, batch) + teacher(batch[0]).square().sum()

    outside, turns = OutsideModules(model, loss), Turns()
    agreement = Agreement([replica], exchange, update, outside, turns)
    return Device(replica, optimizer, teacher, turns, agreement)


Change = Callable[[Device], object]


def agreed(
    change: Change = lambda _: None,
    call: Call = Call.STEP,
    *,
    stops: tuple[bool, bool] = (False, False),
    due: bool = True,
    common: bool = False,
    on_both: bool = False,
) -> list[Said | Exception]:
    """What comes of a call before which device 1, or both, were changed."""

    def work(seat: Seat) -> Said:
        device = device_at(seat, common=common)
        for _ in range(0 if due else 5):
            device.turns.advance()
        if seat.number == 1 or on_both:
            change(device)
        return device.agreement.begin(HEAD._replace(call=call), stop=stops[seat.number])

    return together(work)


def words_of(found: list[Said | Exception]) -> str:
    """The one error, alike on both devices."""
    assert [type(each) for each in found] == [DisagreementError] * 2
    one, other = map(str, found)
    assert one == other
    return one


@for_each("stops", [(False, False), (True, False), (False, True)])
def test_all_hear_that_one_was_asked_to_stop(stops: tuple[bool, bool]) -> None:
    assert agreed(stops=stops) == [Said((0, 0), any(stops))] * 2


def beside(device: Device) -> None:
    """Behind PyTorch's back, where no call has looked before."""
    device.teacher.weight.data.add_(1.0)


def one_value(device: Device) -> None:
    """That is not among those that are looked at in every step."""
    device.model.wide.weight.data.view(-1)[1] += 1.0
    device.agreement.guard.note()


@for_each(
    ("change", "due", "common", "found"),
    [
        (beside, True, False, True),
        (beside, False, False, False),
        (one_value, True, False, True),
        (one_value, False, False, False),
        (one_value, True, True, False),
    ],
)
def test_what_costs_more_is_compared_when_it_is_due_and_memory_is_not_common(
    change: Change, due: bool, common: bool, found: bool
) -> None:
    said = agreed(change, due=due, common=common)
    assert all(isinstance(each, DisagreementError) for each in said) is found


def in_place(device: Device) -> None:
    with torch.no_grad():
        device.model.last.bias.add_(1.0)


def behind(device: Device) -> None:
    for parameter in device.model.parameters():
        parameter.data.mul_(0.5)


def lower_rate(device: Device) -> None:
    device.optimizer.param_groups[0]["lr"] = 0.01


def test_who_wrote_to_common_memory_behind_pytorchs_back_is_not_known() -> None:
    assert "since the call before, on device 1, outside" in words_of(agreed(behind))
    assert "since the call before, on a device, outside" in words_of(agreed(behind, common=True))


@for_each("call", [Call.STEP, Call.EVALUATE, Call.SAVE, Call.CHANGING])
def test_a_change_is_refused_where_all_made_it_too(call: Call) -> None:
    """The order of such changes would be left to chance."""
    words = words_of(agreed(in_place, call, on_both=True))
    assert "parameter last.bias changed since the call before, on device 0" in words


@for_each("call", [Call.LOAD, Call.CHANGED])
def test_what_settles_everything_asks_for_nothing_of_it_but_modes(call: Call) -> None:
    for change in (in_place, behind, lower_rate):
        assert agreed(change, call) == [Said((0, 0), False)] * 2
    found = agreed(lambda device: device.model.eval(), call)
    assert "device 1 has modules in another mode" in words_of(found)


def test_a_call_inside_the_block_is_refused_but_for_its_end() -> None:
    seat = Seat(Table(), 0)
    agreement = device_at(seat).agreement
    agreement.changing = True
    for call in set(Call) - {Call.CHANGED}:
        with pytest.raises(RuntimeError, match=rf"^{call.words} was called inside `with trainer"):
            agreement.begin(HEAD._replace(call=call))
    assert seat.rounds == 0


def grown(device: Device) -> None:
    device.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def moved(device: Device) -> None:
    device.model.last.weight.data = device.model.last.weight.data.clone()


def with_another_part(device: Device) -> None:
    device.model.more = nn.Linear(2, 2)


@for_each(
    ("change", "words"),
    [
        (grown, "parameter groups were changed after Trainer was made"),
        (moved, r"^parameter last\.weight has been given other memory"),
        (with_another_part, r"^parameter more\.weight of the model was put in"),
    ],
)
def test_a_device_whose_own_state_is_wrong_does_not_ask_the_others(
    change: Change, words: str
) -> None:
    seat = Seat(Table(), 0)
    device = device_at(seat)
    change(device)
    with pytest.raises((ValueError, StateError), match=words):
        device.agreement.begin(HEAD)
    assert seat.rounds == 0


def test_plans_have_different_numbers() -> None:
    plans = [Plan(counts) for counts in ((4,), (2, 2), (3, 1), (1, 3), (2, 1, 1))]
    assert len(set(map(plan_number, plans))) == len(plans)


# The settings of an optimizer's groups, as a number that tells them apart.


def adam(rate: float | torch.Tensor = 0.1) -> torch.optim.Adam:
    model = line()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.5}]
    return torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99))


@for_each(
    ("group", "key", "value"),
    [
        (0, "lr", 0.2),
        (1, "lr", 0.2),
        (1, "betas", (0.9, 0.999)),
        (0, "amsgrad", True),
        (0, "initial_lr", 0.1),
        (0, "lr", torch.tensor(0.1)),
    ],
)
def test_another_setting_is_another_number_until_it_is_changed_back(
    group: int, key: str, value: object
) -> None:
    optimizer, fresh = adam(), adam()
    settings = GroupSettings(optimizer)
    before, kept = settings.checksum(), dict(optimizer.param_groups[group])
    assert settings.checksum() == before == GroupSettings(fresh).checksum()
    optimizer.param_groups[group][key] = value
    after = settings.checksum()
    assert after != before
    theirs = GroupSettings(fresh)
    theirs.adopt(settings.as_json())
    assert theirs.checksum() == after
    if key in kept:
        optimizer.param_groups[group][key] = kept[key]
        assert settings.checksum() == before


def test_a_rate_in_a_tensor_counts_by_its_value_and_keeps_its_identity() -> None:
    """A schedule, or a graph of a GPU, may hold it."""
    lead, other = adam(torch.tensor(0.3)), adam(torch.tensor(0.1))
    rate = other.param_groups[0]["lr"]
    settings = GroupSettings(other)
    for due in (True, False):
        rate.fill_(0.1)
        before = settings.checksum(due=due)
        rate.fill_(0.2)
        assert settings.checksum(due=due) != before
    settings.adopt(GroupSettings(lead).as_json())
    assert other.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)


def test_a_setting_that_cannot_travel_is_named(tmp_path: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.step(points(8))
    trainer.save(tmp_path / "a")  # names of parameters are no settings
    optimizer.param_groups[0]["schedule"] = object()
    with pytest.raises(TypeError, match="schedule of the optimizer's group 0 is of type object"):
        trainer.save(tmp_path / "b")

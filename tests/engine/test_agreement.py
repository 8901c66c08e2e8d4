"""Two devices, each with a model of its own, say first what they are about to do and with what."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from onefold.core.flat import lay_out
from onefold.core.head import Call, Said, StepHead
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_pieces
from onefold.engine.agreement import Agreement
from onefold.engine.guard import Turns
from onefold.engine.modelparts import OutsideModules
from onefold.engine.replica import Replica
from onefold.engine.update import SpanOptimizer
from onefold.errors import DisagreementError, StateError
from onefold.exchange.exchange import Exchange
from onefold.exchange.joining import OneDeviceMemory
from onefold.exchange.memory import Start
from tests.engine.assembled import CPU, Restless, engine_of, replica_of
from tests.engine.meeting import Seat, Table, together
from tests.small import line, sgd, square
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
    model, teacher = Restless(), line()
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
    change: Change | None = None,
    heads: tuple[StepHead, StepHead] = (HEAD, HEAD),
    *,
    stops: tuple[bool, bool] = (False, False),
    due: bool = True,
    common: bool = False,
) -> list[Said | Exception]:
    """What comes of a call before which device 1 was changed."""

    def work(seat: Seat) -> Said:
        device = device_at(seat, common=common)
        for _ in range(0 if due else 5):
            device.turns.advance()
        if change is not None and seat.number == 1:
            change(device)
        return device.agreement.begin(heads[seat.number], stop=stops[seat.number])

    return together(work)


def words_of(found: list[Said | Exception]) -> str:
    """The one error, alike on both devices."""
    assert [type(each) for each in found] == [DisagreementError] * 2
    one, other = map(str, found)
    assert one == other
    return one


# What both say alike.


@for_each("call", Call, ids=lambda call: call.name)
def test_devices_that_agree_go_on(call: Call) -> None:
    head = HEAD._replace(call=call)
    assert agreed(heads=(head, head)) == [Said((0, 0), False)] * 2


@for_each("stops", [(True, False), (False, True), (True, True)])
def test_all_hear_that_one_was_asked_to_stop(stops: tuple[bool, bool]) -> None:
    assert agreed(stops=stops) == [Said((0, 0), True)] * 2


# What the head says.

OF_THE_HEAD: dict[str, tuple[int, str]] = {
    "call": (Call.SAVE, "device 1 calls trainer.save while device 0 calls trainer.step: all dev"),
    "step": (8, "device 1 is in step 8 and device 0 in step 7: every device must run the same"),
    "loss": (
        1,
        "step 7, trainer.step: device 1 computes loss 1 of the Trainer's and device 0 loss 0",
    ),
    "samples": (63, "step 7, trainer.step: device 1 has 63 samples and device 0 has 64: every"),
    "batch_size": (8, "step 7, trainer.step: device 1 has a batch_size of 8 and device 0 one of "),
    "plan": (6, "step 7, trainer.step: device 1 has another plan than device 0: set"),
    "loader": (-1, "device 1 has a batch of the script's own and device 0 a batch of loader 2:"),
    "data_pass": (1, "device 1 is in pass 1 over the data and device 0 in pass 0: every device"),
    "place": (9, "device 1 is at sample 9 of a pass over the data and device 0 at sample 0: "),
    "data": (1, "the data set of device 1 has other samples than that of device 0: make it"),
    "batch": (1, "device 1 was given another batch than device 0: a batch that the script"),
    "arguments": (1, "the arguments of device 1 differ from those of device 0: make the call"),
}


@for_each("field", OF_THE_HEAD)
def test_a_head_that_differs_is_put_into_words_on_both_devices(field: str) -> None:
    value, words = OF_THE_HEAD[field]
    other = HEAD._replace(**{field: value})
    assert words in words_of(agreed(heads=(HEAD, other)))


# What a device knows of its own state.


def bump(place: Callable[[Device], torch.Tensor]) -> Change:
    """Behind PyTorch's back, where no call has looked before."""

    def change(device: Device) -> None:
        place(device).data.add_(1.0)
        device.agreement.guard.note()

    return change


def lower_rate(device: Device) -> None:
    device.optimizer.param_groups[0]["lr"] = 0.01


def freeze(device: Device) -> None:
    device.model.usual.bias.requires_grad_(False)


def drop_more(device: Device) -> None:
    device.model.drop.p = 0.9


OF_THE_STATE: dict[str, tuple[Change, str]] = {
    "settings": (lower_rate, r"the optimizer's settings of device 1 \(such as the learning rate\)"),
    "mode": (lambda d: d.model.norm.eval(), r"device 1 has modules in another mode \(train, eval"),
    "number": (drop_more, r"device 1 has modules in another mode .* with other numbers \(the p"),
    "frozen": (freeze, r"device 1 has modules in another mode .* or other frozen parameters"),
    "parameter": (
        bump(lambda d: d.model.last.weight),
        "step 7, trainer.step: device 1 has other parameters or buffers than device 0",
    ),
    "buffer": (bump(lambda d: d.model.norm.running_mean), "device 1 has other parameters or buff"),
    "outside": (
        bump(lambda d: d.teacher.weight),
        "a module that the loss uses beside the model has other values on device 1 than on device",
    ),
}


@for_each("name", OF_THE_STATE)
def test_a_state_that_differs_is_put_into_words_on_both_devices(name: str) -> None:
    change, words = OF_THE_STATE[name]
    assert re.search(words, words_of(agreed(change)))


def test_every_field_is_among_them() -> None:
    of_the_state = {"settings", "modes", "values", "outside"}
    assert {*OF_THE_HEAD, *of_the_state} == set(StepHead._fields)


@for_each("due", [True, False])
def test_modules_beside_the_model_are_looked_at_when_it_is_due(due: bool) -> None:
    found = agreed(OF_THE_STATE["outside"][0], due=due)
    assert all(isinstance(each, DisagreementError) for each in found) is due


@for_each(("due", "common"), [(True, False), (False, False), (True, True)])
def test_all_values_are_added_up_when_it_is_due_and_memory_is_not_common(
    due: bool, common: bool
) -> None:
    """A single value that is not among the samples."""

    def change(device: Device) -> None:
        device.model.wide.weight.data.view(-1)[1] += 1.0
        device.agreement.guard.note()

    found = agreed(change, due=due, common=common)
    assert all(isinstance(each, DisagreementError) for each in found) is (due and not common)


# What was changed between two calls.


def in_place(device: Device) -> None:
    with torch.no_grad():
        device.model.last.bias.add_(1.0)


def behind(device: Device) -> None:
    for parameter in device.model.parameters():
        parameter.data.mul_(0.5)


@for_each(
    ("change", "words"),
    [
        (in_place, r"^step 7, trainer\.step: parameter last\.bias changed since the call before,"),
        (behind, r"^step 7, trainer\.step: parameters \(through \.data\) changed .* before,"),
    ],
)
def test_a_parameter_that_one_device_changed_is_named_with_the_device(
    change: Change, words: str
) -> None:
    found = words_of(agreed(change))
    assert re.search(words + r" on device 1, outside of `with trainer\.changing\(\):`", found)


def test_who_wrote_to_common_memory_behind_pytorchs_back_is_not_known() -> None:
    assert "since the call before, on a device, outside" in words_of(agreed(behind, common=True))


def alike_on_both(seat: Seat, call: Call) -> Said:
    device = device_at(seat)
    in_place(device)
    return device.agreement.begin(HEAD._replace(call=call))


@for_each("call", [Call.STEP, Call.EVALUATE, Call.SAVE, Call.CHANGING])
def test_a_change_is_refused_where_all_made_it_too(call: Call) -> None:
    """The order of such changes would be left to chance."""
    words = words_of(together(lambda seat: alike_on_both(seat, call)))
    assert "parameter last.bias changed since the call before, on device 0" in words


@for_each("call", [Call.LOAD, Call.CHANGED])
@for_each("change", [in_place, behind, lower_rate])
def test_what_settles_everything_asks_for_nothing_of_it(call: Call, change: Change) -> None:
    head = HEAD._replace(call=call)
    assert agreed(change, heads=(head, head)) == [Said((0, 0), False)] * 2


@for_each("call", [Call.LOAD, Call.CHANGED])
def test_modes_are_nobodys_to_settle(call: Call) -> None:
    head = HEAD._replace(call=call)
    found = agreed(lambda d: d.model.eval(), heads=(head, head))
    assert "device 1 has modules in another mode" in words_of(found)


# What is refused before anybody is asked.


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
    ("change", "kind", "words"),
    [
        (grown, ValueError, "parameter groups were changed after Trainer was made"),
        (moved, ValueError, r"^parameter last\.weight has been given other memory"),
        (with_another_part, StateError, r"^parameter more\.weight of the model was put in"),
    ],
)
def test_a_device_whose_own_state_is_wrong_does_not_ask_the_others(
    change: Change, kind: type[Exception], words: str
) -> None:
    seat = Seat(Table(), 0)
    device = device_at(seat)
    change(device)
    with pytest.raises(kind, match=words):
        device.agreement.begin(HEAD)
    assert seat.rounds == 0


@for_each("devices", [1, 3])
@for_each("stop", [True, False])
def test_a_process_alone_agrees_with_itself(devices: int, stop: bool) -> None:
    engine = engine_of(devices=devices)
    with torch.no_grad():
        engine.replicas[0].module.weight.add_(1.0)
    assert engine.agree(HEAD, stop=stop) == Said((0,), stop)

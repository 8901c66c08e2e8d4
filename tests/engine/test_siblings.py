"""The other devices of a process have the values of the first one when a step begins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onefold.engine.engine import Engine
from tests.engine.assembled import Restless, engine_of
from tests.tables import for_each


def engine() -> Engine:
    """Of three devices, one parameter of which no optimizer holds."""
    module = Restless()
    trained = [p for name, p in module.named_parameters() if name != "usual.bias"]
    return engine_of(module, optimizer=torch.optim.SGD(trained, lr=0.1), devices=3)


def alike(made: Engine) -> bool:
    first, *others = made.replicas
    pairs = [
        (mine, theirs)
        for other in others
        for ours, flat in ((other.trained, first.trained), (other.other, first.other))
        for mine, theirs in zip(ours.sections, flat.sections, strict=True)
    ]
    assert pairs
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def trained(made: Engine) -> None:
    with torch.no_grad():
        made.replicas[0].module.last.weight.mul_(3.0)


def left_alone(made: Engine) -> None:
    with torch.no_grad():
        made.replicas[0].module.usual.bias[1] = 3.0


def behind(made: Engine) -> None:
    made.replicas[0].module.last.weight.data.mul_(3.0)


def on_another(made: Engine) -> None:
    """As what a hook does on the device that the module is attached to."""
    made.replicas[2].trained.sections[0].mul_(2.0)


@for_each("change", [trained, left_alone, behind, on_another])
def test_what_was_changed_is_on_all_devices_when_they_follow(
    change: Callable[[Engine], None],
) -> None:
    made = engine()
    change(made)
    assert not alike(made)
    made._siblings.follow_first()
    assert alike(made)


def test_the_first_one_is_never_changed() -> None:
    made = engine()
    on_another(made)
    before = made.replicas[0].trained.sections[0].clone()
    made._siblings.follow_first()
    assert torch.equal(made.replicas[0].trained.sections[0], before)


@for_each("change", [trained, behind])
def test_what_was_brought_once_is_no_change_any_more(change: Callable[[Engine], None]) -> None:
    made = engine()
    change(made)
    made._siblings.follow_first()
    assert made.guard.changed() == 0


def test_a_single_value_is_seen_where_it_is_due() -> None:
    made = engine()
    assert made._turns.due
    made.replicas[1].trained.views[-1].view(-1)[1] += 1.0
    made._siblings.follow_first()
    assert alike(made)


def test_buffers_of_a_step_are_those_of_the_first() -> None:
    made = engine()
    first, *others = made.replicas
    first.module.norm.running_mean.fill_(4.0)
    first.buffers.begin_step()
    made._siblings.follow_first()
    for other in others:
        assert torch.equal(other.buffers.flat.sections[0], first.buffers.flat.sections[0])
        other.buffers.flat.sections[0].zero_()
        other.buffers.restore()  # what every shard of the step starts from
        assert torch.equal(other.buffers.flat.sections[0], first.buffers.flat.sections[0])


def test_one_device_has_nobody_to_bring_anything_to() -> None:
    made = engine_of(Restless())
    trained(made)
    changed = made.guard.changed()
    made._siblings.follow_first()
    made._siblings.copy_first()
    assert made.guard.changed() == changed > 0

"""Who takes part is known in one place: whoever needs it asks there, each time.

A later group may have other devices, and the same ones under other numbers. What follows of that is
tried here in one process, which drives all devices: between two steps `Devices` is given another
roster, and the engine is assembled anew.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import onefold
from onefold.core.assignment import Roster
from onefold.session.forming import shares_of
from onefold.step import assembly
from onefold.update.state import packed, unpack
from tests.inside import session_in
from tests.small import bits, make_trainer, square
from tests.step.assembled import CPU, devices_of
from tests.tables import for_each
from tests.test_rooms import modules, room_of

OUTLIVE = {"data_order", "passes", "record", "checkpoint", "session", "tools"}
"""Rooms whose objects outlive a group; those of the others are made for one."""
OF_A_GROUP = {
    *("agreement", "alone", "assignment", "context", "exchange", "first", "has_lead", "leads"),
    *("memory", "microbatches", "objectives", "own", "own_devices", "parts", "placement", "rank"),
    *("replicas", "roster", "rules", "transport", "update", "with_others"),
}
"""Names of what is one group's, in `Devices` or in an engine."""
TYPES_OF_A_GROUP = {"Agreement", "Exchange", "PartitionedOptimizer", "Placement", "StepContext"}
NO_COPIES = {
    "PartitionedState",  # made for a call, and dropped with it
    "LoaderTrack",  # the first pass
    "HostWatch",  # the rank that the launcher gave, which is a seat
}


def kept_by(value: ast.expr) -> Iterator[str]:
    """The names of what an assignment keeps: ``b`` of ``a.b``, but not ``a``, nor of a function."""
    if isinstance(value, ast.Attribute):
        yield value.attr
    elif isinstance(value, ast.Tuple | ast.List):
        for each in value.elts:
            yield from kept_by(each)
    elif isinstance(value, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Compare):
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr):
                yield from kept_by(child)
    elif isinstance(value, ast.Call):
        for argument in value.args:
            yield from kept_by(argument)


def copies_in(kind: ast.ClassDef) -> Iterator[str]:
    """What a class keeps of a group."""
    for node in ast.walk(kind):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [t for each in node.targets for t in getattr(each, "elts", [each])]
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        stored = [t for t in targets if isinstance(t, ast.Attribute)]
        if stored and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield from (n for n in kept_by(node.value) if n in OF_A_GROUP)
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                given = ast.unparse(argument.annotation) if argument.annotation else ""
                yield from (each for each in TYPES_OF_A_GROUP if each == given)


def test_nobody_keeps_a_copy_of_what_is_one_groups() -> None:
    found = {
        f"{module}.{node.name}": sorted(set(copies))
        for module, path in modules()
        if room_of(module) in OUTLIVE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name not in NO_COPIES
        if (copies := [*copies_in(node)])
    }
    assert found == {}


@for_each(
    ("seats", "own"),
    [((0, 1, 2), (1, 2)), ((2, 1, 0), (0, 1)), ((2,), (0,)), ((0, 2, 3, 1), (1, 3)), ((0,), ())],
)
def test_numbers_change_and_seats_do_not(seats: tuple[int, ...], own: tuple[int, ...]) -> None:
    devices = devices_of(3, own=[1, 2])
    devices.regroup(Roster(devices=(CPU,) * len(seats), seats=seats, context=devices.context))
    assert (devices.seats, devices.own) == ((1, 2), own)
    assert devices.has_lead == (0 in own)
    assert devices.own_devices == dict.fromkeys(own, CPU)


class Numbers(IterableDataset[Any]):
    """A stream."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(number) for number in range(24))


def sample(number: int) -> torch.Tensor:
    return torch.sin(torch.arange(3.0) + number)


class Normed(nn.Module):
    """With statistics, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(nn.functional.dropout(inputs, 0.2, self.training))


def regroup(trainer: onefold.Trainer, seats: tuple[int, ...]) -> None:
    """Have the devices of this process take part under other numbers, or fewer of them."""
    session = session_in(trainer)
    engine, devices, user = session.engine, session.devices, session.parts
    update, scale = engine.context.update, engine.rules
    states = [*unpack(packed(update.states()))]
    devices.regroup(Roster(devices=(CPU,) * len(seats), seats=seats, context=devices.context))

    def divided(optimizer: Any, users: Any, storage: Any, memory: Any, *given: Any) -> Any:
        update.divide(storage, memory, given[0])
        return update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "PartitionedOptimizer", divided)
        fresh = assembly.assemble(
            *(user.module, update.optimizer, user.losses),
            settings=session.settings,
            devices=devices,
            shares=shares_of(devices, session.settings.shards, None),
            scheduler=user.scheduler,
            joined=lambda exchange: None,
        )
    update.take_states(states)
    fresh.rules, fresh.hooks = scale, engine.hooks
    vars(engine).clear()
    vars(engine).update(vars(fresh))


GROUPS: dict[int, tuple[int, ...]] = {2: (2, 0, 1), 3: (1,), 5: (1, 2), 7: (0, 2, 1), 9: (2, 1)}
"""After which step which seats take part."""
LOADERS: dict[str, Any] = {
    "samples": lambda t: t.loader([sample(n) for n in range(24)], batch_size=8, shuffle=True),
    "read ahead": lambda t: t.loader([sample(n) for n in range(24)], batch_size=8, workers=1),
    "stream": lambda t: t.loader(Numbers(), batch_size=8),
    "batches": lambda t: t.batches(
        lambda step, draws: torch.randn(8, 3, generator=draws) + step, per_epoch=3
    ),
}


def scores(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mean": model(batch)[:, 0]}


def trained(read: Any, folder: Path, *, changes: bool) -> list[object]:
    """All that a run returns and shows, on devices that change between its steps."""
    torch.manual_seed(1)
    model, noted, steps = Normed(), list[object](), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    half: Any = 0.5
    trainer = make_trainer(
        model, lambda m, x: square(m, (x, half)), optimizer=optimizer, devices=3, precision="bf16"
    )
    trainer.on_step(lambda step: steps.append(step.number))
    trainer.average(decay=0.9)
    loader = read(trainer)
    for epoch in trainer.epochs(4):
        for batch in loader:
            noted.append(float(trainer.step(batch).loss).hex())
            if trainer.steps in GROUPS:
                if changes:
                    regroup(trainer, GROUPS[trainer.steps])
                    assert len(trainer.gather(1.0)) == len(trainer.devices)
                with trainer.modifying(optimizer_state=True):
                    first, last = model.layers[0], model.layers[2]
                    first.get_parameter("weight").data.mul_(0.9)
                    optimizer.state[last.get_parameter("bias")]["exp_avg"].mul_(0.5)
                with trainer.averaged():
                    noted.append(bits(model))
                    data = [sample(number) for number in range(9)]
                    noted.append(trainer.evaluate(scores, data, batch_size=5))
        saved = trainer.save(folder / str(epoch))
        trainer.load(saved)
        noted.append((trainer.fingerprint(), (saved / "model.safetensors").read_bytes()))
    noted.append(bits(model))
    # Other values than those that are here, also of buffers.
    trainer.load(folder / "0")
    noted.append((bits(model), trainer.fingerprint()))
    trainer.step(next(iter(loader)))
    return [*noted, bits(model), steps]


@for_each("how", sorted(LOADERS))
def test_all_follow_another_roster(how: str, tmp_path: Path) -> None:
    """Loaders in mid-pass, averages, blocks, evaluations and checkpoints; with equal bits."""
    one, other = (
        trained(LOADERS[how], tmp_path / str(changes), changes=changes) for changes in (False, True)
    )
    assert one == other

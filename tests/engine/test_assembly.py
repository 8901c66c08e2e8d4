"""What an engine is put together from, and what becomes of the user's model on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onefold.core.options import KeepName, RunOptions
from onefold.core.roster import Team
from onefold.core.shard import Plan
from onefold.core.world import World
from onefold.engine import assembly
from onefold.engine.assembly import assemble
from onefold.exchange.exchange import Exchange
from onefold.system.heap import DiskHeap
from tests.engine.assembled import Restless, engine_of, settings_of, team_of
from tests.small import bits, line, sgd, square
from tests.tables import for_each


def test_parameters_keep_values_and_identity_in_the_engines_memory() -> None:
    module = Restless()
    before, held = bits(module), dict(module.named_parameters())
    first, second = engine_of(module, devices=2).replicas
    assert bits(module) == before
    for name, parameter in module.named_parameters():
        assert parameter is held[name]
        place = list(first.parts.trained).index(name)
        assert parameter.data_ptr() == first.trained.views[place].data_ptr()
        assert torch.equal(second.trained.views[place], parameter)
        assert second.trained.views[place].data_ptr() != parameter.data_ptr()


def test_every_device_of_the_process_has_a_replica_with_its_number() -> None:
    engine = engine_of(devices=3)
    assert [replica.number for replica in engine.replicas] == [0, 1, 2]
    assert len({id(replica.parts) for replica in engine.replicas}) == 1
    assert engine.roster.plan == Plan((2, 1, 1))
    assert engine.roster.generation == 0
    assert engine.exchange.board.shape.devices == 3


def test_what_the_optimizer_holds_and_may_change_is_trained() -> None:
    """A frozen parameter of its groups must stay frozen; one of no group is left alone."""
    module = nn.Sequential(line(), nn.Linear(1, 2), nn.Linear(2, 1))
    module[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*module[0].parameters(), *module[1].parameters()], lr=0.1)
    engine = engine_of(module, optimizer=optimizer)
    parts = engine.replicas[0].parts
    assert list(parts.trained) == ["0.weight", "0.bias", "1.weight"]
    assert list(parts.other) == ["1.bias", "2.weight", "2.bias"]
    assert list(engine._frozen) == ["1.bias"]


def test_pieces_follow_what_the_optimizer_can_do() -> None:
    def pieces(kind: type[torch.optim.Optimizer]) -> list[bool]:
        module = line(40_000)
        update = engine_of(module, optimizer=kind(module.parameters(), lr=0.1)).update
        return [piece.whole for piece in update.storage.pieces]

    assert pieces(torch.optim.SGD) == [False, False, False, True]
    assert pieces(torch.optim.Adafactor) == [True, True]


def test_names_are_those_of_a_model_that_is_not_compiled() -> None:
    """The state of an optimizer is saved under them."""
    wrapped = nn.ModuleDict({"_orig_mod": nn.Sequential(line())})  # as torch.compile does
    storage = engine_of(wrapped, lambda m, b: square(m["_orig_mod"], b)).update.storage
    assert [entry.name for entry in storage.parameters.entries] == ["0.weight", "0.bias"]


def test_an_optimizer_that_trains_nothing_is_refused_before_anybody_is_joined() -> None:
    module = line().requires_grad_(False)
    came: list[Exchange] = []
    with pytest.raises(ValueError, match="holds no parameter that requires a gradient"):
        put_together(module, came)
    assert not came


def put_together(module: nn.Module, came: list[Exchange]) -> None:
    assemble(
        module,
        sgd(module),
        {"": square},
        settings=settings_of(shards=2),
        team=team_of(2),
        plan=Plan((1, 1)),
        schedule=None,
        joined=came.append,
    )


def test_whoever_waits_is_known_before_anything_else_can_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others hear of a failure through the exchange that was handed over."""

    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("while replicas are made")

    came: list[Exchange] = []
    monkeypatch.setattr(assembly, "Replica", fail)
    with pytest.raises(ArithmeticError, match="while replicas are made"):
        put_together(line(), came)
    assert len(came) == 1
    assert isinstance(came[0], Exchange)


def test_tied_parameters_have_one_place() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), line())
    module[1].weight = module[0].weight
    storage = engine_of(module).update.storage
    names = [entry.name for entry in storage.parameters.entries]
    assert names == ["0.weight", "0.bias", "1.bias", "2.weight", "2.bias"]
    assert module[1].weight is module[0].weight


def team_on(device: str, options: RunOptions) -> Team:
    """A process that drives one device and was launched with these options."""
    world = World(options=options)
    return Team(devices=(torch.device(device),), own=(0,), world=world, trainer=0)


@for_each("keep", ["all", "span", "host"])
def test_the_model_lies_in_a_file_only_if_devices_keep_nothing(
    keep: KeepName, tmp_path: Path
) -> None:
    team = team_on("cpu", RunOptions(keep=keep, home=str(tmp_path)))
    heap = assembly._heap(team)
    assert heap.on_disk == (keep == "host")
    assert not isinstance(heap, DiskHeap) or heap.folder == tmp_path


def test_a_gpu_that_keeps_nothing_has_memory_of_its_own(tmp_path: Path) -> None:
    options = RunOptions(keep="host", home=str(tmp_path))
    assert assembly._heap(team_on("cuda:0", options)).apart
    assert not assembly._heap(team_on("cpu", options)).apart


def test_several_gpus_of_one_process_keep_all() -> None:
    world = World(options=RunOptions(keep="host"))
    gpus = torch.device("cuda:0"), torch.device("cuda:1")
    team = Team(devices=gpus, own=(0, 1), world=world, trainer=0)
    with pytest.raises(ValueError, match=r"expected one cuda device .* onefold run --devices"):
        assembly._heap(team)

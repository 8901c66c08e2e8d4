"""What may be done between two steps: wait, report values, draw numbers, change the model."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.core import randomness
from onefold.core.encoding import decode, encode
from onefold.errors import DisagreementError, PeerFailed
from onefold.launcher.environment import current_context
from onefold.testing import outcomes, simulate
from tests.between import mine, shown
from tests.small import bits, line, make_trainer, points, sgd, square
from tests.tables import for_each


@for_each("devices", [1, 3])
def test_devices_of_one_process_have_its_value(devices: int) -> None:
    trainer = make_trainer(devices=devices)
    value = mine(2)
    found = trainer.gather(value)
    assert len(found) == devices
    for each in (*found, trainer.broadcast(value)):
        assert shown(each) == shown(decode(encode(value, "value")))
    found[0]["tensor"].zero_()
    assert devices == 1 or bool(found[1]["tensor"].any())
    assert bool(value["tensor"].any())


def exchanged() -> tuple[list[str], str, str]:
    trainer = make_trainer(devices=None)
    rank = current_context().rank
    trainer.step(points(8))
    trainer.barrier()
    gathered = trainer.gather(mine(rank))
    sent = trainer.broadcast(mine(rank + 2)) if rank == 0 else trainer.broadcast()
    trainer.step(points(8))
    return [shown(value) for value in gathered], shown(sent), trainer.fingerprint()


@for_each("exchange", ["shared", "collective"])
def test_every_process_learns_every_value(exchange: Any) -> None:
    expected = [shown(decode(encode(mine(rank), "value"))) for rank in range(3)]
    for found in simulate(exchanged, 3, exchange=exchange):
        assert found == (expected, expected[2], exchanged()[2])


@for_each(
    ("call", "fails", "words"),
    [
        (lambda t, rank: t.gather({"value": object() if rank else 1}), 1, "is of type object"),
        (lambda t, rank: t.broadcast({"model": t.model}), 0, r"type Linear.*state_dict\(\)"),
    ],
)
def test_what_cannot_be_sent_leaves_nobody_waiting(call: Any, fails: int, words: str) -> None:
    ends = outcomes(lambda: call(make_trainer(devices=None), current_context().rank), 2)
    for rank, ended in enumerate(ends):
        assert ended.error is not None
        with pytest.raises(TypeError if rank == fails else PeerFailed, match=words):
            raise ended.error


def test_dicts_of_numbers_are_floats_of_the_same_names() -> None:
    trainer = make_trainer()
    given = {"a": 1, "b": True, "c": np.float32(0.5), "d": torch.tensor(2.0)}
    (found,) = trainer.gather(given)
    assert [type(value) for value in found.values()] == [float] * 4
    (mixed,) = trainer.gather({**given, "e": "text"})
    assert type(mixed["a"]) is int
    words = r"^device 1 has \['b'\] and another device \['a'\]"
    with pytest.raises(DisagreementError, match=words):
        simulate(lambda: make_trainer(devices=None).gather({"ab"[current_context().rank]: 1.0}), 2)


# Random numbers


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), np.random.normal(), random.gauss(0, 1)]


def test_a_fork_restores_every_generator_and_goes_on_inside() -> None:
    trainer = make_trainer()
    for _ in range(3):  # an odd and an even number of normal numbers
        with trainer.fork_rng():
            inside = draws()
        assert draws() == inside


def drawing(forks: bool) -> str:
    """The lead draws random numbers between steps, and batches are drawn by the script."""
    trainer = make_trainer(devices=None)
    torch.manual_seed(5)
    inputs, targets = points(40)
    for _ in range(3):
        rows = torch.randint(40, (8,))
        trainer.step((inputs[rows], targets[rows]))
        if trainer.is_lead:
            with trainer.fork_rng() if forks else nullcontext():
                draws()
    return trainer.fingerprint()


def test_what_the_lead_draws_alone_shifts_nobody() -> None:
    words = r"another batch than device 0.*with trainer.fork_rng\(\)"
    with pytest.raises(DisagreementError, match=words):
        simulate(drawing, 2, args=(False,))
    assert set(simulate(drawing, 2, args=(True,))) == {drawing(True)}


# Modifying


class Small(nn.Module):
    """Parts whose attributes matter, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.line, self.factor = line(), 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(self.drop(self.norm(inputs))) * self.factor


def through_data(model: Any) -> None:
    """As an average is swapped in."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5)


@torch.no_grad()
def in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


BY_ALL: list[Callable[[Any, torch.optim.Optimizer], object]] = [
    lambda model, optimizer: through_data(model),
    lambda model, optimizer: in_place(model),
    lambda model, optimizer: model.norm.reset_running_stats(),
    lambda model, optimizer: optimizer.param_groups[0].update(lr=0.01, momentum=0.5),
]


def changed(lead_alone: bool, devices: int | None = None) -> list[object]:
    """Scores and fingerprints after each change, and after each step that follows."""
    model = Small()
    optimizer = sgd(model)
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    found: list[object] = []
    for change in BY_ALL:
        trainer.step(points(8))
        found.append(trainer.fingerprint())
        with trainer.modifying():
            if trainer.is_lead or not lead_alone:
                change(model, optimizer)
        data = TensorDataset(*points(12))
        scores = trainer.evaluate(lambda m, b: {"loss": square(m, b)}, data, batch_size=5)
        found += [scores, trainer.fingerprint()]
    trainer.barrier()
    trainer.step(points(8))
    return [*found, trainer.fingerprint()]


@for_each(
    ("exchange", "lead_alone"), [("shared", True), ("collective", True), ("collective", False)]
)
def test_what_is_changed_has_one_result(exchange: Any, lead_alone: bool) -> None:
    expected = changed(False, 1)
    assert changed(False, 3) == expected
    assert simulate(changed, 3, args=(lead_alone,), exchange=exchange) == [expected] * 3


@for_each("call", ["step", "gather", "broadcast", "barrier"])
def test_calls_of_the_trainer_are_refused_where_devices_may_differ(call: str) -> None:
    trainer = make_trainer()
    given = {"barrier": (), "step": (points(8),)}.get(call, (1,))
    words = rf"trainer.{call} was called inside .* End the block first"
    with pytest.raises(RuntimeError, match=words), trainer.modifying():
        getattr(trainer, call)(*given)


IN_ONE_PROCESS: list[Callable[[Any], object]] = [
    in_place,
    through_data,
    lambda model: model.line.weight.register_hook(lambda gradient: gradient * 0.5),
    lambda model: model.line.register_forward_hook(lambda module, inputs, output: output + 1),
    lambda model: setattr(model, "factor", 3.0),
    lambda model: setattr(model, "drop", nn.Identity()),
    lambda model: setattr(model.drop, "p", 0.9),
    lambda model: setattr(model.norm, "momentum", 0.5),
    lambda model: setattr(model.norm.running_mean, "data", torch.ones(3)),
    lambda model: model.norm.running_mean.add_(1),
    lambda model: model.norm.eval(),
    lambda model: model.line.bias.requires_grad_(False),
]


def trained(devices: int, change: Callable[[Any], object]) -> dict[str, bytes]:
    """With a change between two steps, without a block."""
    trainer = make_trainer(model := Small(), shards=6, devices=devices)
    trainer.step(points(18))
    change(model)
    trainer.step(points(18))
    trainer.step(points(18))
    return bits(model)


@for_each("change", IN_ONE_PROCESS)
def test_what_is_done_to_the_model_holds_on_all_devices_of_a_process(change: Any) -> None:
    assert trained(3, change) == trained(1, change) != trained(1, lambda model: None)


Drawn = tuple[float, float, float]


def drawn() -> Drawn:
    return float(torch.rand(())), random.random(), float(np.random.rand())


class Draws:
    """A loss that draws in blocks and between them, and keeps what it drew, by shard."""

    def __init__(self, *, gathers: bool = False, blocks: bool = True) -> None:
        self.same: list[tuple[Drawn, Drawn]] = []
        self.own: list[Any] = []
        self.gathers, self.blocks = gathers, blocks

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        before, rows = drawn(), model(batch)
        if self.blocks:
            with onefold.same_rng_for_all_shards():
                first = drawn()
            with onefold.same_rng_for_all_shards("other"):
                other = drawn()
                with onefold.same_rng_for_all_shards():
                    assert drawn() == first
            self.same.append((first, other))
            rows = rows * first[0]
        self.own.append((*before, *drawn()))
        if self.gathers:
            rows = rows - onefold.gather(rows).mean()
        return rows.square().mean(dim=1)


def trainer_of(loss: Any, devices: int = 1, model: Any = None, **choices: Any) -> onefold.Trainer:
    torch.manual_seed(0)
    choices = {"shards": 3, "devices": devices, **choices}
    return make_trainer(model or nn.Linear(4, 3), loss, **choices)


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


@for_each(("gathers", "choices"), [(True, {}), (False, {"microbatch": 2}), (False, {"shards": 1})])
def test_all_shards_draw_alike_and_each_step_anew(gathers: bool, choices: dict[str, Any]) -> None:
    prints = set()
    for devices in (1, 2, 3) if "shards" not in choices else (1,):
        trainer, steps = trainer_of(loss := Draws(gathers=gathers), devices, **choices), []
        for number in range(3):
            loss.same.clear()
            trainer.step(batch_of(number))
            assert len(set(loss.same)) == 1
            steps += [*loss.same[0]]
        assert len(set(steps)) == 6
        prints.add(trainer.fingerprint())
    assert len(prints) == 1


def test_what_is_drawn_around_a_block_is_as_if_it_were_not_there() -> None:
    """Each shard's own, and the script's."""
    losses = Draws(), Draws(blocks=False)
    for loss in losses:
        trainer = trainer_of(loss)
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        before = drawn()
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        trainer.step(batch_of(1))
        assert drawn() == before
        trainer.step(batch_of(2))
    assert losses[0].own == losses[1].own
    assert len({number for numbers in losses[0].own for number in numbers}) == 36


def test_evaluations_and_recomputed_statistics_draw_alike_in_each_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    trainer = trainer_of(loss := Draws(), model=model, shards=2)
    trainer.average(decay=0.9)
    trainer.step(batch_of(1))
    loss.same.clear()
    trainer.evaluate(lambda m, x: {"x": loss(m, x)}, batch_of(1), batch_size=4)
    assert [loss.same.index(each) for each in loss.same] == [0, 0, 2, 2]
    with trainer.averaged(update_bn=batch_of(2), batch_size=8):
        assert model[1].num_batches_tracked


def test_outside_of_a_shard_there_is_nothing_to_be_the_same_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever a test before this one has seeded by itself.
    monkeypatch.setattr(randomness.COMMON, "numbers", None)
    trainer_of(Draws()).step(batch_of(1))
    words = "was called outside a shard. Call it in a loss"
    with pytest.raises(RuntimeError, match=words), onefold.same_rng_for_all_shards():
        raise AssertionError("the block is not entered")


class Scaled:
    """Samples that scale all of a batch alike."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        with onefold.same_rng_for_all_shards("scale"):
            return torch.full((4,), index * random.random())


class Stream:
    def __iter__(self) -> Any:
        return iter(torch.arange(10.0)[:, None].expand(10, 4))


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    with onefold.same_rng_for_all_shards():
        factor = torch.rand(())
    return torch.stack(samples) * factor, factor.expand(len(samples))


@for_each("workers", [0, 1])
@for_each("kind", [Scaled, Stream])
def test_a_collate_and_samples_draw_alike_in_each_batch(workers: int, kind: Any) -> None:
    found: list[float] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found.extend({*batch[1].tolist()})
        return model(batch[0]).square().mean(dim=1)

    prints = set()
    for devices in (1, 3):
        trainer = trainer_of(loss, devices)
        found.clear()
        for batch in trainer.loader(kind(), batch_size=5, workers=workers, collate=collate):
            trainer.step(batch)
        assert [found.index(each) for each in found] == [0, 0, 0, 3, 3, 3]
        prints.add(trainer.fingerprint())
    assert len(prints) == 1

"""One shard on one device: what it gives depends on its samples, the parameters and its numbers."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import onefold
from onefold.core.fold import fold_shards
from onefold.core.randomness import kept_generators
from onefold.core.values import ShardResult
from onefold.core.weights_of_step import SUM, several, total_weight
from onefold.engine.modelparts import ModelParts
from onefold.errors import GradientError
from tests.engine.assembled import (
    CPU,
    Restless,
    between,
    bits_of,
    bytes_of,
    cut,
    given_to,
    pictures,
    replica_of,
    run_shards,
    task_of,
)
from tests.inside import engine_in
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

SHARDS = 4
Loss = Callable[[nn.Module, Batch], object]


def by_weight(model: nn.Module, batch: Batch) -> onefold.Mean:
    """Divided by numbers of its own, which are no whole ones."""
    weights = 0.3 + batch[1].abs().flatten()
    return onefold.Mean((square(model, batch) * weights).sum(), weights.sum())


def added_up(model: nn.Module, batch: Batch) -> onefold.Sum:
    return onefold.Sum(square(model, batch).sum())


def two_terms(model: nn.Module, batch: Batch) -> onefold.Means:
    return by_weight(model, batch) + 0.5 * added_up(model, batch)


LOSSES: dict[str, Loss] = {"values": square, "mean": by_weight, "sum": added_up}


def of_each(results: list[tuple[int, ShardResult]]) -> dict[int, tuple[object, ...]]:
    return {shard: bits_of(result) for shard, result in results}


# A function of parameters, samples, seed, step and shard.


@for_each("order", list(itertools.permutations(range(SHARDS)))[1::4])
def test_the_order_of_shards_is_of_no_matter(order: tuple[int, ...]) -> None:
    replica = replica_of(Restless())
    batch = cut(pictures(10, rare=(1, 8)), SHARDS)
    task = task_of(replica, square, shards=SHARDS)
    expected = of_each(run_shards(replica, batch, task, range(SHARDS)))
    assert len(set(expected.values())) == SHARDS
    assert of_each(run_shards(replica, batch, task, order)) == expected


def test_a_shard_gives_the_same_again_whatever_was_run_meanwhile() -> None:
    """Also on its own, and after the generators have gone elsewhere."""
    replica = replica_of(Restless())
    batch = cut(pictures(10), SHARDS)
    task = task_of(replica, square, shards=SHARDS)
    (_, alone), *_ = run_shards(replica, batch, task, [2])
    torch.manual_seed(77)
    again = run_shards(replica, batch, task, [2, 0, 2, 3, 3, 1, 2])
    assert {bits_of(result) for shard, result in again if shard == 2} == {bits_of(alone)}


def test_a_second_device_of_the_process_gives_the_same() -> None:
    module = Restless()
    first = replica_of(module)
    second = replica_of(module, number=1, parts=first.parts)
    assert second.trained.views[0].data_ptr() != first.trained.views[0].data_ptr()
    batch = cut(pictures(10), SHARDS)
    task = task_of(first, square, shards=SHARDS)
    there = of_each(run_shards(second, batch, task, (3, 1)))
    first.attach()
    here = of_each(run_shards(first, batch, task, range(SHARDS)))
    assert there == {shard: here[shard] for shard in (3, 1)}


def test_a_copy_of_the_model_in_another_replica_gives_the_same() -> None:
    module = Restless()
    twin = copy.deepcopy(module)
    batch = cut(pictures(10), SHARDS)
    found = []
    for each in (module, twin):
        replica = replica_of(each)
        task = task_of(replica, square, shards=SHARDS)
        found.append(of_each(run_shards(replica, batch, task, range(SHARDS))))
    assert found[0] == found[1]


@for_each("other", [{"seed": 1}, {"step": 2}])
def test_another_seed_or_step_draws_other_numbers(other: dict[str, int]) -> None:
    replica = replica_of(Restless())
    batch = cut(pictures(10), SHARDS)
    tasks = [task_of(replica, square, shards=SHARDS, **each) for each in ({}, other)]
    one, two = (of_each(run_shards(replica, batch, task, range(SHARDS))) for task in tasks)
    assert all(one[shard] != two[shard] for shard in range(SHARDS))


def test_shards_of_the_same_samples_draw_other_numbers() -> None:
    inputs, targets = pictures(2)
    batch = cut((inputs.repeat(2, 1, 1), targets.repeat(2, 1)), 2)
    replica = replica_of(Restless())
    found = of_each(run_shards(replica, batch, task_of(replica, square, shards=2), range(2)))
    assert found[0] != found[1]


# What it leaves behind.


def restless_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Draws from every global generator, and changes modes and what is frozen."""
    noise = torch.rand(()) + random.random() + float(np.random.rand())
    values = square(model, batch) * noise
    model.norm.eval()
    model.last.requires_grad_(False)
    return values


def test_nothing_of_the_model_or_the_generators_is_changed() -> None:
    module = Restless()
    module.drop.eval()
    replica = replica_of(module)
    batch = cut(pictures(10), SHARDS)
    task = task_of(replica, restless_loss, shards=SHARDS)
    modes, before = replica.parts.modes.read(), bits(module)
    places = [p.data_ptr() for p in module.parameters()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    results = run_shards(replica, batch, task, range(SHARDS))
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected
    assert all(result.buffers is not None for _, result in results)
    assert bits(module) == before
    assert [p.data_ptr() for p in module.parameters()] == places
    assert replica.parts.modes.read() == modes
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_a_shard_that_fails_says_which_it_was_and_leaves_modes_as_they_were() -> None:
    def failing(model: nn.Module, batch: Batch) -> torch.Tensor:
        restless_loss(model, batch)
        raise ArithmeticError("mine")

    replica = replica_of(Restless(), number=3)
    task = task_of(replica, failing, shards=SHARDS, step=7)
    with pytest.raises(ArithmeticError, match="mine") as caught:
        run_shards(replica, cut(pictures(10), SHARDS), task, [2])
    assert caught.value.__notes__ == ["raised in step 7, shard 2, on device 3 (cpu)"]
    assert replica.parts.modes.read() == task.modes
    assert replica.parts.trainable() == task.trainable


def test_gradients_of_two_shards_share_no_memory() -> None:
    """The fold adds to them in place."""
    replica = replica_of(Restless())
    batch = cut(pictures(10), 2)
    task = task_of(replica, square, shards=2)
    (_, first), (_, second) = run_shards(replica, batch, task, range(2))
    before = bits_of(second)
    for gradient in first.gradients:
        if gradient is not None:
            gradient.fill_(9.0)
    assert bits_of(second) == before


def test_what_a_hook_keeps_of_a_gradient_is_its_own() -> None:
    module = line()
    kept: list[torch.Tensor] = []

    def put(parameter: torch.Tensor) -> None:
        kept.append(parameter.grad)
        parameter.grad = kept[0]

    module.weight.register_post_accumulate_grad_hook(put)
    replica = replica_of(module)
    task = task_of(replica, square, shards=2)
    (_, first), (_, second) = run_shards(replica, cut(points(4), 2), task, range(2))
    assert first.gradients[0] is not None
    assert bytes_of(first.gradients[0]) == bytes_of(second.gradients[0]) == bytes_of(kept[0])
    assert len({g.data_ptr() for g in (first.gradients[0], second.gradients[0], kept[0])}) == 3


def test_an_inner_backward_that_leaves_a_gradient_is_refused() -> None:
    def leaving(model: nn.Module, batch: Batch) -> torch.Tensor:
        square(model, batch).sum().backward()
        return square(model, batch)

    replica = replica_of(line())
    task = task_of(replica, leaving, shards=2)
    with pytest.raises(GradientError, match=r"step 1, shard 1: .* left a gradient in weight\.grad"):
        run_shards(replica, cut(points(4), 2), task, [1])


# What it says beside gradients.


@for_each("name", LOSSES)
def test_total_and_weight_are_those_of_the_shards_samples(name: str) -> None:
    module, batch = line(), points(10)
    replica = replica_of(module)
    task = task_of(replica, LOSSES[name], shards=SHARDS)
    (_, result), *_ = run_shards(replica, cut(batch, SHARDS), task, [1])
    part = batch[0][3:6], batch[1][3:6]
    values = square(module, part).detach().double()
    weights = 0.3 + part[1].abs().flatten().double()
    expected = {
        "values": (values.sum(), 3.0),
        "mean": ((values * weights).sum(), weights.sum()),
        "sum": (values.sum(), SUM),
    }[name]
    assert result.total is not None
    assert result.total.dtype == torch.float64
    assert (float(result.total), result.weight) == pytest.approx(tuple(map(float, expected)))


@for_each("shards", [1, SHARDS])
@for_each("name", LOSSES)
def test_the_gradient_is_that_of_the_total_over_the_samples_of_the_batch(
    name: str, shards: int
) -> None:
    """With one shard over its own weight, and of a sum over nothing."""
    module, batch = line(), cut(points(10), shards)
    replica = replica_of(module)
    task = task_of(replica, LOSSES[name], shards=shards)
    (_, result), *_ = run_shards(replica, batch, task, [0])
    found = LOSSES[name](module, batch.shards[0])
    total = found.sum() if isinstance(found, torch.Tensor) else found.total
    divisor = {"sum": 1.0, "mean": result.weight if shards == 1 else 10.0, "values": 10.0}[name]
    expected = torch.autograd.grad(total / divisor, list(module.parameters()))
    torch.testing.assert_close(result.gradients, list(expected))


def test_several_terms_wait_for_their_divisors() -> None:
    module, batch = line(), cut(points(10), SHARDS)
    replica = replica_of(module)
    task = task_of(replica, two_terms, shards=SHARDS)
    (_, waiting), *_ = run_shards(replica, batch, task, [0])
    assert waiting.total is None
    assert waiting.weight == several(2)
    assert not any(waiting.gave)
    divisors = (5.0, 1.0)
    task = task_of(replica, two_terms, shards=SHARDS, divisors=divisors)
    (_, result), *_ = run_shards(replica, batch, task, [0])
    assert all(result.gave)
    assert result.weight == SUM
    term, other = two_terms(module, batch.shards[0]).terms
    finished = (term.total / divisors[0] + other.total / divisors[1]).detach()
    assert float(result.total) == pytest.approx(float(finished))


def test_shards_can_be_weighed_before_they_are_computed() -> None:
    replica = replica_of(line())
    batch = cut(points(3), SHARDS)
    task = task_of(replica, two_terms, shards=SHARDS)
    before = bits(replica.module)
    with kept_generators(CPU):
        replica.buffers.begin_step()
        weighed = replica.weigh_shards(batch, task)
    assert list(weighed) == [0, 1, 2]  # the last one is empty
    for shard, terms in weighed.items():
        assert [kind for kind, _ in terms] == ["mean", "sum"]
        assert terms[0][1] == pytest.approx(0.3 + float(batch.shards[shard][1].abs()))
    assert all(p.grad is None for p in replica.module.parameters())
    assert bits(replica.module) == before


def test_only_buffers_that_a_shard_changed_are_its_result() -> None:
    module = Restless()
    module.register_buffer("still", torch.ones(5))
    replica = replica_of(module)
    task = task_of(replica, square, shards=2)
    (_, result), *_ = run_shards(replica, cut(pictures(4), 2), task, [0])
    assert result.buffers is not None
    names = [replica.buffers.places.names[index] for index in result.buffers.indices]
    assert set(names) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    plain = replica_of(line())
    task = task_of(plain, square, shards=2)
    (_, result), *_ = run_shards(plain, cut(points(4), 2), task, [0])
    assert result.buffers is None


def test_a_shard_without_samples_gives_nothing() -> None:
    replica = replica_of(line())
    assert replica.nothing == [None, None]


# The fold over the results is the gradient of the step.


def add(
    left: list[torch.Tensor | None], right: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Out of place, where the engine adds in place."""
    pairs = zip(left, right, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def gradient_by_hand(
    module: nn.Module, batch: Batch, loss: Loss, *, shards: int, step: int
) -> tuple[dict[str, bytes | None], float]:
    """What the optimizer must be given for a batch, and the loss of the step."""
    replica = replica_of(copy.deepcopy(module))
    whole = cut(batch, shards)
    task = task_of(replica, loss, shards=shards, step=step)
    results = dict(run_shards(replica, whole, task, sorted(whole.shards, reverse=True)))
    gradients = [results[s].gradients if s in results else replica.nothing for s in range(shards)]
    weights = [results[s].weight if s in results else 0.0 for s in range(shards)]
    weight = total_weight(weights, whole.sizes, step)
    divisor = task.divisor(whole, weight.value) if weight.divided else 1.0
    total: dict[str, bytes | None] = {}
    for number, folded in enumerate(fold_shards(gradients, add)):
        given = sum(each[number] is not None for each in gradients)
        if folded is not None:
            folded = folded + 0.0 if given < shards else folded
            folded = folded if divisor == weight.value else folded * (divisor / weight.value)
        total[list(replica.parts.trained)[number]] = bytes_of(folded)
    numbers = [results[s].total if s in results else 0.0 * weight.value for s in range(shards)]
    losses = fold_shards([torch.as_tensor(n, dtype=torch.float64) for n in numbers], torch.add)
    return total, float(losses / weight.value)


@for_each("loss", LOSSES)
@for_each(
    ("shards", "devices", "samples", "rare"),
    [
        (1, 1, 7, (2,)),
        (3, 1, 8, (0,)),
        (3, 3, 8, (7,)),
        (4, 1, 11, (4, 5)),
        (4, 2, 11, ()),
        (4, 3, 11, (10,)),
        (4, 1, 3, (1,)),
        (4, 4, 2, (0,)),
    ],
)
def test_the_fold_over_results_is_what_the_optimizer_gets(
    shards: int, devices: int, samples: int, rare: tuple[int, ...], loss: str
) -> None:
    module = Restless()
    trainer = make_trainer(module, LOSSES[loss], shards=shards, devices=devices)
    given = given_to(engine_in(trainer).update)
    for step in (1, 2):
        batch = pictures(samples, rare=rare, seed=step)
        expected, value = gradient_by_hand(module, batch, LOSSES[loss], shards=shards, step=step)
        done = trainer.step(batch)
        assert given[-1] == expected
        assert float(done.loss) == value
        assert (expected["rare.weight"] is None) == (not rare)
        assert all(expected[name] is not None for name in expected if "rare" not in name)


# Whose memory the module computes in.


def test_a_parameter_in_other_memory_is_named() -> None:
    model = line()
    replica = replica_of(model)
    replica.check_places()
    model.bias.data = model.bias.data.clone()
    with pytest.raises(ValueError, match=r"^parameter bias has been given other memory"):
        replica.check_places()
    replica.attach()
    replica.check_places()


def test_parameters_keep_their_identity_while_they_go_from_device_to_device() -> None:
    model = line()
    before = dict(model.named_parameters())
    first = replica_of(model)
    second = replica_of(model, number=1, parts=first.parts)
    second.trained.sections[0].fill_(2.0)
    assert float(model.bias.detach()) == 2.0
    first.attach()
    assert float(model.bias.detach()) == 0.25
    assert all(model.get_parameter(name) is p for name, p in before.items())


def test_a_step_begins_and_ends_without_gradients() -> None:
    """Frozen for the optimizer, but with a gradient that a hook may look at."""
    model = line()
    parts = ModelParts(model, ["weight"])
    replica = replica_of(model, parts=parts)
    task = task_of(replica, square, shards=2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with between(replica, task):
        assert model.weight.grad is None
        replica.compute(0, cut(points(4), 2), task)
        assert model.bias.grad is not None
        seen = model.bias.grad.clone()
        replica.compute(0, cut(points(4), 2), task)
        assert torch.equal(model.bias.grad, seen)  # and not twice as much
    assert model.bias.grad is None

"""Steps of several loaders' batches, and of tensors with lengths of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import LossError
from tests.small import bits, line, make_trainer, points, sgd
from tests.tables import for_each


def two_losses(model: nn.Module, batch: Any) -> onefold.Means:
    """FixMatch's form: a mean over the few labelled samples, and one over the many others."""
    (inputs, targets), (others, _) = batch["labelled"], batch["others"]
    of_labelled = (model(inputs) - targets).square().mean(dim=1)
    of_others = 0.5 * model(others).square().mean(dim=1)
    labelled = onefold.Mean(of_labelled.sum(), len(inputs))
    return labelled + onefold.Mean(of_others.sum(), len(others))


def loaders(trainer: onefold.Trainer) -> tuple[onefold.Loader, onefold.Loader]:
    few = trainer.loader(TensorDataset(*points(11)), batch_size=4, shuffle=True)
    many = trainer.loader(TensorDataset(*points(40)), batch_size=9, shuffle=True)
    return few, many


def endless(loader: onefold.Loader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def zipped(trainer: onefold.Trainer) -> Iterator[Any]:
    few, many = loaders(trainer)
    for _ in trainer.epochs(2):
        yield from ((labelled, others) for others, labelled in zip(many, few, strict=False))


def endlessly(trainer: onefold.Trainer) -> Iterator[Any]:
    few, many = loaders(trainer)
    labelled = endless(few)
    for _ in trainer.epochs(2):
        for others in many:
            yield next(labelled), others


def without_epochs(trainer: onefold.Trainer) -> Iterator[Any]:
    few, many = map(endless, loaders(trainer))
    while trainer.steps < 8:
        yield next(few), next(many)


def in_each_epoch(trainer: onefold.Trainer) -> Iterator[Any]:
    """Both iterators are made anew."""
    for _ in trainer.epochs(2):
        few, many = loaders(trainer)
        yield from zip(endless(few), many, strict=False)


Pairs = Callable[[onefold.Trainer], Iterator[Any]]
SCRIPTS = (zipped, endlessly, without_epochs, in_each_epoch)


def trainer_of(devices: int = 1, loss: Any = two_losses, **choices: Any) -> onefold.Trainer:
    return make_trainer(loss=loss, devices=devices, **{"shards": 3, **choices})


def run(pairs: Pairs, trainer: onefold.Trainer, stop: int = 0, folder: Any = None) -> list[Any]:
    """Losses and samples of each step, and what the trainer ends with; or save on the way."""
    found: list[Any] = []
    for labelled, others in pairs(trainer):
        step = trainer.step({"labelled": labelled, "others": others})
        found.append((float(step.loss), step.samples))
        if step.number == stop:
            trainer.save(folder)
            break
    return [*found, bits(trainer.model)]


@for_each("pairs", SCRIPTS)
def test_two_loaders_have_the_bits_of_one_device_also_after_a_stop(
    pairs: Pairs, tmp_path: Path
) -> None:
    whole = run(pairs, trainer_of())
    assert whole == run(pairs, trainer_of(3))
    assert {samples for _, samples in whole[:-1]} == {4, 3}  # the labelled ones
    for stop in range(1, len(whole) - 1):
        run(pairs, trainer_of(2), stop, tmp_path / str(stop))
        again = trainer_of()
        again.load(tmp_path / str(stop))
        assert run(pairs, again) == whole[stop:]


def test_two_loaders_in_one_shard_are_the_plain_loop() -> None:
    trainer, optimizer = trainer_of(shards=1), sgd(model := line())
    for labelled, others in itertools.islice(zipped(trainer), 5):
        batch = {"labelled": labelled, "others": others}
        assert trainer.gradient(batch).samples == trainer.step(batch).samples
        (x, y), (u, _) = labelled.shards[0], others.shards[0]
        optimizer.zero_grad()
        ((model(x) - y).square().mean() + 0.5 * model(u).square().mean()).backward()
        optimizer.step()
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict())


def test_an_iterator_that_a_resumed_script_finds_empty_says_why(tmp_path: Path) -> None:
    trainer, again = make_trainer(), make_trainer()
    few, _ = loaders(trainer)
    for batch in (*few, *few):
        trainer.step(batch)
    trainer.save(tmp_path)
    again.load(tmp_path)
    few, _ = loaders(again)
    with pytest.raises(StopIteration, match=r"was used before the run was saved.*chain.from_iter"):
        next(iter(few))


def with_edge(model: nn.Module, batch: Any) -> onefold.Means:
    inside, (edge, targets) = model(batch["x"]), batch["edge"]
    of_edge = (model(edge) - targets).square().sum()
    mean = onefold.Mean((inside.square() * batch["scale"][1]).sum(), len(inside))
    return mean + onefold.Mean(of_edge, len(edge))


def with_shared(step: int, generator: torch.Generator) -> dict[str, Any]:
    edge = torch.randn(7, 3, generator=generator), np.ones((7, 1), np.float32)
    scale = onefold.Shared(("text", np.full((1, 1), 2, np.float32)))
    inputs = torch.randn(10, 3, generator=generator)
    return {"x": inputs, "edge": onefold.OwnLength(edge), "scale": scale}


@for_each("by_rule", [False, True])
def test_parts_of_another_length_have_the_bits_of_one_device(by_rule: bool) -> None:
    found = []
    for devices in (1, 2, 3):
        trainer = trainer_of(devices, with_edge)
        batches: Any = trainer.batches(with_shared, per_epoch=4)
        if not by_rule:
            batches = [with_shared(n, torch.Generator().manual_seed(n)) for n in range(4)]
        steps = [trainer.step(batch) for batch in batches]
        found.append((bits(trainer.model), [(float(s.loss), s.samples) for s in steps]))
    assert found[0] == found[1] == found[2]
    assert [samples for _, samples in found[0][1]] == [10] * 4


def test_tensors_lie_beside_a_loaders_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (inputs, targets), weights = batch
        return weights * (model(inputs) - targets).square().mean(dim=1)

    trainer = trainer_of(2, loss)
    few, _ = loaders(trainer)
    trainer.step((next(iter(few)), torch.linspace(0, 1, 4)))
    with pytest.raises(ValueError, match=r"batch\[1\] has 5 samples, and the loader's batch.* 4"):
        trainer.step((next(iter(few)), torch.ones(5)))


def mean_of_both(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean() + model(batch[1]).square().mean()


def beside(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean(1), {"both": mean_of_both(model, batch)}


X, Y = torch.ones(6, 3), torch.arange(24.0).view(8, 3)
UNEQUAL = r"a batch of 6 and 5 samples.*onefold.Mean\(total, wei"


@for_each(
    ("loss", "batch", "words"),
    [
        (two_losses, {"x": X, "t": X[:5]}, r"onefold.Shared\(value\).*onefold.OwnLength"),
        (two_losses, {"x": X, "t": X[0, 0]}, r"scalar tensor.*onefold.Shared\(value\)"),
        (two_losses, {"x": X, "t": onefold.OwnLength(X[:2])}, "has 2 samples and the batch 6, so"),
        (two_losses, {"x": X[:2], "t": onefold.OwnLength(X)}, "has 6 samples and the batch 2, so"),
        (two_losses, {"x": onefold.Shared(X)}, "holds no tensor"),
        (two_losses, onefold.OwnLength({"x": onefold.Shared(X)}), "a Shared within onefold.OwnLe"),
        (two_losses, onefold.OwnLength(X, dim=-1), "expected dim to be 0 or more"),
        (two_losses, onefold.OwnLength((X, X[:5])), "must agree in their first dimension"),
        (mean_of_both, (X, onefold.OwnLength(X[:5])), UNEQUAL),
        (beside, (X, onefold.OwnLength(X[:5])), UNEQUAL),
    ],
)
def test_what_cannot_be_cut_or_averaged_is_named(loss: Any, batch: Any, words: str) -> None:
    trainer = trainer_of(loss=loss, shards=4 if loss is two_losses else 2)
    if loss is mean_of_both:  # over equal shares it is that of the batch
        found = trainer.step((X, onefold.OwnLength(Y))).loss
        assert float(found) == pytest.approx(mean_of_both(line(), (X, Y)).item())
    with pytest.raises((LossError, TypeError, ValueError), match=words):
        trainer.step(batch)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"microbatch cuts shards.*Use more shards instead"):
        make_trainer(microbatch=2).step((X, onefold.Shared(X)))
    trainer = trainer_of(2)
    few, many = loaders(trainer)
    labelled = next(iter(few))
    trainer.plan = (1, 2)
    with pytest.raises(ValueError, match=r"several plans, \(2, 1\), \(1, 2\)"):
        trainer.step({"labelled": labelled, "others": next(iter(many))})

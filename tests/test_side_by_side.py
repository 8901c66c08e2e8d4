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
from tests.small import bits, line, make_trainer, points
from tests.tables import for_each

DEVICES = (1, 2, 3)


def two_losses(model: nn.Module, batch: Any) -> onefold.Means:
    """FixMatch's form: a mean over the few labelled samples, and one over the many others."""
    (inputs, targets), (others, _) = batch["labelled"], batch["others"]
    of_labelled = (model(inputs) - targets).square().mean(dim=1)
    of_others = model(others).square().mean(dim=1)
    return onefold.Mean(of_labelled.sum(), len(inputs)) + onefold.Mean(
        of_others.sum() * 0.5, len(others)
    )


def endless(loader: onefold.Loader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def loaders(trainer: onefold.Trainer, **choices: Any) -> tuple[onefold.Loader, onefold.Loader]:
    few = trainer.loader(TensorDataset(*points(11)), batch_size=4, shuffle=True, **choices)
    many = trainer.loader(TensorDataset(*points(40)), batch_size=9, shuffle=True, **choices)
    return few, many


def joined(labelled: Any, others: Any) -> dict[str, Any]:
    return {"labelled": labelled, "others": others}


def zipped(trainer: onefold.Trainer, epochs: int = 2) -> Iterator[Any]:
    few, many = loaders(trainer)
    for _ in trainer.epochs(epochs):
        for batches in zip(many, few, strict=False):
            yield joined(*batches[::-1])


def endlessly(trainer: onefold.Trainer, epochs: int = 2) -> Iterator[Any]:
    few, many = loaders(trainer)
    labelled = endless(few)
    for _ in trainer.epochs(epochs):
        for others in many:
            yield joined(next(labelled), others)


def without_epochs(trainer: onefold.Trainer, steps: int = 10) -> Iterator[Any]:
    few, many = map(endless, loaders(trainer))
    while trainer.steps < steps:
        yield joined(next(few), next(many))


def in_each_epoch(trainer: onefold.Trainer, epochs: int = 2) -> Iterator[Any]:
    """Both iterators are made anew, and the shorter one when it has ended."""
    for _ in trainer.epochs(epochs):
        few, many = loaders(trainer)
        labelled = iter(few)
        for others in many:
            found = next(labelled, None)
            if found is None:
                labelled = iter(few)
                found = next(labelled)
            yield joined(found, others)


SCRIPTS = (zipped, endlessly, without_epochs, in_each_epoch)
Made = Callable[[onefold.Trainer], Iterator[Any]]


def plain(steps: int) -> nn.Module:
    """A plain loop over what the loaders of one device yield."""
    trainer = make_trainer(loss=two_losses, shards=1)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in itertools.islice(zipped(trainer), steps):
        payloads = {name: part.shards[0] for name, part in batch.items()}
        optimizer.zero_grad()
        (x, y), (u, _) = payloads["labelled"], payloads["others"]
        loss = (model(x) - y).square().mean() + 0.5 * model(u).square().mean()
        loss.backward()
        optimizer.step()
    trainer.close()
    return model


def run(made: Made, devices: int, *, shards: int = 3) -> tuple[dict[str, bytes], list[Any]]:
    trainer = make_trainer(loss=two_losses, shards=shards, devices=devices)
    steps = [trainer.step(batch) for batch in made(trainer)]
    found = bits(trainer.model)
    trainer.close()
    return found, [(float(step.loss), step.samples) for step in steps]


@for_each("made", SCRIPTS)
def test_two_loaders_have_the_bits_of_one_device(made: Made) -> None:
    first = run(made, 1)
    assert all(run(made, devices) == first for devices in DEVICES[1:])
    assert {samples for _, samples in first[1]} == {4, 3}  # the labelled ones


def test_two_loaders_in_one_shard_are_the_plain_loop() -> None:
    trainer = make_trainer(loss=two_losses, shards=1)
    for batch in itertools.islice(zipped(trainer), 5):
        trainer.step(batch)
    for name, value in plain(5).state_dict().items():
        torch.testing.assert_close(value, trainer.model.state_dict()[name])
    trainer.close()


@for_each("made", SCRIPTS)
@for_each("stop", range(1, 10))
def test_a_run_of_two_loaders_goes_on_at_its_place(made: Made, stop: int, tmp_path: Path) -> None:
    straight = run(made, 2)
    stop = min(stop, len(straight[1]))
    trainer = make_trainer(loss=two_losses, shards=3)
    for batch in made(trainer):
        trainer.step(batch)
        if trainer.steps == stop:
            trainer.save(tmp_path)
            break
    trainer.close()
    again = make_trainer(loss=two_losses, shards=3, devices=2)
    again.load(tmp_path)
    losses = [float(again.step(batch).loss) for batch in made(again)]
    assert losses == [loss for loss, _ in straight[1][stop:]]
    assert bits(again.model) == straight[0]
    again.close()


def test_a_device_reads_its_own_shards_of_both_loaders() -> None:
    seen: list[tuple[int, int]] = []

    def loss(model: nn.Module, batch: Any) -> onefold.Means:
        seen.append((len(batch["labelled"][0]), len(batch["others"][0])))
        return two_losses(model, batch)

    trainer = make_trainer(loss=loss, shards=4)
    few, many = loaders(trainer)
    trainer.step(joined(next(iter(few)), next(iter(many))))
    assert sorted(set(seen)) == [(1, 2), (1, 3)]
    trainer.close()


def test_an_iterator_that_a_resumed_script_finds_empty_says_why(tmp_path: Path) -> None:
    trainer = make_trainer()
    few, _ = loaders(trainer)
    for _ in range(2):
        for batch in few:
            trainer.step(batch)
    trainer.save(tmp_path)
    trainer.close()
    again = make_trainer()
    again.load(tmp_path)
    few, _ = loaders(again)
    with pytest.raises(StopIteration, match=r"was used before the run was saved.*chain.from_iter"):
        next(iter(few))
    again.close()


def with_edge(model: nn.Module, batch: Any) -> onefold.Means:
    inside, (edge, targets) = model(batch["x"]), batch["edge"]
    of_edge = (model(edge) - targets).square().sum()
    mean = onefold.Mean((inside.square() * batch["scale"][1]).sum(), len(inside))
    return mean + onefold.Mean(of_edge, len(edge))


def with_shared(step: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        "x": torch.randn(10, 3, generator=generator),
        "edge": onefold.OwnLength(
            (torch.randn(7, 3, generator=generator), np.ones((7, 1), np.float32))
        ),
        "scale": onefold.Shared(("text", np.float32(2) * np.ones((10, 1), np.float32)[:1])),
    }


@for_each("by_rule", [False, True])
def test_parts_of_another_length_have_the_bits_of_one_device(by_rule: bool) -> None:
    found = []
    for devices in DEVICES:
        trainer = make_trainer(loss=with_edge, shards=3, devices=devices)
        batches: Any = trainer.batches(with_shared, per_epoch=4)
        if not by_rule:
            batches = [with_shared(n, torch.Generator().manual_seed(n)) for n in range(4)]
        steps = [trainer.step(batch) for batch in batches]
        found.append((bits(trainer.model), [float(step.loss) for step in steps]))
        assert [step.samples for step in steps] == [10] * 4
        trainer.close()
    assert found[0] == found[1] == found[2]


def test_gradients_of_two_loaders_are_those_of_a_step() -> None:
    grads = []
    for devices in DEVICES:
        trainer = make_trainer(loss=two_losses, shards=3, devices=devices)
        step = trainer.gradient(next(zipped(trainer)))
        assert step.samples == 4
        grads.append([p.grad.tolist() for p in trainer.model.parameters() if p.grad is not None])
        trainer.close()
    assert grads[0] == grads[1] == grads[2] != []


def test_tensors_lie_beside_a_loaders_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (inputs, targets), weights = batch
        return weights * (model(inputs) - targets).square().mean(dim=1)

    trainer = make_trainer(loss=loss, shards=3, devices=2)
    few, _ = loaders(trainer)
    weights = torch.linspace(0, 1, 4)
    for batch in itertools.islice(few, 2):
        trainer.step((batch, weights))
    with pytest.raises(ValueError, match=r"batch\[1\] has 5 samples, and the loader's batch.* 4"):
        trainer.step((next(iter(few)), torch.ones(5)))
    trainer.close()


X = torch.ones(6, 3)


@for_each(
    ("batch", "error", "words"),
    [
        ({"x": X, "t": torch.ones(5)}, ValueError, r"onefold.Shared\(value\).*onefold.OwnLength"),
        ({"x": X, "t": torch.tensor(1.0)}, ValueError, r"scalar tensor.*onefold.Shared\(value\)"),
        ({"x": X, "t": onefold.OwnLength(X[:2])}, ValueError, "has 2 samples and the batch 6, so"),
        ({"x": X[:2], "t": onefold.OwnLength(X)}, ValueError, "has 6 samples and the batch 2, so"),
        ({"x": onefold.Shared(X)}, ValueError, "holds no tensor"),
        (onefold.OwnLength({"x": onefold.Shared(X)}), TypeError, "a Shared within onefold.OwnLen"),
        (onefold.OwnLength(X, dim=-1), ValueError, "expected dim to be 0 or more"),
        (onefold.OwnLength((X, X[:5])), ValueError, "must agree in their first dimension"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, error: type[Exception], words: str) -> None:
    trainer = make_trainer(shards=4)
    with pytest.raises(error, match=words):
        trainer.step(batch)
    trainer.close()


def mean_of_both(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean() + model(batch[1]).square().mean()


@for_each("beside", [False, True])
def test_a_mean_over_unequal_shares_is_refused(beside: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        mean = mean_of_both(model, batch)
        return (model(batch[0]).square().mean(1), {"both": mean}) if beside else mean

    trainer = make_trainer(loss=loss, shards=2)
    with pytest.raises(LossError, match=r"a batch of 6 and 5 samples.*onefold.Mean\(total, wei"):
        trainer.step((X, onefold.OwnLength(X[:5])))
    trainer.close()


def test_a_mean_over_equal_shares_is_that_of_the_batch() -> None:
    model = line()
    trainer = make_trainer(model, mean_of_both, shards=2)
    batch = (X[:4], onefold.OwnLength(torch.arange(24.0).view(8, 3)))
    wanted = mean_of_both(model, (batch[0], batch[1].value)).item()
    assert float(trainer.step(batch).loss) == pytest.approx(wanted)
    trainer.close()


def test_microbatch_is_refused_with_parts_of_other_lengths() -> None:
    trainer = make_trainer(shards=2, microbatch=2)
    with pytest.raises(ValueError, match=r"microbatch cuts shards.*Use more shards instead"):
        trainer.step((X, onefold.Shared(X)))
    trainer.close()


def test_loaders_batches_of_two_plans_are_refused() -> None:
    trainer = make_trainer(loss=two_losses, shards=3, devices=2)
    few, many = loaders(trainer)
    labelled = next(iter(few))
    trainer.plan = (1, 2)
    with pytest.raises(ValueError, match=r"several plans, \(2, 1\), \(1, 2\)"):
        trainer.step(joined(labelled, next(iter(many))))
    trainer.close()

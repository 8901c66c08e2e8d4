"""Shards in pieces: the same gradient with less memory, and one number for all devices."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.engine.advice import is_shortage
from onefold.errors import CheckpointError, LossError
from tests import simulated
from tests.inside import engine_in
from tests.tables import for_each

Batch = tuple[torch.Tensor, torch.Tensor]
TOKENS = (12, 5)
"""Samples of a batch, and tokens of each."""


class Words(nn.Module):
    """Scores the next of twenty tokens; dropout and batch norm where they are asked for."""

    def __init__(self, *, restless: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8) if restless else nn.Identity()
        self.drop = nn.Dropout(0.2 if restless else 0.0)
        self.out = nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens).mean(dim=1))
        return self.out(self.drop(hidden)[:, None] + self.embedding(tokens))


def of_tokens(model: nn.Module, batch: Batch) -> onefold.Mean:
    """By token: padded ones, which are 0, do not count."""
    tokens, targets = batch
    total = F.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
    )
    return onefold.Mean(total, (targets != 0).sum())


def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).mT, targets, reduction="none").mean(dim=1)


def as_scalar(model: nn.Module, batch: Batch) -> torch.Tensor:
    return of_samples(model, batch).mean()


def undivided(model: nn.Module, batch: Batch) -> onefold.Sum:
    return onefold.Sum(of_samples(model, batch).sum())


def of_both(model: nn.Module, batch: Batch) -> object:
    long = batch[1][:, -1] != 0
    mean = onefold.Mean((of_samples(model, batch) * long).sum(), long.sum())
    return of_tokens(model, batch) + 0.5 * mean + 0.01 * undivided(model, batch)


LOSSES = (of_tokens, of_samples, as_scalar, undivided, of_both)


def batches(steps: int) -> list[Batch]:
    """Of very unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        tokens = torch.randint(1, 20, TOKENS, generator=generator)
        targets = torch.randint(1, 20, TOKENS, generator=generator)
        for row in range(1, TOKENS[0]):
            targets[row, row % 5 + (row < 6) :] = 0
        found.append((tokens, targets))
    return found


def trainer_of(
    loss: Callable[..., object] = of_tokens,
    *,
    model: nn.Module | None = None,
    devices: int | None = 1,
    shards: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> onefold.Trainer:
    model = model or Words(restless=options.get("microbatch") != 1)
    return onefold.Trainer(
        model,
        optimizer(model.parameters(), lr=0.01),
        loss,
        shards=shards,
        devices=["cpu"] * devices if devices else None,
        threads=1,
        **options,
    )


def gradient(loss: Callable[..., object], **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """What one step of plain descent moves, in float64, and the loss."""
    model = Words().double()
    before = copy.deepcopy(model.state_dict())
    trainer = onefold.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), loss, threads=1, **options
    )
    step = trainer.step(batches(1)[0])
    return {n: before[n] - p for n, p in model.state_dict().items()}, float(step.loss)


@for_each("loss", LOSSES)
@for_each("shards", [1, 2, 5])
@for_each("microbatch", [1, 2, 3])
def test_the_gradient_is_that_of_the_whole_batch(
    loss: Callable[..., object], shards: int, microbatch: int
) -> None:
    expected, at = gradient(loss, shards=1)
    devices = ["cpu"] * min(shards, 2)
    found, total = gradient(loss, shards=shards, microbatch=microbatch, devices=devices)
    assert total == pytest.approx(at, rel=1e-12)
    for name, values in expected.items():
        assert float((found[name] - values).abs().max()) < 1e-12, name


def result(trainer: onefold.Trainer, steps: list[Batch]) -> tuple[str, str]:
    last = [trainer.step(batch) for batch in steps][-1]
    return trainer.fingerprint(), float(last.loss).hex()


@for_each("loss", [of_tokens, of_both])
@for_each("precision", [None, "bf16", "fp16-params"])
def test_the_bits_do_not_depend_on_the_devices(
    loss: Callable[..., object], precision: str | None
) -> None:
    options = {"microbatch": 2, "precision": precision, "clip_norm": 0.3}
    steps = batches(3)
    found = {result(trainer_of(loss, devices=d, **options), steps) for d in (1, 2, 3)}
    found.add(result(trainer_of(loss, devices=2, plan=(1, 2), **options), steps))
    assert len(found) == 1
    options["microbatch"] = None
    assert result(trainer_of(loss, **options), steps) not in found


@for_each("loss", LOSSES)
def test_pieces_that_hold_a_whole_shard_change_nothing(loss: Callable[..., object]) -> None:
    for shards in (1, 3):
        found = {
            result(trainer_of(loss, shards=shards, microbatch=m, clip_norm=0.3), batches(3))
            for m in (None, 12, 100)
        }
        assert len(found) == 1


def test_hooks_and_modes_see_pieces_as_they_see_shards() -> None:
    """A hook that hands over a tensor that it keeps, and a loss that changes modes."""
    found = set()
    for kept in (False, True):
        model = Words()
        memory = torch.zeros_like(model.out.weight)

        def put(parameter: nn.Parameter, memory: torch.Tensor = memory) -> None:
            assert parameter.grad is not None
            memory.copy_(parameter.grad)
            parameter.grad = memory

        if kept:
            model.out.weight.register_post_accumulate_grad_hook(put)

        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            values = of_samples(model, batch)
            model.eval()
            return values

        found.add(result(trainer_of(loss, model=model, microbatch=1), batches(2)))
        assert model.training
    assert len(found) == 1


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    trainer = trainer_of(microbatch=2)
    rows = [(torch.ones(5), torch.ones(5)) for _ in range(9)]
    batches = trainer.loader(rows, batch_size=9, collate=lambda rows: {"joined": torch.ones(7)})
    with pytest.raises(ValueError, match=r"batch\['joined'\]: expected a first dimension of 3"):
        trainer.step(next(iter(batches)))


def test_pieces_with_other_terms_are_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        mean = of_tokens(model, batch)
        return mean + onefold.Sum(mean.total) if bool((batch[1] == 0).any()) else mean

    with pytest.raises(LossError, match="is of several kinds"):
        trainer_of(loss, shards=2, microbatch=1).step(batches(1)[0])


@for_each("wrong", [0, -1, 1.5, True, "all"])
def test_a_number_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match="microbatch"):
        trainer_of(microbatch=wrong)


def test_a_checkpoint_keeps_the_number(tmp_path: Path) -> None:
    steps = batches(4)
    whole = result(trainer_of(microbatch=2), steps)
    first = trainer_of(microbatch=2, devices=3)
    result(first, steps[:2])
    first.save(tmp_path)
    other = trainer_of(microbatch=3)
    with pytest.raises(CheckpointError, match="microbatch 2, this run has 3"):
        other.load(tmp_path)
    other.load(tmp_path, changed={"microbatch"})
    for number in (2, "auto"):
        second = trainer_of(microbatch=number, devices=2)
        second.load(tmp_path)
        assert result(second, steps[2:]) == whole


# What fits is found.


class Small:
    """A loss on a device on which only so many samples fit."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.seen: list[int] = []

    def __call__(self, model: nn.Module, batch: Batch) -> object:
        samples = len(batch[0])
        self.seen.append(samples)
        if samples > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return of_tokens(model, batch)


@pytest.mark.full
@for_each(("fits", "found"), [(4, None), (3, 2), (2, 2), (1, 1)])
@for_each("devices", [1, 2, 3])
def test_the_largest_pieces_that_fit_are_found(
    fits: int, found: int | None, devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    loss, steps = Small(fits), batches(4)
    restless = found != 1  # a single sample has no variance
    model = Words(restless=restless)
    trainer = trainer_of(loss, model=model, devices=devices, microbatch="auto")
    with caplog.at_level(logging.WARNING):
        given = result(trainer, steps)
    assert engine_in(trainer).fitting.samples == found
    # The search has left nothing behind.
    assert given == result(trainer_of(microbatch=found), steps)
    said = [r.getMessage() for r in caplog.records if "microbatch=" in r.getMessage()]
    assert any(f"in pieces of {found}" in text for text in said) == (found is not None)
    assert any("batch norm normalises" in text for text in said) == (restless and bool(found))


class Hungry(torch.autograd.Function):
    """Takes its memory in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, fits: int) -> torch.Tensor:
        ctx.fits = fits
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(gradient) > ctx.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient, None


@for_each("microbatch", [1, 2])
def test_no_piece_begins_while_the_graph_of_another_is_there(microbatch: int) -> None:
    """Also where a loss of several terms is first computed for its weights alone."""
    graphs: list[weakref.ref[torch.Tensor]] = []

    def loss(model: nn.Module, batch: Batch) -> object:
        assert all(graph() is None for graph in graphs)
        logits = model(batch[0])
        graphs.append(weakref.ref(logits))
        losses = logits.square().mean(dim=(1, 2))
        return onefold.Mean(losses.sum(), len(losses)) + onefold.Sum(losses.sum())

    trainer = trainer_of(loss, model=Words(), microbatch=microbatch)
    for batch in batches(2):
        trainer.step(batch)
    assert len(graphs) > 12 // microbatch * 3


@pytest.mark.parametrize("several", [False, True])
def test_backward_is_tried_as_well(*, several: bool) -> None:
    """Of a loss of several terms it runs only once the divisors are known."""

    def loss(model: nn.Module, batch: Batch) -> object:
        losses = Hungry.apply(of_samples(model, batch), 2)
        mean = onefold.Mean(losses.sum(), len(losses))
        return mean + onefold.Sum(losses.sum()) if several else mean

    trainer = trainer_of(loss, model=Words(), devices=2, microbatch="auto")
    assert trainer.step(batches(1)[0]).number == 1
    assert engine_in(trainer).fitting.samples == 2


def test_the_second_step_looks_again() -> None:
    """The optimizer's state is made by the first update."""
    loss, steps = Small(4), batches(3)
    trainer = trainer_of(loss, microbatch="auto", shards=1)
    loss.fits = 12
    trainer.step(steps[0])
    assert engine_in(trainer).fitting.samples is None
    loss.fits = 5
    trainer.step(steps[1])
    assert engine_in(trainer).fitting.samples == 4  # three pieces, as five would make
    loss.fits = 3
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step(steps[2])
    assert 'Trainer(microbatch="auto")' in str(caught.value.__notes__)


def test_where_nothing_fits_that_is_the_error() -> None:
    trainer = trainer_of(Small(0), devices=2, microbatch="auto")
    with pytest.raises(MemoryError, match="not even a single sample of step 1 fits"):
        trainer.step(batches(1)[0])


def test_a_number_that_was_found_stays_in_a_run_that_goes_on(tmp_path: Path) -> None:
    first = trainer_of(Small(2), microbatch="auto")
    result(first, batches(3))
    first.save(tmp_path)
    loss = Small(100)
    second = trainer_of(loss, microbatch="auto", devices=2)
    second.load(tmp_path)
    second.step(batches(1)[0])
    assert max(loss.seen) == 2
    third = trainer_of(loss, microbatch="auto")
    third.load(tmp_path, changed={"microbatch"})
    third.step(batches(1)[0])
    assert max(loss.seen) == 4


class Filling:
    """Fits whole shards until the optimizer has its state, and then pieces of two."""

    optimizer: torch.optim.Optimizer

    def __call__(self, model: nn.Module, batch: Batch) -> object:
        if len(batch[0]) > 2 and self.optimizer.state:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return of_samples(model, batch) * 300.0


def filling(**options: Any) -> onefold.Trainer:
    loss, model = Filling(), Words()
    loss.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return onefold.Trainer(
        model, loss.optimizer, loss, shards=3, devices=["cpu"], threads=1, **options
    )


@for_each("saved_at", [0, 1, 2])
def test_a_run_that_goes_on_looks_when_the_saved_one_would_have(
    saved_at: int, tmp_path: Path
) -> None:
    steps = batches(3)
    whole = result(filling(microbatch="auto"), steps)
    first = filling(microbatch="auto")
    for batch in steps[:saved_at]:
        first.step(batch)
    first.save(tmp_path)
    second = filling(microbatch="auto")
    second.load(tmp_path)
    assert result(second, steps[saved_at:]) == whole
    assert engine_in(second).fitting.samples == 2


def test_who_begins_to_look_on_the_way_must_ask_for_it(tmp_path: Path) -> None:
    first = trainer_of(Small(100), model=Words())
    first.step(batches(1)[0])
    first.save(tmp_path)
    second = trainer_of(Small(2), model=Words(), microbatch="auto")
    with pytest.raises(CheckpointError, match="microbatch None, this run has auto"):
        second.load(tmp_path)
    second.load(tmp_path, changed={"microbatch"})
    second.step(batches(1)[0])
    assert engine_in(second).fitting.samples == 2


def test_the_second_look_waits_for_the_first_update() -> None:
    """The first scales of float16 overflow, and such steps make no state."""
    trainer = filling(microbatch="auto", precision="fp16")
    steps = batches(9)
    skipped = [bool(trainer.step(batch).skipped) for batch in steps]
    assert skipped[:2] == [True, True]
    assert not skipped[-1]
    assert engine_in(trainer).fitting.samples == 2


def test_what_pytorch_says_when_memory_is_short_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46, dtype=torch.uint8)
    assert is_shortage(caught.value)
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def of_one_process(fits: int) -> tuple[int | None, str]:
    """On the lead as many samples fit as are given, elsewhere all of them."""
    loss = Small(100)
    trainer = trainer_of(loss, microbatch="auto", model=Words(), devices=None)
    loss.fits = fits if trainer.is_lead else 100
    found = result(trainer, batches(3))
    return engine_in(trainer).fitting.samples, found[0]


@for_each("exchange", ["shared", "collective"])
def test_processes_agree_on_the_smallest(exchange: str) -> None:
    number, found = simulated.launch(of_one_process, devices="cpu:2", args=(2,), exchange=exchange)
    assert number == 2
    assert found == result(trainer_of(model=Words(), microbatch=2), batches(3))[0]

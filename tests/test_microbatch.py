"""Shards in microbatches: the same gradient with less memory, and one number for all devices."""

import copy
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onefold
from onefold.errors import CheckpointError, LossError
from onefold.shard.advice import is_shortage
from onefold.step.microbatch import largest_fitting
from onefold.testing import simulate
from tests.inside import engine_in
from tests.small import Batch, make_trainer, result
from tests.tables import for_each

SAMPLES, TOKENS = 12, 5
Loss = Callable[..., object]


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
    logits, targets = model(batch[0]), batch[1]
    total = F.cross_entropy(logits.mT, targets, ignore_index=0, reduction="sum")
    return onefold.Mean(total, (targets != 0).sum())


def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).mT, batch[1], reduction="none").mean(dim=1)


def as_scalar(model: nn.Module, batch: Batch) -> torch.Tensor:
    return of_samples(model, batch).mean()


def of_both(model: nn.Module, batch: Batch) -> object:
    long, losses = batch[1][:, -1] != 0, of_samples(model, batch)
    mean = onefold.Mean((losses * long).sum(), long.sum())
    return of_tokens(model, batch) + 0.5 * mean + 0.01 * onefold.Sum(losses.sum())


LOSSES = (of_tokens, of_samples, as_scalar, of_both)


def batches(steps: int) -> list[Batch]:
    """Of very unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        tokens, targets = torch.randint(1, 20, (2, SAMPLES, TOKENS), generator=generator)
        for row in range(1, SAMPLES):
            targets[row, row % 5 + (row < 6) :] = 0
        found.append((tokens, targets))
    return found


def trainer_of(
    loss: Loss = of_tokens, *, model: nn.Module | None = None, shards: int = 3, **options: Any
) -> onefold.Trainer:
    model = model or Words(restless=options.get("microbatch") != 1)
    options = {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), **options}
    return make_trainer(model, loss, shards=shards, **options)


def gradient(loss: Loss, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """What one step of plain descent moves, in float64, and the loss."""
    model = Words().double()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = trainer_of(loss, model=model, optimizer=optimizer, **options).step(batches(1)[0])
    return {n: before[n] - p for n, p in model.state_dict().items()}, float(step.loss)


@for_each("loss", LOSSES)
@for_each(("shards", "microbatch"), [(1, 2), (2, 3), (5, 1)])
def test_the_gradient_is_that_of_the_whole_batch(loss: Loss, shards: int, microbatch: int) -> None:
    expected, at = gradient(loss, shards=1)
    found, total = gradient(loss, shards=shards, microbatch=microbatch, devices=min(shards, 2))
    assert total == pytest.approx(at, rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@for_each("loss", LOSSES)
@for_each("shards", [1, 3])
def test_microbatches_that_hold_a_whole_shard_change_nothing(loss: Loss, shards: int) -> None:
    trainers = [trainer_of(loss, shards=shards, microbatch=m, clip_norm=0.3) for m in (None, 100)]
    assert len({result(trainer, batches(2)) for trainer in trainers}) == 1


def test_no_microbatch_begins_while_the_graph_of_another_is_there() -> None:
    """Also where a loss of several terms is first computed for its weights alone."""
    graphs: list[weakref.ref[torch.Tensor]] = []

    def loss(model: nn.Module, batch: Batch) -> object:
        assert all(graph() is None for graph in graphs)
        logits = model(batch[0])
        graphs.append(weakref.ref(logits))
        losses = logits.square().mean(dim=(1, 2))
        return onefold.Mean(losses.sum(), len(losses)) + onefold.Sum(losses.sum())

    result(trainer_of(loss, model=Words(), microbatch=2), batches(2))
    assert len(graphs) > 18


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    trainer = trainer_of(microbatch=2)
    rows = [(torch.ones(5), torch.ones(5)) for _ in range(9)]
    loader = trainer.loader(rows, batch_size=9, collate=lambda rows: {"joined": torch.ones(7)})
    with pytest.raises(ValueError, match=r"batch\['joined'\]: expected a first dimension of 3"):
        trainer.step(next(iter(loader)))

    def loss(model: nn.Module, batch: Batch) -> object:
        mean = of_tokens(model, batch)
        return mean + onefold.Sum(mean.total) if bool((batch[1] == 0).any()) else mean

    for wrong in (0, 1.5, True, "all"):
        with pytest.raises((TypeError, ValueError), match="microbatch"):
            trainer_of(microbatch=wrong)
    with pytest.raises(LossError, match="return different kinds of losses"):
        trainer_of(loss, shards=2, microbatch=1).step(batches(1)[0])


# What fits is found.


def found_by(trainer: onefold.Trainer) -> int | None:
    return engine_in(trainer).microbatches.samples


def full(*_: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Small:
    """A loss on a device on which only so many samples fit."""

    def __init__(self, fits: int, *, backward: bool = False, terms: int = 1) -> None:
        self.fits = fits
        self.seen: list[int] = []
        self._backward, self._terms = backward, terms

    def __call__(self, model: nn.Module, batch: Batch) -> object:
        self.seen.append(samples := len(batch[0]))
        if samples > self.fits and not self._backward:
            full()
        mean = of_tokens(model, batch)
        if samples > self.fits and mean.total.requires_grad:
            mean.total.register_hook(full)
        return mean + onefold.Sum(mean.total) if self._terms > 1 else mean


@for_each(
    ("fits", "found", "devices", "where"),
    [
        (4, None, 2, {}),
        (3, 2, 1, {}),
        (2, 2, 3, {"backward": True}),
        (1, 1, 2, {"backward": True, "terms": 2}),
    ],
)
def test_the_largest_microbatches_that_fit_are_found(
    fits: int, found: int | None, devices: int, where: Any, caplog: pytest.LogCaptureFixture
) -> None:
    restless = found != 1  # a single sample has no variance
    choices: dict[str, Any] = {
        "model": Words(restless=restless),
        "devices": devices,
        "microbatch": "auto",
    }
    trainer = trainer_of(Small(fits, **where), **choices)
    with caplog.at_level(logging.WARNING):
        given = result(trainer, batches(2))
    assert found_by(trainer) == found
    # The search has left nothing behind.
    assert given == result(trainer_of(Small(12, **where), microbatch=found), batches(2))
    said = [r.getMessage() for r in caplog.records if "microbatch=" in r.getMessage()]
    assert any(f"in microbatches of {found}" in text for text in said) == (found is not None)
    assert any("batch norm normalizes over a microbatch" in text for text in said) == (
        restless and bool(found)
    )


def test_the_second_step_looks_again() -> None:
    """The optimizer's state is made by the first update."""
    trainer = trainer_of(loss := Small(12), microbatch="auto", shards=1)
    for loss.fits, found in ((12, None), (5, 4)):  # three microbatches, as five would make
        trainer.step(batches(1)[0])
        assert found_by(trainer) == found
    loss.fits = 3
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step(batches(1)[0])
    assert 'Trainer(microbatch="auto")' in str(caught.value.__notes__)


def test_where_nothing_fits_that_is_the_error() -> None:
    trainer = trainer_of(Small(0), devices=2, microbatch="auto")
    with pytest.raises(MemoryError, match="not even one sample of step 1 fits"):
        trainer.step(batches(1)[0])
    # What PyTorch says on a processor is known as well.
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46, dtype=torch.uint8)
    assert is_shortage(caught.value)
    assert not is_shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@for_each(
    ("first", "changed", "largest"),
    [("auto", (), 2), ("auto", ("microbatch",), 4), (None, ("microbatch",), 4)],
)
def test_what_a_run_that_goes_on_takes_over(
    first: Any, changed: Any, largest: int, tmp_path: Path
) -> None:
    """The number that was found. Who begins to look on the way must ask for it."""
    saved = trainer_of(Small(12 if first is None else 2), microbatch=first)
    result(saved, batches(2))
    saved.save(tmp_path)
    trainer = trainer_of(loss := Small(12), microbatch="auto", devices=2)
    if first is None:
        with pytest.raises(CheckpointError, match="microbatch None, but this run has auto"):
            trainer.load(tmp_path)
    trainer.load(tmp_path, allow_changed=changed)
    trainer.step(batches(1)[0])
    assert max(loss.seen) == largest


def filling(**options: Any) -> onefold.Trainer:
    """Fits whole shards until the optimizer has its state, and then microbatches of two."""
    optimizer = torch.optim.AdamW((model := Words()).parameters(), lr=0.01)

    def loss(model: nn.Module, batch: Batch) -> object:
        if len(batch[0]) > 2 and optimizer.state:
            full()
        return of_samples(model, batch) * 300.0

    return trainer_of(loss, model=model, optimizer=optimizer, microbatch="auto", **options)


@for_each("saved_at", [0, 1, 2])
def test_a_run_that_goes_on_looks_when_the_saved_one_would_have(
    saved_at: int, tmp_path: Path
) -> None:
    steps, first = batches(3), filling()
    for batch in steps[:saved_at]:
        first.step(batch)
    first.save(tmp_path)
    second = filling()
    second.load(tmp_path)
    assert result(second, steps[saved_at:]) == result(filling(), steps)
    assert found_by(second) == 2


def test_the_second_look_waits_for_the_first_update() -> None:
    """The first scales of float16 overflow, and such steps make no state."""
    trainer = filling(precision="fp16")
    skipped = [bool(trainer.step(batch).skipped) for batch in batches(9)]
    assert (skipped[:2], skipped[-1], found_by(trainer)) == ([True, True], False, 2)


def of_one_process() -> tuple[str, int | None]:
    """On the lead two samples fit, elsewhere all of them."""
    trainer = trainer_of(loss := Small(100), microbatch="auto", model=Words(), devices=None)
    loss.fits = 2 if trainer.is_lead else 100
    return result(trainer, batches(3))[0], found_by(trainer)


@for_each("exchange", ["shared", "collective"])
def test_processes_agree_on_the_smallest(exchange: Any) -> None:
    whole = result(trainer_of(model=Words(), microbatch=2), batches(3))[0]
    assert simulate(of_one_process, 2, exchange=exchange) == [(whole, 2)] * 2


@given(st.integers(1, 300), st.integers(0, 300))
def test_the_search_finds_the_largest_size_of_fewest_microbatches(samples: int, limit: int) -> None:
    tried: list[int] = []
    found = largest_fitting(samples, lambda size: tried.append(size) or size <= limit)  # type: ignore[func-returns-value]
    assert len(set(tried)) == len(tried) <= 2 * math.log2(samples) + 2
    assert found <= limit
    if limit:
        assert -(-samples // found) == -(-samples // min(limit, samples))

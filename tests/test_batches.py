"""Batches of any kind: cut, moved and trained on without changing their type."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import LossError
from tests.small import bits, line, make_trainer, points, sgd, square
from tests.tables import for_each


@dataclass(frozen=True)
class Points:
    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor | None = None


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


def encoded(x: torch.Tensor, y: torch.Tensor) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.trainer")  # whose import replaces the module itself
    return transformers.BatchEncoding({"inputs": x, "targets": y})


def of_fields(model: nn.Module, batch: Any) -> torch.Tensor:
    return square(model, (batch.inputs, batch.targets))


@for_each("make", [Points, encoded])
@for_each("options", [{}, {"microbatch": 2}, {"devices": 2, "shares": (3, 1)}])
def test_a_step_takes_batches_of_each_kind(make: Any, options: dict[str, Any]) -> None:
    seen: set[object] = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(type(batch))
        return of_fields(model, batch)

    trainer, expected = make_trainer(loss=loss, **options), make_trainer(loss=loss, **options)
    for samples in (13, 14):
        batch = make(*points(samples))
        trainer.step(batch)
        expected.step(Pair(*points(samples)))
    assert bits(trainer.model) == bits(expected.model)
    assert seen == {type(batch), Pair}


# Detection: tensors of various sizes, one a sample


SOURCE = torch.Generator().manual_seed(0)
BOXES = [
    (torch.randn(3, 6 + n % 3, 6, generator=SOURCE), torch.randn(n % 4, 4, generator=SOURCE))
    for n in range(14)
]
"""Pictures of various sizes, with from none to three boxes each."""


def as_lists(samples: list[Any]) -> Any:
    return [picture for picture, _ in samples], [{"boxes": boxes} for _, boxes in samples]


def of_boxes(model: nn.Module, batch: Any) -> tuple[onefold.Mean, dict[str, object]]:
    """By box: many shards have none."""
    pictures, targets = batch
    assert len(pictures) == len(targets)
    found = model(torch.stack([picture.mean(dim=(1, 2)) for picture in pictures]))
    errors = [(t["boxes"] - f).square().sum() for f, t in zip(found, targets, strict=True)]
    count = sum(len(t["boxes"]) for t in targets)
    return onefold.Mean(torch.stack(errors).sum(), count), {
        "boxes": onefold.Sum(torch.tensor(count))
    }


def found_boxes(devices: int = 1, **options: Any) -> torch.Tensor:
    """The weights of a run."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = make_trainer(model, of_boxes, optimizer=optimizer, devices=devices, **options)
    batches = trainer.loader(BOXES, batch_size=7, collate=as_lists)
    values = [float(trainer.step(b).values["boxes"]) for _ in trainer.epochs(2) for b in batches]
    assert values == [9, 10] * 2
    return model.weight.detach()


@for_each("shards", [1, 2, 3])
def test_detection_trains_alike_on_any_number_of_devices_and_in_microbatches(shards: int) -> None:
    """Whatever the numbers of samples, channels and boxes are."""
    whole = found_boxes(shards=shards)
    if shards == 3:
        assert torch.equal(found_boxes(2, shards=3), whole)
        assert torch.equal(found_boxes(3, shards=3, shares=(0, 2, 1)), whole)
    for microbatch in (1, 2):
        found = found_boxes(shards=shards, microbatch=microbatch)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def test_what_is_no_batch_is_refused() -> None:
    samples = [{"x": torch.ones(n, 3)} for n in (1, 2, 3)]
    words = r"batch\[0\]\['x'\] has 1.* trainer.loader and its collate"
    with pytest.raises(ValueError, match=words):
        make_trainer().step(samples)
    with pytest.raises(
        TypeError, match=r"got object. For anything else use trainer.loader, whose collate makes"
    ):
        make_trainer().step(object())


# Time first


class Reader(nn.Module):
    """Recurrent, over (time, n, values)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.LSTM(4, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0])


TIME = 6


def texts(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TIME, samples, 4, generator=generator)
    return x, torch.randint(0, 5, (TIME, samples), generator=generator)


def of_texts(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    assert len(x) == len(y) == TIME
    return F.cross_entropy(model(x).permute(1, 2, 0), y.T, reduction="none").mean(1)


def reading(devices: int = 1, model: nn.Module | None = None, **options: Any) -> onefold.Trainer:
    return make_trainer(model or Reader(), of_texts, devices=devices, **{"shards": 3, **options})


@for_each("options", [{}, {"microbatch": 2}, {"shards": 1, "microbatch": 2}])
def test_the_gradient_is_that_of_the_whole_batch(options: dict[str, Any]) -> None:
    model, expected = Reader().double(), Reader().double()
    x, y = texts(7)
    plain = sgd(expected)
    of_texts(expected, (x.double(), y)).mean().backward()
    plain.step()
    reading(model=model, **options).step((x.double(), y), dim=1)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def read(trainer: onefold.Trainer, first: int, last: int) -> str:
    for seed in range(first, last):
        assert trainer.step(texts(7, seed), dim=1).samples == 7
    return trainer.fingerprint()


@for_each("shares", [(2, 1), (1, 0, 2)])
def test_time_major_batches_are_cut_along_their_samples(shares: Any, tmp_path: Path) -> None:
    """Also in a run that goes on with another number of devices."""
    first, second = reading(len(shares), shares=shares, microbatch=2), reading(microbatch=2)
    read(first, 0, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert read(first, 2, 4) == read(second, 2, 4) == read(reading(microbatch=2), 0, 4)


DIM = "dim, counted from the first dimension,"


@for_each(
    ("batch", "dim", "words"),
    [
        ((torch.ones(3, 4), torch.ones(3)), 1, r"batch\[1\] has shape \(3,\), but dim=1"),
        ((torch.ones(3, 4), torch.ones(3, 5)), 1, "have the same size in their dimension 1, but "),
        (torch.ones(()), 1, "scalar tensor, but it needs a dimension 1 of samples"),
        (torch.ones(3, 4), -1, f"{DIM} must be at least 0, but got -1"),
        (torch.ones(3, 4), "1", f"{DIM} must be an integer, but got '1'"),
        (torch.ones(3, 4), True, f"{DIM} must be an integer, but got True"),
    ],
)
def test_what_cannot_be_cut_in_a_dimension_is_named(batch: Any, dim: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make_trainer().step(batch, dim=dim)


# Collate functions that leave out samples: shards count what is left

SAMPLES, BATCH = 24, 8
BAD = {1, 9, 10, 16, 17, 20}
"""With 4 shards, the shard of 16 and 17 has no sample left."""
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = [None if index in BAD else X[index] for index in range(SAMPLES)]
KEPT = [[i for i in range(start, start + BATCH) if i not in BAD] for start in (0, 8, 16)]
Sample = torch.Tensor | None


class Filtered:
    def __iter__(self) -> Iterator[Sample]:
        return iter(DATA)


def collate(samples: list[Sample]) -> torch.Tensor:
    kept = [sample for sample in samples if sample is not None]
    return torch.stack(kept) if kept else X[:0]


def fields(samples: list[Sample]) -> dict[str, Any]:
    x = collate(samples)
    return {"x": x, "texts": ["text"] * len(x)}


def tensor_of(batch: Any) -> torch.Tensor:
    return batch["x"] if isinstance(batch, dict) else batch


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(tensor_of(batch)).square().flatten()


class Counted(nn.Linear):
    """With a buffer that is averaged over shards."""

    mean: torch.Tensor

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(4, 1, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) and self.training:
            self.mean.copy_(x.mean(0))
        return super().forward(x)


SCALARS: list[Callable[[nn.Module, Any], Any]] = [
    lambda m, b: squares(m, b).mean(),
    lambda m, b: (squares(m, b).mean(), {"mse": squares(m, b).mean()}),
    squares,
    lambda m, b: onefold.Mean(squares(m, b).sum(), len(tensor_of(b))),
    lambda m, b: onefold.losses.l1_loss(squares(m, b), 0 * squares(m, b)),
]


def counting(loss: Any = SCALARS[0], shards: int = 4, **settings: Any) -> onefold.Trainer:
    optimizer = torch.optim.SGD((model := Counted()).parameters(), lr=0.1)
    return make_trainer(model, loss, optimizer=optimizer, shards=shards, **settings)


@for_each(
    ("loss", "shards", "data", "settings"),
    [
        *((loss, shards, DATA, {}) for loss in SCALARS for shards in (1, 3, 4)),
        (SCALARS[0], 4, DATA, {"devices": 3}),
        (SCALARS[0], 4, DATA, {"microbatch": 1}),
        (SCALARS[0], 4, DATA, {"workers": 1}),
        (SCALARS[0], 4, Filtered(), {}),
    ],
)
def test_shards_count_what_is_left(
    loss: Any, shards: int, data: Any, settings: dict[str, Any]
) -> None:
    plain, given = Counted(), dict(settings)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    workers = given.pop("workers", 0)
    trainer = counting(loss, shards, **given)
    batches = trainer.loader(data, batch_size=BATCH, collate=fields, workers=workers)
    for batch, kept in zip(batches, KEPT, strict=True):
        step = trainer.step(batch)
        optimizer.zero_grad()
        expected = squares(plain, X[kept]).mean()
        expected.backward()
        optimizer.step()
        assert step.samples == BATCH
        for value in (step.loss, *step.values.values()):
            assert float(value) == pytest.approx(expected.item(), rel=1e-12)
        if "microbatch" not in settings:
            mean = trainer.model.get_buffer("mean")
            torch.testing.assert_close(mean, X[kept].mean(0), rtol=1e-12, atol=1e-14)
    found = trainer.model.get_parameter("weight")
    torch.testing.assert_close(found, plain.weight, rtol=1e-12, atol=1e-14)


def test_scores_count_what_is_left_and_predictions_are_refused() -> None:
    trainer = counting(squares)
    settings: dict[str, Any] = {"batch_size": BATCH, "collate": collate}
    scores = trainer.evaluate(
        lambda m, b: {"scalar": squares(m, b).mean(), "each": squares(m, b)}, DATA, **settings
    )
    expected = squares(Counted(), X[[*KEPT[0], *KEPT[1], *KEPT[2]]]).mean().item()
    assert scores == pytest.approx({"scalar": expected, "each": expected}, rel=1e-12)
    with pytest.raises(LossError, match=r"1 rows for 2 samples.*torch\.utils\.data\.Subset"):
        trainer.predict(lambda m, b: {"out": m(b)}, DATA, **settings)


def test_what_cannot_be_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def pair(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        return collate(samples), torch.zeros(100, dtype=torch.float64)

    trainer = counting(shards=3)
    (batch,) = trainer.loader([1, 2, 3, 4], batch_size=4, collate=lambda samples: X[:0])
    assert trainer.step(batch).skipped
    trainer = counting(lambda m, b: squares(m, b[0]).mean(), shards=3)
    for batch in trainer.loader(DATA, batch_size=BATCH, collate=pair):
        trainer.step(batch)
    (said,) = [text for text in caplog.messages if "collate leaves out samples" in text]
    assert "onefold.Mean(losses.sum(), len(losses))" in said
    with pytest.raises(
        LossError, match=r"If collate drops samples, return onefold\.Mean\(losses\.sum\(\)"
    ):
        counting(lambda m, b: squares(m, b)[1:], shards=2).step(X)


# Batches of several loaders, and tensors with lengths of their own


def two_losses(model: nn.Module, batch: Any) -> onefold.LossTerms:
    """FixMatch's form: a mean over the few labeled samples, and one over the many others."""
    (inputs, targets), (others, _) = batch["labeled"], batch["others"]
    of_labeled = (model(inputs) - targets).square().mean(dim=1)
    of_others = 0.5 * model(others).square().mean(dim=1)
    labeled = onefold.Mean(of_labeled.sum(), len(inputs))
    return labeled + onefold.Mean(of_others.sum(), len(others))


def two_loaders(trainer: onefold.Trainer) -> tuple[onefold.Loader, onefold.Loader]:
    few = trainer.loader(TensorDataset(*points(11)), batch_size=4, shuffle=True)
    many = trainer.loader(TensorDataset(*points(40)), batch_size=9, shuffle=True)
    return few, many


def endless(loader: onefold.Loader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def zipped(trainer: onefold.Trainer) -> Iterator[Any]:
    few, many = two_loaders(trainer)
    for _ in trainer.epochs(2):
        yield from ((labeled, others) for others, labeled in zip(many, few, strict=False))


def endlessly(trainer: onefold.Trainer) -> Iterator[Any]:
    few, many = two_loaders(trainer)
    labeled = endless(few)
    for _ in trainer.epochs(2):
        for others in many:
            yield next(labeled), others


def without_epochs(trainer: onefold.Trainer) -> Iterator[Any]:
    few, many = map(endless, two_loaders(trainer))
    while trainer.steps < 8:
        yield next(few), next(many)


def in_each_epoch(trainer: onefold.Trainer) -> Iterator[Any]:
    """Both iterators are made anew."""
    for _ in trainer.epochs(2):
        few, many = two_loaders(trainer)
        yield from zip(endless(few), many, strict=False)


Pairs = Callable[[onefold.Trainer], Iterator[Any]]
SCRIPTS = (zipped, endlessly, without_epochs, in_each_epoch)


def trainer_of(devices: int = 1, loss: Any = two_losses, **choices: Any) -> onefold.Trainer:
    return make_trainer(loss=loss, devices=devices, **{"shards": 3, **choices})


def run(pairs: Pairs, trainer: onefold.Trainer, stop: int = 0, folder: Any = None) -> list[Any]:
    """Losses and samples of each step, and what the trainer ends with; or save on the way."""
    found: list[Any] = []
    for labeled, others in pairs(trainer):
        step = trainer.step({"labeled": labeled, "others": others})
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
    assert {samples for _, samples in whole[:-1]} == {4, 3}  # the labeled ones
    for stop in range(1, len(whole) - 1):
        run(pairs, trainer_of(2), stop, tmp_path / str(stop))
        again = trainer_of()
        again.load(tmp_path / str(stop))
        assert run(pairs, again) == whole[stop:]


def test_two_loaders_in_one_shard_are_the_plain_loop() -> None:
    trainer, optimizer = trainer_of(shards=1), sgd(model := line())
    for labeled, others in itertools.islice(zipped(trainer), 5):
        batch = {"labeled": labeled, "others": others}
        assert trainer.gradient(batch).samples == trainer.step(batch).samples
        (x, y), (u, _) = labeled.shards[0], others.shards[0]
        optimizer.zero_grad()
        ((model(x) - y).square().mean() + 0.5 * model(u).square().mean()).backward()
        optimizer.step()
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict())


def test_an_iterator_that_a_resumed_script_finds_empty_says_why(tmp_path: Path) -> None:
    trainer, again = make_trainer(), make_trainer()
    few, _ = two_loaders(trainer)
    for batch in (*few, *few):
        trainer.step(batch)
    trainer.save(tmp_path)
    again.load(tmp_path)
    few, _ = two_loaders(again)
    with pytest.raises(StopIteration, match=r"was used before the run was saved.*chain.from_iter"):
        next(iter(few))


def with_edge(model: nn.Module, batch: Any) -> onefold.LossTerms:
    inside, (edge, targets) = model(batch["x"]), batch["edge"]
    of_edge = (model(edge) - targets).square().sum()
    mean = onefold.Mean((inside.square() * batch["scale"][1]).sum(), len(inside))
    return mean + onefold.Mean(of_edge, len(edge))


def with_shared(step: int, generator: torch.Generator) -> dict[str, Any]:
    edge = torch.randn(7, 3, generator=generator), np.ones((7, 1), np.float32)
    scale = onefold.Broadcast(("text", np.full((1, 1), 2, np.float32)))
    inputs = torch.randn(10, 3, generator=generator)
    return {"x": inputs, "edge": onefold.Scatter(edge), "scale": scale}


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
    few, _ = two_loaders(trainer)
    trainer.step((next(iter(few)), torch.linspace(0, 1, 4)))
    with pytest.raises(
        ValueError, match=r"batch\[1\] has 5 samples, but the loader's batch next to it has 4"
    ):
        trainer.step((next(iter(few)), torch.ones(5)))


def mean_of_both(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean() + model(batch[1]).square().mean()


def beside(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean(1), {"both": mean_of_both(model, batch)}


XS, YS = torch.ones(6, 3), torch.arange(24.0).view(8, 3)
UNEQUAL = r"the batch has parts of 6 and 5 samples.*onefold.Mean\(total, wei"


@for_each(
    ("loss", "batch", "words"),
    [
        (two_losses, {"x": XS, "t": XS[:5]}, r"onefold.Broadcast\(value\).*onefold.Scatter"),
        (two_losses, {"x": XS, "t": XS[0, 0]}, r"scalar tensor.*onefold.Broadcast\(value\)"),
        (
            two_losses,
            {"x": XS, "t": onefold.Scatter(XS[:2])},
            "has 2 samples and the batch 6, so",
        ),
        (
            two_losses,
            {"x": XS[:2], "t": onefold.Scatter(XS)},
            "has 6 samples and the batch 2, so",
        ),
        (two_losses, {"x": onefold.Broadcast(XS)}, "the batch contains no tensor"),
        (
            two_losses,
            onefold.Scatter({"x": onefold.Broadcast(XS)}),
            "a Broadcast inside onefold.Scatter",
        ),
        (two_losses, onefold.Scatter(XS, dim=-1), f"{DIM} must be at least 0"),
        (
            two_losses,
            onefold.Scatter((XS, XS[:5])),
            "must have the same size in their first dimension",
        ),
        (mean_of_both, (XS, onefold.Scatter(XS[:5])), UNEQUAL),
        (beside, (XS, onefold.Scatter(XS[:5])), UNEQUAL),
    ],
)
def test_what_cannot_be_cut_or_averaged_is_named(loss: Any, batch: Any, words: str) -> None:
    trainer = trainer_of(loss=loss, shards=4 if loss is two_losses else 2)
    if loss is mean_of_both:  # over equal shares it is that of the batch
        found = trainer.step((XS, onefold.Scatter(YS))).loss
        assert float(found) == pytest.approx(mean_of_both(line(), (XS, YS)).item())
    with pytest.raises((LossError, TypeError, ValueError), match=words):
        trainer.step(batch)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"microbatch cuts each shard.*use more shards instead"):
        make_trainer(microbatch=2).step((XS, onefold.Broadcast(XS)))
    trainer = trainer_of(2)
    few, many = two_loaders(trainer)
    labeled = next(iter(few))
    trainer.shares = (1, 2)
    with pytest.raises(ValueError, match=r"different shares: \(2, 1\), \(1, 2\)"):
        trainer.step({"labeled": labeled, "others": next(iter(many))})

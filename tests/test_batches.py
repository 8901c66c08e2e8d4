"""Batches of any kind: cut, moved and trained on without changing their type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import LossError
from tests.small import bits, make_trainer, points, sgd, square
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
    return transformers.BatchEncoding({"inputs": x, "targets": y})


def of_fields(model: nn.Module, batch: Any) -> torch.Tensor:
    return square(model, (batch.inputs, batch.targets))


@for_each("make", [Points, encoded])
@for_each("options", [{}, {"microbatch": 2}, {"devices": 2, "plan": (3, 1)}])
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


class Boxes(torch.utils.data.Dataset[tuple[torch.Tensor, dict[str, torch.Tensor]]]):
    """Pictures of various sizes, with from none to three boxes each."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 6 + index % 3, 6, generator=generator)
        return picture, {"boxes": torch.randn(index % 4, 4, generator=generator)}


def as_lists(samples: list[Any]) -> Any:
    return [picture for picture, _ in samples], [target for _, target in samples]


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
    batches = trainer.loader(Boxes(), batch_size=7, collate=as_lists)
    values = [float(trainer.step(b).values["boxes"]) for _ in trainer.epochs(2) for b in batches]
    assert values == [9, 10] * 2
    return model.weight.detach()


@for_each("shards", [1, 2, 3])
def test_detection_trains_alike_on_any_number_of_devices_and_in_pieces(shards: int) -> None:
    """Whatever the numbers of samples, channels and boxes are."""
    whole = found_boxes(shards=shards)
    if shards == 3:
        assert torch.equal(found_boxes(2, shards=3), whole)
        assert torch.equal(found_boxes(3, shards=3, plan=(0, 2, 1)), whole)
    for microbatch in (1, 2):
        found = found_boxes(shards=shards, microbatch=microbatch)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def test_what_is_no_batch_is_refused() -> None:
    samples = [{"x": torch.ones(n, 3)} for n in (1, 2, 3)]
    words = r"batch\[0\]\['x'\] has 1.* trainer.loader and its collate"
    with pytest.raises(ValueError, match=words):
        make_trainer().step(samples)
    with pytest.raises(TypeError, match=r"got object. Use trainer.loader .* its collate makes"):
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


@for_each("plan", [(2, 1), (1, 0, 2)])
def test_time_major_batches_are_cut_along_their_samples(plan: Any, tmp_path: Path) -> None:
    """Also in a run that goes on with another number of devices."""
    first, second = reading(len(plan), plan=plan, microbatch=2), reading(microbatch=2)
    read(first, 0, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert read(first, 2, 4) == read(second, 2, 4) == read(reading(microbatch=2), 0, 4)


@for_each(
    ("batch", "dim", "words"),
    [
        ((torch.ones(3, 4), torch.ones(3)), 1, r"batch\[1\] has shape \(3,\): .*dim=1"),
        ((torch.ones(3, 4), torch.ones(3, 5)), 1, "agree in their dimension 1: "),
        (torch.ones(()), 1, "scalar tensor: expected a dimension 1 of samples"),
        (torch.ones(3, 4), -1, "expected dim to be 0 or more"),
        (torch.ones(3, 4), "1", "expected dim to be a number, got '1'"),
        (torch.ones(3, 4), True, "expected dim to be a number, got True"),
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
    return batch["x"] if isinstance(batch, dict) else batch  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(tensor_of(batch)).square().flatten()  # type: ignore[no-any-return]


class Counted(nn.Linear):
    """With a buffer that is averaged over shards."""

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
    with pytest.raises(LossError, match=r"collate leaves out .* onefold\.Mean\(losses\.sum\(\)"):
        counting(lambda m, b: squares(m, b)[1:], shards=2).step(X)

"""Batches of any kind: cut, moved and trained on without changing their type."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import DisagreementError
from tests import simulated
from tests.small import bits, line, make_trainer, points, sgd, square
from tests.tables import for_each
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]

SAMPLES = 10


class Encoding(UserDict[str, torch.Tensor]):
    """As tokenizers return them: items are attributes too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclass(frozen=True)
class Points:
    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor | None = None


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


def of_fields(model: nn.Module, batch: Any) -> torch.Tensor:
    return square(model, (batch.inputs, batch.targets))


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mapping": lambda x, y: Encoding(inputs=x, targets=y),
    "dataclass": Points,
    "namedtuple": Pair,
}


@for_each("kind", KINDS)
@for_each("options", [{}, {"microbatch": 2}, {"devices": 2, "plan": (3, 1)}])
def test_a_step_takes_batches_of_each_kind(kind: str, options: dict[str, Any]) -> None:
    found, seen = [], set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(type(batch).__name__)
        return of_fields(model, batch)

    for make in (KINDS[kind], KINDS["namedtuple"]):
        trainer = make_trainer(loss=loss, **options)
        for seed in (3, 4):
            x, y = points(SAMPLES + seed)
            trainer.step(make(x, y))
        found.append(bits(trainer.model))
    assert found[0] == found[1]
    assert seen == {type(KINDS[kind](x, y)).__name__, "Pair"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_mathematics_of_each_kind_are_compared(compared: Compared, kind: str) -> None:
    x, y = points(SAMPLES)
    found = compared.step(line(), of_fields, KINDS[kind](x.double(), y.double()))
    assert found["gradient_difference"] < 1e-9
    assert not found["causes"]


def test_a_batch_encoding_of_transformers_keeps_its_type() -> None:
    transformers = pytest.importorskip("transformers")
    x, y = points(SAMPLES)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(batch, transformers.BatchEncoding)
        return of_fields(model, batch)

    found = []
    for microbatch in (None, 2):
        trainer = make_trainer(loss=loss, microbatch=microbatch)
        trainer.step(transformers.BatchEncoding({"inputs": x, "targets": y}))
        found.append(trainer.model.weight.detach().clone())
    assert torch.allclose(found[0], found[1])


# Detection: tensors of various sizes, one a sample


class Boxes(torch.utils.data.Dataset[tuple[torch.Tensor, dict[str, torch.Tensor]]]):
    """Pictures of various sizes, with from none to three boxes each."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 6 + index % 3, 6, generator=generator)
        return picture, {"boxes": torch.randn(index % 4, 4, generator=generator)}


class Finder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.layer(torch.stack([p.mean(dim=(1, 2)) for p in pictures]))


def as_lists(samples: list[Any]) -> Any:
    return [picture for picture, _ in samples], [target for _, target in samples]


def as_zip(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


class Graphs:
    """As the batches of libraries for graphs: no container, and moved by itself."""

    def __init__(self, samples: list[Any]) -> None:
        self.pictures, self.targets = as_lists(samples)

    def to(self, device: torch.device) -> Graphs:
        self.pictures = [p.to(device) for p in self.pictures]
        self.targets = [{n: t.to(device) for n, t in each.items()} for each in self.targets]
        return self

    def __iter__(self) -> Any:
        return iter((self.pictures, self.targets))


def of_boxes(model: nn.Module, batch: Any) -> tuple[onefold.Mean, dict[str, object]]:
    """By box: many shards have none."""
    pictures, targets = batch
    assert len(pictures) == len(targets)
    found = model(pictures)
    errors = [(t["boxes"] - f).square().sum() for f, t in zip(found, targets, strict=True)]
    count = sum(len(t["boxes"]) for t in targets)
    return onefold.Mean(torch.stack(errors).sum(), count), {
        "boxes": onefold.Sum(torch.tensor(count))
    }


def found_boxes(collate: Callable[[list[Any]], Any], **options: Any) -> tuple[Any, list[float]]:
    model = Finder()
    trainer = onefold.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), of_boxes, threads=1, **options
    )
    values = []
    batches = trainer.loader(Boxes(), batch_size=7, collate=collate)
    for _ in trainer.epochs(2):
        for batch in batches:
            values.append(float(trainer.step(batch).values["boxes"]))
    return bits(model), values


@for_each("collate", [as_lists, as_zip, Graphs])
def test_detection_trains_alike_on_any_number_of_devices(
    collate: Callable[[list[Any]], Any],
) -> None:
    expected, boxes = found_boxes(as_lists, shards=3, devices=["cpu"])
    assert boxes == [9, 10] * 2
    for options in ({"devices": ["cpu"] * 2}, {"devices": ["cpu"] * 3, "plan": (0, 2, 1)}):
        assert found_boxes(collate, shards=3, **options) == (expected, boxes)


@for_each("collate", [as_lists, as_zip])
@for_each("shards", [1, 2, 3])
def test_pieces_of_detection_are_of_samples(
    collate: Callable[[list[Any]], Any], shards: int
) -> None:
    """Whatever the numbers of samples, channels and boxes are."""
    found = {}
    for microbatch in (None, 1, 2):
        weights, boxes = found_boxes(collate, shards=shards, devices=["cpu"], microbatch=microbatch)
        assert boxes == [9, 10] * 2
        found[microbatch] = torch.frombuffer(
            bytearray(weights["layer.weight"]), dtype=torch.float32
        )
    assert torch.allclose(found[1], found[None], atol=1e-6)
    assert torch.allclose(found[2], found[None], atol=1e-6)


def test_objects_that_move_themselves_cannot_be_cut_into_pieces() -> None:
    words = "batch: expected tensors, or tuples, .* got Graphs. Use more shards instead"
    with pytest.raises(TypeError, match=words):
        found_boxes(Graphs, shards=2, devices=["cpu"], microbatch=1)


def test_a_list_of_samples_is_no_whole_batch() -> None:
    samples = [{"x": torch.ones(n, 3)} for n in (1, 2, 3)]
    with pytest.raises(
        ValueError, match=r"batch\[0\]\['x'\] has 1.* trainer.loader and its collate"
    ):
        make_trainer().step(samples)
    with pytest.raises(TypeError, match=r"got Graphs. Use trainer.loader .* its collate makes"):
        make_trainer().step(Graphs([]))


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


def reading(model: nn.Module | None = None, **options: Any) -> onefold.Trainer:
    model = model or Reader()
    options = {"shards": 3, "devices": ["cpu"], "threads": 1, **options}
    return onefold.Trainer(model, sgd(model), of_texts, **options)


def test_a_time_major_batch_is_cut_along_its_samples() -> None:
    found = set()
    for plan in ((3,), (2, 1), (1, 0, 2)):
        trainer = reading(devices=["cpu"] * len(plan), plan=plan)
        for seed in range(3):
            step = trainer.step(texts(7, seed), dim=1)
            assert step.samples == 7
        found.add((trainer.fingerprint(), float(step.loss).hex()))
    assert len(found) == 1


@for_each("options", [{}, {"microbatch": 2}, {"shards": 1, "microbatch": 2}])
def test_its_gradient_is_that_of_the_whole_batch(options: dict[str, Any]) -> None:
    model, expected = Reader().double(), Reader().double()
    x, y = texts(7)
    plain = sgd(expected)
    of_texts(expected, (x.double(), y)).mean().backward()
    plain.step()
    reading(model, **options).step((x.double(), y), dim=1)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < 1e-13


def test_a_stopped_run_of_time_major_batches_goes_on(tmp_path: Path) -> None:
    whole = reading(microbatch=2)
    for seed in range(4):
        whole.step(texts(7, seed), dim=1)
    first, second = reading(microbatch=2, devices=["cpu"] * 3), reading(microbatch=2)
    for seed in range(2):
        first.step(texts(7, seed), dim=1)
    first.save(tmp_path / "run")
    second.load(tmp_path / "run")
    for seed in range(2, 4):
        second.step(texts(7, seed), dim=1)
    assert second.fingerprint() == whole.fingerprint()


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = texts(7)
        return x[:, index], y[:, index]


def time_first(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples], 1)


def test_pieces_of_a_loaders_time_major_shards_follow_the_dimension() -> None:
    own, read = (reading(microbatch=2) for _ in range(2))
    own.step(texts(7), dim=1)
    for batch in read.loader(Rows(), batch_size=7, collate=time_first):
        read.step(batch, dim=1)
    assert own.fingerprint() == read.fingerprint()
    (batch,) = read.loader(Rows(), batch_size=7, collate=time_first)
    with pytest.raises(ValueError, match=r"batch\[0\]: expected a first dimension of 3"):
        read.step(batch)


@for_each(
    ("batch", "dim", "error", "words"),
    [
        ((torch.ones(3, 4), torch.ones(3)), 1, ValueError, r"batch\[1\] has shape \(3,\): .*dim=1"),
        ((torch.ones(3, 4), torch.ones(3, 5)), 1, ValueError, "agree in their dimension 1: "),
        (torch.ones(()), 1, ValueError, "scalar tensor: expected a dimension 1 of samples"),
        (torch.ones(3, 4), -1, ValueError, "expected dim to be 0 or more"),
        (torch.ones(3, 4), "1", TypeError, "expected dim to be a number, got '1'"),
        (torch.ones(3, 4), True, TypeError, "expected dim to be a number, got True"),
    ],
)
def test_what_cannot_be_cut_in_a_dimension_is_named(
    batch: Any, dim: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_trainer().step(batch, dim=dim)


def test_the_mathematics_of_time_major_batches_are_compared(compared: Compared) -> None:
    x, y = texts(7)
    trainer = compared.trainer(Reader(), of_texts)
    trainer.step((x, y), dim=1)
    found = compared.lines(trainer)[1]
    assert found["gradient_difference"] < 1e-9
    assert not found["causes"]


def another_dimension() -> None:
    trainer = make_trainer(
        line(4), lambda m, x: m(x).square().reshape(len(x), -1).mean(1), devices=None
    )
    trainer.step(torch.ones(4, 4), dim=0 if trainer.is_lead else 1)


def test_devices_that_cut_in_other_dimensions_are_told_so() -> None:
    with pytest.raises(DisagreementError, match="the arguments of device 1 differ"):
        simulated.launch(another_dimension, devices="cpu:2")

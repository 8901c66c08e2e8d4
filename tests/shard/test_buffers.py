"""What becomes of buffers, seen through training steps of several shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from onefold.core.fold import fold_shards
from onefold.core.shard import cut_bounds
from onefold.errors import StateError
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

SAMPLES, SHARDS = 7, 3

both = for_each("devices", [1, 2])


class Noting(nn.Module):
    value: torch.Tensor
    most: torch.Tensor
    changes: torch.Tensor
    mean: torch.Tensor

    def __init__(
        self, note: Callable[[Noting, torch.Tensor], None], **buffers: torch.Tensor
    ) -> None:
        super().__init__()
        self.line = line()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self._note = note

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._note(self, inputs)
        return self.line(inputs)


def shards_of(batch: Batch) -> list[torch.Tensor]:
    return [batch[0][start:stop] for start, stop in cut_bounds(len(batch[0]), SHARDS)]


def weighted_mean(values: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """As promised: in float64, in the fold's order."""
    sizes = [len(shard) for shard in shards_of(batch)]
    weighted = [value.double() * size for value, size in zip(values, sizes, strict=True)]
    return (fold_shards(weighted, torch.add) / sum(sizes)).to(values[0].dtype)


def step(module: nn.Module, devices: int, batch: Batch | None = None, **settings: Any) -> None:
    trainer = make_trainer(module, shards=SHARDS, devices=devices, **settings)
    trainer.step(points(SAMPLES) if batch is None else batch)


def beginning_with_1_5_3() -> Batch:
    batch = points(SAMPLES)
    batch[0][:, 0] = torch.tensor([1.0, 0, 0, 5, 0, 3, 0])
    return batch


@both
@for_each("dtype", [torch.int64, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64])
def test_whole_numbers_take_the_largest(devices: int, dtype: torch.dtype) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.most = inputs[0, 0].long().to(dtype)

    module = Noting(note, most=torch.zeros((), dtype=dtype))
    step(module, devices, beginning_with_1_5_3())
    assert module.most.dtype == dtype
    assert module.most.item() == (dtype is torch.bool or 5)


@both
@for_each("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_other_numbers_take_the_weighted_mean(devices: int, dtype: torch.dtype) -> None:
    def change(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(inputs.mean(dim=0).to(dtype))

    def replace(module: Noting, inputs: torch.Tensor) -> None:
        module.value = module.value + inputs.mean(dim=0).to(dtype)

    def move(module: Noting, inputs: torch.Tensor) -> None:
        module.value.data = module.value.data + inputs.mean(dim=0).to(dtype)

    batch = points(SAMPLES)
    expected = torch.full((3,), 0.3, dtype=dtype)
    modules = [Noting(note, value=expected.clone()) for note in (change, replace, move)]
    places = [module.value for module in modules]
    trainers = [make_trainer(m, shards=SHARDS, devices=devices) for m in modules]
    for _ in range(2):
        means = [expected + shard.mean(dim=0).to(dtype) for shard in shards_of(batch)]
        expected = weighted_mean(means, batch)
        for trainer, module, place in zip(trainers, modules, places, strict=True):
            trainer.step(batch)
            assert torch.equal(module.value, expected)
            assert module.value is place


@both
@for_each(
    ("rule", "expected"), [("max", 5.0), ("first", 1.0), ("sum", 9.0), ("mean", (3 + 10 + 6) / 7)]
)
def test_a_rule_may_be_chosen(devices: int, rule: str, expected: float) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(inputs[0, 0])

    module = Noting(note, value=torch.zeros(()))
    step(module, devices, beginning_with_1_5_3(), buffers={"v*": rule})
    assert module.value.item() == pytest.approx(expected)


@for_each(
    ("rules", "words"),
    [
        ({"value": "median"}, r"rule of buffers 'value' must be one of .*, but got 'median'"),
        (
            {"values": "max"},
            r"a rule for 'values', which matches no buffer of the model \(its buffers: val",
        ),
    ],
)
def test_rules_that_say_nothing_are_refused(rules: dict[str, str], words: str) -> None:
    module = Noting(lambda module, inputs: None, value=torch.zeros(()))
    with pytest.raises(ValueError, match=words):
        make_trainer(module, buffers=rules)


@both
def test_a_shard_that_left_a_buffer_alone_counts_with_its_start(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        if inputs[0, 0] == 5:
            module.value.add_(7)
            module.most.fill_(2)

    module = Noting(note, value=torch.ones(()), most=torch.tensor(5))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(beginning_with_1_5_3())
    assert module.value == 3  # (3 * 1 + 2 * 8 + 2 * 1) / 7
    assert module.most == 5
    trainer.step(beginning_with_1_5_3())
    assert module.value == 5
    module.value.fill_(1)
    inputs, targets = beginning_with_1_5_3()
    trainer.step((inputs[3:4], targets[3:4]))  # shards without samples do not count
    assert module.value == 8


@both
def test_buffers_that_nobody_changes_are_left_alone(devices: int) -> None:
    """To the bit: a mean would lose the sign of zero, and round."""

    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.changes.add_(1)

    odd = torch.tensor([-0.0, math.nan, math.inf, 0.1, 1e-45])
    module = Noting(note, before=odd, changes=torch.zeros(2), after=odd.clone())
    module.register_buffer("never", None)
    expected = bits(module)["before"]
    step(module, devices)
    assert bits(module)["before"] == bits(module)["after"] == expected
    assert module.changes.tolist() == [1, 1]
    assert module.never is None


@both
@for_each(
    ("before", "value", "words"),
    [
        (torch.zeros(2), torch.zeros(4), r": expected torch.float32 \(2,\) .*, got .*32 \(4,\)"),
        (torch.zeros(2), torch.zeros(2).double(), ": expected .*, got torch.float64"),
        (torch.zeros(2), None, ": expected .*, got None"),
        (None, torch.zeros(2), " did not exist, or was None, when Trainer"),
    ],
)
def test_a_buffer_that_changes_its_form_or_is_new_is_refused_by_name(
    devices: int, before: torch.Tensor | None, value: torch.Tensor | None, words: str
) -> None:
    def note(module: Any, inputs: torch.Tensor) -> None:
        module.value = value

    inner = Noting(note)
    inner.register_buffer("value", before)
    with pytest.raises((ValueError, StateError), match=rf"^buffer 0\.value{words}"):
        step(nn.Sequential(inner), devices)


@both
def test_evaluations_and_steps_that_are_refused_change_nothing(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.copy_(inputs.mean(dim=0))
        module.most = module.most + 1

    module = Noting(note, value=torch.zeros(3), most=torch.tensor(3))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES))
    before = bits(module)
    data = TensorDataset(*points(9))
    trainer.evaluate(lambda m, b: {"loss": square(m, b)}, data, batch_size=4)
    assert bits(module) == before
    with pytest.raises(KeyError):  # after the forward pass
        trainer.evaluate(lambda m, b: {"loss": square(m, b)}.pop("no"), data, batch_size=4)
    assert bits(module) == before
    bad = points(SAMPLES)
    bad[0][5] = math.nan
    with pytest.raises(ValueError, match="step 2, shard 2 is nan"):
        trainer.step(bad)
    assert bits(module) == before
    skipping = make_trainer(module, shards=SHARDS, devices=devices, on_nonfinite="skip")
    assert skipping.step(bad).skipped
    assert bits(module) == before


class Queue(nn.Module):
    """Keeps the keys of batches before, as momentum contrast does."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = line()
        self.register_buffer("queue", torch.zeros(3, 12))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        start = int(self.place)
        self.queue[:, start : start + len(inputs)] = inputs.T
        self.place += len(inputs)
        return self.line(inputs)


@both
def test_a_queue_is_refused_until_its_rule_is_chosen(devices: int) -> None:
    words = r'buffer queue: .*Trainer\(buffers=\{"queue": "first"\}\)'
    with pytest.raises(StateError, match=words):
        step(Queue(), devices)
    module = Queue()
    step(module, devices, buffers={"queue": "first", "pl*": "sum"})
    first = shards_of(points(SAMPLES))[0]
    assert torch.equal(module.queue[:, : len(first)], first.T)
    assert not module.queue[:, len(first) :].any()
    assert module.place == SAMPLES


@both
def test_statistics_with_a_dimension_of_one_are_no_queue(devices: int) -> None:
    """One of the features never changes, as at the margin of a picture."""

    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.mean = 0.9 * module.mean + 0.1 * inputs.mean(dim=0, keepdim=True)

    inputs, targets = points(SAMPLES)
    inputs[:, 1] = 0
    module = Noting(note, mean=torch.zeros(1, 3))
    step(module, devices, (inputs, targets))
    assert (module.mean != 0).tolist() == [[True, False, True]]

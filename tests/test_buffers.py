"""What becomes of buffers, seen through training steps of several shards."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from onefold.fold import fold_shards
from onefold.shard import cut_bounds
from tests.small import Batch, bits, line, make_trainer, points, square

SAMPLES, SHARDS = 7, 3

both = pytest.mark.parametrize("devices", [1, 2])


class Noting(nn.Module):
    """Does something with its buffers in every forward pass."""

    def __init__(
        self,
        note: Callable[[Noting, torch.Tensor], None],
        *,
        only_in_training: bool = False,
        **buffers: torch.Tensor,
    ) -> None:
        super().__init__()
        self.line = line()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self._note = note
        self._only_in_training = only_in_training

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training or not self._only_in_training:
            self._note(self, inputs)
        return self.line(inputs)


def shards_of(batch: Batch) -> list[torch.Tensor]:
    return [batch[0][start:stop] for start, stop in cut_bounds(len(batch[0]), SHARDS)]


def weighted_mean(values: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """As promised: in float64, in the fold's order."""
    sizes = [len(shard) for shard in shards_of(batch)]
    weighted = [value.double() * size for value, size in zip(values, sizes, strict=True)]
    return (fold_shards(weighted, torch.add) / sum(sizes)).to(values[0].dtype)


def step(module: nn.Module, devices: int, batch: Batch | None = None) -> None:
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES) if batch is None else batch)


@both
def test_batch_norm_takes_the_mean_over_the_shards_by_their_samples(devices: int) -> None:
    batch = points(SAMPLES)
    module = nn.Sequential(nn.BatchNorm1d(3), line())
    expected = []
    for shard in shards_of(batch):
        alone = nn.BatchNorm1d(3)
        alone(shard)
        expected.append(alone)
    step(module, devices)
    norm = module[0]
    means, variances = ([getattr(e, f"running_{k}") for e in expected] for k in ("mean", "var"))
    assert torch.equal(norm.running_mean, weighted_mean(means, batch))
    assert torch.equal(norm.running_var, weighted_mean(variances, batch))
    assert norm.num_batches_tracked == 1


@both
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_take_the_largest(devices: int, dtype: torch.dtype) -> None:
    firsts = torch.tensor([1, 0, 0, 5, 0, 3, 0]).to(dtype)

    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.most.fill_(inputs[0, 0].to(dtype))

    batch = points(SAMPLES)
    batch[0][:, 0] = firsts  # shards begin with 1, 5 and 3
    module = Noting(note, most=torch.zeros((), dtype=dtype))
    step(module, devices, batch)
    assert module.most.dtype == dtype
    assert module.most == firsts[[0, 3, 5]].max()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_other_numbers_take_the_weighted_mean(devices: int, dtype: torch.dtype) -> None:
    batch = points(SAMPLES)

    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(inputs.mean(dim=0).to(dtype))

    module = Noting(note, value=torch.full((3,), 0.3, dtype=dtype))
    step(module, devices, batch)
    start = torch.full((3,), 0.3, dtype=dtype)
    values = [start + shard.mean(dim=0).to(dtype) for shard in shards_of(batch)]
    assert torch.equal(module.value, weighted_mean(values, batch))


@both
def test_a_buffer_may_be_replaced_rather_than_changed(devices: int) -> None:
    def change(module: Noting, inputs: torch.Tensor) -> None:
        module.value.mul_(0.9).add_(inputs.mean())

    def replace(module: Noting, inputs: torch.Tensor) -> None:
        module.value = module.value * 0.9 + inputs.mean()

    changed, replaced = (Noting(note, value=torch.ones(2)) for note in (change, replace))
    before = replaced.value
    for module in (changed, replaced):
        step(module, devices)
    assert bits(changed) == bits(replaced)
    assert replaced.value is before


@both
def test_a_buffer_that_two_modules_share_stays_one(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.twin.value = module.value + inputs.mean()

    module = Noting(note, value=torch.zeros(2))
    module.twin = nn.Module()
    module.twin.register_buffer("value", module.value)
    step(module, devices)
    assert module.twin.value is module.value
    batch = points(SAMPLES)
    values = [torch.zeros(2) + shard.mean() for shard in shards_of(batch)]
    assert torch.equal(module.value, weighted_mean(values, batch))


@both
def test_every_shard_starts_from_the_steps_buffers(devices: int) -> None:
    seen: list[float] = []

    def note(module: Noting, inputs: torch.Tensor) -> None:
        seen.append(module.value.item())
        module.value.add_(1)

    module = Noting(note, value=torch.zeros(()))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES))
    trainer.step(points(SAMPLES))
    assert seen == [0, 0, 0, 1, 1, 1]


@both
def test_a_shard_that_left_a_buffer_alone_counts_with_its_start(devices: int) -> None:
    batch = points(SAMPLES)
    batch[0][:, 0] = torch.tensor([0, 0, 0, 1, 0, 0, 0])  # the second shard begins with 1

    def note(module: Noting, inputs: torch.Tensor) -> None:
        if inputs[0, 0]:
            module.value.fill_(8)
            module.most.fill_(2)

    module = Noting(note, value=torch.ones(()), most=torch.tensor(5))
    step(module, devices, batch)
    assert module.value == 3  # (3 * 1 + 2 * 8 + 2 * 1) / 7
    assert module.most == 5


@both
def test_empty_shards_do_not_count(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.fill_(3)
        module.most.fill_(-4)

    module = Noting(note, value=torch.ones(()), most=torch.tensor(7))
    step(module, devices, points(1))
    assert (module.value.item(), module.most.item()) == (3, -4)


@both
def test_buffers_that_nobody_changes_are_left_alone(devices: int) -> None:
    """To the bit: a mean would lose the sign of zero, and round."""

    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.changes.add_(1)

    odd = torch.tensor([-0.0, math.nan, math.inf, 0.1, 1e-45])
    module = Noting(note, before=odd, changes=torch.zeros(2), after=odd.clone())
    expected = bits(module)["before"]
    step(module, devices)
    assert bits(module)["before"] == bits(module)["after"] == expected
    assert module.changes.tolist() == [1, 1]


@both
def test_buffers_keep_their_identity_and_shape(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.image.add_(inputs.mean())

    image = torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)
    module = Noting(note, image=image, nothing=torch.zeros(0), scalar=torch.tensor(1.5))
    step(module, devices)
    assert module.image is image
    assert module.image.is_contiguous(memory_format=torch.channels_last)
    assert (module.nothing.shape, module.scalar.shape) == ((0,), ())


@both
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            torch.zeros(4),
            r"torch.float32 \(2,\) as when Trainer was made, got torch.float32 \(4,\)",
        ),
        (torch.zeros(2).double(), r"torch.float32 \(2,\) .* got torch.float64 \(2,\)"),
        (None, r"torch.float32 \(2,\) .* got None"),
    ],
    ids=["shape", "dtype", "none"],
)
def test_a_buffer_that_changes_its_form_is_refused_by_name(
    devices: int, value: torch.Tensor | None, words: str
) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value = value

    module = nn.Sequential(Noting(note, value=torch.zeros(2)))
    with pytest.raises(ValueError, match=rf"^buffer 0\.value: expected {words}"):
        step(module, devices)


@pytest.mark.parametrize(
    "devices",
    [1, 2],
)
@pytest.mark.parametrize("replaced", [False, True])
def test_what_the_user_does_to_a_buffer_between_steps_counts(replaced: bool, devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(1)

    module = Noting(note, value=torch.zeros(2))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES))
    if replaced:
        module.value = torch.full((2,), 10.0)
    else:
        module.value.fill_(10)
    trainer.step(points(SAMPLES))
    assert module.value.tolist() == [11, 11]


@both
def test_buffers_are_restored_after_an_evaluation(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(inputs.mean())
        module.most = module.most + 1

    module = Noting(note, value=torch.zeros(2), most=torch.tensor(3))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES))
    before = bits(module)
    trainer.evaluate(lambda m, b: {"loss": square(m, b)}, TensorDataset(*points(9)), batch_size=4)
    assert bits(module) == before


@both
def test_the_model_may_have_no_buffers(devices: int) -> None:
    module = line()
    before = bits(module)
    step(module, devices)
    assert bits(module) != before


@both
def test_buffers_are_what_they_were_after_a_step_that_was_refused(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.copy_(inputs.mean(dim=0))

    module = Noting(note, value=torch.zeros(3))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES))
    before = bits(module)
    bad = points(SAMPLES)
    bad[0][5] = math.nan
    with pytest.raises(ValueError, match="step 2, shard 2 is nan"):
        trainer.step(bad)
    assert bits(module) == before


@both
def test_buffers_are_what_they_were_after_a_score_that_failed(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.copy_(inputs.mean(dim=0))

    module = Noting(note, value=torch.zeros(3))
    trainer = make_trainer(module, shards=SHARDS, devices=devices)
    before = bits(module)

    def score(module: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        square(module, batch)
        raise KeyError("a label")

    with pytest.raises(KeyError, match="a label"):
        trainer.evaluate(score, TensorDataset(*points(9)), batch_size=4)
    assert bits(module) == before


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_numbers_take_the_largest_too(dtype: torch.dtype) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.most = torch.tensor(4).to(dtype)

    module = Noting(note, most=torch.tensor(1).to(dtype))
    step(module, devices=1)
    assert module.most.item() == 4

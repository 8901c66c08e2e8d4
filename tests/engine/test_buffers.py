"""What becomes of buffers, seen through training steps of several shards."""

from __future__ import annotations

import math
from collections.abc import Callable

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
@for_each("dtype", [torch.int64, torch.uint8, torch.bool])
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
@for_each("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
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
@for_each(
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


@for_each(
    "devices",
    [1, 2],
)
@for_each("replaced", [False, True])
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


@for_each("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_numbers_take_the_largest_too(dtype: torch.dtype) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.most = torch.tensor(4).to(dtype)

    module = Noting(note, most=torch.tensor(1).to(dtype))
    step(module, devices=1)
    assert module.most.item() == 4


class Queue(nn.Module):
    """Keeps the keys of batches before, as momentum contrast does."""

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
def test_a_queue_that_a_mean_would_destroy_is_refused(devices: int) -> None:
    with pytest.raises(
        StateError, match=r'buffer queue: .*Trainer\(buffers=\{"queue": "first"\}\)'
    ):
        step(Queue(), devices)


@both
def test_the_rule_of_a_buffer_can_be_chosen(devices: int) -> None:
    batch = points(SAMPLES)
    module = Queue()
    rules = {"queue": "first", "pl*": "sum"}
    trainer = make_trainer(module, shards=SHARDS, devices=devices, buffers=rules)
    trainer.step(batch)
    first = shards_of(batch)[0]
    assert torch.equal(module.queue[:, : len(first)], first.T)
    assert not module.queue[:, len(first) :].any()
    assert module.place == SAMPLES


@both
@for_each(
    ("rule", "expected"), [("max", 5.0), ("first", 1.0), ("sum", 9.0), ("mean", (3 + 10 + 6) / 7)]
)
def test_each_rule(devices: int, rule: str, expected: float) -> None:
    batch = points(SAMPLES)
    batch[0][:, 0] = torch.tensor([1.0, 0, 0, 5, 0, 3, 0])  # shards begin with 1, 5 and 3

    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(inputs[0, 0])

    module = Noting(note, value=torch.zeros(()))
    make_trainer(module, shards=SHARDS, devices=devices, buffers={"value": rule}).step(batch)
    assert module.value.item() == pytest.approx(expected)


@for_each(
    ("rules", "words"),
    [
        ({"value": "median"}, r"rule of buffers 'value' to be one of .*, got 'median'"),
        (
            {"values": "max"},
            "a rule for 'values', which names no buffer of the model: it has value",
        ),
    ],
)
def test_rules_that_say_nothing_are_refused(rules: dict[str, str], words: str) -> None:
    module = Noting(lambda module, inputs: None, value=torch.zeros(()))
    with pytest.raises(ValueError, match=words):
        make_trainer(module, buffers=rules)


def made_in_forward(module: Noting, inputs: torch.Tensor) -> None:
    module.register_buffer("late", inputs.mean(dim=0))


def given_a_value(module: Noting, inputs: torch.Tensor) -> None:
    module.late = inputs.mean(dim=0)


@both
@for_each("note", [made_in_forward, given_a_value])
def test_a_buffer_that_a_shard_makes_is_refused(
    devices: int, note: Callable[[Noting, torch.Tensor], None]
) -> None:
    module = Noting(note)
    if note is given_a_value:
        module.register_buffer("late", None)
    with pytest.raises(StateError, match=r"buffer late was not there, or None, when Trainer"):
        step(module, devices)


def test_a_buffer_that_stays_none_is_left_alone() -> None:
    module = Noting(lambda module, inputs: None)
    module.register_buffer("never", None)
    step(module, 2)
    assert module.never is None


@both
def test_a_buffer_may_be_given_other_memory(devices: int) -> None:
    def note(module: Noting, inputs: torch.Tensor) -> None:
        module.value.data = module.value.data + inputs.mean()

    def change(module: Noting, inputs: torch.Tensor) -> None:
        module.value.add_(inputs.mean())

    modules = [Noting(each, value=torch.ones(2)) for each in (note, change)]
    for module in modules:
        trainer = make_trainer(module, shards=SHARDS, devices=devices)
        for _ in range(2):
            trainer.step(points(SAMPLES))
    assert bits(modules[0]) == bits(modules[1])


def test_with_one_shard_numbers_of_float64_are_those_of_the_plain_loop() -> None:
    """Or a mean over one shard would be x * n / n."""
    ours, theirs = (nn.Sequential(nn.BatchNorm1d(3), line()).double() for _ in range(2))
    batch = tuple(tensor.double() for tensor in points(SAMPLES))
    trainer = make_trainer(ours, shards=1)
    for _ in range(5):
        trainer.step(batch)
        theirs(batch[0])
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(mine, other)
        theirs[0].load_state_dict(ours[0].state_dict())


def test_observers_of_channels_are_refused_with_what_to_do() -> None:
    """Their first forward pass gives them their shape."""
    from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver

    class Aware(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 4)
            self.fake = FakeQuantize(
                PerChannelMinMaxObserver,
                dtype=torch.qint8,
                quant_min=-128,
                quant_max=127,
                qscheme=torch.per_channel_symmetric,
                reduce_range=False,
            )
            self.last = nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.linear(inputs, self.fake(self.line.weight), self.line.bias)
            return self.last(hidden)

    with pytest.raises(
        StateError, match=r"run one before Trainer is made|one forward pass, before"
    ):
        step(Aware(), 1)
    model = Aware()
    model(points(SAMPLES)[0])
    results = []
    for devices in (1, 2):
        again = Aware()
        again(points(SAMPLES)[0])
        again.load_state_dict(model.state_dict())
        step(again, devices)
        results.append(bits(again))
    assert results[0] == results[1]


@both
def test_statistics_with_a_dimension_of_one_are_no_queue(devices: int) -> None:
    """One of the features never changes, as at the margin of a picture."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = line()
            self.register_buffer("mean", torch.zeros(1, 3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(dim=0, keepdim=True)
            return self.line(inputs - self.mean)

    inputs, targets = points(SAMPLES)
    inputs[:, 1] = 0
    module = Own()
    step(module, devices, (inputs, targets))
    assert module.mean[0, 1] == 0
    assert module.mean[0, 0] != 0

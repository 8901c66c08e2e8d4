"""Losses that see the whole batch: the one meant, and one result for any number of devices."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.errors import GradientError, LossError
from tests.small import Batch, make_trainer, result, sgd
from tests.tables import for_each

LossOf = Callable[[Any, Batch], object]


class Towers(nn.Module):
    """Two encoders, and how sharply their pairs are told apart."""

    def __init__(self, *, restless: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if restless else nn.Identity()
        drop = nn.Dropout(0.3 if restless else 0.0)
        self.one = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), drop, nn.Linear(16, 8))
        self.other = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), drop, nn.Linear(16, 8))
        self.sharpness = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.one(batch[0]), dim=1), F.normalize(self.other(batch[1]), dim=1)


def of_the_batch(model: Any, batch: Batch) -> torch.Tensor:
    """The same number in every shard."""
    one, other = map(onefold.gather, model(batch))
    logits = one @ other.T * model.sharpness.exp()
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def of_own_rows(model: Any, batch: Batch) -> torch.Tensor:
    """One loss for each of the shard's samples."""
    one, other = model(batch)
    (ones, rows), others = onefold.gather(one, rows=True), onefold.gather(other)
    targets = torch.arange(len(ones))[rows]
    scale = model.sharpness.exp()
    losses = F.cross_entropy(one @ others.T * scale, targets, reduction="none")
    return (losses + F.cross_entropy(other @ ones.T * scale, targets, reduction="none")) / 2


def in_a_chain(model: Any, batch: Batch) -> torch.Tensor:
    """What is gathered second depends on what was gathered first, and what is third on nothing."""
    one, other = model(batch)
    ones, rows = onefold.gather(one, rows=True)
    others = onefold.gather(other * ones.mean(dim=0))
    with torch.no_grad():
        middle = onefold.gather(other)
    middle = middle.mean(dim=0)
    signs = onefold.gather(batch[0][:, 0] > 0)
    own = (ones[rows] - other).square().sum(dim=1) * (1 + signs[rows].to(one.dtype))
    return own + (others - middle).square().sum() * model.sharpness


def of_some(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of any number of rows in each shard."""
    one, other = model(batch)
    return (one @ onefold.gather(other[batch[0][:, 0] > 0.5]).T).sum(dim=1)


LOSSES = (of_the_batch, of_own_rows, in_a_chain, of_some)


def batches(steps: int, samples: int = 11, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(samples, width, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(6), draw(5)) for _ in range(steps)]


def trainer_of(loss: LossOf, *, model: Any = None, shards: int = 5, **options: Any) -> Any:
    return make_trainer(model or Towers(restless=True), loss, shards=shards, **options)


def plain(model: nn.Module, loss: LossOf, steps: Sequence[Batch]) -> float:
    """An ordinary loop with the whole batch; the last loss."""
    optimizer = sgd(model)
    for batch in steps:
        optimizer.zero_grad()
        value: Any = loss(model, batch)
        (value := value.mean()).backward()
        optimizer.step()
    return float(value.item())


@for_each("loss", LOSSES)
@for_each("shares", [(1,), (2,), (3, 2), (0, 5, 11)])
def test_the_gradient_is_that_of_one_big_batch(loss: LossOf, shares: tuple[int, ...]) -> None:
    """With the same bits on any number of devices."""
    expected, steps, found = Towers().double(), batches(2, dtype=torch.float64), set()
    at = plain(expected, loss, steps)
    for devices in {1, len(shares)}:
        model = Towers().double()
        chosen = None if devices == 1 else shares
        trainer = trainer_of(loss, model=model, devices=devices, shards=sum(shares), shares=chosen)
        found.add(result(trainer, steps))
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            exact = shares == (1,) and loss in (of_the_batch, of_own_rows)
            torch.testing.assert_close(mine, other, rtol=0, atol=0 if exact else 1e-13)
    (only,) = found
    assert float.fromhex(only[1]) == pytest.approx(at, rel=1e-12)


class Keeping(Towers):
    """Changes attributes, buffers, modes and random numbers before it gathers."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(restless=True)
        self.register_buffer("seen", torch.zeros(()))
        self.last = torch.zeros(())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = super().forward(batch)
        self.last, self.seen = one.mean().detach(), self.seen + one.sum().detach()
        self.one.eval()
        return one, other


def test_a_shard_finds_what_it_left_before_it_gathered() -> None:
    def loss(model: Any, batch: Batch) -> torch.Tensor:
        losses = of_own_rows(model, batch)
        assert not model.one.training
        again = model.one(batch[0]).sum(dim=1) * (model.last + model.seen + torch.rand(()))
        return losses + F.dropout(again, 0.5)

    found = set()
    for devices, shares in ((1, (5,)), (2, (1, 4)), (5, (1, 1, 1, 1, 1))):
        model = Keeping()
        found.add(result(trainer_of(loss, model=model, devices=devices, shares=shares), batches(3)))
        assert model.training
        assert model.one.training
    assert len(found) == 1


def test_parameters_are_as_they_were_and_hooks_run_once_a_shard() -> None:
    model, calls = Towers(), []
    trainer = trainer_of(of_own_rows, model=model)
    model.sharpness.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    model.one[0].requires_grad_(False)
    weight = model.one[0].get_parameter("weight")
    before = weight.clone()
    trainer.step(batches(1)[0])
    assert len(calls) == 5
    assert model.sharpness.requires_grad
    assert not weight.requires_grad
    assert torch.equal(before, weight)
    assert all(p.grad is None for p in model.parameters())


# What is refused


def is_third(batch: Batch) -> bool:
    """Whether it is the third shard of the first step."""
    return bool((batch[0][0] == batches(1)[0][0][5]).all())


def other_shape(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, _ = model(batch)
    return onefold.gather(one[:, :7] if is_third(batch) else one).sum()


def other_calls(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, _ = model(batch)
    return one.sum() if is_third(batch) else onefold.gather(one).sum()


def without_gradient(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, _ = model(batch)
    with torch.set_grad_enabled(not is_third(batch)):
        return onefold.gather(one).sum()


def checkpointed(model: nn.Module, batch: Batch, *, reentrant: bool = False) -> torch.Tensor:
    one, other = model(batch)
    scores = lambda one: onefold.gather(one * model.sharpness).exp()  # noqa: E731
    return (checkpoint(scores, one, use_reentrant=reentrant) @ other.T).sum()


UNLIKE = "step 1 does not gather the same in all .*shard"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@for_each(
    ("loss", "options", "words"),
    [
        (other_shape, {}, rf"{UNLIKE} 0 .*float32 \(3, 8\), but shard 2 .*float32 \(2, 7\)"),
        (other_calls, {"devices": 2}, rf"{UNLIKE} 0 .*\(3, 8\), but shard 2 has finished"),
        (without_gradient, {"devices": 2}, rf"{UNLIKE}.* 2 .*float32 \(2, 8\), without a gradient"),
        (of_own_rows, {"microbatch": 2}, "was called in a microbatch, but requires a whole shard"),
        (of_own_rows, {"microbatch": 2, "shards": 1}, "was called in a microbatch"),
        (checkpointed, {}, r"inside torch.utils.checkpoint"),
        (partial(checkpointed, reentrant=True), {}, r"inside torch.utils.checkpoint"),
    ],
)
def test_shards_that_cannot_gather_are_named(
    loss: LossOf, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(LossError, match=words):
        trainer_of(loss, **options).step(batches(1)[0])


def test_only_losses_gather_and_only_rows() -> None:
    trainer = trainer_of(of_own_rows)
    rows = list(zip(*batches(1)[0], strict=True))
    words = r"shard 0: onefold.gather cannot be called here.*trainer.predict"
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(LossError, match=words):
            call(lambda model, batch: {"loss": of_own_rows(model, batch)}, rows, batch_size=11)
    assert onefold.gather(torch.ones(2), rows=True)[1] == slice(0, 2)
    with pytest.raises(TypeError, match="gather expects a tensor, but got float"):
        onefold.gather(1.0)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"shape \(n, \.\.\.\), but got shape \(\)"):
        onefold.gather(torch.ones(()))


# What goes wrong


@for_each(("devices", "late"), [(1, False), (1, True), (2, True)])
def test_the_error_of_a_shard_ends_the_others(devices: int, late: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        if is_third(batch) and spoil and not late:
            raise ArithmeticError("the fault")
        ones = onefold.gather(one)
        if is_third(batch) and spoil:
            raise ArithmeticError("the fault")
        return (ones @ onefold.gather(other).T).sum()

    spoil, steps = False, batches(2)
    trainer = trainer_of(loss, model=(model := Towers(restless=True)), devices=devices)
    trainer.step(steps[1])
    spoil = True
    with pytest.raises(ArithmeticError, match="the fault") as caught:
        trainer.step(steps[0])
    assert any("step 2, shard 2" in note for note in caught.value.__notes__)
    assert threading.active_count() == 1
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    spoil = False
    statistics: Any = model.one[1]
    before = statistics.running_mean.clone()
    trainer.step(steps[0])
    assert not torch.equal(before, statistics.running_mean)


def test_ctrl_c_ends_all_shards() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        ones = onefold.gather(one)
        if is_third(batch):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return (ones @ onefold.gather(other).T).sum()

    with pytest.raises(KeyboardInterrupt):
        trainer_of(loss).step(batches(1)[0])
    assert threading.active_count() == 1


@for_each("devices", [1, 2])
@for_each(
    ("after", "words"),
    [
        (True, r"shard 2 \(samples 5 to 6 .*gradient of the tensor that call 1 of onefold.gather"),
        (False, r"shard 2 \(samples 5 to 6 of the batch\): the gradient of one.0.weight"),
    ],
)
def test_the_shard_whose_gradient_is_not_finite_is_named(
    after: bool, words: str, devices: int
) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        ones = onefold.gather(one)
        spoilt = ones if after else one
        if is_third(batch) and spoilt.requires_grad:
            spoilt.register_hook(lambda gradient: gradient * torch.inf)
        return (ones @ other.T).sum()

    with pytest.raises(GradientError, match=words):
        trainer_of(loss, devices=devices).step(batches(1)[0])


# Batch norm over the whole batch: that of one big batch, on any number of devices


class Net(nn.Module):
    """Batch norms of both kinds of input, without weights, and with a mean of all steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
        self.third = nn.Sequential(nn.Linear(96, 16), nn.BatchNorm1d(16, affine=False))
        self.out = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.second(self.first(images)).flatten(1)
        return self.out(self.third(found))


def synced() -> nn.Module:
    return onefold.SyncBatchNorm.convert(Net())


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def gathering(model: nn.Module, batch: Batch, gather: Any = onefold.gather) -> torch.Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + gather(scores).std(dim=0).sum()


ungathered = partial(gathering, gather=lambda scores: scores)


def image_batches(steps: int, samples: int = 11, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64) + 3
        found.append((images.to(dtype), torch.randint(0, 5, (samples,), generator=generator)))
    return found


def norming(model: nn.Module, loss: Any = loss, *, shards: int = 5, **options: Any) -> Any:
    return make_trainer(model, loss, shards=shards, **options)


def furthest(one: nn.Module, other: nn.Module) -> float:
    """Over parameters and buffers, relative where they are large."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    gaps = [(mine[n] - v).abs() / v.abs().clamp(min=1) for n, v in theirs.items()]
    return max(float(gap.max()) for gap in gaps)


@for_each(
    ("ours", "theirs", "steps", "shards", "devices", "dtype", "within"),
    [
        (loss, loss, 3, 2, 1, torch.float64, 1e-13),
        (loss, loss, 3, 16, 3, torch.float64, 1e-13),
        (loss, loss, 20, 5, 1, torch.float32, 1e-5),
        (loss, loss, 3, 1, 1, torch.float32, 0.0),  # the bits of batch norm
        (gathering, ungathered, 1, 5, 2, torch.float64, 1e-13),
    ],
)
def test_it_is_the_batch_norm_of_one_big_batch(
    ours: Any, theirs: Any, steps: int, shards: int, devices: int, dtype: Any, within: float
) -> None:
    model, expected = synced().to(dtype), Net().to(dtype)
    optimizer = sgd(expected)
    for batch in image_batches(steps, dtype=dtype):
        optimizer.zero_grad()
        theirs(expected, batch).mean().backward()
        optimizer.step()
    result(norming(model, ours, shards=shards, devices=devices), image_batches(steps, dtype=dtype))
    assert furthest(model, expected) <= within


def test_nothing_of_a_step_stays_in_memory() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def noting(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(weakref.ref(batch[0]))
        return loss(model, batch)

    trainer = norming(synced(), noting)
    result(trainer, image_batches(2))
    gc.collect()
    assert len(seen) >= 10
    assert [each for each in seen if each() is not None] == []


def test_evaluation_and_layers_that_are_not_in_training_are_those_of_batch_norm() -> None:
    model, other = synced(), Net()
    images = image_batches(1)[0][0]
    assert torch.equal(model(images), other(images))
    assert furthest(model, other) == 0.0
    found = norming(model).predict(lambda m, b: {"v": m(b)}, list(images), batch_size=11)
    torch.testing.assert_close(torch.as_tensor(found["v"]), other.eval()(images).detach())
    assert model.training
    prints = set()
    for devices in (1, 2):
        net: Any = synced()
        net.first[1].eval()
        prints.add(result(norming(net, devices=devices), image_batches(2)))
        assert not net.first[1].running_mean.any()
    assert len(prints) == 1


def test_convert_keeps_parameters_names_and_modes() -> None:
    shared = nn.BatchNorm2d(2, track_running_stats=False).eval()
    net = nn.Sequential(nn.BatchNorm1d(3, eps=0.1, momentum=0.2), shared, shared)
    before = dict(net.named_parameters())
    converted: Any = onefold.SyncBatchNorm.convert(net.append(nn.SyncBatchNorm(2)))
    first, second, third = converted[:3]
    assert before.items() <= dict(net.named_parameters()).items()
    assert (first.eps, first.momentum, second.running_mean) == (0.1, 0.2, None)
    assert second is third
    assert {type(part) for part in net} == {onefold.SyncBatchNorm}
    assert [part.training for part in net] == [True, False, False, True]
    again: Any = onefold.SyncBatchNorm.convert(net)
    assert again[0] is first


def test_what_cannot_be_normalized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LazyBatchNorm1d does not know its number of channels"):
        onefold.SyncBatchNorm.convert(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match=r"expected input \(n, C, \.\.\.\), but got shape \(3,\)"):
        onefold.SyncBatchNorm(3)(torch.ones(3))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), onefold.SyncBatchNorm(5))
    with pytest.raises(ValueError, match="requires more than one value per channel in the whole"):
        norming(model).step(image_batches(1, samples=1)[0])
    with pytest.raises(LossError, match="was called in a microbatch"):
        norming(model, microbatch=1).step(image_batches(1)[0])

"""Batch norm over the whole batch: that of one big batch, on any number of devices."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import LossError
from tests.small import Batch, make_trainer, result, sgd
from tests.tables import for_each


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


def batches(steps: int, samples: int = 11, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64) + 3
        found.append((images.to(dtype), torch.randint(0, 5, (samples,), generator=generator)))
    return found


def trainer_of(model: nn.Module, loss: Any = loss, *, shards: int = 5, **options: Any) -> Any:
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
    for batch in batches(steps, dtype=dtype):
        optimizer.zero_grad()
        theirs(expected, batch).mean().backward()
        optimizer.step()
    result(trainer_of(model, ours, shards=shards, devices=devices), batches(steps, dtype=dtype))
    assert furthest(model, expected) <= within


def test_nothing_of_a_step_stays_in_memory() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def noting(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(weakref.ref(batch[0]))
        return loss(model, batch)

    trainer = trainer_of(synced(), noting)
    result(trainer, batches(2))
    gc.collect()
    assert len(seen) >= 10
    assert [each for each in seen if each() is not None] == []


def test_evaluation_and_layers_that_are_not_in_training_are_those_of_batch_norm() -> None:
    model, other = synced(), Net()
    images = batches(1)[0][0]
    assert torch.equal(model(images), other(images))
    assert furthest(model, other) == 0.0
    found = trainer_of(model).predict(lambda m, b: {"v": m(b)}, list(images), batch_size=11)
    torch.testing.assert_close(torch.as_tensor(found["v"]), other.eval()(images).detach())
    assert model.training
    prints = set()
    for devices in (1, 2):
        (model := synced()).first[1].eval()
        prints.add(result(trainer_of(model, devices=devices), batches(2)))
        assert not model.first[1].running_mean.any()
    assert len(prints) == 1


def test_convert_keeps_parameters_names_and_modes() -> None:
    shared = nn.BatchNorm2d(2, track_running_stats=False).eval()
    net = nn.Sequential(nn.BatchNorm1d(3, eps=0.1, momentum=0.2), shared, shared)
    before = dict(net.named_parameters())
    first, second, third = onefold.SyncBatchNorm.convert(net.append(nn.SyncBatchNorm(2)))[:3]
    assert before.items() <= dict(net.named_parameters()).items()
    assert (first.eps, first.momentum, second.running_mean) == (0.1, 0.2, None)
    assert second is third
    assert {type(part) for part in net} == {onefold.SyncBatchNorm}
    assert [part.training for part in net] == [True, False, False, True]
    assert onefold.SyncBatchNorm.convert(net)[0] is first


def test_what_cannot_be_normalized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LazyBatchNorm1d does not know its number of channels"):
        onefold.SyncBatchNorm.convert(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match=r"expected input \(n, C, \.\.\.\), got shape \(3,\)"):
        onefold.SyncBatchNorm(3)(torch.ones(3))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), onefold.SyncBatchNorm(5))
    with pytest.raises(ValueError, match="expected more than one value per channel in the whole"):
        trainer_of(model).step(batches(1, samples=1)[0])
    with pytest.raises(LossError, match="as microbatch has cut it"):
        trainer_of(model, microbatch=1).step(batches(1)[0])

"""What a script can hold of a batch: its payload, and what the loss returned of each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onefold
from onefold.errors import DisagreementError, LossError
from tests import simulated
from tests.small import bits, line, make_trainer, points
from tests.tables import for_each

DEVICES = (1, 2, 3)
PLANS = ((3,), (1, 2), (2, 0, 1))


def with_errors(model: nn.Module, batch: Any) -> Any:
    """Prioritised replay's form: weights of importance, and the errors for the next draw."""
    inputs, targets = batch
    errors = (model(inputs) - targets)[:, 0]
    ragged = [error.detach().expand(1 + int(n > 0)) for n, error in enumerate(errors)]
    found = {"td": errors.abs(), "of": inputs[:, :2].double(), "each": ragged}
    return errors.square(), {"mean": errors.abs()}, found


def only_outputs(model: nn.Module, batch: Any) -> Any:
    loss, _, outputs = with_errors(model, batch)
    return onefold.Mean(loss.sum(), len(loss)) + onefold.Sum(loss.sum() * 0), {}, outputs


def with_gather(model: nn.Module, batch: Any) -> Any:
    loss, values, outputs = with_errors(model, batch)
    return (loss - onefold.gather(loss).mean()).square(), values, outputs


def trained(loss: Any, devices: int, *, samples: int = 8, **choices: Any) -> list[Any]:
    """Make three steps; samples are drawn by the errors of the step before."""
    shards = choices.pop("shards", 3)
    trainer = make_trainer(loss=loss, shards=shards, devices=devices, **choices)
    data, found = points(20), []
    priorities = torch.ones(20)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        drawn = torch.multinomial(priorities, samples, generator=generator)
        step = trainer.step((data[0][drawn], data[1][drawn]))
        priorities[drawn] = step.outputs["td"] + 1e-3
        assert step.outputs["of"].tolist() == data[0][drawn][:, :2].tolist()
        found.append([step.outputs["td"].tolist(), [e.tolist() for e in step.outputs["each"]]])
    found.append(bits(trainer.model))
    trainer.close()
    return found


@for_each("loss", [with_errors, only_outputs, with_gather])
@for_each("samples", [8, 2])
def test_outputs_have_the_bits_of_one_device(loss: Any, samples: int) -> None:
    first = trained(loss, 1, samples=samples)
    for plan in PLANS:
        assert trained(loss, len(plan), samples=samples, plan=plan) == first


def test_outputs_of_one_shard_are_those_of_the_plain_loop() -> None:
    model, data = line(), points(7)
    wanted = with_errors(model, data)[2]
    trainer = make_trainer(loss=with_errors, shards=1)
    outputs = trainer.step(data).outputs
    assert torch.equal(outputs["td"], wanted["td"])
    assert outputs["td"].requires_grad is False
    assert list(map(torch.Tensor.tolist, outputs["each"])) == [e.tolist() for e in wanted["each"]]
    trainer.close()


def test_outputs_of_pieces_are_joined() -> None:
    data = points(11)
    found = []
    for microbatch in (None, 2):
        trainer = make_trainer(loss=with_errors, shards=2, microbatch=microbatch)
        step = trainer.step(data)
        found.append((step.outputs["td"].tolist(), [len(e) for e in step.outputs["each"]]))
        assert step.values["mean"] == pytest.approx(sum(found[-1][0]) / 11)
        trainer.close()
    assert found[0][0] == pytest.approx(found[1][0])
    assert len(found[1][1]) == 11


def test_a_gradient_has_outputs_and_a_loss_alone_has_none() -> None:
    trainer = make_trainer(loss=with_errors, shards=2, devices=2)
    assert len(trainer.gradient(points(5)).outputs["td"]) == 5
    trainer.close()
    trainer = make_trainer()
    assert trainer.step(points(5)).outputs == {}
    trainer.close()


def test_rows_may_have_another_shape_in_another_step() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        inputs = batch[0]
        return model(inputs[:, :3]).square()[:, 0], {}, {"rows": inputs}

    trainer = make_trainer(loss=loss, shards=3, devices=2)
    for width in (3, 5, 3, 4, 5):
        assert trainer.step((torch.ones(7, width),)).outputs["rows"].shape == (7, width)
    trainer.close()


@for_each(
    ("outputs", "error", "words"),
    [
        ({"td": torch.tensor(1.0)}, LossError, "expected 'td' to be a tensor with one row"),
        ({"td": torch.ones(99)}, LossError, r"for each of [32] samples, got \(99,\)"),
        ({3: torch.ones(3)}, LossError, "expected names of one line for values, got 3"),
        (torch.ones(3), LossError, r"or \(loss, values, outputs\) for rows of samples"),
        ("other", DisagreementError, "the same dtype and shape of rows.*list of one"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs: Any, error: Any, words: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        n = len(batch[0])
        found = {"td": torch.ones(n, n)} if outputs == "other" else outputs
        return model(batch[0])[:, 0], {}, found

    trainer = make_trainer(loss=loss, shards=3)
    with pytest.raises(error, match=words):
        trainer.step(points(7))
    trainer.close()


def words_of(rows: list[Any]) -> dict[str, Any]:
    """A collate with each kind of part."""
    numbers = torch.stack([row[0] for row in rows])
    boxes = [{"box": row[0][: 1 + n]} for n, row in enumerate(rows)]
    return {"x": numbers, "names": [f"{row[1].item():.3f}" for row in rows], "b": boxes, "n": 4}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_a_whole_batch_is_what_one_shard_would_be(plan: tuple[int, ...], workers: int) -> None:
    data = TensorDataset(*points(11))
    trainer = make_trainer(shards=3, devices=len(plan), plan=plan)
    alone = make_trainer(shards=1)
    loaders = [
        each.loader(data, batch_size=5, shuffle=True, workers=workers) for each in (trainer, alone)
    ]
    for batch, one in zip(*loaders, strict=True):
        whole = batch.whole()
        assert [torch.equal(a, b) for a, b in zip(whole, one.shards[0], strict=True)] == [True] * 2
        again = trainer.step(batch)
        assert again.samples == len(whole[0])
    trainer.close()
    alone.close()


def test_lists_of_samples_are_joined_and_what_is_shared_stays() -> None:
    trainer = make_trainer(shards=3, devices=2)
    data = TensorDataset(*points(8))
    whole = next(iter(trainer.loader(data, batch_size=8, collate=words_of))).whole()
    assert torch.equal(whole["x"], data.tensors[0])
    assert whole["names"] == [f"{y.item():.3f}" for y in data.tensors[1]]
    assert [len(each["box"]) for each in whole["b"]] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert whole["n"] == 4
    trainer.close()


def test_a_rules_batch_comes_whole() -> None:
    trainer = make_trainer(shards=3, devices=2)
    for batch in trainer.batches(lambda step, generator: points(step + 4), per_epoch=2):
        whole = batch.whole()
        assert torch.equal(whole[0], points(len(whole[0]))[0])
        assert len(whole[0]) == batch.samples
    trainer.close()


def test_payloads_that_cannot_be_joined_are_named() -> None:
    trainer = make_trainer(shards=3)

    def padded(rows: list[Any]) -> Any:
        return torch.zeros(len(rows), len(rows))

    data = TensorDataset(*points(8))
    batch = next(iter(trainer.loader(data, batch_size=8, collate=padded)))
    with pytest.raises(ValueError, match=r"got \[\(3, 3\), \(3, 3\), \(2, 2\)\].*pads each shard"):
        batch.whole()
    trainer.close()


def both() -> tuple[Any, ...]:
    """Called on each device of a run of processes."""
    trainer = make_trainer(loss=with_errors, shards=3, devices=None)
    loader = trainer.loader(DataLoader(TensorDataset(*points(11)), 5, shuffle=True))
    found: list[Any] = []
    for batch in loader:
        whole = batch.whole()
        step = trainer.step(batch)
        found.append((whole[0].tolist(), step.outputs["td"].tolist()))
    assert trainer.gather(found) == [found] * len(trainer.devices)
    found.append(trainer.fingerprint())
    trainer.close()
    return tuple(found)


@for_each("exchange", ["shared", "collective"])
def test_processes_hold_what_one_device_holds(exchange: Any) -> None:
    found = simulated.launch(both, devices="cpu:3", exchange=exchange)
    assert found == simulated.launch(both, devices="cpu:1")

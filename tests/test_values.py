"""Values and rows of samples beside the loss, and whole batches: alike on any number of devices."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onefold
from onefold.errors import DisagreementError, LossError
from onefold.testing import simulate
from tests.conftest import ROOT
from tests.small import Batch, make_trainer
from tests.small import points as regression
from tests.tables import for_each, some
from tests.tools.verifying.compared import Compared, compared

__all__ = ["compared"]

LossOf = Callable[[nn.Module, Batch], Any]
SAMPLES = 11


class Net(nn.Module):
    """Batch norm and dropout where they are asked for."""

    def __init__(self, *, restless: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if restless else nn.Identity()
        drop = nn.Dropout(0.3 if restless else 0.0)
        self.layers = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), drop, nn.Linear(16, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def with_values(model: nn.Module, batch: Batch) -> Any:
    """Each form that values and rows may have."""
    inputs, labels = batch
    logits = model(inputs)
    losses, few = F.cross_entropy(logits, labels, reduction="none"), labels == 0
    chosen = onefold.Mean((losses * few).sum(), few.sum())
    values = {
        "loss": losses,
        "accuracy": logits.argmax(1) == labels,
        "size": logits.square().mean(),
        "chosen": chosen,
        "right": onefold.Sum((logits.argmax(1) == labels).sum()),
        "both": chosen + 0.5 * onefold.Sum(losses.sum()),
    }
    ragged = [
        each.detach().expand(1 + int(label)) for each, label in zip(losses, labels, strict=True)
    ]
    return losses, values, {"td": losses, "of": inputs[:, :2].double(), "each": ragged}


def of_terms(model: nn.Module, batch: Batch) -> Any:
    losses, values, rows = with_values(model, batch)
    return onefold.Mean(losses.sum(), len(losses)) + values["chosen"], values, rows


def of_gathered(model: nn.Module, batch: Batch) -> Any:
    logits, rows = onefold.gather(model(batch[0]), rows=True)
    losses = (logits[rows] - logits.mean(0)).square().mean(1)
    return losses, {"spread": losses}, {"td": losses, "of": batch[0][:, :2].double()}


LOSSES = (with_values, of_terms, of_gathered)


def synced() -> nn.Module:
    return onefold.SyncBatchNorm.convert(Net())


still = partial(Net, restless=False)


def batches(steps: int, samples: int = SAMPLES, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
        found.append((inputs, torch.randint(0, 4, (samples,), generator=generator)))
    return found


def trainer_of(
    loss: LossOf = with_values, *, model: nn.Module | None = None, shards: int = 5, **options: Any
) -> onefold.Trainer:
    return make_trainer(model or Net(), loss, shards=shards, **options)


def shown(step: Any) -> list[Any]:
    """Every value to the last bit, and every row."""
    rows = {name: [row.tolist() for row in rows] for name, rows in step.outputs.items()}
    return [{name: float(value).hex() for name, value in step.values.items()}, rows]


def result(trainer: onefold.Trainer, steps: list[Batch]) -> list[Any]:
    """Rows of the step before decide what is drawn, as in prioritized replay."""
    found: list[Any] = []
    priorities = torch.ones(len(steps[0][0]))
    for inputs, labels in steps:
        order = priorities.argsort(stable=True)
        step = trainer.step((inputs[order], labels[order]))
        if step.outputs:
            outputs: Any = step.outputs
            assert torch.equal(outputs["of"], inputs[order][:, :2].double())
            priorities = outputs["td"]
        found.append(shown(step))
    found.append(trainer.fingerprint())
    trainer.close()
    return found


def test_values_and_rows_are_those_of_the_whole_batch() -> None:
    model = Net(restless=False).double()
    inputs, labels = batch = batches(1, dtype=torch.float64)[0]
    losses, _, rows = with_values(model, batch)
    right = (model(inputs).argmax(1) == labels).double().sum()
    expected = {
        "loss": losses.mean(),
        "accuracy": right / SAMPLES,
        "size": model(inputs).square().mean(),
        "chosen": losses[labels == 0].mean(),
        "right": right,
        "both": losses[labels == 0].mean() + 0.5 * losses.sum(),
    }
    for shards, devices, microbatch in ((1, 1, None), (2, 2, 2), (5, 3, None), (16, 2, None)):
        choices: dict[str, Any] = {"shards": shards, "devices": devices, "microbatch": microbatch}
        step = trainer_of(model=copy.deepcopy(model), **choices).step(batch)
        torch.testing.assert_close(step.values, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(step.outputs, rows, rtol=1e-12, atol=0)
        td = step.outputs["td"]
        assert isinstance(td, torch.Tensor)
        assert not td.requires_grad


@for_each(("shards", "choices"), [(1, {"on_nonfinite": "skip"}), (5, {}), (5, {"microbatch": 2})])
def test_training_is_what_it_is_without_them(shards: int, choices: dict[str, Any]) -> None:
    """Their gradient is not used, and they may be anything."""

    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return losses, {"nan": losses * math.nan, "large": 1e9 * losses, "none": losses.detach()}

    prints = []
    for each in (loss, of_samples):
        model = Net(restless="microbatch" not in choices)
        trainer = trainer_of(each, model=model, shards=shards, **choices)
        steps = [trainer.step(batch) for batch in batches(3)]
        assert [math.isnan(float(step.values.get("nan", math.nan))) for step in steps] == [True] * 3
        prints.append(trainer.fingerprint())
    assert prints[0] == prints[1]
    assert steps[0].values == steps[0].outputs == {}


@for_each(
    ("loss", "samples", "model", "options"),
    some(
        [
            *((loss, SAMPLES, make, {}) for loss in LOSSES for make in (Net, synced)),
            *((loss, 3, still, {}) for loss in LOSSES),
            *((loss, SAMPLES, still, {"microbatch": 1}) for loss in (with_values, of_terms)),
        ],
        3,
    ),
)
def test_the_bits_do_not_depend_on_the_devices(
    loss: LossOf, samples: int, model: Any, options: dict[str, Any]
) -> None:
    def run(devices: int | None, shares: tuple[int, ...]) -> list[Any]:
        trainer = trainer_of(loss, model=model(), devices=devices, shares=shares, **options)
        return result(trainer, batches(3, samples))

    found = [run(len(shares), shares) for shares in ((5,), (2, 2, 1), (0, 4, 1))]
    found += simulate(run, 2, args=(None, (3, 2)), exchange="shared")
    found += simulate(run, 2, args=(None, (5, 0)), exchange="collective")
    assert all(each == found[0] for each in found)


def test_names_may_change_from_step_to_step() -> None:
    """New names come by a message of their own, known ones on the table."""
    turn = 0

    def loss(model: nn.Module, batch: Batch) -> object:
        losses, values, _ = with_values(model, batch)
        return (losses, ({"only": losses}, values)[turn]) if turn < 2 else losses

    found = []
    for devices in (1, 2, 3):
        trainer, plain = trainer_of(loss, devices=devices), trainer_of()
        for number, batch in enumerate(batches(7)):
            turn = number % 3
            values, expected = shown(trainer.step(batch))[0], shown(plain.step(batch))[0]
            assert values == ({"only": expected["loss"]}, expected, {})[turn]
        found.append(trainer.fingerprint())
    assert found == [plain.fingerprint()] * 3


def when_small(small: Callable[..., object], large: Callable[..., object]) -> LossOf:
    """A loss that returns one thing for a shard of two samples, and another for one of three."""

    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return small(losses) if len(losses) < 3 else large(losses)

    return loss


def of_microbatches(model: nn.Module, batch: Batch) -> object:
    losses = of_samples(model, batch)
    return losses, {"one" if len(losses) == 1 else "two": losses}


def rows_of(rows: Any) -> LossOf:
    return lambda model, batch: (of_samples(model, batch), {}, rows)


JOINED: dict[str, LossOf] = {
    r"shard 1: the loss returned the metrics \['few'\], but \['a', 'many'\] for": (
        when_small(lambda x: (x, {"few": x}), lambda x: (x, {"a": x, "many": x}))
    ),
    r"shard 0: .* the metrics \[\], but": when_small(lambda x: (x, {"a": x}), lambda x: x),
    "terms of the same kind, for every shard": (
        when_small(lambda x: (x, {"a": onefold.Sum(x.sum())}), lambda x: (x, {"a": x}))
    ),
    "the same dtype and row shape.*list with one": (
        when_small(lambda x: (x, {}, {"a": x}), lambda x: (x, {}, {"a": x[:, None]}))
    ),
    r"one returned \['two'\] and another one \['one'\]": of_microbatches,
    r"step 1, shard 0: expected a loss, or .* got a tuple of \(Tensor, Tensor\)": (
        lambda model, batch: (of_samples(model, batch), model(batch[0]))
    ),
    "'td' must be a tensor with one row": rows_of({"td": torch.tensor(1.0)}),
    r"for each of [32] samples, but got \(99,\)": rows_of({"td": torch.ones(99)}),
    r"or \(loss, metrics, outputs\) to add rows of samples": rows_of(torch.ones(3)),
}


@for_each("words", JOINED)
@for_each("devices", [1, 2])
def test_what_cannot_be_joined_is_named(words: str, devices: int) -> None:
    loss = JOINED[words]
    microbatch = 2 if loss is of_microbatches else None
    trainer = trainer_of(loss, model=Net(restless=False), devices=devices, microbatch=microbatch)
    with pytest.raises((DisagreementError, LossError), match=words):
        trainer.step(batches(1)[0])


def test_rows_may_have_another_shape_in_another_step() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch[0][:, :3]).square()[:, 0], {}, {"rows": batch[0]}

    trainer = make_trainer(loss=loss, shards=3, devices=2)
    for call, width in ((trainer.step, 3), (trainer.step, 5), (trainer.gradient, 4)):
        rows = call((torch.ones(7, width),)).outputs["rows"]
        assert isinstance(rows, torch.Tensor)
        assert rows.shape == (7, width)


# Together with other things


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    y: torch.Tensor


X, Y = batches(1, dtype=torch.float64)[0]


@for_each(
    ("model", "loss", "batch", "options"),
    [
        (Net, of_gathered, (X, Y), {}),
        (synced, of_samples, (X, Y), {}),
        (Net, lambda model, batch: of_samples(model, (batch.x, batch.y)), Fields(X, Y), {}),
        (
            Net,
            lambda model, batch: of_samples(model, (batch[0].mT, batch[1][0])),
            (X.mT, Y[None]),
            {"dim": 1},
        ),
    ],
)
@for_each("call", ["step", "gradient"])
def test_onefold_verify_finds_each_kind_of_step_right(
    model: Any, loss: Any, batch: Any, options: Any, call: str, compared: Compared
) -> None:
    trainer = compared.trainer(model(), loss)
    getattr(trainer, call)(batch, **options)
    found = compared.lines(trainer)[1]
    assert max(found["loss_difference"], found["gradient_difference"]) < 1e-9
    assert not found["causes"]


def test_the_example_of_the_documents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/understand/concepts.md").read_text()
    (block,) = (b for b in text.split("```python\n")[1:] if "step.values" in b)
    function, _, use = block.split("```")[0].partition("\nstep = ")
    names: dict[str, Any] = {"F": F, "batch": batches(1)[0]}
    exec(function, names)
    names["trainer"] = trainer_of(names["loss"])
    exec(f"step = {use}", names)
    loss, accuracy, norm = map(float, capsys.readouterr().out.split())
    assert min(loss, norm) > 0
    assert accuracy * SAMPLES == pytest.approx(round(accuracy * SAMPLES))


# Whole batches


def words_of(rows: list[Any]) -> dict[str, Any]:
    """A collate with each kind of part."""
    names = [f"{row[1].item():.3f}" for row in rows]
    boxes = [{"box": row[0][: 1 + n]} for n, row in enumerate(rows)]
    return {"x": torch.stack([row[0] for row in rows]), "names": names, "b": boxes, "n": 4}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_a_whole_batch_is_what_one_shard_would_be(workers: int) -> None:
    data = TensorDataset(*regression(11))
    trainer, alone = make_trainer(shards=3, devices=3, shares=(2, 0, 1)), make_trainer(shards=1)
    ours, theirs = (
        each.loader(data, batch_size=5, shuffle=True, workers=workers) for each in (trainer, alone)
    )
    for batch, one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(batch.whole(), one.shards[0], rtol=0, atol=0)
        assert trainer.step(batch).samples == len(batch.whole()[0])


def test_every_kind_of_batch_comes_whole() -> None:
    trainer = make_trainer(shards=3, devices=2)
    data = TensorDataset(*regression(8))
    whole = next(iter(trainer.loader(data, batch_size=8, collate=words_of))).whole()
    assert torch.equal(whole["x"], data.tensors[0])
    assert whole["names"] == [f"{y.item():.3f}" for y in data.tensors[1]]
    assert [len(each["box"]) for each in whole["b"]] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert whole["n"] == 4
    for batch in trainer.batches(lambda step, generator: regression(step + 4), per_epoch=2):
        rows = batch.whole()[0]
        assert torch.equal(rows, regression(batch.samples)[0])

    padded = lambda rows: torch.zeros(len(rows), len(rows))  # noqa: E731
    batch = next(iter(trainer.loader(data, batch_size=8, collate=padded)))
    with pytest.raises(ValueError, match=r"got \[\(3, 3\), \(3, 3\), \(2, 2\)\].*pads each shard"):
        batch.whole()


def wholes() -> list[Any]:
    trainer = make_trainer(shards=3, devices=None)
    loader = trainer.loader(DataLoader(TensorDataset(*regression(11)), 5, shuffle=True))
    return [batch.whole()[0].tolist() for batch in loader]


@for_each("exchange", ["shared", "collective"])
def test_processes_hold_what_one_device_holds(exchange: Any) -> None:
    assert simulate(wholes, 3, exchange=exchange) == simulate(wholes, 1) * 3

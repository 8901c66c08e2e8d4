"""Averages of the model: the right ones, the same on any number of devices, never in the way."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import CheckpointError
from onefold.testing import simulate
from onefold.update.averages import AverageRule
from tests.averaged import Net, batch_of, data, loss, trained, trainer_of
from tests.checkpoint.folders import names_in
from tests.small import Batch, bits
from tests.tables import for_each


def train(trainer: Any, first: int, last: int) -> Any:
    """The steps of these numbers."""
    for step in range(first, last + 1):
        trainer.step(batch_of(step))
    return trainer


def averaging(devices: int | None = 1, last: int = 3, **options: Any) -> Any:
    trainer = trainer_of(devices, **options)
    trainer.average(decay=0.9)
    return train(trainer, 1, last)


def shown(trainer: onefold.Trainer, **options: Any) -> str:
    """The fingerprint of the averages."""
    with trainer.averaged(**options):
        return trainer.fingerprint()


def both(trainer: onefold.Trainer) -> tuple[str, str]:
    """The fingerprints of what is trained, and of the averages."""
    return trainer.fingerprint(), shown(trainer)


def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"loss": loss(model, batch)}


@pytest.fixture
def without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", lambda values, p, training: values)


def plain(decay: float | None, model: nn.Module) -> AveragedModel:
    """The same average in a plain loop, by PyTorch."""

    def warming_up(average: Any, value: Any, number: Any) -> Any:
        kept = min(decay or 0.0, (1 + number) / (10 + number))
        return kept * average + (1 - kept) * value

    averaged = AveragedModel(model, avg_fn=warming_up if decay else None, use_buffers=True)
    if decay:  # whose first update takes the values as they are
        averaged.update_parameters(model)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    for step in range(1, 21):
        optimizer.zero_grad()
        loss(model, batch_of(step)).mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    return averaged


def assert_near(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        if mine.is_floating_point():
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def simple() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 4))


@pytest.mark.usefixtures("without_dropout")
@for_each("kind", [{"decay": 0.9}, {"mean": True}])
@for_each(("build", "devices", "shards"), [(simple, 1, 4), (simple, 3, 4), (Net, 1, 1)])
def test_plain_pytorch_comes_to_the_same(
    build: Callable[[], Any], devices: int, shards: int, kind: dict[str, Any]
) -> None:
    model = build()
    expected = plain(kind.get("decay"), copy.deepcopy(model))
    trainer = trainer_of(devices, model=model, shards=shards)
    trainer.average(**kind)
    train(trainer, 1, 20)
    with trainer.averaged():
        assert_near(model, expected.module)
        if build is Net:
            assert int(model.norm.num_batches_tracked) == 20
            assert model.mask.tolist() == [0.0, -float("inf")]


def all_of_it(devices: int | None, folder: str, precision: str | None) -> tuple[Any, ...]:
    """Averages that begin late, are evaluated, recomputed, saved in the block, and go on."""
    trainer = train(trainer_of(devices, precision=precision), 1, 2)
    trainer.average(decay=0.9)
    train(trainer, 3, 5)
    with trainer.averaged():
        averaged = trainer.evaluate(score, data(), batch_size=9)["loss"]
        trainer.save(folder)
        trainer.barrier()
    at_5 = both(trainer)
    recomputed = shown(trainer, update_bn=data(), batch_size=10)
    train(trainer, 6, 7)
    at_7 = both(trainer)
    assert trainer.load(folder).step == 5
    assert both(trainer) == at_5
    assert both(train(trainer, 6, 7)) == at_7
    trainer.close()
    return averaged, at_5, recomputed, at_7


@for_each(("exchange", "precision"), [("shared", None), ("collective", "bf16-params")])
def test_every_device_has_the_same(exchange: Any, precision: Any, tmp_path: Path) -> None:
    expected = all_of_it(1, str(tmp_path / "alone"), precision)
    assert all_of_it(2, str(tmp_path / "two"), precision) == expected
    args = (None, str(tmp_path / "launched"), precision)
    assert set(simulate(all_of_it, 3, args=args, exchange=exchange)) == {expected}


# The block


def in_modifying(trainer: onefold.Trainer) -> None:
    with trainer.modifying():
        shown(trainer)


INSIDE: dict[str, Callable[[onefold.Trainer], object]] = {
    "trainer.step": lambda trainer: trainer.step(batch_of(4)),
    "trainer.load": lambda trainer: trainer.load("nowhere"),
    "trainer.average": lambda trainer: trainer.average(decay=0.9),
    "trainer.averaged": shown,
    "trainer.modifying": in_modifying,
}


def test_calls_for_what_is_trained_are_refused_in_the_block() -> None:
    trainer = averaging(2)
    before = both(trainer)
    for name, call in INSIDE.items():
        words = rf"^{name} was called inside `with trainer.averaged"
        with pytest.raises(RuntimeError, match=words), trainer.averaged():
            call(trainer)
    with pytest.raises(RuntimeError, match=r"inside `with trainer.modifying"):
        in_modifying(trainer)
    assert both(trainer) == before
    assert both(train(trainer, 4, 4)) == both(averaging(last=4))


@for_each(("precision", "devices"), [(None, 2), ("fp16-params", 1)])
def test_what_the_block_does_to_the_model_is_gone(precision: str | None, devices: int) -> None:
    trainer = averaging(devices, precision=precision)
    before, expected = bits(trainer.model), both(trainer)

    def spoil() -> None:
        assert bits(trainer.model) != before
        with torch.no_grad():
            for parameter in trained(trainer.model):
                parameter.mul_(2.0)
        trainer.model.norm.running_mean = torch.ones(20)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), trainer.averaged():
        spoil()
    assert bits(trainer.model) == before
    assert both(trainer) == expected
    assert both(train(trainer, 4, 5)) == both(averaging(last=5, precision=precision))


def test_what_is_evaluated_and_predicted_are_the_averages() -> None:
    trainer = averaging(2)
    before = trainer.evaluate(score, data(), batch_size=9)
    with trainer.averaged():
        averaged = trainer.evaluate(score, data(), batch_size=9)
        rows = trainer.predict(lambda m, b: {"out": m(b[0])}, data(), batch_size=9)["out"]
        expected = copy.deepcopy(trainer.model).eval()(data().tensors[0]).detach()
    torch.testing.assert_close(torch.as_tensor(rows), expected)
    wanted = F.cross_entropy(expected, data().tensors[1])
    assert averaged["loss"] == pytest.approx(float(wanted)) != before["loss"]
    assert trainer.evaluate(score, data(), batch_size=9) == before


# Statistics of batch norms


@pytest.mark.usefixtures("without_dropout")
def test_statistics_are_recomputed_as_pytorch_does() -> None:
    trainer = averaging(shards=1)
    trainer.model.eval()  # all of it: not a batch norm that is kept so while the model trains
    with trainer.averaged():
        expected = copy.deepcopy(trainer.model)
    inputs, _ = data().tensors
    update_bn([inputs[start : start + 9] for start in range(0, 30, 9)], expected)
    before = trainer.fingerprint()
    with trainer.averaged(update_bn=data(), batch_size=9):
        assert_near(trainer.model, expected)
        norm = trainer.model.norm
        assert (norm.momentum, norm.training, int(norm.num_batches_tracked)) == (0.1, False, 4)
    assert trainer.fingerprint() == before


def test_norms_that_are_not_used_or_evaluate_keep_their_statistics() -> None:
    model = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Identity())
    frozen, last, unused = model[1].eval(), model[2], nn.BatchNorm1d(3)
    frozen.get_buffer("running_mean").fill_(7.0)
    model[3].register_module("idle", unused)
    trainer = averaging(model=model, last=2)
    with trainer.averaged(update_bn=data(), batch_size=30):
        assert unused.get_buffer("running_var").tolist() == [1.0] * 3
        assert frozen.get_buffer("running_mean").tolist() == [7.0] * 4
        # The one behind it has seen what it lets through, and not what a batch would make of it.
        assert float(last.get_buffer("running_mean").abs().max()) > 1.0
    assert not frozen.training
    assert last.training


def test_statistics_that_cannot_be_recomputed() -> None:
    trainer = averaging(2)
    before = both(trainer)
    broken = TensorDataset(torch.randn(8, 20), torch.full((8,), 5))
    with pytest.raises(IndexError):
        shown(trainer, update_bn=broken, batch_size=8)
    assert both(trainer) == before
    synced = onefold.SyncBatchNorm.convert(nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4)))
    trainer = averaging(model=synced, last=2)
    with pytest.raises(ValueError, match=r"update_bn does not support onefold\.SyncBatchNorm"):
        shown(trainer, update_bn=data(), batch_size=30)
    trainer = averaging(model=nn.Linear(20, 4), last=2)
    assert shown(trainer, update_bn=data(), batch_size=9) == shown(trainer)
    with pytest.raises(ValueError, match="pass both update_bn and batch_size"):
        shown(trainer, update_bn=data())


# Checkpoints


def test_a_checkpoint_that_is_saved_in_the_block_holds_both(tmp_path: Path) -> None:
    trainer = averaging(2)
    with trainer.averaged(update_bn=data(), batch_size=10):
        folder = trainer.save(tmp_path / "in")
        averages = bits(trainer.model)
    assert "training.safetensors" in names_in(folder)
    other = Net()
    onefold.load_weights(other, folder)
    assert bits(other) == averages
    kept = load_file(folder / "training.safetensors")
    expected = dict(trainer.model.state_dict()) | {"mask": trainer.model.mask}
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)
    assert json.loads((folder / "run.json").read_text())["fingerprint"] == trainer.fingerprint()
    # The next one outside takes its place, and nothing of it stays.
    trainer.save(tmp_path / "in")
    assert "training.safetensors" not in names_in(folder)


def saved(folder: Path, **choice: Any) -> Any:
    trainer = trainer_of()
    if choice:
        trainer.average(**choice)
    train(trainer, 1, 3).save(folder)
    return trainer


@for_each("order", ["before", "after", "never"])
@for_each("had", [True, False])
def test_the_line_may_stand_anywhere_on_resuming(had: bool, order: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"decay": 0.9, "every": 2}
    first, second = saved(tmp_path, **asked if had else {}), trainer_of(2)
    if order == "before":
        second.average(**asked)
    second.load(tmp_path)
    if order == "never" and not had:
        with pytest.raises(ValueError, match=r"there is no average. Call trainer.average\("):
            shown(second)
    if order == "after" or (order == "never" and not had):
        second.average(**asked)
        with pytest.raises(ValueError, match="call it once"):
            second.average(**asked)
        words = r"average\(mean=True, every=1\) .* of decay=0.9, every=2"
        with pytest.raises(ValueError, match=words):
            second.average(mean=True)
    if not had:
        first.average(**asked)
    assert both(train(second, 4, 6)) == both(train(first, 4, 6))


def test_another_average_than_that_of_the_checkpoint_is_refused_or_chosen(tmp_path: Path) -> None:
    first = saved(tmp_path, decay=0.9)
    before, after, chosen = (trainer_of() for _ in range(3))
    before.average(mean=True, every=3)
    words = r"average of decay=0.9, every=1, but this run has mean=True, every=3\. .*allow_changed="
    with pytest.raises(CheckpointError, match=words):
        before.load(tmp_path)
    assert before.steps == 0
    after.load(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"\(decay=0.8, every=1\) was called, but the loaded .* an average of decay=0.9",
    ):
        after.average(decay=0.8)
    after.average(decay=0.9)
    before.load(tmp_path, allow_changed=["average"])
    chosen.load(tmp_path, allow_changed=["average"])
    chosen.average(mean=True)
    assert both(before) == both(chosen) == (first.fingerprint(), first.fingerprint())


# Which average is kept, and how much weight each value has in it


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50))
def test_a_mean_has_all_values_alike_and_not_the_first_one(values: list[float]) -> None:
    average = 1e9
    for update, value in enumerate(values, 1):
        kept = AverageRule(None).kept(update)
        average = kept * average + (1 - kept) * value
    assert average == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_what_is_no_average_is_refused() -> None:
    for choice, words in (
        ({}, r"pass either decay, .* or mean=True .*, but got decay=None and mean=False"),
        ({"decay": 0.9, "mean": True}, "got decay=0.9 and mean=True"),
        ({"decay": 1.0}, "decay must be at least 0 and less than 1, but got 1.0"),
        ({"decay": float("nan")}, "less than 1, but got nan"),
        ({"decay": "0.9"}, "decay must be a number, but got '0.9'"),
        ({"decay": 0.9, "every": 0}, "every must be at least 1, but got 0"),
        ({"mean": 1}, "mean must be True or False, but got 1"),
    ):
        given: dict[str, Any] = {"decay": None, "mean": False, "every": 1, **choice}
        with pytest.raises((TypeError, ValueError), match=words):
            AverageRule.chosen(**given)

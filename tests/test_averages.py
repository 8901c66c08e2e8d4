"""Averages of the model: the right ones, the same on any number of devices, never in the way."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

import onefold
from onefold.core.precision import PRECISIONS
from onefold.errors import CheckpointError, LossError
from tests import simulated
from tests.averaged import (
    Net,
    all_of_it,
    batch_of,
    both,
    data,
    loss,
    one_fails,
    score,
    shown,
    train,
    trainer_of,
)
from tests.checkpoint.folders import names_in
from tests.inside import engine_in
from tests.small import bits
from tests.tables import for_each

each_kind = for_each("kind", [{"decay": 0.9}, {"mean": True}])


def plain(kind: dict[str, Any], model: nn.Module, steps: range) -> AveragedModel:
    """The same average in a plain loop, by PyTorch."""
    decay = kind.get("decay")

    def warming_up(average: Any, value: Any, number: Any) -> Any:
        kept = min(decay, (1 + number) / (10 + number))
        return kept * average + (1 - kept) * value

    averaged = AveragedModel(model, avg_fn=warming_up if decay else None, use_buffers=True)
    if decay:  # whose first update takes the values as they are
        averaged.update_parameters(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in steps:
        loss(model, batch_of(step)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return averaged


def assert_near(ours: nn.Module, theirs: nn.Module) -> None:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
    for (name, mine), other in pairs:
        if mine.is_floating_point():
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


@each_kind
@for_each("devices", [1, 3])
def test_plain_pytorch_comes_to_the_same(kind: dict[str, Any], devices: int) -> None:
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 4))
    expected = plain(kind, copy.deepcopy(model), range(1, 21))
    trainer = trainer_of(devices, model=model)
    trainer.average(**kind)
    train(trainer, 1, 20)
    with trainer.averaged():
        assert_near(model, expected.module)


@each_kind
def test_buffers_follow_by_the_same_rule(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "dropout", lambda values, p, training: values)
    torch.manual_seed(0)
    expected = plain(kind, Net(), range(1, 11))
    trainer = trainer_of(shards=1)
    trainer.average(**kind)
    train(trainer, 1, 10)
    with trainer.averaged():
        assert_near(trainer.model, expected.module)
        assert int(trainer.model.norm.num_batches_tracked) == 10  # type: ignore[union-attr,arg-type]
        assert trainer.model.mask.tolist() == [0.0, -float("inf")]  # type: ignore[union-attr]


@for_each("precision", [None, *PRECISIONS])
def test_the_bits_do_not_depend_on_the_devices(precision: str | None) -> None:
    found = set()
    for devices, plan in ((1, None), (2, None), (3, (0, 3, 1))):
        trainer = trainer_of(devices, plan=plan, precision=precision)
        trainer.average(decay=0.9, every=2)
        found.add(both(train(trainer, 1, 5)))
    assert len(found) == 1
    without = train(trainer_of(precision=precision), 1, 5)
    assert {trained for trained, _ in found} == {without.fingerprint()}


@for_each("precision", [None, "bf16-params"])
@for_each("inside", [False, True])
def test_a_stopped_run_goes_on_with_the_same_bits(
    precision: str | None, inside: bool, tmp_path: Path
) -> None:
    trainers = [trainer_of(devices, precision=precision) for devices in (1, 3, 2)]
    for trainer in trainers[:2]:
        trainer.average(decay=0.9)
    whole = both(train(trainers[0], 1, 5))
    train(trainers[1], 1, 3)
    if inside:
        with trainers[1].averaged():
            trainers[1].save(tmp_path)
    else:
        trainers[1].save(tmp_path)
    trainers[2].load(tmp_path)
    assert both(trainers[2]) == both(trainers[1])
    assert both(train(trainers[2], 4, 5)) == whole


@for_each("exchange", ["shared", "collective"])
@for_each("precision", [None, "bf16-params"])
def test_every_process_has_the_same(exchange: str, precision: str | None, tmp_path: Path) -> None:
    found = simulated.launch(
        all_of_it,
        devices="cpu:3",
        args=(None, str(tmp_path / "launched"), precision),
        exchange=exchange,
    )
    assert found == all_of_it(1, str(tmp_path / "alone"), precision)
    assert found == all_of_it(2, str(tmp_path / "two"), precision)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_what_is_trained_is_back_where_one_process_fails(exchange: str, tmp_path: Path) -> None:
    onefold.launch(
        one_fails, devices="cpu:3", args=(str(tmp_path),), exchange=exchange, timeout_s=300
    )
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(3)]
    assert said == ["PeerFailed True", "PeerFailed True", "KeyError True"]


# The block


def averaging(devices: int = 1, **options: Any) -> onefold.Trainer:
    trainer = trainer_of(devices, **options)
    trainer.average(decay=0.9)
    return train(trainer, 1, 3)


def changing(trainer: onefold.Trainer) -> None:
    with trainer.changing():
        pass


INSIDE: dict[str, Callable[[onefold.Trainer], object]] = {
    "trainer.step": lambda trainer: trainer.step(batch_of(4)),
    "trainer.load": lambda trainer: trainer.load("nowhere"),
    "trainer.average": lambda trainer: trainer.average(decay=0.9),
    "the beginning of trainer.averaged": shown,
    "the beginning of trainer.changing": changing,
}


@for_each("devices", [1, 2])
@for_each("name", INSIDE)
def test_calls_for_what_is_trained_are_refused_in_the_block(name: str, devices: int) -> None:
    trainer = averaging(devices)
    before = both(trainer)
    with (
        pytest.raises(RuntimeError, match=rf"^{name} was called inside `with trainer.averaged"),
        trainer.averaged(),
    ):
        INSIDE[name](trainer)
    assert both(trainer) == before
    assert train(trainer, 4, 4).fingerprint() == train(averaging(), 4, 4).fingerprint()


def test_the_block_cannot_be_opened_in_changing() -> None:
    trainer = averaging()
    with pytest.raises(RuntimeError, match=r"inside `with trainer.changing"), trainer.changing():
        shown(trainer)


@for_each("precision", [None, "fp16-params"])
@for_each("devices", [1, 2])
def test_what_the_block_does_to_the_model_is_gone(precision: str | None, devices: int) -> None:
    trainer = averaging(devices, precision=precision)
    before, expected = bits(trainer.model), both(trainer)

    def spoil() -> None:
        assert bits(trainer.model) != before
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(2.0)
        trainer.model.norm.running_mean = torch.ones(20)  # type: ignore[union-attr]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), trainer.averaged():
        spoil()
    assert bits(trainer.model) == before
    assert both(trainer) == expected
    same = train(averaging(precision=precision), 4, 5)
    assert both(train(trainer, 4, 5)) == both(same)


def test_what_is_evaluated_and_predicted_are_the_averages() -> None:
    trainer = averaging(2)

    def values() -> tuple[float, torch.Tensor]:
        scores = trainer.evaluate(score, data(), batch_size=9)
        found = trainer.predict(lambda m, b: {"out": m(b[0])}, data(), batch_size=9)
        return scores["loss"], found["out"]

    trained = values()
    with trainer.averaged():
        averaged = values()
        model = copy.deepcopy(trainer.model).eval()
    assert averaged[0] != trained[0]
    inputs, labels = data().tensors
    torch.testing.assert_close(averaged[1], model(inputs).detach())
    assert averaged[0] == pytest.approx(float(F.cross_entropy(model(inputs), labels).detach()))
    again = values()
    assert trained[0] == again[0]
    assert torch.equal(trained[1], again[1])


def test_what_one_device_changes_by_itself_stays() -> None:
    found = set()
    for look in (False, True):
        trainer = averaging(precision="bf16-params")
        with torch.no_grad():
            trainer.model.get_parameter("out.bias").fill_(2.0)
        if look:
            shown(trainer)
        found.add(both(train(trainer, 4, 5)))
    assert len(found) == 1


def test_without_an_average_there_is_nothing_to_show() -> None:
    trainer = trainer_of()
    with pytest.raises(ValueError, match=r"no average is kept: call trainer.average\("):
        shown(trainer)
    trainer.average(mean=True)
    assert shown(trainer) == trainer.fingerprint()
    with pytest.raises(ValueError, match=r"average\(decay=0.5, every=1\) .* of mean=True, every=1"):
        trainer.average(decay=0.5)
    with pytest.raises(ValueError, match="call it once"):
        trainer.average(mean=True)


def spoilt(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    losses = loss(model, (inputs, labels % 9))
    return losses * float("nan") if bool((labels > 8).any()) else losses


def test_a_skipped_step_moves_no_average() -> None:
    found = set()
    for devices in (1, 2):
        trainer = trainer_of(devices, function=spoilt, on_nonfinite="skip")
        trainer.average(decay=0.9, every=2)
        train(trainer, 1, 3)
        before = both(trainer)
        inputs, labels = batch_of(4)
        labels[5] = 18
        assert trainer.step((inputs, labels)).skipped
        assert both(trainer) == before
        found.add(both(train(trainer, 4, 6)))
    assert len(found) == 1


def test_averages_change_hands_with_their_pieces() -> None:
    trainers = [averaging(devices) for devices in (1, 3)]
    engine = engine_in(trainers[1])
    pieces = engine.roster.pieces
    for step, quarters in enumerate([(0, 1, 2, 4), (0, 0, 4, 4), (0, 3, 3, 4)], 4):
        spans = [range(a, b) for a, b in pairwise(pieces * q // 4 for q in quarters)]
        engine.bind(engine.roster.next(spans=spans))
        assert both(train(trainers[1], step, step)) == both(train(trainers[0], step, step))


# Statistics of batch norms


def test_statistics_are_recomputed_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", lambda values, p, training: values)
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
        assert isinstance(norm, nn.BatchNorm1d)
        assert (norm.momentum, norm.training, int(norm.num_batches_tracked)) == (0.1, False, 4)
    assert trainer.fingerprint() == before


def test_recomputed_statistics_do_not_depend_on_the_devices(tmp_path: Path) -> None:
    found = set()
    for devices, plan in ((1, None), (2, (3, 1)), (3, (0, 3, 1))):
        trainer = averaging(devices, plan=plan, shards=4)
        with trainer.averaged(update_bn=data(), batch_size=10):
            now = trainer.fingerprint()
            trainer.save(tmp_path / str(devices))
            assert trainer.fingerprint() == now
        assert now != shown(trainer)
        folder = tmp_path / str(devices) / "step-00000003"
        saved = load_file(folder / "model.safetensors")["norm.running_mean"]
        found.add((now, tuple(saved.tolist()), both(trainer)))
    assert len(found) == 1


def test_layers_that_the_model_does_not_use_keep_their_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 4))
    model.add_module("2", nn.Identity())
    model[2].register_module("idle", nn.BatchNorm1d(3))
    trainer = trainer_of(model=model)
    trainer.average(mean=True)
    train(trainer, 1, 2)
    with trainer.averaged(update_bn=data(), batch_size=30):
        idle = model[2].get_submodule("idle")
        assert isinstance(idle, nn.BatchNorm1d)
        assert idle.running_var is not None
        assert idle.running_var.tolist() == [1.0] * 3


def test_a_batch_norm_that_is_kept_in_evaluation_mode_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    frozen = model[1]
    frozen.eval()
    frozen.running_mean.fill_(7.0)
    trainer = trainer_of(model=model)
    trainer.average(mean=True)
    train(trainer, 1, 2)
    with trainer.averaged(update_bn=data(), batch_size=30):
        assert frozen.running_mean.tolist() == [7.0] * 4
        # The one behind it has seen what it lets through, and not what a batch would make of it.
        assert float(model[2].running_mean.abs().max()) > 1.0
    assert not frozen.training
    assert model[2].training


def test_statistics_over_the_whole_batch_are_not_recomputed_by_shard() -> None:
    model = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4))
    trainer = trainer_of(model=onefold.SyncBatchNorm.convert(model))
    trainer.average(mean=True)
    train(trainer, 1, 2)
    block = trainer.averaged(update_bn=data(), batch_size=30)
    with pytest.raises(ValueError, match=r"update_bn: the model has an onefold\.SyncBatchNorm"):
        block.__enter__()


def test_a_model_without_batch_norm_has_nothing_to_recompute() -> None:
    trainer = trainer_of(model=nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4, affine=False)))
    trainer.model[1].track_running_stats = False  # type: ignore[index,union-attr]
    trainer = trainer_of(model=nn.Linear(20, 4))
    trainer.average(mean=True)
    train(trainer, 1, 2)
    with trainer.averaged(update_bn=data(), batch_size=9):
        now = trainer.fingerprint()
    assert now == shown(trainer)
    with pytest.raises(ValueError, match="update_bn and batch_size together"):
        trainer.averaged(update_bn=data()).__enter__()


def test_a_failure_while_statistics_are_recomputed_puts_everything_back() -> None:
    trainer = averaging(2, function=spoilt)
    before = both(trainer)
    broken = TensorDataset(torch.randn(8, 20), torch.full((8,), 5))
    with pytest.raises(IndexError), trainer.averaged(update_bn=broken, batch_size=8):
        pass
    assert both(trainer) == before
    with pytest.raises(LossError):
        trainer.step((torch.randn(8, 20), torch.tensor([0] * 7 + [9])))


# Checkpoints


def test_a_checkpoint_that_is_saved_in_the_block_holds_both(tmp_path: Path) -> None:
    trainer = averaging(2)
    with trainer.averaged():
        folder = trainer.save(tmp_path / "in")
        averages = bits(trainer.model)
    assert "training.safetensors" in names_in(folder)
    other = Net()
    onefold.load_weights(other, folder)
    assert bits(other) == averages
    assert load_file(folder / "training.safetensors")["mask"].tolist() == [0.0, -float("inf")]
    plain_folder = trainer.save(tmp_path / "out")
    trained = load_file(plain_folder / "model.safetensors")
    kept = load_file(folder / "training.safetensors")
    assert all(torch.equal(trained[name], kept[name]) for name in trained)
    fingerprints = [
        re.findall('"fingerprint": "(.*)"', (f / "run.json").read_text())
        for f in (folder, plain_folder)
    ]
    assert fingerprints[0] == fingerprints[1] == [trainer.fingerprint()]
    # The next one outside takes its place, and nothing of it stays.
    trainer.save(tmp_path / "in")
    assert "training.safetensors" not in names_in(folder)


def saved(folder: Path, **choice: Any) -> onefold.Trainer:
    trainer = trainer_of()
    if choice:
        trainer.average(**choice)
    train(trainer, 1, 3).save(folder)
    return trainer


@for_each("order", ["before", "after", "never"])
def test_the_line_may_stand_anywhere_on_resuming(order: str, tmp_path: Path) -> None:
    first = saved(tmp_path, decay=0.9, every=2)
    second = trainer_of(2)
    if order == "before":
        second.average(decay=0.9, every=2)
    second.load(tmp_path)
    if order == "after":
        second.average(decay=0.9, every=2)
        with pytest.raises(ValueError, match="call it once"):
            second.average(decay=0.9, every=2)
    assert both(train(second, 4, 6)) == both(train(first, 4, 6))


def test_another_average_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, decay=0.9)
    before = trainer_of()
    before.average(mean=True, every=3)
    with pytest.raises(
        CheckpointError,
        match=r"with an average of decay=0.9, every=1, this run has mean=True, every=3: .*"
        r'changed=\["average"\]',
    ):
        before.load(tmp_path)
    assert before.steps == 0
    after = trainer_of()
    after.load(tmp_path)
    with pytest.raises(ValueError, match=r"holds an average of decay=0.9, .*average\(decay=0.8"):
        after.average(decay=0.8)
    after.average(decay=0.9)


def test_another_average_may_be_chosen(tmp_path: Path) -> None:
    first = saved(tmp_path, decay=0.9)
    for asks in (True, False):
        second = trainer_of()
        if asks:
            second.average(mean=True)
        second.load(tmp_path, changed=["average"])
        if not asks:
            second.average(mean=True)
        assert both(second) == (first.fingerprint(), first.fingerprint())


def test_an_average_begins_with_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    first = saved(tmp_path)
    second = trainer_of(2)
    second.average(decay=0.9)
    second.load(tmp_path)
    assert both(second) == (first.fingerprint(), first.fingerprint())
    first.average(decay=0.9)
    assert both(train(second, 4, 5)) == both(train(first, 4, 5))


def test_going_back_to_before_the_average_ends_it(tmp_path: Path) -> None:
    """Where only a checkpoint has asked for it."""
    saved(tmp_path / "without")
    saved(tmp_path / "with", mean=True)
    trainer = trainer_of()
    trainer.load(tmp_path / "with")
    trainer.load(tmp_path / "without")
    with pytest.raises(ValueError, match="no average is kept"):
        shown(trainer)


def test_the_average_goes_on_with_another_optimizer(tmp_path: Path) -> None:
    first = saved(tmp_path, decay=0.9)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD([model.wide.weight, model.norm.weight], lr=0.1)
    second = onefold.Trainer(model, optimizer, loss, shards=4, devices=["cpu"], threads=1)
    second.load(tmp_path, changed=["optimizer"])
    with first.averaged(), second.averaged():
        assert torch.equal(model.wide.weight, first.model.wide.weight)  # type: ignore[union-attr]
        # What nobody averages any more is as it is trained.
    assert torch.equal(model.out.weight, first.model.out.weight)  # type: ignore[union-attr]

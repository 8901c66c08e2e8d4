"""Values beside the loss: those of the whole batch, alike on any number of devices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import DisagreementError, LossError
from tests import simulated
from tests.conftest import ROOT
from tests.inside import engine_in
from tests.tables import for_each
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]

Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, Batch], object]
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
        found: torch.Tensor = self.layers(inputs)
        return found


def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def with_values(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
    """Each form that a value may have."""
    inputs, labels = batch
    logits = model(inputs)
    losses, few = F.cross_entropy(logits, labels, reduction="none"), labels == 0
    chosen = onefold.Mean((losses * few).sum(), few.sum())
    return losses, {
        "loss": losses,
        "accuracy": logits.argmax(1) == labels,
        "size": logits.square().mean(),
        "chosen": chosen,
        "right": onefold.Sum((logits.argmax(1) == labels).sum()),
        "both": chosen + 0.5 * onefold.Sum(losses.sum()),
    }


def of_terms(model: nn.Module, batch: Batch) -> tuple[object, dict[str, object]]:
    losses, values = with_values(model, batch)
    few = batch[1] == 0
    mean = onefold.Mean((losses * few).sum(), few.sum())
    return onefold.Mean(losses.sum(), len(losses)) + mean, values


def of_gathered(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
    logits, rows = onefold.gather(model(batch[0]), rows=True)
    losses = (logits[rows] - logits.mean(0)).square().mean(1)
    return losses, {"spread": losses, "own": logits[rows].abs().sum(1)}


LOSSES = (with_values, of_terms, of_gathered)


def batches(steps: int, samples: int = SAMPLES, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 4, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def trainer_of(
    loss: LossOf = with_values,
    *,
    model: nn.Module | None = None,
    devices: int | None = 1,
    shards: int = 5,
    **options: Any,
) -> onefold.Trainer:
    model = model or Net()
    return onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss,
        shards=shards,
        devices=["cpu"] * devices if devices else None,
        threads=1,
        **options,
    )


def shown(step: onefold.engine.step.Step) -> dict[str, str]:
    """Every value to the last bit."""
    return {name: float(value).hex() for name, value in step.values.items()}


Result = tuple[str, list[dict[str, str]]]


def result(trainer: onefold.Trainer, steps: Sequence[Batch]) -> Result:
    found = [shown(trainer.step(batch)) for batch in steps]
    return trainer.fingerprint(), found


def launched(loss: str, microbatch: int | None, plan: tuple[int, ...] | None) -> Result:
    """On each device of a run."""
    of = {each.__name__: each for each in LOSSES}[loss]
    trainer = trainer_of(of, devices=None, microbatch=microbatch)
    if plan is not None:
        trainer.plan = plan
    # The second batch leaves a shard empty, and the third has names that are new.
    steps = [batches(1)[0], batches(1, samples=4)[0]] if microbatch else batches(2)
    found = result(trainer, steps)
    trainer.close()
    return found


# What they are


@for_each(("shards", "devices"), [(1, 1), (2, 2), (5, 3), (16, 2)])
def test_they_are_those_of_the_whole_batch(shards: int, devices: int) -> None:
    model = Net(restless=False).double()
    inputs, labels = batches(1, dtype=torch.float64)[0]
    trainer = trainer_of(model=copy.deepcopy(model), shards=shards, devices=devices)
    found = trainer.step((inputs, labels)).values
    with torch.no_grad():
        logits = model(inputs)
        losses = F.cross_entropy(logits, labels, reduction="none")
    right = (logits.argmax(1) == labels).double().sum()
    expected = {
        "loss": losses.mean(),
        "accuracy": right / SAMPLES,
        "size": logits.square().mean(),
        "chosen": losses[labels == 0].mean(),
        "right": right,
        "both": losses[labels == 0].mean() + 0.5 * losses.sum(),
    }
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == torch.float64
        assert found[name].shape == ()
        assert float(found[name]) == pytest.approx(float(value), rel=1e-12), name


def test_a_loss_alone_has_none() -> None:
    assert trainer_of(of_samples).step(batches(1)[0]).values == {}


@for_each("shards", [1, 5])
@for_each("microbatch", [None, 2])
def test_training_is_what_it_is_without_them(shards: int, microbatch: int | None) -> None:
    options: dict[str, Any] = {"shards": shards, "microbatch": microbatch}
    model = {"model": Net(restless=False)} if microbatch else {}
    found = result(trainer_of(**options, **copy.deepcopy(model)), batches(3))[0]
    assert found == result(trainer_of(of_samples, **options, **model), batches(3))[0]


def test_their_gradient_is_not_used_and_they_may_be_anything() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return losses, {"nan": losses * math.nan, "large": 1e9 * losses, "none": losses.detach()}

    found = {}
    for option in ("raise", "skip"):
        trainer = trainer_of(loss, on_nonfinite=option)
        step = trainer.step(batches(1)[0])
        assert not step.skipped
        assert math.isnan(float(step.values["nan"]))
        found[option] = trainer.fingerprint()
    plain = trainer_of(of_samples)
    plain.step(batches(1)[0])
    assert set(found.values()) == {plain.fingerprint()}


def test_they_are_kept_until_they_are_asked_for() -> None:
    trainer = trainer_of(devices=2)
    first, second = [trainer.step(batch) for batch in batches(2)]
    before = shown(first)
    trainer.step(batches(3)[2])
    assert shown(first) == before != shown(second)


# On any number of devices


@for_each("loss", LOSSES)
@for_each(
    "options", [{}, {"samples": 3}, {"precision": "bf16"}, {"microbatch": 1, "restless": False}]
)
def test_the_bits_do_not_depend_on_the_devices(loss: LossOf, options: dict[str, Any]) -> None:
    options = dict(options)
    if loss is of_gathered and "microbatch" in options:
        return  # pieces cannot gather
    steps, found = batches(3, options.pop("samples", SAMPLES)), []
    restless = options.pop("restless", len(steps[0][0]) > 5)
    for plan in ((5,), (3, 2), (2, 2, 1), (0, 4, 1), (5, 0)):
        model = Net(restless=restless)
        trainer = trainer_of(loss, model=model, devices=len(plan), plan=plan, **options)
        found.append(result(trainer, steps))
    assert all(each == found[0] for each in found)


@for_each("exchange", ["shared", "collective"])
@for_each(
    ("loss", "microbatch", "plan"),
    [(with_values, None, None), (of_terms, None, (1, 4)), (of_gathered, None, None)],
)
def test_the_bits_do_not_depend_on_the_exchange(
    exchange: str, loss: LossOf, microbatch: int | None, plan: tuple[int, ...] | None
) -> None:
    name = loss.__name__  # type: ignore[attr-defined]
    found = simulated.launch(
        launched, devices="cpu:2", args=(name, microbatch, plan), exchange=exchange
    )
    assert found == result(trainer_of(loss), batches(2))


def test_a_stopped_run_goes_on_with_the_same_values(tmp_path: Path) -> None:
    steps = batches(5)
    whole = result(trainer_of(), steps)
    first = trainer_of(devices=3)
    for batch in steps[:2]:
        first.step(batch)
    first.save(tmp_path / "run")
    second = trainer_of(devices=2)
    second.load(tmp_path / "run")
    assert result(second, steps[2:]) == (whole[0], whole[1][2:])


def alternating() -> LossOf:
    """Other names in every other step, and none in every third."""
    calls: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> object:
        losses, values = with_values(model, batch)
        step = len(calls) // 5  # of five shards
        calls.append(1)
        if step % 3 == 2:
            return losses
        return losses, values if step % 3 else {"only": losses}

    return loss


def test_names_may_change_from_step_to_step() -> None:
    found = []
    for devices in (1, 2, 3):
        found.append(result(trainer_of(alternating(), devices=devices), batches(7)))
    assert [list(each)[:1] for each in found[0][1]] == [["only"], ["loss"], []] * 2 + [["only"]]
    assert found[0] == found[1] == found[2]
    # New names come by a message of their own, known ones on the board: the values are the same.
    plain = result(trainer_of(), batches(7))[1]
    assert [found[0][1][1], found[0][1][4]] == [plain[1], plain[4]]


def test_a_step_without_values_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with them only the first."""
    trainer = {loss: trainer_of(loss, devices=2) for loss in (of_samples, with_values)}
    sent: list[str] = []
    for each in trainer.values():
        transport = engine_in(each).exchange.transport
        for name in ("share", "gather_bytes", "meet"):
            call = getattr(transport, name)

            def noted(*args: Any, name: str = name, call: Any = call) -> Any:
                sent.append(name)
                return call(*args)

            monkeypatch.setattr(transport, name, noted)
    counts: dict[str, list[list[str]]] = {}
    for loss, each in trainer.items():
        for batch in batches(3):
            sent.clear()
            each.step(batch)
            counts.setdefault(loss.__name__, []).append(sorted(sent))
    without, given = counts["of_samples"], counts["with_values"]
    assert given[1:] == without[1:]
    assert sorted([*without[0], "gather_bytes", "share"]) == given[0]


# What is refused


@for_each("devices", [1, 2])
def test_names_that_differ_between_shards_are_refused(devices: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return losses, {"few": losses} if len(losses) < 3 else {"a": losses, "many": losses}

    words = r"step 1, shard 1: the loss returned the values \['few'\] .* and \['a', 'many'\] for"
    with pytest.raises(DisagreementError, match=words):
        trainer_of(loss, devices=devices).step(batches(1)[0])


def test_a_shard_without_values_beside_others_is_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return (losses, {"a": losses}) if len(losses) < 3 else losses

    with pytest.raises(DisagreementError, match=r"step 1, shard 0: .* the values \[\] beside"):
        trainer_of(loss, devices=2).step(batches(1)[0])


def test_kinds_that_differ_between_shards_are_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return losses, {"a": losses if len(losses) < 3 else onefold.Sum(losses.sum())}

    with pytest.raises(DisagreementError, match="terms of the same kind, for every shard"):
        trainer_of(loss).step(batches(1)[0])


def test_pieces_with_other_names_are_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        losses = of_samples(model, batch)
        return losses, {"one" if len(losses) == 1 else "two": losses}

    with pytest.raises(DisagreementError, match=r"\['two'\] .* and \['one'\] for another"):
        trainer_of(loss, model=Net(restless=False), microbatch=2).step(batches(1)[0])


@for_each("devices", [1, 2])
def test_a_tuple_of_something_else_is_refused(devices: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    words = r"the loss of step 1, shard 0: expected a loss, or .* got a tuple of \(Tensor, Tensor\)"
    with pytest.raises(LossError, match=words):
        trainer_of(loss, devices=devices).step(batches(1)[0])


def test_a_loss_that_is_read_wrongly_is_seen_beside_values() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return losses, {"a": losses}

    with pytest.raises(LossError, match="step 1, shard 0 is a sum over the shard"):
        trainer_of(loss).step(batches(1)[0])


# Together with other things


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mathematics_are_compared_without_them(compared: Compared, loss: LossOf) -> None:
    found = compared.step(Net(), loss, batches(1, dtype=torch.float64)[0])
    assert found["loss_difference"] < 1e-9
    assert found["gradient_difference"] < 1e-9
    assert not found["causes"]


def test_batch_norm_over_the_whole_batch_runs_once() -> None:
    found = []
    for devices in (1, 2):
        model = onefold.SyncBatchNorm.convert(Net())
        found.append(result(trainer_of(model=model, devices=devices), batches(2)))
    assert found[0] == found[1]


def test_averages_over_batch_norm_recompute_with_such_a_loss() -> None:
    trainer = trainer_of()
    trainer.average(decay=0.9)
    trainer.step(batches(1)[0])
    data = torch.utils.data.TensorDataset(*batches(1)[0])
    with trainer.averaged(update_bn=data, batch_size=SAMPLES):
        assert trainer.fingerprint()


def test_microbatch_finds_its_size_with_such_a_loss() -> None:
    trainer = trainer_of(microbatch="auto")
    assert float(trainer.step(batches(1)[0]).values["accuracy"]) <= 1


def test_the_example_of_the_documents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/concepts.md").read_text()
    (block,) = (b for b in text.split("```python\n")[1:] if "step.values" in b)
    function, _, use = block.split("```")[0].partition("\nstep = ")
    names: dict[str, Any] = {"F": F, "batch": batches(1)[0]}
    exec(function, names)
    names["trainer"] = trainer_of(names["loss"])
    exec(f"step = {use}", names)
    loss, accuracy, norm = map(float, capsys.readouterr().out.split())
    assert loss > 0
    assert norm > 0
    assert accuracy * SAMPLES == pytest.approx(round(accuracy * SAMPLES))

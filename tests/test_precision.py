"""Runs in each precision compute what was meant; see `tests.golden` for their bits."""

import copy
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.core.settings import PRECISIONS
from onefold.errors import CheckpointError, GradientError
from tests.inside import engine_in
from tests.small import Batch, make_trainer
from tests.tables import for_each

SAMPLES = 18
scaled = for_each("precision", ["fp16", "fp16-params"])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30), nn.GroupNorm(3, 30), nn.ReLU(), nn.LayerNorm(30), nn.Linear(30, 10)
    )


class Loss:
    """Cross-entropy; where it is spoilt, something else for the second shard."""

    def __init__(self, spoilt: float | None = None, *, itself: bool = False) -> None:
        self.spoilt = spoilt
        """Added to the gradient of the last bias, or to the loss itself."""
        self.itself = itself

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        if self.spoilt is not None and bool((batch[1] == 9).any()):
            total = model.get_parameter("4.bias").float().sum()
            zero = total - total.detach()
            if zero.requires_grad:
                zero.register_hook(lambda gradient: gradient * self.spoilt)
            losses = losses + (self.spoilt if self.itself else zero)
        return losses


def several(model: nn.Module, batch: Batch) -> onefold.LossTerms:
    losses = Loss(math.nan)(model, batch)
    return onefold.Mean(losses.sum(), len(losses)) + onefold.Mean(losses.sum() * 0, 1.0)


def batches(steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        labels = torch.randint(0, 9, (SAMPLES,), generator=generator)
        labels[6] = 9
        found.append((torch.randn(SAMPLES, 20, generator=generator), labels))
    return found


def trainer_of(
    precision: str | None,
    devices: int = 1,
    *,
    model: nn.Module | None = None,
    loss: Any = None,
    **options: Any,
) -> onefold.Trainer:
    model = model or net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    choices = {"optimizer": optimizer, "devices": devices, "precision": precision, **options}
    return make_trainer(model, loss or Loss(), **choices)


def test_precisions_give_other_bits_and_nearly_the_same_loss() -> None:
    losses: dict[float, list[str | None]] = {}
    for precision in (None, *PRECISIONS):
        trainer = trainer_of(precision)
        last = [float(trainer.step(batch).loss) for batch in batches(4)][-1]
        losses.setdefault(last, []).append(precision)
    # Autocast rounds the same values to what low parameters are.
    assert [*losses.values()] == [[None, "fp32"], ["bf16", "bf16-params"], ["fp16", "fp16-params"]]
    assert max(losses) - min(losses) < 0.02


@for_each("precision", ["bf16", "fp16", "bf16-params"])
def test_plain_pytorch_comes_to_nearly_the_same(precision: str) -> None:
    """Autocast and GradScaler with one batch as a whole."""
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    trainer = trainer_of(
        precision, model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), clip_norm=1.0
    )
    for batch in batches(20):
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(plain(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        # The script may have autocast on around its loop.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            ours = trainer.step(batch)
    assert float(ours.loss) == pytest.approx(float(loss.detach()), rel=0.02)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.float(), theirs, atol=0.01)


def test_gradients_are_added_up_in_float32() -> None:
    """Of a model that is all in bfloat16, by its user: their sum is that of float32."""
    model = nn.Linear(30, 30).bfloat16()
    batch = torch.randn(64, 30, dtype=torch.bfloat16)
    sums = [torch.zeros(()), torch.zeros(())]
    for shard in batch.chunk(8):
        one = copy.deepcopy(model)
        (one(shard).float().square().sum() / 64).backward()
        grads = [p.grad.float() for p in one.parameters() if p.grad is not None]
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
    loss = lambda m, x: m(x[0]).float().square().sum(dim=1)  # noqa: E731
    found = make_trainer(model, loss, shards=8, devices=2).step((batch,)).grad_norm
    assert found == pytest.approx(float(torch.nn.utils.get_total_norm(sums)), rel=1e-6)


def test_models_hold_low_precision_and_small_updates_are_not_lost() -> None:
    """Each is below the precision of bfloat16 at 1, as is what the model begins with."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.003)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    choices = {"optimizer": optimizer, "shards": 2, "loss": lambda m, x: m(x[0]).mean(dim=1)}
    trainer = trainer_of("bf16-params", 2, model=model, **choices)
    assert (model.weight.dtype, float(model.weight.detach())) == (torch.bfloat16, 1.0)
    for _ in range(20):
        trainer.step((torch.ones(2, 1),))
    assert float(model.weight.detach()) == float(torch.tensor(0.983).bfloat16())
    normalized = trainer_of("fp16-params").model.named_parameters()
    kept = {name for name, p in normalized if p.dtype != torch.half}
    assert kept == {"1.weight", "1.bias", "3.weight", "3.bias"}


@for_each("devices", [1, 2])
@for_each("change", [onefold.Trainer.modifying, nullcontext])
def test_what_is_changed_between_steps_reaches_the_exact_values(
    change: Callable[[onefold.Trainer], AbstractContextManager[Any]], devices: int, tmp_path: Path
) -> None:
    first, second = trainer_of("bf16-params", devices), trainer_of("bf16-params", 3)
    first.step(batches(1)[0])
    # A process that has all devices may do so at any time.
    with change(first), torch.no_grad():
        first.model.get_parameter("4.bias").fill_(3.0)
    first.save(tmp_path)
    second.load(tmp_path)
    for trainer in (first, second):
        trainer.step(batches(2)[1])
        assert bool((trainer.model.get_parameter("4.bias") > 2.9).all())
    assert first.fingerprint() == second.fingerprint()


def test_another_precision_is_refused_and_may_be_chosen(tmp_path: Path) -> None:
    first = trainer_of("bf16")
    first.step(batches(1)[0])
    first.save(tmp_path)
    second = trainer_of("fp16")
    with pytest.raises(CheckpointError, match="precision bf16, but this run has fp16"):
        second.load(tmp_path)
    second.load(tmp_path, allow_changed={"precision"})
    assert engine_in(second).rules.loss_scale == 2.0**16
    assert second.fingerprint() == first.fingerprint()
    with pytest.raises(CheckpointError, match="precision 'bf16', but this run has"):
        trainer_of("bf16-params").load(tmp_path, allow_changed={"precision"})


@scaled
@for_each("devices", [1, 3])
def test_an_overflow_in_one_shard_is_a_skipped_step_everywhere(
    precision: str, devices: int, tmp_path: Path
) -> None:
    loss, steps = Loss(), batches(3)
    optimizer = torch.optim.AdamW((model := net()).parameters(), lr=1e-3)
    trainer = trainer_of(precision, devices, model=model, optimizer=optimizer, loss=loss)
    trainer.step(steps[0])
    before = trainer.fingerprint()
    # Without a scale it is finite in float32; with 65536 it is not.
    loss.spoilt = 1e36
    assert "overflowed with losses scaled by 65536" in trainer.step(steps[1]).skipped
    assert trainer.fingerprint() == before
    with trainer.modifying(optimizer_state=True):
        assert {float(optimizer.state[p]["step"]) for p in model.parameters()} == {1.0}
    trainer.save(tmp_path)
    second = trainer_of(precision, 2)
    second.load(tmp_path)
    loss.spoilt = None
    for each in (trainer, second):
        assert each.step(steps[2]).skipped == ""
        assert engine_in(each).rules.loss_scale == 2.0**15
    assert engine_in(second).rules.scale == engine_in(trainer).rules.scale
    assert trainer.fingerprint() == second.fingerprint() != before


@for_each("devices", [1, 2])
@for_each("loss", [Loss(math.inf), Loss(math.nan), several])
def test_a_gradient_that_is_not_finite_is_named(devices: int, loss: Any) -> None:
    trainer = trainer_of(None, devices, loss=loss)
    before = trainer.fingerprint()
    words = r"step 1, shard 1 \(samples 5 to 9 of the batch\): the gradient of 4.bias is not fin"
    with pytest.raises(GradientError, match=words):
        trainer.step(batches(1)[0])
    assert trainer.fingerprint() == before


@for_each("precision", [None, "bf16"])
def test_steps_that_are_not_finite_may_be_skipped(precision: str | None) -> None:
    loss = Loss(math.nan)
    trainer = trainer_of(precision, 2, loss=loss, on_nonfinite="skip")
    before = trainer.fingerprint()
    assert trainer.step(batches(1)[0]).skipped == "the gradient of step 1 is not finite"
    loss.itself = True
    _, spoilt, _ = trainer.loader(TensorDataset(*batches(1)[0]), batch_size=6)
    skipped = trainer.step(spoilt).skipped
    assert re.search(r"step 2, shard 0 .*samples 0 to 1 .*, which are 6, 7 of the data se", skipped)
    assert trainer.fingerprint() == before
    loss.spoilt = None
    step = trainer.step(batches(1)[0])
    assert (step.skipped, step.number) == ("", 3)


@for_each(
    ("precision", "options", "words"),
    [
        ("half", {}, 'precision must be one of "fp32", "bf16", .*but got .half'),
        (None, {"on_nonfinite": "ignore"}, 'on_nonfinite must be one of "raise",'),
        (None, {"clip_value": -1.0}, "clip_value must be greater than 0"),
        (
            "bf16",
            {"model": nn.Linear(20, 10).bfloat16()},
            "requires float32 parameters, but weight is torch.bfl",
        ),
    ],
)
def test_what_is_not_known_is_refused(
    precision: str | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_of(precision, **options)

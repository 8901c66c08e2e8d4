"""Runs in each precision: one result for any number of devices, and the one that was meant."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.precision import PRECISIONS
from onefold.errors import CheckpointError, GradientError, LossError
from tests.inside import engine_in
from tests.tables import for_each

Batch = tuple[torch.Tensor, torch.Tensor]
SAMPLES = 18

each_precision = for_each("precision", PRECISIONS)
scaled = for_each("precision", ["fp16", "fp16-params"])


class Net(nn.Module):
    """Convolution, both kinds of normalisation, dropout, and a layer of several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(8)
        self.layer_norm = nn.LayerNorm(8 * 49)
        self.hidden = nn.Linear(8 * 49, 100)
        self.out = nn.Linear(100, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = F.max_pool2d(self.batch_norm(self.conv(images)).relu(), 2).flatten(1)
        hidden = self.hidden(self.layer_norm(found)).relu()
        return self.out(F.dropout(hidden, 0.1, self.training))


class Spoilt(torch.autograd.Function):
    """Zero, with a gradient of choice."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, ctx.shape = factor, values.shape
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient * ctx.factor).expand(ctx.shape), None


class Loss:
    """Cross-entropy; where it is spoilt, something else for the second shard."""

    def __init__(self, spoilt: float | None = None) -> None:
        self.spoilt = spoilt
        """Added to the gradient of its last layer."""
        self.loss_too = False
        """Or to the loss itself."""

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images, labels = batch
        losses = F.cross_entropy(model(images), labels, reduction="none")
        if self.spoilt is not None and bool((labels == 9).any()):
            spoilt = Spoilt.apply(model.get_parameter("out.bias").float(), self.spoilt)
            losses = losses + (self.spoilt if self.loss_too else spoilt)
        return losses


def batches(steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        labels = torch.randint(0, 9, (SAMPLES,), generator=generator)
        labels[6] = 9
        found.append((torch.randn(SAMPLES, 1, 14, 14, generator=generator), labels))
    return found


def trainer_of(
    precision: str | None,
    devices: int = 1,
    *,
    model: nn.Module | None = None,
    loss: Any = None,
    shards: int = 4,
    **options: Any,
) -> onefold.Trainer:
    torch.manual_seed(0)
    model = model or Net()
    return onefold.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss or Loss(),
        shards=shards,
        precision=precision,
        devices=["cpu"] * devices,
        threads=1,
        **options,
    )


def result(trainer: onefold.Trainer, steps: Sequence[Batch]) -> tuple[str, str]:
    last = [trainer.step(batch) for batch in steps][-1]
    assert math.isfinite(last.grad_norm)
    return trainer.fingerprint(), float(last.loss).hex()


@each_precision
@for_each("options", [{}, {"clip_norm": 0.5, "clip_value": 0.01}])
def test_the_bits_do_not_depend_on_the_devices(precision: str, options: dict[str, Any]) -> None:
    steps = batches(4)
    found = {result(trainer_of(precision, devices, **options), steps) for devices in (1, 2, 3)}
    found.add(result(trainer_of(precision, 3, plan=(0, 3, 1), **options), steps))
    assert len(found) == 1


def test_precisions_give_other_bits_and_nearly_the_same_loss() -> None:
    steps = batches(4)
    losses = {p: float.fromhex(result(trainer_of(p), steps)[1]) for p in (None, *PRECISIONS)}
    assert losses["fp32"] == losses[None]
    # Autocast rounds the same values to what low parameters are.
    assert losses["bf16"] == losses["bf16-params"]
    assert losses["fp16"] == losses["fp16-params"]
    assert len(set(losses.values())) == 3
    assert all(abs(loss - losses["fp32"]) < 0.02 for loss in losses.values())


@each_precision
def test_a_stopped_run_goes_on_with_the_same_bits(precision: str, tmp_path: Path) -> None:
    steps = batches(5)
    whole = result(trainer_of(precision), steps)
    first = trainer_of(precision, 3)
    for batch in steps[:2]:
        first.step(batch)
    first.save(tmp_path)
    second = trainer_of(precision, 2)
    second.load(tmp_path)
    assert result(second, steps[2:]) == whole


def test_another_precision_is_refused_and_may_be_chosen(tmp_path: Path) -> None:
    first = trainer_of("bf16")
    first.step(batches(1)[0])
    first.save(tmp_path)
    second = trainer_of("fp16")
    with pytest.raises(CheckpointError, match="precision bf16, this run has fp16"):
        second.load(tmp_path)
    second.load(tmp_path, changed={"precision"})
    assert engine_in(second).rules.loss_scale == 2.0**16
    assert second.fingerprint() == first.fingerprint()


@for_each("precisions", [("bf16", "bf16-params"), ("fp16-params", "bf16-params")])
def test_parameters_of_another_dtype_are_refused_by_name(
    precisions: tuple[str, str], tmp_path: Path
) -> None:
    first, second = map(trainer_of, precisions)
    first.save(tmp_path)
    with pytest.raises(CheckpointError, match=f"precision '{precisions[0]}', this run has"):
        second.load(tmp_path, changed={"precision"})


def test_what_one_device_changes_by_itself_is_in_the_checkpoint(tmp_path: Path) -> None:
    first = trainer_of("bf16-params")
    first.step(batches(1)[0])
    with torch.no_grad():
        first.model.get_parameter("out.bias").fill_(2.0)
    first.save(tmp_path)
    found = set()
    for devices in (1, 2):
        trainer = trainer_of("bf16-params", devices)
        trainer.load(tmp_path)
        found.add(result(trainer, batches(2)[1:]))
        assert bool((trainer.model.get_parameter("out.bias") > 1.9).all())
    assert len(found) == 1


@for_each("precision", [None, "bf16", "fp16", "fp16-params"])
def test_the_norm_of_one_shard_is_that_of_its_gradient(precision: str | None) -> None:
    """Also where backward gives strides of its own, as to a convolution of 1 x 1."""
    torch.manual_seed(0)
    model = nn.Conv2d(200, 200, 1)
    images = torch.randn(4, 200, 5, 5).to(memory_format=torch.channels_last)

    def loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).float().square().mean(dim=(1, 2, 3))

    plain = copy.deepcopy(model)
    loss(plain, (images,)).mean().backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    before = model.weight.detach().clone()
    trainer = onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss,
        shards=1,
        precision=precision,
        clip_norm=expected / 10,
    )
    assert trainer.step((images,)).grad_norm == pytest.approx(expected, rel=0.02)
    moved = float((model.weight.detach().float() - before).norm())
    assert moved == pytest.approx(expected / 10, rel=0.1)


def test_large_gradients_are_finite() -> None:
    """Their squares are not, in float32."""
    model = nn.Linear(3, 1)
    for shards in (1, 2):
        made = copy.deepcopy(model)
        trainer = onefold.Trainer(
            made,
            torch.optim.Adam(made.parameters(), lr=0.1),
            lambda m, b: m(b[0]).mean(dim=1) * 1e25,
            shards=shards,
        )
        assert trainer.step((torch.ones(4, 3),)).grad_norm == pytest.approx(2e25, rel=1e-6)


@for_each("precision", ["bf16-params", "fp16-params"])
def test_transformers_and_norms_at_the_head_run(precision: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    head = [nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 1)]
    model = nn.Sequential(nn.LayerNorm(16), layer, *head)
    trainer = onefold.Trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda m, b: m(b[0]).float().square(),
        shards=2,
        precision=precision,
    )
    batch = (torch.randn(6, 4, 16),)
    # The first scales may be too large.
    assert not all(trainer.step(batch).skipped for _ in range(6))


def test_a_loss_of_several_terms_is_named_as_well() -> None:
    def loss(model: nn.Module, batch: Batch) -> object:
        images, labels = batch
        losses = Loss(float("nan"))(model, batch)
        return onefold.Mean(losses.sum(), len(labels)) + onefold.Mean(images.sum() * 0, 1.0)

    trainer = trainer_of(None, 2, loss=loss)
    with pytest.raises(GradientError, match=r"shard 1 .*: the gradient of out.bias is not finite"):
        trainer.step(batches(1)[0])


def test_autocast_around_the_loop_keeps_no_weights() -> None:
    steps = batches(3)
    plain = result(trainer_of("bf16"), steps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert result(trainer_of("bf16"), steps) == plain


@for_each("precision", ["bf16-params", "fp16-params"])
def test_models_hold_low_precision_and_the_optimizer_float32(precision: str) -> None:
    trainer = trainer_of(precision, 2)
    low = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    kept = {name for name, p in trainer.model.named_parameters() if p.dtype == torch.float32}
    norms = ("batch_norm", "layer_norm")
    assert kept == {f"{norm}.{name}" for norm in norms for name in ("weight", "bias")}
    assert trainer.model.get_parameter("hidden.weight").dtype == low
    trainer.step(batches(1)[0])
    for item in engine_in(trainer).update.owned:
        state = engine_in(trainer).update.state[item.values]
        assert state["exp_avg"].dtype == item.values.dtype == torch.float32
        if item.shown is not None:
            assert torch.equal(item.values.data.to(low), item.shown)


def test_masters_begin_as_the_users_own_values() -> None:
    model = Net()
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_of("bf16-params", 2, model=model)
    names = list(engine_in(trainer).replicas[0].parts.trained)
    for item in engine_in(trainer).update.owned:
        whole = exact[names[item.piece.entry]].flatten()
        assert torch.equal(item.values.flatten(), whole[item.piece.start : item.piece.stop])


def test_small_updates_are_not_lost() -> None:
    """Each is below the precision of bfloat16 at 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    trainer = onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        lambda m, x: m(x[0]).mean(dim=1),
        shards=1,
        precision="bf16-params",
    )
    for _ in range(20):
        trainer.step((torch.ones(2, 1),))
    assert float(model.weight.detach()) == float(torch.tensor(0.98).bfloat16())


def test_what_is_changed_between_steps_reaches_the_masters() -> None:
    trainer = trainer_of("bf16-params", 2)
    trainer.step(batches(1)[0])
    with trainer.changing(), torch.no_grad():
        trainer.model.get_parameter("out.bias").fill_(3.0)
    trainer.step(batches(2)[1])
    assert bool((trainer.model.get_parameter("out.bias") > 2.9).all())


def test_gradients_are_added_up_in_float32() -> None:
    """Of a model that is all in bfloat16, by its user: their sum is that of float32."""
    torch.manual_seed(0)
    model = nn.Linear(30, 30).bfloat16()
    batch = torch.randn(64, 30, dtype=torch.bfloat16)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for shard in batch.chunk(8):
        one = copy.deepcopy(model)
        (one(shard).float().square().sum() / 64).backward()
        for name, parameter in one.named_parameters():
            sums[name] += parameter.grad.float()
    trainer = onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, x: m(x[0]).float().square().sum(dim=1),
        shards=8,
        devices=["cpu"] * 2,
        threads=1,
    )
    norm = trainer.step((batch,)).grad_norm
    expected = math.sqrt(sum(float(each.double().square().sum()) for each in sums.values()))
    assert norm == pytest.approx(expected, rel=1e-6)


@scaled
@for_each("devices", [1, 3])
def test_an_overflow_in_one_shard_is_a_skipped_step_everywhere(
    precision: str, devices: int
) -> None:
    loss = Loss()
    trainer = trainer_of(precision, devices, loss=loss)
    steps = batches(3)
    trainer.step(steps[0])
    before = trainer.fingerprint()
    # Without a scale it is finite in float32; with 65536 it is not.
    loss.spoilt = 1e36
    step = trainer.step(steps[1])
    assert "overflowed with losses scaled by 65536" in step.skipped
    assert trainer.fingerprint() == before
    with trainer.changing(optimizer_state=True):
        counts = [s["step"] for s in engine_in(trainer).update.optimizer.state.values()]
    assert counts
    assert all(float(count) == 1.0 for count in counts)
    loss.spoilt = None
    assert trainer.step(steps[2]).skipped == ""
    assert engine_in(trainer).rules.loss_scale == 2.0**15


@scaled
def test_the_scale_is_part_of_a_checkpoint(precision: str, tmp_path: Path) -> None:
    loss = Loss(1e36)
    first = trainer_of(precision, loss=loss)
    assert first.step(batches(1)[0]).skipped
    loss.spoilt = None
    first.step(batches(1)[0])
    first.save(tmp_path)
    second = trainer_of(precision, 2)
    second.load(tmp_path)
    assert engine_in(second).rules.scale == engine_in(first).rules.scale
    assert engine_in(second).rules.loss_scale == 2.0**15


@for_each("devices", [1, 2])
@for_each("spoilt", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_named(devices: int, spoilt: float) -> None:
    trainer = trainer_of(None, devices, loss=Loss(spoilt))
    before = trainer.fingerprint()
    words = r"step 1, shard 1 \(samples 5 to 9 of the batch\): the gradient of out.bias is not fin"
    with pytest.raises(GradientError, match=words):
        trainer.step(batches(1)[0])
    assert trainer.fingerprint() == before


@for_each("precision", [None, "bf16"])
def test_steps_that_are_not_finite_may_be_skipped(precision: str | None) -> None:
    loss = Loss(float("nan"))
    trainer = trainer_of(precision, 2, loss=loss, on_nonfinite="skip")
    before = trainer.fingerprint()
    assert trainer.step(batches(1)[0]).skipped == "the gradient of step 1 is not finite"
    loss.loss_too = True
    assert "the loss of step 2, shard 1 is nan" in trainer.step(batches(1)[0]).skipped
    assert trainer.fingerprint() == before
    loss.spoilt = None
    assert trainer.step(batches(1)[0]).skipped == ""
    assert trainer.steps == 3


def test_samples_of_a_data_set_are_named_by_number() -> None:
    images, labels = batches(1)[0]
    loss = Loss(float("nan"))
    loss.loss_too = True
    trainer = trainer_of(None, loss=loss)
    data = torch.utils.data.TensorDataset(images, labels)
    first, second, _ = trainer.loader(data, batch_size=6)
    trainer.step(first)
    with pytest.raises(LossError, match=r"samples 0 to 1 .*, which are 6, 7 of the data set"):
        trainer.step(second)


@for_each("shards", [1, 4])
def test_the_norm_of_a_step_is_that_of_plain_pytorch(shards: int) -> None:
    images, labels = batches(1)[0]
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 10))
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(images), labels).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    step = trainer_of(None, 1, model=model, shards=shards).step((images, labels))
    assert step.grad_norm == pytest.approx(norm, rel=1e-6)


@for_each("precision", ["bf16", "fp16", "bf16-params"])
def test_plain_pytorch_comes_to_nearly_the_same(precision: str) -> None:
    """Autocast and GradScaler with one batch as a whole, over 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 50), nn.ReLU(), nn.Linear(50, 10))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    trainer = trainer_of(precision, model=model, clip_norm=1.0)
    steps = batches(20)
    for images, labels in steps:
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(plain(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ours = trainer.step((images, labels))
    assert float(ours.loss) == pytest.approx(float(loss.detach()), rel=0.02)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.float(), theirs, atol=0.01)


def test_evaluation_computes_in_the_runs_precision() -> None:
    seen: list[torch.dtype] = []

    def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        found = model(batch[0])
        seen.append(found.dtype)
        return {"loss": F.cross_entropy(found, batch[1], reduction="none")}

    data = torch.utils.data.TensorDataset(*batches(1)[0])
    trainer_of("bf16").evaluate(score, data, batch_size=9)
    trainer_of(None).evaluate(score, data, batch_size=9)
    half = len(seen) // 2
    assert set(seen[:half]) == {torch.bfloat16}
    assert set(seen[half:]) == {torch.float32}


@for_each(
    ("options", "words"),
    [
        ({"precision": "half"}, 'expected precision to be one of "fp32", "bf16", .*got half'),
        ({"precision": None, "on_nonfinite": "ignore"}, 'expected on_nonfinite to be "raise" or'),
        ({"precision": None, "clip_value": -1.0}, "expected clip_value to be more than 0"),
    ],
)
def test_what_is_not_known_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_of(options.pop("precision"), **options)


def test_a_model_that_is_in_low_precision_already_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 10)).bfloat16()
    with pytest.raises(ValueError, match=r'precision="bf16": expected .* got 1.weight in torch.b'):
        trainer_of("bf16", model=model)

"""Every precision: the same bits on any number of devices of a card, and the intended loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onefold.core.precision import PRECISIONS
from tests.gpu.device import DEVICE, each, raises
from tests.gpu.net import Net, Spoilt, adamw, batches, result, trainer_of

CHOICES: list[dict[str, Any]] = [{}, {"clip_norm": 0.5, "clip_value": 0.01}]


@each("precision", PRECISIONS)
@each("options", CHOICES)
def test_the_bits_do_not_depend_on_the_devices(precision: str, options: dict[str, Any]) -> None:
    steps = batches(4)
    options = {"precision": precision, **options}
    found = {result(trainer_of(devices, **options), steps) for devices in (1, 2, 3)}
    found.add(result(trainer_of(3, plan=(0, 3, 1), **options), steps))
    assert len(found) == 1, found


@each("precision", PRECISIONS)
def test_the_loss_is_nearly_that_of_full_precision(precision: str) -> None:
    steps = batches(4)
    full, low = (
        float.fromhex(result(trainer_of(precision=p), steps)[1]) for p in ("fp32", precision)
    )
    assert abs(full - low) < 0.02, (full, low)


@each("precision", [None, "bf16", "fp16"])
def test_one_shard_is_a_plain_loop_but_for_rounding(precision: str | None) -> None:
    """Without dropout, whose seeds are onefold's own."""
    steps = batches(5, device=DEVICE)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    torch.manual_seed(0)
    plain = Net().to(DEVICE)
    optimizer = adamw(plain)
    expected = []
    for images, labels in steps:
        optimizer.zero_grad()
        with torch.autocast(torch.device(DEVICE).type, dtype=low, enabled=low is not None):
            loss = F.cross_entropy(_without_dropout(plain, images), labels)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))

    def loss_of(model: Net, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = _without_dropout(model, batch[0])
        return F.cross_entropy(logits, batch[1], reduction="none")

    trainer = trainer_of(shards=1, loss=loss_of, precision=precision)
    found = [float(trainer.step(batch).loss) for batch in steps]
    tolerance = 2e-3 if low is None else 3e-2
    pairs = zip(found, expected, strict=True)
    assert all(abs(one - other) < tolerance for one, other in pairs), (found, expected)


@each("precision", ["fp16", "fp16-params"])
@each("devices", [1, 2])
def test_an_overflow_in_one_shard_is_a_skipped_step(precision: str, devices: int) -> None:
    loss = Spoilt(1e36)
    trainer = trainer_of(devices, precision=precision, loss=loss)
    steps = batches(3)
    trainer.step(steps[0])
    before, loss.on = trainer.fingerprint(), True
    assert "overflow" in trainer.step(steps[1]).skipped
    assert trainer.fingerprint() == before
    loss.on = False
    assert not trainer.step(steps[2]).skipped
    assert trainer.fingerprint() != before


def test_a_model_that_is_low_already_is_refused() -> None:
    with raises(ValueError, "float32"):
        trainer_of(model=Net().to(torch.bfloat16), precision="bf16")


def _without_dropout(model: Net, images: torch.Tensor) -> torch.Tensor:
    found = F.max_pool2d(model.batch_norm(model.conv(images)).relu(), 2).flatten(1)
    return model.out(model.hidden(model.layer_norm(found)).relu())

"""Where a step's time goes, by the card's own clock."""

import logging
import time
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F

from onefold.watch.limits import LAUNCH_STEPS
from tests.gpu.device import DEVICE, ON_GPU, each, needs
from tests.gpu.net import Batch, batches, trainer_of


@each("devices", [1, 2])
def test_the_phases_add_up_to_no_more_than_the_step(devices: int) -> None:
    trainer = trainer_of(devices)
    kept = []
    for batch in batches(10):
        start = time.perf_counter()
        step = trainer.step(batch)
        seconds = step.seconds
        wall = time.perf_counter() - start
        kept.append(step)
        if step.number > 5:
            phases = [seconds.data, seconds.forward, seconds.backward, seconds.exchange]
            assert all(phase >= 0 for phase in (*phases, seconds.update))
            assert min(seconds.forward, seconds.backward, seconds.update) > 0
            # Another clock on a card, and phases of its first device alone.
            assert sum(phases) + seconds.update < wall * 1.2 + 1e-3, (phases, wall)
    # They may be asked for long after.
    assert all(step.seconds.backward > 0 for step in kept)


@each("precision", [None, "fp16"])
@each("shards", [1, 2])
def test_a_card_that_has_done_all_that_was_launched_is_named(
    precision: str | None, shards: int
) -> None:
    needs(ON_GPU, "a GPU")
    trainer = trainer_of(shards=shards, precision=precision)
    with (
        mock.patch("onefold.watch.limits.is_past", return_value=True),
        mock.patch.object(logging.getLogger("onefold"), "warning") as warning,
    ):
        for batch in batches(LAUNCH_STEPS + 5):
            step = trainer.step(batch)
    assert step.seconds.launch > 0
    # How much of this small step the launches take is left open.
    whole = replace(step.seconds, launch=1.0)
    assert whole.limit.startswith("limited by the host: launches take ")
    found = [call for call in warning.mock_calls if "waits for the host" in str(call)]
    assert len(found) == (1 if shards > 1 else 0)


def test_a_card_that_is_behind_is_not_named_even_if_a_loss_waits_for_it() -> None:
    """On a card with real times the model is too small for that."""
    needs(DEVICE.startswith("pretend"), "a pretended device")
    trainer = trainer_of(shards=2, loss=waiting)
    with mock.patch.object(logging.getLogger("onefold"), "warning") as warning:
        for batch in batches(LAUNCH_STEPS + 5):
            step = trainer.step(batch)
    assert "waits for the host" not in str(warning.mock_calls)
    assert (step.seconds.launch, step.seconds.limit) == (0.0, "")


def waiting(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    assert losses.sum().item() > 0
    return losses

"""Runs that are saved on a card go on there, and elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from onefold.core.precision import PRECISIONS
from tests.gpu.device import DEVICE, each
from tests.gpu.net import adamw, batches, result, trainer_of


@each("precision", PRECISIONS)
@each("counts", [(3, 2), (1, 3)])
def test_a_stopped_run_goes_on_with_the_same_bits(
    precision: str, counts: tuple[int, int], tmp_path: Path
) -> None:
    steps = batches(5)
    whole = result(trainer_of(precision=precision), steps)
    first = trainer_of(counts[0], precision=precision)
    for batch in steps[:2]:
        first.step(batch)
    first.save(tmp_path)
    second = trainer_of(counts[1], precision=precision)
    second.load(tmp_path)
    assert result(second, steps[2:]) == whole


@each("fused", [False, True])
@each("places", [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_a_checkpoint_knows_no_kind_of_device(
    fused: bool, places: tuple[str, str], tmp_path: Path
) -> None:
    optimizer = partial(adamw, fused=fused)

    first = trainer_of(2, on=places[0], optimizer=optimizer)
    steps = batches(3)
    for batch in steps[:2]:
        first.step(batch)
    first.save(tmp_path, wait=False)
    told = first.step(steps[2])
    first.close()
    second = trainer_of(on=places[1], optimizer=optimizer)
    assert second.load(tmp_path).step == 2
    again = second.step(steps[2])
    # Other kernels, so other bits; and dropout draws other numbers on another kind of device.
    assert abs(float(again.loss) - float(told.loss)) < 0.5


def test_a_save_waits_for_the_step_and_training_goes_on_beside_it(tmp_path: Path) -> None:
    trainer = trainer_of(2)
    steps = batches(6)
    at = {}
    for batch in steps:
        number = trainer.step(batch).number
        at[number] = trainer.fingerprint()
        trainer.save(tmp_path, wait=False)
    trainer.close()
    again = trainer_of()
    assert again.load(tmp_path).step == 6
    assert again.fingerprint() == at[6]

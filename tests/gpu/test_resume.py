"""Runs that are saved on a card go on there, and elsewhere."""

from functools import partial
from pathlib import Path
from typing import Any

from onefold import Record
from onefold.core.settings import PRECISIONS
from onefold.record.entries import StepEntry
from tests.gpu.device import DEVICE, each
from tests.gpu.net import adamw, batches, keeping, result, trained, trainer_of

WAYS = [
    *((precision, ("replicate", 3), ("replicate", 2)) for precision in PRECISIONS),
    *(("fp32", ("replicate", 1), ("replicate", 3)), ("bf16", ("replicate", 1), ("replicate", 3))),
    *(
        ("fp32", ("replicate", 1), ("offload", 1)),
        ("bf16-params", ("offload", 1), ("replicate", 1)),
    ),
    *(("fp32", ("offload", 1), ("offload", 1)), ("bf16-params", ("replicate", 2), ("offload", 1))),
]


@each("way", WAYS)
def test_a_stopped_run_goes_on_with_the_same_bits(way: Any, tmp_path: Path) -> None:
    precision, (placement, devices), (keep_after, devices_after) = way
    steps = batches(5)
    with keeping("replicate"):
        whole = trained(steps, precision=precision)
    with keeping(placement):
        first = trainer_of(devices, precision=precision)
        for batch in steps[:2]:
            first.step(batch)
        first.save(tmp_path)
        first.close()
    with keeping(keep_after):
        second = trainer_of(devices_after, precision=precision)
        second.load(tmp_path)
        assert result(second, steps[2:]) == whole
        second.close()


@each("fused", [False, True])
@each("places", [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_a_checkpoint_knows_no_kind_of_device(
    fused: bool, places: tuple[str, str], tmp_path: Path
) -> None:
    """Training goes on beside a save."""
    optimizer = partial(adamw, fused=fused)
    first = trainer_of(2, on=places[0], optimizer=optimizer)
    steps, at = batches(3), {}
    for batch in steps[:2]:
        number = first.step(batch).number
        at[number] = first.fingerprint()
        first.save(tmp_path, wait=False)
    told = first.step(steps[2])
    first.close()
    second = trainer_of(on=places[1], optimizer=optimizer)
    assert second.load(tmp_path).step == 2
    assert second.fingerprint() == at[2]
    again = second.step(steps[2])
    # Other kernels, so other bits; and dropout draws other numbers on another kind of device.
    assert abs(float(again.loss) - float(told.loss)) < 0.5


def test_a_record_knows_no_number_of_devices(tmp_path: Path) -> None:
    """Nor do digests of gradients, which the card computes in its own way."""
    found = []
    for devices in (1, 2, 3):
        folder = tmp_path / str(devices)
        folder.mkdir()
        trainer = trainer_of(devices)
        trainer.record(folder)
        losses = [float(trainer.step(batch).loss) for batch in batches(4)]
        trainer.close()
        record = Record(folder)
        assert record.steps["loss"].tolist() == losses
        assert (record.shards["digest"] != 0).all()
        found.append([each for each in record.entries if isinstance(each, StepEntry)])
    assert found[0] == found[1] == found[2]

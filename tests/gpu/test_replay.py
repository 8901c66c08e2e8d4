"""A step that a card computed is computed once more on it, on another number of devices, with the
bits of its record; and the sample that spoilt it is named."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import TensorDataset

from onefold.errors import OnefoldError
from onefold.record import FILE
from onefold.record.findings import Findings, Inspection
from tests.gpu.device import each
from tests.gpu.net import batches, keeping, trainer_of

SHARDS, BATCH = 4, 12


def run(devices: int, precision: str | None, spoil: int | None) -> None:
    """Train for two epochs of three steps on data of which one sample may be no number."""
    images, labels = batches(1, 3 * BATCH)[0]
    if spoil is not None:
        images[spoil] = torch.nan
    trainer = trainer_of(devices, shards=SHARDS, precision=precision)
    loader = trainer.loader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(batch)
    trainer.close()


def look(folder: Path, step: int, placement: str, devices: int, *rest: Any) -> Findings:
    found = folder / "found"
    asked = Inspection(record=str(folder / FILE), step=step, findings=str(found))
    tools = {"inspection": msgspec.to_builtins(asked)}
    with keeping(placement, tools=tools), suppress(SystemExit):
        run(devices, *rest)
    return msgspec.json.decode(found.read_bytes(), type=Findings)


@each("precision", [None, "bf16", "fp16"])
@each("way", [(1, "replicate", 2), (3, "replicate", 1), (2, "offload", 1)])
def test_a_step_has_the_bits_of_its_record(
    precision: str | None, way: tuple[int, str, int], tmp_path: Path
) -> None:
    devices, placement, devices_after = way
    with keeping("replicate", record=str(tmp_path)):
        run(devices, precision, None)
    found = look(tmp_path, 5, placement, devices_after, precision, None)
    assert (found.compared, found.differs) == (5 * SHARDS, [])
    assert [each.shard for each in found.shards] == list(range(SHARDS))
    assert all(each.equal for each in found.shards)


def test_the_sample_that_is_no_number_is_named(tmp_path: Path) -> None:
    spoilt = 20
    with keeping("replicate", record=str(tmp_path)), suppress(OnefoldError):
        run(1, None, spoilt)
    for step in (1, 2, 3):
        found = look(tmp_path, step, "replicate", 2, None, spoilt)
        if found.loss is None:
            break
    samples = [one for shard in found.shards for one in shard.samples if not one.finite]
    assert [one.number for one in samples] == [spoilt], found

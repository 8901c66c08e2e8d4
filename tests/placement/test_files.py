"""Checkpoints of devices that keep partitions: the same files, and never all at once."""

import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from onefold.core.options import RunOptions
from onefold.errors import PeerFailed, StateError
from onefold.testing import outcomes
from tests.inside import engine_in
from tests.placement.partitioned import Layered, run, samples, trained, trainer_of, watched
from tests.tables import for_each, some

PARTITIONED = RunOptions(placement="partition", exchange="collective")
FEATURES_OF_WIDE, WIDTH = 5, 5000
WIDEST_BYTES = 4 * WIDTH * (FEATURES_OF_WIDE + 1) + 2 * 256  # what is between them included
OF_ONE_RUN = ("sha256", "run", "time", "devices", "serial", "threads")
"""What may differ between two runs in their records."""


class Odd(Layered):
    """With other strides, a single number, a layer that is never used, and several segments."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.number = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 4)
        self.wide = nn.Linear(FEATURES_OF_WIDE, WIDTH)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("passing", torch.arange(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.image(x[:, :12].reshape(-1, 3, 2, 2)).flatten(1)
        wide = self.wide(image).square().mean(dim=1, keepdim=True)
        return super().forward(self.norm(x)) * self.number + wide


def files_of(folder: str | Path) -> dict[str, Any]:
    record = json.loads((Path(folder) / "run.json").read_text())
    kept = {key: value for key, value in record.items() if key not in OF_ONE_RUN}
    # As text: the order of the keys counts as well.
    return {"run": json.dumps(kept)} | {
        path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")
    }


def saved(directory: str, settings: dict[str, Any], average: bool) -> tuple[str, str, int, int]:
    """Train, save and go on; the folder, the fingerprint, and what of the model was there."""
    trainer = trained(Odd, **settings)
    if average:
        trainer.average(decay=0.5)
        trainer.step(samples())
    with watched(trainer) as found:
        folder = trainer.save(directory, extra={"a": 1}, scores={"loss": 2.0})
    trainer.step(samples())
    return str(folder), trainer.fingerprint(), found.whole, found.most_bytes


def resumed(directory: str, settings: dict[str, Any]) -> tuple[str, int]:
    trainer = trainer_of(Odd, **settings)
    with trainer.modifying(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    with watched(trainer) as found:
        loaded = trainer.load(directory)
    trainer.step(samples())
    assert loaded.extra == {"a": 1}
    return trainer.fingerprint(), found.whole


@for_each(
    ("settings", "average", "devices", "goes_on"),
    some(
        [
            ({}, True, 2, ("replicate", "partition")),
            ({}, False, 3, ("partition", "replicate")),
            ({"precision": "bf16-params"}, False, 2, ("partition", "partition")),
        ],
        2,
    ),
)
def test_the_files_are_those_of_devices_with_all(
    settings: dict[str, Any], average: bool, devices: int, goes_on: tuple[str, str], tmp_path: Path
) -> None:
    given = (settings, average)
    all_of_it = run(
        saved, str(tmp_path / "replicate"), *given, devices=devices, placement="replicate"
    )
    partitions = run(saved, str(tmp_path / "partition"), *given, devices=devices)
    assert files_of(partitions[0]) == files_of(all_of_it[0])
    assert partitions[1] == all_of_it[1]
    assert partitions[2] == 0
    # While the fingerprint is computed, a stage at a time; the widest one is the largest.
    assert 0 < partitions[3] <= WIDEST_BYTES
    # Either goes on from the other's.
    placement, directory = goes_on
    folder = str(tmp_path / directory)
    assert run(resumed, folder, settings, devices=devices, placement=placement) == (
        partitions[1],
        0,
    )


class Computing(Layered):
    """Saves its parameters in another form than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_doubled)


def _doubled(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}scale"] = state[f"{prefix}scale"] + 0.0


def saved_by_itself(directory: str) -> tuple[str, int, int]:
    trainer = trained(Computing)
    with watched(trainer) as found:
        folder = trainer.save(directory)
        saves = found.whole
        trainer.load(directory)
    return str(folder), saves, found.whole


def test_a_model_that_computes_what_is_saved_has_all_parameters(tmp_path: Path) -> None:
    folder, saves, both = run(saved_by_itself, str(tmp_path / "partition"))
    other, _, _ = run(saved_by_itself, str(tmp_path / "replicate"), placement="replicate")
    assert files_of(folder) == files_of(other)
    # To save, to check whether a checkpoint fits, and to take it.
    assert (saves, both) == (1, 3)


def spoilt(directory: str, where: str) -> str:
    trainer = trained()
    with trainer.modifying():
        named: Any = {**dict(trainer.model.named_parameters()), "seen": trainer.model.seen}
        named[where].data.view(-1)[-1] = torch.nan
    try:
        trainer.save(directory)
    except StateError as error:
        return str(error)
    return ""


@for_each("where", ["layers.3.weight", "frozen.bias", "seen"])
def test_what_is_not_finite_is_named(where: str, tmp_path: Path) -> None:
    found = run(spoilt, str(tmp_path), where)
    assert found == run(spoilt, str(tmp_path), where, placement="replicate")
    assert f" {where} is not finite" in found
    assert not list(tmp_path.iterdir())


def failing(directory: str, meanwhile: bool) -> None:
    """Save; device 1 may fail after the lead has begun to write."""
    trainer = trained()
    transport: Any = engine_in(trainer).context.exchange.transport
    gather, brought = transport.gather_to_lead, itertools.count(1)

    def gather_or_fail() -> Any:
        if meanwhile and next(brought) > 2 and not trainer.is_lead:
            raise ZeroDivisionError("of device 1")
        return gather()

    with mock.patch.object(transport, "gather_to_lead", gather_or_fail):
        trainer.save(directory)


@for_each("kinds", [(OSError, PeerFailed), (PeerFailed, ZeroDivisionError)])
def test_a_failure_ends_the_wait_of_all_and_leaves_no_file(kinds: Any, tmp_path: Path) -> None:
    is_full = kinds[0] is OSError
    full = mock.Mock(side_effect=OSError(28, "no space left on this disk"))
    with mock.patch("os.fsync", full if is_full else os.fsync):
        found = outcomes(failing, 2, args=(str(tmp_path), not is_full), options=PARTITIONED)
    for each, kind in zip(found, kinds, strict=True):
        assert each.error is not None
        with pytest.raises(kind, match="no space left on this" if is_full else "of device 1"):
            raise each.error
    assert not list(tmp_path.iterdir())

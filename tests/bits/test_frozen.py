"""Frozen parameters of which each device keeps a part: bits, files, and what is at hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import onefold
from tests.bits import adapted

pytestmark = [pytest.mark.xdist_group("bits"), pytest.mark.processes]

OF_ONE_RUN = ("sha256", "run", "time", "devices", "serial", "threads")
"""What may differ between two runs in their records."""
WAYS = [("span", 2), ("span", 3), ("stages", 2), ("stages", 3), ("stages:2", 4)]


@functools.cache
def reference(average: bool) -> list[Any]:
    return adapted.all_that_a_run_can_be(["cpu"], average)


def launched(
    function: Any, *given: Any, keep: str, devices: int, exchange: str = "collective"
) -> Any:
    return onefold.launch(
        function,
        devices=f"cpu:{devices}",
        args=given,
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )


@pytest.mark.parametrize(("keep", "devices"), WAYS)
def test_the_bits_are_those_of_one_device_with_all(keep: str, devices: int) -> None:
    for average in (False, True):
        found = launched(adapted.all_that_a_run_can_be, None, average, keep=keep, devices=devices)
        assert found == reference(average)


@pytest.mark.parametrize(("keep", "devices"), WAYS)
def test_between_steps_a_device_has_its_part_alone(keep: str, devices: int) -> None:
    kept, total, here = launched(adapted.at_hand, keep=keep, devices=devices)
    assert here == ["scale", "tokens.weight"]  # which lie in no stage, and in two
    assert 0.3 * total / devices < kept < 1.8 * total / devices


def files_of(folder: str) -> dict[str, Any]:
    record = json.loads((Path(folder) / "run.json").read_text())
    kept = {key: value for key, value in record.items() if key not in OF_ONE_RUN}
    return {"run": json.dumps(kept)} | {
        path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")
    }


@pytest.mark.parametrize(
    "way",
    [
        (("span", 2), ("all", 2)),
        (("all", 2), ("span", 3)),
        (("span", 3), ("stages", 2)),
        (("stages", 3), ("span", 2)),
        (("stages:2", 4), ("stages", 2)),
    ],
    ids=lambda way: "-".join(keep for keep, _ in way),
)
def test_a_run_goes_on_with_another_choice(
    way: tuple[tuple[str, int], tuple[str, int]], tmp_path: Path
) -> None:
    """The second one begins with other frozen values, which those of the checkpoint replace."""
    expected, _ = adapted.part_of_a_run(None, 4)
    found, files = "", []
    for folder, ways in (("one", way), ("all", (("all", 2), ("all", 2)))):
        for (keep, devices), stop, seed in zip(ways, (2, 4), (5, 6), strict=True):
            found, saved = launched(
                adapted.part_of_a_run, tmp_path / folder, stop, seed, keep=keep, devices=devices
            )
            files.append(files_of(saved))
        assert found == expected
    assert files[:2] == files[2:]

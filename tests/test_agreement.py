"""Devices that do not do the same are told so, on every device, before it does harm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import onefold
from tests import simulated
from tests.disagreeing import CASES, run_and_write, run_late
from tests.tables import for_each


@for_each("exchange", ["shared", "collective"])
def test_every_difference_ends_in_one_error_on_every_device(exchange: str, tmp_path: Path) -> None:
    """One after the other on the same devices: a new Trainer works after each failure."""
    simulated.launch(
        run_and_write,
        devices="cpu:2",
        args=(list(CASES), str(tmp_path)),
        exchange=exchange,
    )
    said = [json.loads((tmp_path / f"{device}.json").read_text()) for device in range(2)]
    wrong = {
        name: [device[name] for device in said]
        for name, (_, words) in CASES.items()
        if not all(re.match(f"DisagreementError: .*{words}", device[name]) for device in said)
    }
    assert wrong == {}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_the_limit_of_the_trainer_is_kept(exchange: str, tmp_path: Path) -> None:
    """And not that of the launcher, which is longer here than this test may take."""
    onefold.launch(
        run_late, devices="cpu:2", args=(str(tmp_path),), exchange=exchange, timeout_s=600
    )
    words = (tmp_path / "words").read_text()
    assert re.match(r"PeerTimeout: .* did not arrive within 1.5 s in step 2", words), words

"""What a launcher settles, checked before there is a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from onefold.core.options import RunOptions
from tests.tables import for_each


@for_each(
    ("chosen", "words"),
    [
        ({"every": 0}, "^expected every of at least 1, got 0"),
        ({"keep_last": 0}, "^expected keep_last of at least 1, got 0"),
        (
            {"keep": 3},
            "^expected keep to be one of all, span, host, stages, got 3; .* is --keep-last",
        ),
        ({"keep": "most"}, "^expected keep to be one of all, span, host, stages, got 'most'"),
        ({"keep": "stages:1"}, "^expected keep .* lines of 2 devices or more"),
        ({"keep": "stages:"}, "^expected keep to be one of"),
        ({"restarts": -1, "checkpoint": "kept"}, "^expected restarts of at least 0, got -1"),
        ({"restarts": 1}, "^restarts go on from the last checkpoint: name a directory"),
        ({"exchange": "mpi"}, "^expected the exchange to be auto, shared or collective, got 'mpi'"),
        ({"timeout_s": 0.0}, "^expected the timeout to be more than 0"),
        ({"grace_s": float("inf")}, "^expected the grace to be finite"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunOptions(**chosen)


@for_each(
    ("chosen", "may_stop"),
    [({}, False), ({"saves": True}, True), ({"checkpoint": "kept"}, True), ({"trace": "t"}, False)],
)
def test_a_run_that_saves_itself_may_be_asked_to_stop(
    chosen: dict[str, Any], may_stop: bool
) -> None:
    assert RunOptions(**chosen).may_stop is may_stop


def test_what_was_checked_stays_checked_when_it_is_changed() -> None:
    with pytest.raises(ValueError, match="every of at least 1"):
        dataclasses.replace(RunOptions(), every=0)
    assert dataclasses.replace(RunOptions(), every=0, every_s=60).every == 0


@for_each(
    ("keep", "devices", "line"),
    [("all", 4, 1), ("span", 3, 1), ("stages", 3, 3), ("stages:2", 6, 2), ("stages:3", 3, 3)],
)
def test_how_many_devices_compute_a_shard(keep: str, devices: int, line: int) -> None:
    assert RunOptions(keep=keep).line_of(devices) == line
    assert RunOptions(keep=keep).keeps == keep.partition(":")[0]
    for odd in (1, 3, 5):
        with pytest.raises(ValueError, match=f"multiple of 2 with --keep stages:2.* got {odd}"):
            RunOptions(keep="stages:2").line_of(odd)

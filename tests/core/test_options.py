"""What a user or a launcher chooses, checked before any work begins."""

import dataclasses
import math
import select
from functools import partial
from typing import Any

import pytest

import onefold
from onefold.core.numbers import MOST_S, check_seconds
from onefold.core.options import RunOptions
from onefold.core.placements import PLACEMENTS
from onefold.core.settings import Settings

CHOSEN = Settings(shards=4, seed=0, clip_norm=None, deterministic=True, timeout_s=5.0, threads=None)


def test_options_that_make_no_sense_are_refused_by_name() -> None:
    for chosen, words in (
        ({"save_every": 0}, "^save_every must be at least 1, but got 0"),
        ({"keep_last": 0}, "^keep_last must be at least 1, but got 0"),
        (
            {"placement": 3},
            "^placement must be one of replicate, .*, partition, .*, but got 3$",
        ),
        (
            {"placement": "most"},
            "^placement must be one of replicate, .*, partition, .*, but got 'most'$",
        ),
        ({"placement": "pipeline:1"}, "^placement must be .* .pipelines of N devices, 2 or more"),
        ({"placement": "pipeline:"}, "^placement must be one of"),
        (
            {"placement": "replicate:all"},
            "^placement must be .* replicate:state .also replicates the optimizer state",
        ),
        (
            {"max_restarts": -1, "checkpoint": "kept"},
            "^max_restarts must be at least 0, but got -1",
        ),
        ({"max_restarts": 1}, "^restarts require --checkpoint DIR"),
        (
            {"exchange": "mpi"},
            '^the exchange must be one of "auto", "shared", "collective", but got .mpi',
        ),
    ):
        with pytest.raises(ValueError, match=words):
            RunOptions(**chosen)
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(RunOptions(), **chosen)
        assert dataclasses.replace(RunOptions(), save_every=0, save_every_s=60).save_every == 0


def test_how_many_devices_compute_a_shard() -> None:
    for placement, devices, line in (
        *(("replicate", 4, 1), ("partition", 3, 1), ("pipeline", 3, 3), ("pipeline:2", 6, 2)),
        *(("pipeline:3", 3, 3), ("replicate:state", 4, 1)),
    ):
        options = RunOptions(placement=placement)
        assert options.pipeline_of(devices) == line
        assert options.placement_kind is PLACEMENTS[placement.partition(":")[0]]
    for odd in (1, 3, 5):
        with pytest.raises(
            ValueError, match=f"--placement pipeline:2 makes .* multiple of 2, but got {odd}"
        ):
            RunOptions(placement="pipeline:2").pipeline_of(odd)


def test_limits_of_time_are_positive_and_what_the_system_can_wait() -> None:
    for value in (1e300, math.inf, MOST_S + 1, 0, -1, math.nan):
        words = "finite and at most" if value > 0 else "greater than 0"
        takes: tuple[Any, ...] = (RunOptions, partial(onefold.launch, len, devices="cpu:1"))
        for take in takes:
            for name in ("timeout_s", "grace_period_s"):
                with pytest.raises(ValueError, match=words):
                    take(**{name: value})
    for other in ("5", None, True):
        with pytest.raises(TypeError, match="it must be a number"):
            check_seconds("it", other)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLOUT)  # at its end, so that this returns at once
    assert poller.poll(check_seconds("it", MOST_S) * 1000)


def test_settings_out_of_bounds_are_named() -> None:
    for name, value, words in (
        ("shards", 0, "must be at least 1, but got 0"),
        ("shards", 2**31 + 1, "must be at most 2147483648"),
        ("shards", True, "must be an integer, but got True"),
        ("seed", 2**63, "must be at most"),
        ("seed", "7", "must be an integer, but got '7'"),
        ("threads", 0, "must be at least 1"),
        ("clip_norm", 0.0, "must be greater than 0"),
        ("clip_norm", math.nan, "must be greater than 0, but got nan"),
        ("clip_norm", math.inf, "must be finite"),
        ("clip_norm", "1", "must be a number"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name} {words}"):
            dataclasses.replace(CHOSEN, **dict[str, Any]({name: value}))

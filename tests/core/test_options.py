"""What a user or a launcher chooses, checked before any work begins."""

import dataclasses
import math
import select
from functools import partial

import pytest

import onefold
from onefold.core.numbers import MOST_S, check_seconds
from onefold.core.options import RunOptions
from onefold.core.placements import PLACEMENTS
from onefold.core.settings import Settings

CHOSEN = Settings(shards=4, seed=0, clip_norm=None, deterministic=True, timeout_s=5.0, threads=None)


def test_options_that_make_no_sense_are_refused_by_name() -> None:
    for chosen, words in (
        ({"save_every": 0}, "^expected save_every of at least 1, got 0"),
        ({"keep_last": 0}, "^expected keep_last of at least 1, got 0"),
        (
            {"placement": 3},
            "^expected placement to be one of replicate, .*, partition, .*, got 3$",
        ),
        (
            {"placement": "most"},
            "^expected placement to be one of replicate, .*, partition, .*, got 'most'$",
        ),
        ({"placement": "pipeline:1"}, "^expected placement .* .pipelines of N devices, 2 or more"),
        ({"placement": "pipeline:"}, "^expected placement to be one of"),
        (
            {"placement": "replicate:all"},
            "^expected placement .* replicate:state .also replicates the optimizer state",
        ),
        (
            {"max_restarts": -1, "checkpoint": "kept"},
            "^expected max_restarts of at least 0, got -1",
        ),
        ({"max_restarts": 1}, "^restarts go on from the last checkpoint: name a directory"),
        (
            {"exchange": "mpi"},
            '^expected the exchange to be one of "auto", "shared", "collective", got .mpi',
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
            ValueError, match=f"multiple of 2 with --placement pipeline:2.* got {odd}"
        ):
            RunOptions(placement="pipeline:2").pipeline_of(odd)


def test_limits_of_time_are_positive_and_what_the_system_can_wait() -> None:
    for value in (1e300, math.inf, MOST_S + 1, 0, -1, math.nan):
        words = "finite and at most" if value > 0 else "more than 0"
        for take in (RunOptions, partial(onefold.launch, len, devices="cpu:1")):
            for name in ("timeout_s", "grace_period_s"):
                with pytest.raises(ValueError, match=words):
                    take(**{name: value})
    for other in ("5", None, True):
        with pytest.raises(TypeError, match="expected it to be a number"):
            check_seconds("it", other)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLOUT)  # at its end, so that this returns at once
    assert poller.poll(check_seconds("it", MOST_S) * 1000)


def test_settings_out_of_bounds_are_named() -> None:
    for name, value, words in (
        ("shards", 0, "of at least 1, got 0"),
        ("shards", 2**31 + 1, "of at most 2147483648"),
        ("shards", True, "to be a whole number, got True"),
        ("seed", 2**63, "of at most"),
        ("seed", "7", "to be a whole number, got '7'"),
        ("threads", 0, "of at least 1"),
        ("clip_norm", 0.0, "to be more than 0"),
        ("clip_norm", math.nan, "to be more than 0, got nan"),
        ("clip_norm", math.inf, "to be finite"),
        ("clip_norm", "1", "to be a number"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^expected {name} {words}"):
            dataclasses.replace(CHOSEN, **{name: value})

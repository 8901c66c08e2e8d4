"""The sides as data: what starts them, and which are left out."""

from __future__ import annotations

import pytest
import torch

import catalog
from catalog import PEERS, SIDES, left_out
from loops import LOOPS
from training import COMPARISONS

pytestmark = pytest.mark.full


def test_every_side_has_a_loop_and_every_comparison_its_sides() -> None:
    assert {spec.loop for spec in SIDES.values()} == set(LOOPS)
    assert {name for one in COMPARISONS for name in (one.over, *one.under)} <= set(SIDES)
    assert {SIDES[name].processes for name in PEERS} == {2}


def test_a_launcher_is_told_of_the_devices() -> None:
    side = SIDES["onefold-2-collective"]
    assert side.command("cpu")[2:5] == ["run", "--devices", "cpu:2"]
    assert side.command("cuda")[2:5] == ["run", "--devices", "cuda:0,cuda:1"]


def test_what_is_for_gpus_is_left_out_on_processors() -> None:
    assert left_out(["plain-1", "dataparallel-2"], "cpu") == {
        "dataparallel-2": "is for cuda, not for cpu"
    }


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "find_spec", lambda package: package == "torch" or None)
    reasons = left_out(["ddp-2", "accelerate-2", "fabric-2"], "cpu")
    assert reasons == {
        "accelerate-2": "accelerate is not installed",
        "fabric-2": "lightning_fabric is not installed",
    }


def test_what_needs_more_gpus_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    reasons = left_out(["plain-1", "plain-all", "ddp-2", "onefold-2-one-process"], "cuda")
    assert reasons == {
        "plain-all": "is for cpu, not for cuda",
        "ddp-2": "needs 2 GPUs, and 1 are here",
        "onefold-2-one-process": "needs 2 GPUs, and 1 are here",
    }

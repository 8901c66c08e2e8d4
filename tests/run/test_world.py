from __future__ import annotations

import os
import re

import pytest

from onefold.core.options import RunOptions
from onefold.core.world import World
from onefold.errors import LaunchError
from onefold.exchange.progress import progress_of
from onefold.run.world import read_world, visible_gpus, worker_environment
from tests.tables import for_each

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
}

FULL = World(
    rank=2,
    size=3,
    run_id="abc",
    launcher="onefold",
    devices=("cuda:0", "cuda:2", "cuda:1"),
    may_leave=True,
    options=RunOptions(
        exchange="collective",
        timeout_s=12.5,
        trace="/tmp/trace",
        changed=("seed",),
        probe="/tmp/probe",
        probe_steps=4,
        probe_records=True,
        probe_mathematics="float64",
    ),
    directory="/tmp/run",
    local_rank=2,
    local_size=3,
)


@for_each("environment", [{}, {"RANK": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"LOCAL_RANK": "0"}])
def test_without_a_launcher_a_process_is_alone(environment: dict[str, str]) -> None:
    world = read_world(environment)
    assert world == World()
    assert (world.rank, world.size, world.launched) == (0, 1, False)
    assert progress_of(world) is None


def test_pytorchs_protocol_is_understood() -> None:
    world = read_world(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.launcher, world.launched, world.one_host) == ("torch", True, False)
    assert world.devices == ()


@for_each(("local", "one_host"), [("8", True), ("4", False), ("1", False)])
def test_whether_all_are_on_one_host(local: str, one_host: bool) -> None:
    assert read_world({**TORCHRUN, "LOCAL_WORLD_SIZE": local}).one_host == one_host


@for_each("value", ["", "one", "-1", "1.5", "²"])
@for_each("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    words = f"the environment says {name}={value!r}: expected a whole number of [01] or more"
    with pytest.raises(LaunchError, match=re.escape(words).replace(r"\[01\]", "[01]")):
        read_world({**TORCHRUN, name: value})


@for_each("changed", [{"RANK": "8"}, {"LOCAL_WORLD_SIZE": "9"}, {"WORLD_SIZE": "2"}])
def test_numbers_that_do_not_go_together(changed: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="expected RANK below WORLD_SIZE"):
        read_world({**TORCHRUN, **changed})


@for_each("changed", [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"MASTER_PORT": "29501"}])
def test_another_attempt_is_another_run(changed: dict[str, str]) -> None:
    """Or it could meet what the first one left in shared memory."""
    assert read_world({**TORCHRUN, **changed}).run_id != read_world(TORCHRUN).run_id
    assert read_world({**TORCHRUN, "RANK": "6"}).run_id == read_world(TORCHRUN).run_id


@for_each("world", [World(), FULL], ids=["alone", "full"])
def test_what_a_launcher_writes_is_what_its_worker_reads(world: World) -> None:
    environment = {**TORCHRUN, "ONEFOLD_WORLD": world.to_json()}
    assert read_world(environment) == world


def test_a_worker_is_told_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/the/user")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    environment = worker_environment(FULL)
    assert read_world(environment) == FULL
    assert environment["HOME"] == "/home/of/the/user"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [environment[name] for name in names] == ["2", "3", "2", "3"]


@for_each("value", [None, "", "0,1"])
def test_the_gpus_that_may_be_seen(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == value


@for_each("launched", [{}, TORCHRUN])
def test_what_devices_keep_is_chosen_by_the_environment(launched: dict[str, str]) -> None:
    assert read_world(launched).options.keep == "all"
    assert read_world({**launched, "ONEFOLD_KEEP": "span"}).options.keep == "span"
    with pytest.raises(LaunchError, match="ONEFOLD_KEEP='some': expected keep to be one of all"):
        read_world({**launched, "ONEFOLD_KEEP": "some"})
    found = read_world({**launched, "ONEFOLD_KEEP": "host", "ONEFOLD_HOME": "here"}).options
    assert (found.keep, found.home) == ("host", os.path.abspath("here"))


def test_the_launchers_choice_is_the_one_that_counts() -> None:
    environment = {**worker_environment(FULL), "ONEFOLD_KEEP": "span"}
    assert read_world(environment) == FULL

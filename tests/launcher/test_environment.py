import os
import re

import pytest

from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import LaunchError
from onefold.launcher.environment import PLACE, read_context
from onefold.launcher.launch import worker_environment
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

FULL = LaunchContext(
    rank=2,
    size=3,
    run_id="abc",
    launcher="onefold",
    devices=("cuda:0", "cuda:2", "cuda:1"),
    may_leave=True,
    options=RunOptions(
        exchange="collective",
        timeout_s=12.5,
        record="/tmp/record",
        allow_changed=("seed",),
        tools={"verify": {"folder": "/tmp/probe", "steps": 4, "mathematics": "float64"}},
    ),
    directory="/tmp/run",
    local_rank=2,
    local_size=3,
)


@for_each(("local", "one_host"), [("8", True), ("4", False), ("1", False)])
def test_pytorchs_protocol_is_understood(local: str, one_host: bool) -> None:
    local_rank = "1" if local != "1" else "0"
    context = read_context({**TORCHRUN, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": local_rank})
    assert (context.rank, context.size) == (5, 8)
    assert (context.local_rank, context.local_size) == (int(local_rank), int(local))
    assert (context.launcher, context.launched, context.one_host) == ("torch", True, one_host)
    assert context.devices == ()


@for_each("value", ["", "one", "-1", "1.5", "²"])
@for_each("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    words = f"{name} must be an integer of at least [01], but got {re.escape(repr(value))}"
    with pytest.raises(LaunchError, match=words):
        read_context({**TORCHRUN, name: value})


@for_each(
    ("changed", "words"),
    [
        ({"RANK": "8"}, "RANK must be below WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE at most WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE"),
        ({"ONEFOLD_SECRET": "short"}, "ONEFOLD_SECRET must have at least 16 characters, but has 5"),
    ],
)
def test_what_does_not_go_together_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_context({**TORCHRUN, **changed})


@for_each("changed", [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"MASTER_PORT": "29501"}])
def test_another_attempt_is_another_run(changed: dict[str, str]) -> None:
    """Or it could meet what the first one left in shared memory."""
    assert read_context({**TORCHRUN, **changed}).run_id != read_context(TORCHRUN).run_id
    assert read_context({**TORCHRUN, "RANK": "6"}).run_id == read_context(TORCHRUN).run_id


def test_hosts_may_count_restarts_differently() -> None:
    """If the store survives an attempt, the processes agree on a name: `exchange.attempts`."""
    hosts = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    names = [read_context({**hosts, "TORCHELASTIC_RESTART_COUNT": n}).run_id for n in "01"]
    assert names[0] == names[1]


@for_each("launched", [{}, TORCHRUN])
def test_what_devices_keep_is_chosen_by_the_environment(launched: dict[str, str]) -> None:
    assert read_context(launched).options.placement == "replicate"
    assert (
        read_context({**launched, "ONEFOLD_PLACEMENT": "partition"}).options.placement
        == "partition"
    )
    with pytest.raises(
        LaunchError,
        match="ONEFOLD_PLACEMENT='some' is not valid: placement must be one of replicate",
    ):
        read_context({**launched, "ONEFOLD_PLACEMENT": "some"})
    found = read_context(
        {**launched, "ONEFOLD_PLACEMENT": "offload", "ONEFOLD_OFFLOAD_DIR": "here"}
    ).options
    assert (found.placement, found.offload_dir) == ("offload", os.path.abspath("here"))


@for_each("context", [LaunchContext(), FULL])
def test_a_worker_reads_its_launcher(
    context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, "CUBLAS_WORKSPACE_CONFIG": ":16:8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(
        "ONEFOLD_PLACEMENT", "partition"
    )  # the launcher's choice is the one that counts
    environment = worker_environment(context)
    assert read_context(environment) == context
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment.keys().isdisjoint(PLACE)  # a device looks like a single process

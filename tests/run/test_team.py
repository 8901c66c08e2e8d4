"""Which devices a run has, and which of them a process drives."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from onefold.core.roster import Team
from onefold.core.world import World
from onefold.errors import LaunchError
from onefold.run import team
from onefold.run.team import form_team, settle_process
from tests.engine.assembled import settings_of
from tests.tables import for_each

Machine = Callable[..., list[object]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes PyTorch see so many GPUs; returns those that were made the current one."""

    def build(gpus: int, visible: str | None = None) -> list[object]:
        current: list[object] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(team, "hush_and_report", lambda world: None)
        monkeypatch.setattr(team, "_hushed", [])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return current

    return build


def torchrun(rank: int, size: int, local_rank: int, local_size: int) -> Team:
    world = World(
        rank=rank,
        size=size,
        launcher="torch",
        local_rank=local_rank,
        local_size=local_size,
        one_host=size == local_size,
    )
    return form_team(world, None, shards=16, module=torch.nn.Linear(1, 1))


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("rank", range(4))
def test_a_process_of_torchrun_drives_the_gpu_of_its_local_rank(
    machine: Machine, rank: int, gpus: int
) -> None:
    current = machine(gpus)
    formed = torchrun(rank, 4, rank, 4)
    assert formed.own_devices == {rank: torch.device("cuda", rank)}
    assert formed.devices == tuple(torch.device("cuda", index) for index in range(4))
    assert current == [torch.device("cuda", rank)]


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size"),
    [(0, 0, 3), (2, 2, 3), (3, 0, 2), (4, 1, 2)],
    ids=["first host", "its last", "second host", "its last"],
)
def test_hosts_may_have_unequal_numbers_of_gpus(
    machine: Machine, rank: int, local_rank: int, local_size: int
) -> None:
    """The rank modulo the local size would be 1 and 0 on the second host."""
    machine(local_size)
    formed = torchrun(rank, 5, local_rank, local_size)
    assert formed.own_devices == {rank: torch.device("cuda", local_rank)}
    assert len(formed.devices) == 5


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("visible", ["2", "GPU-dd44", " 1,"])
def test_a_process_that_sees_its_own_gpu_only_drives_it(
    machine: Machine, rank: int, visible: str
) -> None:
    machine(1, visible)
    assert torchrun(rank, 3, rank, 3).own_devices == {rank: torch.device("cuda", 0)}


@pytest.mark.parametrize(
    ("gpus", "visible"), [(1, None), (1, "0,1"), (2, None), (3, "0,1,2")], ids=str
)
@pytest.mark.parametrize("rank", [0, 3])
def test_fewer_gpus_than_processes_are_refused(
    machine: Machine, rank: int, gpus: int, visible: str | None
) -> None:
    """It was a run on the processor, without a word."""
    machine(gpus, visible)
    words = (
        f"^expected a GPU for each of the 4 processes .* on this host; process {rank} sees {gpus}"
        rf"\. .*--nproc-per-node {gpus}.*CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(LaunchError, match=words):
        torchrun(rank, 4, rank, 4)


def test_without_gpus_processes_compute(machine: Machine) -> None:
    assert machine(0) == []
    formed = torchrun(1, 3, 1, 3)
    assert formed.devices == (torch.device("cpu"),) * 3
    assert formed.own == (1,)


@for_each(
    ("kind", "deterministic", "before", "after"),
    [
        ("cuda", True, None, ":4096:8"),
        ("cuda", True, ":16:8", ":16:8"),
        ("cuda", False, None, None),
        ("cpu", True, None, None),
    ],
)
def test_cublas_repeats_its_bits_on_gpus(
    kind: str,
    deterministic: bool,
    before: str | None,
    after: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    formed = Team(devices=(torch.device(kind, 0),), own=(0,), world=World(), trainer=1)
    settle_process(formed, settings_of(shards=1, deterministic=deterministic))
    assert os.environ.get(name) == after

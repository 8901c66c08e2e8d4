"""Which devices a run has, and which of them a process drives."""

import itertools

import pytest
import torch

from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext
from onefold.errors import LaunchError
from onefold.session import forming
from onefold.session.forming import choose_devices
from onefold.system import accelerator
from tests.tables import for_each

runs = itertools.count()
"""Each is another one: what a process says of its run, it says once."""


def torchrun(
    patch: pytest.MonkeyPatch, gpus: int, visible: str | None, *places: int
) -> tuple[Devices, list[object]]:
    """What a process of a run forms that sees so many GPUs, and which of them it makes current."""
    rank, size, local_rank, local_size = places
    current: list[object] = []
    patch.setattr(accelerator, "kind", lambda: "cuda" if gpus else "cpu")
    patch.setattr(accelerator, "count", lambda: gpus)
    patch.setattr(accelerator, "make_current", current.append)
    patch.setattr(forming, "hush_and_report", lambda context: None)
    patch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        patch.delenv("CUDA_VISIBLE_DEVICES")
    context = LaunchContext(
        rank=rank,
        size=size,
        run_id=f"run {next(runs)}",
        launcher="torch",
        local_rank=local_rank,
        local_size=local_size,
        one_host=size == local_size,
    )
    return choose_devices(context, None, shards=16, module=torch.nn.Linear(1, 1)), current


@for_each(
    ("gpus", "visible", "places", "drives"),
    [
        *((gpus, None, (rank, 4, rank, 4), rank) for gpus in (4, 8) for rank in range(4)),
        # Hosts may have unequal numbers of GPUs: the first has three, the second two.
        *((3, None, (rank, 5, rank, 3), rank) for rank in range(3)),
        *((2, None, (3 + local, 5, local, 2), local) for local in range(2)),
        # A process may see its own alone.
        *((1, visible, (2, 3, 2, 3), 0) for visible in ("2", "GPU-dd44", " 1,")),
    ],
)
def test_a_process_of_torchrun_drives_the_gpu_of_its_local_rank(
    gpus: int,
    visible: str | None,
    places: tuple[int, ...],
    drives: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed, current = torchrun(monkeypatch, gpus, visible, *places)
    assert formed.own_devices == {places[0]: torch.device("cuda", drives)}
    assert len(formed.all) == places[1]
    assert current == [torch.device("cuda", drives)]


@for_each(("gpus", "visible"), [(1, None), (1, "0,1"), (2, None), (3, "0,1,2")])
@for_each("rank", [0, 3])
def test_fewer_gpus_than_processes_are_refused(
    rank: int, gpus: int, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a run on the processor, without a word."""
    words = (
        f"^the launcher started 4 processes on this host, .* but process {rank} sees {gpus}"
        rf"\. .*--nproc-per-node {gpus}.*CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(LaunchError, match=words):
        torchrun(monkeypatch, gpus, visible, rank, 4, rank, 4)

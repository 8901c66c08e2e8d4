"""Who takes part in this run. The only module that reads the environment, once, at the start.

A process is alone, or was started by ``onefold run`` or `onefold.launch` (which leave a record in
ONEFOLD_WORLD), or by any launcher that speaks PyTorch's protocol (RANK, WORLD_SIZE, MASTER_ADDR).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from onefold.rundir import RunDirectory

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "ExchangeName",
    "World",
    "allocator_chosen",
    "current_world",
    "read_world",
    "visible_gpus",
    "worker_environment",
]

WORLD_VARIABLE = "ONEFOLD_WORLD"
DEFAULT_TIMEOUT_S = 600.0

ExchangeName = Literal["auto", "shared", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's place in the run."""

    rank: int = 0
    """Number of this process's device."""
    size: int = 1
    """Number of processes, of one device each."""
    run_id: str = ""
    """Differs from that of every other run on this machine."""
    one_host: bool = True
    """All processes are on this machine."""
    launcher: Literal["none", "onefold", "torch"] = "none"
    """What started this process."""
    devices: tuple[str, ...] = ()
    """The device of every process, where the launcher chose them."""
    may_leave: bool = False
    """Devices beyond the number of shards leave in peace rather than fail."""
    exchange: ExchangeName = "auto"
    """Which exchange to use between processes."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The longest wait for another device."""
    directory: str = ""
    """Of the run, where onefold launched it."""
    trace: str = ""
    """File that takes one JSON line a step."""
    profile: str = ""
    """Folder that takes the timeline."""
    checkpoint: str = ""
    """Directory of the checkpoints that the run goes on from and writes."""
    checkpoint_every: int = 0
    """So many steps one is written."""
    checkpoint_keep: int = 0
    """How many of the newest stay."""
    checkpoint_changed: tuple[str, ...] = ()
    """What may differ from the run that was saved."""
    probe: str = ""
    """Folder for the comparison of runs, see `onefold.probe`."""
    probe_steps: int = 0
    """How many steps are compared before the script is ended."""
    probe_records: bool = False
    """This run is what others are compared with."""
    probe_mathematics: str = ""
    """float64 or float32 where V shards are compared with one in this run; else the bits are."""
    local_rank: int = 0
    """Number of this process on its host."""
    local_size: int = 1
    """Number of processes on this host."""

    @property
    def launched(self) -> bool:
        """Whether a launcher has chosen the devices."""
        return self.launcher != "none"

    @property
    def run_directory(self) -> RunDirectory | None:
        """The folder shared with onefold's launcher, if that started this process."""
        return RunDirectory(Path(self.directory), self.size) if self.directory else None

    def to_json(self) -> str:
        """For the environment of a worker."""
        return json.dumps(asdict(self))


def read_world(environment: Mapping[str, str]) -> World:
    """Make out from the environment how this process was started."""
    if WORLD_VARIABLE in environment:
        fields = json.loads(environment[WORLD_VARIABLE])
        lists = ("devices", "checkpoint_changed")
        return World(**{**fields, **{name: tuple(fields[name]) for name in lists}})
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return _read_torch(environment)
    return World()


def _read_torch(environment: Mapping[str, str]) -> World:
    size = int(environment["WORLD_SIZE"])
    local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return World(
        rank=int(environment["RANK"]),
        size=size,
        run_id="-".join(environment.get(name, "") for name in parts),
        one_host=local_size == size,
        launcher="torch",
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_size=local_size,
    )


@functools.cache
def current_world() -> World:
    """This process's world; the environment is read at the first call."""
    return read_world(os.environ)


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES: what the user lets programs see, or None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def allocator_chosen() -> bool:
    """Whether the user has said how memory is to be allocated, by glibc's own variables or by
    loading another allocator before it."""
    return any(
        name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc" in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
        for name, value in os.environ.items()
    )


def worker_environment(world: World) -> dict[str, str]:
    """The environment of a worker that onefold launches."""
    environment = dict(os.environ)
    environment[WORLD_VARIABLE] = world.to_json()
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that numbers mean the same to everybody
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits
    environment.setdefault("PYTHONHASHSEED", "0")  # sets have the same order everywhere
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the first failure is told by us
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no need for its name to resolve
    # Libraries that print, log or download on rank 0 alone look for these.
    environment["RANK"] = environment["LOCAL_RANK"] = str(world.rank)
    environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(world.size)
    return environment

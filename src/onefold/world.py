"""Who takes part in this run. The only module that reads the environment, once, at the start.

A process is alone, or was started by ``onefold run`` or `onefold.launch` (which leave a record in
ONEFOLD_WORLD), or by any launcher that speaks PyTorch's protocol (RANK, WORLD_SIZE, MASTER_ADDR).

Note: one process is the device
-------------------------------
A program that the script starts inherits the environment, and a process that it forks all of the
memory: each would take itself for the device. So the record is taken out of the environment when it
is read (RANK and WORLD_SIZE stay, for libraries that print or download on rank 0 alone), and the
world is that of the process that has read it; in a child of that, asking for it is an error.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

from onefold.errors import LaunchError
from onefold.rundir import Progress

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "ExchangeName",
    "World",
    "allocator_chosen",
    "current_world",
    "gloo_on_loopback",
    "read_world",
    "take_world",
    "visible_gpus",
    "worker_environment",
]

WORLD_VARIABLE = "ONEFOLD_WORLD"
SECRET_VARIABLE = "ONEFOLD_SECRET"
_SECRET_LENGTH = 16
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
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
    """Private folder of the run, where onefold launched it."""
    progress_descriptor: int = -1
    """Inherited from onefold's launcher: the table of steps; -1 without one."""
    report_descriptor: int = -1
    """Likewise: where this process leaves word if it fails."""
    store_descriptor: int = -1
    """Likewise: the file through which a process group is formed."""
    safe_path: bool = False
    """Neither the script's folder nor the current one goes on ``sys.path`` (``python -P``)."""
    may_stop: bool = False
    """The run saves itself when it is asked to stop."""
    trace: str = ""
    """File that takes one JSON line a step."""
    profile: str = ""
    """Folder of the parts of the timeline."""
    checkpoint: str = ""
    """Directory of the checkpoints that the run goes on from and writes."""
    checkpoint_every: int = 0
    """So many steps one is written."""
    checkpoint_keep: int = 0
    """How many of the newest stay."""
    checkpoint_changed: tuple[str, ...] = ()
    """What may differ from the run that was saved."""
    checkpoint_leave_out: int = 0
    """How many of the newest checkpoints are passed over, after failures in one step."""
    probe: str = ""
    """Folder for the comparison of runs, see `onefold.probe`."""
    probe_run: str = ""
    """Name of this run in it."""
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
    secret: str = field(default="", repr=False)
    """What the user has given to every process of the run, by which they know each other."""
    agent_store: bool = False
    """PyTorch's launcher holds the store itself, so that it outlives any process of the run."""

    @property
    def launched(self) -> bool:
        """Whether a launcher has chosen the devices."""
        return self.launcher != "none"

    @property
    def proof(self) -> bytes:
        """What a process must know to take part; empty where there is no secret.

        The run's number is one where onefold's launcher has drawn it: it is told to nobody else.
        """
        return (self.secret or (self.run_id if self.launcher == "onefold" else "")).encode()

    @property
    def progress(self) -> Progress | None:
        """The table of steps shared with onefold's launcher, if that started this process."""
        if self.progress_descriptor < 0:
            return None
        return _table(self.progress_descriptor, self.size)

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
        secret=_checked_secret(environment.get(SECRET_VARIABLE, "")),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _checked_secret(secret: str) -> str:
    if secret and len(secret) < _SECRET_LENGTH:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(secret)} characters: expected {_SECRET_LENGTH} or more "
            f"that nobody can guess, the same for every process of the run"
        )
    return secret


@functools.cache
def _table(descriptor: int, devices: int) -> Progress:
    """Mapped once: a script that closes descriptors does not reach it any more."""
    return Progress(descriptor, devices)


def take_world(environment: MutableMapping[str, str]) -> World:
    """Make out how this process was started, and leave no record of it to those it starts."""
    world = read_world(environment)
    environment.pop(WORLD_VARIABLE, None)
    return world


@functools.cache
def _own_world() -> tuple[World, int]:
    """This process's world, and the process that it belongs to."""
    return take_world(os.environ), os.getpid()


def current_world() -> World:
    """This process's world; the environment is read at the first call.

    Raises:
        LaunchError: this is a forked child of a process that is part of a run.
    """
    world, process = _own_world()
    if world.launched and os.getpid() != process:
        raise LaunchError(
            f"process {os.getpid()} was forked from process {process}, which is device "
            f"{world.rank} of a run: only that one is part of the run. Make and use the Trainer "
            f"there; in a child, compute without it, or start the child by the spawn method"
        )
    return world


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


@contextmanager
def gloo_on_loopback(world: World) -> Iterator[None]:
    """Where all processes are on one host, gloo opens no port in here that other hosts could reach.

    What the user has said about it stands.
    """
    if not world.one_host or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def worker_environment(world: World) -> dict[str, str]:
    """The environment of a worker that onefold launches."""
    environment = dict(os.environ)
    environment[WORLD_VARIABLE] = world.to_json()
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that numbers mean the same to everybody
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits
    environment.setdefault("PYTHONHASHSEED", "0")  # sets have the same order everywhere
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the first failure is told by us
    environment.setdefault(_GLOO_INTERFACE, "lo")  # one host: no need for its name to resolve
    # Libraries that print, log or download on rank 0 alone look for these.
    environment["RANK"] = environment["LOCAL_RANK"] = str(world.rank)
    environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(world.size)
    return environment

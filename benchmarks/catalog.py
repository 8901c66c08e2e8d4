"""The sides of `training.py` and `limit.py`: what each is, how it starts, and where it can run.

Pure data, and two functions on it. The loops of the sides are in `loops.py`.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

__all__ = ["LIMITS", "PEERS", "SIDES", "Kind", "Precision", "SideSpec", "left_out"]

Kind = Literal["cpu", "cuda"]
"""Type of the devices."""
Precision = Literal["fp32", "bf16"]
"""Precision of the computation; bf16 uses autocast."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ONEFOLD_RUN = ("-m", "onefold", "run", "--devices", "{two}")
TWO_DEVICES: dict[Kind, str] = {"cpu": "cpu:2", "cuda": "cuda:0,cuda:1"}
"""Names of two devices for `onefold run`; replaces {two}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSpec:
    """A way to train."""

    description: str
    """One line."""
    loop: str
    """Name of the loop in `loops.LOOPS`."""
    launcher: tuple[str, ...] = ()
    """Arguments of Python before the program's own."""
    processes: int = 1
    """Number of processes that the launcher starts."""
    threads: int = 1
    """Threads per process."""
    shards: int = 1
    """Shards per batch, for onefold."""
    devices_a_process: int = 1
    """Devices per process."""
    package: str = "torch"
    """Package that must be installed."""
    kinds: tuple[Kind, ...] = ("cpu", "cuda")
    """Supported types of devices."""

    def command(self, kind: Kind) -> list[str]:
        """Return the arguments of Python that start it on devices of `kind`."""
        return [part.format(two=TWO_DEVICES[kind]) for part in self.launcher]

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.processes * self.devices_a_process


SIDES = {
    "plain-1": SideSpec(description="plain loop, one thread", loop="plain"),
    "plain-all": SideSpec(
        description="plain loop, a thread for every core",
        loop="plain",
        threads=len(os.sched_getaffinity(0)),
        kinds=("cpu",),
    ),
    "dataparallel-2": SideSpec(
        description="nn.DataParallel, one process for two GPUs",
        loop="dataparallel",
        devices_a_process=2,
        kinds=("cuda",),
    ),
    "ddp-2": SideSpec(
        description="DistributedDataParallel, two processes",
        loop="ddp",
        launcher=TORCHRUN,
        processes=2,
    ),
    "accelerate-2": SideSpec(
        description="Accelerate, two processes",
        loop="accelerate",
        launcher=TORCHRUN,
        processes=2,
        package="accelerate",
    ),
    "fabric-2": SideSpec(
        description="Lightning Fabric, two processes",
        loop="fabric",
        launcher=TORCHRUN,
        processes=2,
        package="lightning_fabric",
    ),
    "onefold-1": SideSpec(description="onefold, one device, one shard", loop="onefold"),
    "onefold-1-two-shards": SideSpec(
        description="onefold, one device, two shards", loop="onefold", shards=2
    ),
    "onefold-2-shared": SideSpec(
        description="onefold, two processes over shared memory",
        loop="onefold",
        launcher=(*ONEFOLD_RUN, "--exchange", "shared"),
        processes=2,
        shards=2,
        kinds=("cpu",),
    ),
    "onefold-2-collective": SideSpec(
        description="onefold, two processes over gloo or NCCL",
        loop="onefold",
        launcher=(*ONEFOLD_RUN, "--exchange", "collective"),
        processes=2,
        shards=2,
    ),
    "onefold-2-one-process": SideSpec(
        description="onefold, one process for two devices",
        loop="onefold",
        devices_a_process=2,
        shards=2,
    ),
    "limit-2": SideSpec(
        description="limit: two processes without exchange, half of the work each",
        loop="independent",
        launcher=TORCHRUN,
        processes=2,
        kinds=("cpu",),
    ),
    "limit-1": SideSpec(
        description="one of these two processes alone, times two",
        loop="independent",
        kinds=("cpu",),
    ),
}
"""The sides by name, in the order of measurement and display."""

LIMITS = ("limit-2", "limit-1")
"""Sides that train no common model, for `limit.py`."""
PEERS = ("ddp-2", "accelerate-2", "fabric-2")
"""Alternatives of other libraries for two processes."""


def left_out(names: Iterable[str], kind: Kind) -> dict[str, str]:
    """Return those of `names` that cannot run here on devices of `kind`, with the reason."""
    reasons = {name: obstacle(SIDES[name], kind) for name in names}
    return {name: reason for name, reason in reasons.items() if reason}


def obstacle(spec: SideSpec, kind: Kind) -> str:
    """Return why a side cannot run here; empty if it can."""
    if kind not in spec.kinds:
        return f"is for {' and '.join(spec.kinds)}, not for {kind}"
    if find_spec(spec.package) is None:
        return f"{spec.package} is not installed"
    if kind == "cuda" and torch.cuda.device_count() < spec.devices:
        return f"needs {spec.devices} GPUs, and {torch.cuda.device_count()} are here"
    return ""

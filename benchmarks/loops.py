"""The training loops of all sides: the work of one process with a batch.

Each loop follows its own documentation, with the fastest settings. All train the same model with
the same optimizer; if several processes share a batch, each takes its part. Accelerate and
Lightning Fabric are imported only by the processes that train with them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onefold
from catalog import Kind, SideSpec
from workloads import Batch, Workload

__all__ = ["LOOPS", "Loop", "Step", "losses", "onefold_step", "part", "plain_step"]

Step = Callable[[Batch], Callable[[], float]]
"""Trains on one batch; returns a function that reads the loss."""

BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl"}
DDP_SETTINGS: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
"""The fastest settings of DistributedDataParallel for models that do the same in every step."""


PHASES = ("data", "forward", "backward", "exchange", "update")
"""Phases of a step of onefold."""


def no_end() -> None:
    """Do nothing at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One process's part in the training of a workload."""

    step: Step
    """Trains on one of the batches."""
    batches: list[Batch]
    """Batches of this process, used in turn."""
    devices: tuple[torch.device, ...]
    """Devices of this process."""
    end: Callable[[], None] = no_end
    """Called in all processes after the last step."""
    phases: Callable[[], Mapping[str, float]] = dict
    """Returns the seconds of each phase of the last step; empty if the side does not know them."""


def devices_of(spec: SideSpec, kind: Kind) -> tuple[torch.device, ...]:
    """Return the devices of this process; launchers number the processes in LOCAL_RANK."""
    if kind == "cpu":
        return (torch.device("cpu"),) * spec.devices_a_process
    first = int(os.environ["LOCAL_RANK"]) if spec.processes > 1 else 0
    torch.cuda.set_device(first)
    return tuple(torch.device(kind, first + index) for index in range(spec.devices_a_process))


def plain(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """Make the plain PyTorch loop on one device."""
    devices = devices_of(spec, kind)
    model, optimizer = workload.build(devices[0])
    step = plain_step(autocast(model.train(), workload, kind), optimizer)
    return Loop(step=step, batches=workload.batches(devices[0]), devices=devices)


def dataparallel(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """Make a loop with nn.DataParallel over several GPUs of one process."""
    devices = devices_of(spec, kind)
    model, optimizer = workload.build(devices[0])
    model = nn.DataParallel(model, list(devices)).train()
    step = plain_step(autocast(model, workload, kind), optimizer)
    return Loop(step=step, batches=workload.batches(devices[0]), devices=devices)


def ddp(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """DistributedDataParallel."""
    devices = devices_of(spec, kind)
    dist.init_process_group(BACKENDS[kind])
    model, optimizer = workload.build(devices[0])
    model = DistributedDataParallel(model, **DDP_SETTINGS).train()
    return peer_loop(plain_step(autocast(model, workload, kind), optimizer), workload, devices)


def accelerate(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """Make a loop with Accelerate, which wraps model and optimizer."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    devices = devices_of(spec, kind)
    settings = DistributedDataParallelKwargs(**DDP_SETTINGS)
    mixed = "no" if workload.precision == "fp32" else workload.precision
    accelerator = Accelerator(cpu=kind == "cpu", kwargs_handlers=[settings], mixed_precision=mixed)
    model, optimizer = accelerator.prepare(*workload.build(devices[0]))
    step = plain_step(model.train(), optimizer, accelerator.backward)
    return peer_loop(step, workload, devices)


def fabric(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """Make a loop with Lightning Fabric, which wraps model and optimizer."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    devices = devices_of(spec, kind)
    strategy = DDPStrategy(process_group_backend=BACKENDS[kind], **DDP_SETTINGS)
    precision = "32-true" if workload.precision == "fp32" else f"{workload.precision}-mixed"
    runner = Fabric(
        accelerator=kind, devices=spec.processes, strategy=strategy, precision=precision
    )
    runner.launch()
    model, optimizer = runner.setup(*workload.build(devices[0]))
    step = plain_step(model.train(), optimizer, runner.backward)
    return peer_loop(step, workload, devices)


def onefolded(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """Make a loop with onefold, on the devices of its launcher or of the specification."""
    devices = devices_of(spec, kind)
    model, optimizer = workload.build()
    trainer = onefold.Trainer(
        model,
        optimizer,
        losses,
        shards=spec.shards,
        devices=devices if spec.processes == 1 else None,
        threads=spec.threads,
        precision=None if workload.precision == "fp32" else workload.precision,
    )
    last: list[onefold.Step] = []

    def step(batch: Batch) -> Callable[[], float]:
        last[:] = (done := trainer.step(batch),)
        return lambda: done.loss.item()

    return Loop(
        step=step,
        batches=workload.batches(devices[0]),
        devices=devices,
        phases=lambda: {name: s for name, s in asdict(last[0].seconds).items() if name in PHASES},
    )


def independent(workload: Workload, spec: SideSpec, kind: Kind) -> Loop:
    """Make the loop of one of two processes that share the work and exchange nothing.

    It trains half of every batch, and updates half of every parameter.
    """
    devices, rank = devices_of(spec, kind), int(os.environ.get("RANK", "0"))
    model, _ = workload.build(devices[0])
    parameters = list(model.train().parameters())
    # The halves share the memory of the parameters, as the partitions of onefold's devices do.
    halves = [nn.Parameter(each.detach().view(-1).tensor_split(2)[rank]) for each in parameters]
    optimizer = workload.new_optimizer(nn.ParameterList(halves))
    names, moments = ("forward", "backward", "update"), [0.0] * 4

    def step(batch: Batch) -> Callable[[], float]:
        moments[0] = time.perf_counter()
        for parameter in parameters:
            parameter.grad = None
        loss = F.cross_entropy(model(batch[0]), batch[1])
        moments[1] = time.perf_counter()
        loss.backward()
        moments[2] = time.perf_counter()
        for half, parameter in zip(halves, parameters, strict=True):
            half.grad = parameter.grad.reshape(-1).tensor_split(2)[rank]
        optimizer.step()
        moments[3] = time.perf_counter()
        return loss.detach().item

    return Loop(
        step=step,
        batches=[part(batch, rank, 2) for batch in workload.batches(devices[0])],
        devices=devices,
        phases=lambda: {name: moments[n + 1] - moments[n] for n, name in enumerate(names)},
    )


LOOPS: dict[str, Callable[[Workload, SideSpec, Kind], Loop]] = {
    "plain": plain,
    "dataparallel": dataparallel,
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "onefold": onefolded,
    "independent": independent,
}
"""Loops by the name in a `SideSpec`."""


def peer_loop(step: Step, workload: Workload, devices: tuple[torch.device, ...]) -> Loop:
    """Make a loop of a process that takes its rank's part of every batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = [part(batch, rank, world_size) for batch in workload.batches(devices[0])]
    return Loop(step=step, batches=mine, devices=devices, end=leave_group)


def part(batch: Batch, rank: int, world_size: int) -> Batch:
    """Return the part of `batch` that belongs to `rank`."""
    inputs, labels = batch
    return inputs.tensor_split(world_size)[rank], labels.tensor_split(world_size)[rank]


def leave_group() -> None:
    """Leave the process group together with all others, because gloo may hang otherwise."""
    dist.barrier()
    dist.destroy_process_group()


def autocast(
    model: nn.Module, workload: Workload, kind: Kind
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the model in the workload's precision, with float32 output."""
    if workload.precision == "fp32":
        return model

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return model(inputs).float()

    return forward


def plain_step(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Step:
    """Make a step of plain PyTorch."""

    def step(batch: Batch) -> Callable[[], float]:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        backward(loss)
        optimizer.step()
        return loss.detach().item

    return step


def onefold_step(trainer: onefold.Trainer) -> Step:
    """Make a step of onefold."""

    def step(batch: Batch) -> Callable[[], float]:
        done = trainer.step(batch)
        return lambda: done.loss.item()

    return step


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of every sample of a shard, averaged over its pixels or tokens."""
    inputs, labels = batch
    outputs = model(inputs)
    if outputs.dim() != 3:  # per sample, or per pixel
        found = F.cross_entropy(outputs, labels, reduction="none")
    else:
        # Logits of tokens are in the last dimension.
        found = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        found = found.view(labels.shape)
    return found if found.dim() == 1 else found.flatten(1).mean(1)

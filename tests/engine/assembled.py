"""Replicas and engines put together without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onefold.core.batch import ShardedBatch, cut_batch
from onefold.core.flat import FlatTensors, lay_out, storage_order
from onefold.core.roster import Team
from onefold.core.settings import Settings
from onefold.core.shard import Plan
from onefold.core.world import World
from onefold.engine.assembly import assemble
from onefold.engine.buffers import BufferPlaces, BufferSet
from onefold.engine.engine import Engine
from onefold.engine.replica import ModelParts, Replica
from onefold.engine.update import SpanOptimizer
from tests.small import line, sgd, square

CPU = torch.device("cpu")


class Parts(nn.Module):
    """Batch norm, dropout, and a layer of more than one piece; always of the same values."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.usual, self.last = nn.Linear(12, 140), nn.Linear(140, 1)
        self.wide = nn.Linear(140, 140, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def replica_of(module: nn.Module) -> Replica:
    """One that is attached to its module, in memory of its own."""
    parts = ModelParts(module, [n for n, p in module.named_parameters() if p.requires_grad])
    flats = []
    for tensors in (parts.trained, parts.other):
        flat = FlatTensors(lay_out(tensors), device=CPU)
        flat.write([parameter.detach() for parameter in tensors.values()])
        flats.append(flat)
    buffers = BufferSet(BufferPlaces(module), CPU)
    replica = Replica(0, CPU, parts, flats[0], flats[1], buffers)
    replica.attach()
    return replica


def cut(batch: object, plan: Plan) -> ShardedBatch:
    """All shards of a batch."""
    return cut_batch(batch, plan, range(plan.shards))


def bytes_of(tensor: torch.Tensor | None) -> bytes | None:
    """To the last bit; None stays None."""
    if tensor is None:
        return None
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def team_of(devices: int = 1, *, own: Sequence[int] | None = None, trainer: int = 0) -> Team:
    """Processors that one process drives."""
    return Team(
        devices=(CPU,) * devices,
        own=tuple(range(devices) if own is None else own),
        world=World(),
        trainer=trainer,
    )


def settings_of(*, shards: int = 4, **others: Any) -> Settings:
    """A user's choices, most of them the defaults."""
    choices: dict[str, Any] = {
        "seed": 0,
        "clip_norm": None,
        "deterministic": True,
        "timeout_s": 10.0,
        "threads": 1,
        **others,
    }
    return Settings(shards=shards, **choices)


def engine_of(
    module: nn.Module | None = None,
    loss: Callable[..., object] = square,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    shards: int = 4,
    devices: int = 1,
    **settings: Any,
) -> Engine:
    """An engine whose devices this process drives."""
    module = line() if module is None else module
    return assemble(
        module,
        optimizer or sgd(module),
        {"": loss},
        settings=settings_of(shards=shards, **settings),
        team=team_of(devices),
        plan=Plan.even(shards=shards, devices=devices),
        schedule=None,
        joined=lambda exchange: None,
    )


def given_to(update: SpanOptimizer) -> list[Mapping[str, bytes | None]]:
    """Fills, at every step, with the gradients that the optimizer is given, put together."""
    seen: list[Mapping[str, bytes | None]] = []

    def look(*_: object) -> None:
        parts: dict[str, list[bytes | None]] = {}
        for item in sorted(update.owned, key=lambda item: item.number):
            name = update.storage.gradients.entries[item.piece.entry].name
            gradient = item.values.grad
            flat = None if gradient is None else storage_order(gradient)
            parts.setdefault(name, []).append(bytes_of(flat))
        seen.append({n: None if None in p else b"".join(p) for n, p in parts.items()})  # type: ignore[arg-type]

    # As those of onefold, it only looks; one of a script's would need whole parameters.
    look.__module__ = "onefold.engine"
    update.optimizer.register_step_pre_hook(look)
    return seen

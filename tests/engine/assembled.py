"""Replicas and engines put together without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from onefold.core.batch import ShardedBatch, cut_batch
from onefold.core.roster import Team
from onefold.core.settings import Settings
from onefold.core.shard import Plan
from onefold.core.world import World
from onefold.engine.assembly import assemble
from onefold.engine.engine import Engine
from tests.small import line, sgd, square

CPU = torch.device("cpu")


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

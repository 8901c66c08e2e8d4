"""Measures a model for ``onefold plan``, and ends the script instead of training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from onefold.checks.model import held_in, updates_by_element
from onefold.core.flat import lay_out
from onefold.core.placements import PLACEMENTS, implementation_of
from onefold.core.settings import Settings, added_up_in
from onefold.core.storage import cut_segments, divides_evenly
from onefold.placement.footprint import Footprint
from onefold.session.run import RunSetup
from onefold.session.user_parts import UserParts
from onefold.shard.kernels import Compilers
from onefold.shard.model_parts import ModelParts
from onefold.shard.stage_modules import StageModules
from onefold.step.assembly import LEAST_SENT_EARLY_BYTES
from onefold.system.whole_files import replace_file
from onefold.update.optimizers import name_of, optimizers_in

__all__ = ["prepare"]

_USUAL_STATE = 2
"""Assumed number of state values per parameter, if an optimizer's state is unknown."""


def prepare(start: RunSetup) -> NoReturn:
    """Write a memory plan and end the script.

    Raises:
        SystemExit: the plan was written.
    """
    context, user, optimizer, settings = start.context, start.user, start.optimizer, start.settings
    asked = context.options.tools["plan"]
    counts = asked["devices"]
    used = {min(count, settings.shards) for count in counts}
    stages, sizes, known = _measured(user, optimizer, settings, used)
    # CPU devices of a host share memory, and therefore one copy of the parameters.
    together = all(device.startswith("cpu") for device in context.devices)
    found = {
        "model": type(user.module).__name__,
        "optimizer": name_of(optimizer),
        "state_is_known": known,
        "shards": settings.shards,
        "parameters": sum(stage["parameters"] for stage in stages),
        "parameter_bytes": sizes.parameters,
        "together": together,
        "gradient_bytes_of_graphs": sizes.gradients if settings.graphs else 0,
        "stages": stages,
        "rows": [_row(sizes, count, together=together) for count in counts],
    }
    replace_file(Path(asked["path"]), json.dumps(found))
    raise SystemExit(0)


def _row(sizes: Footprint, devices: int, *, together: bool) -> dict[str, int | None]:
    """Estimate the memory per device with each placement."""
    row: dict[str, int | None] = {"devices": devices}
    for name, kind in PLACEMENTS.items():
        used = devices if kind.has_pipelines else min(devices, sizes.shards)
        found = implementation_of(name).estimate(sizes, used, together=together)
        # A pipeline is the only placement that can use more devices than shards.
        row |= found if used == devices else dict.fromkeys(found)
    return row


def _measured(
    user: UserParts,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    devices: Iterable[int],
) -> tuple[list[dict[str, Any]], Footprint, bool]:
    """Return the stages, all sizes, and whether the size of the optimizer's state is exact."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [n for n, p in user.module.named_parameters() if id(p) in held and p.requires_grad]
    parts = ModelParts(user.module, trained)
    found = StageModules(user.module, user.stages, parts.trained)
    stages = found.stages
    parts.partition_frozen(found)
    frozen = [0] * len(stages)
    for parameter in parts.frozen.values():
        frozen[found.stage_of(parameter)] += parameter.nbytes
    layout = held_in(settings.precision, parts)
    kept = list(layout.values())
    gradients = [each.numel() * added_up_in(each.dtype).itemsize for each in kept]
    early = StageModules(user.module, user.stages, parts.trained, merged=user.stages is None).stages
    segments = cut_segments(lay_out(layout), by_element=updates_by_element(optimizer))
    # A microbatch size leaves open, before a step, whether a shard runs in microbatches.
    compiled = Compilers(user.module, *user.losses.values(), compiles=settings.compile).compiled
    parameters = sum(each.nbytes for each in kept)
    small = parameters < LEAST_SENT_EARLY_BYTES
    whole = compiled or small or settings.microbatch is not None
    shown: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": sum(kept[number].numel() for number in entries),
            "bytes": sum(gradients[number] for number in entries),
            "held": sum(kept[number].nbytes for number in entries) + still,
        }
        for name, entries, still in zip(stages.names, stages.entries, frozen, strict=True)
    ]
    masters = torch.float32 if settings.precision.parameters else None
    state, scratch, known = _state_bytes(optimizer, parts.trained, masters=masters)
    other = {id(each): each.nbytes for each in (*parts.other.values(), *user.module.buffers())}
    sizes = Footprint(
        parameters=parameters,
        other=sum(other.values()),
        gradients=sum(gradients),
        state=state,
        scratch=scratch,
        stage_gradients=[stage["bytes"] for stage in shown],
        stage_values=[stage["held"] for stage in shown],
        sent=0 if whole else max(sum(gradients[n] for n in own) for own in early.entries),
        uneven=frozenset(n for n in devices if not divides_evenly(segments, n, early)),
        shards=settings.shards,
        frozen=sum(frozen),
        frozen_stage=max(frozen),
    )
    return shown, sizes, known


def _state_bytes(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, torch.nn.Parameter],
    *,
    masters: torch.dtype | None,
) -> tuple[int, int, bool]:
    """Return the bytes of an optimizer's state and scratch memory, and whether the state is known.

    PyTorch's foreach kernels need scratch memory for one value per parameter, fused kernels none.
    """
    wanted = {id(parameter) for parameter in trained.values()}
    total, scratch, known = 0, 0, True
    for each in optimizers_in(optimizer).values():
        for group in each.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in wanted:
                    continue
                share = _state_of(each, group, parameter)
                known &= share is not None
                itemsize = (masters or parameter.dtype).itemsize
                share = _USUAL_STATE * itemsize if share is None else share
                total += int(parameter.numel() * (share + (masters.itemsize if masters else 0)))
                scratch += 0 if group.get("fused") else parameter.numel() * itemsize
    return total, scratch, known


def _state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter
) -> float | None:
    """Measure the bytes of state per element with a small parameter; None if that is not possible.

    Only for PyTorch's own optimizers: creating or stepping another one may have any side effect.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    small = torch.nn.Parameter(torch.zeros((8,) * min(parameter.dim(), 2), dtype=parameter.dtype))
    small.grad = torch.zeros_like(small)
    chosen = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    try:
        probe = type(optimizer)([{**chosen, "params": [small]}])  # type: ignore[call-arg]
        probe.step()
    except (TypeError, ValueError, RuntimeError):  # needs a closure, or other parameters
        return None
    values = [v for v in probe.state[small].values() if isinstance(v, torch.Tensor)]
    return sum(v.nbytes for v in values if v.numel() >= small.numel()) / small.numel()

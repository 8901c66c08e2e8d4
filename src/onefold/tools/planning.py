"""Finds what a model would take of memory, in place of training it.

`Footprint` computes what a model takes of memory, by what devices keep of it. Activations, and what
PyTorch takes for itself, come on top: nobody knows them before a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checks.model import held_in
from onefold.checks.optimizer import updates_by_element
from onefold.core.context import LaunchContext
from onefold.core.flat import lay_out
from onefold.core.fold import blocks_of
from onefold.core.options import WITH_STATE
from onefold.core.settings import Settings, added_up_in
from onefold.core.shard import Shares
from onefold.core.stages import cut_pipeline
from onefold.core.storage import cut_segments, divides_evenly
from onefold.session.userparts import UserParts
from onefold.shard.kernels import Compilers
from onefold.shard.modelparts import ModelParts
from onefold.shard.stages import StageModules
from onefold.step.assembly import LEAST_SENT_EARLY_BYTES
from onefold.system.safe_files import replace_file
from onefold.update.optimizers import name_of, optimizers_in

__all__ = ["plan_instead"]


_BY_SHARDS = ("replicate", WITH_STATE, "partition", "offload", "disk")
_USUAL_STATE = 2
"""Numbers that an optimizer is taken to keep for each parameter if that is not known."""


def plan_instead(
    context: LaunchContext, user: UserParts, optimizer: torch.optim.Optimizer, settings: Settings
) -> None:
    """Write a plan and end the script, if the launcher has asked for that.

    Args:
        context: how this process was started.
        user: the script's parts.
        optimizer: the user's, or what stands in for it.
        settings: of the run.

    Raises:
        SystemExit: the plan is written.
    """
    if not context.options.plan:
        return
    counts = {count: min(count, settings.shards) for count in context.options.plan_devices}
    stages, sizes, known = _measured(user, optimizer, settings, counts.values())
    # CPU devices of a host share memory, and so have the parameters once.
    together = all(device.startswith("cpu") for device in context.devices)
    found = {
        "model": type(user.module).__name__,
        "optimizer": name_of(optimizer),
        "state_is_known": known,
        "shards": settings.shards,
        "parameters": sum(stage["parameters"] for stage in stages),
        "parameter_bytes": sizes.parameters,
        "together": together,
        "stages": stages,
        "rows": [
            {
                "devices": count,
                "replicate": sizes.replicating(used, together=together),
                WITH_STATE: sizes.replicating(used, together=together, state=True),
                "partition": sizes.partitioning(used, together=together),
                "pipeline": _in_pipeline(sizes, stages, count, together=together),
                "offload": sizes.offloading(used, together=together),
                "disk": sizes.on_disk,
            }
            # Only a pipeline can use more devices than shards.
            | dict.fromkeys(_BY_SHARDS if used < count else ())
            for count, used in counts.items()
        ],
    }
    replace_file(Path(context.options.plan), json.dumps(found))
    raise SystemExit(0)


def _in_pipeline(
    sizes: Footprint, stages: list[dict[str, Any]], devices: int, *, together: bool
) -> int | None:
    """Of a device of a pipeline; None if there are fewer stages than devices."""
    root, *rest = (stage["bytes"] for stage in stages)
    if devices > len(rest):
        return None
    shares = [root] + [0] * (devices - 1)
    _, *held = (stage["held"] for stage in stages)
    for place, share in zip(cut_pipeline(held, devices), rest, strict=True):
        shares[place] += share
    return sizes.pipelining(devices, max(shares), together=together)


def _measured(
    user: UserParts,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    devices: Iterable[int],
) -> tuple[list[dict[str, Any]], Footprint, bool]:
    """The stages, all sizes, and whether that of the optimizer's state is more than a guess."""
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
    # With a microbatch nobody knows before a step whether a shard runs in microbatches.
    compiled = Compilers(user.module, *user.losses.values(), compiles=settings.compile).compiled
    whole = compiled or settings.microbatch is not None
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
        parameters=sum(each.nbytes for each in kept),
        other=sum(other.values()),
        gradients=sum(gradients),
        state=state,
        scratch=scratch,
        stage=max(stage["bytes"] for stage in shown),
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
    """Bytes of an optimizer's state and of what it computes with, and whether the state is known.

    PyTorch's kernels for lists compute with a value for each parameter, fused ones with none.
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
    """Bytes of state for each element, by a step of a small parameter; None if that is not known.

    Only of PyTorch's own optimizers: making another one, or its step, may do anything.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    small = torch.nn.Parameter(torch.zeros((8,) * min(parameter.dim(), 2), dtype=parameter.dtype))
    small.grad = torch.zeros_like(small)
    chosen = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    try:
        probe = type(optimizer)([{**chosen, "params": [small]}])  # type: ignore[call-arg]
        probe.step()
    except (TypeError, ValueError, RuntimeError):  # wants a closure, or parameters of another kind
        return None
    values = [v for v in probe.state[small].values() if isinstance(v, torch.Tensor)]
    return sum(v.nbytes for v in values if v.numel() >= small.numel()) / small.numel()


_OF_A_STAGE = 4
"""Gradients of the largest stage that a device may hold while they are handed over: what backward
made, what comes in two boxes, what is sent."""
_STAGES_AT_HAND = 2
"""Stages of which a device has the parameters at one time, where others keep them; or gradients,
where it sends these early."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes, of the whole model.

    >>> sizes = Footprint(parameters=100, other=0, gradients=100, state=200, stage=5, shards=8)
    >>> sizes.replicating(1, together=True), sizes.replicating(4, together=True)
    (700, 375)
    >>> sizes.replicating(2, together=False), sizes.replicating(2, together=False, state=True)
    (650, 800)
    >>> sizes.partitioning(4, together=True), sizes.partitioning(4, together=False)
    (145, 133)
    >>> sizes.pipelining(4, 30, together=True), sizes.on_disk
    (205, 700)
    >>> sizes.offloading(4, together=True), sizes.offloading(4, together=False)
    (20, 34)
    """

    parameters: int
    """Those that are trained."""
    other: int
    """Frozen parameters, but those in `frozen`, and buffers."""
    gradients: int
    """One gradient for each trained parameter, in the dtype in which they are added up."""
    state: int
    """What the optimizer keeps, masters of parameters in low precision with it."""
    stage: int
    """The gradients of the largest stage."""
    shards: int
    scratch: int = 0
    """What the optimizer computes with besides, on a device with memory of its own."""
    frozen: int = 0
    """Frozen parameters that lie in stages."""
    sent: int = 0
    """The gradients of the largest stage that leaves while backward runs; 0 if none does."""
    uneven: frozenset[int] = frozenset()
    """The numbers of devices among which no partitions with a part of each stage are even."""
    frozen_stage: int = 0
    """Those of the stage that has most of them."""

    def replicating(self, devices: int, *, together: bool, state: bool = False) -> int:
        """Of each of so many devices; ``together`` if all of them use the same parameters.

        With ``state`` each has all of the optimizer's state, unless they are together.
        """
        state &= not together
        if devices > 1 and not together:
            sums = self._sums_apart(devices, to_all=state)
        else:
            # What backward makes, and what is handed to others; then a sum for each level of the
            # tree of a device's shards, or what the optimizer computes with.
            scratch = 0 if together else self.scratch
            sums = self.gradients * (1 + (devices > 1))
            sums += max(self.gradients * self._levels(devices), scratch)
        own = sums + self.state // (1 if state else devices)
        return own + self._values(devices, together=together)

    def _sums_apart(self, devices: int, *, to_all: bool) -> int:
        """Of gradients, where several devices have memory of their own.

        With ``to_all`` each device adds up all of them.
        """
        shares = Shares.even(shards=self.shards, devices=devices)
        blocks = [blocks_of(shares.shards_of(number), self.shards) for number in range(devices)]
        counts = [len(each) for each in blocks]
        largest = max(stop - start for each in blocks for start, stop in each)
        updating = 1 if to_all else devices
        # A partial sum for each block, and a partition of each of the others' partial sums, or all
        # of these; then the sums below the largest, or what the optimizer computes with.
        held = self.gradients * max(counts)
        came = self.gradients * (sum(counts) - max(counts)) // updating
        early = max(counts) == 1 and self.sent and self.parameters >= LEAST_SENT_EARLY_BYTES
        levels = (largest - 1).bit_length()
        below = self.gradients * (levels + 1)
        if early and (to_all or devices not in self.uneven):
            # Before the last shard, one sum has moved to where it is sent from.
            at_hand = max(self.gradients * min(levels, 1), _STAGES_AT_HAND * self.sent)
            below = self.gradients * max(levels - 1, 0) + at_hand
        return held + came + max(below, self.scratch // updating)

    def partitioning(self, devices: int, *, together: bool) -> int:
        """The same for devices that keep partitions, of parameters as well if not ``together``."""
        if devices == 1:
            return self.replicating(1, together=together)
        if together:
            sums = self.gradients * (1 + self._levels(devices))
            own = (sums + self.state) // devices + _OF_A_STAGE * self.stage
            return own + self._values(devices, together=True)
        # What is added up between the rounds, and stages on their way.
        ends = range(devices, self.shards, devices)
        sums = max((len(blocks_of(range(end), self.shards)) for end in ends), default=1)
        below = self.gradients * sums // devices + self._underway(devices, begun=bool(ends))
        updated = (self.gradients + self.scratch) // devices
        kept = (self.parameters + self.frozen + self.state) // devices + self.other
        return kept + max(below, updated)

    def pipelining(self, devices: int, share: int, *, together: bool) -> int:
        """The same for one pipeline, of which a device has at most these bytes of gradients."""
        state = self.state * share // max(self.gradients, 1)
        sums = share * (1 + self._levels())
        return sums + state + self._values(devices, together=together)

    def offloading(self, devices: int, *, together: bool) -> int:
        """The same for devices whose model is in a file, or, if not ``together``, is brought."""
        if together:
            return _OF_A_STAGE * self.stage
        # What it sends of a stage it must have there, as well.
        sent = self.stage // devices if devices > 1 else 0
        return self.other + self._underway(devices, begun=True) + sent

    def _underway(self, devices: int, *, begun: bool) -> int:
        """Of stages on their way, where devices have no memory in common.

        Of two boxes a device needs no room for its own part; nor is there a sum yet, in a round
        that is the first, of what is on its way.
        """
        gradients = 7 * self.stage - (2 if begun else 5) * self.stage // devices
        return gradients + _STAGES_AT_HAND * self.frozen_stage

    @property
    def on_disk(self) -> int:
        """Of that file."""
        sums = self.gradients * (1 + self._levels())
        return self.parameters + self.frozen + self.other + self.state + sums

    def _values(self, devices: int, *, together: bool) -> int:
        return (self.parameters + self.frozen + self.other) // (devices if together else 1)

    def _levels(self, devices: int = 1) -> int:
        """Of the tree of a device's shards, above its leaves."""
        return (-(-self.shards // devices) - 1).bit_length()

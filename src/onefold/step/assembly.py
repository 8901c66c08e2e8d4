"""Assembles an engine from model, optimizer and devices, and records which Trainer holds a model.

`assemble` makes the engine. `hold` records the last Trainer that was created for a model. Another
Trainer may take the model, or a part of it. The previous Trainer then leaves the run first, as with
`Trainer.close`, because its memory may be shared by several processes, and because the optimizer's
state is keyed by its segments.

Note: values after a Trainer
----------------------------
If no Trainer has held a model, the lead's values are broadcast, so that the model may be
initialized from unseeded random numbers. If a Trainer has held it, its values were the same on
every device. If they differ now, the script changed them on one device only, and that is refused.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from onefold.checks.description import compare, describe, describe_settings
from onefold.checks.model import held_in, updates_by_element
from onefold.core.assignment import Assignment, Devices
from onefold.core.flat import lay_out, named_tensors, own_name, tensor_digests
from onefold.core.late import load
from onefold.core.settings import Settings
from onefold.core.shard import Shares
from onefold.core.storage import Frozen, Storage, cut_segments, divides_evenly
from onefold.deferred.access import deferred_of
from onefold.exchange.exchange import Exchange, join
from onefold.exchange.memory import Start
from onefold.placement.base import PlacementLayout, StepContext, placement_of
from onefold.shard.buffers import BufferPlaces, BufferSet
from onefold.shard.kernels import Compilers
from onefold.shard.model_parts import ModelParts
from onefold.shard.replica import LossFunction, Replica
from onefold.step.engine import Engine
from onefold.update.norms import refuse_clipping
from onefold.update.optimizer import PartitionedOptimizer
from onefold.update.optimizers import optimizers_in, steps_by_parameter

__all__ = ["LEAST_SENT_EARLY_BYTES", "assemble", "check_moves", "hold", "take_from_holders"]

LEAST_SENT_EARLY_BYTES = 4 << 20
"""Size of a model's parameters, in bytes, from which its partial sums are sent stage by stage.

Smaller models are not mirrored either: with ``replicate:state`` each device then updates its own
partition, as with ``replicate``, and keeps optimizer state for this partition only.
"""


# Keyed by identity, because tensors compare elementwise. Weak on both sides, so that nothing here
# keeps a model or a Trainer alive. An entry may outlive its Trainer.
_holders = WeakTensorKeyDictionary()


def take_from_holders(module: torch.nn.Module) -> None:
    """Make every Trainer that holds a part of a model leave the run. Call it on all devices."""
    # Look at parameters only: two Trainers may hold the same buffer, because each has a copy.
    found = [_holders[tensor]() for tensor in module.parameters() if tensor in _holders]
    for close in dict.fromkeys(filter(None, found)):
        close()


def hold(module: torch.nn.Module, close: Callable[[], None]) -> None:
    """Record that a model now belongs to a Trainer, whose method ``close`` leaves the run."""
    # Use a weak reference: a strong one to the bound method would keep the Trainer alive.
    reference = weakref.WeakMethod(close)
    for tensor in chain(module.parameters(), module.buffers()):
        _holders[tensor] = reference


def check_moves(module: torch.nn.Module, device: torch.device) -> None:
    """Refuse a model whose parameters cannot be moved to a device and stay the same objects.

    PyTorch can move them in this way for its built-in accelerators.

    Raises:
        ValueError: a part of the model is on a device of another type.
    """
    found = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    try:
        for each in found - {device}:
            torch.empty(0, device=each).data = torch.empty(0, device=device)
    except RuntimeError as error:
        raise ValueError(
            f"PyTorch cannot move the parameters of a model to {device} and keep them the same "
            f"objects. Move the model before you create its optimizer, with "
            f"model.to({str(device)!r})"
        ) from error


def assemble(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Mapping[str, LossFunction],
    *,
    settings: Settings,
    devices: Devices,
    shares: Shares,
    scheduler: LRScheduler | None,
    joined: Callable[[Exchange], None],
    stages: Sequence[torch.nn.Module] | None = None,
) -> Engine:
    """Bring model and optimizer into a run, and broadcast the lead's values.

    ``joined`` is called with the exchange as soon as it exists: from then on other devices wait for
    this process, and must learn of its failures. ``stages`` are the modules at which the model may
    be cut; None to find them.

    Raises:
        ValueError: the optimizer holds no parameter that requires a gradient; or see `check_moves`.
        DisagreementError: another device has another model, optimizer or setting.
        PeerError: another device did not join in time.
    """
    check_moves(module, devices.own_devices[devices.own[0]])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parts = _parts(module, held)
    # Digest the values before the run's memory replaces what the script has.
    held_before = {n: t for n, t in named_tensors(module).items() if t in _holders}
    values = tensor_digests(held_before) if len(devices.own) < len(devices.all) else {}
    places = BufferPlaces(module, settings.buffers)
    # Every set copies the module's buffers as the script left them. Build all sets before one is
    # attached: from then on the module's buffers are views of that set's memory.
    buffers = {number: BufferSet(places, device) for number, device in devices.own_devices.items()}
    first = buffers[devices.own[0]]
    first.attach()
    placement = placement_of(devices, settings)
    layout = placement.layout(parts, stages)
    storage = _storage(parts, first, optimizer, settings, devices, layout)
    placement.check(storage)
    start = _start(parts, first)
    assignment = Assignment.first(
        devices.all,
        shares=shares,
        segments=storage.segments,
        stages=storage.stages,
        early=None if storage.mirrors else storage.early,
    )
    described = {
        **describe(parts, optimizer, settings, devices, shares, scheduler, storage.stages, values),
        **describe_settings(optimizer, scheduler),
        "the order of the losses": ", ".join(losses),
    }
    exchange = join(
        storage,
        start,
        assignment,
        devices,
        description=json.dumps(described).encode(),
        compare=compare,
        timeout_s=settings.timeout_s,
        allocator=layout.allocator,
    )
    # Call this before anything else can fail: the other devices wait for this process from here on.
    joined(exchange)
    memory = exchange.memory
    undrawn = [each for each in parts.named.values() if deferred_of(each) is not None]
    with load("deferred.values").revealed(undrawn) if undrawn else nullcontext():
        trained, other, precision = memory.trained, memory.other, settings.precision
        cut = layout.modules if storage.early is None else layout.early
        replicas = [
            Replica(n, device, parts, trained[n], other[n], buffers[n], precision, cut)
            for n, device in devices.own_devices.items()
        ]
        if settings.graphs:
            load("shard.graphs").capture_shards(replicas, gathers=storage.stages is not None)
        # Afterwards the model's parameters are views of the run's memory, with the lead's values.
        replicas[0].attach()
        refuse_clipping(parts.trained.values())
        # Do this after attach: existing optimizer state moves to the device of its parameters.
        parameters = list(parts.trained.values())
        update = PartitionedOptimizer(
            optimizer, parameters, storage, trained, assignment, memory.allocator
        )
        placement.distribute(start, update, exchange, assignment)
        compilers = Compilers(parts.module, *losses.values(), compiles=settings.compile)
        context = StepContext(replicas, exchange, update, settings, compilers)
        placement.start(context)
        frozen = {n: p for n, p in {**parts.other, **parts.frozen}.items() if id(p) in held}
        return Engine(context, placement, assignment, losses, frozen, described)


def _parts(module: torch.nn.Module, held: Container[int]) -> ModelParts:
    """Split the model into the parameters that the optimizer holds and trains, and the rest."""
    trained = [n for n, p in module.named_parameters() if id(p) in held and p.requires_grad]
    if not trained:
        raise ValueError("the optimizer holds no parameter that requires a gradient")
    return ModelParts(module, trained)


def _start(parts: ModelParts, buffers: BufferSet) -> Start:
    trained, other, frozen = (
        [deferred_of(p) or p.detach() for p in some.values()]
        for some in (parts.trained, parts.other, parts.frozen)
    )
    return Start(trained, other, buffers.flat, frozen)


def _storage(
    parts: ModelParts,
    buffers: BufferSet,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    devices: Devices,
    placed: PlacementLayout,
) -> Storage:
    modules, devices_in_all = placed.modules, len(devices.all)
    # Use the names of the uncompiled model, so that a checkpoint fits both.
    layout = lay_out({own_name(name): p for name, p in held_in(settings.precision, parts).items()})
    segments, early = cut_segments(layout, by_element=updates_by_element(optimizer)), placed.early
    # Send small models as a whole: each message costs more than overlapping it would save.
    if layout.nbytes < LEAST_SENT_EARLY_BYTES:
        early = None
    updated_in = torch.float32 if settings.precision.parameters else None
    # In a mirrored run every device updates every segment. Only PyTorch's own optimizers are known
    # to give equal bits then; others may count calls or draw numbers.
    each = optimizers_in(optimizer).values()
    mirrors = placed.mirrors and early is not None and not updated_in and steps_by_parameter(each)
    if placed.mirrors and not mirrors and devices.has_lead:
        load("shard.advice").say_partitioned(layout.nbytes, small=early is None)
    # If every partition must have a part of every stage, sizes may be uneven, and the largest one
    # would slow each update. Then send sums as a whole.
    if (
        early is not None
        and not mirrors
        and not divides_evenly(segments, devices_in_all, early.stages)
    ):
        early = None
    frozen: Frozen | None = None
    if modules is not None:
        share_out = load("shard.stage_modules").frozen_of
        frozen = share_out(parts.frozen, modules, devices_in_all)
    return Storage(
        parameters=layout,
        other=lay_out(parts.other),
        buffers=buffers.layout,
        segments=segments,
        shards=settings.shards,
        devices=devices_in_all,
        stages=None if modules is None else modules.stages,
        early=None if early is None else early.stages,
        mirrors=mirrors,
        frozen=frozen,
        updated_in=updated_in,
    )

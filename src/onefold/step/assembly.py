"""Puts an engine together from model, optimizer and devices, and records whose the model is.

`assemble` makes the engine of the user's model and optimizer and of who takes part. `hold` records
which Trainer a model belongs to: the last one that was made of it. Another Trainer may take the
model, or a part of it. The one before leaves the run first, as by `Trainer.close`: its memory may
be that of several processes, and its optimizer has the state.

Note: values after a Trainer
----------------------------
Of a model that no Trainer has held, the lead's values become everybody's, so that it may be drawn
from unseeded random numbers. One that comes from a Trainer had the same values on every device. If
they differ now, the script has changed them on one device alone, and that is refused.
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
"""Parameters of a model whose partial sums are sent stage by stage.

Smaller models are not mirrored either: with ``replicate:state`` each device then updates its own
partition, as with ``replicate``, and no device has the state of another.
"""


# By identity, as tensors compare by element, and weakly on both sides: nothing here keeps a model
# or a Trainer. An entry stays when its Trainer is gone.
_holders = WeakTensorKeyDictionary()


def take_from_holders(module: torch.nn.Module) -> None:
    """Have every Trainer that holds a part of a model leave the run; called on all devices."""
    # By its parameters alone: Trainers may share buffers, which each has in memory of its own.
    found = [_holders[tensor]() for tensor in module.parameters() if tensor in _holders]
    for close in dict.fromkeys(filter(None, found)):
        close()


def hold(module: torch.nn.Module, close: Callable[[], None]) -> None:
    """Note that a model now belongs to a Trainer, of which this method leaves the run."""
    reference = weakref.WeakMethod(close)
    for tensor in chain(module.parameters(), module.buffers()):
        _holders[tensor] = reference


def check_moves(module: torch.nn.Module, device: torch.device) -> None:
    """Refuse a model that cannot get memory of a device while it is the same objects.

    PyTorch allows that for the kinds of accelerators that it has itself.

    Raises:
        ValueError: a part of it is on a device of another kind.
    """
    found = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    try:
        for each in found - {device}:
            torch.empty(0, device=each).data = torch.empty(0, device=device)
    except RuntimeError as error:
        raise ValueError(
            f"PyTorch cannot move the parameters of a model to {device} and keep them the same "
            f"objects: move the model before its optimizer is made, by model.to({str(device)!r})"
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
    """Bring model and optimizer into a run; the lead's values become everybody's.

    ``joined`` is called with the exchange as soon as there is one: from then on others wait for
    this process, and must hear of its failures. ``stages`` are where the model may be cut; None to
    find that out.

    Raises:
        ValueError: the optimizer holds no parameter that can be trained; or see `check_moves`.
        DisagreementError: another device brought another model, optimizer or setting.
        PeerError: another device did not join in time.
    """
    check_moves(module, devices.own_devices[devices.own[0]])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parts = _parts(module, held)
    # Before any device's memory takes the place of what the script has.
    held_before = {n: t for n, t in named_tensors(module).items() if t in _holders}
    values = tensor_digests(held_before) if len(devices.own) < len(devices.all) else {}
    places = BufferPlaces(module, settings.buffers)
    # Every set copies the module's buffers as the script left them, and so before one is attached:
    # from then on they are views of that set's memory.
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
    joined(exchange)
    memory = exchange.memory
    named = parts.named.values()
    undrawn = any(deferred_of(each) is not None for each in named)
    with load("deferred.values").revealed(named) if undrawn else nullcontext():
        trained, other, precision = memory.trained, memory.other, settings.precision
        cut = layout.modules if storage.early is None else layout.early
        replicas = [
            Replica(n, device, parts, trained[n], other[n], buffers[n], precision, cut)
            for n, device in devices.own_devices.items()
        ]
        # From here on the model's values lie in the run's memory: the lead's, everywhere.
        replicas[0].attach()
        refuse_clipping(parts.trained.values())
        # After attach: state that the optimizer already has moves to where its parameters now lie.
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
    """Divide the model into what the optimizer, which has what is held, trains, and the rest."""
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
    # By the names that the model has when it is not compiled, so that a checkpoint fits both.
    layout = lay_out({own_name(name): p for name, p in held_in(settings.precision, parts).items()})
    segments, early = cut_segments(layout, by_element=updates_by_element(optimizer)), placed.early
    # Small models are sent as a whole: each message costs more than it saves.
    if layout.nbytes < LEAST_SENT_EARLY_BYTES:
        early = None
    updated_in = torch.float32 if settings.precision.parameters else None
    # What others' optimizers count or draw is known of one update of each segment alone.
    each = optimizers_in(optimizer).values()
    mirrors = placed.mirrors and early is not None and not updated_in and steps_by_parameter(each)
    if placed.mirrors and not mirrors and devices.has_lead:
        load("shard.advice").say_partitioned(layout.nbytes, small=early is None)
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

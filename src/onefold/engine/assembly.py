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
import os
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from onefold.core.flat import (
    Layout,
    laid_out,
    lay_out,
    named_tensors,
    storage_order,
    tensor_digests,
)
from onefold.core.names import own_name
from onefold.core.precision import Precision
from onefold.core.recipe import short_lived
from onefold.core.roster import Roster, Team
from onefold.core.settings import Settings
from onefold.core.shard import Plan
from onefold.core.storage import Storage, cut_pieces
from onefold.engine.buffers import BufferPlaces, BufferSet
from onefold.engine.description import compare, describe
from onefold.engine.engine import Engine
from onefold.engine.firstvalues import revealed, undrawn_of
from onefold.engine.leftovers import refuse_clipping
from onefold.engine.modelcheck import held_in
from onefold.engine.modelparts import ModelParts
from onefold.engine.optimizercheck import updates_by_element
from onefold.engine.optimizerstate import PieceState, packed, unpack
from onefold.engine.replica import LossFunction, Replica
from onefold.engine.stagemodules import StageModules, cut_by_itself, frozen_in_stages, frozen_of
from onefold.engine.update import MASTER, SpanOptimizer
from onefold.exchange.exchange import Exchange
from onefold.exchange.joining import has_memory_in_common, join
from onefold.exchange.memory import FirstValues, Memory, Start
from onefold.system.heap import ORDINARY, DiskHeap, Heap

__all__ = ["assemble", "hold", "take_from_holders"]


class Holder(Protocol):
    """What a model belongs to."""

    def close(self) -> None:
        """Leave the run, so that the model is the script's."""


# By identity, as tensors compare by element, and weakly on both sides: nothing here keeps a model
# or a Trainer. An entry stays when its Trainer is gone.
_holders = WeakTensorKeyDictionary()


def take_from_holders(module: torch.nn.Module) -> None:
    """Have every Trainer that holds a part of a model leave the run; called on all devices."""
    # By its parameters alone: Trainers may share buffers, which each has in memory of its own.
    found = [_holders[tensor]() for tensor in module.parameters() if tensor in _holders]
    for holder in dict.fromkeys(each for each in found if each is not None):
        holder.close()


def hold(module: torch.nn.Module, holder: Holder) -> None:
    """Note that a model now belongs to a Trainer."""
    reference = weakref.ref(holder)
    for tensor in chain(module.parameters(), module.buffers()):
        _holders[tensor] = reference


def digests_of_held(module: torch.nn.Module) -> dict[str, str]:
    """Digest the parameters and buffers that have belonged to a Trainer, by name."""
    tensors = named_tensors(module)
    return tensor_digests({n: tensor for n, tensor in tensors.items() if tensor in _holders})


def assemble(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Mapping[str, LossFunction],
    *,
    settings: Settings,
    team: Team,
    plan: Plan,
    schedule: LRScheduler | None,
    joined: Callable[[Exchange], None],
    stages: Sequence[torch.nn.Module] | None = None,
) -> Engine:
    """Bring model and optimizer into a run; the lead's values become everybody's.

    ``joined`` is called with the exchange as soon as there is one: from then on others wait for
    this process, and must hear of its failures. ``stages`` are where the model may be cut; None to
    find that out.

    Raises:
        ValueError: the optimizer holds no parameter that can be trained.
        DisagreementError: another device brought another model, optimizer or setting.
        PeerError: another device did not join in time.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parts = _parts(module, held)
    # Before any device's memory takes the place of what the script has.
    values = digests_of_held(module) if len(team.own) < len(team.devices) else {}
    places = BufferPlaces(module, settings.buffers)
    # Every set copies the module's buffers as the script left them, and so before one is attached:
    # from then on they are views of that set's memory.
    buffers = {number: BufferSet(places, device) for number, device in team.own_devices.items()}
    first = buffers[team.own[0]]
    first.attach()
    heap = _heap(team)
    modules = _stages(parts, stages, settings, team, heap)
    storage = _storage(parts, first, optimizer, settings, team, modules, heap)
    start = _start(parts, first)
    roster = _roster(storage, plan, team)
    described = describe(parts, optimizer, settings, team, plan, schedule, storage.stages, values)
    exchange = join(
        storage,
        start,
        roster,
        team,
        description=json.dumps(described).encode(),
        compare=compare,
        timeout_s=settings.timeout_s,
        heap=heap,
    )
    joined(exchange)
    memory = exchange.memory
    with revealed(parts.named.values()):
        replicas = _replicas(team, parts, memory, buffers, settings.precision, modules)
        # From here on the model's values lie in the run's memory: the lead's, everywhere.
        replicas[0].attach()
        refuse_clipping(parts.trained.values())
        # After attach: state that the optimizer already has moves to where its parameters now lie.
        update = _update(optimizer, parts, storage, roster, memory)
        _hand_out(update, start, roster, exchange, team)
        return Engine(
            replicas=replicas,
            exchange=exchange,
            roster=roster,
            update=update,
            losses=losses,
            settings=settings,
            frozen={n: p for n, p in {**parts.other, **parts.frozen}.items() if id(p) in held},
        )


def _parts(module: torch.nn.Module, held: Container[int]) -> ModelParts:
    """Divide the model into what the optimizer, which has what is held, trains, and the rest."""
    trained = [n for n, p in module.named_parameters() if id(p) in held and p.requires_grad]
    if not trained:
        raise ValueError("the optimizer holds no parameter that requires a gradient")
    return ModelParts(module, trained)


def _roster(storage: Storage, plan: Plan, team: Team) -> Roster:
    return Roster.first(
        team.devices, plan=plan, pieces=storage.pieces, hosts=team.hosts, stages=storage.stages
    )


def _replicas(
    team: Team,
    parts: ModelParts,
    memory: Memory,
    buffers: Mapping[int, BufferSet],
    precision: Precision,
    modules: StageModules | None,
) -> list[Replica]:
    trained, other = memory.trained, memory.other
    return [
        Replica(n, device, parts, trained[n], other[n], buffers[n], precision, modules)
        for n, device in team.own_devices.items()
    ]


def _update(
    optimizer: torch.optim.Optimizer,
    parts: ModelParts,
    storage: Storage,
    roster: Roster,
    memory: Memory,
) -> SpanOptimizer:
    trained = list(parts.trained.values())
    return SpanOptimizer(
        optimizer, trained, storage, memory.trained, roster, memory.heap, lent=memory.is_lent
    )


def _stages(
    parts: ModelParts,
    given: Sequence[torch.nn.Module] | None,
    settings: Settings,
    team: Team,
    heap: Heap,
) -> StageModules | None:
    """The stages after each of which gradients are handed over; None if whole sums are.

    Where devices have parameters brought, frozen ones that lie in a stage are set apart.
    """
    keep = team.world.options.keeps
    line = team.world.options.line_of(len(team.devices))
    # One shard is added to nothing, so there is nothing to hand over: but perhaps to put away.
    if keep == "all" or (keep != "host" and settings.shards == 1 and line == 1):
        return None
    modules = cut_by_itself(parts.module) if given is None else given
    if line > 1 and settings.microbatch == "auto":
        raise ValueError(
            "expected a number for microbatch with --keep stages, or None, got 'auto': to find "
            "one, each device would have to compute a whole shard alone"
        )
    found = StageModules(parts.module, modules, parts.trained, line)
    if heap.apart or (keep != "host" and not has_memory_in_common(team)):
        parts.lend(frozen_in_stages(parts.other, found))
    return found


def _heap(team: Team) -> Heap:
    """Where the model of this process lies on the host."""
    options = team.world.options
    if options.keeps != "host":
        return ORDINARY
    kind = team.devices[team.own[0]].type
    if kind != "cpu" and len(team.own) > 1:
        raise ValueError(
            f"expected one {kind} device in each process for keep=host, got {len(team.own)} of "
            f"Trainer(devices=...): leave them out, and start the script by onefold run --devices"
        )
    return DiskHeap.at(options.home, apart=kind != "cpu")


def _hand_out(
    update: SpanOptimizer, start: Start, roster: Roster, exchange: Exchange, team: Team
) -> None:
    """Give owners the lead's values of their pieces, where models have none, or rounded ones."""
    if exchange.memory.is_lent:
        hand_out_entries(start, update, exchange, leads=team.has_lead)
    elif update.storage.rounds:
        _hand_out_masters(update, start.trained, roster, exchange, team)


def _hand_out_masters(
    update: SpanOptimizer,
    trained: Sequence[torch.Tensor | FirstValues],
    roster: Roster,
    exchange: Exchange,
    team: Team,
) -> None:
    storage = update.storage

    @lru_cache(maxsize=1)  # the pieces of a parameter follow each other
    def drawn(entry: int) -> torch.Tensor:
        return values_of_entry(trained[entry], storage.masters, entry)

    def make(device: int) -> torch.Tensor:
        devices = team.own if device in team.own else (device,)
        states = []
        for number in chain.from_iterable(roster.spans[each] for each in devices):
            piece = storage.pieces[number]
            values = drawn(piece.entry)[piece.start : piece.stop]
            states.append(PieceState(number, MASTER, values, True))
        return packed(states, exchange.memory.heap)

    update.adopt_states(unpack(exchange.transport.hand_out(make if team.has_lead else None)))


def _start(parts: ModelParts, buffers: BufferSet) -> Start:
    trained, other, frozen = (
        [undrawn_of(p) or p.detach() for p in some.values()]
        for some in (parts.trained, parts.other, parts.frozen)
    )
    return Start(trained, other, buffers.flat, frozen)


def _storage(
    parts: ModelParts,
    buffers: BufferSet,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    team: Team,
    modules: StageModules | None,
    heap: Heap,
) -> Storage:
    # By the names that the model has when it is not compiled, so that a checkpoint fits both.
    layout = lay_out({own_name(name): p for name, p in held_in(settings.precision, parts).items()})
    devices = len(team.devices)
    storage = Storage.alike(
        layout,
        other=lay_out(parts.other),
        buffers=buffers.layout,
        pieces=cut_pieces(layout, by_element=updates_by_element(optimizer)),
        shards=settings.shards,
        devices=devices,
        stages=None if modules is None else modules.stages,
        frozen=None if modules is None else frozen_of(parts.frozen, modules, devices),
    ).with_masters(torch.float32 if settings.precision.parameters else None)
    on_disk = heap.on_disk and not heap.apart
    refuse_large_stages(storage, team.devices[team.own[0]], on_disk=on_disk)
    return storage


def refuse_large_stages(storage: Storage, device: torch.device, *, on_disk: bool) -> None:
    """Refuse a stage whose parameters and their gradient are more than a device has.

    Args:
        storage: the sizes of the run.
        device: one of them.
        on_disk: whether parameters lie in a file, so that only the gradient must fit.

    Raises:
        ValueError: there is one; the message names it, and both sizes.
    """
    if storage.stages is None:
        return
    held = storage.lent_layout().stage_bytes
    pairs = zip(storage.stage_layout().stage_bytes, held, strict=True)
    needed = [gradient + (0 if on_disk else values) for gradient, values in pairs]
    largest = max(range(len(needed)), key=needed.__getitem__)
    capacity = capacity_bytes(device)
    if needed[largest] > capacity:
        what = "gradient" if on_disk else "parameters and gradient"
        raise ValueError(
            f"stage {storage.stages.names[largest]} is larger than a device: expected at most "
            f"{capacity:,} bytes, which {device} has, got {needed[largest]:,} bytes of {what}. Cut "
            f"it with Trainer(stages=[...]), or its largest layer with onefold.Sliced; `onefold "
            f"plan` shows all stages"
        )


_ROOT = Path("/sys/fs/cgroup")


def capacity_bytes(device: torch.device) -> int:
    """All memory of a device: of the host, what this process may take of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits()])


def _limits() -> list[int]:
    """The limits of the control groups that this process is in; none where they are not used."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # Number, what is controlled, path; of version 2 the number is 0 and the second is empty.
        _, controlled, path = line.split(":", 2)
        if not controlled:
            found += _read_limits(_ROOT, path, "memory.max")
        elif "memory" in controlled.split(","):
            found += _read_limits(_ROOT / "memory", path, "memory.limit_in_bytes")
    return found


def _read_limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of all that it is in."""
    own = root / path.lstrip("/")
    found = []
    for folder in (own, *own.parents):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return found


def hand_out_entries(
    start: Start, update: SpanOptimizer, exchange: Exchange, *, leads: bool
) -> None:
    """Bring the lead's values to the owners of their pieces; called on all devices.

    One parameter goes to all devices at a time, so none has more than its own parts and that one.

    Args:
        start: this process's values, of which the lead's count.
        update: has the pieces of the trained parameters.
        exchange: with all devices.
        leads: whether this is the lead's process.
    """
    memory, masters = exchange.memory, update.storage.masters
    for number, value in enumerate(start.trained):
        values = _shared(value, masters, number, exchange, leads=leads)
        for item in update.owned:
            if item.piece.entry == number:
                part = values[item.piece.start : item.piece.stop]
                storage_order(item.values.data).copy_(part)
    for number, value in enumerate(start.frozen):
        assert memory.frozen is not None
        layout = memory.frozen.flat.layout
        memory.frozen.adopt_entry(number, _shared(value, layout, number, exchange, leads=leads))


def values_of_entry(value: torch.Tensor | FirstValues, layout: Layout, number: int) -> torch.Tensor:
    """(numel,) first values of a parameter, in the storage order that it has in a layout."""
    entry = layout.entries[number]
    if isinstance(value, torch.Tensor):
        return storage_order(laid_out(value, entry.stride))
    values = _room(layout, number, torch.device("cpu"))
    value.write_to(values.as_strided(entry.shape, entry.stride))
    return values


def _shared(
    value: torch.Tensor | FirstValues,
    layout: Layout,
    number: int,
    exchange: Exchange,
    *,
    leads: bool,
) -> torch.Tensor:
    """(numel,) the lead's values of a parameter."""
    device = next(iter(exchange.memory.trained.values())).device
    if leads:
        values = values_of_entry(value, layout, number).to(device)
    else:
        values = _room(layout, number, device)
    exchange.memory.adopt_lead(values)
    return values


def _room(layout: Layout, number: int, device: torch.device) -> torch.Tensor:
    """(numel,) for the values of a parameter."""
    dtype, numel = layout.dtype_of(number), layout.entries[number].numel
    if device.type == "cpu":
        return short_lived(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype, device=device)

"""Puts an engine together from the user's model and optimizer and from who takes part."""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.core.flat import cut_pieces, lay_out
from onefold.core.names import own_name
from onefold.core.shard import Plan
from onefold.core.team import Team
from onefold.engine.buffers import BufferPlaces, BufferRule, BufferSet
from onefold.engine.engine import Engine
from onefold.engine.leftovers import refuse_clipping
from onefold.engine.replica import LossFunction, ModelParts, Replica
from onefold.engine.update import OwnedPiece, SpanOptimizer, updates_by_element
from onefold.errors import DisagreementError
from onefold.exchange.base import Exchange, Start, Storage
from onefold.exchange.collective import CollectiveExchange
from onefold.exchange.group import (
    agree_on_kind,
    agree_on_name,
    gather_bytes,
    join_group,
    watch_for_end,
)
from onefold.exchange.local import LocalExchange, SoloExchange
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.shared import SharedExchange

__all__ = ["Settings", "assemble"]

_log = logging.getLogger("onefold")
_HASHES = "a hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user chose for a run."""

    shards: int
    """V."""
    seed: int
    """Of all randomness."""
    clip_norm: float | None
    """The largest norm of the whole gradient."""
    deterministic: bool
    """Refuse kernels that do not repeat their bits."""
    timeout_s: float
    """The longest wait for another device."""
    threads: int | None
    """Of each CPU device; None for an even share of the cores to each shard."""
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    """What becomes of buffers, by name or pattern, where it is not the rule of their type."""

    def __post_init__(self) -> None:
        _check_whole("shards", self.shards, 1, 2**31)
        _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.threads is not None:
            _check_whole("threads", self.threads, 1, 2**31)
        if self.clip_norm is not None:
            _check_positive("clip_norm", self.clip_norm)


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
    if value > most:
        raise ValueError(f"expected {name} of at most {most}, got {value}")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    if not value > 0:
        raise ValueError(f"expected {name} to be more than 0, got {value}")
    if math.isinf(value):
        raise ValueError(f"expected {name} to be finite, got {value}")


def assemble(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction,
    *,
    settings: Settings,
    team: Team,
    plan: Plan,
    schedule: LRScheduler | None,
    joined: Callable[[Exchange], None],
) -> Engine:
    """Bring model and optimizer into a run; the lead's values become everybody's.

    ``joined`` is called with the exchange as soon as there is one: from then on others wait for
    this process, and must hear of its failures.

    Raises:
        DisagreementError: another device brought another model, optimizer or setting.
        PeerError: another device did not come.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [n for n, p in module.named_parameters() if id(p) in held and p.requires_grad]
    if not trained:
        raise ValueError("the optimizer holds no parameter that requires a gradient")
    parts = ModelParts(module, trained)
    places = BufferPlaces(module, settings.buffers)
    buffers = {number: BufferSet(places, device) for number, device in team.own_devices.items()}
    first = buffers[team.own[0]]
    first.attach()
    storage = _storage(parts, first, optimizer, settings, team)
    start = Start(
        [p.detach() for p in parts.trained.values()],
        [p.detach() for p in parts.other.values()],
        first.flat,
    )
    description = _describe(parts, optimizer, settings, team, plan, schedule)
    exchange = _join(storage, start, description, settings, team)
    joined(exchange)
    replicas = [
        Replica(
            number,
            device,
            parts,
            exchange.trained[number],
            exchange.other[number],
            buffers[number],
        )
        for number, device in team.own_devices.items()
    ]
    replicas[0].attach()
    refuse_clipping(parts.trained.values())
    return Engine(
        replicas=replicas,
        exchange=exchange,
        update=_divide(optimizer, storage, exchange, parts, team),
        loss=loss,
        seed=settings.seed,
        clip_norm=settings.clip_norm,
        deterministic=settings.deterministic,
        frozen={n: p for n, p in parts.other.items() if id(p) in held},
    )


def _storage(
    parts: ModelParts,
    buffers: BufferSet,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    team: Team,
) -> Storage:
    layout = lay_out({own_name(name): p for name, p in parts.trained.items()})
    return Storage(
        trained=layout,
        other=lay_out(parts.other),
        buffers=buffers.layout,
        pieces=cut_pieces(layout, by_element=updates_by_element(optimizer)),
        shards=settings.shards,
        devices=len(team.devices),
    )


def _divide(
    optimizer: torch.optim.Optimizer,
    storage: Storage,
    exchange: Exchange,
    parts: ModelParts,
    team: Team,
) -> SpanOptimizer:
    """Give the user's optimizer the pieces that this process owns."""
    users = list(parts.trained.values())
    owned = []
    for device in team.own:
        for number in storage.spans[device]:
            piece = storage.pieces[number]
            values: torch.Tensor = exchange.trained[device].piece(piece)
            if piece.whole:  # the user's own on the first device, stand-ins on the others
                first = device == team.own[0]
                values = users[piece.entry] if first else torch.nn.Parameter(values)
            owned.append(OwnedPiece(number, device, piece, users[piece.entry], values))
    return SpanOptimizer(optimizer, owned, storage, team.own_devices)


def _join(
    storage: Storage, start: Start, description: dict[str, str], settings: Settings, team: Team
) -> Exchange:
    devices = list(team.own_devices.values())
    if len(team.own) == len(team.devices):
        return (
            SoloExchange(storage, start, devices[0])
            if len(devices) == 1
            else LocalExchange(storage, start, devices)
        )
    kind, world, size = devices[0].type, team.world, len(team.devices)
    can_share = kind == "cpu" and world.one_host
    shares = can_share and world.options.exchange != "collective"
    if world.launcher == "torch" or not shares:
        # Under PyTorch's launcher each process has chosen its device by itself.
        agree_on_kind(world, kind, size, settings.timeout_s)
    if world.options.exchange == "shared" and not can_share:
        raise ValueError(
            "the shared exchange is for CPU processes of one host; use --exchange collective"
        )
    if shares:
        return _join_shared(storage, start, description, settings, team)
    joined = join_group(world, kind, size, timeout_s=settings.timeout_s, trainer=team.trainer)
    try:
        _compare_all(gather_bytes(joined.group, json.dumps(description).encode()))
        return CollectiveExchange(storage, start, devices[0], joined, timeout_s=settings.timeout_s)
    except BaseException:
        joined.watch.close()
        raise


def _join_shared(
    storage: Storage, start: Start, description: dict[str, str], settings: Settings, team: Team
) -> SharedExchange:
    world, size, limit_s = team.world, len(team.devices), settings.timeout_s
    drawn = world.run_id  # onefold's launcher tells it to its workers alone
    if world.launcher == "torch":
        drawn = agree_on_name(world, size, limit_s, team.trainer)
    mailbox = Mailbox(
        f"{drawn}-{team.trainer}",
        rank=team.own[0],
        size=size,
        timeout_s=limit_s,
        ended=watch_for_end(world, size, limit_s),
    )
    try:
        if mailbox.rank != 0:
            mailbox.send_note(0, json.dumps(description).encode())
        else:
            others = [mailbox.receive_note(rank) for rank in range(1, mailbox.size)]
            _compare_all([json.dumps(description).encode(), *others])
        return SharedExchange(storage, start, mailbox)
    except BaseException as error:
        mailbox.tell_failure(error)
        mailbox.close()
        raise


def _describe(
    parts: ModelParts,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    team: Team,
    plan: Plan,
    schedule: LRScheduler | None,
) -> dict[str, str]:
    """Everything that must be the same on every device, in words."""
    said = {
        "shards": str(settings.shards),
        "seed": str(settings.seed),
        "clip_norm": str(settings.clip_norm),
        "deterministic": str(settings.deterministic),
        "the rules of buffers": str(dict(settings.buffers)),
        "the plan": str(plan.counts),
        "the number of Trainers before this one": str(team.trainer),
        "the optimizer": type(optimizer).__name__,
        "the schedule": "None" if schedule is None else type(schedule).__name__,
        "the state of the schedule": "" if schedule is None else _state_of(schedule),
        **_surroundings(team.devices[team.own[0]]),
    }
    for kind, parameters in (("trained", parts.trained), ("other", parts.other)):
        for name, p in parameters.items():
            said[f"parameter {name}"] = f"{kind} {p.dtype} {tuple(p.shape)} {p.stride()}"
    for name, buffer in parts.module.named_buffers():
        said[f"buffer {name}"] = f"{buffer.dtype} {tuple(buffer.shape)}"
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                said[f"optimizer group {number} {key}"] = str(value)
    return said


def _surroundings(device: torch.device) -> dict[str, str]:
    """What bits depend on beside the script: threads, libraries, processors and their settings."""
    said = {
        "the kind of device": device.type,
        _HASHES: str(hash("onefold")),
        "the version of onefold": version("onefold"),
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
        "the version of Python": platform.python_version(),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "the default dtype": str(torch.get_default_dtype()),
    }
    if device.type == "cpu":
        said["the threads of a device"] = f"{torch.get_num_threads()} (Trainer(threads=...))"
        said["the kind of processor"] = (
            f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
        )
        said["oneDNN"] = str(torch.backends.mkldnn.enabled)
    else:
        said["the type of GPU"] = torch.cuda.get_device_name(device)
        said["the version of CUDA"] = str(torch.version.cuda)
        said["TF32 in convolutions"] = str(torch.backends.cudnn.allow_tf32)
    return said


def _state_of(schedule: LRScheduler) -> str:
    """Its numbers; functions and other objects count by their type alone."""
    state = schedule.state_dict()
    kept = {k: v if _is_plain(v) else type(v).__name__ for k, v in state.items()}
    return str(kept)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _compare_all(descriptions: Sequence[bytes]) -> None:
    """Refuse a device that differs from device 0.

    Raises:
        DisagreementError: one does.
    """
    lead: dict[str, str] = json.loads(descriptions[0])
    for number, text in enumerate(descriptions):
        if text == descriptions[0]:
            continue
        other: dict[str, str] = json.loads(text)
        if lead.pop(_HASHES, None) != other.pop(_HASHES, None):
            _log.warning(
                "the processes of this run hash text differently, so that sets have another order "
                "in each: if anything depends on it, set PYTHONHASHSEED=0 for all of them"
            )
        for what in {**lead, **other}:
            if lead.get(what) != other.get(what):
                raise DisagreementError(
                    f"{what} is {lead.get(what, 'absent')} on device 0 and "
                    f"{other.get(what, 'absent')} on device {number}: every device must build the "
                    f"same model, optimizer and Trainer, with the same libraries"
                )

"""Puts an engine together from the user's model and optimizer and from who takes part."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from onefold.buffers import BufferSet
from onefold.engine import Engine
from onefold.errors import DisagreementError
from onefold.exchange.base import Exchange, Start, Storage
from onefold.exchange.collective import CollectiveExchange
from onefold.exchange.group import join_group
from onefold.exchange.local import LocalExchange, SoloExchange
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.shared import SharedExchange
from onefold.flat import FlatTensors, cut_pieces, lay_out
from onefold.membership import register
from onefold.names import own_name
from onefold.replica import Replica
from onefold.team import Team
from onefold.update import OwnedPiece, SpanOptimizer, updates_by_element

__all__ = ["Settings", "assemble"]


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

    def __post_init__(self) -> None:
        _check_whole("shards", self.shards, 1, 2**31)
        _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.threads is not None:
            _check_whole("threads", self.threads, 1, 2**31)
        if self.clip_norm is not None:
            _check_positive("clip_norm", self.clip_norm)
        _check_positive("timeout_s", self.timeout_s)


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


class _Parts:
    """A model, with its parameters sorted; tied ones count once."""

    def __init__(self, module: torch.nn.Module, trained_names: Sequence[str]) -> None:
        named = dict(module.named_parameters())
        self.module = module
        self.trained = {name: named[name] for name in trained_names}
        self.other = {name: p for name, p in named.items() if name not in self.trained}

    def attach(self, trained: FlatTensors, other: FlatTensors) -> None:
        """Make the parameters views of flat memory; they keep their identity."""
        for parameters, flat in ((self.trained, trained), (self.other, other)):
            for parameter, view in zip(parameters.values(), flat.views, strict=True):
                parameter.data = view
                parameter.grad = None


def assemble(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    settings: Settings,
    team: Team,
) -> Engine:
    """Bring model and optimizer into a run; the lead's values become everybody's.

    Raises:
        DisagreementError: another device brought another model, optimizer or setting.
        PeerError: another device did not come.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [n for n, p in module.named_parameters() if id(p) in held and p.requires_grad]
    if not trained:
        raise ValueError("the optimizer holds no parameter that requires a gradient")
    parts = {number: _Parts(module, trained) for number in team.own[:1]}
    first = parts[team.own[0]]
    buffers = {team.own[0]: BufferSet(module, team.devices[team.own[0]])}
    storage = _storage(first, buffers[team.own[0]], optimizer, settings, team)
    start = Start(
        [p.detach() for p in first.trained.values()],
        [p.detach() for p in first.other.values()],
        buffers[team.own[0]].flat,
    )
    exchange = _join(storage, start, _describe(first, optimizer, settings), settings, team)
    register(exchange)
    for number in team.own[1:]:
        parts[number] = _Parts(copy.deepcopy(module), trained)
        buffers[number] = BufferSet(parts[number].module, team.devices[number])
    for number in team.own:
        parts[number].attach(exchange.trained[number], exchange.other[number])
    return Engine(
        replicas=[
            Replica(number, device, parts[number].module, trained, buffers[number])
            for number, device in team.own_devices.items()
        ],
        exchange=exchange,
        update=_divide(optimizer, storage, exchange, parts, team),
        seed=settings.seed,
        clip_norm=settings.clip_norm,
        deterministic=settings.deterministic,
        frozen={n: p for n, p in first.other.items() if id(p) in held},
    )


def _storage(
    parts: _Parts,
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
    parts: Mapping[int, _Parts],
    team: Team,
) -> SpanOptimizer:
    """Give the user's optimizer the pieces that this process owns."""
    users = list(parts[team.own[0]].trained.values())
    owned = []
    for device in team.own:
        here = list(parts[device].trained.values())
        for number in storage.spans[device]:
            piece = storage.pieces[number]
            flat = exchange.trained[device]
            values = here[piece.entry] if piece.whole else flat.piece(piece)
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
    kind, world = devices[0].type, team.world
    can_share = kind == "cpu" and world.one_host
    if world.exchange == "shared" and not can_share:
        raise ValueError(
            "the shared exchange is for CPU processes of one host; use --exchange collective"
        )
    if can_share and world.exchange != "collective":
        return _join_shared(storage, start, description, settings, team)
    group, store = join_group(world, kind, len(team.devices))
    said: list[dict[str, str] | None] = [None] * len(team.devices)
    dist.all_gather_object(said, description, group=group)
    for number, other in enumerate(said):
        _compare(said[0] or {}, other or {}, number)
    return CollectiveExchange(storage, start, devices[0], group, store)


def _join_shared(
    storage: Storage, start: Start, description: dict[str, str], settings: Settings, team: Team
) -> SharedExchange:
    mailbox = Mailbox(
        f"onefold-{team.world.run_id}-{team.trainer}",
        rank=team.own[0],
        size=len(team.devices),
        timeout_s=settings.timeout_s,
    )
    try:
        if mailbox.rank != 0:
            mailbox.send_note(0, json.dumps(description).encode())
        else:
            for rank in range(1, mailbox.size):
                _compare(description, json.loads(mailbox.receive_note(rank)), rank)
        return SharedExchange(storage, start, mailbox)
    except BaseException as error:
        mailbox.tell_failure(error)
        mailbox.close()
        raise


def _describe(
    parts: _Parts, optimizer: torch.optim.Optimizer, settings: Settings
) -> dict[str, str]:
    """Everything that must be the same on every device, in words."""
    said = {
        "shards": str(settings.shards),
        "seed": str(settings.seed),
        "clip_norm": str(settings.clip_norm),
        "optimizer": type(optimizer).__name__,
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


def _compare(lead: dict[str, str], other: dict[str, str], number: int) -> None:
    for what in {**lead, **other}:
        if lead.get(what) != other.get(what):
            raise DisagreementError(
                f"{what} is {lead.get(what, 'absent')} on device 0 and "
                f"{other.get(what, 'absent')} on device {number}: every device must build the same "
                f"model, optimizer and Trainer"
            )

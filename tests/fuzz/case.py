"""A case, drawn from a seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.fuzz.losses import LOSSES
from tests.fuzz.optimizers import HOOKS, OPTIMIZERS, SCHEDULES, UNSTABLE
from tests.fuzz.parts import BLOCKS, STEMS, Traits

__all__ = ["EXCHANGES", "Case", "Verdict", "draw", "draw_plain"]

EXCHANGES = ("local", "shared", "collective")
"""Devices of one process, and simulated ones."""
CHANGES = (
    *("changing", "rate", "dropout", "eval", "train", "freeze", "thaw", "attribute", "hook"),
    "buffer",
)
"""Events that a plain loop has as well."""
EVENTS = (
    *("evaluate", "changing on the lead", "changing otherwise elsewhere", "shares", "save"),
    *("momentum", "buffer replaced"),
)


class Case(SimpleNamespace):
    """One run of a script, and in which ways it is run besides; see `draw`."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def traits(self) -> list[Traits]:
        """Of the model's parts."""
        return [STEMS[self.stem][1], *(BLOCKS[name][1] for name in self.blocks)]

    def but(self, **other: Any) -> Case:
        """The same case with other choices."""
        return Case(**{**vars(self), **other})


@dataclass
class Verdict:
    """What came of a case."""

    case: Case
    kind: str
    """How it was run, in few words; cases are counted by it."""
    wrong: list[str] = field(default_factory=list)
    """Nothing if it ended as it must."""


def draw(seed: int, exchange: str | None = None) -> Case:
    """The case of a seed.

    Args:
        seed: any number of at least 0.
        exchange: instead of the seed's own.
    """
    rng = random.Random(seed)
    shards = rng.choice((1, 1, 2, 3, 4, 4, 5, 7, 8, 9))
    devices = rng.randint(1, shards)
    drawn = rng.choice(EXCHANGES)
    case = Case(
        seed=seed,
        exchange=exchange or drawn,
        dtype=rng.choice(("float32", "float64")),
        stem=rng.choice(list(STEMS)),
        blocks=tuple(rng.choice(list(BLOCKS)) for _ in range(rng.randint(0, 3))),
        loss=rng.choice(list(LOSSES)),
        optimizer=rng.choice(list(OPTIMIZERS)),
        groups=rng.choice((1, 1, 2, 3)),
        hook=rng.choice(list(HOOKS)) if rng.random() < 0.3 else None,
        clip_norm=rng.choice((0.01, 1.0, 100.0)) if rng.random() < 0.3 else None,
        scheduler=rng.choice(list(SCHEDULES)) if rng.random() < 0.25 else None,
        buffers=rng.choice(("mean", "max", "sum", "first")) if rng.random() < 0.1 else None,
        shards=shards,
        devices=devices,
        shares=draw_shares(rng, shards, devices) if rng.random() < 0.5 else None,
        source=rng.choice(("own", "own", "loader", "epochs", "fresh", "two")),
        sizes=tuple(rng.choice((1, 2, shards, 7, 11, 16, 2 * shards + 1)) for _ in range(6)),
        samples=rng.randint(3, 24),
        batch_size=rng.randint(1, 14),
        shuffle=rng.random() < 0.7,
        drop_last=rng.random() < 0.2,
        lengths=rng.random() < 0.15,
        noisy=rng.random() < 0.5,
        collated=rng.random() < 0.3,
        workers=rng.choice((1, 2)) if rng.random() < 0.02 else 0,
        container=rng.choice(("fields", "nested", "numpy")),
        broken_off_after=rng.choice((0, 0, 0, 2, 3)),
        steps=rng.randint(2, 4),
        events=(),
        stop=None,
        exchange_after=rng.choice(EXCHANGES),
        devices_after=rng.randint(1, shards),
    )
    return _made_possible(_with_events(case, rng, (*CHANGES, *EVENTS)), rng)


def draw_plain(seed: int) -> Case:
    """A case that a plain loop can be held against: with one shard to the bit, with more in float64
    and of parts whose gradient over a batch is that of its samples."""
    rng = random.Random(f"plain {seed}")
    case = draw(seed, "local").but(source="own", stop=None, events=())
    if rng.random() < 0.4:
        case = case.but(shards=1, devices=1, shares=None)
    hook = None if case.hook is None or not HOOKS[case.hook][1].laid_out else case.hook
    parts = {"stem": STEMS, "blocks": BLOCKS}
    chosen = {
        kind: [n for n, (_, t) in each.items() if (t.seeded if case.shards == 1 else t.exact)]
        for kind, each in parts.items()
    }
    case = case.but(
        hook=hook,
        stem=rng.choice(chosen["stem"]),
        blocks=tuple(rng.choice(chosen["blocks"]) for _ in case.blocks),
    )
    changes: tuple[str, ...] = CHANGES
    if case.shards > 1:
        changes = tuple(name for name in CHANGES if name != "dropout")
        case = case.but(
            dtype="float64",
            hook=None if hook is None or not HOOKS[hook][1].exact else hook,
            loss=rng.choice([name for name, (_, traits) in LOSSES.items() if traits.exact]),
            optimizer=rng.choice([name for name in OPTIMIZERS if name not in UNSTABLE]),
        )
        if case.loss == "positives" and "experts" in case.blocks:
            case = case.but(loss="each")  # a gradient of zeros, and none in shards of none
    return _made_possible(_with_events(case, rng, changes, stops=False), rng)


def draw_shares(rng: random.Random, shards: int, devices: int) -> tuple[int, ...]:
    """Any cut of the shards, zeros among them."""
    cuts = sorted(rng.randint(0, shards) for _ in range(devices - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, shards], strict=True))


def _with_events(
    case: Case, rng: random.Random, choices: tuple[str, ...], *, stops: bool = True
) -> Case:
    number = rng.choice((0, 1, 1, 2, 3, 4))
    events = sorted((rng.randint(1, case.steps), rng.choice(choices)) for _ in range(number))
    stop = rng.randint(1, case.steps - 1) if stops and rng.random() < 0.35 else None
    return case.but(events=tuple(events), stop=stop)


def _made_possible(case: Case, rng: random.Random) -> Case:
    """Leave out what does not go together in plain PyTorch either."""
    if "odd" in case.blocks and case.buffers == "max":
        case = case.but(buffers=None)  # no number is the largest of complex ones
    if case.optimizer == "muon" and case.hook == "dropped":
        case = case.but(hook=None)
    if case.scheduler is not None:
        case = case.but(events=tuple(each for each in case.events if each[1] != "rate"))
        if case.optimizer == "adam-tensor":
            case = case.but(optimizer="adam")
    if any(trait.pairs for trait in case.traits) or case.loss == "mixed up":
        case = _with_pairs(case, rng)
    if case.stop is not None or case.source in ("own", "two"):
        case = case.but(broken_off_after=0)
    if case.drop_last and case.samples < case.batch_size:
        case = case.but(drop_last=False)
    if case.source == "two" and case.stop is not None:
        case = case.but(stop=case.stop // 2 * 2 or None)
    return case.but(shuffle=case.shuffle or case.lengths)


def _with_pairs(case: Case, rng: random.Random) -> Case:
    """Batches of which every shard has at least two samples."""
    size = 2 * case.shards + rng.randint(0, case.shards)
    sizes = tuple(2 * case.shards + rng.randint(0, case.shards + 3) for _ in case.sizes)
    return case.but(batch_size=size, sizes=sizes, samples=size * rng.randint(1, 3), drop_last=False)

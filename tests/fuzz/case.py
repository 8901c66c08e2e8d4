"""A case, drawn from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from onefold.core.shard import cut_bounds
from tests.fuzz.hooks import HOOKS
from tests.fuzz.losses import LOSSES
from tests.fuzz.optimizers import OPTIMIZERS, SCHEDULES
from tests.fuzz.parts import BLOCKS, STEMS, Traits

__all__ = ["BLOCK_OF_SEEDS", "Case", "draw", "exchange_of", "processes_of"]

BLOCK_OF_SEEDS = 300
"""Among so many seeds, the first ones run in one process and the last ones in several."""

EVENTS = (
    "evaluate",
    "predict",
    "gather",
    "barrier",
    "changing",
    "changing on the lead",
    "changing otherwise elsewhere",
    "swap",
    "plan",
    "rate",
    "momentum",
    "dropout",
    "eval",
    "train",
    "freeze",
    "thaw",
    "attribute",
    "hook",
    "save",
    "buffer",
    "buffer replaced",
    "back",
)
ALONE = ("in place", "data", "failing")
"""What several processes refuse: each would change the parameters on its own."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a script, and in which ways it is run besides."""

    seed: int
    exchange: str
    processes: int
    """Of an exchange between processes."""
    dtype: str
    stem: str
    blocks: tuple[str, ...]
    loss: str
    optimizer: str
    groups: int
    hook: str | None
    clip_norm: float | None
    schedule: str | None
    buffers: str | None
    """A rule for all buffers."""
    shards: int
    devices: int
    plan: tuple[int, ...] | None
    source: str
    sizes: tuple[int, ...]
    """Of the batches of a script's own."""
    samples: int
    """Of the data set of a loader."""
    batch_size: int
    shuffle: bool
    drop_last: bool
    lengths: bool
    noisy: bool
    collated: bool
    workers: int
    container: str
    warm: bool
    """Whether the optimizer has made a step before Trainer is made."""
    double: bool
    """Whether float64 is PyTorch's default while Trainer is at work."""
    broken_off_after: int
    """After how many steps a pass is broken off; 0 for never."""
    steps: int
    events: tuple[tuple[int, str], ...]
    """After which step what is done."""
    stop: int | None
    """After which step the run is saved, and goes on elsewhere."""
    devices_after: int
    launched: str
    """Which part of a run that stops runs in several processes: first, second or both."""
    fault: str | None = None
    """What must be refused."""
    difference: str | None = None
    """In what one device differs."""
    difference_on: int = 0
    difference_at: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the model."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def traits(self) -> list[Traits]:
        """Of the model's parts."""
        return [STEMS[self.stem][1], *(BLOCKS[name][1] for name in self.blocks)]

    @property
    def exact(self) -> bool:
        """Whether the gradient of a batch is the same in a plain loop, but for rounding."""
        return (
            self.dtype == "float64"
            and all(trait.exact for trait in self.traits)
            and LOSSES[self.loss][1].exact
            and all(HOOKS[name][1].exact for name in self.hooks)
            and "dropout" not in self.happens
        )

    @property
    def hooks(self) -> list[str]:
        """Those that there are at some time."""
        later = ["after"] if "hook" in self.happens else []
        return [*([self.hook] if self.hook else []), *later]

    @property
    def happens(self) -> set[str]:
        """All that is done between steps."""
        return {event for _, event in self.events}

    @property
    def has_bits_of_plain(self) -> bool:
        """Whether a plain loop has the same bits, seeded alike."""
        laid_out = all(HOOKS[name][1].laid_out for name in self.hooks)
        return self.shards == 1 and laid_out and all(trait.seeded for trait in self.traits)

    def describe(self) -> str:
        """In one line, without what is as usual."""
        usual = (None, (), False)
        said = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) not in usual
        ]
        return " ".join(said)


def exchange_of(seed: int) -> str:
    """How the devices of a seed's case trade, where nobody chooses."""
    place = seed % BLOCK_OF_SEEDS
    return "local" if place < 220 else "shared" if place < 262 else "collective"


def processes_of(seed: int) -> int:
    """How many processes there are, the same for all seeds that are launched together."""
    turn = seed // BLOCK_OF_SEEDS + (exchange_of(seed) == "shared")
    return 2 + turn % 3


def draw(seed: int, exchange: str | None = None) -> Case:
    """The case of a seed.

    Args:
        seed: any number of at least 0.
        exchange: instead of the seed's own.
    """
    rng = random.Random(seed)
    exchange = exchange_of(seed) if exchange is None else exchange
    processes = processes_of(seed)
    shards = rng.choice((1, 1, 2, 3, 4, 4, 5, 7, 8, 9))
    if exchange != "local":
        shards = max(processes, shards)
    devices = rng.randint(1, shards) if exchange == "local" else processes
    dtype = rng.choice(("float32", "float32", "float64", "float64", "float64", "bfloat16"))
    source = rng.choice(("own", "own", "loader", "epochs", "fresh", "two"))
    stem = rng.choice(list(STEMS))
    blocks = tuple(rng.choice(list(BLOCKS)) for _ in range(rng.randint(0, 3)))
    if dtype == "bfloat16" and "lstm" in stem:
        stem = "linear"
    case = Case(
        seed=seed,
        exchange=exchange,
        processes=processes if exchange != "local" else 1,
        dtype=dtype,
        stem=stem,
        blocks=blocks,
        loss=rng.choice(list(LOSSES)),
        optimizer=rng.choice(list(OPTIMIZERS)),
        groups=rng.choice((1, 1, 2, 3)),
        hook=rng.choice(list(HOOKS)) if rng.random() < 0.3 else None,
        clip_norm=rng.choice((0.01, 1.0, 100.0)) if rng.random() < 0.3 else None,
        schedule=rng.choice(list(SCHEDULES)) if rng.random() < 0.25 else None,
        buffers=rng.choice(("mean", "max", "sum", "first")) if rng.random() < 0.1 else None,
        shards=shards,
        devices=devices,
        plan=_plan(rng, shards, devices) if rng.random() < 0.5 else None,
        source=source,
        sizes=tuple(rng.choice((1, 2, shards, 7, 11, 16, 2 * shards + 1)) for _ in range(6)),
        samples=rng.randint(3, 24),
        batch_size=rng.randint(1, 14),
        shuffle=rng.random() < 0.7,
        drop_last=rng.random() < 0.2,
        lengths=rng.random() < 0.15,
        noisy=rng.random() < 0.5,
        collated=rng.random() < 0.3,
        workers=rng.choice((1, 2)) if rng.random() < 0.02 else 0,
        container=rng.choice(("fields", "tuple", "list", "dict", "nested", "numpy")),
        warm=rng.random() < 0.1,
        double=rng.random() < 0.05,
        broken_off_after=rng.choice((0, 0, 0, 2, 3)),
        steps=rng.randint(2, 4),
        events=(),
        stop=None,
        devices_after=rng.randint(1, shards),
        launched=rng.choice(("first", "second", "both")),
    )
    if rng.random() < 0.3:
        case = _exact(case, rng)
    case = _made_possible(_with_events(case, rng), rng)
    return _with_trouble(case, rng)


def _exact(case: Case, rng: random.Random) -> Case:
    """Parts alone whose gradients can be held against those of a whole batch."""
    stems, blocks = (
        [name for name, (_, traits) in parts.items() if traits.exact] for parts in (STEMS, BLOCKS)
    )
    return replace(
        case,
        dtype="float64",
        stem=rng.choice(stems),
        blocks=tuple(rng.choice(blocks) for _ in case.blocks),
        loss=rng.choice([name for name, (_, traits) in LOSSES.items() if traits.exact]),
        hook=None if case.hook is None or not HOOKS[case.hook][1].exact else case.hook,
    )


def _plan(rng: random.Random, shards: int, devices: int) -> tuple[int, ...]:
    """Any cut of the shards, zeros among them."""
    cuts = sorted(rng.randint(0, shards) for _ in range(devices - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, shards], strict=True))


def _with_events(case: Case, rng: random.Random) -> Case:
    choices = EVENTS + (ALONE if case.exchange == "local" else ())
    number = rng.choice((0, 1, 1, 2, 3, 4))
    events = sorted((rng.randint(1, case.steps), rng.choice(choices)) for _ in range(number))
    stop = rng.randint(1, case.steps - 1) if rng.random() < 0.35 else None
    return replace(case, events=tuple(events), stop=stop)


def _made_possible(case: Case, rng: random.Random) -> Case:
    """Leave out what does not go together in plain PyTorch either."""
    traits, loss = case.traits, LOSSES[case.loss][1]
    if loss.gradient_of_inputs and case.stem not in ("linear", "conv", "conv-last"):
        case = replace(case, stem="linear")
    if loss.twice and not all(trait.twice for trait in case.traits):
        kept = tuple(name for name in case.blocks if BLOCKS[name][1].twice)
        case = replace(case, blocks=kept, stem="linear")
    if loss.twice and case.hook in ("backward",):
        case = replace(case, hook=None)
    if case.loss == "autocast" and case.dtype != "float32":
        case = replace(case, dtype="float32")
    if case.loss == "autocast" and not {"spectralnorm", "double", "experts"}.isdisjoint(
        case.blocks
    ):
        case = replace(case, loss="each")
    if case.dtype == "bfloat16":
        unfit = {"spectralnorm", "counting", "odd", "weightnorm"}
        case = replace(case, blocks=tuple(b for b in case.blocks if b not in unfit))
        if case.optimizer == "muon":
            case = replace(case, optimizer="sgd")
    low = case.dtype == "bfloat16" or "half" in case.blocks
    if (
        low and case.optimizer == "sgd-fused"
    ):  # PyTorch 2.13 on CPU leaves the parameters as they are
        case = replace(case, optimizer="sgd-momentum")
    if case.hook == "expanded" and "reentrant" in " ".join(case.blocks):
        case = replace(case, hook="turned")  # autograd adds to what it has found there
    if case.optimizer == "adafactor" and "shapes" in case.blocks:
        case = replace(case, optimizer="adam")  # PyTorch's divides by the elements of an empty one
    if "odd" in case.blocks and case.buffers == "max":
        case = replace(case, buffers=None)  # no number is the largest of complex ones
    if "weightnorm" in case.blocks and case.loss == "one by one":
        case = replace(case, loss="each")
    absent = {"experts", "sometimes", "skipping"} & set(case.blocks) or case.hook == "dropped"
    absent = absent or case.warm or case.loss == "positives" or "thaw" in case.happens
    if case.optimizer == "sgd-fused" and absent:
        # PyTorch's kernel fails where some parameters have had a gradient before and others not.
        case = replace(case, optimizer="sgd-foreach")
    low = case.dtype == "bfloat16" or "half" in case.blocks
    if case.optimizer == "sgd-foreach" and low:
        case = replace(case, optimizer="sgd-momentum")  # refused: rounded as the neighbours are
    if case.optimizer == "muon" and case.hook == "dropped":
        case = replace(case, hook=None)
    if case.schedule is not None:
        if case.optimizer == "adam-tensor":
            case = replace(case, optimizer="adam")
        events = tuple(each for each in case.events if each[1] != "rate")
        case = replace(case, events=events)
    if any(trait.pairs for trait in traits) or case.loss == "mixed up":
        case = _with_pairs(case, rng)
    if case.source != "own":
        case = replace(case, events=tuple(each for each in case.events if each[1] != "back"))
    if case.stop is not None or case.source in ("own", "two"):
        case = replace(case, broken_off_after=0)
    if case.warm and {"dropped", "lent", "beside", "expanded", "turned"} & {case.hook}:
        case = replace(case, warm=False)
    if case.lengths:
        case = replace(case, shuffle=True)
    if case.drop_last and case.samples < case.batch_size:
        case = replace(case, drop_last=False)
    if case.source == "two" and case.stop is not None:
        case = replace(case, stop=case.stop // 2 * 2 or None)
    return case


class Possible(Protocol):
    """A fault or a difference."""

    @property
    def possible(self) -> Callable[[Case], bool]:
        """Whether a case can have it."""


def _with_trouble(case: Case, rng: random.Random) -> Case:
    """Some cases have something that must be refused, or a device that differs."""
    from tests.fuzz.differences import DIFFERENCES
    from tests.fuzz.faults import FAULTS

    where, when = rng.randrange(case.processes), rng.randint(1, case.steps)
    if case.exchange != "local" and case.seed % 3 == 0:
        name = _in_turn(case, case.seed // 3, DIFFERENCES)
        # Who goes back looks at the weights, while the one that differs may write to them.
        case = replace(case, events=tuple(each for each in case.events if each[1] != "back"))
        return replace(case, difference=name, difference_on=where, difference_at=when, stop=None)
    if case.seed % 7 == 0:
        return replace(case, fault=_in_turn(case, case.seed // 7, FAULTS), stop=None, events=())
    return case


def _in_turn(case: Case, turn: int, choices: Mapping[str, Possible]) -> str:
    """One after the other, so that few cases have all of them; the next one that is possible."""
    names = list(choices)
    order = (names[(turn + number) % len(names)] for number in range(len(names)))
    return next(name for name in order if choices[name].possible(case))


def _with_pairs(case: Case, rng: random.Random) -> Case:
    """Batches of which every shard has at least two samples."""
    size = 2 * case.shards + rng.randint(0, case.shards)
    sizes = tuple(2 * case.shards + rng.randint(0, case.shards + 3) for _ in case.sizes)
    return replace(
        case, batch_size=size, sizes=sizes, samples=size * rng.randint(1, 3), drop_last=False
    )


def smallest_shard(size: int, shards: int) -> int:
    """Samples of the smallest shard that has any."""
    return min(stop - start for start, stop in cut_bounds(size, shards) if stop > start)

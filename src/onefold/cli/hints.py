"""Finds what may have made the bits of two runs differ, in what their devices recorded. Pure.

Note: why a difference is one
-----------------------------
With the same bits on any number of devices, a shard's result cannot depend on who computes it. What
breaks this is nearly always something that outlives a shard: a generator, an attribute, a clock.
One device runs all shards in a row, several run some of them each, so whatever one shard leaves for
the next differs from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onefold.system.words import listed

__all__ = ["State", "hints_of"]

_UNSEEDED_START = (
    "the models differ before the first step: seed the initial values, for instance with "
    "torch.manual_seed(0) before the model is built"
)


@dataclass(frozen=True, slots=True)
class State:
    """What a device saw in one step of a trainer."""

    step: int
    states: Mapping[str, str]
    """Digests of the global generators' states before the step, by name."""
    unseeded: Sequence[str]
    """The calls so far that seeded a generator from the system's entropy."""
    attributes: Sequence[str]
    """The attributes of modules that the step changed."""
    generators: Sequence[str]
    """The script's own generators that the step changed."""


_States = Mapping[int, Sequence[State]]


def hints_of(step: int, reference: _States, other: _States) -> list[str]:
    """Return sentences about likely causes, the most telling first.

    Args:
        step: the step after which the bits differ; 0 for before the first.
        reference: what each device of the one run recorded.
        other: what each device of the other run recorded.
    """
    everyone = [s for run in (reference, other) for lines in run.values() for s in lines]
    calls = listed(dict.fromkeys(call for state in everyone for call in state.unseeded))
    hints = [_UNSEEDED_START] if step == 0 else []
    if calls:
        hints.append(
            f"{calls}: seeded by the system, so that it gives other numbers in every process. Give "
            f"it a seed. Inside the loss and the data set, use the global generators of torch, "
            f"random and NumPy: they are seeded for every shard and every sample"
        )
    # Before the first step nothing was computed: only initial values can differ.
    if step == 0:
        return hints
    generators = listed(dict.fromkeys(g for state in everyone for g in state.generators))
    if generators:
        hints.append(
            f"{generators}: a generator of its own, which goes on from one shard or sample to the "
            f"next and so depends on what else this device computed. Use the global generators of "
            f"torch, random and NumPy: they are seeded for every shard and every sample"
        )
    attributes = listed(dict.fromkeys(a for state in everyone for a in state.attributes))
    if attributes:
        hints.append(
            f"{attributes}: changed while the shards were computed, and no buffer, so that a shard "
            f"sees how many this device computed before it. Register it as a buffer, or set it "
            f"between steps"
        )
    # Reversed, so that of each generator the first step stays: from there on all steps differ.
    uneven = dict(reversed([*_uneven(reference), *_uneven(other)]))
    globals_ = listed(dict.fromkeys(f"{name} before step {step}" for name, step in uneven.items()))
    if globals_:
        hints.append(
            f"{globals_}: it was drawn from between steps on some devices and not on others (under "
            f"trainer.is_lead?), so that from there on every device has other random numbers. Draw "
            f"on all devices, or from a generator that nothing else uses"
        )
    return hints


def _uneven(run: _States) -> Iterator[tuple[str, int]]:
    """Find the global generators that were drawn from between steps on some devices only."""
    if len(run) < 2:
        return
    for rows in zip(*run.values(), strict=False):
        for name in rows[0].states:
            digests = {row.states[name] for row in rows}
            # Only torch's begin alike in all processes. Those of random and NumPy are seeded by the
            # system until a script does it, so that of them only changes can be compared.
            if name.startswith("torch") and len(digests) > 1:
                yield name, rows[0].step
    for before, after in _pairs([*zip(*run.values(), strict=False)]):
        for name in after[0].states:
            changed = {b.states[name] != a.states[name] for b, a in zip(before, after, strict=True)}
            if len(changed) > 1 and not name.startswith("torch"):
                yield name, after[0].step


def _pairs(rows: Sequence[tuple[State, ...]]) -> Iterable[tuple[tuple[State, ...], ...]]:
    return pairwise(rows)

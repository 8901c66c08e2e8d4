"""What ``onefold verify`` says of its runs: why bits may differ, and whether the mathematics agree.

`hints_of` finds what may have made bits differ, in what the devices recorded.

Equal bits on one and several devices do not show that the mathematics is right: a loss that
averages each shard by itself gives the same wrong gradient everywhere. So ``onefold verify`` also
computes each batch as a single shard, which is what a plain loop would do. `report_mathematics`
prints how the loss and gradient of V shards compare with those of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table

from onefold.cli import Screen
from onefold.system.words import listed

__all__ = ["GUESSES", "State", "hints_of", "report_mathematics", "unequal_passes"]

_MODES = "dropout off, batch norm by its statistics, the same random numbers for the same samples"


def report_mathematics(
    console: Screen,
    precision: str,
    trainers: Sequence[Sequence[dict[str, Any]]],
    scores: Sequence[Sequence[dict[str, Any]]],
) -> bool:
    """Print a table and a verdict for each trainer.

    Args:
        console: where to print.
        precision: the type in which both were computed, such as ``float64``.
        trainers: the recorded lines of each trainer, one about itself and one for each step.
        scores: of each trainer, a recorded line for each score whose first batch was compared.

    Returns:
        Whether all agree.
    """
    agree = True
    for number, ((about, *steps), compared) in enumerate(zip(trainers, scores, strict=True)):
        who = f" of trainer {number}" if len(trainers) > 1 else ""
        agree &= _report_scores(console, compared, who)
        lines = [line for line in steps if "loss" in line]
        if len(lines) < len(steps):
            console.headed(
                "yellow",
                f"Not compared{who}",
                f": {len(steps) - len(lines)} of {len(steps)} steps, "
                f"whose batches have parts that are not cut by their number of samples.",
            )
        # With one shard there is nothing to compare, but the loss may still be no plain loop's.
        if about["shards"] == 1 and not any(line["causes"] for line in lines):
            console.print(f"One shard{who}: the mathematics is the plain loop's own.")
        elif lines:
            agree &= _report(console, precision, about, lines, who)
    return agree


def _report_scores(console: Screen, scores: Sequence[dict[str, Any]], who: str) -> bool:
    """Print which values of scores are computed over a batch; return whether there are none."""
    for score in scores:
        for name, (several, one) in score["differ"].items():
            console.headed(
                "bold red",
                f"A score{who} differs",
                f": {name!r} of {score['function']} is {several:.9g} with {score['shards']} shards "
                f"and {one:.9g} with one, in the first batch of its evaluation. It is computed "
                f"over a batch, and a shard has only its own samples. Take the values of every "
                f"sample from trainer.predict and score those; return one value a sample or "
                f"onefold.Mean(total, weight); or have the score receive whole batches by "
                f"trainer.evaluate(..., whole_batches=True).",
            )
    return not any(score["differ"] for score in scores)


def _report(
    console: Screen,
    precision: str,
    about: dict[str, Any],
    lines: Sequence[dict[str, Any]],
    who: str,
) -> bool:
    limit = max(about["tolerance"], *(line["tolerance"] for line in lines))
    errors, notes = _causes(lines, "error"), _causes(lines, "note")
    # With carried state there is nothing to compare, and no number to be shown.
    if compared := [line for line in lines if not line["carried"]]:
        console.print(_table(about["shards"], compared, limit))
    why = ""
    if precision != "float64":
        why = "The script does not run in float64, so this is in its own precision, and"
    elif limit > about["tolerance"]:
        why = "A part of the loss is computed in a lower precision than the float64 of the rest, so"
    if why:
        words = f"differences of up to {limit:g} are taken for rounding."
        console.print(f"{why} {words}", style="yellow")
    if not all(line["evaluation"] for line in lines):
        console.headed(
            "yellow",
            "The loss cannot be computed in evaluation mode",
            ": dropout and batch norm alone were in it.",
        )
    # A note is something that could not be compared: no error, but agreement cannot be claimed.
    for text in notes if not errors else ():
        console.headed("yellow", f"Not compared{who}", f": {text}.")
    if not errors and not notes:
        console.headed(
            "bold green",
            f"The mathematics{who} agree",
            f": {about['shards']} shards and one give the "
            f"same loss and gradient, to {limit:g} ({precision}, {_MODES}).",
        )
    if errors:
        _report_errors(console, about, lines, who, errors)
    return not errors


def _report_errors(
    console: Screen,
    about: dict[str, Any],
    lines: Sequence[dict[str, Any]],
    who: str,
    errors: Sequence[str],
) -> None:
    first = next(line for line in lines if any(c["kind"] == "error" for c in line["causes"]))
    function = about["function"]
    if _largest(first) > first["tolerance"]:
        quotient = f" ({first['alone'] / first['loss']:.6g} times)" if first["loss"] else ""
        console.headed(
            "bold red",
            f"The mathematics{who} differ",
            f", first in step {first['step']}: the loss, "
            f"{function}, is {first['loss']:.9g} with {first['shards']} shards and "
            f"{first['alone']:.9g} with one{quotient}; the gradient of {first['worst']} "
            f"differs by {first['worst_difference']:.3g} of its norm.",
        )
    else:
        console.headed(
            "bold red",
            f"Not what a plain loop does{who}",
            f": {function}, first in step {first['step']}.",
        )
    for text in errors:
        console.print(f"Likely cause: {text.rstrip('.')}.")


def _causes(lines: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Return the causes found in the first step that has any."""
    # That step was looked at closely, and those after it were not.
    every = ([c["text"] for c in line["causes"] if c["kind"] == kind] for line in lines)
    return next((texts for texts in every if texts), [])


def _largest(line: dict[str, Any]) -> float:
    names = ("loss_difference", "gradient_difference", "worst_difference")
    return max(float(line[name]) for name in names)


def _table(shards: int, lines: Sequence[dict[str, Any]], limit: float) -> Table:
    # The last column, the verdict, needs no heading.
    table = Table(
        "step", f"loss, {shards} shards", "loss, 1 shard", "difference", "of gradient", ""
    )
    for line in lines:
        verdict = "agrees" if _largest(line) <= limit else "differs"
        table.add_row(
            str(line["step"]),
            *(f"{line[name]:.9g}" for name in ("loss", "alone")),
            *(f"{line[name]:.2g}" for name in ("loss_difference", "gradient_difference")),
            "skipped" if line["skipped"] else verdict,
        )
    return table


_UNSEEDED_START = (
    "the models differ before the first step: seed the initial values, for instance with "
    "torch.manual_seed(0) before the model is built"
)
_GLOBAL_ONES = (
    "the global generators of torch, random and NumPy: they are seeded for every shard and every "
    "sample"
)
_HINTS = {
    "unseeded": "seeded by the system, so that it gives other numbers in every process. Give it a "
    f"seed. Inside the loss and the data set, use {_GLOBAL_ONES}",
    "generators": "a generator of its own, which goes on from one shard or sample to the next and "
    f"so depends on what else this device computed. Use {_GLOBAL_ONES}",
    "attributes": "changed while the shards were computed, and no buffer, so that a shard sees how "
    "many this device computed before it. Register it as a buffer, or set it between steps",
}
"""What to do about the findings of `State`, by the names of its fields."""
_UNEVEN = (
    "it was drawn from between steps on some devices and not on others (under trainer.is_lead?), "
    "so that from there on every device has other random numbers. Draw on all devices, or from a "
    "generator that nothing else uses"
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
    hints = [_UNSEEDED_START] if step == 0 else []
    for name, advice in _HINTS.items():
        found = listed(dict.fromkeys(each for s in everyone for each in getattr(s, name)))
        if found:
            hints.append(f"{found}: {advice}")
        # Before the first step nothing was computed: only initial values can differ.
        if step == 0:
            return hints
    # Reversed, so that of each generator the first step stays: from there on all steps differ.
    uneven = dict(reversed([*_uneven(reference), *_uneven(other)]))
    if uneven:
        names = listed(f"{name} before step {first}" for name, first in uneven.items())
        hints.append(f"{names}: {_UNEVEN}")
    return hints


def _uneven(run: _States) -> Iterator[tuple[str, int]]:
    """Find the global generators that were drawn from between steps on some devices only."""
    for before, rows in pairwise([(), *zip(*run.values(), strict=False)]):
        for name in rows[0].states:
            # Only torch's begin alike in all processes. Those of random and NumPy are seeded by the
            # system until a script does it, so that of them only changes can be compared.
            seen: set[object] = {row.states[name] for row in rows}
            if not name.startswith("torch"):
                pairs = zip(before, rows, strict=False)  # nothing is before the first step
                seen = {b.states[name] != a.states[name] for b, a in pairs}
            if len(seen) > 1:
                yield name, rows[0].step


def unequal_passes(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Compare how long the passes of streams were in several runs.

    Args:
        runs: for each run, by its name, what is recorded of the passes that came to their end.

    Returns:
        What differs, and why it may; empty if nothing does.
    """
    first: dict[tuple[int, int], tuple[str, int]] = {}
    for name, passes in runs.items():
        seen: Counter[int] = Counter()
        for each in passes:
            place = each["stream"], seen[each["stream"]]
            seen[each["stream"]] += 1
            of, samples = first.setdefault(place, (name, each["samples"]))
            if samples != each["samples"]:
                return (
                    f"pass {place[1]} of {each['kind']} has {samples} samples on {of} and "
                    f"{each['samples']} on {name}. Every device must read the whole stream, and "
                    f"this one may split it by WORLD_SIZE, RANK or torch.distributed"
                )
    return ""


GUESSES = {
    False: (
        "{count} twice differs as well, so the run does not repeat itself: something draws from a "
        "generator that is not seeded (a torch.Generator or random.Random of its own, os.urandom, "
        "the clock), or a kernel does not repeat its bits. Inside the loss and the data set, use "
        "torch's, random's and NumPy's global generators: they are seeded for every shard and "
        "every sample"
    ),
    True: (
        "{count} twice gives the same bits, so the result depends on who computes what: the script "
        "reads the rank or the number of devices (RANK, trainer.is_lead, torch.distributed), keeps "
        "state from one shard to the next, or changes parameters between steps on every device"
    ),
}
"""The hints that remain, by whether a run repeats its bits."""

"""Verdicts of ``onefold verify``: why bits may differ, and whether the mathematics agree.

`hints_of` finds likely causes of different bits in the devices' recorded states.

Equal bits on one and several devices do not prove that the mathematics is right: a loss that
averages each shard separately has the same wrong gradient everywhere. So ``onefold verify`` also
computes each batch as a single shard, as a plain loop does. `report_mathematics` prints how the
loss and gradient of V shards compare with those of one.
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

_MODES = "dropout off, batch norm in eval mode, the same random numbers for the same samples"


def report_mathematics(
    console: Screen,
    precision: str,
    trainers: Sequence[Sequence[dict[str, Any]]],
    scores: Sequence[Sequence[dict[str, Any]]],
) -> bool:
    """Print a table and a verdict for each Trainer.

    Args:
        console: where to print.
        precision: dtype of both computations, such as ``float64``.
        trainers: recorded lines of each Trainer, one about itself and one per step.
        scores: for each Trainer, a recorded line per score whose first batch was compared.

    Returns:
        Whether everything agrees.
    """
    agree = True
    for number, ((about, *steps), compared) in enumerate(zip(trainers, scores, strict=True)):
        who = f" of trainer {number}" if len(trainers) > 1 else ""
        lines = [line for line in steps if "loss" in line]
        if len(lines) < len(steps):
            console.headed(
                "yellow",
                f"Not compared{who}",
                f": {len(steps) - len(lines)} of {len(steps)} steps, "
                f"whose batches have parts that are not split by sample.",
            )
        # With one shard there is nothing to compare, but the loss may still differ from a plain
        # loop's.
        if about["shards"] == 1 and not any(line["causes"] for line in lines):
            console.print(f"One shard{who}: the mathematics is the plain loop's own.")
        elif lines:
            agree &= _report(console, precision, about, lines, who)
        # Last, so that agreement of the loss is not the last word.
        agree &= _report_scores(console, compared, who)
    return agree


def _report_scores(console: Screen, scores: Sequence[dict[str, Any]], who: str) -> bool:
    """Report score values that depend on the batch; return whether there are none."""
    # A lambda that is written in the loop is another function in each epoch.
    first: dict[tuple[str, str], tuple[dict[str, Any], float, float]] = {}
    for score in scores:
        for name, (several, one) in score["differ"].items():
            first.setdefault((score["function"], name), (score, several, one))
    for (function, name), (score, several, one) in first.items():
        console.headed(
            "bold red",
            f"A score{who} differs",
            f": {name!r} of {function} is {several:.9g} with {score['shards']} shards "
            f"and {one:.9g} with one, in the first batch of its evaluation. Either it is "
            f"computed from a batch, and a shard has only its own samples, or it keeps state "
            f"from call to call, such as a count. Score the values of every "
            f"sample, from trainer.predict; return one value per sample or "
            f"onefold.Mean(total, weight); or pass whole batches to the score with "
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
    # With carried state there is nothing to compare, and no number to show.
    if compared := [line for line in lines if not line["carried"]]:
        console.print(_table(about["shards"], compared, limit))
    why = ""
    if precision != "float64":
        why = "The script does not run in float64, so it was compared in its own precision, and"
    elif limit > about["tolerance"]:
        why = "Part of the loss is computed in a lower precision than float64, so"
    if why:
        words = f"differences of up to {limit:g} count as rounding."
        console.print(f"{why} {words}", style="yellow")
    # A note reports something that could not be compared: not an error, but not agreement either.
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
        times = f"{first['alone'] / first['loss']:.6g}" if first["loss"] else ""
        quotient = f" ({times} times)" if times not in ("", "1") else ""
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
    # Only that step was inspected in detail.
    every = ([c["text"] for c in line["causes"] if c["kind"] == kind] for line in lines)
    return next((texts for texts in every if texts), [])


def _largest(line: dict[str, Any]) -> float:
    names = ("loss_difference", "gradient_difference", "worst_difference")
    return max(float(line[name]) for name in names)


def _table(shards: int, lines: Sequence[dict[str, Any]], limit: float) -> Table:
    # The last column, the verdict, has no heading.
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
    "the models differ before the first step: seed the initial values, for example with "
    "torch.manual_seed(0) before the model is built"
)
_GLOBAL_ONES = (
    "the global generators of torch, random and NumPy, which are seeded for every shard and every "
    "sample"
)
_HINTS = {
    "unseeded": "seeded by the system, so it gives other numbers in every process. Give it a "
    f"seed. Inside the loss and the dataset, use {_GLOBAL_ONES}",
    "generators": "a separate generator, which continues from one shard or sample to the next and "
    f"so depends on what else this device computed. Use {_GLOBAL_ONES}",
    "attributes": "changed while the shards were computed, but not a buffer, so a shard sees how "
    "many this device computed before it. Register it as a buffer, or set it between steps",
}
"""Advice for the findings of `State`, by the names of its fields."""
_UNEVEN = (
    "drawn from between steps on some devices but not on others (under trainer.is_lead?), so the "
    "devices have different random numbers from there on. Draw on all devices, or from a generator "
    "that nothing else uses"
)


@dataclass(frozen=True, slots=True)
class State:
    """Observations of a device in one step of a Trainer."""

    step: int
    states: Mapping[str, str]
    """Digests of the global generators' states before the step, by name."""
    unseeded: Sequence[str]
    """Calls so far that seeded a generator from the system's entropy."""
    attributes: Sequence[str]
    """Attributes of modules that the step changed."""
    generators: Sequence[str]
    """Generators of the script that the step changed."""


_States = Mapping[int, Sequence[State]]


def hints_of(step: int, reference: _States, other: _States) -> list[str]:
    """Return sentences about likely causes, the most informative first.

    Args:
        step: step after which the bits differ; 0 if they differ before the first step.
        reference: states that each device of the first run recorded.
        other: states that each device of the other run recorded.
    """
    everyone = [s for run in (reference, other) for lines in run.values() for s in lines]
    hints = [_UNSEEDED_START] if step == 0 else []
    for name, advice in _HINTS.items():
        found = listed(dict.fromkeys(each for s in everyone for each in getattr(s, name)))
        if found:
            hints.append(f"{found}: {advice}")
        # Before the first step nothing has been computed: only initial values can differ.
        if step == 0:
            return hints
    # Iterate in reverse, so that the first step of each generator is kept: all later steps differ,
    # too.
    uneven = dict(reversed([*_uneven(reference), *_uneven(other)]))
    if uneven:
        names = listed(f"{name} before step {first}" for name, first in uneven.items())
        hints.append(f"{names}: {_UNEVEN}")
    return hints


def _uneven(run: _States) -> Iterator[tuple[str, int]]:
    """Yield the global generators that were drawn from between steps on some devices only."""
    for before, rows in pairwise([(), *zip(*run.values(), strict=False)]):
        for name in rows[0].states:
            # Only torch's generators start equal in all processes. The OS seeds random and NumPy
            # unless the script does, so only their changes can be compared.
            seen: set[object] = {row.states[name] for row in rows}
            if not name.startswith("torch"):
                pairs = zip(before, rows, strict=False)  # nothing precedes the first step
                seen = {b.states[name] != a.states[name] for b, a in pairs}
            if len(seen) > 1:
                yield name, rows[0].step


def unequal_passes(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Compare the lengths of streams' passes in several runs.

    Args:
        runs: for each run, by its name, the records of its completed passes.

    Returns:
        The difference and its likely cause; empty if there is none.
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
                    f"{each['samples']} on {name}. Every device must read the whole stream, but "
                    f"this one may split it by WORLD_SIZE, RANK or torch.distributed"
                )
    return ""


GUESSES = {
    False: (
        "{count} twice differs as well, so the run does not repeat itself: it draws from a "
        "generator that is not seeded (a separate torch.Generator or random.Random, os.urandom, "
        "the clock), or a kernel is not deterministic. Inside the loss and the dataset, use the "
        "global generators of torch, random and NumPy, which are seeded for every shard and every "
        "sample"
    ),
    True: (
        "{count} twice gives the same bits, so the result depends on which device computes what: "
        "the script reads the rank or the number of devices (RANK, trainer.is_lead, "
        "torch.distributed), keeps state from one shard to the next, or changes parameters between "
        "steps on every device"
    ),
}
"""Hints if nothing was recorded, by whether a run repeats its bits."""

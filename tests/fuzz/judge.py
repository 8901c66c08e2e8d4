"""Runs a case in every way that it asks for, and says what is wrong."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.fuzz.case import Case
from tests.fuzz.differences import DIFFERENCES, who_differs
from tests.fuzz.faults import FAULTS, Fault
from tests.fuzz.plain import observer_of
from tests.fuzz.script import Ending, run

__all__ = ["Verdict", "judge_difference", "judge_launched", "judge_local"]


@dataclass
class Verdict:
    """What came of a case."""

    case: Case
    kind: str
    """How it ended, in few words; cases are counted by it."""
    wrong: list[str] = field(default_factory=list)
    """Nothing if it ended as it must."""


def judge_local(case: Case) -> Verdict:
    """Run a case on one device and on several of one process.

    Args:
        case: of the local exchange.
    """
    alone, verdict = _on_one_device(case)
    if case.stop is None or case.fault is not None:
        _compare(verdict, alone, [run(case, case.devices)], case.devices)
        return verdict
    with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as folder:
        first = run(case, case.devices, part="first", folder=folder)
        second = run(case, case.devices_after, part="second", folder=folder)
    _compare_parts(verdict, alone, [first], [second])
    return verdict


def judge_launched(case: Case, first: Sequence[Ending], second: Sequence[Ending] | None) -> Verdict:
    """Judge what the devices of several processes have come to.

    Args:
        case: which was run.
        first: of each device: of the whole run, or of the part before its stop.
        second: of the part after it, if there is one.
    """
    alone, verdict = _on_one_device(case)
    if second is None:
        _compare(verdict, alone, first, case.processes)
    else:
        _compare_parts(verdict, alone, first, second)
    return verdict


def judge_difference(case: Case, endings: Sequence[Ending]) -> Verdict:
    """Judge a run in which one device differs: every device must say so and name it.

    Args:
        case: with a difference.
        endings: of each device.
    """
    verdict = Verdict(case, f"disagreement: {case.difference}")
    who, writer = who_differs(case)
    words = DIFFERENCES[case.difference or ""].words.format(who=who, writer=writer)
    for number, ending in enumerate(endings):
        told = ending.error == "DisagreementError" and re.search(words, ending.words)
        if not told:
            came = f"{ending.where}: {ending.error or 'no error'}: {ending.words}"
            verdict.wrong.append(f"device {number}: expected {words}, got {came}")
    if verdict.wrong and _ends_before(case, endings):
        return Verdict(case, "ended before the disagreement")
    return verdict


def _ends_before(case: Case, endings: Sequence[Ending]) -> bool:
    """Whether the run has an error of its own, as on one device, where no device differs yet."""
    alone = run(replace(case, difference=None), 1)
    return bool(alone.error) and all(
        (e.error, e.words) == (alone.error, alone.words) for e in endings
    )


def _on_one_device(case: Case) -> tuple[Ending, Verdict]:
    fault = FAULTS.get(case.fault or "")
    observer = None if fault is not None else observer_of(case)
    alone = run(case, 1, observer=observer)
    verdict = Verdict(case, "")
    if fault is not None:
        verdict.kind = f"refused: {case.fault}"
        verdict.wrong += _unlike(alone, fault, "one device")
        return alone, verdict
    if alone.error:
        verdict.kind = "unexpected error"
        verdict.wrong.append(f"one device, {alone.where}: {alone.error}: {alone.words}")
    else:
        verdict.kind = _kind(case)
    if observer is not None:
        verdict.wrong += observer.wrong
    return alone, verdict


def _kind(case: Case) -> str:
    if case.shards == 1:
        return "one device, bits of the plain loop" if case.has_bits_of_plain else "one device"
    return "one device, plain loop to 1e-10" if case.exact else "one device, plain update"


def _compare(verdict: Verdict, alone: Ending, others: Sequence[Ending], devices: int) -> None:
    fault = FAULTS.get(verdict.case.fault or "")
    for number, other in enumerate(others):
        who = f"device {number} of {devices}" if len(others) > 1 else f"{devices} devices"
        if fault is not None:
            verdict.wrong += _unlike(other, fault, who, peers=len(others) > 1)
        elif other.error:
            verdict.wrong.append(f"{who}, {other.where}: {other.error}: {other.words}")
        elif not alone.error:
            verdict.wrong += _first_difference(alone.lines, other.lines, who)
    if fault is not None and others and not any(not _unlike(o, fault, "") for o in others):
        verdict.wrong.append("no device has raised the error itself")


def _compare_parts(
    verdict: Verdict, alone: Ending, first: Sequence[Ending], second: Sequence[Ending]
) -> None:
    for part, endings in (("before the stop", first), ("after the stop", second)):
        for number, ending in enumerate(endings):
            if ending.error:
                who = f"device {number} {part}, {ending.where}"
                verdict.wrong.append(f"{who}: {ending.error}: {ending.words}")
    if verdict.wrong:
        return
    for one in first:
        for two in second:
            wrong = _first_difference(alone.lines, one.lines + two.lines, "a stop")
            if wrong:
                verdict.wrong += wrong
                return


def _first_difference(alone: Sequence[str], other: Sequence[str], who: str) -> list[str]:
    if len(alone) != len(other):
        return [f"{who}: {len(other)} lines and not {len(alone)}"]
    for mine, theirs in zip(alone, other, strict=True):
        if mine != theirs:
            return [f"{who}: {_shortened(mine, theirs)}"]
    return []


def _shortened(mine: str, theirs: str) -> str:
    """The first place in which two lines differ."""
    place = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
        min(len(mine), len(theirs)),
    )
    start = max(0, place - 60)
    return f"...{theirs[start : place + 60]}... and not ...{mine[start : place + 60]}..."


def _unlike(ending: Ending, fault: Fault, who: str, *, peers: bool = False) -> list[str]:
    """What is wrong with a refusal; other devices may say who has failed instead."""
    if not ending.error:
        return [f"{who}: expected {fault.error.__name__}, and it was not refused"]
    if peers and ending.error in ("PeerFailed", "PeerLost") and "device" in ending.words:
        return []
    if ending.error != fault.error.__name__ or not re.search(fault.words, ending.words):
        expected = f"{fault.error.__name__}: {fault.words}"
        came = f"{ending.error}: {ending.words}"
        return [f"{who}, {ending.where}: expected {expected}, got {came}"]
    return []

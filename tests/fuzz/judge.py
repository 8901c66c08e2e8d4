"""Runs a case in every way that it asks for, and says what is wrong."""

import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onefold.testing import simulate
from tests.fuzz.case import Case, Verdict, draw, draw_plain
from tests.fuzz.plainloop import judge_plain
from tests.fuzz.script import Ending, run

__all__ = ["verdicts"]


def verdicts(seeds: Sequence[int], exchange: str | None, plain: bool) -> list[Verdict]:
    """What came of the cases of some seeds, with one thread and no warnings."""
    torch.set_num_threads(1)
    logging.getLogger("onefold").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    if plain:
        return [judge_plain(draw_plain(seed)) for seed in seeds]
    return [judge(draw(seed, exchange)) for seed in seeds]


def judge(case: Case) -> Verdict:
    """Run a case on one device and on several, and compare all lines of both."""
    verdict = Verdict(case, case.exchange if case.stop is None else "stopped")
    with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as folder:
        alone = run(case, 1, Path(folder, "alone"))
        if alone.error:
            verdict.wrong.append(f"one device {alone.error}")
        elif case.stop is None:
            found = _placed(case, case.exchange, case.devices, Path(folder), "whole")
            _compare(verdict, alone, found, [Ending()])
        else:
            first = _placed(case, case.exchange, case.devices, Path(folder), "first")
            then = _placed(case, case.exchange_after, case.devices_after, Path(folder), "second")
            _compare(verdict, alone, first, then)
    return verdict


def _placed(case: Case, exchange: str, devices: int, folder: Path, part: str) -> list[Ending]:
    """The endings of all devices; one of a process that drives all of them."""
    if exchange == "local":
        return [run(case, devices, folder, part)]
    way: Any = exchange
    given = (case.but(devices=devices), None, folder, part)
    return simulate(run, devices, seed=case.seed, args=given, exchange=way)


def _compare(
    verdict: Verdict, alone: Ending, first: Sequence[Ending], second: Sequence[Ending]
) -> None:
    for part, endings in (("", first), (", after the stop", second)):
        errors = [(number, each.error) for number, each in enumerate(endings) if each.error]
        verdict.wrong += [f"device {number}{part} {error}" for number, error in errors]
    if verdict.wrong:
        return
    for one in first:
        for two in second:
            lines = one.lines + two.lines
            if len(lines) != len(alone.lines):
                verdict.wrong.append(f"{len(lines)} lines and not {len(alone.lines)}")
            for mine, theirs in zip(alone.lines, lines, strict=False):
                if mine != theirs:
                    verdict.wrong.append(f"{theirs[:250]} and not {mine[:250]}")
                    return

"""Cases in several processes: many of them one after the other in each launch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import onefold
from onefold.errors import RunFailed
from onefold.run.world import current_world
from tests.fuzz.case import Case, draw
from tests.fuzz.differences import DIFFERENCES, Difference
from tests.fuzz.judge import Verdict, judge_difference, judge_launched
from tests.fuzz.script import Ending, Script, run

__all__ = ["judge_together"]


def judge_together(cases: Sequence[Case]) -> list[Verdict]:
    """Run cases of one exchange and one number of processes.

    Args:
        cases: all of them as `tests.fuzz.case.draw` made them.
    """
    first = cases[0]
    with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as folder:
        for case in cases:
            if _part(case) == "second":
                ending = run(case, case.devices, part="first", folder=folder)
                Path(folder, f"{case.seed}-first-0.json").write_text(json.dumps(asdict(ending)))
        failed = ""
        try:
            onefold.launch(
                run_on_each,
                devices=f"cpu:{first.processes}",
                args=([case.seed for case in cases], first.exchange, folder),
                exchange=first.exchange,
                timeout_s=300,
            )
        except RunFailed as error:
            failed = f"the launch failed: {error}"
        return [_judge(case, folder, failed) for case in cases]


def run_on_each(seeds: Sequence[int], exchange: str, folder: str) -> None:
    """What every process does: run its part of each case, and write what came of it."""
    rank = current_world().rank
    torch.set_num_threads(1)
    for seed in seeds:
        case = draw(seed, exchange)
        part = _part(case)
        for this in ("first", "second") if part == "both" else (part,):
            ending = _run_here(case, this, rank, folder)
            Path(folder, f"{seed}-{this}-{rank}.json").write_text(json.dumps(asdict(ending)))


def _run_here(case: Case, part: str, rank: int, folder: str) -> Ending:
    difference = DIFFERENCES.get(case.difference or "")
    if difference is None or rank != case.difference_on:
        return run(case, None, part=part, folder=folder)
    return run(case, None, part=part, folder=folder, script=_differing(difference))


def _differing(difference: Difference) -> type[Script]:
    """The script of the device that differs."""

    class Differing(Script):
        def _build(self) -> None:
            super()._build()
            if difference.build is not None:
                difference.build(self.model, self.optimizer)

        def _settings(self, devices: int | None) -> dict[str, object]:
            other = {} if difference.settings is None else difference.settings(self.case)
            return {**super()._settings(devices), **other}

        def _step(self, batch: object) -> None:
            here = self.trainer.steps + 1 == self.case.difference_at
            if here and difference.before_step is not None:
                other = difference.before_step(self, batch)
                batch = batch if other is None else other
            super()._step(batch)

    return Differing


def _part(case: Case) -> str:
    """What the processes run of a case: all of it, or a part before or after its stop."""
    if case.stop is None or case.fault is not None or case.difference is not None:
        return "whole"
    return case.launched


def _judge(case: Case, folder: str, failed: str) -> Verdict:
    part = _part(case)
    here = {this: _endings(case, folder, this) for this in ("whole", "first", "second")}
    if part == "first" and len(here["first"]) == case.processes:
        here["second"] = [run(case, case.devices_after, part="second", folder=folder)]
    needed = ("whole",) if part == "whole" else ("first", "second")
    if not all(here[this] for this in needed):
        return Verdict(case, "no end", [failed or "a device has not come to an end"])
    if case.difference is not None:
        return judge_difference(case, here["whole"])
    if part == "whole":
        return judge_launched(case, here["whole"], None)
    return judge_launched(case, here["first"], here["second"])


def _endings(case: Case, folder: str, part: str) -> list[Ending]:
    """Of all devices; none if one of them is missing."""
    alone = part == "first" and _part(case) == "second"
    paths = [
        Path(folder, f"{case.seed}-{part}-{rank}.json")
        for rank in range(1 if alone else case.processes)
    ]
    if not all(path.exists() for path in paths):
        return []
    return [Ending(**json.loads(path.read_text())) for path in paths]

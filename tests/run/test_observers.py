"""Who looks on while a run goes, and what it does after each step."""

import json
import math
from pathlib import Path

from onefold.core.options import RunOptions
from onefold.testing import simulate
from tests.small import make_trainer, points


def train(folder: Path, goes_on: bool) -> tuple[str, bool]:
    """Some steps, the last of which are made again from a checkpoint; a second Trainer beside."""
    trainer = make_trainer(devices=None, on_nonfinite="skip")
    if not goes_on:
        for samples in (8, 12):
            trainer.step(points(samples))
        trainer.save(folder)
        for _ in range(3):
            trainer.step(points(8))
    trainer.load(folder)
    trainer.step(points(16))
    found = trainer.fingerprint()
    inputs, targets = points(20)
    trainer.step((inputs / 0, targets))
    make_trainer(devices=None).step(points(8))
    return found, trainer.is_lead


def test_a_trace_has_a_line_for_each_step_that_counts(tmp_path: Path) -> None:
    """Those that are made again take the place of the first ones; a new run begins anew."""
    options = RunOptions(trace=str(tmp_path / "trace"))
    for goes_on in (False, True):
        found = simulate(train, 2, args=(tmp_path / "saved", goes_on), options=options)
        lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
        wanted = [(1, 8), (2, 12), (3, 16), (4, 20)][2 * goes_on :]
        assert [(line["step"], line["samples"]) for line in lines] == wanted
        assert found == [(lines[-2]["fingerprint"], True), (lines[-2]["fingerprint"], False)]
        assert set(lines[0]) == {"step", "epoch", "loss", "samples", "fingerprint"}
        assert math.isnan(lines[-1]["loss"])

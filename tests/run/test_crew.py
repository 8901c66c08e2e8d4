"""What a launcher makes of a device's report."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

from onefold.run.crew import Crew
from onefold.run.rundir import Board, Report
from onefold.system.process import StopSignals
from tests.tables import for_each


@for_each(
    ("kind", "by_peer", "lost", "final"),
    [
        ("AcceleratorError", False, 1, False),
        ("AcceleratorError", True, -1, False),
        ("ValueError", False, -1, False),
        ("LaunchError", False, -1, True),
    ],
)
def test_a_device_whose_gpu_failed_is_lost(
    kind: str, by_peer: bool, lost: int, final: bool
) -> None:
    report = Report(
        rank=1,
        step=3,
        time_s=0.0,
        kind=kind,
        text="CUDA error: an uncorrectable error",
        traceback="",
        caused_by_peer=by_peer,
    )
    with closing(Board(2)) as board, StopSignals(saves=False) as signals:
        outcome = Crew(board, signals)._told(SimpleNamespace(rank=1), report)  # type: ignore[arg-type]
    assert (outcome.lost, outcome.final, outcome.exit_code) == (lost, final, 1)

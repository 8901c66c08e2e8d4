"""A side's processes: told to train, heard, and ended, whatever they do."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from sides import Side, SideError

pytestmark = [pytest.mark.full, pytest.mark.processes]

WORKER = """
    import json, os, socket, sys
    child = {child}
    link = socket.socket(socket.AF_UNIX)
    link.connect(sys.argv[-1])
    lines = link.makefile("rw")
    for line in lines:
        {action}
        answer = dict(seconds=int(line) * {step_s}, cpu_seconds=0.0, loss={loss}, peak_bytes=1)
        lines.write(json.dumps(answer) + "\\n")
        lines.flush()
"""


def side(
    folder: Path,
    *,
    action: str = "pass",
    step_s: str = "0.5",
    loss: str = "1.0",
    processes: int = 1,
) -> Side:
    """A side whose processes do `action` before they answer."""
    program = folder / "worker.py"
    child = "os.fork() == 0" if processes == 2 else "False"
    worker = WORKER.format(action=action, step_s=step_s, loss=loss, child=child)
    program.write_text(textwrap.dedent(worker))
    command = [sys.executable, str(program)]
    return Side(
        "worker", command, processes=processes, folder=folder, environment={"STEP_S": "0.25"}
    )


def test_a_side_trains_as_often_as_it_is_told(tmp_path: Path) -> None:
    with side(tmp_path) as running:
        assert [running.train(steps).seconds for steps in (2, 10)] == [1.0, 5.0]


def test_a_side_has_the_environment_that_it_was_given(tmp_path: Path) -> None:
    with side(tmp_path, step_s="float(os.environ['STEP_S'])") as running:
        assert running.train(4).seconds == 1.0


def test_the_slowest_process_counts(tmp_path: Path) -> None:
    with side(tmp_path, step_s="(2.0 if child else 0.5)", processes=2) as running:
        assert running.train(3).seconds == 6.0


def test_a_process_that_dies_is_told_of_with_its_output(tmp_path: Path) -> None:
    dies = "print('out of luck', flush=True); os._exit(3)"
    with (
        pytest.raises(SideError, match=r"worker: a process ended early(.|\n)*out of luck"),
        side(tmp_path, action=dies) as running,
    ):
        running.train(1)


def test_a_loss_that_is_not_finite_is_told_of(tmp_path: Path) -> None:
    with (
        pytest.raises(SideError, match="the loss came to nan"),
        side(tmp_path, loss="float('nan')") as running,
    ):
        running.train(1)


def test_a_side_that_cannot_start_is_told_of(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "exit('no')"]
    broken = Side("broken", command, processes=1, folder=tmp_path, environment={})
    with pytest.raises(SideError, match=r"broken: ended at the start with code 1(.|\n)*no"):
        broken.__enter__()

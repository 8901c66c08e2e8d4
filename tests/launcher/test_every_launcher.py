"""One run under several launchers in turn: killed or stopped, and continued by the next one."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import onefold
from tests.checkpoint.folders import steps_in
from tests.launcher.test_other_launchers import free_port

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "stopped_anywhere.py")
ONEFOLD = [sys.executable, "-m", "onefold", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "python": [[sys.executable, SCRIPT]],
    "variables": [[sys.executable, SCRIPT]] * 2,
    "joined": [[*ONEFOLD, SCRIPT]] * 2,
    "onefold run": [[*ONEFOLD, "--devices", "cpu:3", SCRIPT]],
    "torchrun": [[*TORCHRUN, SCRIPT]],
}
"""The processes of each launcher. Several of them find each other by PyTorch's variables."""
DEVICES = {"python": 1, "variables": 2, "joined": 2, "onefold run": 3, "torchrun": 2}
pytestmark = [pytest.mark.processes]


def run(launcher: str, fate: str = "", **variables: str) -> tuple[set[int], str]:
    """Run the script under a launcher; returns the exit codes, and what was printed."""
    commands, port = COMMANDS[launcher], str(free_port())
    started = []
    for rank, command in enumerate(commands):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        place |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = place if len(commands) > 1 else {}
        environment = {**os.environ, "PYTHONHASHSEED": "0", **variables, **own, "FATE": fate}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return {process.returncode for process in started}, "".join(said)


def check_course(folder: Path, course: list[tuple[str, str]]) -> None:
    """Run until a fate, again and again, and then to the end."""
    checkpoints, whole = folder / "course", folder / "whole"
    codes, expected = run("python", ONEFOLD_RECORD=str(whole))
    assert codes == {0}, expected
    options = {"ONEFOLD_CHECKPOINT": str(checkpoints), "ONEFOLD_SAVE_EVERY": "2"}
    for launcher, fate in course:
        codes, said = run(launcher, fate, **options)
        assert 0 not in codes, said
        # torchrun exits with a code of its own, and a killed process takes the others with it.
        assert codes == {75} or not fate.endswith("TERM") or launcher == "torchrun", said
    codes, said = run(course[0][0], **options)
    assert codes == {0}, said
    assert said.splitlines()[-1] == expected.splitlines()[-1], course
    one, two = (onefold.Record(each).steps for each in (whole, checkpoints))
    assert [two[name].tolist() for name in ("step", "loss")] == [
        one[name].tolist() for name in ("step", "loss")
    ]


def test_each_launcher_continues_what_another_began(tmp_path: Path) -> None:
    course = [("variables", "1 3 KILL"), ("joined", "0 7 TERM"), ("onefold run", "2 11 KILL")]
    check_course(tmp_path, course)


def test_a_device_that_exits_with_a_code_saves_no_end(tmp_path: Path) -> None:
    """The code is that of the script, and the next run resumes from the last checkpoint before."""
    options = {"ONEFOLD_CHECKPOINT": str(tmp_path), "ONEFOLD_SAVE_EVERY": "4"}
    codes, said = run("joined", "0 6 3", **options)
    assert codes == {3}, said
    assert "Traceback" not in said
    assert steps_in(tmp_path) == [4]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_random_courses(tmp_path: Path, seed: int) -> None:
    draw, course, step = random.Random(seed), [], 0
    for launcher in draw.sample(list(COMMANDS), 3):
        step += draw.randrange(1, 5)
        fate = f"{draw.randrange(DEVICES[launcher])} {step} {draw.choice(('KILL', 'TERM'))}"
        course.append((launcher, fate))
    check_course(tmp_path, course)

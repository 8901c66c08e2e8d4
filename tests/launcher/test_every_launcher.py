"""One run under several launchers in turn: killed or stopped, and continued by the next one."""

import os
import re
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import onefold
from onefold.options import CLOUD_NAMES
from tests.checkpoint.folders import steps_in
from tests.launcher.test_other_launchers import free_port
from tests.metadata import ENDS, Answer, answered, metadata_server

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "stopped_anywhere.py")
ONEFOLD = [sys.executable, "-m", "onefold", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PART = ["--nproc-per-node=1", "--nnodes=2", "--master-addr=127.0.0.1", "--master-port=PORT"]
PART += ["--node-rank"]
HOSTS = ["--hosts", "127.0.0.1,127.0.0.2", "--via", "env HOST={host}", "--devices", "cpu:1"]
"""The second host is this machine, too."""
COMMANDS = {
    "python": [[sys.executable, SCRIPT]],
    "variables": [[sys.executable, SCRIPT]] * 2,
    "joined": [[*ONEFOLD, SCRIPT]] * 2,
    "onefold run": [[*ONEFOLD, "--devices", "cpu:3", SCRIPT]],
    "torchrun": [[*TORCHRUN, SCRIPT]],
    "onefold run --hosts": [[*ONEFOLD, *HOSTS, SCRIPT]],
    "two torchruns": [[*TORCHRUN[:3], *PART, str(rank), SCRIPT] for rank in range(2)],
    "srun": [["srun", "--overcommit", "-N2", "-n2", "-wnode1,node2", sys.executable, SCRIPT]],
    "ray": [[sys.executable, str(Path(SCRIPT).with_name("ray_anywhere.py"))]],
}
"""The processes of each launcher. Several of them find each other by PyTorch's variables."""
DEVICES = {name: {"python": 1, "onefold run": 3}.get(name, 2) for name in COMMANDS}
END = re.compile("end [0-9a-f]{16}")
pytestmark = [pytest.mark.processes]


def run(launcher: str, fate: str = "", **variables: str) -> tuple[set[int], str]:
    """Run the script under a launcher; returns the exit codes, and what was printed."""
    commands, port = COMMANDS[launcher], str(free_port())
    started = []
    for rank, command in enumerate(commands):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        place |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = place if launcher in ("variables", "joined") else {}
        command = [word.replace("=PORT", f"={port}") for word in command]
        environment = {**os.environ, "PYTHONHASHSEED": "0", **variables, **own, "FATE": fate}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return {process.returncode for process in started}, "".join(said)


def check_course(
    folder: Path, course: list[tuple[str, str]], words: str = "", **variables: str
) -> None:
    """Run until a fate, which prints these words, again and again, and then to the end."""
    checkpoints, whole = folder / "course", folder / "whole"
    codes, expected = run("python", ONEFOLD_RECORD=str(whole))
    assert codes == {0}, expected
    options = {"ONEFOLD_CHECKPOINT": str(checkpoints), "ONEFOLD_SAVE_EVERY": "2", **variables}
    for launcher, fate in course[:-1]:
        codes, said = run(launcher, fate, **options)
        assert 0 not in codes, said
        assert words in said, said
        # torchrun exits with a code of its own, and a killed process takes the others with it.
        assert codes == {75} or fate.endswith(("KILL", "HOST")) or "torchrun" in launcher, said
    codes, said = run(course[-1][0], **options)
    assert codes == {0}, said
    assert END.findall(said)[-1:] == END.findall(expected), (course, said)
    one, two = (onefold.Record(each).steps for each in (whole, checkpoints))
    assert [two[name].tolist() for name in ("step", "loss")] == [
        one[name].tolist() for name in ("step", "loss")
    ]


def test_each_launcher_continues_what_another_began(tmp_path: Path) -> None:
    course = [("variables", "1 3 KILL"), ("joined", "0 7 TERM"), ("onefold run", "2 11 KILL")]
    check_course(tmp_path, [*course, ("variables", "")])


@pytest.mark.full
def test_a_notice_stops_the_run_under_each_launcher(tmp_path: Path) -> None:
    """A file that the next run finds, and ignores."""
    course = [("variables", "1 3 NOTICE"), ("onefold run", "2 8 NOTICE"), ("python", "")]
    given = {"NOTICE": str(tmp_path / "stop"), "ONEFOLD_STOP_NOTICE": str(tmp_path / "stop")}
    words = f"the notice file {tmp_path}/stop was written (host {socket.gethostname()}). The run "
    check_course(tmp_path, course, f"{words}saves itself and stops after the next step", **given)


@pytest.mark.full
@pytest.mark.parametrize("cloud", CLOUD_NAMES)
def test_a_cloud_stops_the_run_under_each_launcher(tmp_path: Path, cloud: str) -> None:
    notice = tmp_path / "stop"

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        # The instance ends, and the next one has no notice.
        is_asked = "token" not in handler.path and "compute/name" not in handler.path
        ends = is_asked and notice.exists()
        if ends:
            notice.unlink()
        return answered(cloud, ends, handler)

    course = [("onefold run", "2 3 NOTICE"), ("variables", "0 9 NOTICE"), ("python", "")]
    with metadata_server(answer) as address:
        given = {"NOTICE": str(notice), "ONEFOLD_STOP_NOTICE": cloud, "METADATA": address}
        check_course(tmp_path, course, ENDS[cloud], **given)


def test_a_device_that_exits_with_a_code_saves_no_end(tmp_path: Path) -> None:
    """The code is that of the script, and the next run resumes from the last checkpoint before."""
    options = {"ONEFOLD_CHECKPOINT": str(tmp_path), "ONEFOLD_SAVE_EVERY": "4"}
    codes, said = run("joined", "0 6 3", **options)
    assert codes == {3}, said
    assert "Traceback" not in said
    assert steps_in(tmp_path) == [4]

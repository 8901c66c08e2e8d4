"""Processes that were started apart, as on several hosts: who belongs to the run, who is gone."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.tables import for_each

SCRIPT = Path(__file__).parent.parent / "scripts" / "apart.py"
LIMIT_S = 150
"""Far less than the script's own limit of ten minutes for a device that does not come."""
SECRET = "long enough that nobody guesses it"


class Apart:
    """Two processes, each of which believes to be alone on its host."""

    def __init__(self, kind: str, environments: list[Mapping[str, str]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, kind],
                env={**os.environ, **common, **alone, "RANK": str(rank), **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, own in enumerate(environments)
        ]

    def finish(self, rank: int) -> tuple[int, str]:
        said, errors = self.processes[rank].communicate(timeout=LIMIT_S)
        return self.processes[rank].returncode, said + errors

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


@pytest.fixture
def apart() -> Iterator[Callable[..., Apart]]:
    started: list[Apart] = []

    def start(kind: str, *environments: Mapping[str, str]) -> Apart:
        started.append(Apart(kind, list(environments)))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.mark.parametrize("secret", [{"ONEFOLD_SECRET": SECRET}, {}])
def test_a_run_trains_and_says_that_it_has_no_secret(
    apart: Callable[..., Apart], secret: Mapping[str, str]
) -> None:
    run = apart("train", secret, secret)
    (code, said), (other, others) = (run.finish(rank) for rank in (0, 1))
    assert (code, other) == (0, 0), said + others
    assert re.search("^[0-9a-f]{16}$", said, re.MULTILINE)
    assert said.count("several hosts without a secret") == (not secret)
    assert "without a secret" not in others


@pytest.mark.parametrize(
    "theirs",
    [{}, pytest.param({"ONEFOLD_SECRET": "another text, as long"}, marks=pytest.mark.full)],
)
def test_who_lacks_the_secret_is_refused(
    apart: Callable[..., Apart], theirs: Mapping[str, str]
) -> None:
    run = apart("train", {"ONEFOLD_SECRET": SECRET}, theirs)
    code, said = run.finish(0)
    assert code != 0
    assert "written without the secret of this run. Set the same ONEFOLD_SECRET" in said
    assert SECRET not in said


LAUNCHERS = {
    "shared": ["-m", "onefold", "run", "--devices", "cpu:2", "--exchange", "shared"],
    "collective": ["-m", "onefold", "run", "--devices", "cpu:2", "--exchange", "collective"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def started(launcher: str, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *LAUNCHERS[launcher], str(SCRIPT), kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.full
@for_each("launcher", LAUNCHERS)
def test_a_child_of_a_device_ends_without_a_word(launcher: str) -> None:
    done = started(launcher, "fork")
    assert done.returncode == 0, done.stderr
    assert re.search("^[0-9a-f]{16}$", done.stdout, re.MULTILINE)
    assert "LaunchError" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.full
@for_each("launcher", ["shared", "collective"])
def test_nothing_listens_where_other_hosts_could_reach_it(launcher: str) -> None:
    done = started(launcher, "listen")
    assert done.returncode == 0, done.stderr
    addresses = next(line for line in done.stdout.splitlines() if line.startswith("0")).split()[1:]
    assert launcher == "collective" or not addresses
    loopback = ("0100007F:", "00000000000000000000000001000000:")
    assert all(address.startswith(loopback) for address in addresses)

"""Two processes that are started by hand, in the environments of other launchers."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "placed.py"
pytestmark = [pytest.mark.processes]


def free_port() -> int:
    """Of those that Slurm's tasks may be given."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port


def srun(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port - 10_000),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def kubeflow_trainer(rank: int, port: int) -> dict[str, str]:
    """What version 2 sets is torchrun's; the pod's command is python all the same."""
    place = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
    # Pods have a network of their own.
    return {**place, **pods, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(environments: list[Mapping[str, str]]) -> list[tuple[int, str, str]]:
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "main"],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        said = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(p.returncode, out, err) for p, (out, err) in zip(started, said, strict=True)]


@pytest.mark.parametrize("launcher", [srun, kubeflow_trainer])
def test_the_model_is_that_of_one(launcher: Callable[[int, int], Mapping[str, str]]) -> None:
    ((code, alone, _),) = run([{}])
    assert code == 0
    port = free_port()
    ended = run([launcher(rank, port) for rank in (0, 1)])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [out for _, out, _ in ended] == [alone.replace("1 ", "2 ", 1), ""]

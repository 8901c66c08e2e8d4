"""Two processes that are started by hand, in the environments of other launchers."""

from __future__ import annotations

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


def srun_nodes(rank: int, port: int) -> dict[str, str]:
    """One task on each of two nodes; the job's script has named the place."""
    apart = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    place = {"MASTER_ADDR": "127.0.0.1", "SLURM_NODEID": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    return {**srun(rank, port), "SLURM_STEP_NODELIST": "node[1-2]", **apart, **place}


def ray(rank: int, port: int) -> dict[str, str]:
    return {
        **torch_protocol(rank, port),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }


def kubeflow(rank: int, port: int) -> dict[str, str]:
    return {
        **torch_protocol(rank, port),
        "PYTHONUNBUFFERED": "1",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # pods have a network of their own
    }


def kubeflow_trainer(rank: int, port: int) -> dict[str, str]:
    """What version 2 sets is torchrun's; the pod's command is python all the same."""
    pod = {name: value for name, value in kubeflow(rank, port).items() if name[0] not in "RWM"}
    return {**pod, "PET_NPROC_PER_NODE": "1"}


def torch_protocol(rank: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**place, "RANK": str(rank), "WORLD_SIZE": "2"}


def run(environments: list[Mapping[str, str]], kind: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process."""
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), kind],
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


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        (srun, "main"),
        pytest.param(srun_nodes, "main", marks=pytest.mark.full),
        pytest.param(ray, "ray", marks=pytest.mark.full),
        pytest.param(kubeflow, "main", marks=pytest.mark.full),
        (kubeflow_trainer, "main"),
    ],
    ids=["srun", "srun on two nodes", "ray", "kubeflow", "kubeflow trainer"],
)
def test_the_model_is_that_of_one_process(
    launcher: Callable[[int, int], Mapping[str, str]], kind: str
) -> None:
    ((code, alone, _),) = run([{}], "main")
    assert code == 0
    port = free_port()
    ended = run([launcher(rank, port) for rank in (0, 1)], kind)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [out for _, out, _ in ended] == [alone.replace("1 ", "2 ", 1), ""]

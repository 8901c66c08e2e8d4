"""The launchers that start several processes and do not set PyTorch's variables: one table.

Each of these processes would train a model of its own. Where a launcher says that there are others,
a Trainer is refused, with the command that makes one run of all of them.

Note: who is not refused
------------------------
Sizes of 1, and processes that onefold, torchrun or srun has started as devices of a run. A program
that a device of ``onefold run`` starts has WORLD_SIZE without MASTER_ADDR, and LOCAL_WORLD_SIZE,
by which it is told from one with half of PyTorch's variables. Slurm leaves PMI_* in a shell that
``srun --pty`` has opened. A rank of 0 says nothing; one above 0 says that there are others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from onefold.run.slurm import has_terminal

__all__ = ["Others", "others_of"]


class _Launcher(NamedTuple):
    """A line of the table."""

    name: str
    variable: str
    """Says how many nodes or processes there are, or, with ``least`` 1, which one this is."""
    command: str
    """Makes one run of all of them."""
    of_nodes: bool = True
    """Whether nodes are counted, and not processes."""
    least: int = 2
    """From which value on there are others."""


class Others(NamedTuple):
    """What a launcher says of other processes that this one cannot join."""

    number: int
    """How many nodes or processes there are; 0 if only that there are several."""
    of_nodes: bool
    """Whether it is nodes that were counted."""
    words: str
    """Who says how many there are."""
    refusal: str
    """Why a process that is alone there must not train, and what to do."""


def _torchrun(size: str, rank: str, host: str) -> str:
    return (
        f"torchrun --nnodes ${size} --node-rank ${rank} --nproc-per-node gpu --master-addr {host} "
        f"--master-port 29500 train.py"
    )


def _with_variables(start: str, rank: str, size: str, local_rank: str, local_size: str) -> str:
    """A command that gives each process PyTorch's variables."""
    return (
        f"{start} sh -c 'RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} "
        f"LOCAL_WORLD_SIZE={local_size} MASTER_ADDR=HOST MASTER_PORT=29500 exec python train.py'  "
        f"(HOST: the machine of the first process)"
    )


def _of_mpi(prefix: str, start: str) -> str:
    locals_ = (f"{prefix}_LOCAL_RANK", f"${prefix}_LOCAL_SIZE")
    return _with_variables(start, f"{prefix}_RANK", f"{prefix}_SIZE", *locals_)


_SKYPILOT_HOST = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
_SAGEMAKER = 'PyTorch(..., distribution={"torch_distributed": {"enabled": True}})'
_AZURE = 'command(..., distribution={"type": "PyTorch", "process_count_per_instance": 1})'
_FLUX = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID")
_HYDRA = _with_variables("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "$MPI_LOCALNRANKS")
_BY_TORCHRUN = (
    ("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", _SKYPILOT_HOST),
    ("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP"),
    ("LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "$LWS_LEADER_ADDRESS"),
    ("Beaker", "BEAKER_REPLICA_COUNT", "BEAKER_REPLICA_RANK", "$BEAKER_LEADER_REPLICA_HOSTNAME"),
)
_MPI = (
    ("Open MPI", "OMPI_COMM_WORLD", "mpirun"),
    ("MVAPICH", "MV2_COMM_WORLD", "mpirun"),
    ("jsrun", "JSM_NAMESPACE", "jsrun"),
    ("Horovod", "HOROVOD", "horovodrun"),
)
# The last three are the interfaces through which launchers speak to MPI: any of them may have set
# these, so its own line is looked at first.
_LAUNCHERS = (
    _Launcher("Kubeflow Trainer", "PET_NNODES", "torchrun train.py"),
    *(_Launcher(name, size, _torchrun(size, *rest)) for name, size, *rest in _BY_TORCHRUN),
    _Launcher("SageMaker", "SM_HOSTS", _SAGEMAKER),
    _Launcher("Azure ML", "AZUREML_NODE_COUNT", _AZURE),
    *(_Launcher(name, f"{p}_SIZE", _of_mpi(p, start), False) for name, p, start in _MPI),
    _Launcher(
        "Flux",
        "FLUX_JOB_SIZE",
        _with_variables("flux run", *_FLUX, "$((FLUX_JOB_SIZE / FLUX_JOB_NNODES))"),
        of_nodes=False,
    ),
    _Launcher("a launcher of MPI", "PMI_SIZE", _HYDRA, of_nodes=False),
    _Launcher("a launcher of MPI", "PALS_RANKID", _HYDRA, of_nodes=False, least=1),
    _Launcher("a launcher of MPI", "PMIX_RANK", _HYDRA, of_nodes=False, least=1),
)


def others_of(environment: Mapping[str, str]) -> Others | None:
    """What a launcher says of others that this process cannot join; None if there are none."""
    for line in (*_LAUNCHERS, *_half_of_torch(environment)):
        number = _number(environment.get(line.variable, ""))
        if number >= line.least and not _left_by_slurm(line.variable, environment):
            return _others(line, environment[line.variable], number)
    return None


def _others(line: _Launcher, value: str, number: int) -> Others:
    count = number if line.least > 1 else 0
    words = (
        f"{line.variable}={value} says that {line.name} has started this on {count} nodes"
        if line.of_nodes
        else f"{line.variable}={value} says that {line.name} has started {count or 'other'} "
        f"processes"
    )
    refusal = (
        f"{words}, and nothing tells this process where it can join the others: each would train "
        f"a model of its own. To make one run of all:\n    {line.command}\nTo train one model here "
        f"on purpose, whatever the others do: onefold run --devices 1 train.py"
    )
    return Others(count, line.of_nodes, words, refusal)


def _number(text: str) -> int:
    """The number in a variable: plain, the upper end of a range such as 1:4, or a list's length."""
    if text.startswith("["):
        try:
            return len(json.loads(text))
        except ValueError:
            return 0
    last = text.rpartition(":")[2]
    return int(last) if last.isascii() and last.isdecimal() else 0


def _left_by_slurm(variable: str, environment: Mapping[str, str]) -> bool:
    left = variable.startswith("PMI") and "SLURM_PTY_PORT" in environment
    return left and has_terminal()


def _half_of_torch(environment: Mapping[str, str]) -> Iterator[_Launcher]:
    """A line for PyTorch's own variables, where some of them are missing."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environment]
    if missing and "LOCAL_WORLD_SIZE" not in environment:
        command = f"torchrun train.py  (or set {', '.join(missing)} as well, or unset WORLD_SIZE)"
        yield _Launcher("a launcher", "WORLD_SIZE", command, of_nodes=False)

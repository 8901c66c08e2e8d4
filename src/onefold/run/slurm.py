"""Reads what Slurm's ``srun`` tells a process about its place among the others.

Note: which processes are a run
-------------------------------
Slurm leaves its variables in many places where nobody wants several processes: in the script of
``sbatch``, in the shell of ``salloc``, in a shell or a notebook that ``srun --pty`` has opened.
Only a task of an ordinary step with several tasks is taken for a device of a run:

=====================  =============  =============  ==============  ==============
process                SLURM_PROCID   SLURM_STEP_ID  tasks of step   SLURM_PTY_PORT
=====================  =============  =============  ==============  ==============
a task of ``srun``     its number     0, 1, …        2 or more       -
``srun -n 1``          0              0, 1, …        1               -
script of ``sbatch``   0              -              -               -
shell of ``salloc``    - or 0         - or special   - or 1          -
``srun --pty bash``    0              0, 1, …        any             set
=====================  =============  =============  ==============  ==============

PyTorch's own variables take precedence: under ``srun torchrun`` they are the right ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from onefold.errors import LaunchError

__all__ = ["SlurmTask", "first_node", "slurm_task", "tasks_of_nodes"]

_SPECIAL_STEPS = 0xFFFFFFF0
"""Steps from here on are not srun's: the script of a batch job, an interactive shell and others."""
_PORTS = range(10_000, 30_000)
"""Below those that Linux gives to outgoing connections."""


class SlurmTask(NamedTuple):
    """A task's place among the tasks of its step."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    run_id: str
    host: str
    """The first host of the step, where task 0 runs."""
    port: int
    """A port that follows from the job and the step, and so is the same for all tasks."""


def slurm_task(environment: Mapping[str, str]) -> SlurmTask | None:
    """Read a task's place; None where this process is no task among several.

    Raises:
        LaunchError: a variable of a task is missing, or is not what Slurm writes.
    """
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return None
    # Of a shell that all tasks have opened, only one is still there when somebody types. But srun
    # hands the variable on to tasks that are started from such a shell, and these have no terminal.
    if "SLURM_PTY_PORT" in environment and has_terminal():
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size == 1:
        return None
    job = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    nodes = _text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return SlurmTask(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=_local_size(environment),
        run_id=f"slurm-{job}-{step}-{restarts}",
        host=first_node(nodes),
        # Steps of a job may run side by side, and jobs on one host.
        port=_PORTS[(job + 997 * int(step)) % len(_PORTS)],
    )


def first_node(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    Raises:
        LaunchError: it is no such list.

    >>> first_node("gpu[07-09,12],login1"), first_node("rack[2-3]-node[1,4]")
    ('gpu07', 'rack2-node1')
    """
    # The first name ends at a comma that is not in brackets; of each bracket the first item counts.
    found = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+", nodes)
    if found is None or nodes[found.end() :][:1] not in ("", ","):
        raise LaunchError(f"expected a list of nodes such as node[01-03,7], Slurm says {nodes!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def tasks_of_nodes(tasks: str) -> list[int]:
    """Return the number of tasks on each host, from a list as Slurm writes it.

    >>> tasks_of_nodes("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise LaunchError(f"expected tasks of nodes such as 2(x3),1, Slurm says {tasks!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _local_size(environment: Mapping[str, str]) -> int:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not any(map(environment.get, names)) and "SLURM_NTASKS_PER_NODE" in environment:
        return _number(environment, "SLURM_NTASKS_PER_NODE")
    counts = tasks_of_nodes(_text(environment, *names))
    node = _number(environment, "SLURM_NODEID")
    if node >= len(counts):
        raise LaunchError(
            f"Slurm says that this is node {node} of the step, and lists {len(counts)} with tasks"
        )
    return counts[node]


def _text(environment: Mapping[str, str], *names: str) -> str:
    """Return the first of several variables that is set."""
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
        raise LaunchError(
            f"this process is task {environment.get('SLURM_PROCID', '?')} of a step of srun, and "
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set. To run it alone, "
            f"take SLURM_STEP_ID out of its environment"
        )
    return found


def has_terminal() -> bool:
    """Whether a terminal controls this process, as that of a shell does."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _text(environment, *names)
    if not text.isdecimal():
        raise LaunchError(f"expected {' or '.join(names)} to be a number, Slurm says {text!r}")
    return int(text)

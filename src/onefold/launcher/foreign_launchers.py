"""Reads how another launcher started this process: PyTorch's variables, Slurm's, or a refusal.

`HidingPlace` hides these variables from data libraries.

Under a launcher in the table below, each process would train a separate model. If such a launcher
reports other processes, creating a Trainer raises an error with the command that makes all of them
one run.

Note: which processes are not refused
-------------------------------------
Sizes of 1, and processes that onefold, torchrun or srun started as devices of a run. Slurm leaves
PMI_* in a shell that ``srun --pty`` opened. A rank of 0 proves nothing; a rank above 0 proves that
there are other processes.

Note: which processes of Slurm are a run
----------------------------------------
Slurm sets its variables in many places where only one process is wanted: in the script of
``sbatch``, in the shell of ``salloc``, in a shell or a notebook that ``srun --pty`` opened. Only a
task of an ordinary step with several tasks counts as a device of a run:

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

Note: which code sees the rank of this process
----------------------------------------------
Every device reads the whole stream, so a library that splits it by RANK and WORLD_SIZE, or by
Slurm's variables where these are missing, must see a single process. The script and its other
libraries (loggers, torch.distributed) may need the true values. So the reader decides: the
variables are hidden from a module of an installed library while a dataset, sampler or loader is
built or read, which the frames of the call stack show. Before the first Trainer, onefold cannot
know whether it will read that dataset, and another loop may need the split. Until then it only
notes the readers, and warns about them when the Trainer is created.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import NamedTuple

from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import LaunchError
from onefold.launcher.environment import PLACE

__all__ = [
    "HidingPlace",
    "NotingReaders",
    "hide_place",
    "note_readers",
    "others_of",
    "read_foreign",
    "slurm_task",
]

_log = logging.getLogger("onefold")

SECRET_VARIABLE = "ONEFOLD_SECRET"
_SECRET_LENGTH = 16
_TORCH = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class _Launcher(NamedTuple):
    """A row of the table."""

    name: str
    variable: str
    """Variable with the number of nodes or processes or, with ``least`` 1, with this one's rank."""
    command: str
    """Command that makes all of them one run."""
    of_nodes: bool = True
    """Whether the variable counts nodes instead of processes."""
    least: int = 2
    """Lowest value that proves that there are others."""


class Others(NamedTuple):
    """A launcher's other processes, which this one cannot join; empty if there are none."""

    number: int = 0
    """Number of nodes or processes; 0 if it is unknown but above one."""
    of_nodes: bool = False
    """Whether ``number`` counts nodes."""
    words: str = ""
    """Which launcher and variable report the number."""
    refusal: str = ""
    """Why this process must not train alone, and what to do."""


def _torchrun(size: str, rank: str, host: str) -> str:
    return (
        f"torchrun --nnodes ${size} --node-rank ${rank} --nproc-per-node gpu --master-addr {host} "
        f"--master-port 29500 train.py"
    )


def _with_variables(start: str, rank: str, size: str, local_rank: str, local_size: str) -> str:
    """Return a command that sets PyTorch's variables for each process."""
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
# The last three are the interfaces between launchers and MPI. Any launcher may set their variables,
# so the launchers' own rows come first.
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


def read_foreign(environment: Mapping[str, str], options: RunOptions) -> LaunchContext:
    """Read how another launcher started this process.

    Args:
        environment: variables of this process.
        options: options of the run.

    Raises:
        LaunchError: a variable is missing or invalid.
    """
    others = others_of(environment)
    # Before Slurm's variables: if srun started torchrun, torchrun's processes are the devices.
    environment = {**environment, **_of_pod(environment)}
    if environment.keys() >= _TORCH:
        context = _read_torch(environment, options)
        # These processes share one node, although a launcher started several nodes.
        beside = others.of_nodes and context.one_host
        return replace(context, others=others.words if beside else "")
    task = slurm_task(environment)
    # mpirun inside a job may start its helpers with srun, and they pass srun's variables on.
    if task is not None and (others.of_nodes or others.number in (0, task.size)):
        # A job script often sets the address, because its author knows the network.
        host, _, port = task.address.rpartition(":")
        host = environment.get("MASTER_ADDR") or host
        number = _whole_number(environment, "MASTER_PORT", int(port), least=1)
        return _joined(task, environment, options, host, number)
    return LaunchContext(options=options, others=others.words, refusal=others.refusal)


def _of_pod(environment: Mapping[str, str]) -> Mapping[str, str]:
    """PyTorch's variables for a pod with one process, which only has torchrun's variables."""
    names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    values = [environment.get(name, "") for name in names]
    # torchrun sets RANK itself. Only torchrun knows the ranks of an elastic job, such as 1:4 nodes.
    if "RANK" in environment or not all(values) or not values[1].isdecimal() or values[1] == "1":
        return {}
    if environment.get("PET_NPROC_PER_NODE", "1") != "1" or "PET_RDZV_ENDPOINT" in environment:
        return {}
    known = zip(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), values, strict=True)
    return {**dict(known), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _read_torch(environment: Mapping[str, str], options: RunOptions) -> LaunchContext:
    _refuse_pod_of_several(environment)
    size = _whole_number(environment, "WORLD_SIZE", least=1)
    local_size = _whole_number(environment, "LOCAL_WORLD_SIZE", 1, least=1)
    rank = _whole_number(environment, "RANK")
    if rank >= size or local_size > size:
        raise LaunchError(
            f"RANK={rank}, LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size} contradict each "
            f"other. RANK must be below WORLD_SIZE, and LOCAL_WORLD_SIZE at most WORLD_SIZE. "
            f"torchrun sets all of them"
        )
    # Include the restart count: the launcher's store survives a failed attempt, and this attempt
    # must not read that attempt's keys. It differs between hosts: see `exchange.attempts`.
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    counted = parts[:2] if agent_store and local_size < size else parts
    place = LaunchContext(
        rank=rank,
        size=size,
        local_rank=_whole_number(environment, "LOCAL_RANK", 0),
        local_size=local_size,
        run_id="-".join(environment.get(name, "") for name in counted),
        agent_store=agent_store,
    )
    port = _whole_number(environment, "MASTER_PORT", least=1)
    return _joined(place, environment, options, environment["MASTER_ADDR"], port)


def _whole_number(
    environment: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise LaunchError(
            f"{name} must be an integer of at least {least}, but got {text!r}. torchrun sets it. "
            f"To use one device, unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return int(text)


def _joined(
    place: LaunchContext,
    environment: Mapping[str, str],
    options: RunOptions,
    host: str,
    port: int,
) -> LaunchContext:
    """Return the context of a process that meets the others at an address."""
    secret = environment.get(SECRET_VARIABLE, "")
    if secret and len(secret) < _SECRET_LENGTH:
        raise LaunchError(
            f"{SECRET_VARIABLE} must have at least {_SECRET_LENGTH} characters, but has "
            f"{len(secret)}. Set the same random text for every process of the run"
        )
    return replace(
        place,
        one_host=place.local_size == place.size,
        launcher="torch",
        secret=secret,
        options=options,
        address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
    )


def _refuse_pod_of_several(environment: Mapping[str, str]) -> None:
    """Refuse a Kubeflow pod's only process if the pod is configured for several."""
    # The operator counts all processes in WORLD_SIZE, but RANK is the pod's: they would never meet.
    count = environment.get("PET_NPROC_PER_NODE", "")
    if count.isdecimal() and int(count) > 1 and "LOCAL_RANK" not in environment:
        raise LaunchError(
            f"this PyTorchJob sets PET_NPROC_PER_NODE={count} processes per pod, but the pod's "
            f"command started only one. Start the command with torchrun instead of python, or "
            f"remove nprocPerNode from the job"
        )


def others_of(environment: Mapping[str, str]) -> Others:
    """Return the launcher's other processes that this process cannot join."""
    for line in (*_LAUNCHERS, *_half_of_torch(environment)):
        number = _count_in(environment.get(line.variable, ""))
        left_by_slurm = line.variable.startswith("PMI") and "SLURM_PTY_PORT" in environment
        if number < line.least or (left_by_slurm and has_terminal()):
            continue
        count = number if line.least > 1 else 0
        what = f"this script on {count} nodes" if line.of_nodes else f"{count or 'other'} processes"
        value = environment[line.variable]
        words = f"{line.variable}={value} means that {line.name} has started {what}"
        refusal = (
            f"{words}, but this process has no address at which to join the others, so each would "
            f"train a separate model. To make all of them one run:\n    {line.command}\nTo train "
            f"a separate model here on purpose: onefold run --devices 1 train.py"
        )
        return Others(count, line.of_nodes, words, refusal)
    return Others()


def _count_in(text: str) -> int:
    """Read a count: a number, the upper end of a range such as 1:4, or the length of a list."""
    if text.startswith("["):
        try:
            return len(json.loads(text))
        except ValueError:
            return 0
    last = text.rpartition(":")[2]
    return int(last) if last.isascii() and last.isdecimal() else 0


def _half_of_torch(environment: Mapping[str, str]) -> Iterator[_Launcher]:
    """Yield a row for PyTorch's own variables if some of them are missing."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environment]
    if missing:
        command = f"torchrun train.py  (or set {', '.join(missing)} as well, or unset WORLD_SIZE)"
        yield _Launcher("a launcher", "WORLD_SIZE", command, of_nodes=False)


_SPECIAL_STEPS = 0xFFFFFFF0
"""Steps from this number on are special: a batch script, an interactive shell and others."""
_PORTS = range(10_000, 30_000)
"""Ports below those that Linux assigns to outgoing connections."""


def slurm_task(environment: Mapping[str, str]) -> LaunchContext | None:
    """Read a task's place in its step; None if this process is not one of several tasks.

    The address is that of task 0.

    Raises:
        LaunchError: a variable of a task is missing, or has an unexpected format.
    """
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return None
    # When the user types into a shell that all tasks opened, only one of the tasks is left. But
    # srun passes the variable on to tasks started from such a shell, which have no terminal.
    if "SLURM_PTY_PORT" in environment and has_terminal():
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size == 1:
        return None
    job = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    nodes = _text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    local_size = _local_size(environment)
    # Without a network, a node's name may not resolve, even if all tasks are on that node.
    host = "127.0.0.1" if local_size == size else first_node(nodes)
    # The same for all tasks, but different for steps and jobs that may share a host.
    port = _PORTS[(job + 997 * int(step)) % len(_PORTS)]
    return LaunchContext(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=local_size,
        run_id=f"slurm-{job}-{step}-{restarts}",
        address=f"{host}:{port}",
    )


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    Raises:
        LaunchError: the text is not such a list.

    >>> first_node("gpu[07-09,12],login1"), first_node("rack[2-3]-node[1,4]")
    ('gpu07', 'rack2-node1')
    """
    # The first name ends at a comma outside brackets; take the first item of each bracket.
    found = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+", nodes)
    if found is None or nodes[found.end() :][:1] not in ("", ","):
        raise LaunchError(f"Slurm's node list must look like node[01-03,7], but got {nodes!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def tasks_of_nodes(tasks: str) -> list[int]:
    """Return the number of tasks on each host, from a Slurm list.

    >>> tasks_of_nodes("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise LaunchError(f"Slurm's task counts must look like 2(x3),1, but got {tasks!r}")
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
            f"Slurm reports node {node} for this task, but lists tasks for {len(counts)} nodes only"
        )
    return counts[node]


def _text(environment: Mapping[str, str], *names: str) -> str:
    """Return the value of the first variable that is set."""
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
        raise LaunchError(
            f"this process is task {environment.get('SLURM_PROCID', '?')} of an srun step, but "
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set. To run it alone, "
            f"unset SLURM_STEP_ID"
        )
    return found


def has_terminal() -> bool:
    """Whether a terminal controls this process, as it controls a shell."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _text(environment, *names)
    if not text.isdecimal():
        raise LaunchError(f"{' or '.join(names)} must be a number, but Slurm set {text!r}")
    return int(text)


def _reader() -> str:
    """Return the library's line that reads a variable for a dataset; empty if there is none."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    path, library = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
    if not _INSTALLED.search(path) or library.partition(".")[0] in ("torch", "onefold"):
        return ""
    line, found = f"{path}:{frame.f_lineno}", sys.modules.get("torch.utils.data")
    data = (found.Dataset, found.Sampler, found.DataLoader) if found else ()
    within: FrameType | None = frame
    while within is not None:
        reads = str(within.f_globals.get("__name__")).startswith("onefold.data_order.")
        if reads or isinstance(within.f_locals.get("self"), data):
            return line
        within = within.f_back
    return ""


_HIDDEN = (*PLACE, "NNODES", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables by which a library may split data, and those that it may read in their place."""
_BETWEEN = ("os", "collections.abc", __name__)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_readers: list[str] = []
"""Lines that read a variable for a dataset before the first Trainer was created."""


class NotingReaders(os._Environ[str]):
    """The environment of a process that may become a device; see the note on its rank."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        if name in _HIDDEN and (reader := _reader()):
            _readers.append(f"{name} ({reader})")
        return value


class HidingPlace(os._Environ[str]):
    """The environment of a device of another launcher; see the note on its rank."""

    def __getitem__(self, name: str) -> str:
        if name in _HIDDEN and _reader():
            raise KeyError(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        hidden = _HIDDEN if _reader() else ()
        return (name for name in super().__iter__() if name not in hidden)


def note_readers() -> None:
    """Start noting which lines read the rank of this process for a dataset."""
    os.environ.__class__ = NotingReaders


def hide_place() -> None:
    """Hide the rank of this process from data libraries from now on."""
    os.environ.__class__ = HidingPlace
    if _readers:
        _log.warning(
            "a dataset was created before Trainer and read %s, so it may give each device only a "
            "part of the data. Every device must read all of it. Create Trainer first: data "
            "libraries then see a single process",
            ", ".join(dict.fromkeys(_readers)),
        )
        _readers.clear()

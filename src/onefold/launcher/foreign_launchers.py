"""Reads how other launchers started a process: by PyTorch's variables, by Slurm's, or refused.

`HidingPlace` keeps these variables from data libraries.

Each process of a launcher in the table would train a model of its own. Where such a launcher says
that there are others, a Trainer is refused, with the command that makes one run of all of them.

Note: who is not refused
------------------------
Sizes of 1, and processes that onefold, torchrun or srun has started as devices of a run. Slurm
leaves PMI_* in a shell that ``srun --pty`` has opened. A rank of 0 says nothing; one above 0 says
that there are others.

Note: which processes of Slurm are a run
----------------------------------------
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

Note: who sees the place of this process
----------------------------------------
Every device reads a whole stream, so a library that splits it by RANK and WORLD_SIZE must find one
process. The script and its other libraries (loggers, torch.distributed) may need the truth. So the
reader decides: a module of an installed library gets nothing while a data set, a sampler or a
loader is built or read, which the frames of the call show. Before the first Trainer it is not known
whether onefold reads that data set, and another loop may need the split. Until then the readers are
only noted, and reported when the Trainer is made.
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
    """What a launcher says of other processes that this one cannot join; empty if it says none."""

    number: int = 0
    """How many nodes or processes there are; 0 if only that there are several."""
    of_nodes: bool = False
    """Whether it is nodes that were counted."""
    words: str = ""
    """Who says how many there are."""
    refusal: str = ""
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


def read_foreign(environment: Mapping[str, str], options: RunOptions) -> LaunchContext:
    """Read how another launcher started this process.

    Args:
        environment: variables of this process.
        options: those of the run.

    Raises:
        LaunchError: a variable is missing or wrong.
    """
    others = others_of(environment)
    # Before Slurm's: where srun has started torchrun, the devices are what torchrun starts.
    environment = {**environment, **_of_pod(environment)}
    if environment.keys() >= _TORCH:
        context = _read_torch(environment, options)
        # Processes of one node, where a launcher has started several nodes.
        beside = others.of_nodes and context.one_host
        return replace(context, others=others.words if beside else "")
    task = slurm_task(environment)
    # An mpirun inside of a job may start its helpers by srun, whose variables they hand on.
    if task is not None and (others.of_nodes or others.number in (0, task.size)):
        # A job script often names the address, as the one who wrote it knows the network.
        host, _, port = task.address.rpartition(":")
        host = environment.get("MASTER_ADDR") or host
        number = _whole_number(environment, "MASTER_PORT", int(port), least=1)
        return _joined(task, environment, options, host, number)
    return LaunchContext(options=options, others=others.words, refusal=others.refusal)


def _of_pod(environment: Mapping[str, str]) -> Mapping[str, str]:
    """PyTorch's variables for a pod with one process, to which only torchrun's were given."""
    names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    values = [environment.get(name, "") for name in names]
    # torchrun sets RANK itself. The ranks of an elastic job, 1:4 nodes say, only torchrun knows.
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
            f"RANK is {rank}, LOCAL_WORLD_SIZE {local_size} and WORLD_SIZE {size}: expected RANK "
            f"below WORLD_SIZE, and no more processes on this machine than there are. torchrun "
            f"sets all of them"
        )
    # The restart count is part of it: the store of the launcher outlives a failed attempt, and keys
    # of that one must not be taken for ours.
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    place = LaunchContext(
        rank=rank,
        size=size,
        local_rank=_whole_number(environment, "LOCAL_RANK", 0),
        local_size=local_size,
        run_id="-".join(environment.get(name, "") for name in parts),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
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
            f"the environment says {name}={text!r}: expected a whole number of {least} or more, as "
            f"torchrun sets it. To use one device, unset RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT"
        )
    return int(text)


def _joined(
    place: LaunchContext,
    environment: Mapping[str, str],
    options: RunOptions,
    host: str,
    port: int,
) -> LaunchContext:
    """The context of a process that finds the others at an address."""
    secret = environment.get(SECRET_VARIABLE, "")
    if secret and len(secret) < _SECRET_LENGTH:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(secret)} characters: expected {_SECRET_LENGTH} or more "
            f"that nobody can guess, the same for every process of the run"
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
    """Refuse the one process of a Kubeflow pod in which torchrun is to start several."""
    # The operator counts all of them in WORLD_SIZE, and RANK is the pod's: they would never meet.
    count = environment.get("PET_NPROC_PER_NODE", "")
    if count.isdecimal() and int(count) > 1 and "LOCAL_RANK" not in environment:
        raise LaunchError(
            f"PET_NPROC_PER_NODE says {count} processes for each pod of this PyTorchJob, and this "
            f"one was started alone: expected torchrun to start them. Have the pod's command begin "
            f"with torchrun in place of python, or leave nprocPerNode out of the job"
        )


def others_of(environment: Mapping[str, str]) -> Others:
    """What a launcher says of others that this process cannot join."""
    for line in (*_LAUNCHERS, *_half_of_torch(environment)):
        number = _count_in(environment.get(line.variable, ""))
        left_by_slurm = line.variable.startswith("PMI") and "SLURM_PTY_PORT" in environment
        if number < line.least or (left_by_slurm and has_terminal()):
            continue
        count = number if line.least > 1 else 0
        what = f"this on {count} nodes" if line.of_nodes else f"{count or 'other'} processes"
        value = environment[line.variable]
        words = f"{line.variable}={value} says that {line.name} has started {what}"
        refusal = (
            f"{words}, and nothing tells this process where it can join the others: each would "
            f"train a model of its own. To make one run of all:\n    {line.command}\nTo train one "
            f"model here on purpose, whatever the others do: onefold run --devices 1 train.py"
        )
        return Others(count, line.of_nodes, words, refusal)
    return Others()


def _count_in(text: str) -> int:
    """The number in a variable: plain, the upper end of a range such as 1:4, or a list's length."""
    if text.startswith("["):
        try:
            return len(json.loads(text))
        except ValueError:
            return 0
    last = text.rpartition(":")[2]
    return int(last) if last.isascii() and last.isdecimal() else 0


def _half_of_torch(environment: Mapping[str, str]) -> Iterator[_Launcher]:
    """A line for PyTorch's own variables, where some of them are missing."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environment]
    if missing:
        command = f"torchrun train.py  (or set {', '.join(missing)} as well, or unset WORLD_SIZE)"
        yield _Launcher("a launcher", "WORLD_SIZE", command, of_nodes=False)


_SPECIAL_STEPS = 0xFFFFFFF0
"""Steps from here on are not srun's: the script of a batch job, an interactive shell and others."""
_PORTS = range(10_000, 30_000)
"""Below those that Linux gives to outgoing connections."""


def slurm_task(environment: Mapping[str, str]) -> LaunchContext | None:
    """Read a task's place in its step; None where this process is no task among several.

    Its address is that of task 0.

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
    local_size = _local_size(environment)
    # Without a network, the name of a node need not resolve where all tasks are on one.
    host = "127.0.0.1" if local_size == size else first_node(nodes)
    # The same for all tasks; but steps of a job may run side by side, and jobs on one host.
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


def _reader() -> str:
    """Name the line of a library that asks for a variable for a data set; empty if it is none."""
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


_BETWEEN = ("os", "collections.abc", __name__)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_readers: list[str] = []
"""Lines that have read a variable for a data set before the first Trainer was made."""


class NotingReaders(os._Environ[str]):
    """The environment of a process that may become a device; see the note on its place."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        if name in PLACE and (reader := _reader()):
            _readers.append(f"{name} ({reader})")
        return value


class HidingPlace(os._Environ[str]):
    """The environment of a device of another launcher; see the note on its place."""

    def __getitem__(self, name: str) -> str:
        if name in PLACE and _reader():
            raise KeyError(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        hidden = PLACE if _reader() else ()
        return (name for name in super().__iter__() if name not in hidden)


def note_readers() -> None:
    """Note from now on which lines read the place of this process for a data set."""
    os.environ.__class__ = NotingReaders


def hide_place() -> None:
    """Hide the place of this process from data libraries, from now on."""
    os.environ.__class__ = HidingPlace
    if _readers:
        _log.warning(
            "a data set was made before Trainer, and read %s: it may give each device a part of "
            "the data, while every device has to read all of it. Make Trainer first; from then on "
            "data libraries see a single process",
            ", ".join(dict.fromkeys(_readers)),
        )
        _readers.clear()

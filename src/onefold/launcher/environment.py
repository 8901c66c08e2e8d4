"""How this process was started. The only module that reads the environment, once, at the start.

A process is alone, or was started by ``onefold run`` or `onefold.launch` (which leave a record in
ONEFOLD_CONTEXT), by any launcher that speaks PyTorch's protocol (RANK, WORLD_SIZE, MASTER_ADDR),
such as torchrun, Ray Train or Kubeflow, or by Slurm's srun. One that is alone where another
launcher says that there are others may not train. For Slurm and such launchers see
`onefold.launcher.foreign_launchers`.

Note: one process is the device
-------------------------------
A program that the script starts inherits the environment, and a process that it forks inherits all
memory: each would take itself for the device. So the record is removed from the environment when it
is read (RANK and WORLD_SIZE stay, for libraries that print or download on rank 0 alone), and the
context belongs to the process that has read it; asking for it in a forked child is an error.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onefold.core.context import LaunchContext
from onefold.core.late import load
from onefold.core.options import DEFAULT_PLACEMENT, RunOptions
from onefold.errors import LaunchError
from onefold.system.process import NOTICES, STOP_SIGNALS, TOOLS_VARIABLE

__all__ = [
    "OFFLOAD_DIR_VARIABLE",
    "PLACEMENT_VARIABLE",
    "STARTED_IN",
    "allocator_chosen",
    "current_context",
    "have_cublas_repeat",
    "have_private_caches",
    "is_by_bus",
    "is_launched",
    "kernel_flags",
    "options_of",
    "simulated",
    "visible_gpus",
    "worker_environment",
]

_log = logging.getLogger("onefold")
CONTEXT_VARIABLE = "ONEFOLD_CONTEXT"
SECRET_VARIABLE = "ONEFOLD_SECRET"
PLACEMENT_VARIABLE, OFFLOAD_DIR_VARIABLE = "ONEFOLD_PLACEMENT", "ONEFOLD_OFFLOAD_DIR"
STOP_VARIABLE = "ONEFOLD_STOP_SIGNAL"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_SECRET_LENGTH = 16
STARTED_IN = os.getcwd() if os.path.isdir(".") else ""
"""The working directory as the program began; empty where it is gone."""
_OF_KERNELS = (
    *("ATEN_", "CUBLAS", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_TF32_", "OMP_"),
    *("ONEDNN_", "PYTORCH_", "TORCH_"),
)
_TORCH = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_FOREIGN = (
    *("AZUREML_", "BEAKER_", "DSTACK_", "FLUX_", "HOROVOD_", "JSM_", "LWS_", "MV2_", "OMPI_"),
    *("PALS_", "PET_", "PMI", "SKYPILOT_", "SLURM_", "SM_"),
)
"""How variables of other launchers begin; see `onefold.launcher.foreign_launchers`."""
_CUBLAS, _CUBLAS_REPEATS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def read_context(environment: Mapping[str, str]) -> LaunchContext:
    """Read from an environment how this process was started.

    Raises:
        LaunchError: it is started by a launcher that has left something out.
    """
    if CONTEXT_VARIABLE in environment:
        return LaunchContext.from_json(environment[CONTEXT_VARIABLE])
    foreign = load("launcher.foreign_launchers") if _is_foreign(environment) else None
    others: Any = foreign.others_of(environment) if foreign else None
    # Before Slurm's: where srun has started torchrun, the devices are what torchrun starts.
    environment = {**environment, **_of_pod(environment)}
    if environment.keys() >= _TORCH:
        context = _read_torch(environment)
        # Processes of one node, where a launcher has started several nodes.
        beside = others and others.of_nodes and context.one_host
        return replace(context, others=others.words if beside else "")
    if foreign is None:
        return LaunchContext(options=options_of(environment))
    task = foreign.slurm_task(environment)
    # An mpirun inside of a job may start its helpers by srun, whose variables they hand on.
    if task is not None and (others.of_nodes or others.number in (0, task.size)):
        # A job script often names the address, as the one who wrote it knows the network.
        host, _, port = task.address.rpartition(":")
        host = environment.get("MASTER_ADDR") or host
        return _joined(
            task, environment, host, _number(environment, "MASTER_PORT", int(port), least=1)
        )
    options = options_of(environment)
    return LaunchContext(options=options, others=others.words, refusal=others.refusal)


def _is_foreign(environment: Mapping[str, str]) -> bool:
    """Whether there are variables of another launcher, or not all of PyTorch's."""
    if "WORLD_SIZE" in environment and not environment.keys() >= _TORCH:
        return True
    return any(name.startswith(_FOREIGN) for name in environment)


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


def _read_torch(environment: Mapping[str, str]) -> LaunchContext:
    _refuse_pod_of_several(environment)
    size = _number(environment, "WORLD_SIZE", least=1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, least=1)
    rank = _number(environment, "RANK")
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
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_size=local_size,
        run_id="-".join(environment.get(name, "") for name in parts),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    port = _number(environment, "MASTER_PORT", least=1)
    return _joined(place, environment, environment["MASTER_ADDR"], port)


def options_of(environment: Mapping[str, str]) -> RunOptions:
    """What the environment chooses where no command line of onefold's does."""
    placement = environment.get(PLACEMENT_VARIABLE) or DEFAULT_PLACEMENT
    offload_dir = environment.get(OFFLOAD_DIR_VARIABLE, "")
    try:
        return RunOptions(
            placement=placement,
            # Absolute: the script may change its folder before it is used.
            offload_dir=os.path.abspath(offload_dir) if offload_dir else "",
            stop_signals=_stop_signals(environment.get(STOP_VARIABLE, "")),
        )
    except ValueError as error:
        raise LaunchError(
            f"the environment says {PLACEMENT_VARIABLE}={placement!r}: {error}"
        ) from None


def _stop_signals(text: str) -> tuple[str, ...]:
    names = tuple(name.removeprefix("SIG") for name in text.replace(",", " ").split())
    known = [each.name.removeprefix("SIG") for each in (*STOP_SIGNALS, *NOTICES)]
    if not set(names) <= set(known):
        raise LaunchError(
            f"the environment says {STOP_VARIABLE}={text!r}: expected some of {', '.join(known)}"
        )
    return names


def _number(
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
    place: LaunchContext, environment: Mapping[str, str], host: str, port: int
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
        options=options_of(environment),
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


def take_context(environment: MutableMapping[str, str]) -> LaunchContext:
    """Read how this process was started, and remove the record, so that no child inherits it."""
    context = read_context(environment)
    if context.launched and TOOLS_VARIABLE in environment:
        tools = json.loads(environment.pop(TOOLS_VARIABLE))
        context = replace(context, options=replace(context.options, tools=tools))
    environment.pop(CONTEXT_VARIABLE, None)
    return context


@functools.cache
def _own_context() -> tuple[LaunchContext, int]:
    """Read this process's context once, with the id of the process that it belongs to."""
    return take_context(os.environ), os.getpid()


def current_context() -> LaunchContext:
    """This process's context; the environment is read at the first call.

    Raises:
        LaunchError: this is a forked child of a process that is part of a run.
    """
    simulated: LaunchContext | None = getattr(_simulated, "context", None)
    if simulated is not None:
        return simulated
    context, process = _own_context()
    if context.launched and os.getpid() != process:
        raise LaunchError(
            f"process {os.getpid()} was forked from process {process}, which is device "
            f"{context.rank} of a run: only that one is part of the run. Make and use the Trainer "
            f"there; in a child, compute without it, or start the child by the spawn method"
        )
    return context


_simulated = threading.local()
"""Has the context of the simulated device that this thread is, if it is one."""


@contextmanager
def simulated(context: LaunchContext) -> Iterator[None]:
    """Have this thread be a device of a simulated run inside the block."""
    _simulated.context = context
    try:
        yield
    finally:
        _simulated.context = None


def is_launched() -> bool:
    """Whether a launcher has started this process as a device of a run.

    >>> is_launched()
    False
    """
    return current_context().launched


def visible_gpus() -> str | None:
    """The value of CUDA_VISIBLE_DEVICES, which limits the GPUs that programs see; None if unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def is_by_bus() -> bool:
    """Whether CUDA numbers GPUs by the PCI bus, as the user has said, and not by their speed."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def allocator_chosen() -> bool:
    """Whether the user has chosen how memory is allocated, by glibc's variables or by preloading
    another allocator."""
    return any(
        name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc" in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
        for name, value in os.environ.items()
    )


def kernel_flags() -> dict[str, str]:
    """The environment variables by which libraries choose their kernels, and so their bits."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_KERNELS)}


def have_cublas_repeat() -> None:
    """Have cuBLAS repeat its bits in this process, where the user has not said how it is to work.

    PyTorch looks once, when cuBLAS is first used, and refuses matrix products otherwise.
    """
    os.environ.setdefault(_CUBLAS, _CUBLAS_REPEATS)


def have_private_caches(otherwise: Callable[[], str]) -> str:
    """Have PyTorch keep compiled code where no other user can put any.

    Args:
        otherwise: makes a private folder; called where the user's own one cannot be used.

    Returns:
        where compiled code is kept.

    Raises:
        ValueError: the user has named a folder that another user could change.
    """
    caches, run = load("system.caches"), _code_of_run(current_context())
    # What was chosen here for a Trainer before this one is not the user's choice.
    user = {name: value for name, value in os.environ.items() if _chosen.get(name) != value}
    place = user.get(_INDUCTOR)
    # PyTorch itself sets it when its compiler is loaded.
    if not place or place in (caches.default_of_torch(), run):
        try:
            place = str(caches.place_of_code(user))
        except (ValueError, OSError) as error:
            place = run or otherwise()
            _log.info("compiled code is not kept for the next run: %s", error)
        _chosen[_INDUCTOR] = place
    else:
        caches.check_named(_INDUCTOR, place)
    _chosen.update(caches.other_caches(user, Path(place)))
    os.environ.update({**_chosen, _INDUCTOR: place})
    return place


_chosen: dict[str, str] = {}
"""Variables that `have_private_caches` has set."""


def _code_of_run(context: LaunchContext) -> str:
    """A folder in that of the run, which only its user can look into."""
    return os.path.join(context.directory, "compiled") if context.directory else ""


def worker_environment(context: LaunchContext) -> dict[str, str]:
    """Make the environment of a worker that onefold launches."""
    environment = dict(os.environ)
    environment[CONTEXT_VARIABLE] = context.to_json()
    # PyTorch makes its folder as soon as its compiler is loaded, wherever that may be.
    if environment.get(_INDUCTOR) in (None, "", load("system.caches").default_of_torch()):
        environment[_INDUCTOR] = _code_of_run(context)
    # CUDA's default order is by speed, and so not that of NVML, by which devices were chosen.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # Read when cuBLAS is loaded: with other workspaces its results may differ from run to run.
    environment.setdefault(_CUBLAS, _CUBLAS_REPEATS)
    environment.setdefault("PYTHONHASHSEED", "0")  # sets of strings have the same order everywhere
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report the first failure ourselves
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: its name need not resolve
    # Libraries that print, log or download on rank 0 alone look for these.
    environment["RANK"] = environment["LOCAL_RANK"] = str(context.rank)
    environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(context.size)
    # With these, a program that the script starts would take itself for a device.
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "PET_NNODES"):
        environment.pop(name, None)
    return environment

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
is read, and the context belongs to the process that has read it; asking for it in a forked child
is an error.

Note: a device looks like a single process
------------------------------------------
Data libraries split a stream by RANK and WORLD_SIZE, and every device reads all of it. So a worker
of onefold has none of these variables. Other launchers set them before onefold is there, and their
other libraries may need them: for those see `onefold.launcher.foreign_launchers.HidingPlace`.
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

from onefold.core.late import load
from onefold.core.options import DEFAULT_PLACEMENT, LaunchContext, RunOptions
from onefold.errors import LaunchError
from onefold.system.process import NOTICES, STOP_SIGNALS, TOOLS_VARIABLE

__all__ = [
    "OFFLOAD_DIR_VARIABLE",
    "PLACE",
    "PLACEMENT_VARIABLE",
    "STARTED_IN",
    "allocator_chosen",
    "current_context",
    "have_cublas_repeat",
    "have_private_caches",
    "is_by_bus",
    "is_launched",
    "kernel_flags",
    "note_readers",
    "options_of",
    "simulated",
    "visible_gpus",
    "worker_environment",
]

_log = logging.getLogger("onefold")
CONTEXT_VARIABLE = "ONEFOLD_CONTEXT"
PLACEMENT_VARIABLE, OFFLOAD_DIR_VARIABLE = "ONEFOLD_PLACEMENT", "ONEFOLD_OFFLOAD_DIR"
STOP_VARIABLE = "ONEFOLD_STOP_SIGNAL"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
STARTED_IN = os.getcwd() if os.path.isdir(".") else ""
"""The working directory as the program began; empty where it is gone."""
_OF_KERNELS = (
    *("ATEN_", "CUBLAS", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_TF32_", "OMP_"),
    *("ONEDNN_", "PYTORCH_", "TORCH_"),
)
_FOREIGN = (
    *("AZUREML_", "BEAKER_", "DSTACK_", "FLUX_", "HOROVOD_", "JSM_", "LWS_", "MV2_", "OMPI_"),
    *("PALS_", "PET_", "PMI", "RANK", "SKYPILOT_", "SLURM_", "SM_", "WORLD_SIZE"),
)
"""How variables of other launchers begin; see `onefold.launcher.foreign_launchers`."""
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOBAL_RANK", "NODE_RANK")
"""What says which of several processes this one is; the last two are those of data libraries."""
_CUBLAS, _CUBLAS_REPEATS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def read_context(environment: Mapping[str, str]) -> LaunchContext:
    """Read from an environment how this process was started.

    Raises:
        LaunchError: it is started by a launcher that has left something out.
    """
    if CONTEXT_VARIABLE in environment:
        return LaunchContext.from_json(environment[CONTEXT_VARIABLE])
    if not any(name.startswith(_FOREIGN) for name in environment):
        return LaunchContext(options=options_of(environment))
    read = load("launcher.foreign_launchers").read_foreign
    context: LaunchContext = read(environment, options_of(environment))
    return context


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
    context = take_context(os.environ)
    if context.launcher == "torch":
        load("launcher.foreign_launchers").hide_place()
    return context, os.getpid()


def note_readers() -> None:
    """Note from now on where a data library reads which of several processes this one is."""
    if "WORLD_SIZE" in os.environ and CONTEXT_VARIABLE not in os.environ:
        load("launcher.foreign_launchers").note_readers()


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
    # With these, a data library would read a part of what every device has to read whole, and a
    # program that the script starts would take itself for a device.
    for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "PET_NNODES"):
        environment.pop(name, None)
    return environment

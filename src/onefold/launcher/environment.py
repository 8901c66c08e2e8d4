"""Reads how this process was started. Only this module reads the environment, once, at the start.

A process runs alone, or was started by ``onefold run`` or `onefold.launch` (which pass a record in
ONEFOLD_CONTEXT), by a launcher that uses PyTorch's variables (RANK, WORLD_SIZE, MASTER_ADDR), such
as torchrun, Ray Train or Kubeflow, or by Slurm's srun. A process may not train alone if another
launcher reports that there are others. `onefold.launcher.foreign_launchers` handles Slurm and such
launchers.

Note: one process is the device
-------------------------------
Programs that the script starts inherit the environment, and forked children inherit all memory, so
each of them would take itself for the device. Therefore the record is removed from the environment
when it is read, and the context belongs to the process that read it. Requesting the context in a
forked child is an error.

Note: a device looks like a single process
------------------------------------------
Data libraries split a stream by RANK and WORLD_SIZE, but every onefold device reads the whole
stream. So an onefold worker has none of these variables. Other launchers set them before onefold
loads, and their other libraries may need them: see
`onefold.launcher.foreign_launchers.HidingPlace`.
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
from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import LaunchError
from onefold.system.process import TOOLS_VARIABLE

__all__ = [
    "CONTEXT_VARIABLE",
    "CUBLAS_SETTING",
    "INDUCTOR_VARIABLE",
    "OFFLOAD_DIR_VARIABLE",
    "PLACE",
    "PLACEMENT_VARIABLE",
    "STARTED_IN",
    "allocator_chosen",
    "code_of_run",
    "current_context",
    "have_cublas_repeat",
    "have_private_caches",
    "is_by_bus",
    "is_launched",
    "kernel_flags",
    "note_readers",
    "simulated",
    "visible_gpus",
]

_log = logging.getLogger("onefold")
CONTEXT_VARIABLE = "ONEFOLD_CONTEXT"
PLACEMENT_VARIABLE, OFFLOAD_DIR_VARIABLE = "ONEFOLD_PLACEMENT", "ONEFOLD_OFFLOAD_DIR"
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
STARTED_IN = os.getcwd() if os.path.isdir(".") else ""
"""Working directory when the program started; empty if it no longer exists."""
_OF_KERNELS = (
    *("ATEN_", "CUBLAS", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_TF32_", "OMP_"),
    *("ONEDNN_", "PYTORCH_", "TORCH_"),
)
_FOREIGN = (
    *("AZUREML_", "BEAKER_", "DSTACK_", "FLUX_", "HOROVOD_", "JSM_", "LWS_", "MV2_", "OMPI_"),
    *("PALS_", "PET_", "PMI", "RANK", "SKYPILOT_", "SLURM_", "SM_", "WORLD_SIZE"),
)
"""Prefixes of variables that other launchers set; see `onefold.launcher.foreign_launchers`."""
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOBAL_RANK", "NODE_RANK")
"""Variables that identify a process among several. Data libraries read the last two."""
CUBLAS_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Variable that makes cuBLAS deterministic, and its value."""


def read_context(environment: Mapping[str, str]) -> LaunchContext:
    """Read from an environment how this process was started.

    Raises:
        LaunchError: a launcher started this process but did not set all required variables.
    """
    if CONTEXT_VARIABLE in environment:
        return LaunchContext.from_json(environment[CONTEXT_VARIABLE])
    options = RunOptions()
    if any(name.startswith("ONEFOLD_") for name in environment):
        options = load("options").options_of(environment)
    if not any(name.startswith(_FOREIGN) for name in environment):
        return LaunchContext(options=options)
    context: LaunchContext = load("launcher.foreign_launchers").read_foreign(environment, options)
    return context


def take_context(environment: MutableMapping[str, str]) -> LaunchContext:
    """Read how this process was started, and remove the record so that no child inherits it."""
    context = read_context(environment)
    if context.launched and TOOLS_VARIABLE in environment:
        tools = json.loads(environment.pop(TOOLS_VARIABLE))
        context = replace(context, options=replace(context.options, tools=tools))
    environment.pop(CONTEXT_VARIABLE, None)
    return context


@functools.cache
def _own_context() -> tuple[LaunchContext, int]:
    """Read this process's context once; return it with the id of the process that owns it."""
    context = take_context(os.environ)
    if context.launcher == "torch":
        load("launcher.foreign_launchers").hide_place()
    return context, os.getpid()


def note_readers() -> None:
    """Start noting where data libraries read the rank or world size of this process."""
    if "WORLD_SIZE" in os.environ and CONTEXT_VARIABLE not in os.environ:
        load("launcher.foreign_launchers").note_readers()


def current_context() -> LaunchContext:
    """Return this process's context. The first call reads the environment.

    Raises:
        LaunchError: this process is a forked child of a device.
    """
    simulated: LaunchContext | None = getattr(_simulated, "context", None)
    if simulated is not None:
        return simulated
    context, process = _own_context()
    if context.launched and os.getpid() != process:
        raise LaunchError(
            f"process {os.getpid()} was forked from process {process}, which is device "
            f"{context.rank} of a run, and is not part of the run itself. Create and use the "
            f"Trainer in the parent, or start the child with the spawn method"
        )
    return context


_simulated = threading.local()
"""Holds the context of a simulated device, if this thread is one."""


@contextmanager
def simulated(context: LaunchContext) -> Iterator[None]:
    """Make this thread a device of a simulated run inside the block."""
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
    """Whether the user set CUDA to number GPUs by PCI bus instead of by speed."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def allocator_chosen() -> bool:
    """Whether the user configured memory allocation, through glibc's variables or by preloading
    another allocator."""
    return any(
        name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc" in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
        for name, value in os.environ.items()
    )


def kernel_flags() -> dict[str, str]:
    """Environment variables that affect which kernels libraries choose, and therefore the bits."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_KERNELS)}


def have_cublas_repeat() -> None:
    """Make cuBLAS deterministic in this process unless the user configured its workspaces.

    PyTorch reads the variable once, at the first use of cuBLAS. Without it, PyTorch raises an error
    for matrix products in deterministic mode.
    """
    os.environ.setdefault(*CUBLAS_SETTING)


def have_private_caches(otherwise: Callable[[], str]) -> str:
    """Make PyTorch store compiled code in a folder that no other user can write to.

    Args:
        otherwise: creates a private folder; called if the user's folder cannot be used.

    Returns:
        Folder of compiled code.

    Raises:
        ValueError: another user could write to the folder that the user chose.
    """
    caches, run = load("system.caches"), code_of_run(current_context())
    # Values that this function set for an earlier Trainer are not the user's choice.
    user = {name: value for name, value in os.environ.items() if _chosen.get(name) != value}
    place = user.get(INDUCTOR_VARIABLE)
    # PyTorch sets the variable itself when its compiler loads.
    if not place or place in (caches.default_of_torch(), run):
        try:
            place = str(caches.place_of_code(user))
        except (ValueError, OSError) as error:
            place = run or otherwise()
            _log.info("compiled code is not kept for the next run: %s", error)
        _chosen[INDUCTOR_VARIABLE] = place
    else:
        caches.check_named(INDUCTOR_VARIABLE, place)
    _chosen.update(caches.other_caches(user, Path(place)))
    os.environ.update({**_chosen, INDUCTOR_VARIABLE: place})
    return place


_chosen: dict[str, str] = {}
"""Variables that `have_private_caches` set."""


def code_of_run(context: LaunchContext) -> str:
    """Subfolder of the run's private folder, which only this user can read."""
    return os.path.join(context.directory, "compiled") if context.directory else ""

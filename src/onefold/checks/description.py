"""Describes and compares the properties that must be the same on every device of a run."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.checks.model import updates_by_element
from onefold.core.assignment import Devices
from onefold.core.late import load
from onefold.core.options import RunOptions
from onefold.core.settings import Settings
from onefold.core.shard import Shares
from onefold.core.stages import Stages
from onefold.errors import DisagreementError
from onefold.shard.model_parts import ModelParts
from onefold.system import accelerator, cuda
from onefold.system.internals import code_compiler
from onefold.update.optimizers import class_of, name_of

__all__ = ["compare", "describe", "describe_settings"]

_log = logging.getLogger("onefold")
_HASHES, _HOST = "a hash", "the host"
_VALUE = "the value of "
_PARTS = ("parameter ", "buffer ")


def describe(
    parts: ModelParts,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    devices: Devices,
    shares: Shares,
    scheduler: LRScheduler | None,
    stages: Stages | None = None,
    values: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Describe the properties that must be the same on every device during the whole run.

    The names are used in error messages. A device may join at any step if it has the same ones.
    `describe_settings` describes settings that steps change. ``values`` are the digests of
    parameters and buffers whose values must also be the same.
    """
    described = {
        **{name: str(value) for name, value in settings.compared().items()},
        "the number of shards per device": str(shares.counts),
        "the placement": devices.context.options.placement,
        "the stages": str(stages and (stages.names, stages.stage_of)),
        "the number of Trainers before this one": str(devices.trainer),
        "the optimizer": name_of(optimizer),
        "what the optimizer updates": "parts" if updates_by_element(optimizer) else "parameters",
        "the scheduler": "None" if scheduler is None else class_of(scheduler),
        **_surroundings(list(devices.own_devices.values()), alike=settings.deterministic),
    }
    # Options of onefold's own launcher come from one record, so that they cannot differ.
    if devices.context.launcher == "torch" and (options := devices.context.options) != RunOptions():
        described |= load("options").describe(options)
    if settings.compile:
        described["what compiles"] = code_compiler(devices.all[devices.own[0]])
    updated = {
        id(p): f"number {place} of the optimizer's group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    }
    for number, (name, p) in enumerate(parts.named.items()):
        kind = "trained" if name in parts.trained else "other"
        # Include strides, which determine the order of elements in flat memory, and numbers,
        # because gradients are added by position: another order of layers would mix them.
        described[f"parameter {name}"] = (
            f"{kind} {p.dtype} {tuple(p.shape)} {p.stride()}, number {number} of the model, "
            f"{updated.get(id(p), 'in no group of the optimizer')}"
        )
    buffers = dict(parts.module.named_buffers())
    for number, (name, buffer) in enumerate(buffers.items()):
        described[f"buffer {name}"] = f"{buffer.dtype} {tuple(buffer.shape)}, number {number}"
    for name, digest in (values or {}).items():
        described[f"{_VALUE}{'buffer' if name in buffers else 'parameter'} {name}"] = digest
    return described


def describe_settings(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
) -> dict[str, str]:
    """Describe settings that must be the same after each step: the scheduler's state and rates."""
    return {
        "the state of the scheduler": "" if scheduler is None else _state_of(scheduler),
        **{
            f"optimizer group {number} {key}": str(value)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        },
    }


def _surroundings(own: Sequence[torch.device], *, alike: bool) -> dict[str, str]:
    """Describe the environment of the bits: threads, libraries, processors, settings."""
    device = own[0]
    described = {
        "the kind of device": device.type,
        # Differs with PYTHONHASHSEED, as does the order of sets; see `compare`.
        _HASHES: str(hash("onefold")),
        _HOST: platform.node(),
        "the version of onefold": version("onefold"),
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
        "the version of Python": platform.python_version(),
        "the precision of matrix products": _matmul_precision(device),
        "the default dtype": str(torch.get_default_dtype()),
    }
    if device.type == "cpu":
        described["the threads of a device"] = f"{torch.get_num_threads()} (Trainer(threads=...))"
        described["the kind of processor"] = (
            f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
        )
        described["oneDNN"] = str(torch.backends.mkldnn.enabled)
    else:
        described |= _traits_of(own) if alike else {}
        described |= cuda.described() if device.type == "cuda" else {}
    return described


def _traits_of(gpus: Sequence[torch.device]) -> dict[str, str]:
    """Describe the GPUs of this process.

    Raises:
        DisagreementError: the GPUs differ.
    """
    traits = [accelerator.traits_of(gpu) for gpu in gpus]
    for gpu, other in zip(gpus, traits, strict=True):
        for name, value in other.items():
            if value != traits[0].get(name):
                raise DisagreementError(
                    f"{gpu} ({other['type']}) and {gpus[0]} ({traits[0]['type']}) differ, so the "
                    f"bits would depend on which of them computes a shard: their {name} is "
                    f"{value} and {traits[0].get(name)}. Use devices of one type, or "
                    f"Trainer(deterministic=False)"
                )
    return {f"the {name} of the GPU": value for name, value in traits[0].items()}


def _matmul_precision(device: torch.device) -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # The script set the precision of a single backend, so there is no common value.
        backends = torch.backends
        backend = backends.cuda if device.type == "cuda" else backends.mkldnn
        return str(backend.matmul.fp32_precision)


def _state_of(scheduler: LRScheduler) -> str:
    """Describe a scheduler's numbers; for functions and other objects, only their types."""
    # The repr of other objects contains an address, which differs between processes.
    state = scheduler.state_dict()
    kept = {k: v if _is_plain(v) else type(v).__name__ for k, v in state.items()}
    return str(kept)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def compare(descriptions: Sequence[bytes]) -> None:
    """Refuse devices that differ from device 0.

    Args:
        descriptions: for each device, the joint results of `describe` and `describe_settings`, as
            JSON.

    Raises:
        DisagreementError: a device's description differs from device 0's.
    """
    lead: dict[str, str] = json.loads(descriptions[0])
    hashes, host = lead.pop(_HASHES, None), lead.pop(_HOST, "")
    # Warn at most once, without an error: few scripts depend on the order of a set.
    if any(json.loads(text).get(_HASHES) != hashes for text in {*descriptions}):
        _log.warning(
            "the processes of this run hash strings differently, so sets have a different order "
            "in each. If the script depends on that order, set PYTHONHASHSEED=0 for all processes"
        )
    for number, text in enumerate(descriptions):
        if text == descriptions[0]:
            continue
        other: dict[str, str] = json.loads(text)
        other.pop(_HASHES, None)
        theirs = other.pop(_HOST, host)
        hosts = f" (hosts {host} and {theirs})" if theirs != host else ""
        names = {**lead, **other}
        lacking = [w for w in names if w.startswith(_PARTS) and (w in lead) != (w in other)]
        for what in names:
            if lacking and what.startswith(_PARTS):
                what = lacking[0]  # it shifts the numbers of all later ones
            if lead.get(what) != other.get(what) and what.startswith(_VALUE):
                raise DisagreementError(
                    f"{what.removeprefix(_VALUE)} differs between device 0 and device {number}, "
                    f"although the previous Trainer left it identical: changes between two "
                    f"Trainers must be the same on every device. Seed random changes, make no "
                    f"changes under `if trainer.is_lead:`, or make them in `with "
                    f"trainer.modifying():` of the previous Trainer"
                )
            if lead.get(what) != other.get(what):
                raise DisagreementError(
                    f"{what} is {lead.get(what, 'absent')} on device 0 and "
                    f"{other.get(what, 'absent')} on device {number}{hosts}. Every device must "
                    f"create the same model, optimizer and Trainer, with all parts in the same "
                    f"order, the same options and the same libraries{_of_gpus(what)}"
                )


def _of_gpus(what: str) -> str:
    gives_up = " on GPUs of one type; Trainer(deterministic=False) trains without equal bits"
    return gives_up if what.endswith("of the GPU") else ""

"""Describes and compares what must be the same on every device before a run begins."""

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
_HASHES = "a hash"
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
    """Describe what must be the same on every device, and stays so, in words for error messages.

    A device may join at any step if this fits. What steps change is `describe_settings`'s.
    ``values`` are the digests of those parameters and buffers of which the values must be, too.
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
    if settings.compile:
        described["what compiles"] = code_compiler(devices.all[devices.own[0]])
    updated = {
        id(p): f"number {place} of the optimizer's group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    }
    for number, (name, p) in enumerate(parts.named.items()):
        kind = "trained" if name in parts.trained else "other"
        # With strides: they decide the order of elements in flat memory. With numbers: devices add
        # up gradients by place, so the same layers in another order would be mixed.
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
    """Describe what must be the same after the same step: the scheduler's state and the rates."""
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
    """Describe what bits depend on beside the script: threads, libraries, processors, settings."""
    device = own[0]
    described = {
        "the kind of device": device.type,
        # Differs where PYTHONHASHSEED does, and with it the order of sets; see `compare`.
        _HASHES: str(hash("onefold")),
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
        DisagreementError: they are not alike.
    """
    traits = [accelerator.traits_of(gpu) for gpu in gpus]
    for gpu, other in zip(gpus, traits, strict=True):
        for name, value in other.items():
            if value != traits[0].get(name):
                raise DisagreementError(
                    f"{gpu} ({other['type']}) and {gpus[0]} ({traits[0]['type']}) are unlike, so "
                    f"the bits would depend on which of them computes a shard: their {name} is "
                    f"{value} and {traits[0].get(name)}. Name devices of one type, or "
                    f"Trainer(deterministic=False)"
                )
    return {f"the {name} of the GPU": value for name, value in traits[0].items()}


def _matmul_precision(device: torch.device) -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # A script has set it for one backend alone, so that there is no answer for all of them.
        backends = torch.backends
        backend = backends.cuda if device.type == "cuda" else backends.mkldnn
        return str(backend.matmul.fp32_precision)


def _state_of(scheduler: LRScheduler) -> str:
    """Describe a scheduler's numbers; functions and other objects count by their type alone."""
    # Their repr holds an address, which differs between processes.
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
    """Refuse a device that differs from device 0.

    Args:
        descriptions: the results of `describe` and `describe_settings`, together and as JSON, in
            the devices' order.

    Raises:
        DisagreementError: a device's description differs from that of device 0.
    """
    lead: dict[str, str] = json.loads(descriptions[0])
    hashes = lead.pop(_HASHES, None)
    # A warning at most, and one: few scripts let a set decide anything.
    if any(json.loads(text).get(_HASHES) != hashes for text in {*descriptions}):
        _log.warning(
            "the processes of this run hash text differently, so that sets have another order "
            "in each: if anything depends on it, set PYTHONHASHSEED=0 for all of them"
        )
    for number, text in enumerate(descriptions):
        if text == descriptions[0]:
            continue
        other: dict[str, str] = json.loads(text)
        other.pop(_HASHES, None)
        names = {**lead, **other}
        lacking = [w for w in names if w.startswith(_PARTS) and (w in lead) != (w in other)]
        for what in names:
            if lacking and what.startswith(_PARTS):
                what = lacking[0]  # it shifts the numbers of those that follow
            if lead.get(what) != other.get(what) and what.startswith(_VALUE):
                raise DisagreementError(
                    f"{what.removeprefix(_VALUE)} has other values on device {number} than on "
                    f"device 0, and comes from a Trainer before this one, which left it alike: "
                    f"what a script changes between two Trainers must be the same on every "
                    f"device. Seed what is random in it, change nothing under `if "
                    f"trainer.is_lead:`, or change it in `with trainer.modifying():` before the end"
                )
            if lead.get(what) != other.get(what):
                raise DisagreementError(
                    f"{what} is {lead.get(what, 'absent')} on device 0 and "
                    f"{other.get(what, 'absent')} on device {number}: every device must build the "
                    f"same model, optimizer and Trainer, with all parts in the same order and the "
                    f"same libraries{_of_gpus(what)}"
                )


def _of_gpus(what: str) -> str:
    gives_up = " on GPUs of one type; Trainer(deterministic=False) goes on without equal bits"
    return gives_up if what.endswith("of the GPU") else ""

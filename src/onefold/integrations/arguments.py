"""Which `transformers.TrainingArguments` a run of several devices can have."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["check_arguments", "check_place", "silenced"]

_DIVIDES = "onefold divides the work itself"
_REFUSED = {
    "gradient_accumulation_steps": (
        1,
        "shards are the accumulation, so let per_device_train_batch_size be the whole batch's",
    ),
    "fp16": (False, "of the low precisions there is precision='bf16', of onefold's Trainer"),
    "bf16": (False, "give precision='bf16' to onefold's Trainer instead"),
    "deepspeed": (None, _DIVIDES),
    "fsdp": (None, _DIVIDES),
    "parallelism_config": (None, _DIVIDES),
    "torch_compile": (False, "the loop would compile the model that onefold has copied"),
    "auto_find_batch_size": (False, "the batch is part of the result, so give more shards instead"),
    "neftune_noise_alpha": (None, "its noise is added to the model that onefold has copied"),
}
"""Arguments that have to stay as they are, and what to do instead."""


def check_arguments(args: Any, model_init: object) -> None:
    """Raises ValueError for what would change the work of one device, and names it."""
    for name, (expected, advice) in _REFUSED.items():
        value = getattr(args, name, expected)
        if value and value != expected:
            raise ValueError(f"expected {name}={expected!r}, got {value!r}: {advice}")
    if model_init is not None:
        raise ValueError("expected model, got model_init: make the model before the Trainer")
    if args.world_size > 1:
        raise ValueError(
            f"expected transformers to see one process, and it sees {args.world_size}: import "
            f"onefold.integrations.transformers before TrainingArguments are made"
        )


def check_place(model: torch.nn.Module, args: Any) -> None:
    """Raises ValueError if onefold trains the model elsewhere than transformers expects it."""
    place = next(model.parameters()).device
    if place != args.device:
        raise ValueError(
            f"onefold has put the model on {place}, and transformers computes on {args.device}: "
            f"on the CPU give TrainingArguments(use_cpu=True), and have several GPUs driven by "
            f"one process, with devices=['cuda:0', 'cuda:1'] for onefold's Trainer"
        )


def silenced(args: Any) -> Any:
    """The same arguments for a process that writes no files and prints nothing."""
    silent = copy.copy(args)
    kind = type(args)
    silent.__class__ = type(kind.__name__, (kind,), {"should_save": False, "should_log": False})
    return silent

"""Modules that are imported when a run first needs them, in one table.

The kernel is all that a plain run needs; ``tests/test_kernel.py`` trains with nothing else. A
kernel module reaches other modules through `load`, and through the registries of placements and
tools, so that a reader finds every late import here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["LATE", "load"]

LATE = {
    "checkpoint.folder": "trainer.save keeps the best checkpoints",
    "checkpoint.resume": "the run is saved or loaded",
    "core.values": "the loss returns metrics",
    "data_order.from_pytorch": "the script passes a sampler or a DataLoader of PyTorch",
    "data_order.stream": "the data is a stream",
    "data_order.worker_processes": "a loader has workers",
    "deferred.values": "the model is built without values",
    "exchange.attempts": "torchrun may restart a run of several hosts",
    "exchange.collective": "devices share no memory",
    "exchange.collective_memory": "devices share no memory",
    "exchange.others": "the run has other processes",
    "launcher.devices": "the process chooses among several GPUs",
    "launcher.foreign_launchers": "the environment has variables of another launcher",
    "launcher.hosts": "the run uses several hosts",
    "launcher.workers": "the script ends with an error under another launcher",
    "options": "the environment sets options, or another launcher started the process",
    "passes.averaged": "the averages are shown or saved",
    "passes.collectives": "the script gathers, broadcasts or asks for a fingerprint",
    "passes.evaluation": "the script iterates over a data set, or averages statistics over one",
    "passes.modifying": "the script changes the model",
    "placement.distribute": "owners lack the values of their segments, or have rounded ones",
    "session.data_calls": "the script evaluates, predicts or shows the averages",
    "shard.advice": "a step fails, its first batch is small, or a mistake is likely",
    "shard.compiling": "the loss is compiled",
    "shard.graphs": "an accelerator captures shards",
    "shard.left_state": "shards may leave state on modules of the script",
    "shard.stage_modules": "a model is cut into stages, as devices share no memory",
    "step.joint": "the loss gathers, has several denominators, or returns metrics",
    "step.microbatch": "shards run in microbatches",
    "system.background": "the process of a device ends",
    "system.caches": "PyTorch's compiler is used",
    "system.output": "output of the script was held back",
    "watch.limits": "shards run on an accelerator, or the script asks what limits a step",
    "session.script_updates": "the script asks for gradients, or updates the parameters itself",
}
"""Modules of ``onefold``, and when each is imported."""


def load(name: str) -> Any:
    """Import a module of `LATE`.

    >>> load("shard.advice").__name__
    'onefold.shard.advice'
    """
    if name not in LATE:
        raise KeyError(f"{name} is not a module of onefold.core.late.LATE")
    return import_module(f"onefold.{name}")

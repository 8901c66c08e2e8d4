"""onefold: train on any number of devices and get the bits of one.

`Trainer` and the other names load PyTorch at first use, so that the launcher, which does not need
it, can start the workers at once.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from onefold import errors
from onefold.core.options import RunOptions
from onefold.launcher.environment import current_context, is_launched, note_readers

if TYPE_CHECKING:
    from onefold import losses
    from onefold.checkpoint.folder import Checkpoint
    from onefold.core.gathering import SyncBatchNorm, gather
    from onefold.core.mean import LossTerms, Mean, Sum
    from onefold.core.randomness import same_rng_for_all_shards
    from onefold.core.structure import Broadcast, Scatter
    from onefold.data_order.loader import Loader
    from onefold.launcher.devices import DeviceInfo, Selection, list_devices, select_devices
    from onefold.launcher.launch import launch, supervise
    from onefold.launcher.workers import Outcome
    from onefold.record import Record
    from onefold.session.build import build
    from onefold.step.result import Step
    from onefold.trainer import Trainer
    from onefold.weights import load_weights

__all__ = [
    "Broadcast",
    "Checkpoint",
    "DeviceInfo",
    "Loader",
    "LossTerms",
    "Mean",
    "Outcome",
    "Record",
    "RunOptions",
    "Scatter",
    "Selection",
    "Step",
    "Sum",
    "SyncBatchNorm",
    "Trainer",
    "__version__",
    "build",
    "errors",
    "gather",
    "is_launched",
    "launch",
    "list_devices",
    "load_weights",
    "losses",
    "same_rng_for_all_shards",
    "select_devices",
    "supervise",
]

__version__ = version("onefold")

_HOMES = {
    "Checkpoint": "onefold.checkpoint.resume",
    "DeviceInfo": "onefold.launcher.devices",
    "Loader": "onefold.data_order.loader",
    "Mean": "onefold.core.mean",
    "LossTerms": "onefold.core.mean",
    "Outcome": "onefold.launcher.workers",
    "Scatter": "onefold.core.structure",
    "Record": "onefold.record",
    "Selection": "onefold.launcher.devices",
    "Broadcast": "onefold.core.structure",
    "Step": "onefold.step.result",
    "Sum": "onefold.core.mean",
    "SyncBatchNorm": "onefold.core.gathering",
    "Trainer": "onefold.trainer",
    "build": "onefold.session.build",
    "gather": "onefold.core.gathering",
    "launch": "onefold.launcher.launch",
    "list_devices": "onefold.launcher.devices",
    "load_weights": "onefold.weights",
    "losses": "onefold.losses",
    "same_rng_for_all_shards": "onefold.core.randomness",
    "select_devices": "onefold.launcher.devices",
    "supervise": "onefold.launcher.launch",
}
"""Modules of the names that are imported at first use."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if home.__name__ == f"onefold.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def _tell_end() -> None:
    """Announce the end of this process: others may wait for a Trainer that it never makes."""
    # An error was raised when the Trainer was created; do not repeat it at exit.
    with suppress(errors.LaunchError):
        context = current_context()
        if (context.agent_store or (context.address and context.rank)) and "torch" in sys.modules:
            import_module("onefold.exchange.group").tell_end(context)


atexit.register(_tell_end)
# Before the script creates its data sets, which may read these variables.
note_readers()
# Libraries import IPython without running it; a plain run then does not load our module.
if getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)() is not None:
    import_module("onefold.integrations.ipython").load()
# The parent of a forked child continues, so the child must not announce the end.
os.register_at_fork(after_in_child=lambda: atexit.unregister(_tell_end))


def __dir__() -> list[str]:
    return __all__

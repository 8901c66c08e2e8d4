"""onefold: train on any number of devices and get the one model you would have got on one.

`Trainer` and its companions load PyTorch when they are first asked for, so that the launcher, which
needs none of it, can start the workers at once.
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
from onefold.launch import launch
from onefold.world import current_world

if TYPE_CHECKING:
    from onefold import losses
    from onefold.mean import Mean, Means, Sum
    from onefold.step import Step
    from onefold.trainer import Trainer
    from onefold.weights.load import load_weights

__all__ = [
    "Mean",
    "Means",
    "Step",
    "Sum",
    "Trainer",
    "__version__",
    "errors",
    "launch",
    "load_weights",
    "losses",
]

__version__ = version("onefold")

_HOMES = {
    "Mean": "onefold.mean",
    "Means": "onefold.mean",
    "Step": "onefold.step",
    "Sum": "onefold.mean",
    "Trainer": "onefold.trainer",
    "load_weights": "onefold.weights.load",
    "losses": "onefold.losses",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if home.__name__ == f"onefold.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def _tell_end() -> None:
    """Under PyTorch's launcher others may wait for a Trainer that this process never makes."""
    with suppress(errors.LaunchError):  # told when the Trainer was made
        if current_world().agent_store and "torch" in sys.modules:
            import_module("onefold.exchange.group").tell_end()


atexit.register(_tell_end)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_tell_end))  # its parent goes on


def __dir__() -> list[str]:
    return __all__

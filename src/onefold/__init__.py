"""onefold: train on any number of devices and get the one model you would have got on one.

`Trainer` and its companions load PyTorch when they are first asked for, so that the launcher, which
needs none of it, can start the workers at once.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from onefold import errors
from onefold.launch import launch

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


def __dir__() -> list[str]:
    return __all__

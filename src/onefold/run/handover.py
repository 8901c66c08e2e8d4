"""Packs a function for the processes that are to call it, and says what cannot be packed.

Functions of a script, a notebook or an interactive session are sent by value, with what they refer
to. Some things can be packed and are useless elsewhere all the same: they are refused as well.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

__all__ = ["pack_call"]

_USELESS = {
    ("optuna", "Trial"): "an Optuna trial: ask it for values before, pass trial.params, and report "
    "what launch returns",
    ("optuna", "Study"): "an Optuna study: call launch from the objective that it optimizes",
    ("onefold", "Trainer"): "a Trainer, which belongs to this process: make it inside the function",
}
"""Objects of which every process would have a copy of its own, by package and class, and what to do
about them."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Packs by value, and refuses what is useless in another process."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        found = _USELESS.get((kind.__module__.partition(".")[0], kind.__name__))
        if found is not None:
            raise _Useless(found)
        return super().reducer_override(obj)


class _Useless(Exception):
    """Raised where something is met that is refused; the message says what, and what to do."""


def pack_call(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Pack a function and its arguments; cloudpickle unpacks them.

    Raises:
        TypeError: it refers to something that another process could not have, or not use.
    """
    name = getattr(function, "__qualname__", None) or type(function).__name__
    packed = io.BytesIO()
    try:
        _Pickler(packed).dump((function, tuple(arguments)))
    except _Useless as useless:
        raise TypeError(
            f"{name} cannot be sent to the devices' processes, as it refers to {useless}"
        ) from None
    except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{name} cannot be sent to the devices' processes: {error}. It, or one of its "
            f"arguments, refers to something that lives in this process alone, such as a lock, a "
            f"thread, an open file or a generator: pass plain values, and make the rest inside the "
            f"function"
        ) from error
    return packed.getvalue()

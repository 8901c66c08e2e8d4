"""Watches what a step must not change: attributes of modules, and generators that nobody seeds.

Only in runs of ``onefold verify``, and only to show where to look when bits differ.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from onefold.core.flat import bits_of
from onefold.core.randomness import comparable_state
from onefold.core.structure import parts_of
from onefold.data_order.item_generators import GENERATORS, state_of

__all__ = ["StateWatch", "global_states", "place_of", "unseeded_generators", "watch_unseeded"]

_LARGEST = 1 << 16
"""Elements of the largest tensor or array whose values are looked at."""
_DEEPEST = 4
"""How many containers inside each other are searched."""
_MOST = 2000
"""How many values are looked at in one search."""
_OF_TORCH = {*vars(torch.nn.Module()), "_is_full_backward_hook", "_compiled_call_impl"}

_Seen = dict[tuple[str, str], tuple[str, str]]
"""For each place where something was found, and the path to it inside of that, its kind and a
digest of its value."""


class StateWatch:
    """Finds what a step of one trainer changed, on this device.

    Args:
        model: the model of the trainer.
        losses: those of the script.
    """

    def __init__(self, model: torch.nn.Module, losses: Collection[Callable[..., object]]) -> None:
        self._model = model
        self._losses = losses
        self._datasets: list[object] = []
        self._data_before: _Seen = {}
        self.attributes: list[str] = []
        """Attributes that the last step changed."""
        self.generators: list[str] = []
        """Generators that the last step changed."""

    def add(self, dataset: object) -> None:
        """Watch a data set too; called before it is first read."""
        self._datasets.append(dataset)
        self._data_before |= self._look_at_data()

    @contextmanager
    def step(self) -> Iterator[dict[str, str]]:
        """Surround a step; yields digests of the global generators before it."""
        before, data = self._read_state(), self._look_at_data()
        yield global_states()
        # Data sets are read between the steps, model and loss work within them.
        pairs = ((self._data_before, data), (before, self._read_state()))
        self._data_before = self._look_at_data()
        changed: dict[tuple[str, str], list[str]] = {}
        for then, now in pairs:
            for (place, path), (kind, value) in now.items():
                if (place, path) in then and then[place, path][1] != value:
                    changed.setdefault((kind, place), []).append(path)
        # Each place once, however much has changed inside of it.
        named = [
            (kind, place + paths[0] if len(paths) == 1 else place)
            for (kind, place), paths in changed.items()
        ]
        self.attributes = [place for kind, place in named if kind == "value"]
        self.generators = [place for kind, place in named if kind == "generator"]

    def _read_state(self) -> _Seen:
        found: _Seen = {}
        for name, part in self._model.named_modules():
            place = f"module {name or 'model'} ({type(part).__name__})"
            _search_attributes(vars(part), place, found)
        own = set(self._model.modules())
        for loss in self._losses:
            for where, value in _variables(loss, set(), 0):
                if not (isinstance(value, torch.nn.Module) and value in own):
                    _search(value, where, found, 0)
        return found

    def _look_at_data(self) -> _Seen:
        found: _Seen = {}
        for dataset in self._datasets:
            place = f"the data set ({type(dataset).__name__})"
            _search_attributes(getattr(dataset, "__dict__", {}), place, found)
        return found


def place_of(function: Callable[..., object]) -> str:
    """Return a function's name, file and line.

    >>> place_of(place_of).startswith("place_of (")
    True
    """
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not hasattr(inner, "__code__"):
        inner = getattr(inner, "__func__", None) or vars(type(inner)).get("__call__", inner)
    code = getattr(inner, "__code__", None)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _search_attributes(values: Mapping[str, object], place: str, found: _Seen) -> None:
    for key, value in values.items():
        if key not in _OF_TORCH:
            _search(value, f"attribute {key} of {place}", found, 0)


def _search(value: object, place: str, found: _Seen, depth: int, path: str = "") -> None:
    """Note the values and generators in an object, and in what it contains."""
    # Objects may hold each other: only these limits end the search.
    where = place, path
    if len(found) >= _MOST or depth > _DEEPEST or where in found:
        return
    if isinstance(value, GENERATORS):
        found[where] = ("generator", _hash(repr(comparable_state(state_of(value)))))
    elif (digest := _digest(value)) is not None:
        found[where] = ("value", digest)
    elif isinstance(value, list | tuple | Mapping) and len(value) <= _MOST:
        for inside, each in parts_of(value) or ():
            _search(each, place, found, depth + 1, path + inside)
        if not isinstance(value, tuple):
            found[where] = ("value", str(len(value)))
    elif hasattr(value, "__dict__") and not isinstance(value, _NOT_SEARCHED):
        for key, each in vars(value).items():
            if key not in _OF_TORCH:
                _search(each, place, found, depth + 1, f"{path}.{key}")


_NOT_SEARCHED = (
    *(ModuleType, type, FunctionType, BuiltinFunctionType),
    *(torch.Tensor, torch.optim.Optimizer),
)


def _digest(value: object) -> str | None:
    """Return a digest of a plain value, tensor or array; None if it is something else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    # An update is to change them: they always count as the same.
    if isinstance(value, torch.nn.Parameter):
        return ""
    if isinstance(value, torch.Tensor):
        odd = value.layout is not torch.strided or value.is_quantized or value.is_meta
        if value.numel() > _LARGEST or odd:
            return f"{value.shape}"
        return _hash(bits_of(value.cpu()).numpy().tobytes()) + str(tuple(value.shape))
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.shape}" if value.size > _LARGEST else _hash(value.tobytes())
    return None


def _variables(function: object, known: set[int], depth: int) -> Iterator[tuple[str, object]]:
    """Yield what a function of the script has at hand, also through functions of its own file."""
    if isinstance(function, functools.partial):
        for number, value in enumerate((*function.args, *function.keywords.values())):
            yield f"argument {number} of the loss", value
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        yield f"the {type(owner).__name__} of the loss", owner
    elif not hasattr(function, "__code__") and not isinstance(function, type):
        yield f"the loss ({type(function).__name__})", function
        function = type(function).__call__ if callable(function) else function
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in known or depth > 2:
        return
    known.add(id(function))
    code = function.__code__
    held = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has not been assigned yet
            held[name] = cell.cell_contents
    outer = function.__globals__
    held |= {f"the global {name}": outer[name] for name in code.co_names if name in outer}
    for name, value in held.items():
        if isinstance(value, FunctionType):
            if value.__module__ == function.__module__:
                yield from _variables(value, known, depth + 1)
        elif not isinstance(value, ModuleType | type | BuiltinFunctionType):
            yield f"{name}, which {place_of(function)} uses", value


def global_states() -> dict[str, str]:
    """Return digests of the states of the global generators, by name."""
    states = {
        "torch's global generator": torch.default_generator.get_state(),
        "the global generator of random": random.getstate(),
        "NumPy's global generator": np.random.get_state(legacy=False),
    }
    return {name: _hash(repr(comparable_state(state))) for name, state in states.items()}


def _hash(data: bytes | str) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


_unseeded: list[str] = []


def unseeded_generators() -> list[str]:
    """List the calls so far that seeded a generator from the system's entropy."""
    return list(_unseeded)


def watch_unseeded() -> None:
    """Note from now on where the script seeds a generator from the system's entropy.

    For the rest of the process, which belongs to a comparison: the functions are replaced by ones
    that look at their arguments first.
    """
    seeding = (np.random, "default_rng"), (np.random, "seed"), (random, "seed"), (torch, "seed")
    for owner, name in seeding:
        setattr(owner, name, _noting(getattr(owner, name), f"{owner.__name__}.{name}"))


def _noting(function: Callable[..., Any], shown: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **settings: Any) -> Any:
        given = [*args, *settings.values()]
        if not given or given[0] is None:
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            text = f"{shown}() without a seed ({place})"
            if text not in _unseeded and len(_unseeded) < _MOST:
                _unseeded.append(text)
        return function(*args, **settings)

    return noted

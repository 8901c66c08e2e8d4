"""Observes the steps of a run that ``onefold verify`` compares with others.

`Probe` writes digests of the model after each step. `StateWatch` detects changes that a step must
not make: to attributes of modules, and to unseeded generators. These changes only show where to
look when bits differ.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from onefold.core.flat import (
    fingerprint_of,
    named_tensors,
    own_name,
    same_bits,
    tensor_digests,
)
from onefold.core.options import LaunchContext
from onefold.core.randomness import GENERATORS, comparable_state, state_of
from onefold.core.structure import parts_of
from onefold.data_order.reader import digest_of
from onefold.session.run import RunSetup, RunView
from onefold.shard.left_state import OF_TORCH
from onefold.step.hook import Hook, ScriptCall, Spans
from onefold.step.result import Step
from onefold.system.safe_files import append_line

__all__ = [
    "Probe",
    "StateWatch",
    "VerifyOptions",
    "options_of",
    "place_of",
    "prepare",
    "unseeded",
    "watch_unseeded",
]


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Compare the steps of a Trainer, unless its mathematics is compared."""
    options = options_of(start.context)
    return lambda run: None if options.mathematics else ProbeHook(run, options)


class ProbeHook(Hook):
    """Compares each step on the lead, with all parameters of the model gathered.

    Args:
        run: the run.
        options: the options of the comparison.
    """

    def __init__(self, run: RunView, options: VerifyOptions) -> None:
        self._engine, self._devices = run.engine, run.devices
        self._probe = Probe(options, run.devices.trainer)
        self._steps, self._done = options.steps, 0
        self._observe(None)

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Compare a step."""
        if asked.computed:
            self._done += 1  # not step.number, which does not start at 1 after a checkpoint
            if self._done <= self._steps:
                self._observe(float(step.loss))

    def _observe(self, loss: float | None) -> None:
        with self._engine.placement.gathered():
            if self._devices.has_lead:
                self._probe.observe(self._done, self._engine.context.module, loss)


class Probe:
    """Writes digests of the model after each step, and its differences from the recorded run.

    Args:
        options: options of the comparison: its folder, which all of its runs share, the name of
            this run, and whether to keep its tensors for later runs or compare them with kept ones.
        trainer: number of the trainer in the script.
    """

    def __init__(self, options: VerifyOptions, trainer: int = 0) -> None:
        self._records = options.records
        folder = Path(options.folder)
        self._lines = folder / f"{options.run}-{trainer}.jsonl"
        self._kept = str(folder / f"trainer-{trainer}-step-")
        self._differs = False

    def observe(self, step: int, module: torch.nn.Module, loss: float | None) -> None:
        """Write one line for a step. Step 0 is the model before the first step."""
        tensors = {name: tensor.detach() for name, tensor in named_tensors(module).items()}
        digests = tensor_digests(tensors)
        line: dict[str, Any] = {"step": step, "loss": loss, "digests": digests}
        line["fingerprint"] = fingerprint_of(digests)
        line["parameters"] = [own_name(name) for name, _ in module.named_parameters()]
        kept = Path(f"{self._kept}{step}.safetensors")
        if self._records:
            # Clone, because safetensors rejects tensors that share storage, and non-dense ones.
            save_file({n: t.cpu().contiguous().clone() for n, t in tensors.items()}, kept)
        # Only the first step that differs is of interest, because all later steps differ too.
        elif not self._differs and kept.exists():
            line["differences"] = _differences(load_file(kept), tensors)
            self._differs = bool(line["differences"])
        append_line(self._lines, line)


def _differences(
    kept: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]
) -> dict[str, float | None]:
    """Return the largest difference of each tensor with other bits; None if shapes differ."""
    found: dict[str, float | None] = {}
    for name, value in now.items():
        # New tensors and new shapes have no largest difference; the line has null instead.
        if name not in kept or kept[name].shape != value.shape:
            found[name] = None
            continue
        theirs = kept[name]
        if not same_bits(value.cpu(), theirs):
            # Subtract in double precision, because in their own dtype the difference could round to
            # 0, or overflow.
            wide = torch.complex128 if value.is_complex() else torch.float64
            found[name] = float((value.cpu().to(wide) - theirs.to(wide)).abs().max())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The entry ``verify`` of `RunOptions.tools`."""

    folder: str = ""
    """Folder of the comparison; empty if this run is not compared."""
    run: str = ""
    """Name of this run in that folder."""
    steps: int = 0
    """Number of steps to compare."""
    trainers: int = 0
    """Number of Trainers after whose compared steps the script ends; 0 for all."""
    records: bool = False
    """Whether this run keeps its tensors for the others, instead of comparing them."""
    mathematics: str = ""
    """Dtype for comparing V shards with one: ``float64`` or ``float32``; empty for neither."""


def options_of(context: LaunchContext) -> VerifyOptions:
    """Return the options of the comparison that a process takes part in."""
    return VerifyOptions(**context.options.tools.get("verify", {}))


_LARGEST = 1 << 16
"""Maximum number of elements of a tensor or array whose values are compared."""
_DEEPEST = 4
"""Maximum nesting depth of containers that are searched."""
_MOST = 2000
"""Maximum number of values in one search."""

_Seen = dict[tuple[str, str], tuple[str, str]]
"""Kind of each value that was found, and a digest of it, by its place and the path inside it."""


class StateWatch:
    """Detects state that a step of one trainer changed, on this device.

    Args:
        model: the model of the trainer.
        losses: losses of the script.
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
        """Watch a data set too. Call this before its first read."""
        self._datasets.append(dataset)
        self._data_before |= self._look_at_data()

    @contextmanager
    def step(self) -> Iterator[dict[str, str]]:
        """Detect changes by a step, and yield digests of the global generators before it."""
        before, data = self._read_state(), self._look_at_data()
        states = {
            "torch's global generator": torch.default_generator.get_state(),
            "the global generator of random": random.getstate(),
            "NumPy's global generator": np.random.get_state(legacy=False),
        }
        yield {name: _hash(repr(comparable_state(state))) for name, state in states.items()}
        # Data sets are read between steps; the model and the loss run within them.
        pairs = ((self._data_before, data), (before, self._read_state()))
        self._data_before = self._look_at_data()
        changed: dict[tuple[str, str], list[str]] = {}
        for then, now in pairs:
            for (place, path), (kind, value) in now.items():
                if (place, path) in then and then[place, path][1] != value:
                    changed.setdefault((kind, place), []).append(path)
        # Name each place once, however many values changed inside it.
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
        if key not in OF_TORCH:
            _search(value, f"attribute {key} of {place}", found, 0)


def _search(value: object, place: str, found: _Seen, depth: int, path: str = "") -> None:
    """Add digests of the values and generators in an object and its contents to ``found``."""
    # Objects may refer to each other in cycles, so only these limits end the search.
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
            if key not in OF_TORCH:
                _search(each, place, found, depth + 1, f"{path}.{key}")


_NOT_SEARCHED = (
    *(ModuleType, type, FunctionType, BuiltinFunctionType),
    *(torch.Tensor, torch.optim.Optimizer),
)


def _digest(value: object) -> str | None:
    """Return a digest of a plain value, tensor or array; None if it is something else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    # Updates change parameters, so they always count as unchanged here.
    if isinstance(value, torch.nn.Parameter):
        return ""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        return f"{value.shape}" if size > _LARGEST else digest_of(value).hex()
    return None


def _variables(function: object, known: set[int], depth: int) -> Iterator[tuple[str, object]]:
    """Yield the objects that a loss of the script reaches, also through functions of its file."""
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


def _hash(data: bytes | str) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


unseeded: list[str] = []
"""Calls so far that seeded a generator from the system's entropy."""


def watch_unseeded() -> None:
    """Record from now on where the script seeds a generator from the system's entropy.

    This replaces the seeding functions with ones that check their arguments first, for the rest of
    the process, which belongs to a comparison.
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
            if text not in unseeded and len(unseeded) < _MOST:
                unseeded.append(text)
        return function(*args, **settings)

    return noted

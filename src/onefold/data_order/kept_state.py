"""Finds random generators and open files that a script's objects keep between calls.

`reachable` finds everything that some objects refer to, as Python's garbage collector does:
attributes, slots, containers, closures, default arguments, partials, bound methods, the attributes
of classes, and the names of a module that a function's code uses. It runs no code of the script. It
is not for other kinds of state, such as counters: `FirstShard` in `onefold.data_order.reader`
detects counters of the data.

Note: limits of the search
--------------------------
The search visits at most `MOST` objects, the nearest first and classes last, and the first `WIDEST`
parts of each object. It does not look into numbers, text, tensors, arrays, modules, threads,
loggers, a Trainer, or the classes of Python, NumPy, PyTorch and onefold with the globals of their
functions. `generators_in` leaves out the global generators, which onefold seeds anyway. Every
process finds the same objects in the same order.
"""

from __future__ import annotations

import gc
import io
import os
import random
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from onefold.core.randomness import GENERATORS

__all__ = ["CLOSED", "MOST", "WIDEST", "files_in", "generators_in", "reachable", "referents_of"]

MOST = 10_000
"""Maximum number of objects in a search."""
WIDEST = 256
"""Maximum number of parts that are searched per object."""

_LEAVES = (
    *(int, float, complex, str, bytes, bytearray, range, type(None), CodeType, ModuleType),
    *(torch.Tensor, torch.UntypedStorage, torch.dtype, torch.device, np.ndarray, np.generic),
)
CLOSED = frozenset((*sys.stdlib_module_names, "numpy", "torch", "onefold")) - {"__main__"}
"""Packages whose classes, and the globals of whose functions, are not searched."""
_CLOSED_OBJECTS = frozenset(("logging", "threading", "_thread", "multiprocessing"))
"""Packages whose instances are not searched."""
_OF_A_RUN = tuple(f"onefold.{each}" for each in ("trainer", "session", "step", "placement"))
"""Modules of onefold whose objects hold a run. Objects of others wrap the script's functions."""


def reachable(owners: Iterable[object], closed: Set[str] = CLOSED) -> list[object]:
    """Return some objects and everything that they refer to, each once; see the note on limits.

    Args:
        owners: the objects.
        closed: packages whose classes, and the globals of whose functions, are not searched.
    """
    # Keep the objects, because a new object may reuse the id of a freed one.
    found: dict[int, object] = {}
    waiting, classes = deque(owners), deque[object]()
    while (waiting or classes) and len(found) < MOST:
        # Classes last, because the methods of a large library lead to all of it.
        each = (waiting or classes).popleft()
        if not isinstance(each, _LEAVES) and id(each) not in found:
            found[id(each)] = each
            for part in islice(referents_of(each, closed), WIDEST):
                (classes if isinstance(part, type) else waiting).append(part)
    return list(found.values())


def generators_in(*owners: object) -> list[Any]:
    """Return the random generators that some objects reach, apart from the global ones."""
    return [each for each in reachable(owners) if _is_own_generator(each)]


def files_in(*owners: object) -> list[str]:
    """Return the names of the regular files that some objects hold open for reading."""
    opened = [each for each in reachable(owners) if isinstance(each, io.IOBase)]
    return sorted({str(getattr(each, "name", each)) for each in opened if _is_read(each)})


def _is_own_generator(value: object) -> bool:
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    seeded = (random._inst, np.random.mtrand._rand, torch.default_generator)
    return all(value is not each for each in seeded)


def _is_read(file: io.IOBase) -> bool:
    try:
        return file.readable() and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # not a file of the operating system, or closed
        return False


def referents_of(value: Any, closed: Set[str] = CLOSED) -> Iterator[object]:
    """Yield the objects that a value refers to; see the note on limits."""
    if isinstance(value, GENERATORS):
        return iter(())
    if isinstance(value, FunctionType):
        return _parts_of_function(value, closed)
    if isinstance(value, type):
        return iter([part for base in value.__mro__ for part in _own_parts(base, closed)])
    # Subclasses are excluded, because their methods are the script's code.
    if type(value) is dict:
        return iter(value.values())
    if type(value) in (list, tuple):
        return iter(value)
    kind = type(value)
    if _package_of(kind) in _CLOSED_OBJECTS or kind.__module__.startswith(_OF_A_RUN):
        return iter(())
    return iter(gc.get_referents(value))


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _own_parts(base: type, closed: Set[str]) -> list[object]:
    return [] if _package_of(base) in closed else list(vars(base).values())


def _parts_of_function(function: FunctionType, closed: Set[str]) -> Iterator[object]:
    for cell in function.__closure__ or ():
        yield from gc.get_referents(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()  # includes the function that a decorator wraps
    names = {} if _package_of(function) in closed else _names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            # For `module.generator`, yield the members of the module that this code names.
            yield from (vars(value)[each] for each in names if each in vars(value))
        else:
            yield value


def _names_in(code: CodeType) -> dict[str, None]:
    """Return the names that a function's code and its inner functions use, in order."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _names_in(inner)
    return names

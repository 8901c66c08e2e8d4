"""Finds what the data of a loader keep between calls: random generators, open files, other state.

`reachable` goes through everything that some objects refer to, as Python's garbage collector sees
it: attributes, slots, containers, closures, default arguments, partials, bound methods, the
attributes of classes, and those names of a module that a function's code uses. No code of the
script runs.

`FirstShard` detects what the search does not: a counter in ``collate``, samples that are changed in
place, generators of unknown kinds. A batch must depend on its samples, the seed and its place
alone, because devices and workers divide the shards among them, and a resumed run makes none of
those that are done. So every device makes the first shard of a loader's first pass before the batch
is read, and its bytes are part of what devices compare. Whoever then reads this shard compares it
with the one made before.

Note: limits of the search
--------------------------
The search ends after `MOST` objects, the nearest first, and looks at the first `WIDEST` parts of
each of them. Numbers, text, tensors and arrays end it, as do modules, threads, loggers, onefold
itself, and the functions and classes of Python, NumPy and PyTorch. So do the global generators,
which are seeded anyway. The same objects are found in the same order in every process.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from onefold.core.randomness import GENERATORS
from onefold.data_order.reader import BadSample, Request, digest_of

__all__ = ["MOST", "WIDEST", "FirstShard", "changed", "files_in", "generators_in", "reachable"]

_log = logging.getLogger("onefold")

MOST = 10_000
"""The most objects that are looked at."""
WIDEST = 256
"""The most parts of one object that are looked at."""

_LEAVES = (
    *(int, float, complex, str, bytes, bytearray, range, type(None), CodeType, ModuleType),
    *(torch.Tensor, torch.UntypedStorage, torch.dtype, torch.device, np.ndarray, np.generic),
)
_CLOSED = frozenset((*sys.stdlib_module_names, "numpy", "torch", "onefold")) - {"__main__"}
"""Packages whose functions and classes are not looked into."""
_CLOSED_OBJECTS = frozenset(("logging", "threading", "_thread", "multiprocessing", "onefold"))
"""Packages whose objects are not looked into."""


def reachable(owners: Iterable[object]) -> list[object]:
    """Return some objects and everything that they refer to, each once; see the note on limits."""
    # Of objects that are kept here: the id of one that is gone may be another's.
    found: dict[int, object] = {}
    waiting = deque(owners)
    while waiting and len(found) < MOST:
        each = waiting.popleft()
        if not isinstance(each, _LEAVES) and id(each) not in found:
            found[id(each)] = each
            waiting.extend(islice(_parts_of(each), WIDEST))
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
    except (OSError, ValueError):  # no file of the system, or closed
        return False


def _parts_of(value: Any) -> Iterator[object]:
    if isinstance(value, GENERATORS):
        return iter(())
    if isinstance(value, FunctionType | type):
        if _package_of(value) in _CLOSED:
            return iter(())
        return _parts_of_class(value) if isinstance(value, type) else _parts_of_function(value)
    # Not of subclasses, whose methods are the script's code.
    if type(value) is dict:
        return iter(value.values())
    if type(value) in (list, tuple):
        return iter(value)
    if _package_of(type(value)) in _CLOSED_OBJECTS:
        return iter(())
    return iter(gc.get_referents(value))


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _parts_of_class(value: type) -> Iterator[object]:
    yield from (part for base in value.__mro__ for part in _own_parts(base))


def _own_parts(base: type) -> list[object]:
    return [] if _package_of(base) in _CLOSED else list(vars(base).values())


def _parts_of_function(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        yield from gc.get_referents(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()  # what a decorator has wrapped
    names = _names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            # `module.generator`: of another module of the script those names that stand here.
            yield from (vars(value)[each] for each in names if each in vars(value))
        else:
            yield value


def _names_in(code: CodeType) -> dict[str, None]:
    """The names that a function's code uses, and that of functions in it, in their order."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _names_in(inner)
    return names


_Collate = Callable[[Any], object]


class FirstShard:
    """The first shard of a batch, made before it is read.

    Args:
        samples: its samples.
        collate: makes its payload; seeds what it draws from.
    """

    def __init__(self, samples: object, collate: _Collate) -> None:
        self._samples, self._payload = digest_of(samples), b""
        try:
            # `collate` may change what it is given, which a data set may keep.
            self._payload = digest_of(collate(deepcopy(samples)))
        except Exception as error:  # whoever reads this shard reports what `collate` raises
            _log.debug("the first shard of a loader is not made twice: %s", error)

    @property
    def digest(self) -> bytes:
        """Digest of samples and payload, which must be the same on all devices."""
        return self._samples + self._payload

    def compared(self, request: Request, samples: object, collate: _Collate) -> object:
        """Make the payload, and return it; a `BadSample` if it is not the same as before."""
        found = digest_of(samples)
        payload = collate(samples)
        if found != self._samples:
            return changed(request, "the data set")
        if self._payload and digest_of(payload) != self._payload:
            return changed(request, "collate")
        return payload


def changed(request: Request, what: str) -> BadSample:
    """Describe that something was not the same when it was made twice.

    Args:
        request: asked for it.
        what: made it.
    """
    first = request.check[0][0] if request.check and request.check[0] else request.item
    text = (
        f"made twice from the same samples and seeds, this was not the same: {what} returned "
        f"other bytes the second time. Expected the same, because devices and workers divide the "
        f"data among them, and a resumed run does not make again what is done. Something is kept "
        f"between calls: a count, a value that is changed in place, or a random generator that "
        f"onefold does not find. Draw from the generators of PyTorch, Python or NumPy, or from one "
        f"kept as an attribute: all are seeded for each sample and shard. For a count, use the "
        f"number of the sample or of the epoch"
    )
    return BadSample(first, request.epoch, "StateError", text, "", "making the batch of sample")

"""Finds modules that the loss uses beside the model: nothing folds or saves their state.

Modules show themselves when they are called: in some steps every call of a module is noted, and
what such a module had before its first call is compared with what it has after the last.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from onefold.core.flat import bits_of, same_bits
from onefold.core.head import checksum
from onefold.engine.lentparameter import Elsewhere
from onefold.errors import StateError
from onefold.system.compat import version_of
from onefold.system.tables import buffers_of, parameters_of

__all__ = ["OutsideModules", "modules_of"]

_LOOKED_AT = 16
"""Values of each tensor of an outside module that are compared between devices."""


class OutsideModules:
    """Modules that the loss uses beside the model.

    Those that are made inside the loss and end with it keep no state and are left alone; so only
    weak references are held.

    Args:
        module: the model.
        functions: its losses, which may close over other modules.
    """

    def __init__(self, module: torch.nn.Module, *functions: object) -> None:
        self._module = module
        self._functions = functions
        self._found: list[_Outside] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note every module that is called inside this context."""
        known = {id(part) for part in self._module.modules()}
        self._found = []

        # Before the first forward, and only then: what it had is copied while it still has it.
        def note(module: torch.nn.Module, _: object) -> None:
            if id(module) not in known:
                known.add(id(module))
                self._found.append(_Outside(module))

        # A hook of all modules of the process. It slows every call down, and would make compiled
        # ones compile anew: so it is never left in place.
        handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def refusing_changes(self, where: str) -> Iterator[None]:
        """Note every module that is called inside this context, and `check` them at its end."""
        with self.noting():
            yield
        self.check(where)

    def check(self, where: str) -> None:
        """Refuse an outside module that the shards have changed, of those noted last.

        Args:
            where: step or batch, for errors.

        Raises:
            StateError: a buffer or parameter of such a module was changed.
        """
        found, self._found = self._found, []
        for outside in found:
            name = outside.changed()
            if name is not None:
                raise StateError(
                    f"{where}: a module of {outside.kind} is called that is no part of the model, "
                    f"and its {name} was changed by the shards: every device would have its own. "
                    f"Put the module into the model (an attribute, or a ModuleDict of both), or "
                    f"into evaluation mode with .eval() if it is not to learn there; what follows "
                    f"the model, such as an average, is changed between steps"
                )

    def checksum(self, function: object = None) -> int:
        """Compute a checksum of a few values of each module that a function can reach; 0 for none.

        Args:
            function: the function, if it is not a loss.
        """
        own = {id(part) for part in self._module.modules()}
        # What the model trains is compared elsewhere, and may not be on this device.
        shared = {id(parameter) for parameter in self._module.parameters()}
        functions = self._functions if function is None else (function,)
        reached = [module for each in functions for module in modules_of(each)]
        parts = {id(p): p for module in reached for p in module.modules() if id(p) not in own}
        text = b"".join(_sampled(part, shared) for part in parts.values())
        return checksum(text) if text else 0


class _Outside:
    """An outside module, as it was before its first call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.kind = type(module).__name__
        # Buffers by value, as batch-norm kernels change theirs without counting; parameters by
        # PyTorch's count of changes, as they are large.
        self._buffers = {n: b.clone() for n, b in buffers_of(module).items() if b is not None}
        self._versions = {
            n: version_of(p) for n, p in parameters_of(module).items() if p is not None
        }

    def changed(self) -> str | None:
        """Name what was changed; None if nothing was, or if the module is gone."""
        module = self._module()
        if module is None:
            return None
        now = {name: b for name, b in buffers_of(module).items() if b is not None}
        for name, before in self._buffers.items():
            value = now.get(name)
            if value is None or value.shape != before.shape or not same_bits(value, before):
                return f"buffer {name}"
        for name, version in self._versions.items():
            parameter = parameters_of(module).get(name)
            if parameter is None or version_of(parameter) != version:
                return f"parameter {name}"
        return next((f"buffer {name}" for name in now if name not in self._buffers), None)


def _sampled(module: torch.nn.Module, but: Collection[int]) -> bytes:
    """Return the bytes of a few values of each of a module's own tensors, but for those."""
    parts = []
    for tensor in [*parameters_of(module).values(), *buffers_of(module).values()]:
        if tensor is None or id(tensor) in but or not tensor.numel():
            continue
        # What another Trainer has lent to somebody else just now is compared by that one.
        with suppress(Elsewhere):
            parts.append(tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _LOOKED_AT)])
    return b"".join(bits_of(part.cpu()).numpy().tobytes() for part in parts)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """List the modules that a function can reach: it closes over, is bound to, or names them."""
    found: dict[int, torch.nn.Module] = {}
    for value in _values_of(function):
        held = value.values() if isinstance(value, dict) else value
        for each in held if isinstance(value, list | tuple | dict) else (value,):
            if isinstance(each, torch.nn.Module):
                found[id(each)] = each
    return list(found.values())


def _values_of(function: Any) -> Iterator[Any]:
    """Yield what a function has at hand: arguments, owner, globals, defaults, closure."""
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from (owner, *getattr(owner, "__dict__", {}).values())
    if isinstance(function, torch.nn.Module):
        yield function
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    names = getattr(function, "__globals__", {})
    yield from (names[name] for name in code.co_names if name in names)
    yield from getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        # A cell is empty where its variable is assigned only after Trainer is made.
        with suppress(ValueError):
            yield cell.cell_contents

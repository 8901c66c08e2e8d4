"""The parts of the user's model, their modes, and modules used in addition to it.

`ModelParts` stores the parts as of the creation of Trainer, and detects changes.

`ExternalModules` finds modules that the loss uses in addition to the model; their state is neither
combined over shards nor saved. In some steps a hook records every call of a module. For outside
modules, the state before the first call is compared with the state after the last one.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from onefold.core.call_digest import checksum
from onefold.core.flat import bits_of, names_with_nan, own_name, same_bits
from onefold.core.late import load
from onefold.core.stages import ROOT
from onefold.deferred.access import ResidentError
from onefold.errors import StateError
from onefold.system.compat import version_of
from onefold.system.internals import buffers_of, children_of, hook_owners, parameters_of

if TYPE_CHECKING:
    from onefold.shard.stage_modules import StageModules

__all__ = [
    "QUICK",
    "ExternalModules",
    "ModelParts",
    "buffers_with_nan",
    "closed_over",
    "modules_of",
]


_requires_grad = operator.attrgetter("requires_grad")


class ModelParts:
    """The user's module and its trained and other parameters. Tied parameters count once.

    Args:
        module: the user's model.
        trained_names: names of the parameters that the optimizer updates.
    """

    def __init__(self, module: torch.nn.Module, trained_names: Sequence[str]) -> None:
        self.named = dict(module.named_parameters())
        self._parameters = list(self.named.values())
        self.module = module
        self._list_tables()
        self.modes = Modes(module)
        self.trained = {name: self.named[name] for name in trained_names}
        self.other = {name: p for name, p in self.named.items() if name not in self.trained}
        self.frozen: dict[str, torch.nn.Parameter] = {}
        """Untrained parameters that `partition_frozen` set apart."""
        self._tensors = self._ids()

    def partition_frozen(self, modules: StageModules) -> None:
        """Set apart the frozen parameters that are partitioned among devices.

        They are gathered with their stage.
        """
        # Keep other parameters here if they require a gradient: hooks may read that gradient at any
        # time.
        frozen = {name: p for name, p in self.other.items() if not p.requires_grad}
        names = [name for name, p in frozen.items() if modules.stage_of(p) != ROOT]
        self.frozen = {name: self.other.pop(name) for name in names}

    def check_held(self) -> None:
        """Refuse a model that has other parts than at the creation of Trainer.

        Fast if no module's tables changed since the last call. Modules without parameters and
        buffers, such as dropout, may be added or removed.

        Raises:
            StateError: a parameter or buffer was added, removed or replaced.
        """
        held = self._in_tables()
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return
        self.check_parts()
        self.modes.refresh()
        self._list_tables()

    def _list_tables(self) -> None:
        """Note the modules' parameters, submodules and buffer names."""
        # Keep the tables themselves: `check_held` runs in every step, and walking the module tree
        # or reading attributes would cost more than a small layer.
        parts = list(self.module.modules())
        tables = [*map(parameters_of, parts), *map(children_of, parts)]
        # Scripted modules create new tables on every access, so theirs cannot be kept.
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._buffers = [table for table in map(buffers_of, parts) if isinstance(table, dict)]
        self._held = self._in_tables()

    def _in_tables(self) -> list[object]:
        held: chain[object] = chain.from_iterable(map(dict.values, self._tables))
        return [*held, *chain.from_iterable(self._buffers)]

    def trainable(self) -> list[bool]:
        """Return whether each parameter requires a gradient, in the order of `named`."""
        return list(map(_requires_grad, self._parameters))

    def restore_frozen(self, trainable: Sequence[bool]) -> None:
        """Set every parameter's ``requires_grad`` to the values of `trainable`."""
        if self.trainable() != trainable:
            for parameter, required in zip(self.named.values(), trainable, strict=True):
                parameter.requires_grad_(required)

    def check_parts(self) -> None:
        """Refuse a model whose parts changed after Trainer was created.

        Raises:
            StateError: a parameter or buffer was added, removed or replaced.
        """
        now = self._ids()
        for name in {**now, **self._tensors}:
            if now.get(name) != self._tensors.get(name):
                raise StateError(
                    f"{name} of the model was added, removed or replaced after Trainer was "
                    f"created, so it would not be trained. Change values in place "
                    f"(parameter.copy_(...) in trainer.modifying()); or change the model first, "
                    f"then create its optimizer and Trainer"
                )

    def _ids(self) -> dict[str, int]:
        """Return the identity of every parameter and the name of every buffer, by name."""
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        return {
            **{f"parameter {name}": id(tensor) for name, tensor in parameters},
            # Compare buffers by name only: a forward pass may replace a buffer by a new tensor,
            # whose values `BufferSet.absorb` copies.
            **{f"buffer {name}": 0 for name, _ in buffers},
        }


_NUMBERS = ("p", "momentum", "eps", "dropout")
"""Settings of PyTorch's layers that a script may schedule between steps."""


class Modes:
    """Reads and restores the modes of a module's parts.

    Args:
        module: the user's model; its parts are listed now and at each `refresh`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._last: list[object] = []
        self._checksum = 0
        self.refresh()

    def refresh(self) -> None:
        """List the parts again."""
        # Keep the list: walking the module tree takes longer than all use of the list in a step.
        self._parts = list(self._module.modules())
        # This covers only PyTorch's own layers: in a user's module a number of such a name may mean
        # anything, and may change in every call.
        self._numbers = [
            (part.__dict__, name)
            for part in self._parts
            if type(part).__module__.startswith("torch.nn.")
            for name in _NUMBERS
            if isinstance(part.__dict__.get(name), int | float)
        ]

    def numbers_checksum(self) -> int:
        """Compute a checksum of the layers' settings, such as the ``p`` of dropout.

        Fast if they are the same as at the last call.
        """
        now = [held.get(name) for held, name in self._numbers]
        if now != self._last:
            self._last = now
            self._checksum = checksum(repr(now).encode())
        return self._checksum

    def read(self) -> bytes:
        """Return one byte per part: 1 in training mode."""
        return bytes([part.training for part in self._parts])

    def restore(self, modes: bytes) -> None:
        """Set every part to its mode in `read`."""
        if self.read() != modes:
            for part, mode in zip(self._parts, modes, strict=True):
                # Set the flag directly: train() would also set the children, which have own flags.
                part.training = bool(mode)


_LOOKED_AT = 16
"""Values per tensor of an outside module that are compared between devices."""


class ExternalModules:
    """Modules that the loss uses in addition to the model.

    Modules created inside the loss disappear with it and keep no state. Only weak references are
    held, so that they can disappear.

    Args:
        module: the model.
        functions: its losses, which may close over other modules.
        context: provides the number of shards, and whether anything is compiled.
    """

    def __init__(self, module: torch.nn.Module, *functions: object, context: Any) -> None:
        self._module = module
        self._functions = functions
        self._context = context
        self.left: Any = None
        """`onefold.shard.left_state.LeftState`, created when shards may leave state on modules."""
        self.resumes = False
        """Whether the run writes checkpoints to resume from, which do not contain such state."""

    def watched(
        self, where: str, *, wanted: bool, function: object = None
    ) -> AbstractContextManager[object]:
        """Refuse changes of outside modules by shards, and state that shards leave on any module.

        Args:
            where: step or batch, for errors.
            wanted: whether to check.
            function: the function that is computed, if it is not a loss.
        """
        looking = ExitStack()
        if wanted and (self._context.settings.shards > 1 or self.resumes):
            looking.enter_context(self.refusing_left(where, function))
        # Hooks would recompile a compiled model.
        if wanted and not self._context.compilers.compiled:
            looking.enter_context(self.refusing_changes(where))
        return looking

    @contextmanager
    def refusing_left(self, where: str, function: object = None) -> Iterator[None]:
        """Refuse state that shards leave on the model or on objects reachable from a function.

        Args:
            where: step or batch, for errors.
            function: the function, if it is not a loss.

        Raises:
            StateError: shards left state that would differ between devices.
        """
        functions = self._functions if function is None else (function,)
        values = [value for each in functions for value in _values_of(each)]
        models = [self._module, *(m for each in functions for m in modules_of(each))]
        parts = [part for model in models for part in model.modules()]
        # With one shard this state covers the whole batch, and each step replaces it.
        alone = self._context.settings.shards == 1
        named = [] if alone else list(self._module.named_parameters())
        # Skip the check if it cannot find anything: PyTorch's own layers keep no such state, and
        # many models consist of these only.
        if (
            any(not type(part).__module__.startswith("torch.nn.") for part in parts)
            or any(hasattr(type(value), "reset") for value in values)
            or any(map(hook_owners, parts))
            or any(vars(parameter) for _, parameter in named)
        ):
            self.left = self.left or load("shard.left_state").LeftState(alone=alone)
            with self.left.judging(named, models, values, where):
                yield
            return
        yield
        if any(vars(parameter) for _, parameter in named):
            load("shard.left_state").refuse_parameters(named, where)

    @contextmanager
    def refusing_changes(self, where: str) -> Iterator[None]:
        """Refuse changes, by shards, of outside modules that are called inside this context.

        Args:
            where: step or batch, for errors.

        Raises:
            StateError: a buffer or parameter of such a module was changed.
        """
        known = {id(part) for part in self._module.modules()}
        found: list[_External] = []

        # Copy a module's state before its first forward, while the state is still unchanged.
        def note(module: torch.nn.Module, _: object) -> None:
            if id(module) not in known:
                known.add(id(module))
                found.append(_External(module))

        # This hook applies to all modules of the process. It slows down every call and recompiles
        # compiled modules, so it is removed at the end.
        with torch.nn.modules.module.register_module_forward_pre_hook(note):
            yield
        for external in found:
            name = external.changed()
            if name is not None:
                raise StateError(
                    f"{where}: a module of {external.kind} is not part of the model, but the "
                    f"shards changed its {name}, so it would differ between "
                    f"devices. Add the module to the model (as an attribute, or in a ModuleDict "
                    f"of both), or set it to evaluation mode with .eval() if it must not learn "
                    f"there. Update a module that follows the model, such as an average, between "
                    f"steps"
                )

    def checksum(self, function: object = None) -> int:
        """Compute a checksum of sampled values of reachable outside modules; 0 if there are none.

        Args:
            function: the function, if it is not a loss.
        """
        own = {id(part) for part in self._module.modules()}
        # Skip the model's parameters: they are compared elsewhere, and may not be resident.
        shared = {id(parameter) for parameter in self._module.parameters()}
        functions = self._functions if function is None else (function,)
        reached = [module for each in functions for module in modules_of(each)]
        parts = {id(p): p for module in reached for p in module.modules() if id(p) not in own}
        text = b"".join(_sampled(part, shared) for part in parts.values())
        return checksum(text) if text else 0


class _External:
    """An outside module and its state before the first call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.kind = type(module).__name__
        # Compare buffers by value, because batch-norm kernels change them without counting;
        # compare parameters, which are large, by PyTorch's version counters.
        self._buffers = {n: b.clone() for n, b in buffers_of(module).items() if b is not None}
        self._versions = {
            n: version_of(p) for n, p in parameters_of(module).items() if p is not None
        }

    def changed(self) -> str | None:
        """Return the name of a changed tensor; None if nothing changed or the module is gone."""
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
    """Return the bytes of sampled values of a module's own tensors, except the tensors ``but``."""
    parts = []
    for tensor in [*parameters_of(module).values(), *buffers_of(module).values()]:
        if tensor is None or id(tensor) in but or not tensor.numel():
            continue
        # Skip parameters that another Trainer has partitioned: that Trainer compares them.
        with suppress(ResidentError):
            parts.append(tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _LOOKED_AT)])
    return b"".join(bits_of(part.cpu()).numpy().tobytes() for part in parts)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """List the modules that a function closes over, is bound to, or names."""
    found: dict[int, torch.nn.Module] = {}
    for value in _values_of(function):
        held = value.values() if isinstance(value, dict) else value
        for each in held if isinstance(value, list | tuple | dict) else (value,):
            if isinstance(each, torch.nn.Module):
                found[id(each)] = each
    return list(found.values())


def _values_of(function: Any) -> Iterator[Any]:
    """Yield the objects reachable from a function: arguments, owner, globals, defaults, closure."""
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
    yield from closed_over(function)


def closed_over(function: object) -> Iterator[Any]:
    """Yield the values of a function's closure."""
    for cell in getattr(function, "__closure__", None) or ():
        # A cell is empty until its variable is assigned, which may be after Trainer is created.
        with suppress(ValueError):
            yield cell.cell_contents


def buffers_with_nan(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's buffers that contain a NaN."""
    return names_with_nan({own_name(name): buffer for name, buffer in module.named_buffers()})


QUICK = torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention
"""Modules for which PyTorch has fast paths; see `onefold.placement.parameters`."""

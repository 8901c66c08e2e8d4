"""The parts of the user's model, their modes, and modules used in addition to it.

`ModelParts` has the parts as they were when Trainer was made, and finds out whether they still are.

`ExternalModules` finds modules that the loss uses beside the model: nothing folds or saves their
state. Modules show themselves when they are called: in some steps every call of a module is noted,
and what such a module had before its first call is compared with what it has after the last.
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
    "in_mode",
    "modules_of",
]


_requires_grad = operator.attrgetter("requires_grad")


class ModelParts:
    """The user's module, with its parameters sorted into trained and other; tied ones count once.

    Args:
        module: the model, made by the user.
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
        """Those of the rest that `partition_frozen` has set apart."""
        self._tensors = self._ids()

    def partition_frozen(self, modules: StageModules) -> None:
        """Set those frozen parameters apart of which each device is to keep a part.

        They are brought with the stage that they lie in.
        """
        # What has a gradient, which nobody takes, is read by hooks perhaps, whenever they like.
        frozen = {name: p for name, p in self.other.items() if not p.requires_grad}
        names = [name for name, p in frozen.items() if modules.stage_of(p) != ROOT]
        self.frozen = {name: self.other.pop(name) for name in names}

    def check_held(self) -> None:
        """Refuse a model that holds other parts than when Trainer was made.

        Quick where no module holds others than at the last call. Modules without parameters and
        buffers, such as a dropout, may come and go.

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
        """Note which parameters and modules the modules hold, and the names of their buffers."""
        # The tables themselves are kept: `check_held` runs in every step, and walking the module
        # tree or asking for attributes would cost more than a small layer.
        parts = list(self.module.modules())
        tables = [*map(parameters_of, parts), *map(children_of, parts)]
        # Of a scripted module they are made anew when asked.
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._buffers = [table for table in map(buffers_of, parts) if isinstance(table, dict)]
        self._held = self._in_tables()

    def _in_tables(self) -> list[object]:
        held: chain[object] = chain.from_iterable(map(dict.values, self._tables))
        return [*held, *chain.from_iterable(self._buffers)]

    def trainable(self) -> list[bool]:
        """Whether each parameter requires a gradient, in the order of `named`."""
        return list(map(_requires_grad, self._parameters))

    def restore_frozen(self, trainable: Sequence[bool]) -> None:
        """Have each parameter require a gradient exactly where `trainable` found that it does."""
        if self.trainable() != trainable:
            for parameter, required in zip(self.named.values(), trainable, strict=True):
                parameter.requires_grad_(required)

    def check_parts(self) -> None:
        """Refuse a model whose parts have changed since Trainer was made.

        Raises:
            StateError: a parameter or buffer was added, removed or replaced.
        """
        now = self._ids()
        for name in {**now, **self._tensors}:
            if now.get(name) != self._tensors.get(name):
                raise StateError(
                    f"{name} of the model was put in, taken out or replaced since Trainer was "
                    f"made: nobody would train or fold it. Change values in place "
                    f"(parameter.copy_(...) in trainer.modifying()); or change the model first, "
                    f"make its optimizer, and then Trainer"
                )

    def _ids(self) -> dict[str, int]:
        """The identity of every parameter, by name, and the name of every buffer."""
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        return {
            **{f"parameter {name}": id(tensor) for name, tensor in parameters},
            # A forward pass may well put a new tensor in a buffer's place: `BufferSet.absorb`
            # copies its values, so that only the name counts here.
            **{f"buffer {name}": 0 for name, _ in buffers},
        }


_NUMBERS = ("p", "momentum", "eps", "dropout")
"""Settings of PyTorch's layers that schedules of a script change between steps."""


class Modes:
    """Reads the modes of a module's parts, and puts them back.

    Args:
        module: made by the user; its parts are listed once, and again at `refresh`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._last: list[object] = []
        self._checksum = 0
        self.refresh()

    def refresh(self) -> None:
        """List the parts anew."""
        # Walking the module tree takes longer than all that is done with the list in a step.
        self._parts = list(self._module.modules())
        # Only PyTorch's own layers: in a user's module a number of such a name may mean anything,
        # and change with every call.
        self._numbers = [
            (part.__dict__, name)
            for part in self._parts
            if type(part).__module__.startswith("torch.nn.")
            for name in _NUMBERS
            if isinstance(part.__dict__.get(name), int | float)
        ]

    def numbers_checksum(self) -> int:
        """Compute a checksum of the layers' settings, such as the ``p`` of dropout.

        Quick where they have not changed since the last time.
        """
        now = [held.get(name) for held, name in self._numbers]
        if now != self._last:
            self._last = now
            self._checksum = checksum(repr(now).encode())
        return self._checksum

    def read(self) -> bytes:
        """Return one byte per part: 1 for training mode."""
        return bytes([part.training for part in self._parts])

    def restore(self, modes: bytes) -> None:
        """Give every part the mode that `read` found."""
        if self.read() != modes:
            for part, mode in zip(self._parts, modes, strict=True):
                # The flag itself: train() would go on to the children, which have their own bytes.
                part.training = bool(mode)


@contextmanager
def in_mode(module: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put a module into one mode; afterwards each part has its own mode again."""
    # Listed here and not taken from `Modes`: parts may have been added since, and all must return.
    parts = list(module.modules())
    before = [part.training for part in parts]
    # A part with a train() of its own may do more than set the flag (merge weights, for instance),
    # so it is called even where all flags are right already.
    if not all(part.training is training and _is_plain(part) for part in parts):
        module.train() if training else module.eval()
    try:
        yield
    finally:
        # What such a part did in eval() it undoes in a train() of its own (weights that were merged
        # are taken apart again). It goes on to its children, which come later in the list.
        for part, mode in zip(parts, before, strict=True):
            if part.training is not mode and not _is_plain(part):
                part.train(mode)
        # Flag by flag: module.train() would reach parts that the user keeps in evaluation mode.
        for part, mode in zip(parts, before, strict=True):
            if part.training is not mode:
                part.training = mode


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether setting a module's mode sets the flag and nothing else."""
    return type(module).train is torch.nn.Module.train and "train" not in module.__dict__


_LOOKED_AT = 16
"""Values of each tensor of an outside module that are compared between devices."""


class ExternalModules:
    """Modules that the loss uses beside the model.

    Those that are made inside the loss and end with it keep no state and are left alone; so only
    weak references are held.

    Args:
        module: the model.
        functions: its losses, which may close over other modules.
        context: says how many shards there are, and whether anything is compiled.
    """

    def __init__(self, module: torch.nn.Module, *functions: object, context: Any) -> None:
        self._module = module
        self._functions = functions
        self._context = context
        self.left: Any = None
        """What shards have left on modules: `onefold.shard.left_state`, once there may be any."""

    def watched(
        self, where: str, *, wanted: bool, function: object = None
    ) -> AbstractContextManager[object]:
        """Refuse changes that shards make to outside modules, and state that they leave on any.

        Args:
            where: step or batch, for errors.
            wanted: whether to look.
            function: what is computed, if it is not a loss.
        """
        looking = ExitStack()
        if wanted and self._context.settings.shards > 1:
            looking.enter_context(self.refusing_left(where, function))
        # Hooks would make it compile anew.
        if wanted and not self._context.compilers.compiled:
            looking.enter_context(self.refusing_changes(where))
        return looking

    @contextmanager
    def refusing_left(self, where: str, function: object = None) -> Iterator[None]:
        """Refuse state that shards leave on the model, or on what a function can reach.

        Args:
            where: step or batch, for errors.
            function: the function, if it is not a loss.

        Raises:
            StateError: they have left some that each device would have of its own.
        """
        functions = self._functions if function is None else (function,)
        values = [value for each in functions for value in _values_of(each)]
        models = [self._module, *(m for each in functions for m in modules_of(each))]
        parts = [part for model in models for part in model.modules()]
        named = list(self._module.named_parameters())
        # PyTorch's own layers keep nothing, and many models are of these alone.
        if (
            any(not type(part).__module__.startswith("torch.nn.") for part in parts)
            or any(hasattr(type(value), "reset") for value in values)
            or any(map(hook_owners, parts))
            or any(vars(parameter) for _, parameter in named)
        ):
            self.left = self.left or load("shard.left_state").LeftState()
            with self.left.judging(named, models, values, where):
                yield
            return
        yield
        if any(vars(parameter) for _, parameter in named):
            load("shard.left_state").refuse_parameters(named, where)

    @contextmanager
    def refusing_changes(self, where: str) -> Iterator[None]:
        """Refuse that the shards change an outside module which is called inside this context.

        Args:
            where: step or batch, for errors.

        Raises:
            StateError: a buffer or parameter of such a module was changed.
        """
        known = {id(part) for part in self._module.modules()}
        found: list[_External] = []

        # Before the first forward, and only then: what it had is copied while it still has it.
        def note(module: torch.nn.Module, _: object) -> None:
            if id(module) not in known:
                known.add(id(module))
                found.append(_External(module))

        # A hook of all modules of the process. It slows every call down, and would make compiled
        # ones compile anew: so it is never left in place.
        handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        for external in found:
            name = external.changed()
            if name is not None:
                raise StateError(
                    f"{where}: a module of {external.kind} is called that is no part of the model, "
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


class _External:
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
        # What another Trainer has partitioned just now is compared by that one.
        with suppress(ResidentError):
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
    yield from closed_over(function)


def closed_over(function: object) -> Iterator[Any]:
    """The values of variables that a function has from where it was made."""
    for cell in getattr(function, "__closure__", None) or ():
        # A cell is empty where its variable is assigned only after Trainer is made.
        with suppress(ValueError):
            yield cell.cell_contents


def buffers_with_nan(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's buffers that hold a NaN."""
    return names_with_nan({own_name(name): buffer for name, buffer in module.named_buffers()})


QUICK = torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention
"""Modules for which PyTorch has quick paths; see `onefold.placement.parameters`."""

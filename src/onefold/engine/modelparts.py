"""The parts of the user's model, as they were when Trainer was made, and whether they still are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain

import torch

from onefold.engine.modes import Modes
from onefold.errors import StateError
from onefold.system.tables import buffers_of, children_of, parameters_of

__all__ = ["ModelParts"]

_requires_grad = operator.attrgetter("requires_grad")


class ModelParts:
    """The user's module, with its parameters sorted into trained and other; tied ones count once.

    Args:
        module: the user's own.
        trained_names: names of the parameters that the optimizer updates.
    """

    def __init__(self, module: torch.nn.Module, trained_names: Sequence[str]) -> None:
        self.named = dict(module.named_parameters())
        self._parameters = list(self.named.values())
        self.homes = [
            (f"{prefix}.{name}" if prefix else name, parameters_of(owner), name, parameter)
            for prefix, owner in module.named_modules()
            if isinstance(parameters_of(owner), dict)  # a scripted module makes it anew when asked
            for name, parameter in parameters_of(owner).items()
            if parameter is not None
        ]
        """Where modules hold them: full name, the module's own table, name in it, parameter."""
        self.module = module
        self._list_tables()
        self.modes = Modes(module)
        self.trained = {name: self.named[name] for name in trained_names}
        self.other = {name: p for name, p in self.named.items() if name not in self.trained}
        self.frozen: dict[str, torch.nn.Parameter] = {}
        """Those of the rest that `lend` has set apart."""
        self._tensors = self._ids()

    def lend(self, names: Sequence[str]) -> None:
        """Set those frozen parameters apart of which each device is to keep a part."""
        self.frozen = {name: self.other.pop(name) for name in names}

    def check_held(self) -> None:
        """Refuse a model that holds other parts than when Trainer was made.

        Quick where no module holds others than at the last call. Modules without parameters and
        buffers, such as a dropout, may come and go.

        Raises:
            ValueError: a module holds another tensor in the place of one of its parameters.
            StateError: a parameter or buffer came, went, or was replaced with its module.
        """
        held = self._in_tables()
        alike = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if alike and self._buffer_names() == self._names_held:
            return
        for full_name, table, name, parameter in self.homes:
            if table.get(name) is not parameter:
                raise ValueError(
                    f"parameter {full_name} has been replaced by another tensor since Trainer was "
                    f"made, which no optimizer updates. Change values in place "
                    f"(parameter.copy_(...) in trainer.changing()), or make Trainer afterwards"
                )
        self.check_parts()
        self.modes.refresh()
        self._list_tables()

    def _list_tables(self) -> None:
        """Note which parameters and modules the modules hold."""
        # The tables themselves are kept: `check_held` runs in every step, and walking the module
        # tree or asking for attributes would cost more than a small layer.
        parts = list(self.module.modules())
        tables = [*map(parameters_of, parts), *map(children_of, parts)]
        # Of a scripted module they are made anew when asked.
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._held = self._in_tables()
        self._buffers = [table for table in map(buffers_of, parts) if isinstance(table, dict)]
        self._names_held = self._buffer_names()

    def _in_tables(self) -> list[torch.nn.Parameter | torch.nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _buffer_names(self) -> list[str]:
        return list(chain.from_iterable(self._buffers))

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
                    f"made: nobody would train or fold it. Change the model first, make its "
                    f"optimizer, and then Trainer"
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

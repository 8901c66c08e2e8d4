"""Finds state that the loss uses and that is not the model's: nothing folds it, nothing saves it.

Modules show themselves when they are called: for a few steps every call of a module is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from onefold.errors import StateError
from onefold.flat import same_bits
from onefold.head import checksum

__all__ = ["OutsideModules"]

_NOTHING = nullcontext()
_LOOKED_AT = 16
"""Values of each tensor of an outside module that are compared between devices."""


class OutsideModules:
    """Modules that the loss calls beside the model.

    Args:
        module: the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._found: dict[int, _Outside] = {}

    def noting(self, *, wanted: bool) -> AbstractContextManager[None]:
        """Note every module that is called in here, if ``wanted``."""
        return self._noting() if wanted else _NOTHING

    @contextmanager
    def _noting(self) -> Iterator[None]:
        own = {id(part) for part in self._module.modules()}

        def note(module: torch.nn.Module, _: object) -> None:
            if id(module) not in own and id(module) not in self._found:
                self._found[id(module)] = _Outside(module)

        handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def check(self, step: int) -> None:
        """Refuse an outside module whose buffers the shards have changed.

        Raises:
            StateError: there is one.
        """
        for outside in self._found.values():
            name = outside.changed()
            if name is not None:
                raise StateError(
                    f"step {step}: the loss calls {outside.words}, which is no part of the model, "
                    f"and its buffer {name} was changed by the shards: every device would have "
                    f"its own. Put the module into the model (an attribute, or a ModuleDict of "
                    f"both), or in evaluation mode with .eval() if it is not to learn"
                )

    def checksum(self) -> int:
        """Of a few of the outside modules' values; 0 where none are known yet."""
        if not self._found:
            return 0
        return checksum(b"".join(outside.sampled() for outside in self._found.values())) or 1


class _Outside:
    """One such module, as it was before its first call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.words = f"a module of {type(module).__name__}"
        self._before = {name: b.clone() for name, b in self._buffers().items()}

    def changed(self) -> str | None:
        now = self._buffers()
        for name, before in self._before.items():
            value = now.get(name)
            if value is None or value.shape != before.shape or not same_bits(value, before):
                return name
        return next((name for name in now if name not in self._before), None)

    def sampled(self) -> bytes:
        tensors: list[Any] = [*self._module._parameters.values(), *self._buffers().values()]
        parts = [
            t.detach().reshape(-1)[:: max(1, t.numel() // _LOOKED_AT)]
            for t in tensors
            if t is not None
        ]
        return b"".join(
            p.cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in parts if p.numel()
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: b for name, b in self._module._buffers.items() if b is not None}

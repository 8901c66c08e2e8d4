"""Notices when somebody computes with a parameter whose values are not on this device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import Any, SupportsIndex

import torch

from onefold.core.structure import tensors_of, with_tensors

__all__ = ["DEFERRED", "HARMLESS", "AccessHook", "Replace", "ResidentError", "deferred_of"]

DEFERRED = "onefold_undrawn"
"""Attribute of a parameter that has its `DeferredValues`."""


Replace = Callable[[torch.Tensor], torch.Tensor]


_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Properties of a tensor that show its values; all others are about it, or belong to it."""


_METHODS = (
    *("__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "numel", "size"),
    *("is_floating_point", "nelement", "register_hook", "requires_grad_"),
    *("register_post_accumulate_grad_hook",),
)


_PROPERTIES = {
    name: getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if isinstance(getattr(torch.Tensor, name), GetSetDescriptorType)
}


HARMLESS = frozenset(
    [
        *(found.__get__ for name, found in _PROPERTIES.items() if name not in _VALUES),
        *(_PROPERTIES[name].__set__ for name in ("data", "grad", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)
"""What does not read the values of a tensor."""


class ResidentError(RuntimeError):
    """A parameter was used that is not on this device, and cannot be brought now."""


class AccessHook:
    """Makes parameters say when they are used, while their values are elsewhere.

    They stay the very objects that they are; only their class is another one meanwhile, which
    derives from theirs.

    Args:
        used: called with all tensors that somebody is about to compute with, such a parameter
            among them; it brings the values, or raises an error, or returns by what to replace
            each tensor in this computation.
        harmless: functions that do not count as a use, beside those that never do.
        uses: functions that do count, of those.
    """

    def __init__(
        self,
        used: Callable[[Sequence[torch.Tensor]], Replace | None],
        *,
        harmless: Collection[object] = (),
        uses: Collection[object] = (),
    ) -> None:
        self._used = used
        self._harmless = HARMLESS.union(harmless).difference(uses)
        self._classes: dict[type, type] = {}
        self._plain: dict[type, type] = {}

    def hide(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Have parameters say when they are used from now on."""
        for parameter in parameters:
            kind = type(parameter)
            if kind in self._plain:
                continue
            if kind not in self._classes:
                self._classes[kind] = self._class_like(kind)
                self._plain[self._classes[kind]] = kind
            parameter.__class__ = self._classes[kind]

    def show(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Have parameters be plain ones again."""
        for parameter in parameters:
            parameter.__class__ = self._plain.get(type(parameter), type(parameter))

    def _class_like(self, kind: type) -> type:
        own = self

        def torch_function(
            cls: type,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            given = kwargs or {}
            if func not in own._harmless:
                replaced = own._used(list(tensors_of((args, given))))
                if replaced is not None:
                    return func(*with_tensors(args, replaced), **with_tensors(given, replaced))
            return kind.__torch_function__(func, types, args, given)  # type: ignore[attr-defined]

        # PyTorch's own copies ask for the class first, and for the values then.
        def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
            own._used([self])
            return kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]

        def reduce(self: torch.Tensor, protocol: SupportsIndex) -> Any:
            own._used([self])
            return kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg]

        members = {
            "__torch_function__": classmethod(torch_function),
            "__module__": kind.__module__,
            "__deepcopy__": deepcopy,
            "__reduce_ex__": reduce,
        }
        return type(kind.__name__, (kind,), members)


def deferred_of(parameter: torch.Tensor) -> Any:
    """Return the `DeferredValues` of a parameter; None for a plain parameter."""
    return getattr(parameter, DEFERRED, None)

"""Detects computations with parameters whose values are not on this device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import Any, SupportsIndex

import torch

from onefold.core.structure import tensors_of, with_tensors

__all__ = ["DEFERRED", "HARMLESS", "AccessHook", "Replace", "ResidentError", "deferred_of"]

DEFERRED = "onefold_undrawn"
"""Attribute of a parameter that holds its `DeferredValues`."""


Replace = Callable[[torch.Tensor], torch.Tensor]


_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Properties that return a tensor's values; all others are its metadata, or belong to it."""


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
"""Functions that do not read the values of a tensor."""


class ResidentError(RuntimeError):
    """A parameter was used that is not on this device and cannot be gathered now."""


class AccessHook:
    """Calls a function when parameters are used whose values are not on this device.

    Hidden parameters stay the same objects, but temporarily get a subclass of their class.

    Args:
        used: called before a computation, with all of its tensors, including a hidden parameter.
            It provides the values, raises an error, or returns a function that maps each tensor to
            its replacement in this computation.
        harmless: functions that do not count as a use, in addition to `HARMLESS`.
        uses: functions in these sets that do count as a use.
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
        """Detect uses of parameters from now on."""
        for parameter in parameters:
            kind = type(parameter)
            if kind in self._plain:
                continue
            if kind not in self._classes:
                self._classes[kind] = self._class_like(kind)
                self._plain[self._classes[kind]] = kind
            parameter.__class__ = self._classes[kind]

    def show(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make parameters plain again."""
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
            # `used` may make the parameter plain, or leave it and replace it in this call only.
            if func not in own._harmless:
                replaced = own._used(list(tensors_of((args, given))))
                if replaced is not None:
                    return func(*with_tensors(args, replaced), **with_tensors(given, replaced))
            return kind.__torch_function__(func, types, args, given)  # type: ignore[attr-defined]

        # PyTorch's own copy methods check the class before they read values: call `used` first.
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

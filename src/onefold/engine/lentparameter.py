"""Notices when somebody computes with a parameter that is not on this device.

`Lending` stands for devices that have all parameters, where nothing is brought.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import GetSetDescriptorType
from typing import Any, SupportsIndex

import torch

from onefold.core.head import Call
from onefold.engine.hollow import Reach, tensors_of, with_tensors
from onefold.engine.shardtask import ShardTask

__all__ = ["Elsewhere", "Function", "Lending", "LentParameters", "Replace", "is_harmless"]


Replace = Callable[[torch.Tensor], torch.Tensor]

_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Properties of a tensor that show its values; all others are about it, or belong to it."""
_METHODS = (
    "__len__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_floating_point",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
)
_PROPERTIES = {
    name: getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if isinstance(getattr(torch.Tensor, name), GetSetDescriptorType)
}
_HARMLESS = frozenset(
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


def is_harmless(function: object) -> bool:
    """Whether a function does not read the values of a tensor it is given."""
    return function in _HARMLESS


class Elsewhere(RuntimeError):
    """A parameter was used that is not on this device, and cannot be brought now."""


class LentParameters:
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
        self._harmless = _HARMLESS.union(harmless).difference(uses)
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


Function = Callable[[torch.nn.Module, Any], object]
"""Takes the model and one shard."""


class Lending:
    """The parameters of the model on devices that always have all of them."""

    is_whole = True
    """Whether this process has all parameters just now."""

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Those that this process does not always have, as `Storage.lent_layout` numbers them."""
        return ()

    def whole(self, *, look: bool = False) -> AbstractContextManager[None]:
        """A block in which this process has all parameters; called on all devices alike.

        Args:
            look: whether to look, when it ends, for what was written to trained parameters.

        Raises:
            StateError: parameters were written to, which is not kept.
        """
        return nullcontext()

    def stay_whole(self) -> None:
        """Have all parameters from here on; called on all devices alike."""

    def refuse_call(self, call: Call) -> None:
        """Refuse a call of the trainer where other devices wait for other things.

        Raises:
            RuntimeError: it was made while a shard is computed whose parameters are brought.
        """

    def rounds(self, task: ShardTask) -> AbstractContextManager[ShardTask]:
        """Surround the shards of a step, in which all devices take part in rounds.

        Yields:
            The task, which then has parameters brought while they are needed.
        """
        return nullcontext(task)

    def in_line(self, *, due: bool) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through a line of devices.

        Args:
            due: whether costly checks are due in this step.
        """
        return nullcontext()

    def on_the_way(self, reach: Reach) -> AbstractContextManager[None]:
        """Surround a shard on a device of a line, which has come so far in the loss."""
        return nullcontext()

    def passes(self, function: Function) -> AbstractContextManager[Function]:
        """Surround forward passes without a backward, of which each device has as many as it has.

        Yields:
            The function, which then has parameters brought while they are needed.
        """
        return nullcontext(function)

    def visit(self, stages: Iterable[int], look: Callable[[Sequence[int]], None]) -> None:
        """Have one stage after the other brought, to be read; called on all devices together.

        Args:
            stages: those that this device reads, which may be others than another one's.
            look: called while a stage is here, with the numbers of its parameters.
        """
        raise RuntimeError("this process has all parameters: expected them to be read at once")

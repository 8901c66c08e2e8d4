"""Makes models that lie in a file from the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from onefold.run.world import current_world
from onefold.system.heap import DiskHeap

__all__ = ["build"]

Given = ParamSpec("Given")
Model = TypeVar("Model")


def build(make: Callable[Given, Model], *args: Given.args, **kwargs: Given.kwargs) -> Model:
    """Make a model without having all of it in memory, where devices keep less than all of it.

    Under ``--keep span`` and ``--keep host`` PyTorch's functions that make tensors (``empty``,
    ``randn``, ``clone`` and the like) make those on the processor in a file meanwhile; the system
    keeps as much of it in memory as there is room. The bits are those of ``make(*args, **kwargs)``,
    which this is with ``--keep all``.

    Args:
        make: the class of a model, or a function that makes one.
        args: its arguments.
        kwargs: its arguments with names.

    Raises:
        OSError: there is no room for the file; ``--home`` names the folder in which it is.

    >>> onefold.build(torch.nn.Linear, 3, 2).weight.shape
    torch.Size([2, 3])
    """
    options = current_world().options
    if options.keep == "all":
        return make(*args, **kwargs)
    with _InFile(DiskHeap.at(options.home)):
        return make(*args, **kwargs)


class _InFile(TorchFunctionMode):
    """Has PyTorch's functions make their tensors in a file.

    They are moved before anybody else refers to them: later, views that a script has made would be
    of other memory than the parameter.

    Args:
        heap: the file.
    """

    def __init__(self, heap: DiskHeap) -> None:
        super().__init__()
        self._heap = heap

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func in _MAKING
            and isinstance(result, torch.Tensor)
            and result.device.type == "cpu"
            and result.layout == torch.strided
            and not _is_of(result, args)
        ):
            result.data = self._heap.kept(result.data)
        return result


def _is_of(result: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a conversion gave what it was given, or has to do nothing but name it anew."""
    address = result.untyped_storage().data_ptr()
    given = [each for each in args if isinstance(each, torch.Tensor)]
    return any(
        each.layout == torch.strided and each.untyped_storage().data_ptr() == address
        for each in given
    )


_MAKING = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.tensor),
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.normal),
        *(torch.empty_strided, torch.arange, torch.linspace, torch.cat, torch.stack, torch.clone),
        *(torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.new_empty),
        *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
        *(torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16),
    }
)
"""What makes tensors that nobody else refers to, unless they are among what it was given."""

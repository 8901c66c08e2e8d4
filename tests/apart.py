"""Devices with memory of their own on a machine without such: what is in a home's file is the
host's memory, and all else is the device's. Also called in launched processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.placement.partitioned import Offloaded
from onefold.system import file_memory
from onefold.system.allocator import TensorAllocator
from onefold.system.file_memory import MmapAllocator

__all__ = ["TwoMemories", "apart"]

COPIES = {"copy_", "_to_copy", "_foreach_copy_", "_local_scalar_dense"}
"""Operations that bring values from one memory to the other."""
WITHOUT_VALUES = {
    *("view", "as_strided", "alias", "detach", "slice", "_unsafe_view", "transpose", "permute"),
    *("view_as_real", "expand", "unsqueeze", "select", "t", "empty_like", "empty_strided"),
    *("new_empty", "new_empty_strided", "set_", "_reshape_alias", "split", "is_same_size"),
}


@contextmanager
def apart() -> Iterator[None]:
    """Have homes be made for devices with memory of their own, and take all tensors."""
    least, made = file_memory.LEAST_BYTES, Offloaded.allocator

    def home(placement: Offloaded) -> TensorAllocator:
        return MmapAllocator.at(placement.devices.context.options.offload_dir, apart=True)

    file_memory.LEAST_BYTES, Offloaded.allocator = 1, home  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        file_memory.LEAST_BYTES, Offloaded.allocator = least, made  # type: ignore[method-assign]


class _Moving(TorchFunctionMode):
    """Has ``.to(device)`` copy what lies in the home, as it does to a GPU."""

    def __init__(self, home: MmapAllocator) -> None:
        super().__init__()
        self._home = home

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        moves = any(isinstance(each, torch.device) for each in (*args, *(kwargs or {}).values()))
        if func is torch.Tensor.to and moves and result is args[0] and _is_in(result, self._home):
            return torch.empty_like(result, requires_grad=False).copy_(result.detach())
        return result


class TwoMemories(TorchDispatchMode):
    """Notes what a GPU would refuse, and what a processor would compute in other bits.

    Args:
        home: what has the host's memory.
    """

    def __init__(self, home: MmapAllocator) -> None:
        super().__init__()
        self._home = home
        self._moving = _Moving(home)
        self.mixed: set[str] = set()
        """Operations on tensors of both memories."""
        self.at_home: set[str] = set()
        """Operations that were computed on the host."""

    def __enter__(self) -> Any:
        self._moving.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._moving.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        # A tensor of one number may be on the host in any operation of a GPU.
        lying = {_is_in(t, self._home) for t in tensors if t.dim() and t.numel()}
        if len(lying) > 1 and name not in COPIES:
            self.mixed.add(name)
        if lying == {True} and name not in COPIES | WITHOUT_VALUES:
            self.at_home.add(name)
        return func(*args, **(kwargs or {}))


def _is_in(tensor: torch.Tensor, home: MmapAllocator) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() in home._live

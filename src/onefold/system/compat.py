"""All of PyTorch's private names that onefold uses, in one place.

``internals.py`` has those about modules, optimizers, kernels and the compiler. Any of them may
disappear with the next release of PyTorch. ``tests/system/test_compat.py`` shows for each name what
would break, and fails first.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY_SUFFIX
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EXTRA_STATE_KEY_SUFFIX",
    "BatchNorm",
    "CallModes",
    "FakeTensor",
    "FakeTensorMode",
    "Groups",
    "TorchDispatchMode",
    "add_each",
    "address_of",
    "copy_each",
    "hidden_from_classes",
    "hidden_from_modes",
    "holders_of",
    "is_in_function",
    "is_transformed",
    "limit_each",
    "multiply_each",
    "replacing_truncated_normal",
    "version_of",
    "writes_to_arguments",
]

_C: Any = torch._C

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Number of in-place writes to a tensor."""


address_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that is unique among existing storages, even on the meta device."""


writes_to_arguments: Callable[[Any], bool] = operator.attrgetter("_schema.is_mutable")
"""Whether an operation of the dispatcher writes to any of its arguments."""


hidden_from_classes: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass
"""A block in which tensor subclasses do not intercept calls."""


class CallModes(AbstractContextManager[None]):
    """Leaves all modes that this thread entered since this was made, and that intercept calls.

    An exception from a signal handler may cut short the ``__exit__`` of a mode.
    """

    inference: Callable[[bool], AbstractContextManager[None]] = _C._InferenceMode
    """A block with or without inference mode, which has no ``__exit__`` to cut short."""

    def __init__(self) -> None:
        self._functions, self._calls = (
            _C._len_torch_function_stack(),
            _C._len_torch_dispatch_stack(),
        )

    def __exit__(self, *_: object) -> None:
        while _C._len_torch_function_stack() > self._functions:
            _C._pop_torch_function_stack()
        while _C._len_torch_dispatch_stack() > self._calls:
            _C._pop_torch_dispatch_stack(None)


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Hide calls inside the block from modes and tensor subclasses."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        yield


@contextmanager
def replacing_truncated_normal(record: Callable[..., Any]) -> Iterator[None]:
    """Make ``torch.nn.init.trunc_normal_`` call another function inside the block.

    Args:
        record: is called with the original function and its arguments, a tensor first.
    """
    before = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(record, before)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


def holders_of(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors that use a storage."""
    # Each Python object of a storage counts as well, and the argument here is one.
    return int(_C._storage_Use_Count(address_of(storage))) - 1


is_transformed: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a call of torch.vmap, or of a function of torch.func."""


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy each source (second argument) to its target (first), in as few kernels as possible."""


add_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
"""Add to each tensor of the first argument, in place, in as few kernels as possible."""


Factor = float | list[float] | torch.Tensor
multiply_each: Callable[[list[torch.Tensor], Factor], None] = torch._foreach_mul_
"""Multiply all tensors of the first argument by one number, or each by its own, in as few kernels
as possible."""


def limit_each(tensors: list[torch.Tensor], magnitude: float) -> None:
    """Limit each element of all tensors, in place, in as few kernels as possible."""
    torch._foreach_clamp_min_(tensors, -magnitude)
    torch._foreach_clamp_max_(tensors, magnitude)


class Groups:
    """PyTorch's private functions for process groups."""

    @staticmethod
    def default_store() -> Any:
        """Return the `torch.distributed.Store` of the script's default process group."""
        return torch.distributed.distributed_c10d._get_default_store()

    @staticmethod
    def beside_default(
        backend: str,
        store: Any,
        *,
        rank: int,
        size: int,
        limit: timedelta,
        device: torch.device | None,
    ) -> torch.distributed.ProcessGroup:
        """Create a group of all processes that does not need, or become, the default group.

        PyTorch creates further groups only if there is a default group. This group is registered
        nowhere, so that a script may create and destroy the default group at any time.

        Args:
            backend: as for `torch.distributed.init_process_group`.
            store: store for the rendezvous of this group only.
            rank: rank of this process.
            size: number of processes.
            limit: timeout of the group's operations.
            device: GPU to which the group is bound.
        """
        inner: Any = torch.distributed.distributed_c10d
        world = inner._world
        group, _ = inner._new_process_group_helper(
            size,
            rank,
            [],
            torch.distributed.Backend(backend),
            store,
            group_name="onefold",
            timeout=limit,
            device_id=device,
        )
        for table in (world.pg_map, world.pg_names, world.pg_backend_config):
            del table[group]
        for tag in {"", world.pg_to_tag.pop(group)}:
            if group in world.tags_to_pg.get(tag, ()):
                world.tags_to_pg[tag].remove(group)
        inner._unregister_process_group(group.group_name)
        Groups.adopt(group, size)
        found: torch.distributed.ProcessGroup = group
        return found

    @staticmethod
    def adopt(group: torch.distributed.ProcessGroup, size: int) -> None:
        """Register the ranks of a group, so that point-to-point messages work in it."""
        ranks: Any = torch.distributed.distributed_c10d._world.pg_group_ranks
        ranks[group] = {number: number for number in range(size)}

    @staticmethod
    def forget(group: torch.distributed.ProcessGroup) -> None:
        """Undo `adopt`."""
        ranks: Any = torch.distributed.distributed_c10d._world.pg_group_ranks
        ranks.pop(group, None)

    @staticmethod
    def end(group: torch.distributed.ProcessGroup) -> None:
        """Shut down a group that `beside_default` created."""
        Groups.forget(group)
        group.shutdown()

    @staticmethod
    def set_limit(group: torch.distributed.ProcessGroup, limit: timedelta) -> None:
        """Change the timeout of operations that start from now on."""
        torch.distributed.distributed_c10d._set_pg_timeout(limit, group)


def is_in_function() -> bool:
    """Whether the caller runs inside the forward of a torch.autograd.Function."""
    # Such a forward disables forward-mode derivatives, but torch.no_grad does not.
    return not _C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()

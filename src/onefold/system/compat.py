"""Every private name of PyTorch that onefold uses all the same, in one place.

Those about modules, optimizers, kernels and the compiler are next door, in ``internals.py``.
Any of them may disappear with the next release of PyTorch. ``tests/system/test_compat.py`` says for
each what would break, and is the first to fail.
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
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY_SUFFIX
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EXTRA_STATE_KEY_SUFFIX",
    "BatchNorm",
    "DropoutNd",
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
"""The number of times that a tensor was written to in place."""


address_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that is another one for every storage that there is, also on the meta device."""


writes_to_arguments: Callable[[Any], bool] = operator.attrgetter("_schema.is_mutable")
"""Whether an operation of the dispatcher writes to any of its arguments."""


hidden_from_classes: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass
"""A block in which classes of tensors see nothing of what is called."""


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Have modes, and classes of tensors, see nothing of what is called inside this context."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        yield


@contextmanager
def replacing_truncated_normal(record: Callable[..., Any]) -> Iterator[None]:
    """Have ``torch.nn.init.trunc_normal_`` call something else inside this context.

    Args:
        record: is given what draws otherwise, and its arguments, a tensor first.
    """
    before = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(record, before)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


def holders_of(storage: torch.UntypedStorage) -> int:
    """How many tensors there are that lie in a storage."""
    # Each of Python's own objects for a storage counts as well, and here there is this one.
    return int(_C._storage_Use_Count(address_of(storage))) - 1


is_transformed: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a call of torch.vmap, or of a function of torch.func."""


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy each source to its target, the first argument, in as few kernels as possible."""


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
    """What torch.distributed keeps to itself about process groups."""

    @staticmethod
    def default_store() -> Any:
        """The `torch.distributed.Store` behind the process group that a script has formed."""
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
        """Make a group of all processes that is not the default one, which there may not be.

        PyTorch makes others beside a default group alone. It is known nowhere but to who has it, so
        that a script may make and destroy the default group as it likes.

        Args:
            backend: as for `torch.distributed.init_process_group`.
            store: where the processes find each other, for this group alone.
            rank: of this process.
            size: how many there are.
            limit: the longest that anything waits in it.
            device: the GPU that it is bound to.
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
        """Have messages between two processes of a group find them, whoever has made it."""
        ranks: Any = torch.distributed.distributed_c10d._world.pg_group_ranks
        ranks[group] = {number: number for number in range(size)}

    @staticmethod
    def forget(group: torch.distributed.ProcessGroup) -> None:
        """Undo `adopt`."""
        ranks: Any = torch.distributed.distributed_c10d._world.pg_group_ranks
        ranks.pop(group, None)

    @staticmethod
    def end(group: torch.distributed.ProcessGroup) -> None:
        """Tear a group down that `beside_default` has made."""
        Groups.forget(group)
        group.shutdown()

    @staticmethod
    def set_limit(group: torch.distributed.ProcessGroup, limit: timedelta) -> None:
        """Change how long whatever begins from now on may wait for other processes."""
        torch.distributed.distributed_c10d._set_pg_timeout(limit, group)


def is_in_function() -> bool:
    """Whether the caller is called by the forward of a torch.autograd.Function."""
    # Such a forward has forward-mode derivatives switched off, as torch.no_grad has not.
    return not _C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()

"""Watches what a shard computes, operation by operation, and finds the one where it goes wrong.

Note: what is watched
---------------------
Operations are seen below autograd, so those of backward are seen as well. PyTorch numbers the nodes
of its graph in the order of the forward pass. So an operation of backward is known by the operation
of forward that it belongs to: it has the module and the line of that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from msgspec import Struct
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.core.flat import fingerprint_of, tensor_digests
from onefold.system.words import script_line

__all__ = ["OperationWatch", "ShardOperation", "bits_digest", "first_larger", "first_not_finite"]

_WITHOUT_VALUES = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty")}
"""Operations whose results are whatever was in memory."""
_FAR = 100.0
"""How many times as large as elsewhere a result is that stands out."""


class ShardOperation(Struct, frozen=True):
    """One operation of a shard."""

    name: str
    """As PyTorch calls it, such as ``aten.addmm``."""
    phase: str
    """``forward`` or ``backward``."""
    module: str
    """Name of the innermost module that was at work; empty outside of all of them."""
    line: str
    """The line of the script, or of the library that it uses, that asked for it."""
    largest: float | None
    """The largest absolute value of its results; None where one is not finite."""
    spoils: bool
    """Whether a result is not finite, and everything that it was computed from is."""
    digest: str
    """Of its results; empty where none was asked for."""

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        return f"{self.phase}, {self.name}{inside} ({self.line})"


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation with floating-point results.

    Args:
        module: the model.
        digests: whether results are digested.

    >>> layer = torch.nn.Linear(2, 1)
    >>> watch = OperationWatch(layer)
    >>> inputs = torch.ones(3, 2)
    >>> with watch.watching():
    ...     layer(inputs).sum().backward()
    >>> [each.name for each in watch.operations if each.phase == "forward"]
    ['aten.t', 'aten.addmm', 'aten.sum', 'aten.ones_like']
    """

    def __init__(self, module: torch.nn.Module, *, digests: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[ShardOperation] = []
        """In the order in which they were computed."""
        self._module, self._digests = module, digests
        self._inside: list[str] = []
        self._of_node: dict[int, tuple[str, str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside this block; all that the model computes is seen, compiled code is not."""
        hooks = []
        for name, part in self._module.named_modules():
            enter, leave = self._entering(name), self._leaving
            hooks += [
                part.register_forward_pre_hook(enter, prepend=True),
                part.register_forward_hook(leave, always_call=True),
            ]
        try:
            with torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda module, inputs: self._inside.append(name)

    def _leaving(self, module: torch.nn.Module, inputs: object, result: object) -> None:
        self._inside.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        scalar = func is torch.ops.aten._local_scalar_dense.default
        if scalar and not isinstance(args[0], torch.Tensor):
            return args[0]  # a Python number that was a tensor on its way here
        # Before it runs, as it may write to what it is given.
        given = all(map(_is_finite, tree_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        name = str(func._overloadpacket)
        found = [each for each in tree_leaves(result) if _has_floats(each)]
        if found and name not in _WITHOUT_VALUES:
            self._note(name, found, given=given)
        return result

    def _note(self, name: str, found: Sequence[torch.Tensor], *, given: bool) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            # The node of an operation is made before the operation runs.
            place = self._inside[-1] if self._inside else "", script_line()
            # One that makes no node comes after that of another operation.
            self._of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        else:
            place = self._of_node.get(node._sequence_nr(), ("", ""))
        finite = all(map(_is_finite, found))
        largest = max((float(each.abs().max()) for each in found if each.numel()), default=0.0)
        self.operations.append(
            ShardOperation(
                name,
                "forward" if node is None else "backward",
                *place,
                largest=largest if finite else None,
                spoils=given and not finite,
                digest=bits_digest(found) if self._digests else "",
            )
        )


def first_not_finite(
    operations: Sequence[ShardOperation], sound: Sequence[Sequence[ShardOperation]]
) -> ShardOperation | None:
    """The first operation that turns finite numbers into others, and does so in no sound shard."""
    usual = {
        (place, each.name) for other in sound for place, each in enumerate(other) if each.spoils
    }
    for place, operation in enumerate(operations):
        if operation.spoils and (place, operation.name) not in usual:
            return operation
    return None


def first_larger(
    operations: Sequence[ShardOperation], others: Sequence[Sequence[ShardOperation]]
) -> tuple[ShardOperation, float] | None:
    """The first operation whose results are far larger than those of the same one elsewhere.

    Args:
        operations: of the shard that stands out.
        others: of other shards of the same step.

    Returns:
        The operation, and how many times as large its result is as the median of the others.
    """
    same = [each for each in others if [o.name for o in each] == [o.name for o in operations]]
    for place, operation in enumerate(operations if same else ()):
        known = [each[place].largest for each in same]
        usual = median(each for each in known if each is not None) if any(known) else 0.0
        if usual and operation.largest is not None and operation.largest > _FAR * usual:
            return operation, operation.largest / usual
    return None


def _has_floats(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return not (isinstance(value, torch.Tensor) and _has_floats(value)) or bool(
        value.isfinite().all()
    )


def bits_digest(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of dtypes, shapes and all bits of some tensors, as 16 hexadecimal digits."""
    return fingerprint_of(tensor_digests({str(n): each for n, each in enumerate(tensors)}))

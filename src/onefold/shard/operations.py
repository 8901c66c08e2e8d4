"""Records the operations of a shard, and finds the one that first computes a wrong result.

Note: forward and backward operations
-------------------------------------
The dispatch mode runs below autograd, so it also sees the operations of backward. PyTorch numbers
the nodes of its graph in the order of the forward pass. A backward operation is therefore
attributed to the module and the script line of the forward operation with the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from msgspec import Struct
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.core.flat import fingerprint_of, tensor_digests
from onefold.system.words import script_line

__all__ = ["OperationWatch", "ShardOperation", "bits_digest", "first_larger", "first_not_finite"]

_WITHOUT_VALUES = "empty"
"""Word in the names of operations that return uninitialized memory, whose values mean nothing."""
_FAR = 100.0
"""Factor by which a result must exceed the results of other shards to stand out."""


class ShardOperation(Struct, frozen=True):
    """One operation of a shard."""

    name: str
    """PyTorch's name, such as ``aten.addmm``."""
    phase: str
    """``forward`` or ``backward``."""
    module: str
    """Name of the innermost module that was running; empty outside of all modules."""
    line: str
    """Line of the script, or else of a library, that called the operation."""
    largest: float | None
    """Largest absolute value of the results; None if any value is not finite."""
    spoils: bool
    """Whether a result is not finite although all inputs are finite."""
    digest: str
    """Digest of the results; empty if not requested."""

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        return f"{self.phase}, {self.name}{inside} ({self.line})"


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation with floating-point results.

    Args:
        module: the model.
        digests: whether to compute digests of the results.

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
        """Recorded operations, in the order of computation."""
        self._module, self._digests = module, digests
        self._inside: list[str] = []
        self._of_node: dict[int, tuple[str, str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record all operations of the model inside this block. Compiled code runs eagerly."""
        with ExitStack() as hooks:
            for name, part in self._module.named_modules():
                enter, leave = self._entering(name), self._leaving
                hooks.enter_context(part.register_forward_pre_hook(enter, prepend=True))
                # `always_call`: an exception in forward must not leave the name on the stack.
                hooks.enter_context(part.register_forward_hook(leave, always_call=True))
            # Run eagerly: the dispatch mode does not see the operations of compiled code.
            with torch.compiler.set_stance("force_eager"), self:
                yield

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
        # PyTorch may turn the tensor of `item()` into a Python number before the call reaches us.
        scalar = func is torch.ops.aten._local_scalar_dense.default
        if scalar and not isinstance(args[0], torch.Tensor):
            return args[0]
        # Check the inputs before the operation runs, because it may write to them.
        given = all(map(_is_finite, tree_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        name = str(func._overloadpacket)
        found = [each for each in tree_leaves(result) if _has_floats(each)]
        if found and _WITHOUT_VALUES not in name.rpartition(".")[2].split("_"):
            self._note(name, found, given=given)
        return result

    def _note(self, name: str, found: Sequence[torch.Tensor], *, given: bool) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            # The graph node of a forward operation is created before the operation runs.
            place = self._inside[-1] if self._inside else "", script_line()
            # Keep the first place: an operation without a node would reuse the latest number.
            self._of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        else:
            place = self._of_node.get(node._sequence_nr(), ("", ""))
        finite = all(map(_is_finite, found))
        # Skip empty tensors: their `max` raises.
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
    """Return the first operation that spoils finite inputs here but in no ``sound`` shard."""
    # Some operations produce infinities by design, such as masks. Those do so in every shard.
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
    """Return the first operation whose results far exceed those of the same operation elsewhere.

    Args:
        operations: operations of the suspect shard.
        others: operations of other shards of the same step.

    Returns:
        The operation, and the ratio of its result to the median of the others.
    """
    # Compare only shards that ran the same sequence: positions then mean the same operation.
    same = [each for each in others if [o.name for o in each] == [o.name for o in operations]]
    for place, operation in enumerate(operations if same else ()):
        known = [each[place].largest for each in same]
        # `median` raises if the list is empty, that is, if no result elsewhere is finite.
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
    """Return a digest of the tensors' dtypes, shapes and bits, as 16 hexadecimal digits."""
    return fingerprint_of(tensor_digests({str(n): each for n, each in enumerate(tensors)}))

"""Detects state that shards leave on objects, which therefore differs between devices.

`HeldState` compares parameters, modules and metric objects before and after the shards of a step.
State that a shard leaves there is not part of a result: it is not combined over devices, and no
checkpoint contains it. `LeftState` refuses or reports it.

Note: refused and reported state
--------------------------------
Modules keep tensors for many good reasons (attention weights, caches), and each shard writes its
own. So a tensor that replaced another one is refused only if `trainer.modifying` reads it. Three
kinds of state have no other use than being read later, and are refused immediately: tensors on a
parameter (per-sample gradients) or in an optimizer that has hooks, a change of a metric object, and
a single number that is changed in place. All other state that grows in three consecutive checks is
reported once.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from onefold.errors import StateError
from onefold.system.compat import version_of
from onefold.system.internals import hook_owners

__all__ = [
    "LEFT_READ",
    "NEW_GENERATOR",
    "OF_TORCH",
    "HeldState",
    "LeftState",
    "is_metric",
    "refuse_parameters",
]

_log = logging.getLogger("onefold")

OF_TORCH = {*vars(torch.nn.Module()), "_is_full_backward_hook", "_compiled_call_impl"}
"""Attributes of every module."""
_COMPILER = "_dynamo_"
"""Prefix of the attributes that PyTorch's compiler sets."""
_RESULTS = ("compute", "value", "avg", "average", "global_avg")
_MOST = 64
"""Maximum size of a container that is searched, and of a tensor whose values are compared."""
_CERTAIN = 3
"""Number of consecutive checks in which state grows before it is reported."""
Kind = Literal["parameter", "module", "metric"]
Owner = tuple[Kind, str, Any]
"""Kind of the object, its name in messages, and the object."""
_RETURN = (
    "return it with the loss (`return loss, {'accuracy': ...}`), so that Step.values has its value "
    "for the whole batch; or compute it with trainer.evaluate or trainer.predict"
)
_LEFT: dict[Kind, str] = {
    "parameter": "Each device would have values of its own shards there, such as per-sample "
    "gradients, so an update based on them would depend on the number of devices. onefold has "
    "one gradient for all samples, in .grad, and does not support differential privacy (Opacus). "
    "Compute per-sample results in the loss, and return them as values",
    "metric": "It is not combined over devices: it covers only this device's shards, and a "
    f"resumed run starts from scratch. Instead {_RETURN}",
}
_LEFT["module"] = _LEFT["metric"]
LEFT_READ = (
    "is read in `with trainer.modifying():`, but holds the state left by this device's last shard, "
    "which differs between devices. Use .grad, which covers the whole batch; for anything else "
    f"from the forward pass, {_RETURN}"
)
"""The end of a sentence that begins with the name of a tensor."""

NEW_GENERATOR = (
    "the loss or the model created a random generator inside a shard and keeps it, so each device "
    "would draw different numbers. Create it before the first step, so that onefold seeds it for "
    "each shard"
)


def _words_of_left(where: str, place: str, kind: Kind) -> str:
    """Explain why state that shards leave on an object is refused.

    Args:
        where: step or batch.
        place: the attribute and its object.
        kind: kind of the object.
    """
    return f"{where}: the shards changed {place}. {_LEFT[kind]}"


def is_metric(value: object) -> bool:
    """Whether an object accumulates over calls: torchmetrics, torcheval, an AverageMeter.

    >>> is_metric(torch.nn.Linear(1, 1)), is_metric({})
    (False, False)
    """
    adds = all(callable(getattr(type(value), name, None)) for name in ("update", "reset"))
    return adds and any(hasattr(value, name) for name in _RESULTS) and hasattr(value, "__dict__")


class Left(NamedTuple):
    """State that changed while shards ran."""

    kind: Kind
    place: str
    grows: bool
    """Whether the tensor was changed in place, or the container or number became larger."""
    tensors: tuple[torch.Tensor, ...]


class HeldState:
    """A snapshot of the attributes of objects, to compare with their later values.

    Args:
        owners: the objects.
    """

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._held = [(*owner, _seen(vars(owner[2]))) for owner in owners]

    def changed(self) -> Iterator[Left]:
        """Yield the state that changed since the snapshot."""
        for kind, owner, value, before in self._held:
            for path, now in _values(vars(value)):
                if (found := _change(before.get(path), now)) is not None:
                    name = path.partition("[")[0]
                    place = owner if kind == "metric" else f"{name} of {owner}"
                    yield Left(kind, place, *found)


def _values(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of attributes, and of the elements of containers."""
    for name, value in list(attributes.items()):
        if name in OF_TORCH or name.startswith(_COMPILER):
            continue
        yield name, value
        if isinstance(value, list | tuple | dict) and len(value) <= _MOST:
            parts = value.values() if isinstance(value, dict) else value
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(parts))


def _seen(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {path: _noted(value) for path, value in _values(attributes)}


def _noted(value: Any) -> Any:
    """Return a value's snapshot. A shard may replace a tensor, so keep only a weak reference."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value), version_of(value), _bytes(value)
    return len(value) if isinstance(value, list | dict) else value if _is_number(value) else None


def _bytes(value: torch.Tensor) -> object:
    # Compare values if possible, because a change through .data does not increase the version.
    # On a GPU, reading them would block.
    few = value.numel() <= _MOST and value.device.type == "cpu" and value.layout is torch.strided
    return repr(value.detach().tolist()) if few else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _change(before: Any, now: Any) -> tuple[bool, tuple[torch.Tensor, ...]] | None:
    """Return whether a value grew, and its tensor; None if it did not change."""
    if isinstance(now, torch.Tensor):
        if isinstance(now, torch.nn.Parameter):
            return None
        if not isinstance(before, tuple) or before[0]() is not now:
            return False, (now,)
        _, version, was = before
        # Writing the same values again is not a change. If the values are unknown (large tensors,
        # GPUs), any write counts.
        same = version == version_of(now) if was is None else was == _bytes(now)
        return None if same else (True, (now,))
    now = len(now) if isinstance(now, list | dict) else now
    known = _is_number(now) and _is_number(before)
    return (True, ()) if known and now > before else None


class LeftState:
    """State that the shards of a run leave on objects.

    Args:
        alone: whether each step has one shard, whose state is lost only on resume.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._grown: Counter[str] = Counter()
        self.tensors: list[tuple[weakref.ref[torch.Tensor], str]] = []
        """Tensors that shards put on modules in the last check, and their places."""

    @contextmanager
    def judging(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        models: Iterable[torch.nn.Module],
        values: Iterable[Any],
        where: str,
    ) -> Iterator[None]:
        """Refuse or report state that shards leave inside this context.

        Args:
            parameters: parameters of the model, with their names.
            models: the model, and modules that a loss or metric function can reach.
            values: other objects that it can reach.
            where: step or batch, for errors.
        """
        held = HeldState([*_owners(parameters, models, values)])
        yield
        self.judge(held, where)

    def judge(self, held: HeldState, where: str) -> None:
        """Refuse or report state that changed since ``held``.

        Args:
            held: the state before the shards.
            where: step or batch, for errors.

        Raises:
            StateError: the changed state has no other use than being read later.
        """
        self.tensors, grown = [], set()
        for left in held.changed():
            # With one shard, such state covers the whole batch, and each step replaces it.
            replaced = left.kind == "parameter" or (left.kind == "module" and not left.grows)
            if self._alone and replaced:
                continue
            # A single number changed in place is a counter or a running sum.
            counts = left.grows and [tensor.numel() for tensor in left.tensors] == [1]
            if left.kind != "module" or counts:
                raise StateError(_words_of_left(where, left.place, left.kind))
            self.tensors += [(weakref.ref(tensor), left.place) for tensor in left.tensors]
            grown |= {left.place} if left.grows else set()
        # A place that did not grow in this check starts again from 0.
        self._grown = Counter({place: self._grown[place] + 1 for place in grown})
        for place in sorted(p for p, times in self._grown.items() if times == _CERTAIN):
            _log.warning("%s", _words_of_left(where, place, "module"))


def _owners(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    models: Iterable[torch.nn.Module],
    values: Iterable[Any],
) -> Iterator[Owner]:
    for name, parameter in parameters:
        yield "parameter", f"parameter {name}", parameter
    found = {id(value): value for value in values}
    # Key by identity, because classes may define their own hash.
    parts = {
        id(part): pair for model in models for pair in model.named_modules() for part in pair[1:]
    }
    for name, part in parts.values():
        kind: Kind = "metric" if is_metric(part) else "module"
        own = type(part).__name__
        yield kind, f"module {name} ({own})" if name else f"the {own}", part
        kept = [value for name, value in vars(part).items() if name not in OF_TORCH]
        found |= {id(value): value for value in (*kept, *hook_owners(part))}
    for value in found.values():
        # State that an optimizer collects in forward and backward passes is for its update.
        kind = "parameter" if isinstance(value, torch.optim.Optimizer) else "metric"
        if (is_metric(value) or kind != "metric") and not isinstance(value, torch.nn.Module):
            yield kind, f"the {type(value).__name__}", value


def refuse_parameters(named: Iterable[tuple[str, torch.nn.Parameter]], where: str) -> None:
    """Refuse parameters with attributes, if no parameter had any before the shards.

    Raises:
        StateError: a parameter has an attribute that PyTorch's compiler did not set.
    """
    for name, parameter in named:
        for attribute in vars(parameter):
            if attribute.startswith(_COMPILER):
                continue
            place = f"{attribute} of parameter {name}"
            raise StateError(_words_of_left(where, place, "parameter"))

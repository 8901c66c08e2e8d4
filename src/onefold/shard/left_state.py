"""Finds state that shards leave on objects, of which each device has that of its own shards alone.

`HeldState` looks at parameters, modules and metric objects before the shards of a step and after
them. What a shard leaves there is no result: nothing adds it up over devices, and no checkpoint has
it. `LeftState` decides what becomes of it.

Note: what is certain
---------------------
Modules keep tensors for many good reasons (attention weights, caches), and each shard writes its
own. So a tensor that took the place of another one is refused only if `trainer.modifying` reads it.
Three things have no other use than to be read later, and are refused at once: tensors on a
parameter (gradients of each sample) or in an optimizer that has hooks, a change of a metric object,
and a single number that is changed in place. What else grows in three checks one after the other is
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

from onefold.core.late import load
from onefold.errors import StateError
from onefold.system.compat import version_of
from onefold.system.internals import hook_owners

__all__ = ["OF_TORCH", "HeldState", "LeftState", "is_metric", "refuse_parameters"]

_log = logging.getLogger("onefold")

OF_TORCH = {*vars(torch.nn.Module()), "_is_full_backward_hook", "_compiled_call_impl"}
"""Attributes of every module."""
_COMPILER = "_dynamo_"
"""How attributes begin that PyTorch's compiler sets."""
_RESULTS = ("compute", "value", "avg", "average", "global_avg")
_MOST = 64
"""Parts of a container, and elements of a tensor, that are looked at."""
_CERTAIN = 3
Kind = Literal["parameter", "module", "metric"]
Owner = tuple[Kind, str, Any]
"""Of what kind it is, what it is called, and the object."""


def is_metric(value: object) -> bool:
    """Whether an object adds something up by calls: torchmetrics, torcheval, an AverageMeter.

    >>> is_metric(torch.nn.Linear(1, 1)), is_metric({})
    (False, False)
    """
    adds = all(callable(getattr(type(value), name, None)) for name in ("update", "reset"))
    return adds and any(hasattr(value, name) for name in _RESULTS) and hasattr(value, "__dict__")


class Left(NamedTuple):
    """Something that was changed while shards ran."""

    kind: Kind
    place: str
    grows: bool
    """Whether it was added to: it is the same tensor, a longer container, or a larger number."""
    tensors: tuple[torch.Tensor, ...]


class HeldState:
    """What some objects hold now, to be compared with what they hold later.

    Args:
        owners: the objects.
    """

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._held = [(*owner, _seen(vars(owner[2]))) for owner in owners]

    def changed(self) -> Iterator[Left]:
        """Yield what was changed since then."""
        for kind, owner, value, before in self._held:
            for path, now in _values(vars(value)):
                if (found := _change(before.get(path), now)) is not None:
                    name = path.partition("[")[0]
                    place = owner if kind == "metric" else f"{name} of {owner}"
                    yield Left(kind, place, *found)


def _values(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield attributes, and what is in those that are containers, by their paths."""
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
    """Note a value: its tensor by a weak reference, as a shard may be about to replace it."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value), version_of(value), _bytes(value)
    return len(value) if isinstance(value, list | dict) else value if _is_number(value) else None


def _bytes(value: torch.Tensor) -> object:
    # Reading would wait for a GPU, and what is changed through .data is not counted.
    few = value.numel() <= _MOST and value.device.type == "cpu" and value.layout is torch.strided
    return repr(value.detach().tolist()) if few else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _change(before: Any, now: Any) -> tuple[bool, tuple[torch.Tensor, ...]] | None:
    """Return whether a value grew, and its tensor; None if it was not changed."""
    if isinstance(now, torch.Tensor):
        if isinstance(now, torch.nn.Parameter):
            return None
        if not isinstance(before, tuple) or before[0]() is not now:
            return False, (now,)
        _, version, was = before
        # A value that was written again is no change; of large ones and on a GPU none is known.
        same = version == version_of(now) if was is None else was == _bytes(now)
        return None if same else (True, (now,))
    now = len(now) if isinstance(now, list | dict) else now
    known = _is_number(now) and _is_number(before)
    return (True, ()) if known and now > before else None


class LeftState:
    """What the shards of a run have left on objects.

    Args:
        alone: whether each step has one shard, whose state only a resume loses.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._grown: Counter[str] = Counter()
        self.tensors: list[tuple[weakref.ref[torch.Tensor], str]] = []
        """Those that shards have put on modules in the last check, and where."""

    @contextmanager
    def judging(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        models: Iterable[torch.nn.Module],
        values: Iterable[Any],
        where: str,
    ) -> Iterator[None]:
        """Judge what shards leave inside this context.

        Args:
            parameters: of the model, with their names.
            models: the model, and modules that a loss or score can reach.
            values: what else it can reach.
            where: step or batch, for errors.
        """
        held = HeldState([*_owners(parameters, models, values)])
        yield
        self.judge(held, where)

    def judge(self, held: HeldState, where: str) -> None:
        """Refuse or report what was changed since ``held``.

        Args:
            held: the state before the shards.
            where: step or batch, for errors.

        Raises:
            StateError: something was changed that is of no use but to be read later.
        """
        self.tensors, grown = [], set()
        for left in held.changed():
            # With one shard it covers the whole batch, and each step replaces it.
            replaced = left.kind == "parameter" or (left.kind == "module" and not left.grows)
            if self._alone and replaced:
                continue
            counts = left.grows and [tensor.numel() for tensor in left.tensors] == [1]
            if left.kind != "module" or counts:
                raise StateError(load("shard.advice").words_of_left(where, left.place, left.kind))
            self.tensors += [(weakref.ref(tensor), left.place) for tensor in left.tensors]
            grown |= {left.place} if left.grows else set()
        self._grown = Counter({place: self._grown[place] + 1 for place in grown})
        for place in sorted(p for p, times in self._grown.items() if times == _CERTAIN):
            _log.warning("%s", load("shard.advice").words_of_left(where, place, "module"))


def _owners(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    models: Iterable[torch.nn.Module],
    values: Iterable[Any],
) -> Iterator[Owner]:
    for name, parameter in parameters:
        yield "parameter", f"parameter {name}", parameter
    found = {id(value): value for value in values}
    # By identity: some have a hash of their own.
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
        # What an optimizer has of forward and backward passes is for its update.
        kind = "parameter" if isinstance(value, torch.optim.Optimizer) else "metric"
        if (is_metric(value) or kind != "metric") and not isinstance(value, torch.nn.Module):
            yield kind, f"the {type(value).__name__}", value


def refuse_parameters(named: Iterable[tuple[str, torch.nn.Parameter]], where: str) -> None:
    """Refuse parameters on which shards have left something, where there was nothing before.

    Raises:
        StateError: a parameter has an attribute.
    """
    for name, parameter in named:
        for attribute in vars(parameter):
            if attribute.startswith(_COMPILER):
                continue
            place = f"{attribute} of parameter {name}"
            raise StateError(load("shard.advice").words_of_left(where, place, "parameter"))

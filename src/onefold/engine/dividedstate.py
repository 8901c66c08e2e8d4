"""What a script sees of an optimizer's state that is divided among devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from onefold.engine.optimizers import optimizers_in

__all__ = ["DividedState", "StateView"]

Optimizer = torch.optim.Optimizer
State = MutableMapping[Any, Any]


class DividedState(MutableMapping[Any, Any]):
    """Refuses to be asked for a parameter's state, rather than to have none.

    Args:
        optimizer: whose state it is.
        kept: the state by piece; what it has under other keys than tensors is whole.
        why: why there is no way to see it whole; empty if there is one.
    """

    def __init__(self, optimizer: Optimizer, kept: State, why: str = "") -> None:
        self._optimizer, self._kept, self._why = optimizer, kept, why

    def _error(self) -> RuntimeError:
        way = self._why or (
            "look it up, and call methods of the optimizer that do (train() and eval(), a swap of "
            "averages), in `with trainer.changing(optimizer_state=True):`, on every device"
        )
        name = type(self._optimizer).__name__
        return RuntimeError(
            f"the state of {name} was looked up where it is divided: it lies in pieces, with the "
            f"devices that update them. Expected that of whole parameters: {way}"
        )

    def _of(self, key: Any) -> State:
        if isinstance(key, torch.Tensor):
            raise self._error()
        return self._kept

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        raise self._error()

    def __len__(self) -> int:
        raise self._error()

    def clear(self) -> None:
        """Begin anew, which needs to know nothing of what there was."""
        self._optimizer.state = defaultdict(dict)


class StateView:
    """Decides what the ``state`` of the user's optimizers is at any time.

    Args:
        optimizer: the user's own, or several as one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        each = list(optimizers_in(optimizer).values())
        parts = [part for one in each for part in vars(one).values() if isinstance(part, Optimizer)]
        self.kept: State = optimizer.state
        """The state by piece, which the optimizers see while they step."""
        self._all: list[tuple[Any, State]] = [
            (one, one.state) for one in (*each, *parts) if "state" in vars(one)
        ]
        self.others = [type(one).__name__ for one, kept in self._all if kept is not self.kept]
        """Optimizers inside of one, which keep state beside it."""
        self._seen: list[object] = []
        self._brought = False
        self.is_whole = False
        """Whether the script is in a block in which it sees the state of whole parameters."""

    def step(self) -> None:
        """Have optimizers see the state by piece."""
        for one, kept in self._all:
            one.state = kept

    def end_step(self) -> None:
        """Adopt a state that an optimizer has put in the place of its own while it stepped."""
        for one, kept in self._all:
            if one.state is not kept:
                now = dict(one.state)
                kept.clear()
                kept.update(now)

    def hide(self, *, undivided: bool) -> dict[Any, Any] | None:
        """Have the script see no parameter's state; return what it was shown, if it was.

        Args:
            undivided: whether the state by piece is that of whole parameters, and all of it.
        """
        found: dict[Any, Any] = {}
        for one, kept in self._all if self._brought else ():
            found |= dict(one.state) if kept is self.kept else {}
        brought, self._brought, self.is_whole = self._brought, False, False
        for one, kept in self._all:
            one.state = kept if undivided else DividedState(one, kept)
        self._seen = [one.state for one, _ in self._all]
        return found if brought else None

    def show(self, whole: Mapping[Any, Any]) -> None:
        """Have the script see the state of whole parameters, each optimizer that of its own."""
        for one, kept in self._all:
            if kept is self.kept:
                own = [p for group in one.param_groups for p in group["params"] if p in whole]
                loose = {key: kept[key] for key in kept if not isinstance(key, torch.Tensor)}
                one.state = defaultdict(dict, loose | {p: whole[p] for p in own})
        self._brought = self.is_whole = True

    def refuse(self, why: str) -> None:
        """Have the script see why there is no state of whole parameters."""
        for one, kept in self._all:
            one.state = DividedState(one, kept, why)
        self._seen = [one.state for one, _ in self._all]

    def assigned(self) -> Iterator[tuple[set[int], Mapping[Any, Any]]]:
        """What the script has put in the place of states, with the parameters that it is about.

        These are given by identity.
        """
        if self._brought:
            return
        for (one, kept), seen in zip(self._all, self._seen, strict=True):
            if one.state is not seen and kept is self.kept:
                yield {id(p) for group in one.param_groups for p in group["params"]}, one.state

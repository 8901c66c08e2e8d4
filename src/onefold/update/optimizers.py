"""The user's optimizers and schedulers: several as one, hooks on them, and what of them is seen.

`Optimizers` has several optimizers, each for parameters of its own, act as one; `Schedulers` does
the same with the schedulers of several optimizers. Hooks on the user's optimizers, such as those of
`refuse_own_steps`, refuse what a script calls by mistake.
`StateView` decides what a script sees of an optimizer's state that is divided among devices.

Note: optimizers that draw
--------------------------
Each device updates its own partition, and would draw for it from where its generators stand: all
devices the same numbers for other parameters, and as many as its partition needs. Noise would
repeat in the model, and depend on how many devices there are. `UpdateDraws` refuses it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.core.encoding import to_json
from onefold.core.randomness import GeneratorStates, OwnGenerators, comparable_state
from onefold.data_order.kept_state import generators_in
from onefold.errors import StateError
from onefold.system.internals import complete_hooks, has_own_step, steps_a_scheduler

__all__ = [
    "TAKEN",
    "Optimizers",
    "Schedulers",
    "StateView",
    "UpdateDraws",
    "class_of",
    "explain_state_dict",
    "name_of",
    "optimizers_in",
    "refuse_own_steps",
    "scheduled",
    "schedulers_in",
    "settings_of",
    "steps_by_parameter",
]


class Optimizers(torch.optim.Optimizer):
    """Several optimizers, of which one makes each update, or all together.

    Their groups stand side by side: they are the very groups of the optimizers, so whoever changes
    a setting there changes it here. Their state lies in one place, as no two have a parameter in
    common.

    Args:
        given: those of the user, by name, already checked.
        by_loss: the name of the optimizer that updates in a step of a loss, by the loss; None if
            all of them make each update, as there is one loss for them.
    """

    # The base class would make groups and state of its own.
    def __init__(
        self, given: Mapping[str, torch.optim.Optimizer], by_loss: Mapping[str, str] | None = None
    ) -> None:
        self.given = dict(given)
        """Made by the user, by name."""
        self.by_loss = by_loss
        self.active = self.of_loss(next(iter(self.given)))
        """The names of those that make the next update."""
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.given.values():
            self.state.update(each.state)
            each.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in the order in which these were given."""
        return list(chain.from_iterable(each.param_groups for each in self.given.values()))

    def of_loss(self, name: str) -> list[str]:
        """The names of the optimizers that update in a step of a loss."""
        return list(self.given) if self.by_loss is None else [self.by_loss[name]]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Have the active optimizers make their updates, in the order in which they were given."""
        for name in self.active:
            self.given[name].step(closure)


def optimizers_in(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The user's own optimizers, by name; one alone has an empty name."""
    return optimizer.given if isinstance(optimizer, Optimizers) else {"": optimizer}


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer; of several, the class of each, with its name or its losses."""
    found, by_loss = optimizers_in(optimizer), getattr(optimizer, "by_loss", None) or {}
    losses = {name: [loss for loss in by_loss if by_loss[loss] == name] for name in found}
    return _classes({", ".join(losses[name]) or name: each for name, each in found.items()})


def _classes(found: Mapping[str, object]) -> str:
    named = found.items()
    return ", ".join(type(each).__name__ + (f" ({name})" if name else "") for name, each in named)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, as JSON.

    Raises:
        TypeError: a setting is of a type that no file can hold.
    """
    return [
        {
            key: to_json(value, f"{key} of the optimizer's group {number}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def scheduled(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizers to which a learning rate scheduler is attached."""
    return [name for name, each in optimizers_in(optimizer).items() if steps_a_scheduler(each.step)]


class Schedulers(LRScheduler):
    """Schedulers of several optimizers, which are saved together and stepped one by one.

    Args:
        given: those of the user, by the name of the optimizer, already checked.
        optimizer: the optimizers.
    """

    # The base class would wrap the optimizer's step, and step once.
    def __init__(self, given: Mapping[str, LRScheduler], optimizer: Optimizers) -> None:
        self.given = dict(given)
        """Made by the user, by name."""
        self.optimizer: Optimizers = optimizer

    @property
    def last_epoch(self) -> list[object]:  # type: ignore[override]
        """What each of them counts."""
        return [getattr(each, "last_epoch", None) for each in self.given.values()]

    def step(self, epoch: int | None = None) -> None:
        """Step all of them, as at the end of an epoch."""
        for each in self.given.values():
            each.step()

    def step_of(self, name: str) -> None:
        """Step those of the optimizers that a loss of this name has updated."""
        for each in self.optimizer.of_loss(name):
            if each in self.given:
                self.given[each].step()

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {name: each.state_dict() for name, each in self.given.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt what `state_dict` returned."""
        for name, each in self.given.items():
            each.load_state_dict(state_dict[name])


def schedulers_in(scheduler: LRScheduler) -> dict[str, LRScheduler]:
    """The user's own schedulers, by name; one alone has an empty name."""
    return scheduler.given if isinstance(scheduler, Schedulers) else {"": scheduler}


def class_of(scheduler: LRScheduler) -> str:
    """The class of a scheduler; of several, the class and name of each."""
    return _classes(schedulers_in(scheduler))


_Several = Collection[torch.optim.Optimizer]


def explain_state_dict(optimizers: _Several, is_whole: Callable[[], bool]) -> None:
    """Have the optimizers' own state_dict() raise, rather than return a part of the state.

    Args:
        optimizers: those of the user.
        is_whole: whether the state of whole parameters is there.
    """

    def refuse(*_: Any) -> None:
        if not is_whole():
            raise RuntimeError(
                "the optimizer's state is divided among the devices of the run, so its own "
                "state_dict() and load_state_dict() would see a part of it. Load it before "
                "Trainer is made, or in `with trainer.modifying(optimizer_state=True):`"
            )

    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(refuse)
        optimizer.register_load_state_dict_pre_hook(refuse)


def refuse_own_steps(optimizers: _Several, is_ours: Callable[[], bool | None]) -> None:
    """Refuse the script's own ``optimizer.step()``, which would silently update nothing.

    Args:
        optimizers: those of the user, and those inside of them.
        is_ours: whether it is the trainer that calls; None if the trainer is no more.
    """

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ours = is_ours()
        if ours is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script, after a Trainer had "
                f"it, which divided its state among the devices and has let it go: make another "
                f"optimizer for what follows"
            )
        if not ours:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script: trainer.step() "
                f"has made the update already, and there are no gradients left. Remove the "
                f"line (and loss.backward(), clip_grad_norm_ and zero_grad with it)"
            )

    for optimizer in optimizers:
        TAKEN[optimizer] = is_ours
        optimizer.register_step_pre_hook(refuse)


def steps_by_parameter(optimizers: _Several) -> bool:
    """Whether what ``step()`` does to a parameter follows from that, its gradient and its state.

    It does in PyTorch's own optimizers, which also count for each parameter. Others may count their
    calls, draw, or look at all parameters together; hooks of a script may do anything.
    """
    return all(
        type(each).__module__.startswith("torch.optim.") and not has_own_step(each)
        for each in optimizers
    )


Optimizer = torch.optim.Optimizer
State = MutableMapping[Any, Any]


class DividedState(MutableMapping[Any, Any]):
    """Refuses to be asked for a parameter's state, rather than to have none.

    Args:
        optimizer: whose state it is.
        kept: the state by segment; what it has under other keys than tensors is whole.
        why: why there is no way to see it whole; empty if there is one.
    """

    def __init__(self, optimizer: Optimizer, kept: State, why: str = "") -> None:
        self._optimizer, self._kept, self._why = optimizer, kept, why

    def _error(self) -> RuntimeError:
        way = self._why or (
            "look it up, and call methods of the optimizer that do (train() and eval(), a swap of "
            "averages), in `with trainer.modifying(optimizer_state=True):`, on every device"
        )
        name = type(self._optimizer).__name__
        return RuntimeError(
            f"the state of {name} was looked up where it is divided: it lies in segments, with the "
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


def _with_inner(optimizers: Iterable[object]) -> list[Optimizer]:
    """Some optimizers, and those inside of them that update the same parameters."""
    found: list[Optimizer] = []
    waiting = [(each, _parameters_of(each)) for each in optimizers]
    for one, of_outer in waiting:  # which grows
        own = _parameters_of(one)
        if own and own <= of_outer and all(one is not each for each in found):
            assert isinstance(one, Optimizer)
            complete_hooks(one)
            found.append(one)
            waiting += [(each, own) for each in vars(one).values()]
    return found


def _parameters_of(one: object) -> set[int]:
    groups = one.param_groups if isinstance(one, Optimizer) else []
    return {id(parameter) for group in groups for parameter in group["params"]}


class StateView:
    """Decides what the ``state`` of the user's optimizers is at any time.

    Args:
        optimizer: that of the user, or several as one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizers = _with_inner(optimizers_in(optimizer).values())
        """Those of the user, and those inside of them."""
        self.kept: State = optimizer.state
        """The state by segment, which the optimizers see while they step."""
        self._all: list[tuple[Any, State]] = [
            (one, one.state) for one in self.optimizers if "state" in vars(one)
        ]
        self.others = [type(one).__name__ for one, kept in self._all if kept is not self.kept]
        """Optimizers inside of one, which keep state beside it."""
        self._seen: list[object] = []
        self._brought = False
        self.is_whole = False
        """Whether the script is in a block in which it sees the state of whole parameters."""

    def step(self) -> None:
        """Have optimizers see the state by segment."""
        for one, kept in self._all:
            one.state = kept

    def end_step(self) -> None:
        """Adopt a state that an optimizer has put in the place of its own while it stepped."""
        for one, kept in self._all:
            if one.state is not kept and not isinstance(one.state, DividedState):
                now = dict(one.state)
                kept.clear()
                kept.update(now)

    def hide(self, *, undivided: bool) -> dict[Any, Any] | None:
        """Have the script see no parameter's state; return what it was shown, if it was.

        Args:
            undivided: whether the state by segment is that of whole parameters, and all of it.
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


TAKEN: MutableMapping[torch.optim.Optimizer, Callable[[], object]] = weakref.WeakKeyDictionary()
"""Optimizers that belong to a Trainer, and what returns None once that is gone. Weakly held:
nothing here may keep them and their state."""


_EVERY = 50
"""The first two updates of so many are looked at: reading all states takes 0.3 ms."""


_NOTHING = nullcontext()


class UpdateDraws:
    """Looks at the generators before and after some of the updates.

    Args:
        optimizers: that may draw; named in the error.
        devices: those of which the generators count as well, if they are GPUs.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], devices: Iterable[torch.device]
    ) -> None:
        self._optimizers = list(optimizers)
        self._devices = tuple(devices)
        self._updates = 0

    def watched(self) -> AbstractContextManager[None]:
        """A block in which the optimizer updates.

        Raises:
            StateError: random numbers were drawn in it.
        """
        self._updates += 1
        run_checks = self._updates % _EVERY in (1, 2) and not steps_by_parameter(self._optimizers)
        return self._looked_at() if run_checks else _NOTHING

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        held = OwnGenerators(generators_in(*self._optimizers))
        before, states = GeneratorStates(*self._devices), comparable_state(held.states())
        yield
        own = "" if states == comparable_state(held.states()) else "a generator of its own"
        if drawn := own or before.drawn_from():
            names = " or ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise StateError(
                f"{names} draws random numbers in step(), from {drawn}: expected none, as "
                f"each device updates a part of the model, and would draw the same numbers for "
                f"other parameters. Train with Trainer(model, None, ...) and trainer.gradient, and "
                f"have the optimizer update in trainer.modifying(), where the lead's draws count"
            )

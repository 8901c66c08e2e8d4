"""The user's optimizers and schedulers: several act as one, with hooks, and a view of their state.

`Optimizers` makes several optimizers, each with its own parameters, act as one; `Schedulers` does
the same with the schedulers of several optimizers. Hooks on the user's optimizers, such as those of
`refuse_own_steps`, refuse calls that a script makes by mistake. `StateView` decides what a script
sees of state that is partitioned among devices.

Note: optimizers that draw
--------------------------
Each device updates its own partition, and would draw random numbers for it from its own generators:
all devices the same numbers for different parameters, and as many as its partition needs. Noise
would repeat in the model, and depend on the number of devices. `UpdateDraws` refuses it.
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
    """Several optimizers; each update is made by one of them, or by all.

    Its groups are the groups of these optimizers, so a setting that is changed there changes here.
    Their state is in one mapping, as no two have a common parameter.

    Args:
        given: the user's optimizers by name, already checked.
        by_loss: for each loss, the name of the optimizer that updates in its steps; None if there
            is one loss, and all of them update.
    """

    # Do not call the base class: it would create new groups and state.
    def __init__(
        self, given: Mapping[str, torch.optim.Optimizer], by_loss: Mapping[str, str] | None = None
    ) -> None:
        self.given = dict(given)
        """The user's optimizers, by name."""
        self.by_loss = by_loss
        self.active = self.of_loss(next(iter(self.given)))
        """Names of the optimizers that make the next update."""
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.given.values():
            # A single mapping works for all, because no two optimizers have a common parameter.
            self.state.update(each.state)
            each.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of all optimizers, in the order of the optimizers."""
        return list(chain.from_iterable(each.param_groups for each in self.given.values()))

    def of_loss(self, name: str) -> list[str]:
        """Return the names of the optimizers that update in a step of a loss."""
        return list(self.given) if self.by_loss is None else [self.by_loss[name]]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the active optimizers, in their order."""
        for name in self.active:
            self.given[name].step(closure)


def optimizers_in(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the user's own optimizers by name; a single one has an empty name."""
    return optimizer.given if isinstance(optimizer, Optimizers) else {"": optimizer}


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer; for several, each class with its name or losses."""
    found, by_loss = optimizers_in(optimizer), getattr(optimizer, "by_loss", None) or {}
    losses = {name: [loss for loss in by_loss if by_loss[loss] == name] for name in found}
    return _classes({", ".join(losses[name]) or name: each for name, each in found.items()})


def _classes(found: Mapping[str, object]) -> str:
    named = found.items()
    return ", ".join(type(each).__name__ + (f" ({name})" if name else "") for name, each in named)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, as JSON.

    Raises:
        TypeError: a setting has a type that cannot be saved.
    """
    return [
        {
            key: to_json(value, f"{key} of the optimizer's group {number}")
            for key, value in group.items()
            # Parameters and their names are not settings: a checkpoint has them elsewhere.
            if key not in ("params", "param_names")
        }
        for number, group in enumerate(optimizer.param_groups)
    ]


def scheduled(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizers with a learning rate scheduler."""
    return [name for name, each in optimizers_in(optimizer).items() if steps_a_scheduler(each.step)]


class Schedulers(LRScheduler):
    """Schedulers of several optimizers, which are saved together and stepped one by one.

    Args:
        given: the user's schedulers by the name of the optimizer, already checked.
        optimizer: the optimizers.
    """

    # Do not call the base class: it would wrap the optimizer's step, and step once.
    def __init__(self, given: Mapping[str, LRScheduler], optimizer: Optimizers) -> None:
        self.given = dict(given)
        """The user's schedulers, by name."""
        self.optimizer: Optimizers = optimizer

    @property
    def last_epoch(self) -> list[object]:  # type: ignore[override]
        """Counter of each scheduler."""
        return [getattr(each, "last_epoch", None) for each in self.given.values()]

    def step(self, epoch: int | None = None) -> None:
        """Step all schedulers, as at the end of an epoch."""
        for each in self.given.values():
            each.step()

    def step_of(self, name: str) -> None:
        """Step the schedulers of the optimizers that a loss of this name updated."""
        for each in self.optimizer.of_loss(name):
            if each in self.given:
                self.given[each].step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: each.state_dict() for name, each in self.given.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, each in self.given.items():
            each.load_state_dict(state_dict[name])


def schedulers_in(scheduler: LRScheduler) -> dict[str, LRScheduler]:
    """Return the user's own schedulers by name; a single one has an empty name."""
    return scheduler.given if isinstance(scheduler, Schedulers) else {"": scheduler}


def class_of(scheduler: LRScheduler) -> str:
    """Return the class of a scheduler; for several, the class and name of each."""
    return _classes(schedulers_in(scheduler))


_Several = Collection[torch.optim.Optimizer]


def explain_state_dict(optimizers: _Several, is_whole: Callable[[], bool]) -> None:
    """Make the optimizers' own state_dict() raise instead of returning a part of the state.

    Args:
        optimizers: the user's optimizers.
        is_whole: whether the state of whole parameters is available.
    """

    def refuse(*_: Any) -> None:
        if not is_whole():
            raise RuntimeError(
                "the optimizer's state is partitioned among the devices of the run, so its own "
                "state_dict() and load_state_dict() would see only a part of it. Load it before "
                "creating Trainer, or inside `with trainer.modifying(optimizer_state=True):`"
            )

    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(refuse)
        optimizer.register_load_state_dict_pre_hook(refuse)


def refuse_own_steps(optimizers: _Several, is_ours: Callable[[], bool | None]) -> None:
    """Refuse the script's own ``optimizer.step()``, which would silently update nothing.

    Args:
        optimizers: the user's optimizers, and those inside of them.
        is_ours: whether the trainer makes the call; None if the trainer no longer exists.
    """

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The hook runs in the trainer's own steps too, so ask whose step this is.
        ours = is_ours()
        if ours is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script after a Trainer had "
                f"used it, partitioned its state among the devices, and released it. Create a new "
                f"optimizer"
            )
        if not ours:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called by the script, but trainer.step() "
                f"makes all updates and leaves no gradients. Remove this line, and also "
                f"loss.backward(), clip_grad_norm_ and zero_grad"
            )

    for optimizer in optimizers:
        TAKEN[optimizer] = is_ours
        optimizer.register_step_pre_hook(refuse)


def steps_by_parameter(optimizers: _Several) -> bool:
    """Whether ``step()`` computes each parameter only from itself, its gradient and its state.

    PyTorch's own optimizers do, and count steps per parameter. Other optimizers may count calls,
    draw random numbers, or read all parameters together; a script's hooks may do anything.
    """
    return all(
        type(each).__module__.startswith("torch.optim.") and not has_own_step(each)
        for each in optimizers
    )


Optimizer = torch.optim.Optimizer
State = MutableMapping[Any, Any]


class DividedState(MutableMapping[Any, Any]):
    """A mapping that raises when a parameter's state is read, instead of being empty.

    Args:
        optimizer: the optimizer of the state.
        kept: the state by segment; entries whose keys are not tensors are whole.
        why: why whole state is not available; empty if it can be made available.
    """

    def __init__(self, optimizer: Optimizer, kept: State, why: str = "") -> None:
        self._optimizer, self._kept, self._why = optimizer, kept, why

    def _error(self) -> RuntimeError:
        way = self._why or (
            "access it, and call methods of the optimizer that use it (train() and eval(), a swap "
            "of averages), inside `with trainer.modifying(optimizer_state=True):`, on every device"
        )
        name = type(self._optimizer).__name__
        return RuntimeError(
            f"the state of {name} was accessed while it is partitioned: each device has the "
            f"segments that it updates, not whole parameters. To see whole parameters, {way}"
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
        """Reset the state, which requires no access to the old one."""
        self._optimizer.state = defaultdict(dict)


def _with_inner(optimizers: Iterable[object]) -> list[Optimizer]:
    """List some optimizers, and inner optimizers that update the same parameters."""
    found: list[Optimizer] = []
    waiting = [(each, _parameters_of(each)) for each in optimizers]
    for one, of_outer in waiting:
        # The list grows in the loop, because an inner optimizer may have inner ones.
        own = _parameters_of(one)
        # An inner optimizer of other parameters is the script's own, and may step at any time.
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
    """Decides what the ``state`` of the user's optimizers shows at any time.

    Args:
        optimizer: the user's optimizer, or several as one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizers = _with_inner(optimizers_in(optimizer).values())
        """The user's optimizers, and those inside of them."""
        self.kept: State = optimizer.state
        """State by segment, which the optimizers see while they step."""
        self._all: list[tuple[Any, State]] = [
            (one, one.state) for one in self.optimizers if "state" in vars(one)
        ]
        self.others = [type(one).__name__ for one, kept in self._all if kept is not self.kept]
        """Inner optimizers that keep state in addition to the outer one's."""
        self._seen: list[object] = []
        self._brought = False
        self.is_whole = False
        """Whether the script is in a block that shows the state of whole parameters."""

    def step(self) -> None:
        """Show the state by segment to the optimizers."""
        for one, kept in self._all:
            one.state = kept

    def end_step(self) -> None:
        """Adopt a state that an optimizer assigned to itself while it stepped."""
        for one, kept in self._all:
            if one.state is not kept and not isinstance(one.state, DividedState):
                # Copy into the kept mapping: other objects refer to it.
                now = dict(one.state)
                kept.clear()
                kept.update(now)

    def hide(self, *, undivided: bool) -> dict[Any, Any] | None:
        """Hide parameters' state from the script; return the state that it was shown, if any.

        Args:
            undivided: whether the state by segment is the complete state of whole parameters.
        """
        found: dict[Any, Any] = {}
        # The script may have changed or replaced the shown state, so read it back first.
        for one, kept in self._all if self._brought else ():
            found |= dict(one.state) if kept is self.kept else {}
        brought, self._brought, self.is_whole = self._brought, False, False
        for one, kept in self._all:
            one.state = kept if undivided else DividedState(one, kept)
        self._seen = [one.state for one, _ in self._all]
        return found if brought else None

    def show(self, whole: Mapping[Any, Any]) -> None:
        """Show the state of whole parameters to the script, to each optimizer its own."""
        for one, kept in self._all:
            if kept is self.kept:
                # Several optimizers share one mapping, but each shows only its own parameters.
                own = [p for group in one.param_groups for p in group["params"] if p in whole]
                # State under keys that are not parameters is never divided, so show it as it is.
                loose = {key: kept[key] for key in kept if not isinstance(key, torch.Tensor)}
                one.state = defaultdict(dict, loose | {p: whole[p] for p in own})
        self._brought = self.is_whole = True

    def refuse(self, why: str) -> None:
        """Make lookups raise with the reason why there is no state of whole parameters."""
        for one, kept in self._all:
            one.state = DividedState(one, kept, why)
        self._seen = [one.state for one, _ in self._all]

    def assigned(self) -> Iterator[tuple[set[int], Mapping[Any, Any]]]:
        """Yield states that the script assigned, with the identities of their parameters."""
        # A state that onefold itself showed is not an assignment.
        if self._brought:
            return
        for (one, kept), seen in zip(self._all, self._seen, strict=True):
            if one.state is not seen and kept is self.kept:
                yield {id(p) for group in one.param_groups for p in group["params"]}, one.state


TAKEN: MutableMapping[torch.optim.Optimizer, Callable[[], object]] = weakref.WeakKeyDictionary()
"""Optimizers that belong to a Trainer, with a function that returns None after it is gone. Weak
keys, so that this table keeps no optimizer and no state alive."""


_EVERY = 50
"""The first two of so many updates are checked, because reading all states takes 0.3 ms."""


_NOTHING = nullcontext()


class UpdateDraws:
    """Compares the random generators before and after some of the updates.

    Args:
        optimizers: the optimizers that may draw; named in the error.
        devices: devices whose generators are checked too, if they are GPUs.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], devices: Iterable[torch.device]
    ) -> None:
        self._optimizers = list(optimizers)
        self._devices = tuple(devices)
        self._updates = 0

    def watched(self) -> AbstractContextManager[None]:
        """Return a context manager for an update.

        Raises:
            StateError: the optimizer drew random numbers in it.
        """
        self._updates += 1
        # PyTorch's own optimizers draw nothing, so only others are checked.
        run_checks = self._updates % _EVERY in (1, 2) and not steps_by_parameter(self._optimizers)
        return self._looked_at() if run_checks else _NOTHING

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        held = OwnGenerators(generators_in(*self._optimizers))
        before, states = GeneratorStates(*self._devices), comparable_state(held.states())
        yield
        # If the step raised, this line is not reached: that error is the one to report.
        own = "" if states == comparable_state(held.states()) else "a generator of its own"
        if drawn := own or before.drawn_from():
            names = " or ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise StateError(
                f"{names} draws random numbers in step(), from {drawn}, but each device updates a "
                f"part of the model, and would draw the same numbers for other parameters. Train "
                f"with Trainer(model, None, ...) and trainer.gradient, and step the optimizer in "
                f"trainer.modifying(), which broadcasts the lead's result"
            )

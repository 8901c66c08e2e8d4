"""The model, optimizers and losses that a script gives to its Trainer, one or several of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onefold.checks.model import check_model, check_optimizer, check_precision
from onefold.core.late import load
from onefold.core.settings import Settings
from onefold.launcher.environment import have_private_caches
from onefold.launcher.membership import folder_until_the_end
from onefold.shard.kernels import calls_compiled
from onefold.shard.task import LossFunction
from onefold.system.internals import keep_code_in
from onefold.update.optimizers import Optimizers, Schedulers, optimizers_in
from onefold.update.scheduler import check_scheduler

__all__ = ["GivenOptimizer", "GivenScheduler", "UserParts", "keep_code_private"]

GivenOptimizer = (
    Optimizer | Mapping[str, Optimizer] | list[Optimizer] | tuple[Optimizer, ...] | None
)
"""What a script may give for the optimizer."""
_One = LRScheduler | None
GivenScheduler = _One | Mapping[str, LRScheduler] | list[_One] | tuple[_One, ...]
"""What a script may give for the scheduler."""


@dataclass(frozen=True, slots=True)
class UserParts:
    """What a script gives to its Trainer, brought into one form."""

    module: torch.nn.Module
    """The model; of several, a `torch.nn.ModuleDict`."""
    optimizer: Optimizer | None
    """Of all trained parameters; of several, `onefold.update.optimizers.Optimizers`; None if the
    script updates by itself."""
    losses: Mapping[str, LossFunction]
    """The losses by name; one alone has an empty name."""
    scheduler: LRScheduler | None
    """Of several optimizers, `onefold.update.optimizers.Schedulers`; None if there is none."""
    stages: Sequence[torch.nn.Module] | None = None
    """Where the model may be cut; None to find that out."""

    @classmethod
    def of(
        cls,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: GivenOptimizer,
        loss: LossFunction | Mapping[str, LossFunction],
        scheduler: GivenScheduler,
        stages: Sequence[torch.nn.Module] | Literal["auto"] = "auto",
    ) -> UserParts:
        """Bring a script's arguments into one form.

        Raises:
            TypeError, ValueError: a dict or list is empty, or has names or values that cannot be
                used; or names of optimizers differ from those of several losses.
        """
        module = _joined_modules(model) if isinstance(model, Mapping) else model
        losses = _named("loss", loss) if isinstance(loss, Mapping) else {"": loss}
        if isinstance(scheduler, list | tuple):
            scheduler = _listed_schedulers(scheduler, optimizer)
        if isinstance(optimizer, list | tuple):
            optimizer = {str(number): each for number, each in enumerate(optimizer)}
        if isinstance(optimizer, Mapping):
            optimizer = _joined_optimizers(_named("optimizer", optimizer, Optimizer), losses)
        if isinstance(scheduler, Mapping):
            scheduler = _joined_schedulers(_named("scheduler", scheduler, LRScheduler), optimizer)
        if isinstance(stages, str) and stages != "auto":
            raise ValueError(f'expected stages to be "auto" or modules, got {stages!r}')
        cut = None if stages == "auto" else tuple(stages)
        return cls(module, optimizer, losses, scheduler, cut)

    def check(self, settings: Settings) -> None:
        """Refuse what is not usable, before any work is done.

        Raises:
            TypeError, ValueError: a part is of a wrong type or cannot be trained.
        """
        check_model(self.module)
        if self.optimizer is None:
            load("session.script_updates").check_by_script(self.scheduler, settings.precision)
        else:
            for each in optimizers_in(self.optimizer).values():
                check_optimizer(each, self.module)
            if isinstance(self.optimizer, Optimizers):
                _check_apart(self.optimizer, self.module)
            check_scheduler(self.scheduler, self.optimizer, settings.scheduler_every)
        check_precision(settings.precision, self.module.named_parameters())
        for name, loss in self.losses.items():
            if not callable(loss):
                where = f"loss[{name!r}]" if name else "loss"
                raise TypeError(
                    f"expected {where} to be a function of model and batch, got {loss!r}"
                )
        if settings.compile:
            load("shard.compiling").check_layers(self.module)
        if len(self.losses) > 1 and settings.microbatch == "auto":
            raise ValueError(
                'microbatch="auto" looks for the largest microbatches of one loss, and this '
                "Trainer has several: expected a number of samples that fits for all of them"
            )

    def loss_name(self, name: str | None) -> str:
        """Return the name of the loss that a script means; None for the only one.

        Raises:
            TypeError: it names none where there are several, or one where there is one without a
                name.
            ValueError: there is no loss of that name.
        """
        if name and name in self.losses:
            return name
        if name is None and len(self.losses) == 1:
            return next(iter(self.losses))
        known = ", ".join(map(repr, self.losses))
        if name is None:
            raise TypeError(
                f"this Trainer has several losses: expected the name of one, such as "
                f"trainer.step(batch, {next(iter(self.losses))!r}); it has {known}"
            )
        if "" in self.losses:
            raise TypeError(
                f"expected no name of a loss, as this Trainer was given a single one, got {name!r}"
            )
        raise ValueError(f"expected one of the losses {known}, got {name!r}")

    def on_part(
        self, function: Callable[[torch.nn.Module, Any], object], name: str | None
    ) -> Callable[[torch.nn.Module, Any], object]:
        """Have a function of model and batch be given one of several models; all if None.

        Raises:
            TypeError: there is but one model.
            ValueError: there is no model of that name.
        """
        if name is None or not callable(function):
            return function
        if not isinstance(self.module, torch.nn.ModuleDict):
            raise TypeError(
                f"model={name!r} chooses one of several models: this Trainer was given "
                f"{type(self.module).__name__}, and no dict of models"
            )
        if name not in self.module:
            known = ", ".join(map(repr, self.module))
            raise ValueError(f"expected one of the models {known}, got {name!r}")
        part = self.module[name]
        return lambda _, batch: function(part, batch)


def _named(what: str, given: Mapping[str, Any], kind: type = object) -> dict[str, Any]:
    if not given:
        raise ValueError(f"expected at least one {what}, got none")
    for name, each in given.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise TypeError(f"expected names of one line in the dict of {what}, got {name!r}")
        if not isinstance(each, kind):
            raise TypeError(
                f"expected {what}[{name!r}] to be a PyTorch {kind.__name__}, got "
                f"{type(each).__name__}"
            )
    return dict(given)


def _listed_schedulers(given: Sequence[Any], optimizer: object) -> dict[str, Any] | None:
    if not isinstance(optimizer, list | tuple) or len(given) != len(optimizer):
        raise ValueError(
            f"expected a list of schedulers beside a list of optimizers, one for each or None, got "
            f"{len(given)} schedulers"
        )
    return {str(n): each for n, each in enumerate(given) if each is not None} or None


def _joined_modules(models: Mapping[str, torch.nn.Module]) -> torch.nn.ModuleDict:
    joined = torch.nn.ModuleDict()
    for name, module in _named("model", models, torch.nn.Module).items():
        check_model(module)
        try:
            joined[name] = module
        except KeyError as error:
            raise ValueError(f"model[{name!r}]: expected another name, {error.args[0]}") from None
    return joined


def _joined_optimizers(optimizers: dict[str, Any], losses: Mapping[str, LossFunction]) -> Optimizer:
    if len(losses) == 1:
        return Optimizers(optimizers)
    if optimizers.keys() != losses.keys():
        raise ValueError(
            f"expected an optimizer for each loss, under the same names, or one loss that all of "
            f"them update. One optimizer may be that of several losses: optimizer={{'a': one, 'b': "
            f"one, 'c': other}}. The optimizers are {', '.join(map(repr, optimizers))}, the losses "
            f"{', '.join(map(repr, losses))}"
        )
    first: dict[int, str] = {}
    by_loss = {name: first.setdefault(id(optimizers[name]), name) for name in losses}
    return Optimizers({name: optimizers[name] for name in first.values()}, by_loss)


def _joined_schedulers(schedulers: dict[str, Any], optimizer: Optimizer | None) -> LRScheduler:
    if not isinstance(optimizer, Optimizers):
        raise TypeError(
            "expected one scheduler, as Trainer was given one optimizer, got a dict of schedulers"
        )
    for name in schedulers:
        if name not in optimizer.given:
            known = ", ".join(map(repr, optimizer.given))
            raise ValueError(f"scheduler has the name {name!r}: expected some of {known}")
    return Schedulers(schedulers, optimizer)


def _check_apart(optimizer: Optimizers, module: torch.nn.Module) -> None:
    """Refuse a parameter that two optimizers hold: each would have its own state of it."""
    names = {id(p): name for name, p in module.named_parameters()}
    owner: dict[int, str] = {}
    for name, each in optimizer.given.items():
        for parameter in (p for group in each.param_groups for p in group["params"]):
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(
                    f"parameter {names[id(parameter)]} is in the optimizers {other!r} and "
                    f"{name!r}: expected it in one. Divide the parameters, or give two losses that "
                    f"one optimizer (loss may be a dict where optimizer is not)"
                )


def keep_code_private(user: UserParts, settings: Settings) -> None:
    """Choose a folder for compiled code, ahead of the compiler, which loads what it finds there."""
    if settings.compile or calls_compiled(user.module, *user.losses.values()):
        keep_code_in(have_private_caches(lambda: str(folder_until_the_end().path)))

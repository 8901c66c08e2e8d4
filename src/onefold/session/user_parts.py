"""The model, optimizers and losses that a script passes to Trainer, one or several of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Type of Trainer's optimizer argument."""
_One = LRScheduler | None
GivenScheduler = _One | Mapping[str, LRScheduler] | list[_One] | tuple[_One, ...]
"""Type of Trainer's scheduler argument."""


@dataclass(frozen=True, slots=True)
class UserParts:
    """A script's arguments of Trainer, in one form."""

    module: torch.nn.Module
    """The model; several models form a `torch.nn.ModuleDict`."""
    optimizer: Optimizer | None
    """Optimizer of all trained parameters; several form `onefold.update.optimizers.Optimizers`.
    None if the script makes the updates."""
    losses: Mapping[str, LossFunction]
    """The losses by name. The name of a single loss is empty."""
    scheduler: LRScheduler | None
    """The scheduler; several form `onefold.update.optimizers.Schedulers`. None if there is none."""
    stages: Sequence[torch.nn.Module] | None = None
    """Modules that may become stages; None to find them."""

    @classmethod
    def of(
        cls,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: GivenOptimizer,
        loss: LossFunction | Mapping[str, LossFunction],
        scheduler: GivenScheduler,
        stages: Sequence[torch.nn.Module] | Literal["auto"] = "auto",
    ) -> UserParts:
        """Convert a script's arguments to one form.

        Raises:
            TypeError, ValueError: a dict or list is empty, or has invalid names or values; or
                optimizers and losses have different names.
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
            raise ValueError(f'stages must be "auto" or modules, but got {stages!r}')
        cut = None if stages == "auto" else tuple(stages)
        return cls(module, optimizer, losses, scheduler, cut)

    def check(self, settings: Settings) -> None:
        """Raise if a part is not usable, before any work is done.

        Raises:
            TypeError, ValueError: a part has a wrong type or cannot be trained.
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
            if isinstance(loss, type) or not callable(loss):
                where = f"loss[{name!r}]" if name else "loss"
                words = f"{where} must be a function of model and batch"
                raise load("shard.advice").wrong_part(words, loss)
        if settings.compile:
            load("shard.compiling").check_layers(self.module)
        if len(self.losses) > 1 and settings.microbatch == "auto":
            raise ValueError(
                'microbatch="auto" finds the largest microbatch of one loss, but this Trainer has '
                "several. Pass a number of samples that fits for all of them"
            )

    def loss_name(self, name: str | None) -> str:
        """Return the name of the loss for a call; None selects the only one.

        Raises:
            TypeError: the name is missing although there are several losses, or is given although
                the only loss has no name.
            ValueError: there is no loss with that name.
        """
        if name and name in self.losses:
            return name
        if name is None and len(self.losses) == 1:
            return next(iter(self.losses))
        known = ", ".join(map(repr, self.losses))
        if name is None:
            raise TypeError(
                f"this Trainer has several losses, so the call must name one, such as "
                f"trainer.step(batch, {next(iter(self.losses))!r}). The losses are {known}"
            )
        if "" in self.losses:
            raise TypeError(
                f"loss={name!r} was passed, but this Trainer has a single, unnamed loss"
            )
        raise ValueError(f"loss must be one of {known}, but got {name!r}")


def _named(what: str, given: Mapping[str, Any], kind: type = object) -> dict[str, Any]:
    if not given:
        raise ValueError(f"Trainer needs at least one {what}, but got none")
    for name, each in given.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise TypeError(f"names in the {what} dict must be one-line strings, but got {name!r}")
        if not isinstance(each, kind):
            words = f"{what}[{name!r}] must be a PyTorch {kind.__name__}"
            raise load("shard.advice").wrong_part(words, each)
    return dict(given)


def _listed_schedulers(given: Sequence[Any], optimizer: object) -> dict[str, Any] | None:
    if not isinstance(optimizer, list | tuple) or len(given) != len(optimizer):
        raise ValueError(
            f"a list of schedulers needs a list of optimizers of the same length, with one "
            f"scheduler or None for each, but got {len(given)} schedulers"
        )
    return {str(n): each for n, each in enumerate(given) if each is not None} or None


def _joined_modules(models: Mapping[str, torch.nn.Module]) -> torch.nn.ModuleDict:
    joined = torch.nn.ModuleDict()
    for name, module in _named("model", models, torch.nn.Module).items():
        check_model(module)
        try:
            joined[name] = module
        except KeyError as error:
            raise ValueError(f"model[{name!r}]: choose another name, {error.args[0]}") from None
    return joined


def _joined_optimizers(optimizers: dict[str, Any], losses: Mapping[str, LossFunction]) -> Optimizer:
    if len(losses) == 1:
        return Optimizers(optimizers)
    if optimizers.keys() != losses.keys():
        raise ValueError(
            f"optimizers and losses have different names: pass one optimizer per loss, under the "
            f"same names, or one loss for all optimizers. Several losses may share an optimizer: "
            f"optimizer={{'a': one, 'b': one, 'c': other}}. The optimizers are "
            f"{', '.join(map(repr, optimizers))}, the losses {', '.join(map(repr, losses))}"
        )
    first: dict[int, str] = {}
    by_loss = {name: first.setdefault(id(optimizers[name]), name) for name in losses}
    return Optimizers({name: optimizers[name] for name in first.values()}, by_loss)


def _joined_schedulers(schedulers: dict[str, Any], optimizer: Optimizer | None) -> LRScheduler:
    if not isinstance(optimizer, Optimizers):
        raise TypeError(
            "got a dict of schedulers, but Trainer has a single optimizer. Pass one scheduler"
        )
    for name in schedulers:
        if name not in optimizer.given:
            known = ", ".join(map(repr, optimizer.given))
            raise ValueError(f"scheduler has the name {name!r}, but the optimizers are {known}")
    return Schedulers(schedulers, optimizer)


def _check_apart(optimizer: Optimizers, module: torch.nn.Module) -> None:
    """Raise if two optimizers share a parameter: each would keep its own state of it."""
    names = {id(p): name for name, p in module.named_parameters()}
    owner: dict[int, str] = {}
    for name, each in optimizer.given.items():
        for parameter in (p for group in each.param_groups for p in group["params"]):
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(
                    f"parameter {names[id(parameter)]} is in the optimizers {other!r} and "
                    f"{name!r}, but only one may update it. Split the parameters, or use one "
                    f"optimizer for both losses (loss may be a dict if optimizer is not)"
                )


def keep_code_private(user: UserParts, settings: Settings) -> None:
    """Choose a private folder for compiled code first: the compiler runs any code that it finds."""
    if settings.compile or calls_compiled(user.module, *user.losses.values()):
        keep_code_in(have_private_caches(lambda: str(folder_until_the_end().path)))

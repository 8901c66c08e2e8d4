"""A loss that steps are made of, and the result of a step, as the user gets it.

`StepResult` is what the engine knows of an update, and `verdict_of` decides whether it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from onefold.core.call_digest import Agreed
from onefold.core.fold import fold_rows
from onefold.core.late import load
from onefold.core.results import StepWeight
from onefold.core.settings import Settings
from onefold.shard.task import LossFunction
from onefold.update.optimizers import Optimizers
from onefold.watch.timing import PhaseTime, Span

if TYPE_CHECKING:
    from onefold.core.values import StepValues

__all__ = ["Objective", "Step", "StepResult", "objectives_of", "verdict_of"]


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one update, as `Trainer.step` returns it.

    The same on every device. Tensors lie on this process's first device, and are computed when they
    are asked for.

    >>> trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
    >>> step = trainer.step(torch.ones(6, 2))
    >>> step.number, step.samples, step.epoch, step.skipped
    (1, 6, 0, '')
    >>> step.loss.shape, step.loss.dtype, type(step.grad_norm)
    (torch.Size([]), torch.float64, <class 'float'>)
    """

    number: int
    """The number of the step in the run, counted from 1."""
    samples: int
    """Number of samples in the whole batch."""
    epoch: int
    """Which pass over the data the batch belongs to."""
    outcome: StepResult = field(repr=False)
    """What the engine knows of the step."""
    _spans: Sequence[Span] = field(repr=False)
    name: str = field(default="", repr=False)
    """Which loss was computed, where the Trainer has several by name; else empty."""

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the whole batch before the update: () float64.

        The sum of the shards' totals over the sum of their weights. Computed when it is asked for;
        on a GPU nothing waits for it until then.
        """
        return self.outcome.loss

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """What the loss returned beside itself, over the whole batch: () float64 for each name.

        Read as losses are: the sum of the shards' totals over the sum of their weights, NaN where
        these are 0. Empty where the loss returned itself alone. Computed when it is asked for; on a
        GPU nothing waits for it until then.
        """
        beside = self.outcome.values
        return {} if beside is None else beside.finished()

    @property
    def outputs(self) -> dict[str, Any]:
        """What the loss returned for each sample: for each name the rows of the whole batch.

        That is a tensor (samples, ...) on the host, or a list with one tensor, or dict of tensors,
        a sample; on every device, in the order of the batch. Empty where the loss returned none.
        They are gathered in the step, so that any device may read them or leave it.

        >>> def loss(model, batch):
        ...     errors = model(batch)[:, 0]
        ...     return errors.square(), {}, {"td": errors.abs()}
        >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
        >>> trainer.step(torch.ones(6, 2)).outputs["td"].shape
        torch.Size([6])
        """
        beside = self.outcome.values
        return {} if beside is None else dict(beside.outputs)

    @property
    def skipped(self) -> str:
        """Why nothing was updated, in words; empty, and so false, where the step was made."""
        return self.outcome.verdict.skipped

    @property
    def grad_norm(self) -> float:
        """The norm of the whole gradient before clipping; NaN if the batch had no weight.

        Read when it is asked for; on a GPU nothing waits for it until then.
        """
        return math.nan if self.outcome.norm is None else float(self.outcome.norm)

    @property
    def seconds(self) -> PhaseTime:
        """Where the time went: data, forward, backward, exchange, update.

        Measured on this process's first device, by its own clock. Added up when asked for, which
        on a GPU waits for the step to be done.
        """
        return PhaseTime.of(self._spans)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    numbers: torch.Tensor
    """(V, 2) float64, where the lead computes: each shard's part of the loss, and the bits of the
    digest of its gradient."""
    weights: Sequence[float]
    """(V,): each shard's part of the divisor, or a code below 0; see `onefold.core.values`."""
    weight: float
    """What the sum of totals is divided by."""
    verdict: Verdict
    """Whether the parameters were updated and the run goes on; the same on all devices."""
    norm: torch.Tensor | None
    """The norm of the whole gradient before clipping, (); None if the step has none."""
    values: StepValues | None = None
    """What the loss returned beside itself; None if that was nothing."""

    @property
    def totals(self) -> torch.Tensor:
        """(V,) float64: each shard's part of the loss."""
        return self.numbers[:, 0]

    @property
    def loss(self) -> torch.Tensor:
        """See `Step.loss`."""
        # In the fold's order, as the gradients are: the loss has the same bits on any number of
        # devices too.
        total = fold_rows(self.totals)
        # By a tensor: a GPU multiplies by the reciprocal of a number, which rounds otherwise.
        weight = total.new_full((), self.weight)
        return total / weight if self.weight else total * math.nan


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step."""

    skipped: str
    """Why the parameters are left alone; empty where they are updated."""
    stops: bool
    """Whether a device was asked to stop: the run then ends after this step, once it is saved."""

    @property
    def updates(self) -> bool:
        """Whether the parameters are updated."""
        return not self.skipped


def verdict_of(weight: StepWeight, said: Agreed, failure: str = "") -> Verdict:
    """Reach the verdict on a step.

    Args:
        weight: the whole batch's, the same on all devices.
        said: what all devices reported when the step began.
        failure: what is not finite in it, if the step is to be skipped for it.
    """
    # From what all devices have in common, and so without another exchange.
    nothing = "" if weight.value > 0 or failure else "the batch's weights add up to 0"
    return Verdict(skipped=failure or nothing, stops=said.stop)


@dataclass(slots=True, kw_only=True)
class Objective:
    """A loss that steps can be made of."""

    name: str
    """What the script calls it; empty where it is the only one."""
    number: int
    """Its place among all losses of the run."""
    run: LossFunction
    """The user's loss as steps compute it."""
    left_out: tuple[int, ...]
    """Numbers of the trained parameters that its optimizer does not update."""
    several_terms: bool = False
    """Whether it has returned a sum of several terms."""
    gathers: bool = False
    """Whether it has called `onefold.gather`."""
    trained: Sequence[bool] | None = None
    """Whether each parameter required a gradient as its last step began; None before that."""


def objectives_of(
    losses: Mapping[str, LossFunction],
    optimizer: torch.optim.Optimizer,
    trained: Iterable[torch.nn.Parameter],
    settings: Settings,
) -> dict[str, Objective]:
    """Put losses and optimizers together.

    Args:
        losses: the user's loss functions, by name.
        optimizer: the run's; several have the names of the losses, or there is one.
        trained: the parameters that any optimizer updates.
        settings: the settings of the run.
    """
    found = {}
    if settings.compile:
        made, repeats = load("shard.compiling").CompiledLoss, settings.deterministic
        losses = {name: made(loss, deterministic=repeats) for name, loss in losses.items()}
    for number, (name, loss) in enumerate(losses.items()):
        left_out: tuple[int, ...] = ()
        if isinstance(optimizer, Optimizers):
            used = [optimizer.given[each].param_groups for each in optimizer.of_loss(name)]
            held = {id(p) for groups in used for group in groups for p in group["params"]}
            left_out = tuple(n for n, p in enumerate(trained) if id(p) not in held)
        found[name] = Objective(name=name, number=number, run=loss, left_out=left_out)
    return found

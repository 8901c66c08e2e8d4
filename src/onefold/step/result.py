"""Defines `Objective`, a loss that steps use, and `Step`, the result that the user gets.

`StepResult` is the engine's result of a step, and `verdict_of` decides whether to update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from onefold.core.call_digest import Agreed, StepRequests
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


Output = torch.Tensor | list[torch.Tensor] | list[dict[str, torch.Tensor]]
"""Rows of the whole batch; see `Step.outputs`."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one update, as `Trainer.step` returns it.

    It is the same on every device. Tensors are on this process's first device, and are computed
    when they are read.

    >>> trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
    >>> step = trainer.step(torch.ones(6, 2))
    >>> step.number, step.samples, step.epoch, step.skipped
    (1, 6, 0, '')
    >>> step.loss.shape, step.loss.dtype, type(step.grad_norm)
    (torch.Size([]), torch.float64, <class 'float'>)
    """

    number: int
    """Number of the step in the run, counted from 1."""
    samples: int
    """Number of samples in the whole batch."""
    epoch: int
    """Epoch that the batch belongs to, counted from 0, as `Trainer.epochs` counts."""
    outcome: StepResult = field(repr=False)
    """The engine's result of the step."""
    _spans: Sequence[Span] = field(repr=False)
    name: str = field(default="", repr=False)
    """Name of the loss, if the Trainer has several; else empty."""

    def __repr__(self) -> str:
        shown = f"number={self.number}, samples={self.samples}, epoch={self.epoch}"
        # On a GPU, reading the loss would block.
        shown += f", loss={float(self.loss):.6g}" if self.outcome.numbers.is_cpu else ""
        return f"Step({shown}, skipped={self.skipped!r})" if self.skipped else f"Step({shown})"

    if not TYPE_CHECKING:  # a type checker reports these uses itself

        def __getattr__(self, name: str) -> NoReturn:
            raise load("shard.advice").no_number(self, name)

        def _refuse(self, *_: object) -> NoReturn:
            raise load("shard.advice").no_number(self)

        __float__ = __int__ = __round__ = __add__ = __radd__ = __lt__ = __gt__ = _refuse

        def __format__(self, spec: str) -> str:
            return self._refuse() if spec else repr(self)

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the whole batch before the update: () float64.

        This is the sum of the shards' totals over the sum of their weights. It is computed when it
        is read; on a GPU, nothing blocks on it until then.
        """
        return self.outcome.loss

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Metrics that the loss returned, over the whole batch: () float64 for each name.

        They are reduced as losses are: the sum of the shards' totals over the sum of their weights;
        NaN if the latter is 0. Empty if the loss returned no metrics. Computed when they are read;
        on a GPU, nothing blocks on them until then.
        """
        beside = self.outcome.values
        return {} if beside is None else beside.finished()

    @property
    def outputs(self) -> dict[str, Output]:
        """Outputs of the loss for each sample: for each name, the rows of the whole batch.

        An output is a tensor (samples, ...) on the host, or a list with one tensor or dict of
        tensors per sample, in the order of the batch. It is the same on every device. Empty if the
        loss returned no outputs. The step itself gathers them, so that a single device may read
        them.

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
        """Why nothing was updated; empty, and so false, if the step made its update."""
        return self.outcome.verdict.skipped

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient before clipping; NaN if the batch had no weight.

        On a GPU, reading it blocks until it is computed.
        """
        return math.nan if self.outcome.norm is None else float(self.outcome.norm)

    @property
    def seconds(self) -> PhaseTime:
        """Time spent in each phase: data, forward, backward, exchange, update.

        ``seconds.limit`` names the limit of the step and a remedy. Times of several steps can be
        added up.

        Measured by the clock of this process's first device, and added up when it is read. On a
        GPU, reading it blocks until the step is finished.
        """
        return PhaseTime.of(self._spans)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The engine's result of a step."""

    numbers: torch.Tensor
    """(V, 2) float64, on the device where the lead computes: each shard's part of the loss, and the
    bits of the digest of its gradient."""
    weights: Sequence[float]
    """(V,): each shard's part of the denominator, or a code below 0; see `onefold.core.values`."""
    weight: float
    """Denominator of the whole batch."""
    verdict: Verdict
    """Whether the parameters are updated and the run continues; the same on all devices."""
    norm: torch.Tensor | None
    """Norm of the whole gradient before clipping, (); None if the step has no gradient."""
    values: StepValues | None = None
    """Metrics and outputs that the loss returned; None if there are none."""

    @property
    def totals(self) -> torch.Tensor:
        """(V,) float64: each shard's part of the loss."""
        return self.numbers[:, 0]

    @property
    def loss(self) -> torch.Tensor:
        """See `Step.loss`."""
        # Add in the order of the fold, like gradients, so that the loss has the same bits on any
        # number of devices.
        total = fold_rows(self.totals)
        # Divide by a tensor: for a Python number, a GPU multiplies by its reciprocal, which rounds
        # differently.
        weight = total.new_full((), self.weight)
        return total / weight if self.weight else total * math.nan


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a step."""

    skipped: str
    """Why the parameters are not updated; empty if they are."""
    requests: StepRequests
    """Requests of all devices, combined."""

    @property
    def updates(self) -> bool:
        """Whether the parameters are updated."""
        return not self.skipped


def verdict_of(weight: StepWeight, said: Agreed, failure: str = "") -> Verdict:
    """Decide about a step.

    Args:
        weight: the weight of the whole batch, the same on all devices.
        said: what all devices reported at the start of the step.
        failure: describes the value that is not finite, if the step is skipped for it.
    """
    # All inputs are the same on all devices, so every device decides the same without a message.
    nothing = "" if weight.value > 0 or failure else "the batch's weights add up to 0"
    return Verdict(skipped=failure or nothing, requests=said.requests)


@dataclass(slots=True, kw_only=True)
class Objective:
    """A loss that steps can use, with its flags."""

    name: str
    """Name of the loss; empty if there is only one."""
    number: int
    """Index among all losses of the run."""
    run: LossFunction
    """The user's loss as steps compute it."""
    left_out: tuple[int, ...]
    """Numbers of the trained parameters that the loss's optimizers do not update."""
    several_terms: bool = False
    """Whether it returned a sum of several terms in an earlier step."""
    gathers: bool = False
    """Whether it called `onefold.gather` in an earlier step."""
    trained: Sequence[bool] | None = None
    """Whether each parameter required a gradient when the last step started; None before that."""


def objectives_of(
    losses: Mapping[str, LossFunction],
    optimizer: torch.optim.Optimizer,
    trained: Iterable[torch.nn.Parameter],
    settings: Settings,
) -> dict[str, Objective]:
    """Make the `Objective` of each loss, with the parameters that its optimizers leave out.

    Args:
        losses: the user's loss functions, by name.
        optimizer: the optimizer of the run. If there are several, they have the names of losses.
        trained: the parameters that any optimizer updates.
        settings: the settings of the run.
    """
    found = {}
    if settings.compile:
        # Compile once here: every step of this loss then reuses the same graph.
        made, repeats = load("shard.compiling").CompiledLoss, settings.deterministic
        losses = {name: made(loss, deterministic=repeats) for name, loss in losses.items()}
    for number, (name, loss) in enumerate(losses.items()):
        left_out: tuple[int, ...] = ()
        if isinstance(optimizer, Optimizers):
            used = [optimizer.given[each].param_groups for each in optimizer.of_loss(name)]
            held = {id(p) for groups in used for group in groups for p in group["params"]}
            # The optimizers of this loss leave these parameters alone, so shards skip them.
            left_out = tuple(n for n, p in enumerate(trained) if id(p) not in held)
        found[name] = Objective(name=name, number=number, run=loss, left_out=left_out)
    return found

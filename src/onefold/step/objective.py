"""The losses that steps can be made of, and the divisors of those that have several terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.fold import fold_shards
from onefold.core.settings import Settings
from onefold.errors import LossError
from onefold.exchange.exchange import Exchange
from onefold.placement.context import StepContext
from onefold.shard.compiling import compiled
from onefold.shard.replica import Weighed
from onefold.shard.task import LossFunction
from onefold.update.optimizers import Optimizers

__all__ = ["Objective", "objectives_of", "trade_divisors"]


def trade_divisors(
    context: StepContext, batch: ShardedBatch, found: Mapping[int, Weighed], step: int
) -> tuple[float, ...] | None:
    """Add up the weight of each term of the loss over the whole batch; None if it has one term.

    Called on all devices; each gets the same numbers.

    Args:
        context: this process's part of the run.
        batch: the batch, with this process's shards of it.
        found: for each own device and each of its shards, the kind and weight of each term.
        step: number of the step, for errors.

    Raises:
        LossError: shards have different numbers of terms.
    """
    homes = {replica.number: replica.device for replica in context.replicas}
    exchange = context.exchange
    # First how many terms there are: a device whose shards are all empty does not know, and must
    # bring a table of the right size to the second exchange.
    numbers = {n: {s: [float(len(own[s]))] for s in own} for n, own in found.items()}
    counts = [int(row[0]) for row in _share_by_shard(exchange, batch, numbers, homes, 1)]
    terms = max(counts)
    wrong = next((s for s, c in enumerate(counts) if batch.size_of(s) and c != terms), None)
    if wrong is not None:
        raise LossError(
            f"the loss of step {step}, shard {wrong} has {counts[wrong]} terms and that of another "
            f"shard {terms}: expected the same terms for every shard; one in which there is "
            f"nothing to count has the weight 0"
        )
    if terms == 1:
        return None
    # Per term two numbers: its weight, and whether it is not divided.
    pairs = {
        n: {s: [x for kind, w in own[s] for x in (w, float(kind == "sum"))] for s in own}
        for n, own in found.items()
    }
    rows = _share_by_shard(exchange, batch, pairs, homes, 2 * terms)
    columns = [[row[place] for row in rows] for place in range(2 * terms)]
    # In the fold's order: the divisors are part of the result, as the gradients are.
    return tuple(
        1.0 if any(undivided) else fold_shards(weights, _add)
        for weights, undivided in zip(columns[::2], columns[1::2], strict=True)
    )


def _share_by_shard(
    exchange: Exchange,
    batch: ShardedBatch,
    own: Mapping[int, Mapping[int, Sequence[float]]],
    homes: Mapping[int, torch.device],
    numbers: int,
) -> list[list[float]]:
    """Share a row of numbers per shard: (V, numbers) of all shards, zeros for empty ones."""
    shards = batch.plan.shards
    rows = {}
    for number, home in homes.items():
        table = torch.zeros(shards, numbers, dtype=torch.float64)
        for shard, values in own[number].items():
            table[shard] = torch.tensor(values, dtype=torch.float64)
        rows[number] = table.flatten().to(home)
    # (devices, V * numbers): only one device has other numbers than zero for a shard, so that the
    # order of this sum is of no matter.
    shared: list[list[float]] = (
        exchange.transport.all_gather_rows(rows).sum(dim=0).view(shards, -1).tolist()
    )
    return shared


def _add(left: float, right: float) -> float:
    return left + right


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
    made = {}
    for number, (name, loss) in enumerate(losses.items()):
        left_out: tuple[int, ...] = ()
        if isinstance(optimizer, Optimizers):
            used = [optimizer.given[each].param_groups for each in optimizer.of_loss(name)]
            held = {id(p) for groups in used for group in groups for p in group["params"]}
            left_out = tuple(n for n, p in enumerate(trained) if id(p) not in held)
        made[name] = Objective(
            name=name, number=number, run=compiled(loss, settings), left_out=left_out
        )
    return made

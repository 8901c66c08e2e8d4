"""Finds the divisors of a loss of several terms, which must be known before backward begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.fold import fold_shards
from onefold.engine.replica import Replica, Weighed
from onefold.errors import LossError
from onefold.exchange.exchange import Exchange

__all__ = ["trade_divisors"]


def trade_divisors(
    exchange: Exchange,
    batch: ShardedBatch,
    found: Mapping[int, Weighed],
    replicas: Sequence[Replica],
    step: int,
) -> tuple[float, ...] | None:
    """Add up the weight of each term of the loss over the whole batch; None if it has one term.

    Called on all devices; each gets the same numbers.

    Args:
        exchange: with all devices.
        batch: the batch, with this process's shards of it.
        found: for each own device and each of its shards, the kind and weight of each term.
        replicas: the model on each device of this process.
        step: number of the step, for errors.

    Raises:
        LossError: shards have different numbers of terms.
    """
    homes = {replica.number: replica.device for replica in replicas}
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
    shared: list[list[float]] = exchange.transport.share(rows).sum(dim=0).view(shards, -1).tolist()
    return shared


def _add(left: float, right: float) -> float:
    return left + right

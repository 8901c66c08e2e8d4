"""Brings together what the shards' losses returned beside themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.shard import runs_of
from onefold.core.values import StepValues, names_of
from onefold.engine.replica import Replica
from onefold.errors import DisagreementError
from onefold.exchange.exchange import Exchange

__all__ = ["ValueTrade"]


class ValueTrade:
    """Knows which values a run has seen, and so what is in their room on the board.

    See the note on how they travel in `onefold.core.values`.

    Args:
        replicas: the model on each device of this process.
        exchange: with all devices.
    """

    def __init__(self, replicas: Sequence[Replica], exchange: Exchange) -> None:
        self._replicas = replicas
        self._exchange = exchange
        # Filled from what all devices see, and so the same on all of them.
        self._known: dict[int, tuple[str, ...]] = {}

    def of_step(self, batch: ShardedBatch, step: int) -> StepValues | None:
        """Return the values of a step, None if it has none; called by all, before ``spread``.

        Raises:
            DisagreementError: shards have other names than others.
        """
        board = self._exchange.board
        # As a list: numpy takes far longer to look at a few numbers.
        if not any(board.kinds.tolist()):
            return None
        # Empty shards never ran, so they have no names.
        kinds = {kind for kind, n in zip(board.kinds.tolist(), batch.sizes, strict=True) if n}
        lines = self._known.get(kinds.pop()) if len(kinds) == 1 else None
        if lines is None:
            return self._first_of(batch, step)
        # A copy, as they may be asked for long after the board is written again.
        return StepValues(lines, board.values[:, : len(lines)].clone())

    def _first_of(self, batch: ShardedBatch, step: int) -> StepValues:
        """Agree on names that are new, and bring their values by a message of their own."""
        board = self._exchange.board
        own = {
            replica.number: [s for s in batch.plan.shards_of(replica.number) if s in board.given]
            for replica in self._replicas
        }
        texts = {
            number: json.dumps([(shard, board.given[shard].lines) for shard in shards]).encode()
            for number, shards in own.items()
        }
        rows = map(json.loads, self._exchange.transport.gather_bytes(texts))
        lines = _agreed({shard: tuple(names) for row in rows for shard, names in row}, batch, step)
        table = self._shared(own, batch, len(lines))
        board.widen(max(board.width, len(lines)))
        self._known[next(kind for kind in board.kinds.tolist() if kind)] = lines
        return StepValues(lines, table)

    def _shared(
        self, own: Mapping[int, Sequence[int]], batch: ShardedBatch, lines: int
    ) -> torch.Tensor:
        """Share all shards' numbers: (V, lines, 2) float64."""
        shards, rows = batch.plan.shards, {}
        for replica in self._replicas:
            table = torch.zeros(shards, lines, 2, dtype=torch.float64, device=replica.device)
            for shard in own[replica.number]:
                numbers = self._exchange.board.given[shard].numbers
                table[shard].copy_(numbers, non_blocking=True)
            rows[replica.number] = table.flatten()
        tables = self._exchange.transport.share(rows).view(batch.plan.devices, shards, lines, 2)
        # From the one that ran it, and not the sum: -0 plus the others' 0 would be 0.
        found = torch.empty_like(tables[0])
        for device in range(batch.plan.devices):
            for run in runs_of(batch.plan.shards_of(device)):
                found[run] = tables[device, run]
        return found


def _agreed(
    found: Mapping[int, tuple[str, ...]], batch: ShardedBatch, step: int
) -> tuple[str, ...]:
    """Return the lines that all shards with samples have."""
    first = found[min(found)]
    for shard in range(batch.plan.shards):
        lines = found.get(shard, ())
        if batch.size_of(shard) and lines != first:
            raise DisagreementError(
                f"step {step}, shard {shard}: the loss returned the values {names_of(lines)} "
                f"beside itself, and {names_of(first)} for shard {min(found)}; expected the same "
                f"names, and terms of the same kind, for every shard. Where there is nothing to "
                f"count, return onefold.Mean(total, 0)"
            )
    return first

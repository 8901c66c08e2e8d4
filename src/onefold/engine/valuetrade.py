"""Brings together what the shards' losses returned beside themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.columns import Column, read_columns, values_by_name, write_columns
from onefold.core.shard import runs_of
from onefold.core.values import StepValues, names_of
from onefold.engine.replica import Replica
from onefold.errors import DisagreementError
from onefold.exchange.exchange import Exchange

__all__ = ["ValueTrade"]

_Names = tuple[tuple[str, ...], tuple[Column, ...]]
"""Of a shard's values and of its outputs."""


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
        self._known: dict[int, _Names] = {}

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
        known = self._known.get(kinds.pop()) if len(kinds) == 1 else None
        if known is None:
            (lines, columns), table = self._first_of(batch, step)
        else:
            # A copy, as they may be asked for long after the board is written again.
            (lines, columns), table = known, board.values[:, : len(known[0])].clone()
        return StepValues(lines, table, self._outputs(batch, columns) if columns else {})

    def _outputs(self, batch: ShardedBatch, columns: Sequence[Column]) -> dict[str, Any]:
        """Bring the rows of all shards, in their order."""
        given, plan = self._exchange.board.given, batch.plan
        texts = {
            replica.number: write_columns(
                [given[s].rows for s in plan.shards_of(replica.number) if s in given], columns
            )
            for replica in self._replicas
        }
        parts = {}
        for device, text in enumerate(self._exchange.transport.gather_bytes(texts)):
            sizes = {s: batch.size_of(s) for s in plan.shards_of(device)}
            rows, at = read_columns(text, sum(sizes.values()), columns), 0
            for shard, size in sizes.items():
                parts[shard] = {column: rows[column][at : at + size] for column in columns}
                at += size
        return values_by_name([parts[shard] for shard in sorted(parts)], columns)

    def _first_of(self, batch: ShardedBatch, step: int) -> tuple[_Names, torch.Tensor]:
        """Agree on names that are new, and bring their values by a message of their own."""
        board = self._exchange.board
        own = {
            replica.number: [s for s in batch.plan.shards_of(replica.number) if s in board.given]
            for replica in self._replicas
        }
        texts = {
            number: json.dumps(
                [(s, board.given[s].lines, list(board.given[s].rows)) for s in shards]
            ).encode()
            for number, shards in own.items()
        }
        rows = map(json.loads, self._exchange.transport.gather_bytes(texts))
        found = {s: (tuple(names), tuple(outputs)) for row in rows for s, names, outputs in row}
        known = _agreed(found, batch, step)
        table = self._shared(own, batch, len(known[0]))
        board.widen(max(board.width, len(known[0])))
        self._known[next(kind for kind in board.kinds.tolist() if kind)] = known
        return known, table

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


def _agreed(found: Mapping[int, _Names], batch: ShardedBatch, step: int) -> _Names:
    """Return the names that all shards with samples have."""
    first = found[min(found)]
    for shard in range(batch.plan.shards):
        lines, columns = names = found.get(shard, ((), ()))
        if batch.size_of(shard) and names != first:
            these, those = f"the values {names_of(lines)} beside itself", f"{names_of(first[0])}"
            if lines == first[0]:
                these, those = f"the outputs {list(columns)}", f"{list(first[1])}"
            raise DisagreementError(
                f"step {step}, shard {shard}: the loss returned {these}, and {those} for shard "
                f"{min(found)}; expected the same names, and terms of the same kind, for every "
                f"shard, and outputs with the same dtype and shape of rows. Where there is nothing "
                f"to count, return onefold.Mean(total, 0); rows of any sizes are a list of one "
                f"tensor a sample"
            )
    return first

"""Computes a model's values for every sample of a data set, alike on any number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from onefold.core.batch import ShardedBatch
from onefold.core.columns import (
    Column,
    Rows,
    columns_of,
    read_columns,
    values_by_name,
    write_columns,
)
from onefold.core.shard import Plan, cut_bounds
from onefold.engine.engine import Engine
from onefold.engine.evaluation import (
    DataCall,
    ScoreFunction,
    agree_on_lines,
    scoring,
    values_of_shard,
)
from onefold.engine.replica import Replica
from onefold.errors import DisagreementError, LossError
from onefold.exchange.exchange import Exchange

__all__ = ["predict"]


def predict(
    engine: Engine, function: ScoreFunction, batches: Iterable[ShardedBatch], call: DataCall
) -> dict[str, Any]:
    """Compute a function's values for all samples of all batches, in order, on every device.

    Args:
        engine: the devices of this process.
        function: the user's.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.

    Raises:
        LossError: a value is neither a tensor with one row per sample nor a list with one tensor,
            or dict of tensors, per sample.
        DisagreementError: names, dtypes or shapes differ between shards.
    """
    own = {replica.number: _Said() for replica in engine.replicas}
    cuts: list[tuple[int, Plan]] = []
    batch = None
    with call.at_hand(engine), engine.evaluating(), ExitStack() as during:
        for number, batch in enumerate(batches):
            # Only now: the data's digest is known once the first batch has been read.
            if number == 0:
                call.agree(engine, batch)
                function = during.enter_context(engine.lending.passes(function))
            cuts.append((batch.samples, batch.plan))
            with scoring(engine, batch, "the first batch of a prediction", first=number == 0):
                for replica in engine.replicas:
                    with engine.attached(replica):
                        _predict_shards(replica, function, batch, number, own, engine.seed)
    call.agree_on_end(engine, sum(samples for samples, _ in cuts), batch)
    columns = agree_on_lines(engine.exchange, {n: said.columns for n, said in own.items()})
    # Batch by batch: messages stay small, and each batch's own rows are freed once they are sent.
    parts: list[dict[Column, Rows]] = []
    for number, (samples, plan) in enumerate(cuts):
        parts += _parts_of_batch(engine.exchange, number, samples, plan, columns, own)
    return values_by_name(parts, columns)


def _predict_shards(
    replica: Replica,
    function: ScoreFunction,
    batch: ShardedBatch,
    number: int,
    own: Mapping[int, _Said],
    seed: int,
) -> None:
    for shard in batch.plan.shards_of(replica.number):
        if shard in batch.shards:
            where = f"batch {number} of a prediction, shard {shard}"
            _refuse_left_out(batch, shard, where)
            values = values_of_shard(replica, function, batch, (number, shard), seed, where)
            own[replica.number].add(values, number, batch.size_of(shard), where)


def _refuse_left_out(batch: ShardedBatch, shard: int, where: str) -> None:
    samples, left = batch.size_of(shard), batch.count_of(shard).samples
    if left < samples:
        raise LossError(
            f"{where}: collate returned {left} rows for {samples} samples: expected a row for each "
            f"sample, as predictions are in the order of the data set and have one for each. Leave "
            f"samples out of the data set instead, with torch.utils.data.Subset"
        )


class _Said:
    """Collects the values of one device's shards, batch by batch."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self._batches: dict[int, list[dict[Column, Rows]]] = {}
        """Batch to its shards' values, by column, on the host."""

    def add(self, values: dict[str, Any], number: int, samples: int, where: str) -> None:
        """Add one shard's values to those of batch ``number``."""
        found: dict[Column, Rows] = {}
        for name, value in values.items():
            found |= columns_of(name, value, samples, where)
        columns = list(found)
        if self.columns and columns != self.columns:
            raise DisagreementError(
                f"{where}: the function returned {columns}, and {self.columns} before; expected "
                f"the same names, dtypes and shapes for every shard"
            )
        self.columns = columns
        self._batches.setdefault(number, []).append(found)

    def message(self, number: int, columns: list[Column]) -> bytes:
        """Return a batch's values as bytes, and forget them."""
        return write_columns(self._batches.pop(number, []), columns)


def _parts_of_batch(
    exchange: Exchange,
    number: int,
    samples: int,
    plan: Plan,
    columns: list[Column],
    own: Mapping[int, _Said],
) -> list[dict[Column, Rows]]:
    """Bring one batch's values from all devices, by column, in the devices' order."""
    texts = {device: said.message(number, columns) for device, said in own.items()}
    messages = exchange.transport.gather_bytes(texts)
    counts = _samples_of_devices(samples, plan)
    return [
        read_columns(message, count, columns)
        for message, count in zip(messages, counts, strict=True)
    ]


def _samples_of_devices(samples: int, plan: Plan) -> list[int]:
    """Count the samples of a batch that each device computes."""
    bounds = cut_bounds(samples, plan.shards)
    return [
        sum(bounds[shard][1] - bounds[shard][0] for shard in plan.shards_of(device))
        for device in range(plan.devices)
    ]

"""Computes a model's values for every sample of a data set, alike on any number of devices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.shard import Plan, cut_bounds
from onefold.engine.engine import Engine
from onefold.engine.evaluation import DataCall, ScoreFunction, agree_on_lines, values_of_shard
from onefold.engine.replica import Replica
from onefold.errors import DisagreementError, LossError
from onefold.exchange.exchange import Exchange

__all__ = ["gather", "predict"]


def predict(
    engine: Engine, function: ScoreFunction, batches: Iterable[ShardedBatch], call: DataCall
) -> dict[str, torch.Tensor]:
    """Compute a function's values for all samples of all batches, in order, on every device.

    Args:
        engine: the devices of this process.
        function: the user's.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.

    Raises:
        LossError: a value is not a tensor with one row per sample.
        DisagreementError: names, dtypes or shapes differ between shards.
    """
    own = {replica.number: _Rows() for replica in engine.replicas}
    cuts: list[tuple[int, Plan]] = []
    batch = None
    with engine.evaluating():
        for number, batch in enumerate(batches):
            # Only now: the data's digest is known once the first batch has been read.
            if number == 0:
                call.agree(engine, batch)
            cuts.append((batch.samples, batch.plan))
            with engine.noting("the first batch of a prediction", wanted=number == 0):
                for replica in engine.replicas:
                    with engine.attached(replica):
                        _predict_shards(replica, function, batch, number, own, engine.seed)
    call.agree_on_end(engine, sum(samples for samples, _ in cuts), batch)
    columns = agree_on_lines(engine.exchange, {n: rows.columns for n, rows in own.items()})
    # Batch by batch: messages stay small, and each batch's own rows are freed once they are sent.
    parts = [
        _join_batch(engine.exchange, number, *cut, columns, own) for number, cut in enumerate(cuts)
    ]
    return {
        json.loads(column)[0]: torch.cat([part[column] for part in parts]) for column in columns
    }


def _predict_shards(
    replica: Replica,
    function: ScoreFunction,
    batch: ShardedBatch,
    number: int,
    own: Mapping[int, _Rows],
    seed: int,
) -> None:
    for shard in batch.plan.shards_of(replica.number):
        if shard in batch.shards:
            where = f"batch {number} of a prediction, shard {shard}"
            values = values_of_shard(replica, function, batch, (number, shard), seed, where)
            own[replica.number].add(values, number, batch.size_of(shard), where)


def gather(exchange: Exchange, own: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
    """Gather numbers by name from every device, in the devices' order.

    Args:
        exchange: with all devices.
        own: for each own device its numbers, by name.

    Raises:
        ValueError: a name is empty or has several lines.
        DisagreementError: the names differ between devices.
    """
    # Names travel between devices one per line.
    for name in next(iter(own.values())):
        if "\n" in name or not name:
            raise ValueError(f"expected names of one line for numbers, got {name!r}")
    names = agree_on_lines(exchange, {number: list(values) for number, values in own.items()})
    rows = {
        number: torch.tensor([values[name] for name in names], dtype=torch.float64)
        for number, values in own.items()
    }
    return [dict(zip(names, row, strict=True)) for row in exchange.transport.share(rows).tolist()]


class _Rows:
    """Collects the values of one device's shards, batch by batch."""

    def __init__(self) -> None:
        self.columns: list[str] = []
        """Name, dtype and shape of one sample's value, as JSON."""
        self.batches: dict[int, list[dict[str, torch.Tensor]]] = {}
        """Batch to its shards' values, by column, on the host."""

    def add(self, values: dict[str, Any], number: int, samples: int, where: str) -> None:
        """Add one shard's values to those of batch ``number``."""
        rows = {}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.dim() < 1 or len(value) != samples:
                came = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
                raise LossError(
                    f"{where}: expected {name!r} to be a tensor with one row for each of "
                    f"{samples} samples, got {came}"
                )
            kind = [name, str(value.dtype).removeprefix("torch."), list(value.shape[1:])]
            # A copy even on the host: the value may be a view of a large tensor, or of a buffer.
            rows[json.dumps(kind)] = value.detach().to("cpu", copy=True)
        columns = list(rows)
        if self.columns and columns != self.columns:
            raise DisagreementError(
                f"{where}: the function returned {columns}, and {self.columns} before; expected "
                f"the same names, dtypes and shapes for every shard"
            )
        self.columns = columns
        self.batches.setdefault(number, []).append(rows)

    def message(self, number: int, columns: list[str]) -> torch.Tensor:
        """Return a batch's values as (k,) uint8, column by column, and forget them."""
        parts = self.batches.pop(number, [])
        values = [torch.cat([part[column] for part in parts]) for column in columns if parts]
        flat = [value.contiguous().view(-1).view(torch.uint8) for value in values]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.uint8)


def _join_batch(
    exchange: Exchange,
    number: int,
    samples: int,
    plan: Plan,
    columns: list[str],
    own: Mapping[int, _Rows],
) -> dict[str, torch.Tensor]:
    """Join one batch's values from all devices, by column."""
    counts = _samples_of_devices(samples, plan)
    texts = {
        device: rows.message(number, columns).numpy().tobytes() for device, rows in own.items()
    }
    # frombuffer refuses an empty buffer: a device without samples gets a byte that nobody reads.
    messages = [
        torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)
        for text in exchange.transport.gather_bytes(texts)
    ]
    return {
        column: torch.cat(
            [
                _column(message, count, columns, index)
                for message, count in zip(messages, counts, strict=True)
            ]
        )
        for index, column in enumerate(columns)
    }


def _samples_of_devices(samples: int, plan: Plan) -> list[int]:
    """Count the samples of a batch that each device computes."""
    bounds = cut_bounds(samples, plan.shards)
    return [
        sum(bounds[shard][1] - bounds[shard][0] for shard in plan.shards_of(device))
        for device in range(plan.devices)
    ]


def _column(message: torch.Tensor, count: int, columns: list[str], index: int) -> torch.Tensor:
    """Read one column from one device's message: (count, ...) of the column's dtype."""
    ends = list(accumulate(count * _nbytes(column) for column in columns))
    start = ends[index - 1] if index else 0
    _, dtype, shape = json.loads(columns[index])
    # A copy starts at an aligned address, as viewing it in a wider dtype demands.
    part = message[start : ends[index]].clone()
    return part.view(getattr(torch, dtype)).view(count, *shape)


def _nbytes(column: str) -> int:
    """Return the size of one sample's value."""
    _, dtype, shape = json.loads(column)
    return int(prod(shape) * getattr(torch, dtype).itemsize)

"""What devices report to each other in a step, beside their partial sums."""

from typing import Any

import pytest
import torch

from onefold.core.flat import FlatTensors, lay_out
from onefold.core.results import ChangedBuffers, ShardResult
from onefold.core.storage import MOST, Storage
from onefold.core.values import ShardValues
from onefold.exchange.shard_table import ShardTable
from tests.exchange.together import CPU

SHARDS = 5
BUFFERS = {"mean": torch.zeros(3), "count": torch.zeros((), dtype=torch.int64)}


def table() -> ShardTable:
    parameters, buffers = lay_out({n: torch.ones(1) for n in "abc"}), lay_out(BUFFERS)
    sizes: dict[str, Any] = {"segments": (), "shards": SHARDS, "devices": 2}
    storage = Storage(parameters=parameters, other=lay_out({}), buffers=buffers, **sizes)
    return ShardTable.private(storage, CPU)


def buffers() -> FlatTensors:
    flat = FlatTensors(lay_out(BUFFERS), device=CPU)
    flat.write([torch.full((3,), 5.0), torch.tensor(5)])
    return flat


def result(total: float | None, weight: float, *gave: bool) -> ShardResult:
    return ShardResult(
        gradients=[torch.ones(1) if one else None for one in gave],
        total=None if total is None else torch.tensor(total, dtype=torch.float64),
        weight=weight,
        buffers=ChangedBuffers((1,), buffers()),
        values=ShardValues(("mean a",), torch.full((1, 2), weight, dtype=torch.float64)),
    )


def seen(table: ShardTable) -> list[object]:
    rows = [view.tolist() for row in table.buffer_rows for view in row.views]
    columns = (table.weights, table.totals, table.changed, table.gave, table.values, table.kinds)
    return [*(column.tolist() for column in columns), rows]


def test_what_a_shard_gave_travels_in_the_row_of_its_device() -> None:
    sent, received = table(), table()
    for each in (sent, received):
        each.widen(MOST)
    empty = seen(sent)
    sent.record(1, 3, result(1 / 3, 0.1, True, False, True))
    sent.record(1, 4, result(None, -2.0, True, True, False))
    sent.set_total(4, torch.tensor(7.0, dtype=torch.float64))
    assert sent.weights.tolist() == [0, 0, 0, 0.1, -2.0]
    assert sent.totals.tolist() == [0, 0, 0, 1 / 3, 7]
    assert sent.gave.tolist() == [[0, 0, 0], [2, 1, 1]]
    assert sent.changed.tolist() == [[0, 0]] * 3 + [[0, 1]] * 2
    assert [view.tolist() for view in sent.buffer_rows[3].views] == [[0.0] * 3, 5]
    assert sent.values[:, 0, 0].tolist() == [0, 0, 0, 0.1, -2.0]
    received.record(1, 2, result(1.0, 1.0, True, True, True))
    row = sent.row(1, range(2, 5))
    assert row.shape == received.empty_row(1, range(2, 5)).shape
    received.take_row(1, range(2, 5), row)
    received.rows_memory.copy_(sent.rows_memory)  # which travels by itself
    assert seen(received) == seen(sent)
    sent.clear_rows(1, range(2, 5))
    assert seen(sent)[:4] == [empty[0], empty[1], empty[2], empty[3]]
    assert row.equal(received.row(1, range(2, 5))), "it is a copy"
    with pytest.raises(ValueError, match=r"reshape|size"):
        received.take_row(1, range(2, 5), sent.row(0, range(2)))

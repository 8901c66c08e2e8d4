"""What devices report to each other in a step, beside their partial sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onefold.core.flat import lay_out
from onefold.core.storage import BoardShape
from onefold.core.values import MOST, ChangedBuffers, ShardResult, ShardValues
from onefold.exchange.board import Board
from tests.exchange.together import CPU
from tests.tables import for_each

DEVICES, SHARDS, PARAMETERS = 2, 5, 3
BUFFERS = {
    "mean": torch.zeros(3),
    "count": torch.zeros((), dtype=torch.int64),
    "var": torch.ones(2),
}
"""Two sections: two entries of one, one of the other."""
ZEROS = [[0.0] * 3, [0], [0.0] * 2]


def shape(parameters: int = PARAMETERS, buffers: bool = True) -> BoardShape:
    return BoardShape(DEVICES, SHARDS, parameters, lay_out(BUFFERS if buffers else {}))


def empty(parameters: int = PARAMETERS) -> Board:
    return Board.private(shape(parameters), CPU)


def result(
    *gave: bool, total: float | None = 1.5, weight: float = 4.0, changed: tuple[int, ...] = ()
) -> ShardResult:
    layout = lay_out(BUFFERS)
    sections = [
        torch.full((numel,), 5).to(dtype)
        for numel, dtype in zip(layout.numels, layout.dtypes, strict=True)
    ]
    return ShardResult(
        gradients=[torch.ones(1) if one else None for one in gave],
        total=None if total is None else torch.tensor(total, dtype=torch.float64),
        weight=weight,
        buffers=ChangedBuffers(changed, sections) if changed else None,
    )


def buffers_of(board: Board, shard: int) -> list[list[float]]:
    return [view.flatten().tolist() for view in board.buffer_rows[shard].views]


def test_what_a_shard_gave_is_in_its_row_and_counted() -> None:
    board = empty()
    board.record(1, 3, result(True, False, True, total=1 / 3, weight=0.1))
    board.record(1, 4, result(True, True, False, total=None, weight=-2.0))  # a code for a weight
    assert board.weights.tolist() == [0, 0, 0, 0.1, -2.0]
    assert board.totals.tolist() == [0, 0, 0, 1 / 3, 0]
    board.set_total(4, torch.tensor(7.0, dtype=torch.float64))
    assert board.totals.tolist() == [0, 0, 0, 1 / 3, 7]
    assert board.gave.tolist() == [[0, 0, 0], [2, 1, 1]]
    assert not board.changed.any()
    board.clear_rows(1, range(3, 4))
    assert (board.weights.tolist(), board.totals.tolist()) == ([0, 0, 0, 0, -2], [0, 0, 0, 0, 7])
    assert not board.gave.any()


@for_each("indices", [(0, 1, 2), (0,), (1,), (2,)])
def test_the_buffers_that_changed_are_written(indices: tuple[int, ...]) -> None:
    board = empty()
    board.record(0, 2, result(True, True, True, changed=indices))
    assert board.changed.tolist() == [
        [int(s == 2 and n in indices) for n in range(3)] for s in range(5)
    ]
    wanted = [[5.0] * len(row) if n in indices else row for n, row in enumerate(ZEROS)]
    assert [buffers_of(board, shard) for shard in (1, 2, 3)] == [ZEROS, wanted, ZEROS]
    other = empty()
    other.rows_memory.copy_(board.rows_memory)  # by which they travel
    assert buffers_of(other, 2) == wanted


@for_each("parameters", [0, 1, 3, 8])
@for_each(("device", "shards"), [(0, range(2)), (1, range(2, 5)), (1, range(5, 5)), (0, range(5))])
def test_a_row_arrives_as_it_left_in_the_place_of_an_older_one(
    parameters: int, device: int, shards: range
) -> None:
    sent, received = empty(parameters), empty(parameters)
    for shard in range(SHARDS):
        gave = [(shard + n) % 2 == 0 for n in range(parameters)]
        sent.record(int(shard >= 2), shard, result(*gave, total=shard / 3, weight=shard + 0.1))
        sent.changed[shard, shard % 3] = 1
        received.record(device, shard, result(*[True] * parameters))
        if shard not in shards:
            received.clear_rows(device, range(shard, shard + 1))
    row, message = sent.row(device, shards), received.empty_row(device, shards)
    assert (message.dtype, message.shape) == (torch.uint8, row.shape)
    message.copy_(row)
    before = sent.row(0, range(SHARDS))
    received.take_row(device, shards, message)
    assert received.gave[device].tolist() == sent.gave[device].tolist()
    assert not received.gave[1 - device].any()
    sent.clear_rows(0, range(SHARDS))
    sent.take_row(0, range(SHARDS), before)  # a row is a copy
    here = slice(shards.start, shards.stop)
    elsewhere = [shard for shard in range(SHARDS) if shard not in shards]
    for name in ("weights", "totals", "changed"):
        assert getattr(received, name)[here].tolist() == getattr(sent, name)[here].tolist()
        assert not getattr(received, name)[elsewhere].any()


def test_a_model_without_buffers_has_rows_as_well() -> None:
    sent, received = (Board.private(shape(buffers=False), CPU) for _ in range(2))
    sent.record(0, 0, result(True, False, True))
    received.take_row(0, range(2), sent.row(0, range(2)))
    assert received.weights.tolist() == [4, 0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"reshape|size"):
        received.take_row(1, range(2, 5), sent.row(0, range(2)))


def test_boards_in_the_same_memory_are_one() -> None:
    sizes = shape()
    known = torch.zeros(sum(sizes.host_bytes), dtype=torch.uint8)
    computed = torch.zeros(sizes.device_bytes, dtype=torch.uint8)
    one, other = (Board(sizes, known, computed) for _ in range(2))
    one.record(0, 1, result(True, True, False, changed=(0, 1, 2)))
    assert (other.weights[1], other.totals[1], other.gave[0].tolist()) == (4.0, 1.5, [1, 1, 0])
    assert (other.changed[1].tolist(), buffers_of(other, 1)) == ([1] * 3, buffers_of(one, 1))
    for wrong in ((known[64:], computed), (known, computed[64:])):
        with pytest.raises(RuntimeError, match="size"):
            Board(sizes, *wrong)


# Values beside the loss


def beside(number: float, lines: tuple[str, ...] = ("mean a", "sum b")) -> ShardValues:
    return ShardValues(lines, torch.full((len(lines), 2), number, dtype=torch.float64))


def test_values_are_written_where_there_is_room_and_travel_with_their_row() -> None:
    boards, values = [empty(), empty()], beside(3.0)
    given = replace(result(True, True, True), values=values)
    boards[0].record(1, 3, given)
    assert boards[0].kinds.tolist() == [0, 0, 0, values.kind, 0]
    assert (boards[0].given, boards[0].width) == ({3: values}, 0)
    without = boards[0].row(1, range(2, 5)).nbytes
    for board in boards:
        board.widen(3)
    boards[0].clear_rows(0, range(SHARDS))
    assert (boards[0].given, boards[0].kinds.any().item()) == ({}, False)
    boards[0].record(1, 3, given)
    assert boards[0].values[3].tolist() == [[3, 3], [3, 3], [0, 0]]
    row = boards[0].row(1, range(2, 5))
    assert row.nbytes == without + 3 * 3 * 2 * 8 == boards[1].empty_row(1, range(2, 5)).nbytes
    boards[1].take_row(1, range(2, 5), row)
    for name in ("values", "kinds", "totals"):
        assert getattr(boards[1], name).tolist() == getattr(boards[0], name).tolist()
    assert buffers_of(boards[1], 3) == ZEROS


def test_there_is_room_for_the_most_numbers() -> None:
    board = empty()
    board.widen(MOST)
    lines = tuple(f"mean {n}" for n in range(MOST))
    for shard in range(SHARDS):
        board.record(0, shard, replace(result(True), values=beside(shard + 1.0, lines)))
    assert board.values.sum(dim=(1, 2)).tolist() == [2 * MOST * (n + 1.0) for n in range(SHARDS)]
    assert board.totals.tolist() == [1.5] * SHARDS
    assert [buffers_of(board, shard) for shard in range(SHARDS)] == [ZEROS] * SHARDS

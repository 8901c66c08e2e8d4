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


def shape(parameters: int = PARAMETERS, buffers: bool = True) -> BoardShape:
    return BoardShape(DEVICES, SHARDS, parameters, lay_out(BUFFERS if buffers else {}))


@pytest.fixture
def board() -> Board:
    return Board.private(shape(), CPU)


def result(
    *gave: bool,
    total: float | None = 1.5,
    weight: float = 4.0,
    buffers: ChangedBuffers | None = None,
) -> ShardResult:
    return ShardResult(
        gradients=[torch.ones(1) if one else None for one in gave],
        total=None if total is None else torch.tensor(total, dtype=torch.float64),
        weight=weight,
        buffers=buffers,
    )


def changed(*indices: int, value: float) -> ChangedBuffers:
    layout = lay_out(BUFFERS)
    sections = [
        torch.full((numel,), value).to(dtype)
        for numel, dtype in zip(layout.numels, layout.dtypes, strict=True)
    ]
    return ChangedBuffers(indices, sections)


def buffers_of(board: Board, shard: int) -> list[list[float]]:
    return [view.flatten().tolist() for view in board.buffer_rows[shard].views]


ZEROS = [[0.0] * 3, [0], [0.0] * 2]


def test_a_new_board_is_empty(board: Board) -> None:
    assert board.weights.tolist() == board.totals.tolist() == [0.0] * SHARDS
    assert board.gave.tolist() == [[0] * PARAMETERS] * DEVICES
    assert board.changed.tolist() == [[0] * len(BUFFERS)] * SHARDS
    assert [buffers_of(board, shard) for shard in range(SHARDS)] == [ZEROS] * SHARDS
    assert board.on_host


# What a shard gave


def test_what_a_shard_gave_is_written_in_its_row(board: Board) -> None:
    board.record(1, 3, result(True, False, True, total=1 / 3, weight=0.1))
    assert board.weights.tolist() == [0, 0, 0, 0.1, 0]
    assert board.totals.tolist() == [0, 0, 0, 1 / 3, 0]
    assert board.gave.tolist() == [[0, 0, 0], [1, 0, 1]]
    assert not board.changed.any()


def test_the_shards_that_gave_a_gradient_are_counted(board: Board) -> None:
    for shard, gave in enumerate([(True, True, True), (False, True, False), (True, True, False)]):
        board.record(0, shard, result(*gave))
    assert board.gave.tolist() == [[2, 3, 1], [0, 0, 0]]


def test_a_code_in_the_place_of_a_weight_is_kept(board: Board) -> None:
    board.record(0, 0, result(True, True, True, weight=-2.0))
    assert board.weights[0] == -2.0


def test_a_total_that_is_not_known_yet_is_left_to_later(board: Board) -> None:
    board.record(0, 1, result(True, True, True, total=None))
    assert board.totals.tolist() == [0.0] * SHARDS
    board.set_total(1, torch.tensor(7.0, dtype=torch.float64))
    assert board.totals.tolist() == [0, 7, 0, 0, 0]


def test_buffers_that_all_changed_are_written(board: Board) -> None:
    board.record(0, 2, result(True, True, True, buffers=changed(0, 1, 2, value=5)))
    assert board.changed[2].tolist() == [1, 1, 1]
    assert buffers_of(board, 2) == [[5.0] * 3, [5], [5.0] * 2]
    assert buffers_of(board, 1) == buffers_of(board, 3) == ZEROS


@pytest.mark.parametrize("index", range(3))
def test_a_buffer_that_did_not_change_is_not_written(board: Board, index: int) -> None:
    board.record(0, 2, result(True, True, True, buffers=changed(index, value=5)))
    assert board.changed[2].tolist() == [float(n == index) for n in range(3)]
    wanted = [[5.0] * len(row) if n == index else row for n, row in enumerate(ZEROS)]
    assert buffers_of(board, 2) == wanted


def test_rows_of_one_device_are_emptied_and_no_others(board: Board) -> None:
    for shard in range(SHARDS):
        device = int(shard >= 2)
        board.record(device, shard, result(True, True, True, buffers=changed(0, value=1)))
    board.clear_rows(1, range(2, 4))
    assert board.weights.tolist() == [4, 4, 0, 0, 4]
    assert board.totals.tolist() == [1.5, 1.5, 0, 0, 1.5]
    assert board.changed[:, 0].tolist() == [1, 1, 0, 0, 1]
    assert board.gave.tolist() == [[2, 2, 2], [0, 0, 0]]


# Rows on their way


def filled(parameters: int = PARAMETERS) -> Board:
    board = Board.private(shape(parameters), CPU)
    for shard in range(SHARDS):
        gave = [(shard + n) % 2 == 0 for n in range(parameters)]
        board.record(int(shard >= 2), shard, result(*gave, total=shard / 3, weight=shard + 0.1))
        board.changed[shard, shard % 3] = 1
    return board


@for_each("parameters", [0, 1, 3, 8])
@for_each(
    ("device", "shards"),
    [(0, range(2)), (1, range(2, 5)), (1, range(5, 5)), (0, range(5))],
    ids=str,
)
def test_a_row_arrives_as_it_left(parameters: int, device: int, shards: range) -> None:
    sent = filled(parameters)
    received = Board.private(shape(parameters), CPU)
    row = sent.row(device, shards)
    message = received.empty_row(device, shards)
    assert (message.dtype, message.shape) == (torch.uint8, row.shape)
    message.copy_(row)
    received.take_row(device, shards, message)
    here = slice(shards.start, shards.stop)
    elsewhere = [shard for shard in range(SHARDS) if shard not in shards]
    assert received.gave[device].tolist() == sent.gave[device].tolist()
    assert not received.gave[1 - device].any()
    for mine, theirs in (
        (received.weights, sent.weights),
        (received.totals, sent.totals),
        (received.changed, sent.changed),
    ):
        assert mine[here].tolist() == theirs[here].tolist()
        assert not mine[elsewhere].any()


def test_a_row_takes_the_place_of_an_older_one() -> None:
    board = filled()
    empty = Board.private(shape(), CPU)
    board.take_row(1, range(2, 5), empty.row(1, range(2, 5)))
    assert board.weights.tolist() == [0.1, 1.1, 0, 0, 0]
    assert not board.gave[1].any()
    assert board.gave[0].any()


def test_a_row_is_a_copy() -> None:
    board = filled()
    row = board.row(0, range(2))
    before = row.clone()
    board.clear_rows(0, range(2))
    assert row.equal(before)


def test_a_row_of_another_size_is_refused() -> None:
    board = filled()
    with pytest.raises(ValueError, match=r"reshape|size"):
        board.take_row(1, range(2, 5), board.row(0, range(2)))


def test_a_model_without_buffers_has_rows_as_well() -> None:
    sent, received = (Board.private(shape(buffers=False), CPU) for _ in range(2))
    sent.record(0, 0, result(True, False, True))
    received.take_row(0, range(2), sent.row(0, range(2)))
    assert received.weights.tolist() == [4, 0, 0, 0, 0]
    assert received.buffer_rows[0].views == []


# Where it lies


def test_boards_in_the_same_memory_are_one() -> None:
    sizes = shape()
    known = torch.zeros(sum(sizes.host_bytes), dtype=torch.uint8)
    computed = torch.zeros(sizes.device_bytes, dtype=torch.uint8)
    one, other = (Board(sizes, known, computed) for _ in range(2))
    one.record(0, 1, result(True, True, False, buffers=changed(0, 1, 2, value=2)))
    assert other.weights[1] == 4.0
    assert other.totals[1] == 1.5
    assert other.gave[0].tolist() == [1, 1, 0]
    assert other.changed[1].tolist() == [1, 1, 1]
    assert buffers_of(other, 1) == [[2.0] * 3, [2], [2.0] * 2]


def test_the_memory_of_the_rows_is_that_of_the_buffers(board: Board) -> None:
    """By it, they travel."""
    other = Board.private(shape(), CPU)
    board.record(0, 4, result(True, True, True, buffers=changed(0, 1, 2, value=3)))
    other.rows_memory.copy_(board.rows_memory)
    assert buffers_of(other, 4) == buffers_of(board, 4)


@for_each("which", ["known", "computed"])
def test_memory_of_another_size_is_refused(which: str) -> None:
    sizes = shape()
    nbytes = {"known": sum(sizes.host_bytes), "computed": sizes.device_bytes}
    nbytes[which] -= 64
    with pytest.raises(RuntimeError, match=r"size"):
        Board(sizes, *(torch.zeros(nbytes[k], dtype=torch.uint8) for k in ("known", "computed")))


# Values beside the loss


def beside(number: float, *, lines: tuple[str, ...] = ("mean a", "sum b")) -> ShardValues:
    return ShardValues(lines, torch.full((len(lines), 2), number, dtype=torch.float64))


def test_values_are_written_where_there_is_room(board: Board) -> None:
    values = beside(3.0)
    board.record(1, 3, replace(result(True, True, True), values=values))
    assert board.kinds.tolist() == [0, 0, 0, values.kind, 0]
    assert board.given == {3: values}
    assert (board.width, board.values.shape) == (0, (SHARDS, 0, 2))
    board.widen(3)
    board.clear_rows(0, range(SHARDS))
    assert not board.kinds.any()
    assert board.given == {}
    board.record(1, 3, replace(result(True, True, True), values=values))
    assert board.values[3].tolist() == [[3, 3], [3, 3], [0, 0]]
    assert not board.values[:3].any()
    assert not board.totals[:3].any()


def test_values_travel_with_their_row_once_they_have_room() -> None:
    boards = [Board.private(shape(), CPU) for _ in range(2)]
    without = boards[0].row(1, range(2, 5)).nbytes
    for board in boards:
        board.widen(2)
    boards[0].record(1, 3, replace(result(True, True, True), values=beside(0.5)))
    row = boards[0].row(1, range(2, 5))
    assert row.nbytes == without + 3 * 2 * 2 * 8 == boards[1].empty_row(1, range(2, 5)).nbytes
    boards[1].take_row(1, range(2, 5), row)
    assert boards[1].values.equal(boards[0].values)
    assert boards[1].kinds.tolist() == boards[0].kinds.tolist()
    assert boards[1].totals.equal(boards[0].totals)
    assert buffers_of(boards[1], 3) == ZEROS


def test_there_is_room_for_the_most_numbers(board: Board) -> None:
    board.widen(MOST)
    lines = tuple(f"mean {n}" for n in range(MOST))
    for shard in range(SHARDS):
        values = beside(float(shard + 1), lines=lines)
        board.record(0, shard, replace(result(True, True, True), values=values))
    assert board.values.sum(dim=(1, 2)).tolist() == [2 * MOST * (n + 1.0) for n in range(SHARDS)]
    assert board.totals.tolist() == [1.5] * SHARDS
    assert [buffers_of(board, shard) for shard in range(SHARDS)] == [ZEROS] * SHARDS

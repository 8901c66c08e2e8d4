"""The sizes that all devices of a run have in common."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.flat import lay_out
from onefold.core.fold import blocks_of
from onefold.core.precision import added_up_in
from onefold.core.storage import BoardShape, Storage, cut_pieces
from onefold.exchange.board import Board
from tests.tables import for_each

TRAINED = {"weight": torch.zeros(5, 3), "half": torch.zeros(7, dtype=torch.bfloat16)}
BUFFERS = {"mean": torch.zeros(3), "count": torch.zeros((), dtype=torch.int64)}


def storage(*, shards: int, devices: int) -> Storage:
    trained = lay_out(TRAINED)
    return Storage.alike(
        trained,
        other=lay_out({"frozen": torch.zeros(4)}),
        buffers=lay_out(BUFFERS),
        pieces=cut_pieces(trained, by_element=True),
        shards=shards,
        devices=devices,
    )


def test_parameters_gradients_and_masters_may_have_one_layout() -> None:
    made = storage(shards=4, devices=2)
    assert made.parameters is made.masters
    assert not made.rounds
    assert [entry.name for entry in made.other.entries] == ["frozen"]
    full = dataclasses.replace(made.parameters, dtypes=(torch.float32, torch.float64))
    assert full.converted(added_up_in) is full


def test_gradients_of_low_precision_are_added_up_in_float32() -> None:
    made = storage(shards=4, devices=2)
    assert made.parameters.dtypes == (torch.float32, torch.bfloat16)
    assert made.gradients.dtypes == (torch.float32, torch.float32)
    assert made.gradients.entries == made.parameters.entries


def test_masters_may_have_another_dtype_than_parameters() -> None:
    made = storage(shards=4, devices=2).with_masters(torch.float32)
    assert made.rounds
    assert made.masters.dtypes == (torch.float32, torch.float32)
    assert made.masters.entries == made.parameters.entries
    assert storage(shards=4, devices=2).with_masters(None) == storage(shards=4, devices=2)


def test_a_layout_is_not_made_narrower() -> None:
    with pytest.raises(ValueError, match="as wide as"):
        storage(shards=1, devices=1).parameters.converted(lambda _: torch.float16)


def test_a_device_alone_publishes_one_sum() -> None:
    assert [storage(shards=v, devices=1).slots for v in (1, 2, 7, 64)] == [1, 1, 1, 1]


@given(shards=st.integers(2, 200), data=st.data())
def test_there_is_a_slot_for_each_block_of_any_plan(shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shards))
    stop = data.draw(st.integers(start, shards))
    blocks = blocks_of(range(start, stop), shards)
    assert len(blocks) <= storage(shards=shards, devices=2).slots


def test_some_plan_needs_all_slots() -> None:
    slots = storage(shards=16, devices=3).slots
    assert max(len(blocks_of(range(a, b), 16)) for a in range(16) for b in range(a, 17)) == slots


@for_each(("shards", "devices"), [(1, 1), (4, 2), (7, 3), (65, 64)])
def test_a_board_of_these_sizes_has_room_for_every_row(shards: int, devices: int) -> None:
    shape = storage(shards=shards, devices=devices).board
    assert shape == BoardShape(devices, shards, 2, shape.buffers)
    assert all(nbytes % 64 == 0 for nbytes in (*shape.host_bytes, shape.device_bytes))
    board = Board.private(shape, torch.device("cpu"))
    assert board.weights.shape == board.totals.shape == (shards,)
    assert board.gave.shape == (devices, 2)
    assert board.changed.shape == (shards, 2)
    assert len(board.buffer_rows) == shards
    assert [view.dtype for view in board.buffer_rows[-1].views] == [torch.float32, torch.int64]
    board.buffer_rows[-1].views[-1].fill_(-1)
    assert not board.totals.any()


def test_rows_of_a_board_do_not_touch() -> None:
    board = Board.private(storage(shards=3, devices=2).board, torch.device("cpu"))
    board.weights[:] = board.gave[:] = board.changed[:] = 1
    assert int(board.known.count_nonzero()) == 3 * 2 + 2 * 2 + 3 * 2  # 1.0 has two bytes
    board.totals.fill_(7.0)
    for number, row in enumerate(board.buffer_rows):
        row.views[0].fill_(number + 1.0)
    assert board.totals.tolist() == [7.0] * 3
    assert [row.views[0].tolist() for row in board.buffer_rows] == [[n + 1.0] * 3 for n in range(3)]


def test_a_model_without_buffers_has_an_empty_row() -> None:
    shape = BoardShape(2, 4, 3, lay_out({}))
    assert shape.host_bytes == (256, 256, 0, 256, 256)
    assert shape.device_bytes == 256 + 4 * 32 * 16
    assert Board.private(shape, torch.device("cpu")).changed.shape == (4, 0)

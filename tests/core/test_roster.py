from __future__ import annotations

import pytest
import torch

from onefold.core.flat import Piece
from onefold.core.roster import Roster
from onefold.core.shard import Plan
from tests.tables import for_each

CPU = torch.device("cpu")
PIECES = [Piece(number, 0, 10, whole=True) for number in range(6)]


def first() -> Roster:
    return Roster.first([CPU] * 3, plan=Plan((2, 1, 1)), pieces=PIECES)


def test_a_run_begins_with_spans_of_even_size() -> None:
    roster = first()
    assert (roster.generation, roster.hosts) == (0, (0, 0, 0))
    assert roster.spans == (range(2), range(2, 4), range(4, 6))
    assert [roster.owner_of(piece) for piece in range(6)] == [0, 0, 1, 1, 2, 2]


def test_the_next_one_is_another_value() -> None:
    roster = first()
    spans = (range(0), range(5), range(5, 6))
    later = roster.next(plan=Plan((0, 3, 1)), spans=spans)
    assert (later.generation, later.plan.counts, later.spans) == (1, (0, 3, 1), spans)
    assert later.next().spans == spans
    assert roster == first()
    assert [later.owner_of(piece) for piece in range(6)] == [1, 1, 1, 1, 1, 2]


@for_each(
    ("spans", "words"),
    [
        ([range(3), range(3, 6)], "3 devices, got 3 hosts, 3 shares and 2 spans"),
        ([range(3), range(4, 6), range(6, 6)], "got piece 3 in 0"),
        ([range(3), range(3, 5), range(5, 5)], "spans of 6 pieces in all"),
        ([range(3), range(3, 2), range(2, 6)], "got piece 2 in 2"),
        ([range(3), (4, 3), (5,)], "pieces of device 1 in ascending order"),
    ],
)
def test_spans_hold_every_piece_once(spans: list[range], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        first().next(spans=spans)


def test_a_plan_for_other_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="3 devices, got 3 hosts, 2 shares"):
        first().next(plan=Plan((3, 1)))

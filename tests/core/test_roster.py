"""All devices of a run, and who owns what of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onefold.core.flat import Piece
from onefold.core.roster import Roster, Team
from onefold.core.shard import Plan
from onefold.core.world import World
from tests.tables import for_each


def test_spans_are_even_at_first_and_hold_every_piece_once() -> None:
    pieces = [Piece(number, 0, 10, whole=True) for number in range(6)]
    roster = Roster.first([torch.device("cpu")] * 3, plan=Plan((2, 1, 1)), pieces=pieces)
    assert (roster.generation, roster.hosts) == (0, (0, 0, 0))
    assert [roster.owner_of(piece) for piece in range(6)] == [0, 0, 1, 1, 2, 2]
    later = roster.next(plan=Plan((0, 3, 1)), spans=(range(0), range(5), range(5, 6)))
    assert (later.generation, later.plan.counts) == (1, (0, 3, 1))
    assert [later.owner_of(piece) for piece in range(6)] == [1, 1, 1, 1, 1, 2]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"spans": [range(3), range(3, 6)]}, "3 devices, got 3 hosts, 3 shares and 2 spans"),
        ({"spans": [range(3), range(4, 6), range(6, 6)]}, "got piece 3 in 0"),
        ({"spans": [range(3), range(3, 2), range(2, 6)]}, "got piece 2 in 2"),
        ({"plan": Plan((3, 1))}, "3 devices, got 3 hosts, 2 shares"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=words):
            roster.next(**change)


@for_each(
    ("devices", "world", "hosts"),
    [
        (4, {"launcher": "torch", "size": 4, "local_size": 2}, (0, 0, 1, 1)),
        (5, {"launcher": "torch", "size": 5, "local_size": 2}, (0, 0, 1, 1, 2)),
        # The launcher does not say how many are on a host.
        (2, {"launcher": "torch", "size": 2, "local_size": 0}, (0, 1)),
        # One process may drive several devices: its local size says nothing of them.
        (4, {"launcher": "none"}, (0, 0, 0, 0)),
        (4, {"launcher": "onefold"}, (0, 0, 0, 0)),
    ],
)
def test_hosts_of_the_devices(devices: int, world: dict[str, Any], hosts: tuple[int, ...]) -> None:
    found = tuple(torch.device("cuda", number) for number in range(devices))
    team = Team(devices=found, own=(1,), world=World(**world), trainer=0)
    assert (team.hosts, team.own_devices, team.has_lead) == (hosts, {1: found[1]}, False)

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

CPU = torch.device("cpu")
PIECES = [Piece(number, 0, 10, whole=True) for number in range(6)]


def first() -> Roster:
    return Roster.first([CPU] * 3, plan=Plan((2, 1, 1)), pieces=PIECES)


def test_a_run_begins_with_spans_of_even_size_and_goes_on_with_others() -> None:
    roster = first()
    assert (roster.generation, roster.hosts) == (0, (0, 0, 0))
    assert roster.spans == (range(2), range(2, 4), range(4, 6))
    assert [roster.owner_of(piece) for piece in range(6)] == [0, 0, 1, 1, 2, 2]
    spans = (range(0), range(5), range(5, 6))
    later = roster.next(plan=Plan((0, 3, 1)), spans=spans)
    assert (later.generation, later.plan.counts, later.spans) == (1, (0, 3, 1), spans)
    assert later.next().spans == spans
    assert roster == first()
    assert [later.owner_of(piece) for piece in range(6)] == [1, 1, 1, 1, 1, 2]


@for_each(
    ("change", "words"),
    [
        ({"spans": [range(3), range(3, 6)]}, "3 devices, got 3 hosts, 3 shares and 2 spans"),
        ({"spans": [range(3), range(4, 6), range(6, 6)]}, "got piece 3 in 0"),
        ({"spans": [range(3), range(3, 5), range(5, 5)]}, "spans of 6 pieces in all"),
        ({"spans": [range(3), range(3, 2), range(2, 6)]}, "got piece 2 in 2"),
        ({"spans": [range(3), (4, 3), (5,)]}, "pieces of device 1 in ascending order"),
        ({"plan": Plan((3, 1))}, "3 devices, got 3 hosts, 2 shares"),
    ],
)
def test_spans_hold_every_piece_once_and_plans_every_device(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        first().next(**change)


def team(devices: int, own: tuple[int, ...], **world: Any) -> Team:
    found = tuple(torch.device("cuda", number) for number in range(devices))
    return Team(devices=found, own=own, world=World(**world), trainer=0)


def test_own_devices_are_known_by_their_number_and_device_0_has_the_lead() -> None:
    assert team(4, (2,)).own_devices == {2: torch.device("cuda", 2)}
    assert list(team(3, (0, 1, 2)).own_devices) == [0, 1, 2]
    assert [team(3, own).has_lead for own in ((0, 1, 2), (0,), (2,))] == [True, True, False]


@for_each(
    ("devices", "world", "hosts"),
    [
        (4, {"launcher": "torch", "size": 4, "local_size": 2}, (0, 0, 1, 1)),
        (5, {"launcher": "torch", "size": 5, "local_size": 2}, (0, 0, 1, 1, 2)),
        (3, {"launcher": "torch", "size": 3, "local_size": 1}, (0, 1, 2)),
        # The launcher does not say how many are on a host.
        (2, {"launcher": "torch", "size": 2, "local_size": 0}, (0, 1)),
        # One process may drive several devices: its local size says nothing of them.
        (4, {"launcher": "none"}, (0, 0, 0, 0)),
        (4, {"launcher": "onefold"}, (0, 0, 0, 0)),
    ],
)
def test_hosts_of_the_devices(devices: int, world: dict[str, Any], hosts: tuple[int, ...]) -> None:
    assert team(devices, (0,), **world).hosts == hosts

"""All devices of a run, as a record."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from onefold.core.roster import Team
from onefold.core.world import World
from tests.tables import for_each


def team(devices: int, own: tuple[int, ...], **world: Any) -> Team:
    found = tuple(torch.device("cuda", number) for number in range(devices))
    return Team(devices=found, own=own, world=World(**world), trainer=0)


def test_own_devices_are_known_by_their_number_in_the_run() -> None:
    assert team(4, (2,)).own_devices == {2: torch.device("cuda", 2)}
    assert list(team(3, (0, 1, 2)).own_devices) == [0, 1, 2]


def test_who_drives_device_0_has_the_lead() -> None:
    assert team(3, (0, 1, 2)).has_lead
    assert team(3, (0,)).has_lead
    assert not team(3, (2,)).has_lead


@for_each(
    ("devices", "local_size", "hosts"),
    [(4, 2, (0, 0, 1, 1)), (4, 4, (0, 0, 0, 0)), (3, 1, (0, 1, 2)), (5, 2, (0, 0, 1, 1, 2))],
)
def test_ranks_of_a_host_follow_one_another(
    devices: int, local_size: int, hosts: tuple[int, ...]
) -> None:
    found = team(devices, (0,), size=devices, local_size=local_size, launcher="torch")
    assert found.hosts == hosts


@for_each("launcher", ["none", "onefold"])
def test_other_launchers_start_on_one_host(launcher: str) -> None:
    """Where one process drives several devices, its local size says nothing of them."""
    assert team(4, (0, 1, 2, 3), launcher=launcher).hosts == (0, 0, 0, 0)
    assert team(1, (0,), launcher=launcher).hosts == (0,)


def test_every_device_has_a_host_even_if_the_launcher_does_not_say_how_many() -> None:
    assert team(2, (0,), size=2, local_size=0, launcher="torch").hosts == (0, 1)


def test_a_team_is_final() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="own"):
        team(1, (0,)).own = (1,)  # type: ignore[misc]

"""All devices of a run, and who owns what of the model."""

from __future__ import annotations

from typing import Any

import torch

from onefold.core.roster import Team
from onefold.core.world import World
from tests.tables import for_each


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

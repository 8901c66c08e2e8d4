"""What a model takes of memory, against what was measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onefold.core.options import LaunchContext, RunOptions
from onefold.core.placements import implementation_of
from onefold.placement.footprint import Footprint
from onefold.session.run import RunSetup
from onefold.session.user_parts import UserParts
from onefold.tools.planning import prepare
from tests.step.assembled import settings_of
from tests.tables import for_each

MIB = 1 << 20
# A text model with AdamW; as in docs/do/large-models.md.
MEASURED = Footprint(
    parameters=289 * MIB,
    other=0,
    gradients=289 * MIB,
    state=578 * MIB,
    stage_gradients=[12 * MIB],
    stage_values=[12 * MIB],
    sent=12 * MIB,
    shards=8,
)


def estimated(
    form: str, devices: int, *, sizes: Footprint = MEASURED, together: bool = True
) -> int:
    found = implementation_of(form.partition(":")[0]).estimate(sizes, devices, together=together)
    return int(found[form])


@for_each(
    ("devices", "replicating", "partitioning"), [(1, 2077, 1838), (2, 1541, 860), (4, 1088, 385)]
)
def test_formulas_tell_what_was_measured(devices: int, replicating: int, partitioning: int) -> None:
    """Within a sixth, as activations are in the one and sums that end early in the other."""
    found = estimated("replicate", devices) / MIB
    assert abs(found / replicating - 1) < 1 / 6
    found = estimated("partition", devices) / MIB
    assert abs(found / partitioning - 1) < 1 / 6


def test_a_file_is_large_enough() -> None:
    """1,682 MiB were measured for a model of 280."""
    stages: dict[str, Any] = {"stage_gradients": [12], "stage_values": [12]}
    sizes = Footprint(parameters=280, other=0, gradients=280, state=560, shards=8, **stages)
    assert 1682 <= estimated("offload:file", 2, sizes=sizes) <= 1.2 * 1682
    assert estimated("offload", 2, sizes=sizes) == 48


def test_devices_apart_have_their_own_parameters_and_two_stages() -> None:
    def more(placement: str, devices: int) -> int:
        return estimated(placement, devices, together=False) - estimated(placement, devices)

    two_stages = 2 * MEASURED.stage + MEASURED.other
    # Between the rounds, the tree has one level less. Of a stage, 6.5 gradients in place of 4.
    fewer = MEASURED.gradients // 4 - MEASURED.stage // 2
    assert more("partition", 4) == two_stages - MEASURED.other // 4 - fewer
    # Two stages of parameters, and of the 6.5 gradients only 4 where memory is shared.
    assert more("offload", 4) == MEASURED.other + 3 * MEASURED.stage - MEASURED.stage // 4
    # The others' sums come there, and there is no whole gradient beside those that are added up.
    sums = MEASURED.gradients * 3 // 4 - MEASURED.gradients
    assert more("replicate", 4) == MEASURED.parameters * 3 // 4 + sums


@for_each(
    ("optimizer", "settings", "early"),
    [
        (torch.optim.SGD, {}, {"replicate": [2, 3], "replicate:state": [2, 3]}),
        (torch.optim.SGD, {"compile": True}, {}),
        (torch.optim.SGD, {"microbatch": 1}, {}),
        # Of three parameters that cannot be cut, one of two devices would have two.
        (torch.optim.Adafactor, {}, {"replicate": [3], "replicate:state": [2, 3]}),
    ],
)
def test_whole_sums_take_more_than_stages(
    optimizer: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
    early: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    """On cards, of which a device has two shards at most, and so one partial sum."""
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    made, target = optimizer(module.parameters(), lr=0.1), tmp_path / "plan"
    context = LaunchContext(
        devices=("cuda:0",),
        options=RunOptions(tools={"plan": {"path": str(target), "devices": [2, 3]}}),
    )
    user = UserParts.of(module, made, lambda *_: None, None)
    start = RunSetup(
        context=context,
        user=user,
        settings=settings_of(shards=4, **settings),
        losses=user.losses,
    )
    start.optimizer = made
    with pytest.raises(SystemExit):
        prepare(start)
    size, found = 12 * MIB, json.loads(target.read_text())
    # PyTorch's SGD keeps nothing, and Adafactor is not known.
    state = 0 if found["state_is_known"] else 2 * size
    for row in found["rows"]:
        devices = row["devices"]
        for name, updating in (("replicate", devices), ("replicate:state", 1)):
            beside = 1 if devices in early.get(name, ()) else 2
            # Parameters, the sum, the shards beside it, and what came of the others.
            expected = size * (2 + beside) + (size * (devices - 1) + state) // updating
            assert row[name] == expected, (devices, name)

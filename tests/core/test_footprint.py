"""What a model takes of memory, against what was measured."""

from collections.abc import Callable

import torch
from torch import nn

from onefold.core.settings import Settings
from onefold.run.planning import Footprint, _measured
from onefold.run.userparts import UserParts
from tests.tables import for_each

MIB = 1 << 20
# A text model with AdamW; as in docs/do/large-models.md.
MEASURED = Footprint(
    parameters=289 * MIB, other=0, gradients=289 * MIB, state=578 * MIB, stage=12 * MIB, shards=8
)


@for_each(("devices", "replicating", "sharding"), [(1, 2077, 1838), (2, 1541, 860), (4, 1088, 385)])
def test_formulas_tell_what_was_measured(devices: int, replicating: int, sharding: int) -> None:
    """Within a sixth, as activations are in the one and sums that end early in the other."""
    found = MEASURED.replicating(devices, together=True) / MIB
    assert abs(found / replicating - 1) < 1 / 6
    found = MEASURED.sharding(devices, together=True) / MIB
    assert abs(found / sharding - 1) < 1 / 6


def test_a_file_is_large_enough() -> None:
    """1,682 MiB were measured for a model of 280."""
    sizes = Footprint(parameters=280, other=0, gradients=280, state=560, stage=12, shards=8)
    assert 1682 <= sizes.on_disk <= 1.2 * 1682
    assert sizes.offloading(2, together=True) == 48


def test_devices_apart_have_their_own_parameters_and_two_stages() -> None:
    def more(keeping: Callable[..., int], *devices: int) -> int:
        return keeping(*devices, together=False) - keeping(*devices, together=True)

    two_stages = 2 * MEASURED.stage + MEASURED.other
    # Between the rounds, the tree has one level less. Of a stage, 6.5 gradients in place of 4.
    fewer = MEASURED.gradients // 4 - MEASURED.stage // 2
    assert more(MEASURED.sharding, 4) == two_stages - MEASURED.other // 4 - fewer
    # Two stages of parameters, and of the 6.5 gradients only 4 where memory is shared.
    assert more(MEASURED.offloading, 4) == MEASURED.other + 3 * MEASURED.stage - MEASURED.stage // 4
    # The others' sums come there, and there is no whole gradient beside those that are added up.
    sums = MEASURED.gradients * 3 // 4 - MEASURED.gradients
    assert more(MEASURED.replicating, 4) == MEASURED.parameters * 3 // 4 + sums

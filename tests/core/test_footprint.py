"""What a model takes of memory, against what was measured."""

from __future__ import annotations

from onefold.run.planning import Footprint
from tests.tables import for_each

MIB = 1 << 20
# A text model with AdamW; as in docs/large-models.md.
MEASURED = Footprint(
    parameters=289 * MIB, other=0, gradients=289 * MIB, state=578 * MIB, stage=12 * MIB, shards=8
)


@for_each(
    ("devices", "keeping_all", "keeping_span"), [(1, 2077, 1838), (2, 1541, 860), (4, 1088, 385)]
)
def test_formulas_tell_what_was_measured(devices: int, keeping_all: int, keeping_span: int) -> None:
    """Within a sixth, as activations are in the one and sums that end early in the other."""
    found = MEASURED.keeping_all(devices, together=True) / MIB
    assert abs(found / keeping_all - 1) < 1 / 6
    found = MEASURED.keeping_span(devices, together=True) / MIB
    assert abs(found / keeping_span - 1) < 1 / 6


def test_a_file_is_large_enough() -> None:
    """1,682 MiB were measured for a model of 280."""
    sizes = Footprint(parameters=280, other=0, gradients=280, state=560, stage=12, shards=8)
    assert 1682 <= sizes.on_disk <= 1.2 * 1682
    assert sizes.keeping_nothing(together=True) == 48


def test_with_one_shard_there_is_nothing_to_add_up() -> None:
    sizes = Footprint(parameters=10, other=3, gradients=10, state=20, stage=2, shards=1)
    assert sizes.keeping_all(1, together=False) == 10 + 3 + 10 + 20
    assert sizes.on_disk == 10 + 3 + 20 + 10


def test_devices_apart_have_their_span_of_the_parameters_and_two_stages() -> None:
    apart = MEASURED.keeping_span(4, together=False) - MEASURED.keeping_span(4, together=True)
    assert apart == 2 * MEASURED.stage + MEASURED.other - MEASURED.other // 4


def test_devices_apart_that_keep_nothing_have_two_stages() -> None:
    apart = MEASURED.keeping_nothing(together=False) - MEASURED.keeping_nothing(together=True)
    assert apart == 2 * MEASURED.stage + MEASURED.other


def test_devices_apart_that_keep_all_have_all_parameters_each() -> None:
    apart = MEASURED.keeping_all(4, together=False) - MEASURED.keeping_all(4, together=True)
    assert apart == MEASURED.parameters * 3 // 4


def test_more_devices_never_take_more_of_each() -> None:
    for keeping in (MEASURED.keeping_all, MEASURED.keeping_span):
        found = [keeping(devices, together=True) for devices in range(2, 9)]
        assert found == sorted(found, reverse=True)

"""What all kinds of memory have in common."""

from __future__ import annotations

import dataclasses

import pytest

from onefold.exchange.joining import DevicesMemory, OneDeviceMemory
from onefold.exchange.memory import Memory, Start
from onefold.exchange.private import PrivateMemory
from onefold.exchange.shared import HostMemory
from tests.exchange.contract import roster, start, storage
from tests.exchange.together import CPU
from tests.tables import for_each

KINDS = [OneDeviceMemory, DevicesMemory, PrivateMemory, HostMemory]


@for_each("kind", KINDS)
def test_every_kind_has_the_whole_interface(kind: type[Memory]) -> None:
    assert issubclass(kind, Memory)
    assert kind.__abstractmethods__ == frozenset()


def test_the_interface_alone_is_no_memory() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Memory()  # type: ignore[abstract]


def test_only_memory_that_processes_share_is_common() -> None:
    """Where it is, a change by one process is one for all."""
    assert [kind for kind in KINDS if kind.is_common] == [HostMemory]


def test_totals_stay_where_they_were_added_unless_a_kind_says_otherwise() -> None:
    sizes = storage(1)
    memory = OneDeviceMemory(sizes, start(0, sizes), CPU)
    memory.bind(roster(sizes))
    assert memory.home(0) is None


def test_the_values_of_the_start_are_not_exchanged_for_others() -> None:
    begun = start(0, storage(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        begun.trained = []  # type: ignore[misc]
    assert {field.name for field in dataclasses.fields(Start)} == {
        "trained",
        "other",
        "frozen",
        "buffers",
    }

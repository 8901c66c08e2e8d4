"""One process that drives all devices: what is copied between them, and what is not."""

from __future__ import annotations

import pytest
import torch

from onefold.core.flat import FlatTensors
from onefold.core.fold import Published
from onefold.core.shard import Plan
from onefold.core.storage import Storage
from onefold.exchange.joining import DevicesMemory, OneDeviceMemory, local_exchange
from onefold.exchange.memory import Start
from onefold.exchange.transport import Alone
from tests.exchange.contract import SHARDS, roster, start, storage, tensors, uneven_spans
from tests.exchange.together import CPU
from tests.tables import for_each


def made(devices: int) -> tuple[Storage, Start]:
    sizes = storage(devices)
    return sizes, start(0, sizes)


def ones(value: float = 1.0) -> list[torch.Tensor | None]:
    return [torch.full_like(tensor, value) for tensor in tensors().values()]


@for_each(("devices", "kind"), [(1, OneDeviceMemory), (3, DevicesMemory)])
def test_one_device_has_a_memory_of_its_own_kind(devices: int, kind: type) -> None:
    sizes, begun = made(devices)
    exchange = local_exchange(sizes, begun, roster(sizes))
    assert type(exchange.memory) is kind
    assert type(exchange.transport) is Alone
    assert sorted(exchange.memory.trained) == sorted(exchange.memory.other) == list(range(devices))


@for_each("devices", [1, 3])
def test_the_values_are_copied_and_those_of_the_script_left_alone(devices: int) -> None:
    sizes, begun = made(devices)
    exchange = local_exchange(sizes, begun, roster(sizes))
    for flats in (exchange.memory.trained, exchange.memory.other):
        for flat in flats.values():
            for view in flat.views:
                view.add_(1)
    assert all(bool((tensor == 1).all()) for tensor in begun.trained)
    assert begun.other[0].tolist() == [5.0] * 4
    first = exchange.memory.trained[0]
    first.views[0].fill_(9)
    for number, flat in exchange.memory.trained.items():
        assert bool((flat.views[0] == (9 if number == 0 else 2)).all()), "memory of its own"


# One device


def test_gradients_of_one_device_are_used_where_backward_left_them() -> None:
    sizes, begun = made(1)
    exchange = local_exchange(sizes, begun, roster(sizes))
    given = ones()
    given[2] = None
    exchange.publish(0, 0, given)
    exchange.collect(Plan((SHARDS,)))
    totals = exchange.totals(0)
    for piece, total in zip(sizes.pieces, totals, strict=True):
        gradient = given[piece.entry]
        if gradient is None:
            assert total is None, "no zeros are made where no shard gave one"
            continue
        assert total is not None
        assert total.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()


def test_one_device_lets_go_of_the_gradients() -> None:
    sizes, begun = made(1)
    exchange = local_exchange(sizes, begun, roster(sizes))
    exchange.publish(0, 0, ones())
    exchange.collect(Plan((SHARDS,)))
    exchange.spread()
    assert list(exchange.totals(0)) == []
    assert isinstance(exchange.memory, OneDeviceMemory)
    assert exchange.memory._given.gradients == ()


# Several devices


@pytest.fixture
def memory() -> DevicesMemory:
    sizes, begun = made(3)
    memory = DevicesMemory(sizes, begun, [CPU] * 3)
    memory.bind(roster(sizes))
    return memory


def owned(sizes: Storage, flat: FlatTensors, span: range) -> list[torch.Tensor]:
    return [flat.piece(sizes.pieces[number]) for number in span]


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_every_device_gets_each_span_from_its_owner(memory: DevicesMemory, turn: int) -> None:
    sizes = storage(3)
    now = roster(sizes)
    if turn:
        now = now.next(spans=uneven_spans(now, turn))
        memory.bind(now)
    for device, flat in memory.trained.items():
        for view in flat.views:
            view.fill_(10 + device)
    memory.hand_on()
    for flat in memory.trained.values():
        for owner, span in enumerate(now.spans):
            for stretch in owned(sizes, flat, span):
                assert bool((stretch == 10 + owner).all())


def test_frozen_parameters_are_not_handed_on(memory: DevicesMemory) -> None:
    memory.other[0].views[0].fill_(8)
    memory.hand_on()
    assert [flat.views[0][0].item() for flat in memory.other.values()] == [8, 5, 5]


def test_partial_sums_keep_their_memory_from_step_to_step(memory: DevicesMemory) -> None:
    place = Published(1, 2)
    first = memory.partial(place)
    memory.publish(1, 2, ones(3.0))
    assert memory.partial(place) is first
    memory.release()
    assert memory.partial(place) is first
    assert memory.partial(Published(2, 2)) is not first


def test_a_partial_sum_is_let_go(memory: DevicesMemory) -> None:
    piece = next(p for p in storage(3).pieces if list(tensors())[p.entry] == "large")
    before = memory.partial(Published(0, 0)).piece(piece).data_ptr()
    memory.publish(0, 0, ones(3.0))
    assert bool((memory.partial(Published(0, 0)).piece(piece) == 3).all())
    assert memory.partial(Published(0, 0)).piece(piece).data_ptr() != before
    memory.release()
    assert memory.partial(Published(0, 0)).piece(piece).data_ptr() == before


def test_totals_stay_where_they_are_where_all_devices_share_memory(memory: DevicesMemory) -> None:
    assert [memory.home(device) for device in range(3)] == [None] * 3


@pytest.mark.parametrize("indices", [(0, 0, 0), (0, 1, 0)])
def test_totals_go_home_only_among_several_gpus(
    memory: DevicesMemory, indices: tuple[int, ...]
) -> None:
    slots = [memory.partial(Published(device, 0)) for device in range(3)]
    memory._devices = [torch.device("cuda", index) for index in indices]
    homes = [memory.home(device) for device in range(3)]
    alone = len(set(indices)) == 1
    assert homes == [None if alone else slot.flat for slot in slots]


def test_there_is_nobody_to_wait_for(memory: DevicesMemory) -> None:
    assert memory.collect(Plan((3, 2, 2))) is None
    assert not memory.is_common

"""The model of the exchange: small cases by hand, and what must hold of all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import model
from model import Links, Run
from onefold.core.flat import lay_out
from onefold.core.head import StepHead
from onefold.core.storage import BoardShape, cut_chunks, cut_pieces
from onefold.exchange.board import Board

pytestmark = pytest.mark.full

MEGABYTE = 10**6
LINKS = Links(
    host_bytes_per_s=1e9,
    device_bytes_per_s=1e11,
    memory_bytes_per_s=1e12,
    message_s=1e-5,
    delay_s=1e-3,
)


def run(devices: int, *, shards: int = 8, devices_per_host: int = 8, **fields: int) -> Run:
    """A run over 8 MB of parameters."""
    amounts = {"parameter_bytes": 8 * MEGABYTE, **fields}
    return Run(devices=devices, shards=shards, devices_per_host=devices_per_host, **amounts)


def test_a_single_device_sends_nothing() -> None:
    alone = run(1, buffer_row_bytes=100)
    assert model.collective_bytes(alone) == 0
    assert model.collective_messages(alone) == 0
    assert model.shared_written_bytes(alone) == model.shared_read_bytes(alone) == 0
    assert model.collective_s(alone, LINKS) == model.ring_s(alone, LINKS) == 0


@pytest.mark.parametrize(
    ("devices", "blocks"), [(2, (1, 1)), (3, (2, 2, 1)), (4, (1,) * 4), (8, (1,) * 8)]
)
def test_blocks_of_eight_shards(devices: int, blocks: tuple[int, ...]) -> None:
    assert run(devices).blocks == blocks
    assert run(devices).k == sum(blocks) / devices


def test_bytes_of_four_devices() -> None:
    four = run(4)
    assert model.collect_bytes(four) == model.spread_bytes(four) == 6 * MEGABYTE
    assert model.ring_bytes(four) == 12 * MEGABYTE


def test_three_devices_send_more_than_one_partial_sum() -> None:
    three = run(3)
    assert model.collect_bytes(three) == pytest.approx(5 / 3 * 8 * MEGABYTE * 2 / 3)
    assert model.shared_written_bytes(three) == pytest.approx(5 / 3 * 8 * MEGABYTE * 2 / 3)
    few = run(3, small_bytes=MEGABYTE)
    assert model.shared_written_bytes(few) == pytest.approx(5 / 3 * (7 * 2 / 3 + 1) * MEGABYTE)


def test_a_host_shares_its_network() -> None:
    two_hosts = run(16, shards=16)
    assert two_hosts.hosts == 2
    assert model.host_bytes(two_hosts) == 2 * 8 * (8 * MEGABYTE) * 8 / 16
    assert model.folded_host_bytes(two_hosts) == 8 * MEGABYTE
    assert model.host_bytes(run(8)) == model.folded_host_bytes(run(8)) == 0


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_row_has_the_bytes_that_the_board_sends(devices: int) -> None:
    buffers = lay_out({"mean": torch.zeros(5), "count": torch.zeros((), dtype=torch.int64)})
    shape = BoardShape(devices=devices, shards=8, parameters=7, buffers=buffers)
    board = Board.private(shape, torch.device("cpu"))
    own = range(8 // devices)
    sent = board.row(0, own).nbytes
    assert model.board_bytes(run(devices, parameters=7, buffers=2)) == (devices - 1) * (
        sent + len(StepHead(call=1, step=1).word())
    )


@pytest.mark.parametrize("numel", [1000, 65_536, 1 << 20, (1 << 20) + 1, 5 << 20])
@pytest.mark.parametrize("tensors", [1, 3])
def test_messages_are_cut_as_the_exchange_cuts_them(numel: int, tensors: int) -> None:
    layout = lay_out({str(n): torch.empty(numel, device="meta") for n in range(tensors)})
    whole = cut_chunks(layout, cut_pieces(layout, by_element=True))
    one = run(1, parameter_bytes=layout.nbytes, parameters=tensors)
    assert model.chunks(one) == len(whole)


def test_messages_count_the_buffers_only_where_there_are_some() -> None:
    assert model.collective_messages(run(4)) == 3 * 5
    assert model.collective_messages(run(4, buffer_row_bytes=64)) == 3 * 6
    assert model.shared_messages(run(4)) == 12


def test_time_is_that_of_the_network_where_it_is_slow() -> None:
    two_hosts = run(16, shards=16)
    parts = [64 * MEGABYTE / 1e9, 15 * 5 * 1e-5, 2e-3, 8 * MEGABYTE / 1e12]
    assert model.collective_s(two_hosts, LINKS) == pytest.approx(sum(parts))


def test_time_in_shared_memory_is_that_of_memory_and_two_meetings() -> None:
    seconds = model.shared_s(run(2), memory_bytes_per_s=1e9, meeting_s=1e-3)
    assert seconds == pytest.approx((4 + 8) * MEGABYTE / 1e9 + 2e-3)


def test_memory_by_hand() -> None:
    parameter_bytes = 8 * MEGABYTE
    # Parameters, three sums that wait in a block of eight shards and the last gradient, momentum.
    assert model.shared_memory_bytes(run(1)) == 6 * parameter_bytes
    # Parameters once, two sums and a gradient on each, half of one for the other, momentum once.
    assert model.shared_memory_bytes(run(2)) == (1 + 6 + 1 + 1) * parameter_bytes
    # Parameters on each, half of the other's partial sum, the same besides.
    assert model.collective_memory_bytes(run(2)) == (2 + 1 + 6 + 1) * parameter_bytes
    # Half of the parameters, low gradients on each device, and masters once.
    low = replace(run(2), low=True, low_parameters=True)
    assert model.collective_memory_bytes(low) == (1 + 1 + 1 + 6 + 1 + 1) * parameter_bytes
    assert model.spread_bytes(low) == model.spread_bytes(run(2)) / 2


@given(st.integers(1, 16), st.integers(1, 8))
def test_adding_up_inside_hosts_never_sends_more(hosts: int, on_host: int) -> None:
    devices = hosts * on_host
    one = run(devices, shards=devices, devices_per_host=on_host)
    assert model.folded_host_bytes(one) <= model.host_bytes(one) + 1e-6
    if one.k == 1 and hosts > 1:
        assert math.isclose(model.host_bytes(one), on_host * model.folded_host_bytes(one))


@given(st.integers(1, 32), st.integers(1, 32))
def test_no_device_sends_less_than_in_a_ring(devices: int, more: int) -> None:
    one = run(devices, shards=devices + more, devices_per_host=devices)
    assert model.collect_bytes(one) + model.spread_bytes(one) >= model.ring_bytes(one) - 1e-6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": 9}, "1 to 8 devices"),
        ({"devices": 0}, "1 to 8 devices"),
        ({"devices": 8, "devices_per_host": 3}, "full hosts of 3"),
        ({"devices": 2, "devices_per_host": 0}, "at least one device a host"),
        ({"devices": 2, "parameter_bytes": 0}, "one byte of parameters"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**fields)

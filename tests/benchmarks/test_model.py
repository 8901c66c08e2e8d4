"""The model of the exchange (docs/scaling.md): small cases by hand, and the exchange's own code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import model
from model import Links, Run
from onefold.core.flat import lay_out
from onefold.core.head import StepHead
from onefold.core.storage import BoardShape, cut_chunks, cut_pieces
from onefold.exchange.board import Board
from tests.tables import for_each

pytestmark = pytest.mark.full

MB = 10**6
LINKS = Links(
    host_bytes_per_s=1e9,
    device_bytes_per_s=1e11,
    memory_bytes_per_s=1e12,
    message_s=1e-5,
    delay_s=1e-3,
)


def run(devices: int, *, shards: int = 8, devices_per_host: int = 8, **fields: int) -> Run:
    """A run over 8 MB of parameters."""
    amounts = {"parameter_bytes": 8 * MB, **fields}
    return Run(devices=devices, shards=shards, devices_per_host=devices_per_host, **amounts)


def test_by_hand() -> None:
    alone, two, three, four, hosts = run(1), run(2), run(3), run(4), run(16, shards=16)
    assert model.collective_bytes(alone) == model.collective_messages(alone) == 0
    assert model.collect_bytes(four) == model.spread_bytes(four) == 6 * MB
    assert model.ring_bytes(four) == 12 * MB
    assert three.blocks == (2, 2, 1)
    assert model.collect_bytes(three) == pytest.approx(5 / 3 * 8 * MB * 2 / 3)
    assert model.host_bytes(hosts) == 2 * 8 * (8 * MB) * 8 / 16
    assert model.folded_host_bytes(hosts) == 8 * MB
    parts = [64 * MB / 1e9, 15 * 5 * 1e-5, 2e-3, 8 * MB / 1e12]
    assert model.collective_s(hosts, LINKS) == pytest.approx(sum(parts))
    # Parameters once, two sums and a gradient on each, half of one for the other, momentum once.
    assert model.shared_memory_bytes(two) == (1 + 6 + 1 + 1) * 8 * MB
    # Parameters on each, half of the other's partial sum, the same besides.
    assert model.collective_memory_bytes(two) == (2 + 1 + 6 + 1) * 8 * MB
    low = replace(two, low=True, low_parameters=True)
    assert model.collective_memory_bytes(low) == (1 + 1 + 1 + 6 + 1 + 1) * 8 * MB


@for_each("devices", [2, 4, 8])
def test_a_row_has_the_bytes_that_the_board_sends(devices: int) -> None:
    buffers = lay_out({"mean": torch.zeros(5), "count": torch.zeros((), dtype=torch.int64)})
    shape = BoardShape(devices=devices, shards=8, parameters=7, buffers=buffers)
    board = Board.private(shape, torch.device("cpu"))
    sent = board.row(0, range(8 // devices)).nbytes + len(StepHead(call=1, step=1).word())
    assert model.board_bytes(run(devices, parameters=7, buffers=2)) == (devices - 1) * sent


@for_each("numel", [1000, 65_536, (1 << 20) + 1, 5 << 20])
def test_messages_are_cut_as_the_exchange_cuts_them(numel: int) -> None:
    layout = lay_out({str(n): torch.empty(numel, device="meta") for n in range(3)})
    whole = cut_chunks(layout, cut_pieces(layout, by_element=True))
    assert model.chunks(run(1, parameter_bytes=layout.nbytes, parameters=3)) == len(whole)

"""The model of the exchange (docs/studies/scaling.md) beside the exchange's own code."""

from typing import Any

import pytest
import torch

import model
from model import Run
from onefold.core.call_digest import CallDigest
from onefold.core.flat import lay_out
from onefold.core.storage import Storage, cut_chunks, cut_segments
from onefold.exchange.shard_table import ShardTable
from tests.tables import for_each

pytestmark = pytest.mark.full

MB = 10**6


def run(devices: int, *, shards: int = 8, devices_per_host: int = 8, **fields: int) -> Run:
    """A run over 8 MB of parameters."""
    amounts = {"parameter_bytes": 8 * MB, **fields}
    return Run(devices=devices, shards=shards, devices_per_host=devices_per_host, **amounts)


@for_each("devices", [2, 4, 8])
def test_a_row_has_the_bytes_that_the_board_sends(devices: int) -> None:
    buffers = lay_out({"mean": torch.zeros(5), "count": torch.zeros((), dtype=torch.int64)})
    parameters = lay_out({n: torch.ones(1) for n in "abcdefg"})
    sizes: dict[str, Any] = {"shards": 8, "devices": devices}
    storage = Storage(
        parameters=parameters, other=lay_out({}), buffers=buffers, segments=(), **sizes
    )
    table = ShardTable.private(storage, torch.device("cpu"))
    sent = table.row(0, range(8 // devices)).nbytes + len(CallDigest(call=1, step=1).word())
    assert model.table_bytes(run(devices, parameters=7, buffers=2)) == (devices - 1) * sent


@for_each("numel", [1000, 65_536, (1 << 20) + 1, 5 << 20])
def test_messages_are_cut_as_the_exchange_cuts_them(numel: int) -> None:
    layout = lay_out({str(n): torch.empty(numel, device="meta") for n in range(3)})
    whole = cut_chunks(layout, cut_segments(layout, by_element=True))
    assert model.chunks(run(1, parameter_bytes=layout.nbytes, parameters=3)) == len(whole)

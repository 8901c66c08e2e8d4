"""Processes that reach each other through torch.distributed; here they are threads of one group."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist

from onefold.core.assignment import Assignment
from onefold.core.flat import Layout, Segment, lay_out
from onefold.core.shard import Shares
from onefold.core.storage import cut_chunks, cut_segments
from onefold.errors import PeerError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange import connections
from onefold.exchange.collective import MOST_OF_A_GROUP, CollectiveTransport, Operation, groups_of
from onefold.system.compat import Groups
from tests.exchange.together import CPU, LIMIT_S, endings, joined, together
from tests.tables import for_each


@contextmanager
def transports(size: int, *, timeout_s: float = LIMIT_S) -> Iterator[list[CollectiveTransport]]:
    with joined(size, timeout_s=timeout_s) as parts:
        ends = [CollectiveTransport(CPU, part, timeout_s) for part in parts]
        yield ends
        for end in ends:
            end.close()


CALLS: dict[str, Callable[[CollectiveTransport], object]] = {
    "all_gather_bytes": lambda end: end.all_gather_bytes(b"word"),
    "follow the lead": lambda end: end.broadcast_from_lead([torch.ones(3)]),
    "gather_to_lead": lambda end: (end.buffer(LONG), end.gather_to_lead()),
}
LONG = 50_000_000
"""Bytes that do not leave before somebody takes them."""


@pytest.mark.full
@for_each("late", [0, 1])
@for_each("name", CALLS)
def test_a_wait_has_the_limit_of_the_run_and_not_that_of_connecting(name: str, late: int) -> None:
    connecting_s, late_s = 0.4, 1.5
    with joined(2, timeout_s=connecting_s) as parts:
        for part in parts:
            Groups.set_limit(part.group, timedelta(seconds=LIMIT_S))
        ends = [CollectiveTransport(CPU, part, LIMIT_S) for part in parts]

        def call(rank: int) -> None:
            if rank == late:
                time.sleep(late_s)
            CALLS[name](ends[rank])

        together(2, call)
        for end in ends:
            end.close()


def test_all_who_wait_in_vain_name_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that gives up closes its connections, and others wait for it."""
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    with transports(3, timeout_s=1.5) as ends:
        ends[0].begin_step(4)
        errors = endings(2, lambda rank: ends[rank].all_gather_bytes(b"here"))
    assert [type(error) for error in errors] == [PeerTimeout] * 2
    assert [cast(PeerTimeout, error).device for error in errors] == [2, 2]
    words = "device 2 did not arrive within 1.5 s in step 4, where device 0 waits"
    assert str(errors[0]).startswith(words)


def test_the_first_failure_counts() -> None:
    """And who leaves because another one failed says nothing: the others know it from that one."""
    with transports(4, timeout_s=1.5) as ends:
        ends[0].begin_step(5)
        ends[3].close(PeerLost("device 2 is gone", device=2))
        ends[2].close(KeyError("é" * 100_000))
        ends[1].close(ValueError("another one, because of the first"))
        with pytest.raises(PeerFailed) as caught:
            ends[0].all_gather_bytes()
        assert (caught.value.device, caught.value.step) == (2, 1)
        words = str(caught.value)
        assert words.startswith("device 2 failed in step 1: KeyError: 'éé")
        assert len(words) < 4100


@for_each(
    ("error", "is_of_a_peer"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] closed"), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (dist.DistBackendError("whatever it says"), True),
        (RuntimeError("expected tensors of one shape"), False),
        (torch.OutOfMemoryError("NCCL has no room"), False),
    ],
)
def test_an_error_of_a_backend_is_one_of_a_peer_and_any_other_is_left_as_it_is(
    error: RuntimeError, is_of_a_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "all_gather", refuse)
    with transports(2) as ends:
        ends[0].begin_step(3)
        words = "^device 0 lost the connection to another device in step 3: " * is_of_a_peer
        kind = PeerError if is_of_a_peer else type(error)
        with pytest.raises(kind, match=words + re.escape(str(error))) as caught:
            ends[0].all_gather_bytes()
    if is_of_a_peer:
        assert caught.value.__cause__ is error
    else:
        assert caught.value is error
        assert error.__notes__ == ["raised in step 3, on device 0"]


def llama_like(layers: int = 32, width: int = 4096) -> dict[str, torch.Tensor]:
    """Shapes of a model of 7 billion parameters, without values."""
    shapes = {"embedding": (50_257, width), "head": (50_257, width), "norm": (width,)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (width, width) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.{name}": (11_008, width) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (width, 11_008), f"{layer}.norm1": (width,)}
        shapes |= {f"{layer}.norm2": (width,)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def traded(
    devices: int, rank: int, partitions: Sequence[Sequence[Segment]], layout: Layout, slots: int
) -> list[Operation]:
    """What a device of so many sends and receives of gradients, as `CollectiveMemory` lists it."""
    chunks = [cut_chunks(layout, each, at_once=True) for each in partitions]
    operations = []
    for peer in (peer for peer in range(devices) if peer != rank):
        for sends, owner in ((True, peer), (False, rank)):
            for _ in range(slots):
                for number, chunk in enumerate(chunks[owner]):
                    part = torch.empty(chunk.stop - chunk.start, device="meta")
                    operations.append(Operation(sends, peer, part, number))
    return operations


@for_each("slots", [1, 3])
@for_each("devices", [2, 8, 64])
@for_each("by_element", [False, True])
def test_groups_of_messages_are_small(by_element: bool, devices: int, slots: int) -> None:
    """NCCL hangs in very large ones."""
    layout = lay_out(llama_like())
    segments = cut_segments(layout, by_element=by_element)
    shares = Shares.even(shards=devices, devices=devices)
    found = Assignment.first((CPU,) * devices, shares=shares, segments=segments).partitions
    partitions = [[segments[number] for number in each] for each in found]
    first, second = (
        groups_of(traded(devices, rank, partitions, layout, slots), devices) for rank in (0, 1)
    )
    assert all(len(group) <= MOST_OF_A_GROUP for group in first + second)
    # One message for each slot and dtype, to each device and from it.
    assert sum(map(len, first)) <= 2 * (devices - 1) * slots
    # Both ends of a pair have each message in the same group.
    for one, other in zip(first, second, strict=True):
        for sends in (True, False):
            leaving = [op.part.numel() for op in one if op.peer == 1 and op.sends == sends]
            coming = [op.part.numel() for op in other if op.peer == 0 and op.sends != sends]
            assert leaving == coming


def test_messages_of_the_host_go_in_one_batch() -> None:
    operations = [Operation(bool(n % 2), 1, torch.ones(2), n) for n in range(500)]
    assert groups_of(operations, 2) == [operations]
    assert groups_of([], 2) == []

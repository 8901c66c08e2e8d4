"""Which memory and transport a run gets, and what is compared before anything is shared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from onefold.core.options import RunOptions
from onefold.core.roster import Team
from onefold.core.world import World
from onefold.errors import DisagreementError, PeerFailed
from onefold.exchange import group, joining
from onefold.exchange.exchange import Exchange
from onefold.exchange.joining import Compare, DevicesMemory, OneDeviceMemory, join
from onefold.exchange.shared import HostMemory, HostTransport
from onefold.exchange.transport import Alone
from tests.exchange.contract import roster, start, storage
from tests.exchange.together import CPU, LIMIT_S, endings, together

WORLD = World(size=2, run_id="run", launcher="onefold", local_size=2)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_stores", {})


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """As onefold's launcher makes it, with a store, for each test another one."""
    descriptor = os.memfd_create("test")
    yield replace(WORLD, run_id=f"run-{os.getpid()}-{descriptor}", store_descriptor=descriptor)
    group._stores.clear()
    os.close(descriptor)


def team(world: World, devices: Sequence[torch.device], own: Sequence[int]) -> Team:
    return Team(devices=tuple(devices), own=tuple(own), world=world, trainer=0)


def agree(descriptions: Sequence[bytes]) -> None:
    """Any will do."""


def joined(world: World, rank: int, compare: Compare = agree) -> Exchange:
    sizes = storage(2)
    own = team(replace(world, rank=rank), [CPU] * 2, [rank])
    return join(
        sizes,
        start(rank, sizes),
        roster(sizes),
        own,
        description=bytes([65 + rank]) * (1 + 50_000 * rank),
        compare=compare,
        timeout_s=LIMIT_S,
    )


@pytest.mark.parametrize(("devices", "kind"), [(1, OneDeviceMemory), (3, DevicesMemory)])
def test_a_process_that_drives_all_devices_asks_nobody(devices: int, kind: type) -> None:
    sizes = storage(devices)

    def compare(descriptions: Sequence[bytes]) -> None:
        raise AssertionError("there is nobody to differ from")

    exchange = join(
        sizes,
        start(0, sizes),
        roster(sizes),
        team(World(), [CPU] * devices, range(devices)),
        description=b"",
        compare=compare,
        timeout_s=LIMIT_S,
    )
    assert (type(exchange.memory), type(exchange.transport)) == (kind, Alone)


@pytest.mark.parametrize("asked", ["auto", "shared"])
def test_processes_of_one_host_share_their_memory(world: World, asked: str) -> None:
    world = replace(world, options=RunOptions(exchange=asked))  # type: ignore[arg-type]
    made = together(2, lambda rank: joined(world, rank))
    for exchange in made:
        assert (type(exchange.memory), type(exchange.transport)) == (HostMemory, HostTransport)
        exchange.close()


def test_the_lead_compares_the_descriptions_of_all(world: World) -> None:
    seen: dict[int, list[int]] = {}

    def join_noting(rank: int) -> Exchange:
        return joined(world, rank, lambda all_of: seen.update({rank: [len(d) for d in all_of]}))

    for exchange in together(2, join_noting):
        exchange.close()
    assert seen == {0: [1, 50_001]}


@pytest.mark.parametrize(
    ("error", "theirs", "words"),
    [
        (DisagreementError("device 1 has another model"), DisagreementError, "^device 1 has an"),
        (MemoryError("no room"), PeerFailed, "^device 0 failed in step 1: MemoryError: no room$"),
    ],
    ids=["a difference", "another error"],
)
def test_what_the_lead_finds_ends_all(
    world: World, error: Exception, theirs: type[Exception], words: str
) -> None:
    def refuse(descriptions: Sequence[bytes]) -> None:
        raise error

    before = len(os.listdir("/proc/self/fd"))
    first, second = endings(2, lambda rank: joined(world, rank, refuse))
    group._stores.clear()
    assert first is error
    with pytest.raises(theirs, match=words):
        raise second or AssertionError("it has not ended")
    assert len(os.listdir("/proc/self/fd")) <= before


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "one_host"), [(CUDA, True), (CPU, False), (CUDA, False)], ids=str
)
def test_memory_that_cannot_be_shared_is_refused(
    device: torch.device, one_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "agree_on_kind", lambda *_: None)
    world = replace(WORLD, one_host=one_host, options=RunOptions(exchange="shared"))
    sizes = storage(2)
    words = "the shared exchange is for CPU processes of one host; use --exchange collective"
    with pytest.raises(ValueError, match=words):
        join(
            sizes,
            start(0, sizes),
            roster(sizes),
            team(world, [device] * 2, [0]),
            description=b"",
            compare=agree,
            timeout_s=1,
        )


@pytest.mark.parametrize(
    ("launcher", "exchange", "asks"),
    [("onefold", "auto", False), ("onefold", "collective", True), ("torch", "auto", True)],
)
def test_processes_that_chose_their_devices_compare_them_first(
    launcher: str, exchange: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of them joins what processes of another kind would wait for in vain."""

    class ReachedError(Exception):
        pass

    asked: list[tuple[str, int]] = []

    def reach(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr(joining, "agree_on_kind", lambda w, kind, n, limit: asked.append((kind, n)))
    monkeypatch.setattr(joining, "_mailbox", reach)
    monkeypatch.setattr(joining, "join_group", reach)
    options = RunOptions(exchange=exchange)  # type: ignore[arg-type]
    world = replace(WORLD, launcher=launcher, options=options)
    with pytest.raises(ReachedError):
        joined(world, 1)
    assert asked == ([("cpu", 2)] if asks else [])


def test_devices_of_torchrun_meet_under_a_name_that_nobody_can_guess(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of such a run is known to all on the host."""
    addresses: list[str] = []
    connect = joining.connected

    def noted(address: str, *options: object) -> object:
        addresses.append(address)
        return connect(address, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "connected", noted)
    world = replace(world, launcher="torch")
    for exchange in together(2, lambda rank: joined(world, rank)):
        exchange.close()
    one, other = addresses
    assert one == other
    assert world.run_id not in one
    assert len(one) >= 32

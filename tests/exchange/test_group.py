"""How processes find each other through a store, and how they part; here they are threads."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from onefold.core.world import World
from onefold.errors import DisagreementError, PeerLost, PeerTimeout
from onefold.exchange import group
from onefold.exchange.group import (
    agree_on_kind,
    agree_on_name,
    gather_bytes,
    join_group,
    tell_end,
    watch_for_end,
    who_left,
)
from onefold.exchange.progress import Progress, _table
from onefold.system.compat import Groups
from tests.exchange.together import LIMIT_S, endings, joined, together

SCRIPT = Path(__file__).parents[1] / "scripts" / "connecting.py"
WORLD = World(run_id="run", launcher="torch", local_size=1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_stores", {})
    monkeypatch.setattr(group, "_memberships", [])
    monkeypatch.setattr(group, "LOOK_S", 0.02)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def world_of(store: HashStore, rank: int, size: int, **changed: object) -> World:
    """That of a process whose store is there already."""
    world = replace(WORLD, rank=rank, size=size, local_size=size, **changed)  # type: ignore[arg-type]
    group._stores[world, size] = store
    return world


# Before they join


def test_devices_of_one_kind_agree(store: HashStore) -> None:
    worlds = [world_of(store, rank, 3) for rank in range(3)]
    together(3, lambda rank: agree_on_kind(worlds[rank], "cpu", 3, LIMIT_S))


def test_devices_of_two_kinds_are_named_to_all(store: HashStore) -> None:
    worlds = [world_of(store, rank, 3) for rank in range(3)]
    kinds = ["cuda", "cuda", "cpu"]
    errors = endings(3, lambda rank: agree_on_kind(worlds[rank], kinds[rank], 3, LIMIT_S))
    assert [type(error) for error in errors] == [DisagreementError] * 3
    assert all(str(e).startswith("device 2 computes on cpu and device 0 on cuda:") for e in errors)
    assert "CUDA_VISIBLE_DEVICES" in str(errors[0])


def test_a_name_is_drawn_by_the_lead_for_each_trainer(store: HashStore) -> None:
    worlds = [world_of(store, rank, 3) for rank in range(3)]
    names = [
        together(3, lambda rank, t=trainer: agree_on_name(worlds[rank], 3, LIMIT_S, t))
        for trainer in range(2)
    ]
    assert all(len(set(of_all)) == 1 for of_all in names)
    assert names[0] != names[1]
    assert all(len(bytes.fromhex(of_all[0])) == 16 for of_all in names)


@pytest.mark.parametrize("call", ["kind", "name"])
def test_who_does_not_join_is_named_at_the_limit(store: HashStore, call: str) -> None:
    rank, missing = (0, 1) if call == "kind" else (1, 0)
    world = world_of(store, rank, 2)
    words = f"^device {missing} did not join within 0.1 s: every device must run the same script"
    calls = {
        "kind": lambda: agree_on_kind(world, "cpu", 2, 0.1),
        "name": lambda: agree_on_name(world, 2, 0.1, 0),
    }
    with pytest.raises(PeerTimeout, match=words) as caught:
        calls[call]()
    assert (caught.value.device, caught.value.step) == (missing, 0)


def test_who_has_ended_is_not_waited_for(store: HashStore) -> None:
    one, other = (world_of(store, rank, 2) for rank in range(2))
    tell_end(other)
    with pytest.raises(PeerLost, match=r"^device 1 came to the end of its script") as caught:
        agree_on_kind(one, "cpu", 2, LIMIT_S)
    assert caught.value.device == 1


def test_who_has_said_its_part_and_ended_is_heard(store: HashStore) -> None:
    worlds = [world_of(store, rank, 2) for rank in range(2)]
    store.set("kind/1", "cpu")
    tell_end(worlds[1])
    agree_on_kind(worlds[0], "cpu", 2, LIMIT_S)


# The store


def test_a_file_without_a_name_is_a_store_for_all() -> None:
    descriptor = os.memfd_create("test")
    worlds = [
        replace(WORLD, rank=rank, size=2, store_descriptor=descriptor, launcher="onefold")
        for rank in range(2)
    ]
    names = together(2, lambda rank: agree_on_name(worlds[rank], 2, LIMIT_S, 0))
    assert names[0] == names[1]
    made = dict(group._stores)
    agree_on_name(worlds[0], 2, LIMIT_S, 1)
    assert group._stores == made, "it is made once in a process"
    group._stores.clear()
    made.clear()
    os.close(descriptor)


def test_runs_that_have_one_store_do_not_meet(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_rendezvous", lambda world, size, limit: store)
    agree_on_name(replace(WORLD, size=2, run_id="one"), 2, LIMIT_S, 0)
    with pytest.raises(PeerTimeout, match="device 0 did not join"):
        agree_on_name(replace(WORLD, rank=1, size=2, run_id="other"), 2, 0.1, 0)


# Ends that are told


def test_an_end_is_told_in_the_store(store: HashStore) -> None:
    one, other = (world_of(store, rank, 2) for rank in range(2))
    has_ended = watch_for_end(one, 2, LIMIT_S)
    assert [has_ended(rank) for rank in range(2)] == [False, False]
    tell_end(other)
    assert [has_ended(rank) for rank in range(2)] == [False, True]


def test_an_end_is_read_in_the_table_of_the_launcher() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, Progress.nbytes(2))
    _table.cache_clear()
    has_ended = watch_for_end(replace(WORLD, size=2, progress_descriptor=descriptor), 2, 1)
    assert not has_ended(1)
    Progress(descriptor, 2).set_ended(1)
    assert has_ended(1)
    _table.cache_clear()
    os.close(descriptor)


def test_an_end_is_told_where_somebody_may_wait_for_it_alone(store: HashStore) -> None:
    """Not by a process that is alone, and not by a member of a group, which parts in order."""
    tell_end(world_of(store, 0, 1))
    group._memberships.append(group._Membership(store, 1, 2, []))
    tell_end(world_of(store, 1, 2))
    assert not store.check(["ended/0"])
    assert not store.check(["ended/1"])


class Gone:
    """A store whose process has ended."""

    def set(self, *_: object) -> None:
        raise RuntimeError("Broken pipe")


def test_an_end_that_nobody_hears_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="onefold")
    tell_end(world_of(Gone(), 1, 2))  # type: ignore[arg-type]
    assert "device 1 could not say that it ends: Broken pipe" in caplog.text


# In the group


@pytest.mark.parametrize("sizes", [(0, 0), (5, 0), (1, 70_000)], ids=str)
def test_texts_of_any_length_are_gathered(sizes: tuple[int, int]) -> None:
    texts = [os.urandom(size) for size in sizes]
    with joined(2) as parts:
        said = together(2, lambda rank: gather_bytes(parts[rank].group, texts[rank]))
    assert said == [texts] * 2


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """A process that may join a group of its own, and leaves it."""
    store = HashStore()
    yield store
    atexit.unregister(group._leave)
    group._stores.clear()
    for membership in group._memberships:
        for made in membership.groups:
            Groups.end(made)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("one_host", "secret", "trainer", "warned"),
    [
        (True, "", 0, False),
        (False, "", 0, True),
        (False, "", 1, False),
        (False, "as long as it takes", 0, False),
    ],
)
def test_a_run_over_several_hosts_without_a_secret_is_warned_once(
    joins: HashStore,
    one_host: bool,
    secret: str,
    trainer: int,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = world_of(joins, 0, 1, one_host=one_host, secret=secret)
    made = join_group(world, "cpu", 1, timeout_s=LIMIT_S, trainer=trainer)
    made.watch.close()
    assert ("over several hosts without a secret" in caplog.text) is warned
    assert (made.group.size(), made.watch.pids) == (1, {})
    assert secret not in caplog.text or not secret


def test_each_trainer_has_a_group_and_a_place_in_the_store(joins: HashStore) -> None:
    world = world_of(joins, 0, 1)
    first, second = (
        join_group(world, "cpu", 1, timeout_s=LIMIT_S, trainer=trainer) for trainer in range(2)
    )
    for made in (first, second):
        made.watch.close()
    assert first.group is not second.group
    first.store.set("key", "first")
    assert not second.store.check(["key"])
    assert not joins.check(["key"])
    assert len(group._memberships) == 1, "this process leaves once"
    assert group._memberships[0].groups == [first.group, second.group]
    assert not dist.is_initialized(), (
        "a script's loss may multiply by the size of the default group"
    )


def test_a_script_may_make_and_end_the_default_group_later(joins: HashStore) -> None:
    made = join_group(world_of(joins, 0, 1), "cpu", 1, timeout_s=LIMIT_S, trainer=0)
    made.watch.close()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert gather_bytes(made.group, b"still there") == [b"still there"]


def test_a_group_of_the_script_is_left_alone(joins: HashStore) -> None:
    dist.init_process_group("gloo", store=joins, rank=0, world_size=1)
    theirs = dist.group.WORLD
    made = join_group(world_of(joins, 0, 1), "cpu", 1, timeout_s=LIMIT_S, trainer=0)
    made.watch.close()
    assert made.group is not theirs
    assert dist.group.WORLD is theirs
    assert group._memberships == [], "the script makes it, and ends it"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "wrong", "outcome"),
    [
        (([], []), ([], []), ["1 attempts, [b'0', b'1'], 20.0 s, leaves 1"] * 2),
        (([1], []), ([], []), ["2 attempts, [b'0', b'1'], 20.0 s, leaves 1"] * 2),
        (([2], [1, 3]), ([], []), ["4 attempts, [b'0', b'1'], 20.0 s, leaves 1"] * 2),
        (
            ([1, 2, 3, 4], []),
            ([], []),
            ["RuntimeError: attempt 4 of device 0 is broken", "RuntimeError: "],
        ),
        (
            ([], []),
            ([], [1]),
            [
                "DisagreementError: device 1 has refused a device",
                "DisagreementError: device 1 knows somebody",
            ],
        ),
    ],
)
def test_connections_that_break_while_they_are_made_are_made_anew(
    tmp_path: Path,
    broken: Sequence[Sequence[int]],
    wrong: Sequence[Sequence[int]],
    outcome: Sequence[str],
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), json.dumps(broken[rank]), json.dumps(wrong[rank])],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    came = [process.communicate(timeout=3 * LIMIT_S)[0] for process in processes]
    for found, expected in zip(came, outcome, strict=True):
        assert expected in found


# Leaving


@pytest.fixture
def torn_down(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each process's group was torn down."""
    moments: list[float] = []
    monkeypatch.setattr(group.Groups, "end", lambda _: moments.append(time.monotonic()))
    return moments


def leave(store: HashStore, rank: int, size: int) -> None:
    """As a process does it that is in one group."""
    group._memberships[:] = [group._Membership(store, rank, size, [None])]  # type: ignore[list-item]
    group._leave()


def test_who_leaves_waits_for_the_others(store: HashStore, torn_down: list[float]) -> None:
    """And the lead, which may hold the store, until all have seen it."""
    began = time.monotonic()

    def other() -> None:
        time.sleep(0.2)
        store.set(group._left_key(1), "1")
        time.sleep(0.1)
        store.add(group._SEEN_KEY, 1)

    calls = [lambda: leave(store, 0, 2), other]
    together(2, lambda rank: calls[rank]())
    (moment,) = torn_down
    assert moment - began >= 0.3


def test_who_waits_in_vain_leaves_alone(
    store: HashStore,
    torn_down: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group, "_FAREWELL", group.timedelta(seconds=0.1))
    caplog.set_level("INFO", logger="onefold")
    leave(store, 0, 2)
    assert torn_down == [], "a group is not torn down while a peer may talk to it"
    assert "the other devices did not end in order" in caplog.text


def test_who_has_left_is_known(store: HashStore) -> None:
    group._memberships.append(group._Membership(store, 0, 3, []))
    assert who_left() == []
    store.set(group._left_key(2), "1")
    assert who_left() == [2]


def test_who_is_in_no_group_knows_of_nobody() -> None:
    assert who_left() == []

"""Several devices as threads of one process, for tests of what they say to each other."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d

from onefold.core.options import LaunchContext
from onefold.exchange import group
from onefold.exchange.connections import Connections, LateWatch, PeerWatch
from onefold.exchange.group import JoinedGroup
from onefold.exchange.mailbox import Mailbox, connected

T = TypeVar("T")
CPU = torch.device("cpu")
LIMIT_S = 20.0
"""Far more than any of these tests takes, and less than their own limit."""


def _started(size: int, call: Callable[[int], T]) -> list[Future[T]]:
    """The ended calls of all devices."""
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(call, rank) for rank in range(size)]


def together(size: int, call: Callable[[int], T]) -> list[T]:
    """What ``call`` returns on each device; the first error is raised."""
    return [future.result() for future in _started(size, call)]


def endings(size: int, call: Callable[[int], object]) -> list[BaseException | None]:
    """The error in which ``call`` ends on each device, None for none."""
    return [future.exception() for future in _started(size, call)]


@contextmanager
def worlds(size: int, **changed: Any) -> Iterator[list[LaunchContext]]:
    """Those of processes which have a store of their own."""
    store = HashStore()
    common = LaunchContext(
        size=size, local_size=size, run_id=f"test-{uuid.uuid4()}", launcher="onefold"
    )
    common = replace(common, **{"address": "node1:29500", **changed})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "reach_store", lambda context, timeout_s: store)
        yield [replace(common, rank=rank, local_rank=rank) for rank in range(size)]


@contextmanager
def mailboxes(
    size: int, *, timeout_s: float = LIMIT_S, timeouts_s: Sequence[float] = ()
) -> Iterator[list[Mailbox]]:
    """Those of all devices, connected; each may have a limit of its own from then on."""
    address = f"test-{uuid.uuid4()}"

    def reached(rank: int) -> Mailbox:
        return Mailbox(connected(address, rank, size, timeout_s), rank=rank, timeout_s=timeout_s)

    boxes = together(size, reached)
    for box, limit_s in zip(boxes, timeouts_s, strict=False):
        box.timeout_s = limit_s
    try:
        yield boxes
    finally:
        for box in boxes:
            box.close()


@contextmanager
def joined(size: int, *, timeout_s: float = LIMIT_S) -> Iterator[list[JoinedGroup]]:
    """The parts of all devices in one group of gloo, which a process has but one of."""
    store = HashStore()
    parts: list[JoinedGroup] = []
    try:
        parts += together(size, lambda rank: _joined(store, rank, size, timeout_s))
        yield parts
    finally:
        for part in parts:
            part.watch.close()
            c10d._world.pg_group_ranks.pop(part.group)


def _joined(store: HashStore, rank: int, size: int, timeout_s: float) -> JoinedGroup:
    kinds: Any = dist.ProcessGroupGloo
    options = kinds._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(CPU, kind, gloo)
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    lateness = LateWatch(store, rank, size)
    connections = Connections()
    return JoinedGroup(
        group, store, connections, PeerWatch({}, connections, lateness), lateness, list
    )

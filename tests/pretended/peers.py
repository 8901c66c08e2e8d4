"""Two processes that exchange in every way that is right or wrong: ``peers.py RANK FOLDER``.

What came of each is written to the folder, and `tests.pretended.test_device` looks at it.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.pretended import device

Case = Callable[[int, torch.Tensor, dist.ProcessGroup], object]
LIMIT = timedelta(seconds=120)
"""No case waits for it: on a loaded machine the other process may come late."""


def both_ways(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> object:
    """Before it was waited for, and after."""
    came = torch.zeros_like(own)
    messages = [
        dist.P2POp(dist.isend, own, 1 - rank, peers),
        dist.P2POp(dist.irecv, came, 1 - rank, peers),
    ]
    works = dist.batch_isend_irecv(messages)
    early = came.tolist()
    for work in works:
        work.wait()
    return str(early), came.tolist(), len(works)


def everything(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> object:
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own, peers)
    total = own.clone()
    dist.all_reduce(total, group=peers)
    first = own.clone()
    dist.broadcast(first, group_src=0, group=peers)
    dist.barrier(peers)
    return [tensor.tolist() for tensor in (*parts, total, first)]


def in_different_order(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    """Both send first, and receive afterwards."""
    dist.send(own, group=peers, group_dst=1 - rank)
    dist.recv(own, group=peers, group_src=1 - rank)


def of_unequal_sizes(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.send(own, group=peers, group_dst=1)
    else:
        dist.recv(own[:1], group=peers, group_src=0)


def of_the_host(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    dist.all_reduce(own.cpu(), group=peers)


def changed_on_the_way(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    if rank == 0:
        work: Any = dist.isend(own, group=peers, group_dst=1)
        own.add_(1)
        work.wait()
    else:
        dist.recv(own, group=peers, group_src=0)


def read_too_early(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    if rank == 0:
        dist.send(own, group=peers, group_dst=1)
    else:
        work: Any = dist.irecv(own, group=peers, group_src=0)
        own.mul(2)
        work.wait()


def too_many(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, own, 1 - rank, peers)] * 129)


def on_one_device(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(2, device="pretend:0"), group=peers)


def after_an_abort(rank: int, own: torch.Tensor, peers: dist.ProcessGroup) -> None:
    peers.abort()
    dist.all_reduce(own, group=peers)


CASES: tuple[Case, ...] = (
    both_ways,
    everything,
    in_different_order,
    of_unequal_sizes,
    of_the_host,
    changed_on_the_way,
    read_too_early,
    too_many,
    on_one_device,
    after_an_abort,
)


def main(rank: int, folder: Path) -> None:
    meeting = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=LIMIT)
    torch.accelerator.set_device_index(rank)
    found: dict[str, Any] = {}
    for case in CASES:
        peers = dist.new_group(backend=device.BACKEND, timeout=LIMIT)
        own = torch.tensor([1.0, 2.0], device=f"pretend:{rank}") + rank
        result = error = None
        try:
            result = case(rank, own, peers)
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
        found[case.__name__] = [result, error, device.reports()]
    found["sizes"] = device.group_sizes()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    # The other one may still be connecting to this one.
    meeting.set(f"done/{rank}", "")
    meeting.wait(["done/0", "done/1"], LIMIT)
    # Without an end of the groups: some of them have messages that never come.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""Joins a group of two devices: ``connecting.py RANK BROKEN WRONG``; prints what came of it.

The connections break in the attempts of BROKEN, and the proof is wrong in those of WRONG, both JSON
lists of numbers from 1. The processes meet in the current folder.
"""

from __future__ import annotations

import json
import os
import sys

from torch.distributed import FileStore

from onefold.core.world import World
from onefold.errors import DisagreementError
from onefold.exchange import group

LIMIT_S = 20.0


def main(rank: int, broken: list[int], wrong: list[int]) -> None:
    make_group, prove, attempts = group._make_group, group.prove, []

    def noted(*args: object) -> object:
        attempts.append(args[-1])
        return make_group(*args)  # type: ignore[arg-type]

    def disturbed(*args: object) -> None:
        attempt = attempts[-1]
        if attempt in broken:
            raise RuntimeError(f"attempt {attempt} of device {rank} is broken")
        if attempt in wrong:
            raise DisagreementError(f"device {rank} knows somebody who does not belong to us")
        prove(*args)  # type: ignore[arg-type]

    group._make_group, group.prove = noted, disturbed  # type: ignore[attr-defined, assignment]
    world = World(run_id="run", launcher="torch", rank=rank, size=2, local_size=2)
    group._stores[world, 2] = FileStore("store", 2)
    try:
        made = group.join_group(world, "cpu", 2, timeout_s=LIMIT_S, trainer=0)
        texts = group.gather_bytes(made.group, f"{rank}".encode())
        limit = made.group._get_backend(group.torch.device("cpu")).options._timeout
        leaves = len(group._memberships)
        print(f"{len(attempts)} attempts, {texts}, {limit.total_seconds()} s, leaves {leaves}")
    except (RuntimeError, DisagreementError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))

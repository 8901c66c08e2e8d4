"""Joins a group of two devices: ``connecting.py RANK BROKEN WRONG``; prints what came of it.

The connections break in the attempts of BROKEN, and the proof is wrong in those of WRONG, both JSON
lists of numbers from 1. The processes meet in the current folder.
"""

import json
import os
import sys

from onefold.core.options import LaunchContext
from onefold.errors import DisagreementError
from onefold.exchange import group

LIMIT_S = 20.0


def main(rank: int, broken: list[int], wrong: list[int]) -> None:
    prove, interface, attempts = group.prove, group.gloo_interface, []

    def noted(*args: object) -> object:
        attempts.append(len(attempts) + 1)
        return interface(*args)  # type: ignore[arg-type]

    def disturbed(*args: object) -> None:
        if attempts[-1] in broken:
            raise RuntimeError(f"attempt {attempts[-1]} of device {rank} is broken")
        if attempts[-1] in wrong:
            raise DisagreementError(f"device {rank} knows somebody who does not belong to us")
        prove(*args)  # type: ignore[arg-type]

    group.gloo_interface = noted  # type: ignore[assignment]
    group.prove = disturbed  # type: ignore[assignment, attr-defined]
    store = os.open("store", os.O_RDWR | os.O_CREAT)
    context = LaunchContext(run_id="run", rank=rank, size=2, local_size=2, store_descriptor=store)
    try:
        made = group.join_group(group.Rendezvous(context, 2, LIMIT_S), "cpu", trainer=0)
        texts = group.all_gather_objects(made.group, f"{rank}".encode())
        print(f"{len(attempts)} attempts, {texts}")
    except (RuntimeError, DisagreementError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))

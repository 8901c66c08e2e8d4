"""A process of one side of `training.py` or `limit.py`: trains on request, and reports the time.

The program starts it directly or under the side's launcher. Between measurements it waits in a
blocking read, so a side that is not being measured uses no CPU time.
"""

import argparse
import itertools
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from catalog import SIDES, Kind, Precision
from loops import LOOPS, Loop
from workloads import WORKLOADS

__all__ = ["main", "serve", "train"]


def train(loop: Loop, steps: int, *, by_phase: bool = False) -> dict[str, Any]:
    """Run `steps` steps; return their seconds, CPU seconds, last loss, and peak memory.

    Args:
        loop: what to train.
        steps: number of steps.
        by_phase: whether to add up the seconds of each phase.
    """
    loss_of_last: Callable[[], float] = float  # 0 without steps
    phases_s: Counter[str] = Counter()
    synchronize(loop.devices)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for batch in itertools.islice(itertools.cycle(loop.batches), steps):
        loss_of_last = loop.step(batch)
        if by_phase:
            phases_s.update(loop.phases())
    synchronize(loop.devices)
    seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "loss": loss_of_last(),
        "peak_bytes": peak_bytes(loop.devices),
        "phases_s": phases_s,
    }


def peak_bytes(devices: Iterable[torch.device]) -> int:
    """Return the peak memory of this process: of its GPUs, or else of the process itself."""
    gpus = {device for device in devices if device.type == "cuda"}
    if gpus:
        return sum(torch.cuda.max_memory_allocated(device) for device in gpus)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for GPUs to finish; CPUs always have."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def serve(path: Path, loop: Callable[[], Loop]) -> None:
    """Serve requests of the driver at `path` until it disconnects; call `loop` for each of them."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        with link.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                steps, *wanted = line.split()
                done = train(loop(), int(steps), by_phase=bool(wanted))
                lines.write(json.dumps(done) + "\n")
                lines.flush()


def main() -> None:
    """Build the side named on the command line, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("kind", choices=get_args(Kind))
    parser.add_argument("precision", choices=get_args(Precision))
    parser.add_argument("batch_size_factor", type=float)
    parser.add_argument("socket", type=Path, help="socket of the driver")
    args = parser.parse_args()
    spec = SIDES[args.side]
    torch.set_num_threads(spec.threads)
    workload = WORKLOADS[args.workload].scaled(args.batch_size_factor)
    workload = replace(workload, precision=args.precision)
    loop = LOOPS[spec.loop](workload, spec, args.kind)
    torch.set_num_threads(spec.threads)  # a library may have changed it
    serve(args.socket, lambda: loop)
    loop.end()


if __name__ == "__main__":
    main()

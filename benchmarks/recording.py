"""The cost of recording a run, and of checking 1 % of its shards for silent data corruption.

    python benchmarks/recording.py [--workload mlp ...] [--devices 1 2] [--shards 2] [--rounds 15]
        [--seconds 0.3] [--output FILE]

On each number of devices, one run has three Trainers of the same model, which train in blocks,
alternately: plain, recorded, and audited at a rate of 1 %. The additional time of a block is given
in percent of the plain block of its round. The size of the record is that of its file, divided by
the number of steps in it.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onefold
from loops import losses
from measure import add_output, deliver, print_table, ratio, record
from onefold.core.options import RunOptions
from onefold.tools.audit import Auditor
from workloads import WORKLOADS

__all__ = ["main"]

RATE = 0.01
WARM_UP = 3


def blocks(workload: str, shards: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Train in blocks, on every device; return the time of each block, and the size of the
    record."""
    folder = tempfile.TemporaryDirectory(prefix="onefold-")
    made: dict[str, Callable[[], object]] = {}
    trainers = []
    for name in ("plain", "recorded", "audited"):
        model, optimizer = WORKLOADS[workload].build()
        trainer = onefold.Trainer(model, optimizer, losses, shards=shards, threads=1)
        if name == "recorded":
            trainer.record(folder.name)
        if name == "audited":
            engine = trainer._session.engine
            options = RunOptions(audit=RATE)
            auditor = Auditor(engine.context, engine.placement, options, print)
            engine.hooks.replace([*engine.hooks.every, auditor])
        batches = itertools.cycle(WORKLOADS[workload].batches())
        made[name] = lambda trainer=trainer, batches=batches: trainer.step(next(batches))
        trainers.append(trainer)
    found: dict[str, list[float]] = {name: [] for name in made}
    for step in made.values():
        for _ in range(WARM_UP):
            step()
    began = time.perf_counter()
    made["plain"]()
    steps = trainers[0].broadcast(max(1, int(seconds / (time.perf_counter() - began))))
    for _ in range(rounds):
        for name, step in made.items():
            began = time.perf_counter()
            for _ in range(steps):
                step()
            found[name].append((time.perf_counter() - began) / steps)
    nbytes = 0.0
    if trainers[0].is_lead:
        path = Path(folder.name, "run.record")
        nbytes = path.stat().st_size / len(onefold.Record(path).by_step)
    for trainer in trainers:
        trainer.close()
    folder.cleanup()
    return {"seconds": found, "bytes": nbytes}


def main() -> None:
    """Measure every workload on every number of devices."""
    args = arguments()
    rows: list[Sequence[str]] = []
    results = []
    for workload, devices in itertools.product(args.workload, args.devices):
        print(f"measuring {workload} on {devices} ...", file=sys.stderr)
        chosen = (workload, args.shards, args.rounds, args.seconds)
        found = onefold.launch(blocks, devices=f"cpu:{devices}", args=chosen)
        of = found["seconds"]
        more = {name: ratio(of[name], of["plain"]) for name in ("recorded", "audited")}
        results.append({"workload": workload, "devices": devices, **more, "bytes": found["bytes"]})
        rows.append(
            [
                WORKLOADS[workload].title,
                str(devices),
                f"{1e3 * sorted(of['plain'])[len(of['plain']) // 2]:.2f}",
                *(more[name].text(3) for name in more),
                f"{found['bytes']:.0f}",
            ]
        )
    columns = ["workload", "devices", "ms a step", "recorded / plain", "audited / plain", "bytes"]
    print_table("with a record, and with 1 % audited", columns, rows)
    settings = {"shards": args.shards, "rounds": args.rounds, "rate": RATE}
    deliver(record("recording", settings=settings, results=results), args.output)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3, help="duration of a block")
    add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()

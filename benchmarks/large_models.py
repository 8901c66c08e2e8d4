"""The demands of a large model on each process, compared: memory, bytes sent, CPU time.

    python benchmarks/large_models.py [--steps 4] [--sides ddp,fsdp2,...] [--json FILE]
        [--width 768 --layers 8 --vocabulary 10752 --batch-size 8 --shards 8] [--processes 4]
        [--hand-back]

Every side trains the same text model from the same values on the same batch, on CPUs with one
thread each: one side after another, in separate processes. Sides that cannot run here are left
out, and a line gives the reason.

Memory is measured from outside, every 50 ms while the model is built, in the warmup steps, and in
the same number of steps after the timed ones; not in the timed steps, because measuring takes CPU
time. It is the peak of any one process, minus a process that has only imported PyTorch. Pages that
several processes share are divided among them (Pss). Bytes sent are the increase of the loopback
counters in a separate network namespace; without permission to create one, other programs' traffic
is included.

By default, the C allocator keeps freed blocks of some sizes, and onefold makes it keep all of them;
so a process has more memory than it uses. With `--hand-back`, the processes of all sides return
large blocks to the system as soon as they are freed, which takes CPU time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _large import Size
from catalog import SideSpec
from measure import deliver, print_disturbance, record
from network import alone_on_loopback, why_not
from scaling import rollup_bytes, wire_of
from sides import Side, SideError

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_large.py")
WARM_UP_STEPS = 2
WATCH_S = 0.05
FIELDS = ("Pss", "Pss_Anon", "Pss_Shmem", "Pss_File")
"""Of /proc/PID/smaps_rollup."""
MIB = 1 << 20
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "ACCELERATE_USE_CPU": "true",
}
HAND_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}
REFERENCE = "nothing"

Kept = dict[str, int]
"""Bytes by the names of `FIELDS`, the maximum over processes."""


def sides_of(processes: int) -> dict[str, SideSpec]:
    """Return the sides by name, in the order of measurement and display."""
    torchrun = (*TORCHRUN, "--nproc-per-node", str(processes))
    onefold = {
        f"onefold-{placement}-{exchange}": SideSpec(
            description=f"onefold, keep {placement}, {exchange}",
            loop="onefold",
            launcher=(
                *("-m", "onefold", "run", "--devices", f"cpu:{processes}"),
                *("--placement", placement, "--exchange", exchange),
            ),
            processes=processes,
        )
        for placement, exchange in (
            *(("replicate", "shared"), ("partition", "shared"), ("offload", "shared")),
            ("pipeline", "shared"),
            *(("replicate", "collective"), ("partition", "collective"), ("pipeline", "collective")),
        )
    }
    others = {
        "ddp": ("PyTorch DDP", "torch"),
        "fsdp2": ("PyTorch FSDP2", "torch"),
        "accelerate-fsdp": ("Accelerate, FSDP", "accelerate"),
        "zero3": ("DeepSpeed, ZeRO-3", "deepspeed"),
    }
    return onefold | {
        name: SideSpec(
            description=text, loop=name, launcher=torchrun, processes=processes, package=package
        )
        for name, (text, package) in others.items()
    }


def main() -> None:
    """Measure the sides named on the command line, or all of them."""
    args = arguments()
    size = Size(**{field.name: getattr(args, field.name) for field in fields(Size)})
    sides = sides_of(args.processes)
    launcher = sides["ddp"].launcher
    before = kept_at_start(
        SideSpec(description="", loop=REFERENCE, launcher=launcher, processes=args.processes), size
    )
    results, left_out = [], {}
    for name in args.sides:
        print(f"measuring {name} ...", file=sys.stderr)
        try:
            found = measured(
                sides[name],
                size,
                steps=args.steps,
                environment=HAND_BACK if args.hand_back else {},
            )
            results.append({"side": name} | found)
        except SideError as error:
            left_out[name] = reason_of(error)
    show(results, sides, before, args)
    for name, reason in left_out.items():
        print(f"- left out: {sides[name].description}: {reason}")
    for one in results:
        print_disturbance(one["others_cores"], one["side"])
    settings = {"steps": args.steps, "processes": args.processes, "size": asdict(size)}
    settings |= {"hand_back": args.hand_back, "start_bytes": before, "left_out": left_out}
    deliver(record("large_models", settings=settings, results=results), args.json)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--sides", default=",".join(sides_of(1)), help="comma-separated names")
    parser.add_argument("--processes", type=int, default=4)
    for field in fields(Size):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default, metavar="N")
    parser.add_argument(
        "--hand-back", action="store_true", help="return freed memory to the system"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the record")
    args = parser.parse_args()
    args.sides = args.sides.split(",")
    if unknown := set(args.sides) - set(sides_of(1)):
        parser.error(f"expected sides of {', '.join(sides_of(1))}, but got {', '.join(unknown)}")
    if args.batch_size % args.processes or args.batch_size % args.shards:
        parser.error("processes and shards must divide the batch evenly")
    return args


def kept_at_start(spec: SideSpec, size: Size) -> Kept:
    """Return the memory of a process among as many others that has only imported PyTorch."""
    with running(spec, size, {}) as side:
        return kept_by(side.pids)


@contextmanager
def running(spec: SideSpec, size: Size, environment: Mapping[str, str]) -> Iterator[Side]:
    """Start the processes of a side, which have no model yet."""
    if find_spec(spec.package) is None:
        raise SideError(f"{spec.package} is not installed")
    program = [str(PROGRAM), spec.loop, json.dumps(asdict(size))]
    command = [sys.executable, *spec.command("cpu"), *program]
    command = command if why_not() else alone_on_loopback(command)
    with (
        tempfile.TemporaryDirectory() as folder,
        Side(
            *(spec.loop, command),
            processes=spec.processes,
            folder=Path(folder),
            environment={**ENVIRONMENT, **environment},
        ) as side,
    ):
        yield side


def measured(
    spec: SideSpec, size: Size, *, steps: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Train with a side, and return its demands."""
    with running(spec, size, environment) as side:
        with watched(side.pids) as while_built:
            side.train(0)
        with watched(side.pids) as while_warming_up:
            side.train(WARM_UP_STEPS)
        sent_before = wire_of(side.pids[0])
        taken = [side.train(1) for _ in range(steps)]
        sent = wire_of(side.pids[0])
        with watched(side.pids) as while_training:
            side.train(WARM_UP_STEPS)
    kept = most(while_warming_up, while_training)
    return {
        "built_bytes": while_built,
        "kept_bytes": kept,
        "sent_bytes": (sent.sent_bytes - sent_before.sent_bytes) / steps / spec.processes,
        "cpu_s": sum(one.cpu_s for one in taken) / steps,
        "step_s": [one.seconds for one in taken],
        "loss": taken[-1].loss,
        "others_cores": statistics.median(one.others_cores for one in taken),
    }


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[Kept]:
    """Record the peak memory of any of the processes in the block; known at its end."""
    found: Kept = dict.fromkeys(FIELDS, 0)
    ended = threading.Event()

    def watch() -> None:
        found.update(kept_by(pids))
        while not ended.wait(WATCH_S):
            found.update(most(found, kept_by(pids)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def kept_by(pids: Sequence[int]) -> Kept:
    """Return the current memory of the processes, the maximum of each field; 0 for ended ones."""
    found: Kept = dict.fromkeys(FIELDS, 0)
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found = most(found, {name: rollup_bytes(text, name) for name in FIELDS})
    return found


def most(one: Kept, other: Kept) -> Kept:
    """Return the maximum of each field."""
    return {name: max(one[name], other[name]) for name in FIELDS}


def reason_of(error: SideError) -> str:
    """Return the last line of an error report that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if "Error: " in line]
    return lines[0].partition("]:")[2].strip() or lines[0] if lines else str(error).splitlines()[0]


def show(
    results: Sequence[Mapping[str, Any]],
    sides: Mapping[str, SideSpec],
    before: Kept,
    args: argparse.Namespace,
) -> None:
    """Print a table in Markdown, and notes on how to read it."""
    columns = ["side", "memory, MiB", "of it anonymous", "while built", "sent, MiB"]
    columns += ["processor s", "s a step", f"loss of step {WARM_UP_STEPS + args.steps}"]
    print(" | ".join(["", *columns, ""]).strip())
    print("|---|" + "---:|" * (len(columns) - 1))
    for one in results:
        kept = {n: most(one["kept_bytes"], one["built_bytes"])[n] - before[n] for n in FIELDS}
        cells = [
            sides[one["side"]].description,
            f"{kept['Pss'] / MIB:,.0f}",
            f"{kept['Pss_Anon'] / MIB:,.0f}",
            f"{(one['built_bytes']['Pss'] - before['Pss']) / MIB:,.0f}",
            f"{one['sent_bytes'] / MIB:,.1f}",
            f"{one['cpu_s']:.2f}",
            f"{statistics.median(one['step_s']):.2f}",
            f"{one['loss']:.6f}",
        ]
        print(" | ".join(["", *cells, ""]).strip())
    print(
        f"\n- Of a process, beside {before['Pss'] / MIB:,.0f} MiB ({before['Pss_Anon'] / MIB:,.0f} "
        "anonymous) that it has after importing PyTorch; sent by a process in a step; processor "
        "seconds of all processes in a step; the median of steps."
        "\n- Processes that share memory send next to nothing. What they share counts in parts, "
        "and so do pages of a model's file, which the system may take back."
    )


if __name__ == "__main__":
    main()

"""The cost of a checkpoint during training, and the duration of saving and loading.

    python benchmarks/checkpoint.py [--workload cnn-adam] [--devices 1 2] [--every 50] [--rounds 3]
        [--mbit 100] [--directory DIR] [--output FILE]

On each number of devices, a run trains blocks of `--every` steps, alternately with and without a
background checkpoint at the start of the block. Writing counts as part of the block: if it is not
finished with the last step, the block waits for it. The stall is the additional time of a block
with a checkpoint, in percent of its neighbor without one.

After the blocks, the calls are timed without training; PyTorch's own ways to save the same model
are included for comparison. Loads read what was just written, so they come from the page cache, not
from the disk.

With `--mbit`, two hosts with one device each are joined by a link of this speed, which requires
root.

The checkpoints are in a folder that is created in `--directory` and deleted at the end. The speed
of writing depends on the disk there.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _saving import KEEP, LOAD, SAVE, WITH, WITHOUT
from measure import (
    Spread,
    add_output,
    deliver,
    print_disturbance,
    print_table,
    ratio,
    record,
    spread,
)
from network import Cable, Host, two_hosts, why_not
from workloads import WORKLOADS

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_saving.py")
LIMIT_S = 3600.0
"""Time limit of the run on each number of devices, in seconds."""
GOAL_PERCENT = 3.5
"""Goal: the stall of a checkpoint of the CNN every 50 steps is at most that of a step."""
MEGA = 1e6
IN_BACKGROUND = f"{SAVE}(wait=False)"

Found = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""Results of a process: blocks and calls by name, and the times of each."""


def main() -> None:
    """Measure on every number of devices, and show the results."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="onefold-", dir=args.directory) as name:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8")
        file_system = file_system_of(Path(name).resolve(), mounts)
        results = []
        for devices in args.devices:
            print(f"measuring {counted(devices)} ...", file=sys.stderr)
            folder = Path(name, str(devices))
            folder.mkdir()
            results.append(summary(measured(devices, folder, args), devices=devices))
        if args.mbit:
            print(f"measuring two hosts at {args.mbit} Mbit/s ...", file=sys.stderr)
            folder = Path(name, "hosts")
            folder.mkdir()
            with two_hosts(Cable(mbit_per_s=args.mbit)) as hosts:
                found = summary(measured(2, folder, args, hosts), devices=2)
            results.append(found | {"mbit_per_s": args.mbit})
    title = WORKLOADS[args.workload].title
    show(results, title=title, every=args.every)
    settings = {
        "workload": args.workload,
        "every": args.every,
        "rounds": args.rounds,
        "shards": args.shards,
        "keep": KEEP,
        "threads": 1,
        "goal_percent": GOAL_PERCENT,
        "file_system": file_system,
    }
    deliver(record("checkpoint", settings=settings, results=results), args.output)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="cnn-adam", metavar="NAME")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=3, help="blocks and calls of each kind")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="folder on the disk to test")
    parser.add_argument("--mbit", type=int, help="link between two hosts; requires root")
    add_output(parser)
    args = parser.parse_args(given)
    if args.mbit and (reason := why_not()):
        parser.error(f"--mbit {reason}")
    if min(args.every, args.rounds, *args.devices) < 1:
        parser.error("steps, rounds and devices must be at least 1")
    args.shards = max(*args.devices, 2 if args.mbit else 1)
    return args


def file_system_of(path: Path, mounts: str) -> str:
    """Return the file system type of the absolute `path`, given the text of /proc/mounts."""
    lines = (line.split() for line in mounts.splitlines())
    kinds = {Path(place): kind for _, place, kind, *_ in lines}  # later mounts hide earlier ones
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), "unknown")


def measured(
    devices: int, folder: Path, args: argparse.Namespace, hosts: Sequence[Host] = ()
) -> list[Found]:
    """Run the program on several devices; return the results of each, the lead first.

    Args:
        devices: number of devices.
        folder: folder for checkpoints and results.
        args: the command line.
        hosts: hosts with one device each; empty for this machine.

    Raises:
        RuntimeError: the program failed. The message contains the end of its output.
        subprocess.TimeoutExpired: the program exceeded `LIMIT_S`.
    """
    command = [
        *(sys.executable, "-m", "onefold", "run"),
        *("--devices", f"cpu:{1 if hosts else devices}"),
        *_places(hosts),
        *(str(PROGRAM), args.workload, "--shards", str(args.shards)),
        *("--every", str(args.every), "--rounds", str(args.rounds), str(folder)),
    ]
    command = hosts[0].command(command) if hosts else command
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    paths = [folder / f"{number}.json" for number in range(devices)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _places(hosts: Sequence[Host]) -> list[str]:
    """Return the options that name the hosts, and how to reach the second one."""
    if not hosts:
        return []
    reach = shlex.join(hosts[1].command([]))
    via = f"sh -c 'shift; exec {reach} \"$@\"' sh {{host}}"
    return ["--hosts", ",".join(host.address for host in hosts), "--via", via]


def summary(found: Sequence[Found], *, devices: int) -> dict[str, Any]:
    """Summarize the processes of a run, by the clock of the lead, which writes the checkpoints."""
    blocks, calls = found[0]["blocks"], found[0]["calls"]
    seconds = {kind: values(blocks[kind], "seconds") for kind in (WITH, WITHOUT)}
    more_s = [a - b for a, b in zip(seconds[WITH], seconds[WITHOUT], strict=True)]
    size_mb = calls[SAVE][-1]["bytes"] / MEGA
    return {
        "devices": devices,
        "size_mb": size_mb,
        "block_s": {kind: spread(times) for kind, times in seconds.items()},
        "stall_percent": stall_percent(seconds[WITH], seconds[WITHOUT]),
        "stall_ms": spread(1e3 * more for more in more_s),
        "waited_ms": spread(1e3 * one for one in values(blocks[WITH], "waited_s")),
        "calls": {
            IN_BACKGROUND: call_of(
                values(blocks[WITH], "call_s"), values(blocks[WITH], "written_s"), size_mb
            ),
            **{
                name: call_of(
                    values(ones, "call_s"), values(ones, "done_s"), ones[-1]["bytes"] / MEGA
                )
                for name, ones in calls.items()
            },
        },
        "others_cores": spread(others_cores(found)),
    }


def values(ones: Iterable[Mapping[str, float]], name: str) -> list[float]:
    """Return a value of each measurement."""
    return [one[name] for one in ones]


def stall_percent(longer: Sequence[float], shorter: Sequence[float]) -> Spread:
    """Return the additional time relative to the neighbors, in percent."""
    times = ratio(longer, shorter)
    low, median, high = ((of - 1.0) * 100.0 for of in (times.low, times.median, times.high))
    return Spread(median=median, low=low, high=high)


def call_of(call_s: Sequence[float], done_s: Sequence[float], size_mb: float) -> dict[str, Any]:
    """Summarize a way to save or load: blocking time, total time, and speed."""
    return {
        "call_ms": spread(1e3 * seconds for seconds in call_s),
        "done_ms": spread(1e3 * seconds for seconds in done_s),
        "size_mb": size_mb,
        "mb_per_s": spread(size_mb / seconds for seconds in done_s),
    }


def others_cores(found: Sequence[Found]) -> list[float]:
    """Return the number of cores that other programs used, for each block without a checkpoint.

    With a checkpoint, the kernel also works for us, which no process's time includes.
    """
    alike = zip(*(one["blocks"][WITHOUT] for one in found), strict=True)
    return [
        max(0.0, ones[0]["busy_seconds"] - sum(values(ones, "cpu_seconds"))) / ones[0]["seconds"]
        for ones in alike
    ]


def counted(devices: int) -> str:
    """Return the number of devices in words."""
    return f"{devices} device{'s' if devices > 1 else ''}"


def named(found: Mapping[str, Any]) -> str:
    """Return the number of devices, and the speed of a link between them."""
    link = found.get("mbit_per_s")
    return counted(found["devices"]) + (f", {link} Mbit/s" if link else "")


def show(results: Sequence[Mapping[str, Any]], *, title: str, every: int) -> None:
    """Print a table of the stall, and a table of the calls for each number of devices."""
    print(f"{title}, a checkpoint every {every} steps; median (least-greatest)")
    print_table(
        f"Training in blocks of {every} steps; the goal is a stall of at most {GOAL_PERCENT} %",
        [
            *("devices", "s a step without", "s a step with", "stall, % of a step"),
            *("stall ms a checkpoint", "waited for writing ms"),
        ],
        [stall_row(one, every) for one in results],
    )
    for one in results:
        print_table(
            f"{named(one)}: the calls",
            ["call", "blocks ms", f"that in % of {every} steps", "done after ms", "MB", "MB/s"],
            [call_row(name, one) for name in one["calls"]],
        )
    for one in results:
        print_disturbance(one["others_cores"].high, named(one))


def stall_row(found: Mapping[str, Any], every: int) -> list[str]:
    """Return a row of the first table."""
    return [
        named(found),
        *(a_step(found["block_s"][kind], every).text(3) for kind in (WITHOUT, WITH)),
        found["stall_percent"].text(2),
        found["stall_ms"].text(0),
        found["waited_ms"].text(0),
    ]


def a_step(block_s: Spread, every: int) -> Spread:
    """Convert the seconds of a block to those of one of its steps."""
    return Spread(median=block_s.median / every, low=block_s.low / every, high=block_s.high / every)


def call_row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return a row of the second table."""
    call = found["calls"][name]
    share = call["call_ms"].median / (1e3 * found["block_s"][WITHOUT].median)
    return [
        name,
        call["call_ms"].text(1),
        "" if name == LOAD else f"{100 * share:.2f}",
        call["done_ms"].text(0),
        f"{call['size_mb']:.1f}",
        call["mb_per_s"].text(0),
    ]


if __name__ == "__main__":
    main()

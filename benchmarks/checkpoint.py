"""What a checkpoint takes from training, and what saving and loading take by themselves.

    python benchmarks/checkpoint.py [--workload cnn-adam] [--devices 1 2] [--every 50] [--rounds 3]
        [--directory DIR] [--output FILE]

One run on each number of processors trains in blocks of `--every` steps, in turn: one block begins
with a checkpoint in the background, its neighbor has none. Writing is part of its block, to the
end: were it not done with the last step, it would be waited for. The stall is what a block takes
longer than its neighbor, in percent of it.

After the blocks the calls are timed with nothing to train beside them; PyTorch's own ways to save
the same model are there for comparison. What is loaded has just been written, so it comes from the
system's memory, not from the disk.

The checkpoints lie in a folder that is made in `--directory` and deleted at the end. How fast they
are written is a matter of the disk there.
"""

import argparse
import json
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
from workloads import WORKLOADS

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_saving.py")
LIMIT_S = 3600.0
"""How long the run on one number of devices may take."""
GOAL_PERCENT = 3.5
"""The stall may be that of a step, with a checkpoint of the CNN every 50 of them."""
MEGA = 1e6
IN_BACKGROUND = f"{SAVE}(wait=False)"

Found = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""What a process has written: blocks and calls by name, and what each of them took."""


def main() -> None:
    """Measure on every number of devices, and show what was found."""
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
    title = WORKLOADS[args.workload].title
    show(results, title=title, every=args.every)
    settings = {
        "workload": args.workload,
        "every": args.every,
        "rounds": args.rounds,
        "shards": max(args.devices),
        "keep": KEEP,
        "threads": 1,
        "goal_percent": GOAL_PERCENT,
        "file_system": file_system,
    }
    deliver(record("checkpoint", settings=settings, results=results), args.output)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="cnn-adam", metavar="NAME")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--every", type=int, default=50, help="steps from checkpoint to checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each kind, and calls")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="on the disk to save to; else a temporary one"
    )
    add_output(parser)
    args = parser.parse_args(given)
    if min(args.every, args.rounds, *args.devices) < 1:
        parser.error("expected at least one step, one round and one device")
    return args


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system that `path`, absolute, lies on, by the text of /proc/mounts."""
    lines = (line.split() for line in mounts.splitlines())
    kinds = {Path(place): kind for _, place, kind, *_ in lines}  # what is mounted last is on top
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), "unknown")


def measured(devices: int, folder: Path, args: argparse.Namespace) -> list[Found]:
    """Run the program on so many devices; returns what each has found, the lead first.

    Raises:
        RuntimeError: it failed; with the end of what it said.
        subprocess.TimeoutExpired: it did not end within `LIMIT_S`.
    """
    command = [
        *(sys.executable, "-m", "onefold", "run", "--devices", f"cpu:{devices}"),
        *(str(PROGRAM), args.workload, "--shards", str(max(args.devices))),
        *("--every", str(args.every), "--rounds", str(args.rounds), str(folder)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    paths = [folder / f"{number}.json" for number in range(devices)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def summary(found: Sequence[Found], *, devices: int) -> dict[str, Any]:
    """What the processes of one run have found, by the lead's clock: it is the one that writes."""
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
    """One of the numbers of each."""
    return [one[name] for one in ones]


def stall_percent(longer: Sequence[float], shorter: Sequence[float]) -> Spread:
    """How much longer the ones are than their neighbors, in percent of these."""
    times = ratio(longer, shorter)
    low, median, high = ((of - 1.0) * 100.0 for of in (times.low, times.median, times.high))
    return Spread(median=median, low=low, high=high)


def call_of(call_s: Sequence[float], done_s: Sequence[float], size_mb: float) -> dict[str, Any]:
    """Of one way to save or load: how long it blocks, when all is done, how fast that is."""
    return {
        "call_ms": spread(1e3 * seconds for seconds in call_s),
        "done_ms": spread(1e3 * seconds for seconds in done_s),
        "size_mb": size_mb,
        "mb_per_s": spread(size_mb / seconds for seconds in done_s),
    }


def others_cores(found: Sequence[Found]) -> list[float]:
    """Cores that worked for somebody else, in each block without a checkpoint.

    In one with a checkpoint the kernel works for us as well, and no process has that in its time.
    """
    alike = zip(*(one["blocks"][WITHOUT] for one in found), strict=True)
    return [
        max(0.0, ones[0]["busy_seconds"] - sum(values(ones, "cpu_seconds"))) / ones[0]["seconds"]
        for ones in alike
    ]


def counted(devices: int) -> str:
    """So many devices, in words."""
    return f"{devices} device{'s' if devices > 1 else ''}"


def show(results: Sequence[Mapping[str, Any]], *, title: str, every: int) -> None:
    """A table of the stall, and one of the calls for each number of devices."""
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
            f"{counted(one['devices'])}: the calls",
            ["call", "blocks ms", f"that in % of {every} steps", "done after ms", "MB", "MB/s"],
            [call_row(name, one) for name in one["calls"]],
        )
    for one in results:
        print_disturbance(one["others_cores"].high, counted(one["devices"]))


def stall_row(found: Mapping[str, Any], every: int) -> list[str]:
    """One line of the first table."""
    return [
        f"{found['devices']}",
        *(a_step(found["block_s"][kind], every).text(3) for kind in (WITHOUT, WITH)),
        found["stall_percent"].text(2),
        found["stall_ms"].text(0),
        found["waited_ms"].text(0),
    ]


def a_step(block_s: Spread, every: int) -> Spread:
    """The seconds of a block, as those of one of its steps."""
    return Spread(median=block_s.median / every, low=block_s.low / every, high=block_s.high / every)


def call_row(name: str, found: Mapping[str, Any]) -> list[str]:
    """One line of the second table."""
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

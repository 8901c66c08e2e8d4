"""Time from the command to the end of the first training step.

    python benchmarks/start.py [--repeats 5] [--output FILE]

`onefold run` and `torchrun` with DistributedDataParallel, with two processes each, and plain Python
with one process for reference: the same small model, started alternately. The lead process notes
the time after its first step, on the clock that all processes of a Linux machine share. The first
round does not count, because it loads files into memory.
"""

import argparse
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure import (
    add_output,
    deliver,
    in_turn,
    machine_busy_s,
    print_disturbance,
    print_table,
    ratio,
    record,
    spread,
)

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_first_step.py")
SCRIPTS = Path(sysconfig.get_path("scripts"))
LIMIT_S = 120.0
"""Time limit of a program, in seconds."""
REFERENCE = "torchrun, 2 processes, DDP"

COMMANDS = {
    "python, 1 process": [sys.executable, str(PROGRAM), "plain"],
    REFERENCE: [
        *(sys.executable, str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "2"),
        *(str(PROGRAM), "ddp"),
    ],
    "onefold run --devices cpu:2": [
        *(sys.executable, str(SCRIPTS / "onefold"), "run", "--devices", "cpu:2"),
        *(str(PROGRAM), "onefold"),
    ],
}
"""The commands by name; the path for the time is added. `cpu` is explicit, because `--devices 2`
would mean GPUs if there are any."""


def main() -> None:
    """Start everything alternately, and show the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="counted starts per program")
    add_output(parser)
    args = parser.parse_args()
    before_s, cpu_before_s, start_s = machine_busy_s(), started_cpu_s(), time.monotonic()
    taken = in_turn(
        {name: partial(first_step_s, command) for name, command in COMMANDS.items()},
        rounds=args.repeats + 1,
    )
    elsewhere_s = machine_busy_s() - before_s - (started_cpu_s() - cpu_before_s)
    others_cores = max(0.0, elsewhere_s / (time.monotonic() - start_s))
    found = summary({name: times[1:] for name, times in taken.items()}, others_cores)
    show(found)
    settings = {"repeats": args.repeats, "threads": 1}
    deliver(record("start", settings=settings, results=[found]), args.output)


def first_step_s(command: Sequence[str]) -> float:
    """Return the seconds from starting `command` until its lead has trained one step.

    Its exit code is ignored, because gloo sometimes aborts a process whose peer leaves first.

    Raises:
        RuntimeError: it failed before that. The message contains the end of its output.
        subprocess.TimeoutExpired: it exceeded `LIMIT_S`.
    """
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "note")
        start_s = time.monotonic()
        done = subprocess.run(
            [*command, str(note)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if not note.exists():
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
        return float(note.read_text(encoding="utf-8")) - start_s


def started_cpu_s() -> float:
    """Return the CPU seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summary(seconds: Mapping[str, Sequence[float]], others_cores: float) -> dict[str, Any]:
    """Return the seconds of every program, and its ratio to the reference."""
    return {
        "seconds": {name: spread(times) for name, times in seconds.items()},
        "times_the_reference": {
            name: ratio(times, seconds[REFERENCE]) for name, times in seconds.items()
        },
        "others_cores": others_cores,
    }


def show(found: Mapping[str, Any]) -> None:
    """Print a table of all programs."""
    rows = [
        [name, one.text(2), found["times_the_reference"][name].text(2)]
        for name, one in found["seconds"].items()
    ]
    title = "From the command to the first step: median (least-greatest)"
    print_table(title, ["command", "seconds", "times torchrun's"], rows)
    print_disturbance(found["others_cores"], "the starts")


if __name__ == "__main__":
    main()

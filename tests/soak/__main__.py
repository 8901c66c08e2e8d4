"""Runs with random faults, as many as asked for: ``python -m tests.soak --runs 300 --jobs 2``.

Every course is a seed. A run is started and something happens to it: signals, a full disk, folders
that go, limits, checkpoints that are damaged, processes that stop, a script that fails. Then it is
run again. Root sees more: it can have a small disk and a shared memory of its own.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

from tests.soak.campaign import all_told, settle
from tests.soak.course import Told, draw, run_whole


def main() -> int:
    """Run what the command line asks for; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Runs with random faults.")
    parser.add_argument("--runs", type=int, default=300, help="how many")
    parser.add_argument("--start", type=int, default=0, help="seed of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes that do them")
    parser.add_argument("--fault", help="only those of this fault")
    options = parser.parse_args()
    settle()
    seeds = list(range(options.start, options.start + options.runs))
    if options.fault:
        seeds = [seed for seed in seeds if draw(seed).fault == options.fault]
    if not seeds:
        parser.error("no course has this fault: more --runs, or root, may be needed")
    whole = run_whole()
    print(f"{len(seeds)} courses; a whole run takes {whole.seconds:.1f} s", flush=True)
    kinds: defaultdict[tuple[str, str], list[Told]] = defaultdict(list)
    wrong, began = 0, time.monotonic()
    for done, told in enumerate(all_told(seeds, whole, options.jobs), 1):
        kinds[told.course.fault, told.kind].append(told)
        if told.wrong:
            wrong += 1
            print(f"\nwrong: --start {told.course.seed} --runs 1: {told.course.describe()}")
            print("  " + "\n  ".join("\n".join([told.kind, *told.wrong]).splitlines()), flush=True)
        if done % 20 == 0:
            print(f"{done} of {len(seeds)}, {time.monotonic() - began:.0f} s", flush=True)
    for (fault, kind), group in sorted(kinds.items()):
        print(f"{len(group):5} {fault}: {kind}")
        for message in sorted({told.message for told in group})[:4]:
            print(f"          {message[:300]}")
    print(f"{len(seeds)} courses, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Runs with random faults, as many as asked for: ``python -m tests.soak --runs 300 --jobs 2``.

Every course is a seed. A run is started and something happens to it: signals, a full disk, folders
that go, limits, checkpoints that are damaged, processes that stop, a script that fails. Then it is
run again. Root sees more: it can have a small disk and a shared memory of its own.
"""

import argparse
import multiprocessing
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.soak.course import Told, draw, run_course, run_whole
from tests.soak.place import separate_mounts


def main() -> int:
    """Run what the command line asks for; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Runs with random faults.")
    parser.add_argument("--runs", type=int, default=300, help="how many")
    parser.add_argument("--start", type=int, default=0, help="seed of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes that do them")
    parser.add_argument("--fault", help="only those of this fault")
    options = parser.parse_args()
    separate_mounts()
    courses = [draw(seed) for seed in range(options.start, options.start + options.runs)]
    courses = [each for each in courses if options.fault in (None, each.fault)]
    if not courses:
        parser.error("no course has this fault: more --runs, or root, may be needed")
    whole = run_whole()
    print(f"{len(courses)} courses; a whole run takes {whole.seconds:.1f} s", flush=True)
    kinds: defaultdict[tuple[str, str], list[Told]] = defaultdict(list)
    wrong, began = 0, time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=separate_mounts) as pool:
        asked = [pool.submit(run_course, course, whole) for course in courses]
        for done, future in enumerate(as_completed(asked), 1):
            told = future.result()
            kinds[told.course.fault, told.kind].append(told)
            if told.wrong:
                wrong += 1
                print(f"\nwrong: --start {told.course.seed} --runs 1: {told.course}")
                lines = "\n".join([told.kind, *told.wrong]).splitlines()
                print("  " + "\n  ".join(lines), flush=True)
            if done % 20 == 0:
                print(f"{done} of {len(courses)}, {time.monotonic() - began:.0f} s", flush=True)
    for (fault, kind), group in sorted(kinds.items()):
        print(f"{len(group):5} {fault}: {kind}")
        for message in sorted({told.message for told in group})[:4]:
            print(f"          {message[:300]}")
    print(f"{len(courses)} courses, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

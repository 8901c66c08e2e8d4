"""Random runs, as many as asked for: ``python -m tests.fuzz --cases 20000 --jobs 2``.

Every case is a seed. From it are drawn a model, a loss, an optimizer, hooks, batches or loaders,
shares, devices and what is done between steps. The case is run on one device, and then on several
of one process or on simulated ones, perhaps with a stop after which it goes on elsewhere. All of
that must have the same bits.

``--plain`` holds each case against the loop that everybody writes instead: see
`tests.fuzz.plainloop`.
"""

import argparse
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.case import EXCHANGES
from tests.fuzz.judge import verdicts

AT_ONCE = 50
"""Cases that a process is given."""


def main() -> int:
    """Run what the command line asks for; 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description="Random runs of onefold.")
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--start", type=int, default=0, help="seed of the first")
    parser.add_argument("--case", type=int, help="one case alone, by its seed")
    parser.add_argument("--exchange", choices=EXCHANGES)
    parser.add_argument("--plain", action="store_true", help="beside plain loops")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases")
    options = parser.parse_args()
    seeds = range(options.start, options.start + options.cases)
    if options.case is not None:
        seeds = range(options.case, options.case + 1)
    again = " --plain" if options.plain else ""
    again += f" --exchange {options.exchange}" if options.exchange else ""
    kinds: Counter[str] = Counter()
    wrong: list[int] = []
    start = time.monotonic()
    # Not a multiprocessing.Pool: its processes may have no children, such as a loader's workers.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        chunks = [seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE)]
        asked = [pool.submit(verdicts, each, options.exchange, options.plain) for each in chunks]
        for future in asked:
            for verdict in future.result():
                kinds[verdict.kind] += 1
                if verdict.wrong:
                    wrong.append(verdict.case.seed)
                    print(f"\nwrong: python -m tests.fuzz --case {verdict.case.seed}{again}")
                    print(f"  {verdict.case}")
                    for line in verdict.wrong[:4]:
                        print(f"  - {line[:600]}", flush=True)
            spent_s = time.monotonic() - start
            print(f"{sum(kinds.values())} of {len(seeds)}, {spent_s:.0f} s", flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{count:7} {kind}")
    print(f"{len(seeds)} cases, {len(wrong)} wrong{': ' if wrong else ''}", *wrong[:50])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

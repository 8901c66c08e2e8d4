"""Random runs, as many as asked for: ``python -m tests.fuzz --cases 20000 --jobs 2``.

Every case is a seed. From it are drawn a model, a loss, an optimizer, hooks, batches or loaders,
plans, devices and what is done between steps. The case is run on one device, and there held against
a plain loop of PyTorch; then on several devices, in one process or in many, perhaps with a stop
after which it goes on elsewhere. All of that must have the same bits. Some cases have a fault that
must be refused, and in some one device does something else, which all devices must say.

``--plain`` runs other cases, which are held against the loop that everybody writes alone: see
`tests.fuzz.plainloop`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from tests.fuzz.campaign import results, settle
from tests.fuzz.case import draw
from tests.fuzz.judge import Verdict
from tests.fuzz.plainloop import draw_plain, wrong_in


def show(verdict: Verdict, exchange: str | None) -> None:
    """A case that did not end as it must."""
    chosen = f" --exchange {exchange}" if exchange else ""
    print(f"\nwrong: python -m tests.fuzz --case {verdict.case.seed}{chosen}")
    print(f"  {verdict.case.describe()}")
    for line in verdict.wrong[:4]:
        print(f"  - {line[:600]}", flush=True)


def beside_plain_loops(seeds: range) -> int:
    """Run cases of `tests.fuzz.plainloop`; 1 if one is wrong."""
    settle()
    kinds: Counter[str] = Counter()
    wrong = []
    for case in map(draw_plain, seeds):
        kinds["to the bit" if case.shards == 1 else "in float64 to 1e-9"] += 1
        said = wrong_in(case)
        if said:
            wrong.append(case.seed)
            print(f"wrong: python -m tests.fuzz --plain --case {case.seed}\n  {case.describe()}")
            print(f"  - {said[:600]}", flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{count:7} {kind}")
    print(f"{len(seeds)} cases, {len(wrong)} wrong{': ' if wrong else ''}", *wrong[:50])
    return 1 if wrong else 0


def main() -> int:
    """Run what the command line asks for; 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description="Random runs of onefold.")
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--start", type=int, default=0, help="seed of the first")
    parser.add_argument("--case", type=int, help="one case alone, by its seed")
    parser.add_argument("--exchange", choices=["local", "shared", "collective"])
    parser.add_argument("--plain", action="store_true", help="beside plain loops alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases")
    options = parser.parse_args()
    seeds = range(options.start, options.start + options.cases)
    if options.case is not None:
        seeds = range(options.case, options.case + 1)
    if options.plain:
        return beside_plain_loops(seeds)
    if options.case is not None:
        print(draw(options.case, options.exchange).describe())
    kinds: Counter[str] = Counter()
    wrong: list[int] = []
    start = last = time.monotonic()
    for chunk in results(seeds, options.exchange, options.jobs):
        for verdict in chunk:
            kinds[verdict.kind] += 1
            if verdict.wrong:
                wrong.append(verdict.case.seed)
                show(verdict, options.exchange)
        if time.monotonic() - last > 20:
            last = time.monotonic()
            print(f"{sum(kinds.values())} of {len(seeds)}, {last - start:.0f} s", flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{count:7} {kind}")
    print(f"{len(seeds)} cases, {len(wrong)} wrong{': ' if wrong else ''}", *wrong[:50])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

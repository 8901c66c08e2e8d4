"""Random runs, as many as asked for: ``python -m tests.fuzz --cases 20000 --jobs 2``.

Every case is a seed. From it are drawn a model, a loss, an optimizer, hooks, batches or loaders,
plans, devices and what is done between steps. The case is run on one device, and there held against
a plain loop of PyTorch; then on several devices, in one process or in many, perhaps with a stop
after which it goes on elsewhere. All of that must have the same bits. Some cases have a fault that
must be refused, and in some one device does something else, which all devices must say.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from tests.fuzz.case import Case, draw
from tests.fuzz.judge import Verdict, judge_local

_TOGETHER = 50
"""Cases of one launch."""


def verdicts(cases: Sequence[Case]) -> Iterator[Verdict]:
    """Of cases, those of several processes together."""
    from tests.fuzz.launched import judge_together

    settle()
    for (exchange, _), group in groupby(cases, key=lambda case: (case.exchange, case.processes)):
        listed = list(group)
        if exchange == "local":
            yield from map(judge_local, listed)
            continue
        for start in range(0, len(listed), _TOGETHER):
            yield from judge_together(listed[start : start + _TOGETHER])


def settle() -> None:
    """What holds for every case: one thread, and no word of what is meant."""
    torch.set_num_threads(1)
    logging.getLogger("onefold").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")


def _judge_seeds(seeds: Sequence[int], exchange: str | None) -> list[Verdict]:
    return list(verdicts([draw(seed, exchange) for seed in seeds]))


def _chunks(seeds: range) -> list[range]:
    return [seeds[start : start + _TOGETHER] for start in range(0, len(seeds), _TOGETHER)]


def _results(seeds: range, exchange: str | None, jobs: int) -> Iterator[list[Verdict]]:
    chunks = _chunks(seeds)
    if jobs == 1:
        for chunk in chunks:
            yield _judge_seeds(chunk, exchange)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        waiting = [pool.apply_async(_judge_seeds, (chunk, exchange)) for chunk in chunks]
        for each in waiting:
            yield each.get()


def show(verdict: Verdict, exchange: str | None) -> None:
    """A case that did not end as it must."""
    chosen = f" --exchange {exchange}" if exchange else ""
    print(f"\nwrong: python -m tests.fuzz --case {verdict.case.seed}{chosen}")
    print(f"  {verdict.case.describe()}")
    for line in verdict.wrong[:4]:
        print(f"  - {line[:600]}", flush=True)


def main() -> int:
    """Run what the command line asks for; 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description="Random runs of onefold.")
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--start", type=int, default=0, help="seed of the first")
    parser.add_argument("--case", type=int, help="one case alone, by its seed")
    parser.add_argument("--exchange", choices=["local", "shared", "collective"])
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases")
    options = parser.parse_args()
    seeds = range(options.start, options.start + options.cases)
    if options.case is not None:
        seeds = range(options.case, options.case + 1)
        print(draw(options.case, options.exchange).describe())
    kinds: Counter[str] = Counter()
    wrong: list[int] = []
    start = last = time.monotonic()
    for chunk in _results(seeds, options.exchange, options.jobs):
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

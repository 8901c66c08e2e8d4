"""Judges many cases, in one process or several."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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


def judge_seeds(seeds: Sequence[int], exchange: str | None) -> list[Verdict]:
    return list(verdicts([draw(seed, exchange) for seed in seeds]))


def _chunks(seeds: range) -> list[range]:
    return [seeds[start : start + _TOGETHER] for start in range(0, len(seeds), _TOGETHER)]


def results(seeds: range, exchange: str | None, jobs: int) -> Iterator[list[Verdict]]:
    chunks = _chunks(seeds)
    if jobs == 1:
        for chunk in chunks:
            yield judge_seeds(chunk, exchange)
        return
    # Not a multiprocessing.Pool: its processes may have no children, such as a loader's workers.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for each in [pool.submit(judge_seeds, chunk, exchange) for chunk in chunks]:
            yield each.result()

"""Many courses, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.soak.course import Told, Whole, draw, run_course
from tests.soak.place import can_mount, separate_mounts

__all__ = ["all_told", "settle"]


def settle() -> None:
    """What each process does once, before it draws or runs a course."""
    if can_mount():
        separate_mounts()


def all_told(seeds: Sequence[int], whole: Whole, jobs: int) -> Iterator[Told]:
    """What came of the courses of these seeds, as they end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=settle) as pool:
        for each in as_completed([pool.submit(_run, seed, whole) for seed in seeds]):
            yield each.result()


def _run(seed: int, whole: Whole) -> Told:
    return run_course(draw(seed), whole)

"""Draws the order of a pass from a sampler, alike on every device and in every run.

Note: what makes a sampler's order repeat
-----------------------------------------
A sampler may draw from PyTorch's, Python's and NumPy's generators, or from one that it holds. All
of them are seeded from the run's seed, the number of the pass and that of the loader before the
order is drawn, and are put back afterwards. The whole order is drawn at once, so that the script's
own draws during the pass cannot get between, and so that a resumed run draws the same order and
goes on at the place where it was. What a sampler keeps of earlier passes cannot be seen from here:
that is why devices compare the digest of each order, and a resumed run that of the pass it is in.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from onefold.core.randomness import kept_generators, loader_seed, seed_generators
from onefold.reading.held import kept_apart, seed_held, within
from onefold.reading.order import SampleOrder
from onefold.reading.reader import one_thread, take

__all__ = ["check_sampler", "draw_batches", "draw_samples", "samplers_within"]

_log = logging.getLogger("onefold")

_INNER = ("sampler", "batch_sampler", "base_sampler")
"""The names under which samplers usually keep another one."""


def check_sampler(sampler: object, name: str) -> None:
    """Refuse a sampler whose passes have no end, or that is made for one device of several.

    Args:
        sampler: the user's.
        name: of the argument, for errors.

    Raises:
        TypeError: it cannot be iterated or has no length, or deals samples out to devices.
    """
    if not hasattr(sampler, "__iter__"):
        raise TypeError(f"expected {name} to be iterable, got {type(sampler).__name__}")
    for each in samplers_within(sampler):
        kind = type(each)
        home = kind.__module__.partition(".")[0]
        deals = hasattr(each, "num_replicas") and hasattr(each, "rank")
        if deals or home in ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"):
            raise TypeError(
                f"{name} is or holds a {kind.__name__}, which deals the samples out to devices, as "
                f"onefold does itself: give the sampler that it was made of, or shuffle=True, and "
                f"the batch size over all devices. A DataLoader of Accelerate or Lightning is to "
                f"be given as it was before prepare or setup"
            )
    _length(sampler, name)


def samplers_within(sampler: object) -> list[object]:
    """Return a sampler and those that it holds, each once."""

    def inner(name: str, value: object) -> list[object]:
        is_one = isinstance(value, Sampler) or (name in _INNER and value is not None)
        return [value] if is_one else []

    return within(sampler, inner)


def draw_samples(
    sampler: Iterable[int], *, batch_size: int, seed: int, epoch: int, loader: int
) -> SampleOrder:
    """Draw the order of one pass from a sampler.

    Args:
        sampler: yields the indices of samples; its length is that of the pass.
        batch_size: number of samples in a batch.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader.

    Raises:
        TypeError: the sampler yields something other than whole numbers.
    """
    drawn = _draw(sampler, "sampler", seed=seed, epoch=epoch, loader=loader)
    indices = _whole_numbers(drawn, "sampler")
    return SampleOrder(indices, batch_size, digest=_digest(indices, ()), repeats=True)


def draw_batches(
    batch_sampler: Iterable[Iterable[int]], *, seed: int, epoch: int, loader: int
) -> SampleOrder:
    """Draw the order of one pass from a batch sampler, whose batches are those of all devices.

    Args:
        batch_sampler: yields the indices of the samples of whole batches.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader.

    Raises:
        TypeError: the batch sampler yields something other than lists of whole numbers.
        ValueError: a batch is empty.
    """
    drawn = _draw(batch_sampler, "batch_sampler", seed=seed, epoch=epoch, loader=loader)
    batches = [_whole_numbers(_listed(batch), "batch_sampler") for batch in drawn]
    for number, batch in enumerate(batches):
        if not len(batch):
            raise ValueError(f"batch {number} of batch_sampler is empty: expected samples in it")
    indices = torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64)
    ends = list(accumulate(len(batch) for batch in batches))
    return SampleOrder(indices, 1, ends, digest=_digest(indices, ends), repeats=True)


def _draw(sampler: Any, name: str, *, seed: int, epoch: int, loader: int) -> list[Any]:
    number = loader_seed("sampler", seed, epoch, loader=loader)
    # One thread: the bits of what multinomial adds up may depend on how many there are.
    samplers = samplers_within(sampler)
    with kept_generators(), one_thread(), kept_apart(samplers):
        seed_held(samplers, number, "held by a sampler")
        for each in samplers:
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)
        # Now, as some samplers only know it once they know the epoch.
        length = _length(sampler, name)
        seed_generators(number)
        # One more than its length: an endless sampler must not be read to its end.
        found = list(take(iter(sampler), length + 1))
    if len(found) > length:
        _log.warning(
            "the %s yields more than its length, %d: a pass ends there, and the rest is left out",
            name,
            length,
        )
    return found[:length]


def _length(sampler: Any, name: str) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"the {name} {type(sampler).__name__} has no length: expected one, as it says where a "
            f"pass ends. Give it a __len__; for batches without end, trainer.batches takes a "
            f"function and how many batches are an epoch"
        ) from error


def _listed(batch: Any) -> list[Any]:
    if not hasattr(batch, "__iter__") or isinstance(batch, str):
        raise TypeError(
            f"expected batch_sampler to yield a list of samples for each batch, got {batch!r}: "
            f"what yields single samples is a sampler"
        )
    return list(batch)


def _whole_numbers(indices: list[Any], name: str) -> torch.Tensor:  # (n,) int64
    for index in indices:
        # Anything that stands for a whole number, also NumPy's and PyTorch's.
        try:
            operator.index(index)
        except TypeError:
            raise TypeError(
                f"expected {name} to yield the numbers of samples, got {index!r}: samples are "
                f"dealt out and seeded by number, so give the data set an index of whole numbers"
            ) from None
    return torch.tensor([operator.index(index) for index in indices], dtype=torch.int64)


def _digest(indices: torch.Tensor, ends: Iterable[int]) -> bytes:
    joined = hashlib.blake2b(indices.numpy().tobytes(), digest_size=16)
    joined.update(np.array([*ends], dtype=np.int64).tobytes())
    return joined.digest()

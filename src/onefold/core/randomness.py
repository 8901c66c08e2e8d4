"""Seeds that depend on what is computed and never on who computes it."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

__all__ = [
    "derive_seed",
    "kept_generators",
    "loader_seed",
    "order_by_length",
    "sample_order",
    "seed_generators",
]

_POOL_BATCHES = 32
"""Batches among which samples of near length are brought together."""

_stand_ins: list[np.random.MT19937] = []
"""NumPy generators to use again: making one takes longer than all the rest of a step's seeding."""


def derive_seed(purpose: str, *numbers: int) -> int:
    """A 64-bit seed from a purpose and whole numbers: BLAKE2b of both.

    >>> derive_seed("shard", 0, 7, 3) == derive_seed("shard", 0, 7, 3)
    True
    """
    text = purpose.encode() + struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def loader_seed(purpose: str, *numbers: int, loader: int) -> int:
    """A seed like `derive_seed`'s that differs between the loaders of a run.

    Loader 0 keeps the seeds that loaders had before they were numbered.

    >>> loader_seed("order", 0, 7, loader=0) == derive_seed("order", 0, 7)
    True
    """
    return derive_seed(purpose, *numbers, loader) if loader else derive_seed(purpose, *numbers)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed PyTorch's CPU generator, the generator of ``device``, ``random`` and NumPy."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept_generators(*devices: torch.device) -> Iterator[None]:
    """Give the caller's generators back as they were, whatever is seeded and drawn inside."""
    gpus = [torch.cuda.default_generators[d.index] for d in devices if d.type == "cuda"]
    gpu_states = [generator.get_state() for generator in gpus]
    cpu_state = torch.default_generator.get_state()
    python_state = random.getstate()
    try:
        with _kept_numpy():
            yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(cpu_state)
        for generator, state in zip(gpus, gpu_states, strict=True):
            generator.set_state(state)


@contextmanager
def _kept_numpy() -> Iterator[None]:
    """Exchange NumPy's global generator for another one: quicker than copying its state twice."""
    generator = mtrand.get_bit_generator()
    state = _numpy.pending_of(generator)
    stand_in = _stand_ins.pop() if _stand_ins else np.random.MT19937(0)
    try:
        mtrand.set_bit_generator(stand_in)
        np.random.seed(0)
        yield
    finally:
        mtrand.set_bit_generator(generator)
        _stand_ins.append(stand_in)
        if state is not None:
            np.random.set_state(state)


class _NumpyGenerator:
    """Knows whether NumPy's generator holds back the second of a pair of normal numbers.

    Only its whole state says so, which takes longer to read than a small step takes to seed. But
    none can have come to be held back while the generator has not moved, and where it stands is
    2,500 bytes of memory.
    """

    def __init__(self) -> None:
        self._generator: object = None
        self._address = 0
        self._stood = b""

    def pending_of(self, generator: Any) -> dict[str, Any] | None:
        """The state to put back, if a number is held back; else None."""
        if generator is self._generator and self._stood == self._where():
            return None
        state: dict[str, Any] = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            return None
        if state["has_gauss"]:
            self._generator = None
            return state
        self._generator, self._address = generator, generator.ctypes.state_address
        self._stood = self._where()
        return None

    def _where(self) -> bytes:
        return ctypes.string_at(self._address, _MT19937_BYTES)


_MT19937_BYTES = 625 * 4
_numpy = _NumpyGenerator()


def sample_order(
    samples: int, *, seed: int, epoch: int, loader: int = 0
) -> torch.Tensor:  # (samples,) int64
    """The order in which one loader visits the samples in one epoch.

    Args:
        samples: of the data set.
        seed: of the run.
        epoch: number of the pass.
        loader: number of the loader, so that two loaders of one data set have two orders.
    """
    generator = torch.Generator().manual_seed(loader_seed("order", seed, epoch, loader=loader))
    return torch.randperm(samples, generator=generator)


def order_by_length(
    lengths: torch.Tensor, *, batch_size: int, seed: int, epoch: int, loader: int = 0
) -> torch.Tensor:  # (samples,) int64
    """An order like `sample_order`, in whose batches samples of near length come together.

    The samples of a last batch that is short are drawn from all, so that leaving it out favours no
    length; the others are shuffled, sorted by length within pools of a few batches, and the batches
    are shuffled.

    Args:
        lengths: (samples,) int64.
        batch_size: samples of a batch.
        seed: of the run.
        epoch: number of the pass.
        loader: number of the loader.
    """
    order = sample_order(len(lengths), seed=seed, epoch=epoch, loader=loader)
    whole = len(order) // batch_size
    pools = torch.split(order[: whole * batch_size], _POOL_BATCHES * batch_size)
    sorted_pools = [pool[lengths[pool].argsort(stable=True)] for pool in pools]
    batches = torch.cat([*sorted_pools, order[:0]]).view(whole, batch_size)
    generator = torch.Generator().manual_seed(loader_seed("batches", seed, epoch, loader=loader))
    rest = order[whole * batch_size :]
    rest = rest[lengths[rest].argsort(stable=True)]
    return torch.cat([batches[torch.randperm(whole, generator=generator)].flatten(), rest])

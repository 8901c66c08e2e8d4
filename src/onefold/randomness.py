"""Seeds that depend on what is computed and never on who computes it."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand

__all__ = ["derive_seed", "kept_generators", "sample_order", "seed_generators"]

_stand_ins: list[np.random.MT19937] = []
"""NumPy generators to use again: making one takes longer than all the rest of a step's seeding."""


def derive_seed(purpose: str, *numbers: int) -> int:
    """A 64-bit seed from a purpose and whole numbers: BLAKE2b of both.

    >>> derive_seed("shard", 0, 7, 3) == derive_seed("shard", 0, 7, 3)
    True
    """
    text = purpose.encode() + struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


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
    state = np.random.get_state(legacy=False)
    stand_in = _stand_ins.pop() if _stand_ins else np.random.MT19937(0)
    try:
        mtrand.set_bit_generator(stand_in)
        np.random.seed(0)
        yield
    finally:
        mtrand.set_bit_generator(generator)
        _stand_ins.append(stand_in)
        if state["has_gauss"] and state["bit_generator"] == "MT19937":
            np.random.set_state(state)  # a second normal number that was still to come


def sample_order(samples: int, *, seed: int, epoch: int) -> torch.Tensor:  # (samples,) int64
    """The order in which the samples of one epoch are visited."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(samples, generator=generator)

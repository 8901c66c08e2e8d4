"""Packs the states of random generators into bytes, so that another device can continue.

These are PyTorch's generators (of the host and of one GPU), Python's ``random`` and NumPy's.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from onefold.core.encoding import decode, encode
from onefold.core.randomness import generators_of, put_states, states_of

__all__ = ["packed_generators", "put_generators", "redo_generators"]


def packed_generators(device: torch.device) -> torch.Tensor:
    """Pack the states of the generators that the code of a shard may draw from: (n,) uint8.

    Args:
        device: the device whose generator is included, if it is a GPU.

    >>> states = packed_generators(torch.device("cpu"))
    >>> drawn = torch.rand(())
    >>> put_generators(states, torch.device("cpu"))
    >>> bool(torch.rand(()) == drawn)
    True
    """
    version, words, pending = random.getstate()
    # During a step NumPy's generator is the stand-in, an MT19937: see the note at the top.
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    states = {
        "torch": states_of(generators_of(device)),
        "python": [version, np.array(words, dtype=np.uint64), pending],
        "numpy": numpy,
    }
    return torch.frombuffer(bytearray(encode(states, "generators")), dtype=torch.uint8)


def put_generators(packed: torch.Tensor, device: torch.device) -> None:
    """Restore the generators from the result of `packed_generators`.

    Args:
        packed: (n,) uint8 on the host.
        device: the device whose generator is also set, if it is a GPU.
    """
    states = decode(packed.numpy().tobytes())
    put_states(generators_of(device), states["torch"])
    version, words, pending = states["python"]
    random.setstate((version, tuple(words.tolist()), pending))
    np.random.set_state(states["numpy"])


def redo_generators(before: torch.Tensor, after: torch.Tensor, device: torch.device) -> None:
    """Set generators whose state is ``before`` to ``after``; for activation checkpointing.

    A layer that backward recomputes restores the generators that it used in forward, if the script
    asks for that; these must then move on as they did in forward. All other generators stay as is.

    Args:
        before: a result of `packed_generators`.
        after: another one.
        device: the device whose generator is included, if it is a GPU.
    """
    found, wanted = decode(before.numpy().tobytes()), decode(after.numpy().tobytes())
    triples = zip(generators_of(device), found["torch"], wanted["torch"], strict=True)
    for generator, state, moved in triples:
        if torch.equal(generator.get_state(), state):
            generator.set_state(moved)

"""The states of all generators as bytes, with which another device goes on where this one stopped.

Those of PyTorch (of the host and of one GPU), of Python's ``random`` and of NumPy; see
`onefold.core.randomness` for which generators a step has.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from onefold.core.wire import decode, encode

__all__ = ["packed_generators", "put_generators", "redo_generators"]


def packed_generators(device: torch.device) -> torch.Tensor:
    """Pack the states of the generators that the code of a shard may draw from: (n,) uint8.

    Args:
        device: the one whose generator counts as well, if it is a GPU.

    >>> states = packed_generators(torch.device("cpu"))
    >>> drawn = torch.rand(())
    >>> put_generators(states, torch.device("cpu"))
    >>> bool(torch.rand(()) == drawn)
    True
    """
    version, words, pending = random.getstate()
    # Made by a step, and so of this kind: see `onefold.core.randomness`.
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    states = {
        "torch": torch.default_generator.get_state(),
        "gpu": _of_gpu(device).get_state() if device.type == "cuda" else None,
        "python": [version, np.array(words, dtype=np.uint64), pending],
        "numpy": numpy,
    }
    return torch.frombuffer(bytearray(encode(states, "generators")), dtype=torch.uint8)


def put_generators(packed: torch.Tensor, device: torch.device) -> None:
    """Have the generators go on from what `packed_generators` has returned.

    Args:
        packed: (n,) uint8 on the host.
        device: the one whose generator is set as well, if it is a GPU.
    """
    states = decode(packed.numpy().tobytes())
    torch.default_generator.set_state(states["torch"])
    if device.type == "cuda" and states["gpu"] is not None:
        _of_gpu(device).set_state(states["gpu"])
    version, words, pending = states["python"]
    random.setstate((version, tuple(words.tolist()), pending))
    np.random.set_state(states["numpy"])


def redo_generators(before: torch.Tensor, after: torch.Tensor, device: torch.device) -> None:
    """Have each generator of PyTorch that stands as before stand as after; for checkpoints.

    A layer that is computed once more in backward draws from where these stood the first time, if
    the script wants that, and from all others as they are.

    Args:
        before: what `packed_generators` has returned.
        after: the same.
        device: the one whose generator counts as well, if it is a GPU.
    """
    found, wanted = decode(before.numpy().tobytes()), decode(after.numpy().tobytes())
    pairs = [("torch", torch.default_generator)]
    if device.type == "cuda":
        pairs.append(("gpu", _of_gpu(device)))
    for name, generator in pairs:
        if torch.equal(generator.get_state(), found[name]):
            generator.set_state(wanted[name])


def _of_gpu(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]

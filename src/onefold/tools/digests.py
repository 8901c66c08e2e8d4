"""Digests a sample of each shard's gradient: cheap enough for every shard of every step.

Note: what a digest detects
---------------------------
The sample of a step is one slice of one parameter's gradient, the same for all shards. It is drawn
from the run's seed and the step number, so over many steps it covers the whole model. All bits of
the slice and their positions count: each 32-bit word is multiplied by a 64-bit odd number that
belongs to its position, and the products are added modulo 2 ** 64. So the digest detects swapped
elements, and two flips of the same bit, which an XOR or a sum would miss. Words of 64 bits would
not work: flips of the highest bits of two words cancel, because the sum of two odd numbers is even.
This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
Integer sums do not depend on the order of addition, so the digest is the same on any device.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from onefold.core.flat import storage_order
from onefold.core.randomness import derive_seed
from onefold.core.results import Gradients
from onefold.session.run import RunSetup, RunView
from onefold.shard.task import Digest, GradientNotes, ShardTask, sum_of_digests
from onefold.step.hook import Hook

__all__ = [
    "LONGEST",
    "DigestHook",
    "GradientDigest",
    "GradientSample",
    "SampleDigests",
    "WholeDigest",
    "digest_of",
    "digest_of_all",
    "digest_of_whole",
    "prepare",
]

LONGEST = 1024
"""Maximum number of elements in a sample."""
_LONGEST_WORDS = 4 * LONGEST
_ODD = 0x9E3779B97F4A7C15
_OF_NUMPY = (torch.float32, torch.float64)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Digest gradients in a run that is recorded or inspected."""
    asked = start.context.options.tools.get("inspection")

    def begin(run: RunView) -> Hook | None:
        # Digest only in the inspected Trainer, so that a replay takes no longer than the recorded
        # run.
        looked_at = asked is not None and asked.get("trainer", 0) == run.devices.trainer
        return DigestHook(run) if looked_at or run.recorded_in is not None else None

    return begin


class DigestHook(Hook):
    """Digests a sample of each shard's gradient, on all devices of a recorded run.

    Args:
        run: the run.
    """

    def __init__(self, run: RunView) -> None:
        context = run.engine.context
        sizes = [parameter.numel() for parameter in context.parts.trained.values()]
        self._digests = GradientDigest(sizes, context.settings.seed)

    def task(self, task: ShardTask) -> ShardTask:
        """Select the part of each shard's gradient to digest."""
        sample = SampleDigests(self._digests.sample_of(task.step))
        return replace(task, notes=(*task.notes, sample))


class GradientSample(NamedTuple):
    """The part of each shard's gradient that the digests of a step cover."""

    parameter: int
    """Number of the parameter among the trained ones."""
    start: int
    stop: int
    """Bounds in elements, in memory order."""


class SampleDigests(GradientNotes):
    """Digests the same sample of each shard's gradient, without synchronizing the device.

    Args:
        sample: sample of the step.
    """

    def __init__(self, sample: GradientSample) -> None:
        self._sample = sample
        self._found: dict[int, Digest | None] = {}

    def begin(self, shard: int) -> None:
        """Start a shard."""
        self._found[shard] = None

    def add(self, shard: int, numbers: Sequence[int], gradients: Gradients) -> None:
        """Digest the sample if it is in one of these gradients."""
        number, start, stop = self._sample
        if number in numbers and (gradient := gradients[numbers.index(number)]) is not None:
            found = digest_of(gradient, start, stop)
            self._found[shard] = sum_of_digests(self._found[shard], found)

    def end(self, shard: int, total: torch.Tensor | None) -> Digest | None:
        """Return the digest of a shard."""
        found, self._found[shard] = self._found[shard], None
        return found


class GradientDigest:
    """Draws the sample of each step.

    Args:
        sizes: number of elements in each trained parameter.
        seed: seed of the run.

    >>> digests = GradientDigest([3, 5000], seed=0)
    >>> digests.sample_of(step=1) == digests.sample_of(step=1)
    True
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes, self._seed = sizes, seed
        self._ends = list(accumulate(sizes))

    def sample_of(self, step: int) -> GradientSample:
        """Return the sample of a step, the same on all devices and for all shards."""
        at = derive_seed("digest", self._seed, step) % self._ends[-1]
        number = bisect_right(self._ends, at)
        size = self._sizes[number]
        start = (at - (self._ends[number] - size)) // LONGEST * LONGEST
        return GradientSample(number, start, min(start + LONGEST, size))


def digest_of(gradient: torch.Tensor, start: int, stop: int) -> Digest:
    """Digest a slice of a dense gradient, without synchronizing its device.

    Args:
        gradient: gradient of any dtype and shape.
        start: first element, in memory order.
        stop: end of the slice; at most ``start`` plus `LONGEST`.

    Returns:
        A signed 64-bit integer; for a gradient outside host memory, an int64 tensor of shape () on
        its device.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool(digest_of(one, 0, 2) == digest_of(other, 0, 2))
    False
    """
    on_host = gradient.device.type == "cpu"
    if on_host and gradient.dtype in _OF_NUMPY and gradient.is_contiguous():
        # The common case, in NumPy throughout, takes a fifth of the time.
        own = gradient.detach().numpy().reshape(-1)[start:stop].view(np.int32)
        return int(own.astype(np.int64).dot(_WEIGHTS[: len(own)]))
    stretch = storage_order(gradient.detach())[start:stop]
    words = stretch.view(_WORDS[min(4, stretch.element_size())])
    if on_host:
        # NumPy integers wrap around like PyTorch's.
        return int(words.numpy().astype(np.int64).dot(_WEIGHTS[: len(words)]))
    return (words.to(torch.int64) * _weights_on(words.device)[: len(words)]).sum()


class WholeDigest(GradientNotes):
    """Digests all bits of the gradients of some shards, in whatever order they arrive.

    Args:
        shards: the shards to digest.
    """

    def __init__(self, shards: Collection[int]) -> None:
        self.shards = shards
        self.results: dict[int, str] = {}
        """Digests of each shard's gradients and its part of the loss."""
        self._found: dict[int, dict[int, list[Digest]]] = {}

    def begin(self, shard: int) -> None:
        """Start a shard."""
        self._found[shard] = {}

    def add(self, shard: int, numbers: Sequence[int], gradients: Gradients) -> None:
        """Digest gradients of parameters."""
        if shard in self.shards:
            for number, gradient in zip(numbers, gradients, strict=True):
                if gradient is not None:
                    self._found[shard].setdefault(number, []).append(digest_of_whole(gradient))

    def end(self, shard: int, total: torch.Tensor | None) -> None:
        """Complete the result of a shard; synchronizes the device."""
        if shard in self.shards:
            found = sorted(self._found.pop(shard).items())
            digests = [(number, list(map(int, of))) for number, of in found]
            self.results[shard] = f"{None if total is None else float(total).hex()} {digests}"


def digest_of_whole(gradient: torch.Tensor) -> Digest:
    """Digest a whole dense gradient; see `digest_of`.

    On the host, this is BLAKE2b. Elsewhere, each row of 4,096 words is digested as in `digest_of`,
    and the rows' digests are digested again.
    """
    memory = storage_order(gradient.detach())
    if memory.device.type == "cpu":
        return int.from_bytes(_blake(memory.view(torch.uint8).numpy().data), "little", signed=True)
    words = memory.view(_WORDS[min(4, memory.element_size())])
    rows = -(-len(words) // _LONGEST_WORDS)
    padded = words.new_zeros(rows * _LONGEST_WORDS)
    padded[: len(words)] = words
    table = padded.view(rows, _LONGEST_WORDS).to(torch.int64)
    of_rows = (table * _weights_on(words.device)).sum(1)
    return (of_rows * torch.from_numpy(_odd_numbers(rows)).to(words.device)).sum()


def _blake(memory: memoryview) -> bytes:
    return hashlib.blake2b(memory, digest_size=8).digest()


def digest_of_all(tensors: Iterable[torch.Tensor], seed: int) -> int:
    """Digest a slice of each tensor, chosen by the seed; synchronizes devices.

    >>> digest_of_all([torch.ones(3)], 0) == digest_of_all([torch.ones(3)], 1)
    True
    """
    found = 0
    for number, tensor in enumerate(tensors):
        start = derive_seed("digest", seed, number) % max(1, tensor.numel()) // LONGEST * LONGEST
        # Multiply by an odd number, so that the order of tensors counts too.
        found = (found * _ODD + int(digest_of(tensor, start, start + LONGEST))) % (1 << 63)
    return found


def _odd_numbers(count: int) -> np.ndarray[Any, Any]:
    """Return the first numbers of SplitMix64, made odd: (count,) int64."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_ODD)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_WEIGHTS = _odd_numbers(_LONGEST_WORDS)


@cache
def _weights_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_WEIGHTS).to(device)

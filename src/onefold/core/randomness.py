"""Seeds that do not depend on the device, and the states of random generators.

Note: what is seeded, and what it costs
---------------------------------------
Every generator that user code may draw from is seeded before each shard and each sample, and
restored after the step, so that the script sees no change. In small models this takes a good part
of a step, most of it for NumPy, whose state of 2,500 bytes would be copied twice. So a stand-in
replaces NumPy's generator during a step, and the caller's generator is not touched at all.

Normal numbers are generated in pairs, and the second one is held back for the next call. Python's
state includes this pending number. NumPy stores it outside the generator and drops it when the
generator is replaced. So if a number is pending, the whole state is saved and restored after all.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from onefold.system.accelerator import generator_of

__all__ = [
    "COMMON",
    "GENERATORS",
    "MOST_SHUFFLED",
    "GeneratorStates",
    "OwnGenerators",
    "comparable_state",
    "derive_seed",
    "forget_numpy",
    "forked_generators",
    "generators_of",
    "in_common",
    "kept_generators",
    "loader_seed",
    "order_by_length",
    "put_states",
    "same_rng_for_all_shards",
    "sample_order",
    "seed_generators",
    "state_of",
    "states_of",
]

GENERATORS = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
"""Types of random generators."""


_POOL_BATCHES = 32
"""Number of batches in a pool, within which samples are sorted by length."""

MOST_SHUFFLED = 1 << 29
"""Maximum number of samples to shuffle: their order takes 4 GB in each process."""

_stand_ins: list[np.random.MT19937] = []
"""NumPy generators for reuse: making one takes longer than the rest of a step's seeding."""


def derive_seed(purpose: str, *numbers: int) -> int:
    """Hash a purpose and integers into a 64-bit seed, with BLAKE2b.

    >>> derive_seed("shard", 0, 7, 3) == derive_seed("shard", 0, 7, 3)
    True
    """
    # A hash, not a sum: seed 0 in step 1 must not draw the numbers of seed 1 in step 0. The purpose
    # separates shards, samples and orders with the same numbers.
    text = purpose.encode() + struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def loader_seed(purpose: str, *numbers: int, loader: int) -> int:
    """Derive a seed as `derive_seed` does, but a different one for each loader of a run.

    Loader 0 has the seeds that all loaders had before loaders were numbered.

    >>> loader_seed("order", 0, 7, loader=0) == derive_seed("order", 0, 7)
    True
    """
    return derive_seed(purpose, *numbers, loader) if loader else derive_seed(purpose, *numbers)


class _Common:
    """RNG state that the shards being computed or read share."""

    numbers: tuple[int, ...] | None = None
    """Numbers that are equal in all of these shards; None outside shards."""
    purpose = ""
    device: torch.device | None = None


COMMON = _Common()
"""State of this process, or of the simulated device that is running."""


def seed_generators(
    seed: int,
    device: torch.device | None = None,
    *,
    common: tuple[str, tuple[int, ...]] | None = None,
) -> None:
    """Seed PyTorch's CPU generator, the generator of ``device``, ``random`` and NumPy.

    Args:
        seed: 64 bits.
        device: the device whose generator is also seeded, if it is a GPU.
        common: a purpose and numbers that are equal in all shards of the batch, for
            `same_rng_for_all_shards`.
    """
    COMMON.purpose, COMMON.numbers = common or ("", None)
    COMMON.device = device
    # torch.manual_seed would seed every GPU of the machine, and other backends too.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        generator_of(device).manual_seed(seed)
    random.seed(seed)
    # NumPy accepts only 32 bits; the low ones of a hash are as good as any.
    np.random.seed(seed & 0xFFFFFFFF)


def generators_of(*devices: torch.device | None) -> list[torch.Generator]:
    """Return PyTorch's generators of the host, and of those devices that are GPUs."""
    others = [device for device in devices if device is not None and device.type != "cpu"]
    return [torch.default_generator, *map(generator_of, others)]


def states_of(generators: Iterable[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def put_states(generators: Iterable[torch.Generator], states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class kept_generators:  # noqa: N801 (used like a function)
    """Restore the caller's generators on exit, whatever is seeded and drawn inside.

    NumPy's global generator is replaced meanwhile: faster than copying its state twice. It is
    safe to exit twice, after an interrupted exit.
    """

    def __init__(self, *devices: torch.device | None) -> None:
        self._generators = generators_of(*devices)
        self._states, self._python = states_of(self._generators), random.getstate()
        self._common = COMMON.purpose, COMMON.numbers, COMMON.device
        self._numpy = mtrand.get_bit_generator()
        # Read the pending number before the replacement, which drops it.
        self._pending = _numpy.pending_of(self._numpy)
        self._stand_in = _stand_ins.pop() if _stand_ins else np.random.MT19937(0)

    def __enter__(self) -> None:
        try:
            mtrand.set_bit_generator(self._stand_in)
            # A reused stand-in still has the state of the previous step.
            np.random.seed(0)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        # Put the generator back before its state, which is set on the current generator.
        mtrand.set_bit_generator(self._numpy)
        # Return the stand-in only now: a nested block must not get the same one.
        if self._stand_in not in _stand_ins:
            _stand_ins.append(self._stand_in)
        if self._pending is not None:
            np.random.set_state(self._pending)
        COMMON.purpose, COMMON.numbers, COMMON.device = self._common
        random.setstate(self._python)
        put_states(self._generators, self._states)


def in_common() -> tuple[str, tuple[int, ...]] | None:
    """Return the RNG state that the shards being computed or read share; None outside shards.

    Passed to `seed_generators` as ``common``, it makes `same_rng_for_all_shards` draw the same
    numbers elsewhere.
    """
    return None if COMMON.numbers is None else (COMMON.purpose, COMMON.numbers)


@contextmanager
def same_rng_for_all_shards(name: str = "") -> Iterator[None]:
    """Draw the same random numbers in every shard of a batch, and others in the next batch.

    Use it for a random value of the whole batch: a mixup factor, an image size, a time step. Call
    it in a loss, in a function for `evaluate` or `predict`, or in a loader's ``collate``. Inside
    the block, PyTorch's generators, ``random`` and NumPy use the shared seed; afterwards they
    continue as if the block had not run.

    Args:
        name: blocks with the same name draw the same numbers, however often a batch enters them.
            Use another name for a block that needs other numbers.

    Raises:
        RuntimeError: no shard is being computed or read.

    >>> def loss(model, batch):
    ...     with onefold.same_rng_for_all_shards():
    ...         size = int(torch.randint(8, 17, ()))
    ...     return model(batch[:, :size]).mean(dim=1)
    """
    numbers, purpose, device = COMMON.numbers, COMMON.purpose, COMMON.device
    if numbers is None:
        raise RuntimeError(
            "onefold.same_rng_for_all_shards() was called outside a shard. Call it in a loss, in a "
            "function for evaluate or predict, or in a loader's collate. The script itself draws "
            "the same numbers on all devices without it"
        )
    with kept_generators(device):
        seed = derive_seed(f"same {purpose} {name}", *numbers)
        seed_generators(seed, device, common=(purpose, numbers))
        yield


def comparable_state(state: Any) -> Any:
    """Convert a generator's state, so that equal states compare equal."""
    if isinstance(state, dict):
        return {key: comparable_state(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(comparable_state(value) for value in state)
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class GeneratorStates:
    """The current states of the generators that user code may draw from.

    Args:
        devices: devices whose generators are included, if they are GPUs.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._generators = generators_of(*devices)
        self._states = states_of(self._generators)
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    def drawn_from(self) -> str:
        """Return the name of a generator whose state has changed; empty if none has."""
        numpy = np.random.get_state(legacy=False)
        host, *gpus = map(torch.equal, self._states, states_of(self._generators))
        moved = {
            "PyTorch's generator": not host,
            "PyTorch's generator of a GPU": not all(gpus),
            "Python's random": random.getstate() != self._python,
            "NumPy's generator": comparable_state(numpy) != comparable_state(self._numpy),
        }
        return next((name for name, is_moved in moved.items() if is_moved), "")

    def restore(self) -> None:
        """Restore these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        # Invalidate the cached generator state: a step in the block may have updated it.
        _numpy.forget()
        put_states(self._generators, self._states)


@contextmanager
def forked_generators(*devices: torch.device) -> Iterator[None]:
    """Restore the caller's generators on exit; inside, they continue from their current states."""
    states = GeneratorStates(*devices)
    try:
        yield
    finally:
        states.restore()


class _NumpyGenerator:
    """Tracks whether NumPy's generator holds back the second of a pair of normal numbers.

    Only the whole state contains this, and reading it takes longer than all the seeding of a small
    step. But as long as the generator has not moved, no number can have become pending, and 2,500
    bytes of its memory show whether it has moved.
    """

    def __init__(self) -> None:
        self._generator: object = None
        self._address = 0
        self._stood = b""

    def pending_of(self, generator: Any) -> dict[str, Any] | None:
        """Return the state to restore if a number is pending; None if none is."""
        if generator is self._generator and self._stood == self._where():
            return None
        state: dict[str, Any] = np.random.get_state(legacy=False)
        # A script may have installed another generator, whose memory layout is unknown.
        if state["bit_generator"] != "MT19937":
            return None
        if state["has_gauss"]:
            # Drop the cache: the pending number may be used up without moving the generator.
            self._generator = None
            return state
        self._generator, self._address = generator, generator.ctypes.state_address
        self._stood = self._where()
        return None

    def forget(self) -> None:
        """Drop the cache, so that the next call reads the whole state."""
        self._generator = None

    def _where(self) -> bytes:
        # The address belongs to `self._generator`; that reference keeps it valid.
        return ctypes.string_at(self._address, _MT19937_BYTES)


# Size of NumPy's struct of this generator: 624 words of 32 bits, and the position among them.
_MT19937_BYTES = 625 * 4
_numpy = _NumpyGenerator()


def forget_numpy() -> None:
    """Drop the cached state of NumPy's generator, because other code has set that state."""
    _numpy.forget()


def sample_order(
    samples: int, *, seed: int, epoch: int, loader: int = 0
) -> torch.Tensor:  # (samples,) int64
    """Return the sample order of one loader in one epoch.

    Args:
        samples: number of samples in the data set.
        seed: seed of the run.
        epoch: epoch number.
        loader: number of the loader, so that two loaders of one data set have different orders.
    """
    # A separate CPU generator: the order does not depend on the device type, and no other generator
    # advances.
    generator = torch.Generator().manual_seed(loader_seed("order", seed, epoch, loader=loader))
    return torch.randperm(samples, generator=generator)


def order_by_length(
    lengths: torch.Tensor, *, batch_size: int, seed: int, epoch: int, loader: int = 0
) -> torch.Tensor:  # (samples,) int64
    """Return a `sample_order` that puts samples of similar length into the same batch.

    Samples are shuffled, and sorted by length within pools of a few batches; then the batches are
    shuffled. A short last batch is drawn from all samples, so that dropping it favors no length.

    Args:
        lengths: (samples,) int64.
        batch_size: number of samples in a batch.
        seed: seed of the run.
        epoch: epoch number.
        loader: number of the loader.
    """
    order = sample_order(len(lengths), seed=seed, epoch=epoch, loader=loader)
    whole = len(order) // batch_size
    pools = torch.split(order[: whole * batch_size], _POOL_BATCHES * batch_size)
    # Stable, because otherwise the kernel would decide the order of samples of equal length.
    sorted_pools = [pool[lengths[pool].argsort(stable=True)] for pool in pools]
    # The empty slice is for a data set smaller than one batch, which has no tensors to join.
    batches = torch.cat([*sorted_pools, order[:0]]).view(whole, batch_size)
    generator = torch.Generator().manual_seed(loader_seed("batches", seed, epoch, loader=loader))
    rest = order[whole * batch_size :]
    rest = rest[lengths[rest].argsort(stable=True)]
    return torch.cat([batches[torch.randperm(whole, generator=generator)].flatten(), rest])


class OwnGenerators:
    """Random generators that the script made itself.

    Args:
        generators: the generators, each once.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self.all = list(generators)

    def seed(self, seed: int, domain: str) -> None:
        """Seed every generator with a separate seed.

        Args:
            seed: seed of the pass.
            domain: kind of object that holds the generators, so that two kinds draw different
                numbers.
        """
        for number, generator in enumerate(self.all):
            # Separate seeds, because two generators must not draw the same numbers.
            _seed(generator, derive_seed(domain, seed & (2**63 - 1), number))

    def states(self) -> tuple[Any, ...]:
        """Return the state of each."""
        return tuple(map(state_of, self.all))

    def put_back(self, states: Iterable[Any]) -> None:
        """Restore the states that `states` returned."""
        for generator, state in zip(self.all, states, strict=True):
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators on exit."""
        before = self.states()
        try:
            yield
        finally:
            self.put_back(before)


def state_of(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`, in the format of its library."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        # A bit generator cannot be reseeded, but it accepts the state of another one of its type.
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        # NumPy's legacy generator accepts only 32 bits.
        generator.seed(seed & 0xFFFFFFFF)

"""Seeds that depend on what is computed and never on the device, and the states of generators.

`packed_generators` returns the states of all generators as bytes, with which another device goes on
where this one stopped: those of PyTorch (of the host and of one GPU), of Python's ``random`` and of
NumPy.

Note: what is seeded, and what it costs
---------------------------------------
Before each shard and each sample every generator that user code may draw from is seeded, and after
the step all of them are restored, so that the script around the step notices nothing. With small
models this is a good part of a step, and NumPy is most of it: its state has 2,500 bytes, which
would be copied twice. So during a step another generator takes the place of NumPy's own, and the
caller's is not touched at all.

Normal numbers are made in pairs, and the second of a pair is held back for the next call. Python's
state includes this pending number. NumPy keeps it outside of the generator, and drops it when the
generator is replaced, so where one is pending the whole state is saved and restored after all.
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

from onefold.core.encoding import decode, encode
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
    "in_common",
    "kept_generators",
    "loader_seed",
    "order_by_length",
    "packed_generators",
    "put_generators",
    "redo_generators",
    "same_rng_for_all_shards",
    "sample_order",
    "seed_generators",
    "state_of",
]

GENERATORS = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
"""The kinds of random generators."""


_POOL_BATCHES = 32
"""Number of batches in a pool, within which samples are sorted by length."""

MOST_SHUFFLED = 1 << 29
"""The most samples that are shuffled: their order takes 4 GB in each process."""

_stand_ins: list[np.random.MT19937] = []
"""NumPy generators for reuse: making one takes longer than all the rest of a step's seeding."""


def derive_seed(purpose: str, *numbers: int) -> int:
    """Hash a purpose and whole numbers into a 64-bit seed, with BLAKE2b.

    >>> derive_seed("shard", 0, 7, 3) == derive_seed("shard", 0, 7, 3)
    True
    """
    # A hash, not a sum: seed 0 in step 1 must not draw the numbers of seed 1 in step 0. The purpose
    # keeps shards, samples and orders apart that have the same numbers.
    text = purpose.encode() + struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def loader_seed(purpose: str, *numbers: int, loader: int) -> int:
    """Derive a seed as `derive_seed` does, but a different one for each loader of a run.

    Loader 0 has the seeds that all loaders had before they were numbered.

    >>> loader_seed("order", 0, 7, loader=0) == derive_seed("order", 0, 7)
    True
    """
    return derive_seed(purpose, *numbers, loader) if loader else derive_seed(purpose, *numbers)


class _Common:
    """Knows what the shards that are computed, or read, now have in common."""

    numbers: tuple[int, ...] | None = None
    """The same in all of them; None outside of any."""
    purpose = ""
    device: torch.device | None = None


COMMON = _Common()
"""Of this process, or of the simulated device that goes on."""


def seed_generators(
    seed: int,
    device: torch.device | None = None,
    *,
    common: tuple[str, tuple[int, ...]] | None = None,
) -> None:
    """Seed PyTorch's CPU generator, the generator of ``device``, ``random`` and NumPy.

    Args:
        seed: 64 bits.
        device: the device of which the generator is seeded as well, if that is a GPU.
        common: a purpose and numbers which all shards of the batch have alike, for
            `same_rng_for_all_shards`.
    """
    COMMON.purpose, COMMON.numbers = common or ("", None)
    COMMON.device = device
    # Not torch.manual_seed, which would seed every GPU of the machine, and other backends besides.
    for generator in _generators(device):
        generator.manual_seed(seed)
    random.seed(seed)
    # NumPy accepts 32 bits and no more; the low ones of a hash are as good as any.
    np.random.seed(seed & 0xFFFFFFFF)


def _generators(*devices: torch.device | None) -> list[torch.Generator]:
    """PyTorch's generators of the host, and of those devices that are GPUs."""
    others = [device for device in devices if device is not None and device.type != "cpu"]
    return [torch.default_generator, *map(generator_of, others)]


def _states_of(generators: Iterable[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _put_states(generators: Iterable[torch.Generator], states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@contextmanager
def kept_generators(*devices: torch.device | None) -> Iterator[None]:
    """Restore the caller's generators afterwards, whatever is seeded and drawn inside."""
    generators = _generators(*devices)
    states, python_state = _states_of(generators), random.getstate()
    common = COMMON.purpose, COMMON.numbers, COMMON.device
    try:
        with _kept_numpy():
            yield
    finally:
        COMMON.purpose, COMMON.numbers, COMMON.device = common
        random.setstate(python_state)
        _put_states(generators, states)


def in_common() -> tuple[str, tuple[int, ...]] | None:
    """Return what the shards that are computed, or read, now have in common; None outside of any.

    Given to `seed_generators` as ``common``, it has `same_rng_for_all_shards` draw the same
    elsewhere.
    """
    return None if COMMON.numbers is None else (COMMON.purpose, COMMON.numbers)


@contextmanager
def same_rng_for_all_shards(name: str = "") -> Iterator[None]:
    """A block whose random numbers are the same in every shard of a batch, and not in the next.

    For what a batch has one of: the factor of a mixup, a size for all images, a time step. Used in
    a loss, in a function for `evaluate` or `predict`, or in the ``collate`` of a loader. PyTorch's
    generators, ``random`` and NumPy draw by the block, and go on afterwards as if it had not been.

    Args:
        name: blocks of one name draw the same numbers, however often a batch comes to them; give
            another name to a block that is to draw others.

    Raises:
        RuntimeError: no shard is being computed or read, so there is nothing to be the same in.

    >>> def loss(model, batch):
    ...     with onefold.same_rng_for_all_shards():
    ...         size = int(torch.randint(8, 17, ()))
    ...     return model(batch[:, :size]).mean(dim=1)
    """
    numbers, purpose, device = COMMON.numbers, COMMON.purpose, COMMON.device
    if numbers is None:
        raise RuntimeError(
            "onefold.same_rng_for_all_shards() was called where no shard is computed or read: "
            "expected a call inside a loss, a function for evaluate or predict, or a loader's "
            "collate. The script itself draws alike on all devices without it"
        )
    with kept_generators(device):
        seed = derive_seed(f"same {purpose} {name}", *numbers)
        seed_generators(seed, device, common=(purpose, numbers))
        yield


def comparable_state(state: Any) -> Any:
    """A generator's state of any kind, such that equal ones compare as equal."""
    if isinstance(state, dict):
        return {key: comparable_state(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(comparable_state(value) for value in state)
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class GeneratorStates:
    """The states of the generators that user code may draw from, as they are now.

    Args:
        devices: those of which the generators count as well, if they are GPUs.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._generators = _generators(*devices)
        self._states = _states_of(self._generators)
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    def drawn_from(self) -> str:
        """Name a generator whose state is another one by now, in words; empty if none is."""
        numpy = np.random.get_state(legacy=False)
        host, *gpus = map(torch.equal, self._states, _states_of(self._generators))
        moved = {
            "PyTorch's generator": not host,
            "PyTorch's generator of a GPU": not all(gpus),
            "Python's random": random.getstate() != self._python,
            "NumPy's generator": comparable_state(numpy) != comparable_state(self._numpy),
        }
        return next((name for name, is_moved in moved.items() if is_moved), "")

    def restore(self) -> None:
        """Make these the current states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        # What was found out about the generator meanwhile, a step inside say, is true no more.
        _numpy.forget()
        _put_states(self._generators, self._states)


@contextmanager
def forked_generators(*devices: torch.device) -> Iterator[None]:
    """Restore the caller's generators afterwards; inside they go on from where they are."""
    states = GeneratorStates(*devices)
    try:
        yield
    finally:
        states.restore()


@contextmanager
def _kept_numpy() -> Iterator[None]:
    """Replace NumPy's global generator for a while: quicker than copying its state twice."""
    generator = mtrand.get_bit_generator()
    # Asked before the replacement, which drops a pending number.
    state = _numpy.pending_of(generator)
    stand_in = _stand_ins.pop() if _stand_ins else np.random.MT19937(0)
    try:
        mtrand.set_bit_generator(stand_in)
        # A stand-in that was used before still stands where that step left it.
        np.random.seed(0)
        yield
    finally:
        # The generator goes back before its state is set, which goes to whichever is current.
        mtrand.set_bit_generator(generator)
        # Returned only now: a block inside this one must not be given the same stand-in.
        _stand_ins.append(stand_in)
        if state is not None:
            np.random.set_state(state)


class _NumpyGenerator:
    """Knows whether NumPy's generator holds back the second of a pair of normal numbers.

    Only the whole state tells, and reading it takes longer than all the seeding of a small step.
    But while the generator has not moved, no number can have become pending, and whether it has
    moved can be seen from 2,500 bytes of its memory.
    """

    def __init__(self) -> None:
        self._generator: object = None
        self._address = 0
        self._stood = b""

    def pending_of(self, generator: Any) -> dict[str, Any] | None:
        """The state to restore if a number is pending; None if nothing needs to be restored."""
        if generator is self._generator and self._stood == self._where():
            return None
        state: dict[str, Any] = np.random.get_state(legacy=False)
        # A script may have installed another generator, whose memory we know nothing about.
        if state["bit_generator"] != "MT19937":
            return None
        if state["has_gauss"]:
            # Forget where it stood: the pending number may be used up without moving the generator.
            self._generator = None
            return state
        self._generator, self._address = generator, generator.ctypes.state_address
        self._stood = self._where()
        return None

    def forget(self) -> None:
        """Look at the whole state the next time, whatever was known of it."""
        self._generator = None

    def _where(self) -> bytes:
        # The address belongs to `self._generator`, which is kept alive by being held there.
        return ctypes.string_at(self._address, _MT19937_BYTES)


# NumPy's struct of this generator: 624 words of 32 bits, and the position among them.
_MT19937_BYTES = 625 * 4
_numpy = _NumpyGenerator()


def forget_numpy() -> None:
    """Look at NumPy's whole state the next time, as something else has set it."""
    _numpy.forget()


def sample_order(
    samples: int, *, seed: int, epoch: int, loader: int = 0
) -> torch.Tensor:  # (samples,) int64
    """The order in which one loader visits the samples in one epoch.

    Args:
        samples: number of samples in the data set.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader, so that two loaders of one data set have different orders.
    """
    # A generator of its own, on the CPU: the same order on every kind of device, and nobody else's
    # random numbers move.
    generator = torch.Generator().manual_seed(loader_seed("order", seed, epoch, loader=loader))
    return torch.randperm(samples, generator=generator)


def order_by_length(
    lengths: torch.Tensor, *, batch_size: int, seed: int, epoch: int, loader: int = 0
) -> torch.Tensor:  # (samples,) int64
    """An order like that of `sample_order`, but with samples of similar length in each batch.

    The samples are shuffled and sorted by length within pools of a few batches, and the batches are
    shuffled in turn. Those of a short last batch are drawn from all samples, so that leaving that
    batch out favors no length.

    Args:
        lengths: (samples,) int64.
        batch_size: number of samples in a batch.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader.
    """
    order = sample_order(len(lengths), seed=seed, epoch=epoch, loader=loader)
    whole = len(order) // batch_size
    pools = torch.split(order[: whole * batch_size], _POOL_BATCHES * batch_size)
    # Stable, or samples of equal length could come in any order, which is up to the kernel.
    sorted_pools = [pool[lengths[pool].argsort(stable=True)] for pool in pools]
    # The empty slice is for a data set of less than one batch, where there is nothing to join.
    batches = torch.cat([*sorted_pools, order[:0]]).view(whole, batch_size)
    generator = torch.Generator().manual_seed(loader_seed("batches", seed, epoch, loader=loader))
    rest = order[whole * batch_size :]
    rest = rest[lengths[rest].argsort(stable=True)]
    return torch.cat([batches[torch.randperm(whole, generator=generator)].flatten(), rest])


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
    # Made by a step, and so of this kind: see the note at the head.
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    states = {
        "torch": _states_of(_generators(device)),
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
    _put_states(_generators(device), states["torch"])
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
    triples = zip(_generators(device), found["torch"], wanted["torch"], strict=True)
    for generator, state, moved in triples:
        if torch.equal(generator.get_state(), state):
            generator.set_state(moved)


class OwnGenerators:
    """Random generators that a script has made itself.

    Args:
        generators: each once.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self.all = list(generators)

    def seed(self, seed: int, domain: str) -> None:
        """Seed them, each with a seed of its own.

        Args:
            seed: of the pass.
            domain: what kind of thing holds them, so that two kinds never draw alike.
        """
        for number, generator in enumerate(self.all):
            # Each has a seed of its own: what two of them draw must not be the same.
            _seed(generator, derive_seed(domain, seed & (2**63 - 1), number))

    def states(self) -> tuple[Any, ...]:
        """Return the state of each."""
        return tuple(map(state_of, self.all))

    def put_back(self, states: Iterable[Any]) -> None:
        """Put them back to where they were when `states` was called."""
        for generator, state in zip(self.all, states, strict=True):
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back afterwards."""
        before = self.states()
        try:
            yield
        finally:
            self.put_back(before)


def state_of(generator: Any) -> Any:
    """The state of one of `GENERATORS`, in the form of its library."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        # A bit generator cannot be seeded again, but takes the state of another of its kind.
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        # NumPy's older kind takes 32 bits and no more.
        generator.seed(seed & 0xFFFFFFFF)

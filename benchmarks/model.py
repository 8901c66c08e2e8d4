"""A model of the exchange's cost: bytes, messages, memory and time by number of devices.

Nothing here is measured; `scaling.py` compares these numbers with measurements, and
docs/studies/scaling.md derives the formulas. Amounts are for one step and one device, averaged over
the devices, unless a name says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onefold.core.fold import Block, blocks_of
from onefold.core.shard import Shares

__all__ = [
    "Links",
    "Run",
    "buffer_bytes",
    "chunks",
    "collect_bytes",
    "collective_bytes",
    "collective_memory_bytes",
    "collective_messages",
    "collective_s",
    "folded_host_bytes",
    "folded_s",
    "host_bytes",
    "publish_bytes",
    "ring_bytes",
    "ring_s",
    "shared_memory_bytes",
    "shared_messages",
    "shared_read_bytes",
    "shared_s",
    "shared_written_bytes",
    "table_bytes",
]

CHUNK_BYTES = 4 << 20
"""Maximum size of a message of partial sums or parameters: see `onefold.core.flat.cut_chunks`."""
LARGE_BYTES = 256 << 10
"""Larger tensors are sent separately, and copied only if others must read them."""
HEAD_BYTES = 144
"""Size of a device's head in every step: step, samples, shares, checksums and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The size of a training run."""

    parameter_bytes: int
    """P: size of the trained parameters in float32, and so of a gradient."""
    devices: int
    """D."""
    shards: int
    """V."""
    devices_per_host: int
    """g: devices per host; with fewer devices, all are on one host."""
    parameters: int = 1
    """Number of parameter tensors."""
    small_bytes: int = 0
    """Total size of the tensors smaller than `LARGE_BYTES`."""
    chunks_each: float | None = None
    """Mean number of messages per partition; None to compute it for tensors of equal size."""
    buffers: int = 0
    """Number of buffers of the model."""
    buffer_row_bytes: int = 0
    """Size of all buffers of one shard."""
    state_copies: int = 1
    """State tensors per parameter: 1 for momentum, 2 for Adam."""
    low: bool = False
    """Whether shards compute in 16 bits, with additional low-precision parameters or gradients."""
    low_parameters: bool = False
    """Whether models hold 16-bit parameters, in addition to float32 masters of each partition."""

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= self.shards:
            raise ValueError(
                f"expected 1 to {self.shards} devices for {self.shards} shards, got {self.devices}"
            )
        if self.devices_per_host < 1 or self.parameter_bytes < 1:
            raise ValueError(
                f"devices per host and bytes of parameters must be at least 1, but got "
                f"{self.devices_per_host} and {self.parameter_bytes}"
            )
        if self.devices > self.devices_per_host and self.devices % self.devices_per_host:
            raise ValueError(
                f"expected full hosts of {self.devices_per_host} devices, got {self.devices}"
            )

    @property
    def hosts(self) -> int:
        """H."""
        return -(-self.devices // self.devices_per_host)

    @property
    def on_host(self) -> int:
        """Number of devices that share a host: g, or all of them on a single host."""
        return min(self.devices, self.devices_per_host)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of shards of each device."""
        return Shares.even(shards=self.shards, devices=self.devices).counts

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of partial sums that each device publishes."""
        return tuple(len(blocks) for blocks in _blocks(self))

    @property
    def k(self) -> float:
        """Mean number of partial sums per device: 1 if D divides V so evenly that every device's
        shards are one block."""
        return sum(self.blocks) / self.devices

    @property
    def held_bytes(self) -> float:
        """Size of the parameters, as models hold and send them."""
        return self.parameter_bytes / 2 if self.low_parameters else self.parameter_bytes

    @property
    def away(self) -> float:
        """Fraction of the parameters that other devices own."""
        return (self.devices - 1) / self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Speeds of links, in one direction; both directions work at the same time."""

    host_bytes_per_s: float
    """Speed from a host to others, over all its network cards."""
    device_bytes_per_s: float
    """Speed from a device to anywhere."""
    memory_bytes_per_s: float
    """Speed of adding or copying partial sums in a device's own memory."""
    message_s: float
    """Time of a device for sending one message and receiving one."""
    delay_s: float
    """Latency between hosts, one way."""


# Through messages


def collect_bytes(run: Run) -> float:
    """Return the bytes of partial sums sent to the owners of their partitions: k P (D - 1) / D."""
    return run.k * run.parameter_bytes * run.away


def publish_bytes(run: Run) -> float:
    """Return the bytes of updated partitions sent to all: P (D - 1) / D, or half if low."""
    return run.held_bytes * run.away


def table_bytes(run: Run) -> float:
    """Return the bytes of a device's head, row and shard totals, sent to each other device.

    The row has four bytes per parameter, and for each shard a weight, a checksum of the logged
    metrics, the number of skipped samples, and one byte per buffer; total and digest have sixteen.
    """
    of_shards = (8 + 8 + 8 + run.buffers + 16) * run.shards / run.devices
    return (run.devices - 1) * (HEAD_BYTES + 4 * run.parameters + of_shards)


def buffer_bytes(run: Run) -> float:
    """Return the bytes of the shards' buffers, averaged over the devices."""
    return (run.devices - 1) * sum(run.counts) / run.devices * run.buffer_row_bytes


def collective_bytes(run: Run) -> float:
    """Return all bytes that a device sends in a step."""
    return collect_bytes(run) + publish_bytes(run) + table_bytes(run) + buffer_bytes(run)


def chunks(run: Run) -> float:
    """Return the messages per partition: tensors alone, in parts, or small ones together."""
    if run.chunks_each is not None:
        return run.chunks_each
    partition_bytes = run.parameter_bytes / run.devices
    tensor_bytes = run.parameter_bytes / run.parameters
    if tensor_bytes < LARGE_BYTES:
        return math.ceil(partition_bytes / CHUNK_BYTES)
    tensors = math.ceil(partition_bytes / tensor_bytes)
    return tensors * math.ceil(min(partition_bytes, tensor_bytes) / CHUNK_BYTES)


def collective_messages(run: Run) -> float:
    """Return the messages to each other device: head, row, norms, k partitions, and one back."""
    buffers = 1 if run.buffer_row_bytes else 0
    return (run.devices - 1) * (3 + (run.k + 1) * chunks(run) + buffers)


def host_bytes(run: Run) -> float:
    """Return the bytes of partial sums and parameters that a host sends to other hosts."""
    elsewhere = (run.devices - run.on_host) / run.devices
    return run.on_host * (run.k + 1) * run.parameter_bytes * elsewhere


def collective_s(run: Run, links: Links) -> float:
    """Return the seconds of `publish`, `collect` and `publish_parameters`.

    This is the slower of a device's and its host's traffic, plus sequential messages, two latencies
    (there and back), and copying and adding at the speed of memory.
    """
    leaving = max(
        collective_bytes(run) / links.device_bytes_per_s, host_bytes(run) / links.host_bytes_per_s
    )
    talking = collective_messages(run) * links.message_s
    waiting = 2 * links.delay_s if run.hosts > 1 else 0.0
    copied = run.k * run.small_bytes if run.devices > 1 else 0.0
    adding = (copied + shared_read_bytes(run)) / links.memory_bytes_per_s
    return leaving + talking + waiting + adding


def collective_memory_bytes(run: Run) -> float:
    """Return the additional bytes of training in all devices together, without the model.

    Each device has the parameters, space for the other devices' partial sums of its partition, the
    gradients (including its own partial sums), and its part of the optimizer state.
    """
    if run.devices == 1:
        return _solo_memory_bytes(run)
    received = run.away * sum(run.blocks) * run.parameter_bytes
    return run.devices * run.held_bytes + received + _kept_bytes(run)


# Through shared memory


def shared_written_bytes(run: Run) -> float:
    """Return the bytes copied for others: k times their parts of large tensors, and all small
    ones."""
    if run.devices == 1:
        return 0.0
    return run.k * ((run.parameter_bytes - run.small_bytes) * run.away + run.small_bytes)


def shared_read_bytes(run: Run) -> float:
    """Return the bytes of partial sums that the owner of a partition adds: D k P / D."""
    return run.devices * run.k * run.parameter_bytes / run.devices if run.devices > 1 else 0.0


def shared_messages(run: Run) -> float:
    """Return the messages of a step: four barriers, in which every process signals every other."""
    return 4 * (run.devices - 1)


def shared_s(run: Run, *, memory_bytes_per_s: float, meeting_s: float) -> float:
    """Return the seconds of a whole exchange if the processes have a core each.

    Args:
        run: a run on one host.
        memory_bytes_per_s: memory speed of one process.
        meeting_s: fixed cost of each barrier.
    """
    meetings = 2 * meeting_s if run.devices > 1 else 0.0
    moved = shared_written_bytes(run) + shared_read_bytes(run)
    return moved / memory_bytes_per_s + meetings


def shared_memory_bytes(run: Run) -> float:
    """Like `collective_memory_bytes`, with the parameters once per host.

    Partial sums for others are in shared memory, in addition to the gradients.
    """
    if run.devices == 1:
        return _solo_memory_bytes(run)
    return run.held_bytes + _kept_bytes(run) + run.devices * shared_written_bytes(run)


# For comparison


def ring_bytes(run: Run) -> float:
    """Return the bytes that a device sends in a ring all-reduce: 2 P (D - 1) / D."""
    return 2 * run.parameter_bytes * run.away


def ring_s(run: Run, links: Links) -> float:
    """Return the seconds of a ring all-reduce whose ring enters and leaves every host once."""
    if run.devices == 1:
        return 0.0
    slowest = links.device_bytes_per_s
    if run.hosts > 1:
        slowest = min(slowest, links.host_bytes_per_s)
    delays = 2 * run.hosts * links.delay_s if run.hosts > 1 else 0.0
    return ring_bytes(run) / slowest + 2 * (run.devices - 1) * links.message_s + delays


def folded_host_bytes(run: Run) -> float:
    """Return a host's bytes if its devices added among themselves first: 2 P (H - 1) / H.

    Not built. To keep the order of addition, every host's shards must be one block of the fold.
    """
    return 2 * run.parameter_bytes * (run.hosts - 1) / run.hosts


def folded_s(run: Run, links: Links) -> float:
    """Return the seconds of such an exchange: inside hosts, between them, and back. Not built."""
    inside = 2 * run.parameter_bytes * (run.on_host - 1) / run.on_host / links.device_bytes_per_s
    between = folded_host_bytes(run) / links.host_bytes_per_s
    talking = 2 * (run.on_host + run.hosts - 2) * links.message_s
    waiting = 2 * links.delay_s if run.hosts > 1 else 0.0
    adding = shared_read_bytes(run) / links.memory_bytes_per_s
    return inside + between + talking + waiting + adding


def _solo_memory_bytes(run: Run) -> float:
    return run.held_bytes + _kept_bytes(run)


def _kept_bytes(run: Run) -> float:
    """Return all devices' bytes of gradients, low-precision copies, and owned partition state."""
    copies = _gradients(run) + run.state_copies + run.low_parameters
    low = run.devices * run.parameter_bytes / 2 if run.low else 0.0
    return run.parameter_bytes * copies + low


def _gradients(run: Run) -> float:
    """Return the number of gradients, over all devices, that exist toward the end of backward.

    A device keeps the sums of its earlier blocks while it runs the last one. Within a block, the
    gradient of a shard coexists with the left half of each node that has the shard in its right
    half: one for every 1 in the binary number of the shard within its block.
    """
    return sum(
        len(blocks) - 1 + max(_waiting(block.stop - block.start) for block in blocks) + 1
        for blocks in _blocks(run)
    )


def _waiting(shards: int) -> int:
    """Return the maximum number of waiting sums while a block of this many shards runs."""
    return max(number.bit_count() for number in range(shards))


def _blocks(run: Run) -> list[tuple[Block, ...]]:
    shares = Shares.even(shards=run.shards, devices=run.devices)
    return [blocks_of(shares.shards_of(device), run.shards) for device in range(run.devices)]

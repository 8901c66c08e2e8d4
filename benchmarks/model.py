"""What an exchange costs, by arithmetic: bytes, messages, memory and time against devices.

Nothing here measures anything; `scaling.py` holds these numbers against measurements, and
docs/studies/scaling.md says where the formulas come from. Amounts are for one step and one device,
on the average over the devices, unless a name says otherwise.
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
"""Longest message of partial sums or parameters, as `onefold.core.flat.cut_chunks` cuts them."""
LARGE_BYTES = 256 << 10
"""From here on a tensor is moved by itself, and copied only where others must see it."""
HEAD_BYTES = 144
"""What a device states first in every step: step, samples, shares, checksums, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is trained, and on how much."""

    parameter_bytes: int
    """P: of the trained parameters in float32, and so of a gradient."""
    devices: int
    """D."""
    shards: int
    """V."""
    devices_per_host: int
    """g; all devices are on one host where there are no more than this."""
    parameters: int = 1
    """How many tensors the parameters are."""
    small_bytes: int = 0
    """Of those tensors that are less than `LARGE_BYTES`."""
    chunks_each: float | None = None
    """Messages of a partition, on average; reckoned for tensors of equal size if None."""
    buffers: int = 0
    """How many buffers the model has."""
    buffer_row_bytes: int = 0
    """Of all buffers, as one shard leaves them."""
    state_copies: int = 1
    """Tensors that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam."""
    low: bool = False
    """Whether a shard computes in 16 bits: its low parameters or gradients are there as well."""
    low_parameters: bool = False
    """Whether models hold parameters of 16 bits, beside float32 masters of each partition."""

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= self.shards:
            raise ValueError(
                f"expected 1 to {self.shards} devices for {self.shards} shards, got {self.devices}"
            )
        if self.devices_per_host < 1 or self.parameter_bytes < 1:
            raise ValueError(
                f"expected at least one device a host and one byte of parameters, got "
                f"{self.devices_per_host} and {self.parameter_bytes}"
            )
        if self.devices > self.devices_per_host and self.devices % self.devices_per_host:
            raise ValueError(
                f"expected full hosts of {self.devices_per_host} devices, got {self.devices} in all"
            )

    @property
    def hosts(self) -> int:
        """H."""
        return -(-self.devices // self.devices_per_host)

    @property
    def on_host(self) -> int:
        """Devices that share a host: g, or all of them on a single host."""
        return min(self.devices, self.devices_per_host)

    @property
    def counts(self) -> tuple[int, ...]:
        """Shards of each device."""
        return Shares.even(shards=self.shards, devices=self.devices).counts

    @property
    def blocks(self) -> tuple[int, ...]:
        """Partial sums that each device publishes."""
        return tuple(len(blocks) for blocks in _blocks(self))

    @property
    def k(self) -> float:
        """Partial sums that a device publishes on the average: 1 where D divides V evenly enough
        for every device's shards to be one block."""
        return sum(self.blocks) / self.devices

    @property
    def held_bytes(self) -> float:
        """Of the parameters, as models hold them and as they are handed on."""
        return self.parameter_bytes / 2 if self.low_parameters else self.parameter_bytes

    @property
    def away(self) -> float:
        """The part of the parameters that others own."""
        return (self.devices - 1) / self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How fast things go. All speeds are one way; the other way goes on at the same time."""

    host_bytes_per_s: float
    """What leaves a host for others, over all its network cards."""
    device_bytes_per_s: float
    """What leaves a device, wherever it goes."""
    memory_bytes_per_s: float
    """Partial sums added up, or copied, in a device's own memory."""
    message_s: float
    """What a device spends on sending one message and receiving one."""
    delay_s: float
    """From one host to another, one way."""


# Through messages


def collect_bytes(run: Run) -> float:
    """Partial sums sent to the owners of their partitions: k P (D - 1) / D."""
    return run.k * run.parameter_bytes * run.away


def publish_bytes(run: Run) -> float:
    """Updated partitions sent to everybody: P (D - 1) / D, or half of it if they are low."""
    return run.held_bytes * run.away


def table_bytes(run: Run) -> float:
    """A device's head, its row and its shards' totals, sent to each of the others.

    The row is four bytes a parameter, and for each shard a weight, a checksum of the values beside
    its loss, how many samples were left out, and one byte a buffer; total and digest have sixteen.
    """
    of_shards = (8 + 8 + 8 + run.buffers + 16) * run.shards / run.devices
    return (run.devices - 1) * (HEAD_BYTES + 4 * run.parameters + of_shards)


def buffer_bytes(run: Run) -> float:
    """Buffers as each shard left them, on the average of the devices."""
    return (run.devices - 1) * sum(run.counts) / run.devices * run.buffer_row_bytes


def collective_bytes(run: Run) -> float:
    """All that a device sends in a step."""
    return collect_bytes(run) + publish_bytes(run) + table_bytes(run) + buffer_bytes(run)


def chunks(run: Run) -> float:
    """Messages of a partition: tensors by themselves, in parts, or small ones side by side."""
    if run.chunks_each is not None:
        return run.chunks_each
    partition_bytes = run.parameter_bytes / run.devices
    tensor_bytes = run.parameter_bytes / run.parameters
    if tensor_bytes < LARGE_BYTES:
        return math.ceil(partition_bytes / CHUNK_BYTES)
    tensors = math.ceil(partition_bytes / tensor_bytes)
    return tensors * math.ceil(min(partition_bytes, tensor_bytes) / CHUNK_BYTES)


def collective_messages(run: Run) -> float:
    """Messages sent: to each other device a head, a row, norms, k partitions there and one back."""
    buffers = 1 if run.buffer_row_bytes else 0
    return (run.devices - 1) * (3 + (run.k + 1) * chunks(run) + buffers)


def host_bytes(run: Run) -> float:
    """Partial sums and parameters that all devices of one host send to other hosts."""
    elsewhere = (run.devices - run.on_host) / run.devices
    return run.on_host * (run.k + 1) * run.parameter_bytes * elsewhere


def collective_s(run: Run, links: Links) -> float:
    """Seconds of `publish`, `collect` and `publish_parameters`.

    The slower of what leaves a device and what leaves its host, messages one after the other, two
    delays (there and back), and copying and adding up at the speed of memory.
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
    """Of all devices together: what training adds to processes that hold no model.

    Each has the parameters, room for its partition of everybody else's partial sums, the
    gradients (its own partial sums among them), and its part of the optimizer's state.
    """
    if run.devices == 1:
        return _solo_memory_bytes(run)
    received = run.away * sum(run.blocks) * run.parameter_bytes
    return run.devices * run.held_bytes + received + _kept_bytes(run)


# Through shared memory


def shared_written_bytes(run: Run) -> float:
    """Partial sums copied for others: k times their parts of large tensors, and all small ones."""
    if run.devices == 1:
        return 0.0
    return run.k * ((run.parameter_bytes - run.small_bytes) * run.away + run.small_bytes)


def shared_read_bytes(run: Run) -> float:
    """Partial sums that the owner of a partition adds up: D k P / D."""
    return run.devices * run.k * run.parameter_bytes / run.devices if run.devices > 1 else 0.0


def shared_messages(run: Run) -> float:
    """Four meetings a step, at each of which every process tells every other one."""
    return 4 * (run.devices - 1)


def shared_s(run: Run, *, memory_bytes_per_s: float, meeting_s: float) -> float:
    """Seconds of a whole exchange where the processes have a core each.

    Args:
        run: on one host.
        memory_bytes_per_s: of one process.
        meeting_s: a fixed cost of each meeting.
    """
    meetings = 2 * meeting_s if run.devices > 1 else 0.0
    moved = shared_written_bytes(run) + shared_read_bytes(run)
    return moved / memory_bytes_per_s + meetings


def shared_memory_bytes(run: Run) -> float:
    """Like `collective_memory_bytes`, where the parameters exist once a host.

    What others see of partial sums lies in shared memory beside the gradients.
    """
    if run.devices == 1:
        return _solo_memory_bytes(run)
    return run.held_bytes + _kept_bytes(run) + run.devices * shared_written_bytes(run)


# For comparison


def ring_bytes(run: Run) -> float:
    """What a device sends in a ring all-reduce: 2 P (D - 1) / D."""
    return 2 * run.parameter_bytes * run.away


def ring_s(run: Run, links: Links) -> float:
    """Seconds of a ring all-reduce whose ring enters and leaves every host once."""
    if run.devices == 1:
        return 0.0
    slowest = links.device_bytes_per_s
    if run.hosts > 1:
        slowest = min(slowest, links.host_bytes_per_s)
    delays = 2 * run.hosts * links.delay_s if run.hosts > 1 else 0.0
    return ring_bytes(run) / slowest + 2 * (run.devices - 1) * links.message_s + delays


def folded_host_bytes(run: Run) -> float:
    """What one host would send if its devices added up among themselves first: 2 P (H - 1) / H.

    Not built. It needs every host's shards to be one block of the fold, for its order to stay.
    """
    return 2 * run.parameter_bytes * (run.hosts - 1) / run.hosts


def folded_s(run: Run, links: Links) -> float:
    """Seconds of such an exchange: inside the hosts, between them, and back. Not built."""
    inside = 2 * run.parameter_bytes * (run.on_host - 1) / run.on_host / links.device_bytes_per_s
    between = folded_host_bytes(run) / links.host_bytes_per_s
    talking = 2 * (run.on_host + run.hosts - 2) * links.message_s
    waiting = 2 * links.delay_s if run.hosts > 1 else 0.0
    adding = shared_read_bytes(run) / links.memory_bytes_per_s
    return inside + between + talking + waiting + adding


def _solo_memory_bytes(run: Run) -> float:
    return run.held_bytes + _kept_bytes(run)


def _kept_bytes(run: Run) -> float:
    """Of all devices: gradients, low-precision copies, and what owners keep of partitions."""
    copies = _gradients(run) + run.state_copies + run.low_parameters
    low = run.devices * run.parameter_bytes / 2 if run.low else 0.0
    return run.parameter_bytes * copies + low


def _gradients(run: Run) -> float:
    """Gradients, all devices together, that are there at once toward the end of backward.

    A device keeps the sums of its earlier blocks while it runs the last one. In a block a shard's
    gradient is made while the left halves of all nodes that it lies in the right half of wait: one
    for every 1 in the binary number of the shard within its block.
    """
    return sum(
        len(blocks) - 1 + max(_waiting(block.stop - block.start) for block in blocks) + 1
        for blocks in _blocks(run)
    )


def _waiting(shards: int) -> int:
    """The most sums that wait while a shard of a block of so many is run."""
    return max(number.bit_count() for number in range(shards))


def _blocks(run: Run) -> list[tuple[Block, ...]]:
    shares = Shares.even(shards=run.shards, devices=run.devices)
    return [blocks_of(shares.shards_of(device), run.shards) for device in range(run.devices)]

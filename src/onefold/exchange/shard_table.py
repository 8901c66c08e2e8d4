"""Stores what devices report to each other in a step, in addition to their partial sums.

Note: who may write what, and when
----------------------------------
A device writes its own row of ``gave``, and its own shards' rows of everything else, before it
calls ``collect``. All rows may be read between ``collect`` and ``publish_parameters``, when no
device writes. If processes share the table's memory, only this order separates them: there is no
lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from onefold.core.flat import FlatTensors
from onefold.core.mean import LateWeight
from onefold.core.results import ChangedBuffers, ShardResult
from onefold.core.shard import runs_of
from onefold.core.storage import Storage

if TYPE_CHECKING:
    from onefold.core.values import ShardValues

__all__ = ["ShardTable"]

_ONE = np.ones((), dtype=np.int32)
"""NumPy takes twice as long for a Python number."""


class ShardTable:
    """Table of the results that every device reports of its shards.

    Args:
        storage: the sizes of its parts.
        known: (sum(storage.table_host_bytes),) uint8 on the host, zeros.
        computed: (storage.table_device_bytes,) uint8 on a device, zeros.
    """

    def __init__(self, storage: Storage, known: torch.Tensor, computed: torch.Tensor) -> None:
        self.storage = storage
        self.known = known
        # Numbers that the host knows are NumPy arrays: writing single numbers to a tensor costs far
        # more. Numbers that a device computes stay on it, in ``computed``, so that no host waits
        # for a device.
        parts = torch.split(known, list(storage.table_host_bytes))
        devices, shards = storage.devices, storage.shards
        parameters, buffers = len(storage.parameters.entries), storage.buffers
        self.weights = _typed(parts[0], torch.float64, (shards,)).numpy()
        """(V,) float64: each shard's part of the denominator, or a negative code if there is none;
        see `onefold.core.values`."""
        self.gave = _typed(parts[1], torch.int32, (devices, parameters)).numpy()
        """(D, P) int32: how many of a device's shards gave a gradient to each parameter."""
        self.changed = _typed(parts[2], torch.uint8, (shards, len(buffers.entries))).numpy()
        """(V, B) uint8: whether a shard changed a buffer."""
        self.kinds = _typed(parts[3], torch.int64, (shards,)).numpy()
        """(V,) int64: which metrics each loss returned, see `ShardValues.kind`; 0 for none."""
        self.left_out = _typed(parts[4], torch.int64, (shards,)).numpy()
        """(V,) int64: how many of a shard's samples ``collate`` dropped."""
        self._by_shard = self.weights, self.changed, self.kinds, self.left_out
        self.given: dict[int, ShardValues] = {}
        """The metrics of this process's shards."""
        # Totals start at offset 0, because float64 must be aligned; buffers fill the end.
        rows = buffers.nbytes
        first = storage.table_device_bytes - shards * rows
        middle = first - storage.table_values_bytes
        self.numbers = _typed(computed[:middle], torch.float64, (shards, 2))
        """(V, 2) float64: ``totals``, and ``digests`` as the bits of float64."""
        self.totals = self.numbers[:, 0]
        """(V,) float64: each shard's part of the loss."""
        self.digests = self.numbers.view(torch.int64)[:, 1]
        """(V,) int64: digest of a sample of each shard's gradient, if recorded; else 0."""
        self._late: dict[int, LateWeight] = {}
        self.on_host = computed.device.type == "cpu"
        """Whether the numbers that devices compute are on the host, too."""
        self._host_numbers = self.numbers.numpy() if self.on_host else None
        if self.on_host:
            self._host_digests = self.digests.numpy()
        self._values_memory = computed[middle:first]
        self.widen(0)
        self.rows_memory = computed[first:].view(shards, rows)
        """(V, bytes of the buffers) uint8: the memory of ``buffer_rows``."""
        self.buffer_rows = [
            FlatTensors(buffers, memory=self.rows_memory[shard]) for shard in range(shards)
        ]
        """V sets of the module's buffers, with the values that each shard left in them."""

    @classmethod
    def private(cls, storage: Storage, device: torch.device) -> ShardTable:
        """Make a table in memory of this process."""
        known = torch.zeros(sum(storage.table_host_bytes), dtype=torch.uint8)
        computed = torch.zeros(storage.table_device_bytes, dtype=torch.uint8, device=device)
        return cls(storage, known, computed)

    def times_given(self) -> list[int]:
        """Return the number of shards that gave a gradient to each trained parameter."""
        times = self.gave[0] if len(self.gave) == 1 else np.add.reduce(self.gave)
        found: list[int] = times.tolist()
        return found

    def widen(self, width: int) -> None:
        """Set the number of metrics that each shard reports; the same on all devices.

        Called between `collect` and `publish_parameters`. Afterwards the values are undefined until
        every device has cleared its rows.
        """
        self.width = width
        self.values = _typed(self._values_memory, torch.float64, (self.storage.shards, width, 2))
        """(V, width, 2) float64: totals and weights of each shard's metrics."""

    def clear_rows(self, device: int, shards: Sequence[int]) -> None:
        """Clear one device's rows before a step, because they still hold the last step's values."""
        self.gave[device] = 0
        for rows in runs_of(shards):
            for array in self._by_shard:
                array[rows] = 0
            if self.width:
                self.values[rows].zero_()
            if self._host_numbers is not None:
                self._host_numbers[rows] = 0.0
            else:
                self.numbers[rows].zero_()
        for kept in (self.given, self._late):
            for shard in shards if kept else ():
                kept.pop(shard, None)

    def record(self, device: int, shard: int, result: ShardResult) -> None:
        """Record the results of a shard, except its gradients."""
        # A GPU may still be computing this weight; `await_weights` reads it later.
        if isinstance(result.weight, LateWeight):
            self._late[shard] = result.weight
        else:
            self.weights[shard] = result.weight
        self.left_out[shard] = result.left_out
        if result.total is not None:
            self.set_total(shard, result.total)
        if result.digest is not None:
            if isinstance(result.digest, int):
                self._host_digests[shard] = result.digest
            else:
                self.digests[shard : shard + 1].copy_(result.digest, non_blocking=True)
        # Nearly every shard gives a gradient to every parameter. In that case, add a single number.
        gave = result.gave
        row = self.gave[device]
        np.add(row, _ONE if all(gave) else gave, out=row)
        if result.buffers is not None:
            self._record_buffers(shard, result.buffers)
        if result.values is not None:
            self._record_values(shard, result.values)

    def await_weights(self) -> None:
        """Read the weights that accelerators compute, after all passes are queued.

        Raises:
            LossError: a weight is negative or not finite.
        """
        for shard, weight in self._late.items():
            self.weights[shard] = weight.read()
        self._late.clear()

    def _record_values(self, shard: int, values: ShardValues) -> None:
        self.kinds[shard], self.given[shard] = values.kind, values
        # There may be no room for new names yet. Their values are then gathered from `given`.
        if len(values.lines) <= self.width:
            room = self.values[shard, : len(values.lines)]
            room.copy_(values.numbers, non_blocking=True)

    def _record_buffers(self, shard: int, buffers: ChangedBuffers) -> None:
        # The copy does not block: on a GPU it is queued behind the shard's own kernels in their
        # stream.
        row = self.buffer_rows[shard]
        self.changed[shard, buffers.indices] = 1
        if len(buffers.indices) == len(row.views):
            row.copy_(buffers.flat, non_blocking=True)
            return
        for index in buffers.indices:
            row.views[index].copy_(buffers.flat.views[index], non_blocking=True)

    def set_total(self, shard: int, total: torch.Tensor) -> None:
        """Record a shard's part of the loss, () float64; on a GPU, without blocking on it."""
        if self._host_numbers is not None:
            self._host_numbers[shard, 0] = total.item()
        else:
            self.totals[shard : shard + 1].copy_(total, non_blocking=True)

    def row(self, device: int, shards: Sequence[int]) -> torch.Tensor:
        """Pack what ``device`` wrote to this table: (row_bytes,) uint8 on the host.

        Totals and metrics are included only if they are on the host. Otherwise they are sent
        separately, as buffers always are.
        """
        parts = self._row_parts(device, shards)
        return torch.from_numpy(np.concatenate([part.view(np.uint8).ravel() for part in parts]))

    def empty_row(self, device: int, shards: Sequence[int]) -> torch.Tensor:
        """Allocate memory for the `row` of another process's table."""
        # Both ends compute its length from the shares, so no message contains a size.
        parts = self._row_parts(device, shards)
        return torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)

    def take_row(self, device: int, shards: Sequence[int], message: torch.Tensor) -> None:
        """Copy the `row` of another process's table to this one."""
        start = 0
        for part in self._row_parts(device, shards):
            stop = start + part.nbytes
            # Assign in place, because other objects keep views of these arrays for the whole run.
            part[...] = message[start:stop].numpy().view(part.dtype).reshape(part.shape)
            start = stop

    def _row_parts(self, device: int, shards: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        # This list serves packing, allocating and unpacking, so that the three cannot differ.
        parts = [self.gave[device]]
        for rows in runs_of(shards):
            parts += [array[rows] for array in self._by_shard]
            if self.on_host:
                parts.append(self.numbers[rows].numpy())
            if self.on_host and self.width:
                parts.append(self.values[rows].numpy())
        return parts


def _typed(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return memory[: numel * dtype.itemsize].view(dtype).view(shape)

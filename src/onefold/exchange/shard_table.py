"""What devices report to each other in a step, besides their partial sums.

Note: who may write what, and when
----------------------------------
A device writes its own row of ``gave``, and its own shards' rows of everything else, before it
calls ``collect``. All rows may be read between ``collect`` and ``publish_parameters``, and nobody
writes then. Where processes share the table's memory, nothing but this order keeps them apart:
there is no lock.
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


class ShardTable:
    """The table in which every device reports to the others what its shards gave.

    What the host knows lies on the host, as NumPy arrays, because writing single numbers into a
    tensor costs far more. What a device computes lies where ``computed`` lies, so that no host has
    to wait for a device.

    Args:
        storage: the sizes of its parts.
        known: (sum(storage.table_host_bytes),) uint8 on the host, zeros.
        computed: (storage.table_device_bytes,) uint8 on a device, zeros.
    """

    def __init__(self, storage: Storage, known: torch.Tensor, computed: torch.Tensor) -> None:
        self.storage = storage
        self.known = known
        parts = torch.split(known, list(storage.table_host_bytes))
        devices, shards = storage.devices, storage.shards
        parameters, buffers = len(storage.parameters.entries), storage.buffers
        self.weights = _typed(parts[0], torch.float64, (shards,)).numpy()
        """(V,) float64: each shard's part of the divisor, or a negative code for why there is none;
        see `onefold.core.values`."""
        self.gave = _typed(parts[1], torch.int32, (devices, parameters)).numpy()
        """(D, P) int32: how many of a device's shards gave a gradient to each parameter."""
        self.changed = _typed(parts[2], torch.uint8, (shards, len(buffers.entries))).numpy()
        """(V, B) uint8: whether a shard changed a buffer."""
        self.kinds = _typed(parts[3], torch.int64, (shards,)).numpy()
        """(V,) int64: which values are beside each loss, see `ShardValues.kind`; 0 for none."""
        self.left_out = _typed(parts[4], torch.int64, (shards,)).numpy()
        """(V,) int64: how many of a shard's samples ``collate`` has left out."""
        self._by_shard = self.weights, self.changed, self.kinds, self.left_out
        self.given: dict[int, ShardValues] = {}
        """These values, for the shards of this process."""
        # The totals lie first, at offset 0, as float64 must be aligned; the buffers fill the end.
        rows = buffers.nbytes
        first = storage.table_device_bytes - shards * rows
        middle = first - storage.table_values_bytes
        self.numbers = _typed(computed[:middle], torch.float64, (shards, 2))
        """(V, 2) float64: ``totals``, and ``digests`` as the bits of float64."""
        self.totals = self.numbers[:, 0]
        """(V,) float64: each shard's part of the loss."""
        self.digests = self.numbers.view(torch.int64)[:, 1]
        """(V,) int64: of a sample of each shard's gradient, where the run is recorded; else 0."""
        self._late: dict[int, LateWeight] = {}
        self.on_host = computed.device.type == "cpu"
        """Whether what the devices compute lies on the host, too."""
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
        """V sets of the module's buffers: the values that each shard left in them."""

    @classmethod
    def private(cls, storage: Storage, device: torch.device) -> ShardTable:
        """Make a table in memory of this process."""
        known = torch.zeros(sum(storage.table_host_bytes), dtype=torch.uint8)
        computed = torch.zeros(storage.table_device_bytes, dtype=torch.uint8, device=device)
        return cls(storage, known, computed)

    def times_given(self) -> list[int]:
        """For each trained parameter, the number of shards that gave it a gradient."""
        times = self.gave[0] if len(self.gave) == 1 else np.add.reduce(self.gave)
        found: list[int] = times.tolist()
        return found

    def widen(self, width: int) -> None:
        """Have each shard report so many numbers beside its loss; alike on all devices.

        Called between `collect` and `publish_parameters`; what lies there means nothing
        afterwards, until every device has cleared its rows.
        """
        self.width = width
        self.values = _typed(self._values_memory, torch.float64, (self.storage.shards, width, 2))
        """(V, width, 2) float64: totals and weights of the numbers beside each shard's loss."""

    def clear_rows(self, device: int, shards: Sequence[int]) -> None:
        """Clear one device's rows before a step: the last step's values are still in them."""
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
        """Record what a shard gave, besides its gradients."""
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
        # A shard that gave all, which is nearly every one, is added as one number.
        gave = result.gave
        row = self.gave[device]
        np.add(row, 1 if all(gave) else gave, out=row)
        if result.buffers is not None:
            self._record_buffers(shard, result.buffers)
        if result.values is not None:
            self._record_values(shard, result.values)

    def await_weights(self) -> None:
        """Read the weights that accelerators have computed, now that all passes are queued.

        Raises:
            LossError: one is negative or not finite.
        """
        for shard, weight in self._late.items():
            self.weights[shard] = weight.read()
        self._late.clear()

    def _record_values(self, shard: int, values: ShardValues) -> None:
        self.kinds[shard], self.given[shard] = values.kind, values
        # Those of names that are new may have no room yet: they are fetched from `given`.
        if len(values.lines) <= self.width:
            room = self.values[shard, : len(values.lines)]
            room.copy_(values.numbers, non_blocking=True)

    def _record_buffers(self, shard: int, buffers: ChangedBuffers) -> None:
        # Non-blocking: on a GPU the copy follows the shard's own kernels in their stream.
        row = self.buffer_rows[shard]
        self.changed[shard, buffers.indices] = 1
        if len(buffers.indices) == len(row.views):
            row.copy_(buffers.flat, non_blocking=True)
            return
        for index in buffers.indices:
            row.views[index].copy_(buffers.flat.views[index], non_blocking=True)

    def set_total(self, shard: int, total: torch.Tensor) -> None:
        """Record a shard's part of the loss, () float64; on a GPU, without waiting for it."""
        if self._host_numbers is not None:
            self._host_numbers[shard, 0] = total.item()
        else:
            self.totals[shard : shard + 1].copy_(total, non_blocking=True)

    def row(self, device: int, shards: Sequence[int]) -> torch.Tensor:
        """Pack what ``device`` wrote on this table into a message: (row_bytes,) uint8 on the host.

        Totals and values are part of it only where they lie on the host. Elsewhere they must
        travel by themselves, and the buffers always must.
        """
        parts = self._row_parts(device, shards)
        return torch.from_numpy(np.concatenate([part.view(np.uint8).ravel() for part in parts]))

    def empty_row(self, device: int, shards: Sequence[int]) -> torch.Tensor:
        """Allocate memory for the `row` of another process's table."""
        # Its length follows from the shares, which both know: no message states a size.
        parts = self._row_parts(device, shards)
        return torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)

    def take_row(self, device: int, shards: Sequence[int], message: torch.Tensor) -> None:
        """Copy the `row` of another process's table onto this one."""
        start = 0
        for part in self._row_parts(device, shards):
            stop = start + part.nbytes
            # Into the table's own arrays: views of it are held for the whole run.
            part[...] = message[start:stop].numpy().view(part.dtype).reshape(part.shape)
            start = stop

    def _row_parts(self, device: int, shards: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        # The one list for packing, allocating and unpacking, so that the three cannot differ.
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

"""Brings together what the shards' losses returned beside themselves, and what shards gather.

`ValueExchange` knows which values a run has seen. `RowExchange` brings what shards gather to all
devices, and the gradients of it back, added up. Its tensors travel as bits in rows of float64, the
only thing that `Transport.all_gather_rows` moves. Rows of one trade have one length, so shorter
ones are filled up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.fold import Block, blocks_of, fold, published_by
from onefold.core.gathering import packed_bytes, unpacked_bytes
from onefold.core.settings import added_up_in
from onefold.core.values import Column, ShardValues, StepValues, names_of, values_by_name
from onefold.errors import DisagreementError, LossError
from onefold.placement.context import StepContext

__all__ = ["Gathered", "RowExchange", "ShardPosition", "ValueExchange"]


_Names = tuple[tuple[str, ...], tuple[Column, ...]]
"""Of a shard's values and of its outputs."""


class ValueExchange:
    """Knows which values a run has seen, and so what is in their room on the table.

    See the note on how they travel in `onefold.core.values`.

    Args:
        context: this process's part of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        # Filled from what all devices see, and so the same on all of them.
        self._known: dict[int, _Names] = {}

    def of_step(self, batch: ShardedBatch, step: int) -> StepValues | None:
        """Return the values of a step, or None; called by all, before ``publish_parameters``.

        Raises:
            DisagreementError: shards have other names than others.
        """
        shards = self._context.table
        # As a list: numpy takes far longer to look at a few numbers.
        if not any(shards.kinds.tolist()):
            return None
        # Empty shards never ran, so they have no names.
        kinds = {kind for kind, n in zip(shards.kinds.tolist(), batch.sizes, strict=True) if n}
        known = self._known.get(kinds.pop()) if len(kinds) == 1 else None
        if known is None:
            (lines, columns), table = self._first_of(batch, step)
        else:
            # A copy, as they may be asked for long after the table is written again.
            (lines, columns), table = known, shards.values[:, : len(known[0])].clone()
        return StepValues(lines, table, self._outputs(batch, columns) if columns else {})

    def _given(self, batch: ShardedBatch) -> dict[int, ShardValues]:
        """The values of this process's shards that have any."""
        given, shares = self._context.table.given, batch.shares
        own = (shard for number in self._context.own for shard in shares.shards_of(number))
        return {shard: given[shard] for shard in own if shard in given}

    def _outputs(self, batch: ShardedBatch, columns: Sequence[Column]) -> dict[str, Any]:
        """Bring the rows of all shards, in their order."""
        own = {shard: values.rows for shard, values in self._given(batch).items()}
        return values_by_name([*self._context.of_all_shards(own).values()], columns)

    def _first_of(self, batch: ShardedBatch, step: int) -> tuple[_Names, torch.Tensor]:
        """Agree on names that are new, and bring their values by a message of their own."""
        shards = self._context.table
        own = {s: ((v.lines, tuple(v.rows)), v.numbers) for s, v in self._given(batch).items()}
        given = self._context.of_all_shards(own)
        known = _agreed({shard: names for shard, (names, _) in given.items()}, batch, step)
        # (V, lines, 2) float64: zeros for empty shards, as in the table.
        table = torch.zeros(batch.shares.shards, len(known[0]), 2, dtype=torch.float64)
        for shard, (_, numbers) in given.items():
            table[shard] = numbers
        shards.widen(max(shards.width, len(known[0])))
        self._known[next(kind for kind in shards.kinds.tolist() if kind)] = known
        return known, table.to(self._context.first.device)


def _agreed(found: Mapping[int, _Names], batch: ShardedBatch, step: int) -> _Names:
    """Return the names that all shards with samples have."""
    first = found[min(found)]
    for shard in range(batch.shares.shards):
        lines, columns = names = found.get(shard, ((), ()))
        if batch.size_of(shard) and names != first:
            these, those = f"the values {names_of(lines)} beside itself", f"{names_of(first[0])}"
            if lines == first[0]:
                these, those = f"the outputs {list(columns)}", f"{list(first[1])}"
            raise DisagreementError(
                f"step {step}, shard {shard}: the loss returned {these}, and {those} for shard "
                f"{min(found)}; expected the same names, and terms of the same kind, for every "
                f"shard, and outputs with the same dtype and shape of rows. Where there is nothing "
                f"to count, return onefold.Mean(total, 0); rows of any sizes are a list of one "
                f"tensor a sample"
            )
    return first


_Sum = tuple[torch.Tensor | None]
"""In a tuple, as in a fold None stands for what is not at hand."""


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where a shard has stopped, as all devices are told."""

    at: str
    terms: int = 0
    """At the end of the loss: how many terms it has."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    differentiable: bool = False

    @property
    def must_agree(self) -> tuple[object, ...]:
        """What must be alike in all shards."""
        return self.at, self.dtype, self.shape[1:], len(self.shape), self.differentiable

    def __str__(self) -> str:
        if self.at != "gather":
            return "has come to its end"
        plain = "" if self.differentiable else ", without a gradient"
        return f"gathers {self.dtype.removeprefix('torch.')} {self.shape}{plain}"


@dataclass(frozen=True, slots=True)
class Gathered:
    """What all shards put into one call of `gather`."""

    number: int
    dtype: torch.dtype
    shapes: Mapping[int, tuple[int, ...]]
    """For each shard with samples."""
    differentiable: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all shards together, (N, ...)."""
        return (sum(shape[0] for shape in self.shapes.values()), *self.shapes[0][1:])

    def own(self, shard: int) -> slice:
        """Return the rows of one shard."""
        start = sum(shape[0] for other, shape in self.shapes.items() if other < shard)
        return slice(start, start + self.shapes[shard][0])


class RowExchange:
    """Trades for one batch; every process makes the same calls in the same order.

    Args:
        context: this process's part of the run.
        batch: the batch of the step.
        step: its number, for errors.
    """

    def __init__(self, context: StepContext, batch: ShardedBatch, step: int) -> None:
        self._context = context
        self._homes = {replica.number: replica.device for replica in context.replicas}
        self._shares, self._step = batch.shares, step
        self._sizes = batch.sizes

    def agree(self, own: Mapping[int, ShardPosition]) -> dict[int, ShardPosition]:
        """Learn where all shards with samples have stopped.

        Args:
            own: for each of this process's shards with samples.

        Raises:
            LossError: they are not at the same call with tensors of the same kind.
        """
        given = self._context.of_all_shards({shard: astuple(each) for shard, each in own.items()})
        found = {shard: ShardPosition(*fields) for shard, fields in given.items()}
        first = found[0]
        for shard, standing in found.items():
            if standing.must_agree != first.must_agree:
                raise LossError(
                    f"the loss of step {self._step} does not gather alike in all shards: shard 0 "
                    f"{first}, and shard {shard} {standing}. Expected the same calls of "
                    f"onefold.gather (and onefold.SyncBatchNorm) in the same order, with tensors "
                    f"alike but for their first dimension; a shard with nothing to give gathers "
                    f"tensor[:0]"
                )
        return found

    def join(self, call: Gathered, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the tensors of all shards in one, (N, ...), on the first own device.

        Args:
            call: which one.
            tensors: for each of this process's shards with samples.
        """
        shapes = {
            number: [call.shapes[shard] for shard in self._filled(number)]
            for number in range(self._shares.devices)
        }
        most = max(sum(torch.Size(s).numel() for s in each) for each in shapes.values())
        own = {n: [tensors[shard] for shard in self._filled(n)] for n in self._homes}
        table = self._share(own, most * call.dtype.itemsize)
        parts = {
            shard: part
            for n, each in shapes.items()
            if each
            for shard, part in zip(
                self._filled(n), unpacked_bytes(table[n], call.dtype, each), strict=True
            )
        }
        return torch.cat([parts[shard] for shard in sorted(parts)])

    def add_up(self, call: Gathered, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the sum of all shards' gradients of a call, (N, ...), on the first own device.

        They are added in the order of the fold, in float32 or better.

        Args:
            call: which one.
            gradients: for each of this process's shards with samples, (N, ...).
        """
        dtype = added_up_in(call.dtype)

        def leaf(node: Block) -> _Sum | None:
            if node.stop - node.start > 1:
                return None
            given = gradients.get(node.start)
            return (None if given is None else given.to(dtype),)

        own = {}
        for number in self._homes:
            blocks = blocks_of(self._shares.shards_of(number), self._shares.shards)
            sums = [fold(leaf, block, _add)[0] for block in blocks]
            own[number] = [each for each in sums if each is not None]
        slots = 1 + max(slot for _, slot in published_by(self._shares).values())
        size = torch.Size(call.shape).numel() * dtype.itemsize
        table = self._share(own, slots * size)
        placed = published_by(self._shares)

        def part(node: Block) -> _Sum | None:
            if node not in placed:
                return None
            # Empty shards come last, so that a block that begins with one has no other.
            if not self._sizes[node.start]:
                return (None,)
            device, slot = placed[node]
            shapes = [call.shape] * (slot + 1)
            return (unpacked_bytes(table[device], dtype, shapes)[slot],)

        total = fold(part, Block(0, self._shares.shards), _add)[0]
        assert total is not None  # a batch has samples
        return total.to(call.dtype)

    def _filled(self, number: int) -> list[int]:
        """List a device's shards with samples."""
        return [shard for shard in self._shares.shards_of(number) if self._sizes[shard]]

    def _share(self, own: Mapping[int, Sequence[torch.Tensor]], nbytes: int) -> torch.Tensor:
        """Share tensors of each device of this process: (D, k) float64 on the first of them."""
        rows = {}
        for number, home in self._homes.items():
            tensors = [tensor.to(home) for tensor in own[number]]
            empty = torch.empty(0, dtype=torch.uint8, device=home)
            rows[number] = packed_bytes(tensors or [empty], max(nbytes, 1))
        return self._context.exchange.transport.all_gather_rows(rows)


def _add(left: _Sum, right: _Sum) -> _Sum:
    one, other = left[0], right[0]
    return (other if one is None else one if other is None else one + other,)

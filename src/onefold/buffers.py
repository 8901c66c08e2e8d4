"""The module's buffers (batch-norm statistics and the like) across the shards of a step.

Every shard starts from the step's buffers. Afterwards a floating-point buffer becomes the mean over
the shards, weighted by their samples and added in the fold's order in float64; any other buffer
becomes the largest. A shard that left a buffer alone counts with the value it started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from onefold.batch import ShardedBatch
from onefold.exchange.base import Board
from onefold.flat import FlatTensors, Layout, lay_out, same_bits
from onefold.fold import fold_shards

__all__ = ["BufferSet"]


_HAVE_MAXIMUM = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class BufferSet:
    """One replica's buffers, laid out flat.

    Args:
        module: its buffers keep their identity and become views of one flat tensor.
        device: where they live.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._places = _places(module)
        self._tensors = [place.tensor for place in self._places]
        self.layout: Layout = lay_out({place.name: place.tensor for place in self._places})
        self.flat = FlatTensors(self.layout, device=device)
        """The values that the module has now."""
        self.flat.write(self._tensors)
        for tensor, view in zip(self._tensors, self.flat.views, strict=True):
            tensor.data = view
        self._start = FlatTensors(self.layout, device=device)

    def begin_step(self) -> None:
        """Remember what every shard of this step starts from."""
        self.absorb()
        _copy(self._start, self.flat)

    def follow(self, first: BufferSet) -> None:
        """Take over the values of the first device of this process."""
        first.absorb()
        self.absorb()
        _copy(self.flat, first.flat)

    def begin_shard(self) -> None:
        """Put the step's start back into the module."""
        self.restore()

    def end_shard(self, shard: int, board: Board) -> None:
        """Note in the shard's rows which buffers it changed, and into what."""
        if not self._tensors:
            return
        self.absorb()
        row = board.buffer_rows[shard]
        for index in self._changed():
            board.changed[shard, index] = 1
            row.views[index].copy_(self._tensors[index], non_blocking=True)

    def end_step(self, board: Board, batch: ShardedBatch) -> None:
        """Give every changed buffer its value after the step; the others have been restored.

        Args:
            board: with the rows of all shards.
            batch: tells the samples of each shard.
        """
        if self._tensors:
            sizes = batch.sizes
            for run in _runs(self.layout, board.changed.astype(bool).T.tolist()):
                values = [
                    _run_of(board.buffer_rows[shard] if by_shard else self._start, run)
                    for shard, by_shard in enumerate(run.changed_by)
                ]
                target = _run_of(self.flat, run)
                values = [value.to(target.device) for value in values]
                target.copy_(_combine(values, _run_of(self._start, run), sizes))

    def restore(self) -> None:
        """Put back what `begin_step` remembered."""
        self.absorb()
        _copy(self.flat, self._start)

    def _changed(self) -> list[int]:
        """Which buffers do not have the bits they started with; on a GPU, which may not have.

        Version counters will not do: batch-norm kernels change their statistics behind them. To
        look at a GPU's values the host would have to wait for it, so there all of them travel.
        """
        if self.flat.device.type != "cpu":
            return list(range(len(self._tensors)))
        sections = zip(self.flat.sections, self._start.sections, strict=True)
        same = [same_bits(now, start) for now, start in sections]
        pairs = zip(self.layout.entries, self.flat.views, self._start.views, strict=True)
        return [
            index
            for index, (entry, now, start) in enumerate(pairs)
            if not same[entry.section] and not same_bits(now, start)
        ]

    def absorb(self) -> None:
        """Take in buffers that the module has replaced by other tensors rather than changed."""
        for place in self._places:
            for owner, name in place.homes:
                value = owner._buffers[name]
                if value is not place.tensor:
                    place.tensor.copy_(_checked(place, value))
                    owner._buffers[name] = place.tensor


class _Place(NamedTuple):
    name: str
    tensor: torch.Tensor
    homes: list[tuple[torch.nn.Module, str]]
    """Every module that holds it, with the name it has there."""


class _Run(NamedTuple):
    """Neighbouring buffers that the same shards changed."""

    section: int
    start: int
    stop: int
    changed_by: tuple[bool, ...]


def _places(module: torch.nn.Module) -> list[_Place]:
    found: dict[int, _Place] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                place = found.setdefault(id(buffer), _Place(full_name, buffer, []))
                place.homes.append((owner, name))
    return list(found.values())


def _checked(place: _Place, value: torch.Tensor | None) -> torch.Tensor:
    expected = place.tensor
    if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
        came = "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(
            f"buffer {place.name}: expected {expected.dtype} {tuple(expected.shape)} as when "
            f"Trainer was made, got {came}. A buffer keeps its shape and type through a run"
        )
    return value


def _runs(layout: Layout, changed_by: Sequence[Sequence[bool]]) -> list[_Run]:
    """Join the changed buffers into as few stretches as possible, so that few kernels do it all."""
    runs: list[_Run] = []
    ordered = sorted(range(len(layout.entries)), key=lambda i: layout.entries[i].section)
    touching = False
    for index in ordered:
        entry, shards = layout.entries[index], tuple(changed_by[index])
        stop = entry.offset + entry.numel
        if not any(shards):
            touching = False
        elif touching and (runs[-1].section, runs[-1].changed_by) == (entry.section, shards):
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(_Run(entry.section, entry.offset, stop, shards))
            touching = True
    return runs


def _run_of(flat: FlatTensors, run: _Run) -> torch.Tensor:
    return flat.sections[run.section][run.start : run.stop]


def _combine(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    if not (values[0].is_floating_point() or values[0].is_complex()):
        filled = [value for value, size in zip(values, sizes, strict=True) if size]
        # PyTorch has no maximum of unsigned numbers of more than eight bits.
        known = [value if value.dtype in _HAVE_MAXIMUM else value.long() for value in filled]
        return fold_shards(known, torch.maximum).to(start.dtype)
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    weighted = [
        value.to(wide) * size if size else torch.zeros_like(value, dtype=wide)
        for value, size in zip(values, sizes, strict=True)
    ]
    mean = (fold_shards(weighted, torch.add) / sum(sizes)).to(start.dtype)
    left_alone = [value == start for value, size in zip(values, sizes, strict=True) if size]
    return torch.where(torch.stack(left_alone).all(dim=0), start, mean)


def _copy(target: FlatTensors, source: FlatTensors) -> None:
    for to, values in zip(target.sections, source.sections, strict=True):
        to.copy_(values)

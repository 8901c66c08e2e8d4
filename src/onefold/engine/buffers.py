"""The module's buffers (batch-norm statistics and the like) across the shards of a step.

Every shard starts from the step's buffers. What they become is decided by a rule:

- ``mean``, for floating point: the mean over the shards, weighted by their samples and added in the
  fold's order in float64. A shard that left a buffer alone counts with the value it started from.
- ``max``, for all others: the largest.
- ``sum``: what each shard added to the value at the start, added up.
- ``first``: the value of the first shard that changed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, get_args

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import FlatTensors, Layout, lay_out, same_bits
from onefold.core.fold import fold_shards
from onefold.core.result import ChangedBuffers
from onefold.errors import StateError
from onefold.exchange.board import Board
from onefold.system.compat import buffers_of

__all__ = ["BufferPlaces", "BufferRule", "BufferSet"]

BufferRule = Literal["mean", "max", "sum", "first"]

_HAVE_MAXIMUM = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class BufferSet:
    """The buffers of a module, laid out flat on one device.

    The module's buffers keep their identity. Of several sets of one module, those of several
    devices, one is `attach`ed at a time: the module's buffers are then views of its memory.

    Args:
        places: where the module keeps its buffers.
        device: where these values live.
    """

    def __init__(self, places: BufferPlaces, device: torch.device) -> None:
        self.places = places
        self.layout: Layout = places.layout
        self.flat = FlatTensors(self.layout, device=device)
        """The values of this device now."""
        self.flat.write(places.tensors)
        self._pointers = [view.data_ptr() for view in self.flat.views]
        self._start = FlatTensors(self.layout, device=device)

    def attach(self) -> None:
        """Have the module compute with the values of this device."""
        for tensor, view in zip(self.places.tensors, self.flat.views, strict=True):
            tensor.data = view

    def begin_step(self) -> None:
        """Remember what every shard of this step starts from."""
        self.places.check()
        self.absorb()
        _copy(self._start, self.flat)

    def begin_as(self, first: BufferSet) -> None:
        """Start the step from the values with which the first device of this process does."""
        _copy(self.flat, first.flat)
        _copy(self._start, first.flat)

    def changed(self) -> ChangedBuffers | None:
        """Which buffers a shard has changed since `begin_step` or `restore`, and into what."""
        self.places.check()
        if not self.places.tensors:
            return None
        self.absorb()
        indices = self._changed()
        if not indices:
            return None
        return ChangedBuffers(indices, [section.clone() for section in self.flat.sections])

    def end_step(self, board: Board, batch: ShardedBatch, *, due: bool = True) -> None:
        """Give every changed buffer its value after the step; the others have been restored.

        Args:
            board: with the rows of all shards.
            batch: tells the samples of each shard.
            due: whether to look at what makes a GPU wait.

        Raises:
            StateError: shards have changed parts of a buffer, which a mean would destroy.
        """
        if not self.places.tensors:
            return
        sizes = batch.sizes
        for run in _runs(self.layout, board.changed.astype(bool).T.tolist(), self.places.rules):
            values = [
                _run_of(board.buffer_rows[shard] if by_shard else self._start, run)
                for shard, by_shard in enumerate(run.changed_by)
            ]
            target, start = _run_of(self.flat, run), _run_of(self._start, run)
            values = [value.to(target.device) for value in values]
            if run.rule is None and (due or target.device.type == "cpu"):
                self._refuse_parts(run, values, start, sizes)
            target.copy_(_combine(values, start, sizes, run))

    def restore(self) -> None:
        """Put back what `begin_step` remembered."""
        if self.places.tensors:
            self.absorb()
            _copy(self.flat, self._start)

    def absorb(self) -> None:
        """Take in what the module has put in the place of its buffers rather than into them."""
        tensors, pointers = self.places.tensors, self._pointers
        for index, (tensor, homes) in enumerate(zip(tensors, self.places.homes, strict=True)):
            for owner, name in homes:
                value = buffers_of(owner).get(name)
                if value is not tensor:
                    self.flat.views[index].copy_(self.places.checked(index, value))
                    buffers_of(owner)[name] = tensor
                    tensor.data = self.flat.views[index]
            if tensor.data_ptr() != pointers[index]:  # by .data = ..., resize_() or another Trainer
                self.flat.views[index].copy_(self.places.checked(index, tensor))
                tensor.data = self.flat.views[index]

    def check_shapes(self) -> None:
        """Refuse a buffer that the module has begun to resize, which its memory does not allow.

        PyTorch then raises, and leaves the tensor with a shape that it has no memory for.

        Raises:
            StateError: there is one; it has its memory again.
        """
        for index, (tensor, view) in enumerate(
            zip(self.places.tensors, self.flat.views, strict=True)
        ):
            if tensor.shape != view.shape:
                came = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                tensor.data = view
                self.places.checked(index, came)

    def _changed(self) -> list[int]:
        """Which buffers do not have the bits they started with; on a GPU, which may not have.

        Version counters will not do: batch-norm kernels change their statistics behind them. To
        look at a GPU's values the host would have to wait for it, so there all of them travel.
        """
        if self.flat.device.type != "cpu":
            return list(range(len(self.places.tensors)))
        sections = zip(self.flat.sections, self._start.sections, strict=True)
        same = [same_bits(now, start) for now, start in sections]
        pairs = zip(self.layout.entries, self.flat.views, self._start.views, strict=True)
        return [
            index
            for index, (entry, now, start) in enumerate(pairs)
            if not same[entry.section] and not same_bits(now, start)
        ]

    def _refuse_parts(
        self,
        run: _Run,
        values: Sequence[torch.Tensor],
        start: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        """Refuse a queue: some of its rows are new, all others are as they were."""
        filled = [value for value, size in zip(values, sizes, strict=True) if size]
        entries = [self.layout.entries[index] for index in run.entries]
        wide = [e for e in entries if sum(size > 1 for size in e.shape) > 1 and e.numel]
        if len(filled) < 2 or not wide or not start.is_floating_point():
            return
        differs = torch.stack([_bits(value) != _bits(start) for value in filled]).any(dim=0)
        for entry in wide:
            place = entry.offset - run.start
            touched = differs[place : place + entry.numel].as_strided(entry.shape, entry.stride)
            if _touched_in_rows(touched):
                raise StateError(
                    f"buffer {entry.name}: each shard has put other values into some of its rows "
                    f"and left the rest alone, as a queue or a memory bank does; the mean over the "
                    f"shards, onefold's rule for buffers, would blend old rows with new ones. Say "
                    f'which rule is meant: Trainer(buffers={{"{entry.name}": "first"}}) keeps the '
                    f'rows of the first shard; "mean", "max" and "sum" are the others'
                )


def _touched_in_rows(touched: torch.Tensor) -> bool:
    """Whether, along some dimension, every row was changed as a whole or not at all; both occur."""
    for dim in range(touched.dim()):
        others = [d for d in range(touched.dim()) if d != dim]
        some, whole = touched.amax(dim=others), touched.amin(dim=others)
        if bool((some == whole).all()) and bool(whole.any()) and not bool(whole.all()):
            return True
    return False


class BufferPlaces:
    """Where a module keeps its buffers, and what becomes of each.

    Args:
        module: the user's own.
        rules: of buffers by name or pattern.

    Raises:
        ValueError: a rule is unknown, or names no buffer.
    """

    def __init__(
        self, module: torch.nn.Module, rules: Mapping[str, BufferRule] | None = None
    ) -> None:
        places = _places(module)
        self.names = [place.name for place in places]
        self.tensors = [place.tensor for place in places]
        self.homes = [place.homes for place in places]
        self.layout = lay_out({place.name: place.tensor for place in places})
        self.rules = _rules_of(self.names, rules or {})
        self._known = [
            (prefix, buffers_of(owner), {n for n, b in buffers_of(owner).items() if b is not None})
            for prefix, owner in module.named_modules()
        ]
        self._held = [buffers for _, buffers, _ in self._known]
        self._number = sum(map(len, self._held))
        self._some_are_none = self._number != sum(len(known) for _, _, known in self._known)

    def check(self) -> None:
        """Refuse buffers that were not there when Trainer was made.

        Raises:
            StateError: there is one.
        """
        # With none of them None, one more shows in their number.
        if self._some_are_none or sum(map(len, self._held)) != self._number:
            self._look_closer()

    def checked(self, index: int, value: torch.Tensor | None) -> torch.Tensor:
        """What has come in the place of a buffer, if it can be one.

        Raises:
            StateError: it has another shape or type.
        """
        expected = self.layout.entries[index]
        dtype = self.layout.dtypes[expected.section]
        if value is None or tuple(value.shape) != expected.shape or value.dtype != dtype:
            came = "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise StateError(
                f"buffer {self.names[index]}: expected {dtype} {expected.shape} as when Trainer "
                f"was made, got {came}. A buffer keeps its shape and type through a run: where the "
                f"first forward pass gives it its shape (observers of quantisation do), run one "
                f"before Trainer is made"
            )
        return value

    def _look_closer(self) -> None:
        """Buffers that are None take no part, as long as they are."""
        for prefix, buffers, known in self._known:
            for name, value in buffers.items():
                if value is not None and name not in known:
                    full = f"{prefix}.{name}" if prefix else name
                    raise StateError(
                        f"buffer {full} was not there, or None, when Trainer was made: a shard "
                        f"that makes it keeps it to itself, and devices would differ. Register it "
                        f"with a value, or run one forward pass, before Trainer is made"
                    )


class _Place(NamedTuple):
    name: str
    tensor: torch.Tensor
    homes: list[tuple[torch.nn.Module, str]]
    """Every module that holds it, with the name it has there."""


class _Run(NamedTuple):
    """Neighbouring buffers that the same shards changed and that have the same rule."""

    section: int
    start: int
    stop: int
    changed_by: tuple[bool, ...]
    rule: BufferRule | None
    """None for that of the buffer's type."""
    entries: tuple[int, ...]


def _places(module: torch.nn.Module) -> list[_Place]:
    found: dict[int, _Place] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in buffers_of(owner).items():
            if buffer is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                place = found.setdefault(id(buffer), _Place(full_name, buffer, []))
                place.homes.append((owner, name))
    return list(found.values())


def _rules_of(
    names: Sequence[str], rules: Mapping[str, BufferRule]
) -> tuple[BufferRule | None, ...]:
    """The rule of each buffer; a later pattern takes precedence."""
    found: list[BufferRule | None] = [None] * len(names)
    for pattern, rule in rules.items():
        if rule not in get_args(BufferRule):
            raise ValueError(
                f"expected the rule of buffers {pattern!r} to be one of {get_args(BufferRule)}, "
                f"got {rule!r}"
            )
        matching = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"buffers has a rule for {pattern!r}, which names no buffer of the model: it has "
                f"{', '.join(names) or 'none'}"
            )
        for index in matching:
            found[index] = rule
    return tuple(found)


def _runs(
    layout: Layout,
    changed_by: Sequence[Sequence[bool]],
    rules: Sequence[BufferRule | None],
) -> list[_Run]:
    """Join the changed buffers into as few stretches as possible, so that few kernels do it all."""
    runs: list[_Run] = []
    ordered = sorted(range(len(layout.entries)), key=lambda i: layout.entries[i].section)
    touching = False
    for index in ordered:
        entry, shards, rule = layout.entries[index], tuple(changed_by[index]), rules[index]
        stop = entry.offset + entry.numel
        last = runs[-1] if runs else None
        if not any(shards):
            touching = False
        elif (
            last is not None
            and touching
            and (last.section, last.changed_by, last.rule) == (entry.section, shards, rule)
        ):
            runs[-1] = last._replace(stop=stop, entries=(*last.entries, index))
        else:
            runs.append(_Run(entry.section, entry.offset, stop, shards, rule, (index,)))
            touching = True
    return runs


def _run_of(flat: FlatTensors, run: _Run) -> torch.Tensor:
    return flat.sections[run.section][run.start : run.stop]


def _combine(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int], run: _Run
) -> torch.Tensor:
    whole = not (start.is_floating_point() or start.is_complex())
    rule = run.rule or ("max" if whole else "mean")
    filled = [value for value, size in zip(values, sizes, strict=True) if size]
    if len(filled) == 1:
        return filled[0]
    if rule == "first":
        return next(
            value for value, by_shard in zip(values, run.changed_by, strict=True) if by_shard
        )
    if rule == "max":
        return _largest(filled, start)
    wide = torch.int64 if whole else torch.complex128 if start.is_complex() else torch.float64
    if rule == "sum":
        base = start.to(wide)
        return (base + fold_shards([v.to(wide) - base for v in filled], torch.add)).to(start.dtype)
    return _mean(values, start, sizes, torch.float64 if whole else wide)


def _largest(filled: Sequence[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    if start.is_floating_point():
        known = [value.to(torch.float64) for value in filled]
    else:
        # PyTorch has no maximum of unsigned numbers of more than eight bits.
        known = [value if value.dtype in _HAVE_MAXIMUM else value.long() for value in filled]
    return fold_shards(known, torch.maximum).to(start.dtype)


def _mean(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int], wide: torch.dtype
) -> torch.Tensor:
    weighted = [
        value.to(wide) * size if size else torch.zeros_like(value, dtype=wide)
        for value, size in zip(values, sizes, strict=True)
    ]
    mean = (fold_shards(weighted, torch.add) / sum(sizes)).to(start.dtype)
    left_alone = [_equal(value, start) for value, size in zip(values, sizes, strict=True) if size]
    return torch.where(torch.stack(left_alone).all(dim=0), start, mean)


def _equal(value: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Element by element; numbers of eight bits are compared as bits, for lack of kernels."""
    if start.element_size() == 1:
        return _bits(value) == _bits(start)
    return value == start


def _bits(values: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = values.element_size()
    return values.view(words[size]) if size in words else torch.view_as_real(values).sum(dim=-1)


def _copy(target: FlatTensors, source: FlatTensors) -> None:
    for to, values in zip(target.sections, source.sections, strict=True):
        to.copy_(values)

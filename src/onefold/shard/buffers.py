"""Carries the module's buffers (batch-norm statistics and the like) through the shards of a step.

Every shard starts from the step's buffers. What they become afterwards is decided by a rule:

- ``mean``, for floating point: the mean over the shards, weighted by their samples and added in the
  fold's order in float64. A shard that left a buffer alone counts with the value it started from.
- ``max``, for all others: the largest.
- ``sum``: what each shard added to the value at the start, added up.
- ``first``: the value of the first shard that changed it.
- ``per_shard``: none; each shard goes on with what it left in the step before, see the last note.

Note: three copies of a buffer
------------------------------
``flat`` is what the module computes with: its buffers are views of it. ``_start`` is what the step
began with, and belongs to this file alone. The table has one row a shard, into which a shard's
values are copied when it is done. So a shard may write to ``flat`` as it likes; `restore` makes it
equal to ``_start`` again before the next one, and `end_step` writes the outcome into it.

Modules also replace buffers rather than write into them (``self.mean = 0.9 * self.mean + x``), and
the new tensor would be left out of all this. `absorb` copies its values into ``flat`` and puts the
old tensor back, so that other names of the same buffer stay right.

Note: where the values of every shard are
-----------------------------------------
A recurrent model that reads one long text in every row of its batches begins each batch with the
hidden state in which the one before ended. With the rule ``"per_shard"`` such a state is a buffer
of the model, as large as a shard, of which every shard has values of its own.

What shards leave in buffers travels to all devices in any case (see
`onefold.exchange.shard_table`). So every process keeps the values of all shards, and whichever
device runs a shard next has them. The module itself keeps the value that it was made with: that is
what each shard begins with, what evaluation sees, and what a script changes to have all shards
begin anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import FlatTensors, Layout, as_words, lay_out, same_bits
from onefold.core.fold import fold_rows
from onefold.core.numbers import check_choice
from onefold.core.results import ChangedBuffers
from onefold.core.settings import BufferRule
from onefold.errors import StateError
from onefold.exchange.shard_table import ShardTable
from onefold.system.compat import multiply_each
from onefold.system.internals import buffers_of

__all__ = ["BufferPlaces", "BufferSet", "Carried"]


class BufferSet:
    """The buffers of a module, laid out flat on one device.

    The module's buffers keep their identity. Where a process drives several devices, each has a set
    and one of them is attached at a time: the module's buffers are then views of its memory.

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
        self.carried = Carried(places.rules)
        """The buffers that each shard has for itself."""

    def attach(self) -> None:
        """Have the module compute with the values of this device."""
        for tensor, view in zip(self.places.tensors, self.flat.views, strict=True):
            tensor.data = view

    def begin_step(self) -> None:
        """Remember what every shard of this step starts from."""
        self.places.check()
        if self.places.tensors:
            self.absorb()
            self.note_changes()

    def note_changes(self) -> None:
        """Have all shards begin anew in buffers of their own that a script has changed."""
        for index, left in self.carried.values.items() if not self.carried.is_paused else ():
            if left and not same_bits(self.flat.views[index], self._start.views[index]):
                left.clear()
        self._start.copy_(self.flat)

    def begin_as(self, first: BufferSet) -> None:
        """Start the step from the values of the first device of this process."""
        # No absorb: only the first device's set is attached between steps.
        self.flat.copy_(first.flat)
        self._start.copy_(first.flat)
        self.carried = first.carried

    def note_loaded(self) -> None:
        """Note that a checkpoint was put into the buffers, which is no change of a script's."""
        self._start.copy_(self.flat)

    def changed(self, *, exactly: bool = False) -> ChangedBuffers | None:
        """Find the buffers that a shard has changed since `restore`, and copy their values.

        Args:
            exactly: whether a GPU is waited for, to leave out those that have not changed.
        """
        self.places.check()
        if not self.places.tensors:
            return None
        self.absorb()
        indices = self._changed(exactly=exactly)
        if not indices:
            return None
        # A copy of all: `restore` overwrites this memory before the next shard, and one kernel is
        # quicker than one per buffer.
        return ChangedBuffers(indices, self.flat.clone())

    def replace(
        self, buffers: Iterable[torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Put something else in the place of some buffers, wherever the module has them."""
        wanted = set(map(id, buffers))
        for tensor, homes in zip(self.places.tensors, self.places.homes, strict=True):
            if id(tensor) in wanted:
                made = make(tensor)
                for owner, name in homes:
                    buffers_of(owner)[name] = made

    def discard(self, kind: type[torch.Tensor]) -> None:
        """Drop tensors of a class that the module has put in the place of its buffers, unseen."""
        for tensor, homes in zip(self.places.tensors, self.places.homes, strict=True):
            for owner, name in homes:
                if isinstance(buffers_of(owner).get(name), kind):
                    buffers_of(owner)[name] = tensor

    def changed_numbers(self) -> list[int]:
        """Number the buffers that a shard has changed since `restore`; waits for a GPU."""
        if not self.places.tensors:
            return []
        self.absorb()
        return self._changed(exactly=True)

    def end_step(self, table: ShardTable, batch: ShardedBatch, *, run_checks: bool = True) -> None:
        """Give every changed buffer its value after the step; the others have been restored.

        Every device computes this for itself, from the same rows, and so gets the same bits.

        Args:
            table: with the rows of all shards.
            batch: knows how many samples each shard has.
            run_checks: whether to make checks for which a GPU must be waited for.

        Raises:
            StateError: shards have changed parts of a buffer, which a mean would destroy.
        """
        if not self.places.tensors:
            return
        sizes = _sizes_left(batch.sizes, table)
        for index, left in self.carried.values.items():
            for shard in table.changed[:, index].nonzero()[0].tolist():
                value = table.buffer_rows[shard].views[index]
                left[shard] = value.to(self.flat.device, copy=True)
        for run in _runs(self.layout, table.changed.astype(bool).T.tolist(), self.places.rules):
            if run.rule == "per_shard":
                continue
            # The row of a shard that changed nothing still holds what an earlier step put there.
            values = [
                _run_of(table.buffer_rows[shard] if by_shard else self._start, run)
                for shard, by_shard in enumerate(run.changed_by)
            ]
            target, start = _run_of(self.flat, run), _run_of(self._start, run)
            values = [value.to(target.device) for value in values]
            if run.rule is None and (run_checks or target.device.type == "cpu"):
                self._refuse_parts(run, values, start, sizes)
            target.copy_(_combine(values, start, sizes, run))

    def restore(self, shard: int | None = None) -> None:
        """Put back what `begin_step` remembered, and what a shard of the step goes on with."""
        if self.places.tensors:
            # First the tensors, then their values: a tensor that took a buffer's place would
            # otherwise stay there and keep the shard's values.
            self.absorb()
            self.flat.copy_(self._start)
            for index, left in self.carried.values.items() if shard is not None else ():
                if shard in left:
                    self.flat.views[index].copy_(left[shard])

    def absorb(self) -> None:
        """Copy into our memory what the module has put in the place of its buffers.

        Raises:
            StateError: the replacement has another shape or dtype than the buffer.
        """
        tensors, pointers = self.places.tensors, self._pointers
        for index, (tensor, homes) in enumerate(zip(tensors, self.places.homes, strict=True)):
            # By assignment: another object in the module's table. A buffer may have several homes.
            for owner, name in homes:
                value = buffers_of(owner).get(name)
                if value is not tensor:
                    self.flat.views[index].copy_(self.places.checked(index, value))
                    buffers_of(owner)[name] = tensor
                    tensor.data = self.flat.views[index]
            # By .data = ..., resize_() or another Trainer: the same object with other memory.
            if tensor.data_ptr() != pointers[index]:
                self.flat.views[index].copy_(self.places.checked(index, tensor))
                tensor.data = self.flat.views[index]

    def check_shapes(self) -> None:
        """Refuse a buffer that the module has begun to resize, which its memory does not allow.

        PyTorch then raises, and leaves the tensor with a shape that it has no memory for.

        Raises:
            StateError: a buffer has another shape than its memory; it gets its memory back first.
        """
        for index, (tensor, view) in enumerate(
            zip(self.places.tensors, self.flat.views, strict=True)
        ):
            if tensor.shape != view.shape:
                # On the meta device, for the message alone: the tensor itself cannot be read.
                came = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                tensor.data = view
                self.places.checked(index, came)

    def _changed(self, *, exactly: bool) -> list[int]:
        """List the buffers that do not have the bits they started with; on a GPU, mostly all.

        Version counters will not do: batch-norm kernels change their statistics without counting.
        To look at a GPU's values the host would have to wait for it, so there all of them travel.
        """
        if self.flat.device.type != "cpu" and not exactly:
            return list(range(len(self.places.tensors)))
        sections = zip(self.flat.sections, self._start.sections, strict=True)
        # Whole sections first: mostly nothing has changed, and that takes one comparison. By bits:
        # NaN would otherwise always count as changed, and -0 in the place of 0 never.
        same = [same_bits(now, start) for now, start in sections]
        pairs = zip(self.layout.entries, self.flat.views, self._start.views, strict=True)
        return [
            index
            for index, (entry, now, start) in enumerate(pairs)
            # What a shard has for itself is kept in any case: nothing else says that it is new.
            if self.places.rules[index] == "per_shard"
            or (not same[entry.section] and not same_bits(now, start))
        ]

    def _refuse_parts(
        self,
        run: _BufferRun,
        values: Sequence[torch.Tensor],
        start: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        """Refuse a mean over a queue, in which some rows are new and all others as they were."""
        filled = [value for value, size in zip(values, sizes, strict=True) if size]
        entries = [self.layout.entries[index] for index in run.entries]
        # Statistics are vectors, and may well have elements that stay as they are.
        wide = [e for e in entries if sum(size > 1 for size in e.shape) > 1 and e.numel]
        if len(filled) < 2 or not wide or not start.is_floating_point():
            return
        differs = torch.stack([as_words(value) != as_words(start) for value in filled]).any(dim=0)
        for entry in wide:
            # A run covers several buffers, and its elements are counted from its own start.
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
    """Whether along some dimension some rows were changed as a whole and the others not at all."""
    for dim in range(touched.dim()):
        others = [d for d in range(touched.dim()) if d != dim]
        some, whole = touched.amax(dim=others), touched.amin(dim=others)
        if bool((some == whole).all()) and bool(whole.any()) and not bool(whole.all()):
            return True
    return False


class _BufferRun(NamedTuple):
    """Neighboring buffers that the same shards changed and that have the same rule."""

    section: int
    start: int
    stop: int
    changed_by: tuple[bool, ...]
    """(V,) whether each shard changed them."""
    rule: BufferRule | None
    """None for the rule of the buffer's type."""
    entries: tuple[int, ...]


def _runs(
    layout: Layout, changed_by: Sequence[Sequence[bool]], rules: Sequence[BufferRule | None]
) -> list[_BufferRun]:
    """Join the changed buffers into as few stretches as possible, so that few kernels do it all."""
    # A stable sort: within a section entries keep the order of their offsets.
    ordered = sorted(range(len(layout.entries)), key=lambda i: layout.entries[i].section)

    def kind(index: int) -> tuple[int, tuple[bool, ...], BufferRule | None]:
        return layout.entries[index].section, tuple(changed_by[index]), rules[index]

    runs: list[_BufferRun] = []
    for (section, shards, rule), group in groupby(ordered, kind):
        if any(shards):
            entries = tuple(group)
            first, last = layout.entries[entries[0]], layout.entries[entries[-1]]
            stop = last.offset + last.numel
            runs.append(_BufferRun(section, first.offset, stop, shards, rule, entries))
    return runs


def _run_of(flat: FlatTensors, run: _BufferRun) -> torch.Tensor:
    return flat.sections[run.section][run.start : run.stop]


def _sizes_left(sizes: Sequence[int], table: ShardTable) -> list[int]:
    """How many samples each shard has, without those that ``collate`` has left out."""
    left = [n - out for n, out in zip(sizes, table.left_out.tolist(), strict=True)]
    return left if any(left) else list(sizes)


def _combine(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int], run: _BufferRun
) -> torch.Tensor:
    """Apply a run's rule to the shards' values: (stop - start,) of the section's dtype."""
    whole = not (start.is_floating_point() or start.is_complex())
    rule = run.rule or ("max" if whole else "mean")
    filled = [value for value, size in zip(values, sizes, strict=True) if size]
    # One shard's values as they are, to the bit: going through a mean would round them.
    if len(filled) == 1:
        return filled[0]
    if rule == "first":
        return next(
            value for value, by_shard in zip(values, run.changed_by, strict=True) if by_shard
        )
    if rule == "max":
        # PyTorch has no maximum of 8-bit floats, nor of unsigned numbers of more than eight bits;
        # these two dtypes have one.
        known = torch.float64 if start.is_floating_point() else torch.int64
        return torch.stack([value.to(known) for value in filled]).amax(0).to(start.dtype)
    # Rounded to the buffer's own dtype once, at the end: small increments would be lost on the way.
    wide = torch.int64 if whole else torch.complex128 if start.is_complex() else torch.float64
    if rule == "sum":
        base = start.to(wide)
        return (base + fold_rows(torch.stack([v.to(wide) for v in filled]) - base)).to(start.dtype)
    return _mean(values, start, sizes, torch.float64 if whole else wide)


def _mean(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int], wide: torch.dtype
) -> torch.Tensor:
    # All shards at once: on a GPU, launches of kernels for each would take longer than kernels.
    given = [as_words(value) for value, size in zip(values, sizes, strict=True) if size]
    words = torch.stack(given)  # PyTorch lacks kernels for some numbers of 8 bits
    filled = words.view(start.dtype)
    # (a * n + a * m) / (n + m) is not always a. An element that no shard changed (a mask, a table
    # of positions) must not drift from step to step.
    alike = words == as_words(start) if start.element_size() == 1 else filled == start
    left_alone = alike.all(dim=0)
    rows = filled.to(wide)
    multiply_each(list(rows.unbind()), [float(size) for size in sizes if size])
    if len(rows) < len(sizes):
        # Zeros and not 0 times the value of an empty shard: 0 times infinity is not a number.
        coming, zeros = iter(rows), torch.zeros_like(start, dtype=wide)
        rows = torch.stack([next(coming) if size else zeros for size in sizes])
    mean = (fold_rows(rows) / sum(sizes)).to(start.dtype)
    return torch.where(left_alone, start, mean)


class Carried:
    """The buffers that each shard has for itself.

    Args:
        rules: of all buffers of the module.
    """

    def __init__(self, rules: Sequence[str | None]) -> None:
        self.indices = [index for index, rule in enumerate(rules) if rule == "per_shard"]
        """Numbers of these buffers among all."""
        self.is_paused = False
        """Whether the module shows averages, which are no change of a script's."""
        self.values: dict[int, dict[int, torch.Tensor]] = {index: {} for index in self.indices}
        """For each of them what a shard left, by the shard's number; without those that have left
        nothing since the beginning."""

    def left(self, names: Sequence[str]) -> Iterable[tuple[str, int, torch.Tensor]]:
        """Yield what shards have left: name of the buffer, number of the shard, value.

        Args:
            names: of all buffers of the module.
        """
        for index, by_shard in self.values.items():
            for shard, value in sorted(by_shard.items()):
                yield names[index], shard, value

    def go_on(self, left: Mapping[int, Mapping[int, torch.Tensor]]) -> None:
        """Go on with what shards have left in a run that was saved; by buffer and shard."""
        self.values = {index: dict(left.get(index, {})) for index in self.indices}


class BufferPlaces:
    """Where a module keeps its buffers, and what becomes of each.

    Args:
        module: the model, made by the user.
        rules: the rules of buffers, by name or pattern.

    Raises:
        ValueError: a rule is unknown, or its pattern matches no buffer.
    """

    def __init__(
        self, module: torch.nn.Module, rules: Mapping[str, BufferRule] | None = None
    ) -> None:
        named = dict(module.named_buffers())
        homes: dict[int, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
        for owner in module.modules():
            for name, buffer in buffers_of(owner).items():
                homes[id(buffer)].append((owner, name))
        self.names = list(named)
        self.tensors = list(named.values())
        self.homes = [homes[id(tensor)] for tensor in self.tensors]
        """For each buffer every module that holds it, with the name it has there."""
        self.layout = lay_out(named)
        self.rules = _rules_of(self.names, rules or {})
        self._known = [
            (prefix, buffers_of(owner), {n for n, b in buffers_of(owner).items() if b is not None})
            for prefix, owner in module.named_modules()
        ]
        # The modules' own tables: in most steps their lengths are all that is looked at.
        self._held = [buffers for _, buffers, _ in self._known]
        self._number = sum(map(len, self._held))
        self._some_are_none = self._number != sum(len(known) for _, _, known in self._known)

    def check(self) -> None:
        """Refuse buffers that were not there when Trainer was made.

        Raises:
            StateError: a buffer was added, or one that was None got a value.
        """
        # Where none was None at the start, a new one shows in their number.
        if not self._some_are_none and sum(map(len, self._held)) == self._number:
            return
        # One that is None takes no part as long as it is.
        for prefix, buffers, known in self._known:
            for name, value in buffers.items():
                if value is not None and name not in known:
                    full = f"{prefix}.{name}" if prefix else name
                    raise StateError(
                        f"buffer {full} was not there, or None, when Trainer was made: a shard "
                        f"that makes it keeps it to itself, and devices would differ. Register it "
                        f"with a value, or run one forward pass, before Trainer is made"
                    )

    def checked(self, index: int, value: torch.Tensor | None) -> torch.Tensor:
        """Return what has come in the place of a buffer, if it can take that place.

        Raises:
            StateError: the replacement has another shape or dtype.
        """
        expected = self.layout.entries[index]
        dtype = self.layout.dtypes[expected.section]
        if value is None or tuple(value.shape) != expected.shape or value.dtype != dtype:
            came = "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise StateError(
                f"buffer {self.names[index]}: expected {dtype} {expected.shape} as when Trainer "
                f"was made, got {came}. A buffer keeps its shape and type through a run: where the "
                f"first forward pass gives it its shape (observers of quantization do), run one "
                f"before Trainer is made"
            )
        return value


def _rules_of(
    names: Sequence[str], rules: Mapping[str, BufferRule]
) -> tuple[BufferRule | None, ...]:
    """Find the rule of each buffer; a later pattern takes precedence."""
    found: list[BufferRule | None] = [None] * len(names)
    for pattern, rule in rules.items():
        check_choice(f"the rule of buffers {pattern!r}", rule, BufferRule)
        matching = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"buffers has a rule for {pattern!r}, which names no buffer of the model: it has "
                f"{', '.join(names) or 'none'}"
            )
        for index in matching:
            found[index] = rule
    return tuple(found)

"""Updates the module's buffers (batch-norm statistics and the like) over the shards of a step.

Every shard starts from the step's buffers. A rule combines the values that the shards leave:

- ``mean``, the default for floating point: the mean over the shards, weighted by their samples and
  summed in float64 in the order of the fold. A shard that does not change a buffer counts with the
  initial value.
- ``max``, the default for all other dtypes: the largest value.
- ``sum``: the initial value plus each shard's change.
- ``first``: the value of the first shard that changed the buffer.
- ``per_shard``: no combination; each shard continues with its own value, see the last note.

Note: three copies of a buffer
------------------------------
The module computes with ``flat``: its buffers are views of it. ``_start`` holds the values at the
start of the step, and only this file uses it. The table has one row per shard, into which a shard's
values are copied at its end. A shard may therefore write to ``flat`` freely: `restore` copies
``_start`` into it before the next shard, and `end_step` writes the combined values into it.

Modules may also replace buffers instead of writing to them (``self.mean = 0.9 * self.mean + x``).
The new tensor would not be a view of ``flat``. `absorb` copies its values into ``flat`` and puts
the old tensor back, so that other names of the same buffer stay valid.

Note: where per-shard values are stored
---------------------------------------
A recurrent model that reads one long text per row of its batches starts each batch with the hidden
state at the end of the previous batch. With the rule ``"per_shard"`` this state is a buffer of the
model, with the size of a shard, and every shard has its own values.

The values that shards leave in buffers are sent to all devices in any case (see
`onefold.exchange.shard_table`). So every process keeps the values of all shards, and any device can
run a shard next. The module itself keeps the buffer's initial value: shards start from it,
evaluation sees it, and a script that changes it resets the state of all shards.
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
    """A module's buffers, in flat memory on one device.

    The module's buffers keep their identity. If a process drives several devices, each has its own
    set, and one set is attached at a time: the module's buffers are then views of its memory.

    Args:
        places: the locations of the buffers in the module.
        device: the device of these values.
    """

    def __init__(self, places: BufferPlaces, device: torch.device) -> None:
        self.places = places
        self.layout: Layout = places.layout
        self.flat = FlatTensors(self.layout, device=device)
        """Current values on this device."""
        self.flat.write(places.tensors)
        self._pointers = [view.data_ptr() for view in self.flat.views]
        self._start = FlatTensors(self.layout, device=device)
        self.carried = Carried(places.rules)
        """Buffers with separate values for each shard."""

    def attach(self) -> None:
        """Point the module's buffers to this device's values."""
        for tensor, view in zip(self.places.tensors, self.flat.views, strict=True):
            tensor.data = view

    def begin_step(self) -> None:
        """Store the values from which every shard of this step starts."""
        self.places.check()
        if self.places.tensors:
            self.absorb()
            self.note_changes()

    def note_changes(self) -> None:
        """Reset per-shard buffers whose value the script has changed."""
        for index, left in self.carried.values.items() if not self.carried.is_paused else ():
            if left and not same_bits(self.flat.views[index], self._start.views[index]):
                left.clear()
        self._start.copy_(self.flat)

    def begin_as(self, first: BufferSet) -> None:
        """Start the step from the values of the process's first device."""
        # Do not absorb: between steps only the first device's set is attached.
        self.flat.copy_(first.flat)
        self._start.copy_(first.flat)
        self.carried = first.carried

    def note_loaded(self) -> None:
        """Accept the values of a loaded checkpoint, which do not count as a script's change."""
        self._start.copy_(self.flat)

    def changed(self, *, exactly: bool = False) -> ChangedBuffers | None:
        """Find the buffers that a shard changed after `restore`, and copy their values.

        Args:
            exactly: whether to block on the GPU in order to leave out unchanged buffers.
        """
        self.places.check()
        if not self.places.tensors:
            return None
        self.absorb()
        indices = self._changed(exactly=exactly)
        if not indices:
            return None
        # Copy all buffers: `restore` overwrites this memory before the next shard, and one kernel
        # is faster than one per buffer.
        return ChangedBuffers(indices, self.flat.clone())

    def replace(
        self, buffers: Iterable[torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Replace some buffers by other objects in all modules that hold them."""
        wanted = set(map(id, buffers))
        for tensor, homes in zip(self.places.tensors, self.places.homes, strict=True):
            if id(tensor) in wanted:
                made = make(tensor)
                for owner, name in homes:
                    buffers_of(owner)[name] = made

    def discard(self, kind: type[torch.Tensor]) -> None:
        """Drop tensors of a class that replaced buffers; their values are ignored."""
        for tensor, homes in zip(self.places.tensors, self.places.homes, strict=True):
            for owner, name in homes:
                if isinstance(buffers_of(owner).get(name), kind):
                    buffers_of(owner)[name] = tensor

    def changed_numbers(self) -> list[int]:
        """Number the buffers that a shard changed after `restore`; blocks on a GPU."""
        if not self.places.tensors:
            return []
        self.absorb()
        return self._changed(exactly=True)

    def end_step(self, table: ShardTable, batch: ShardedBatch, *, run_checks: bool = True) -> None:
        """Set every changed buffer to its value after the step; `restore` resets the others.

        Every device computes this from the same rows, and therefore gets the same bits.

        Args:
            table: the rows of all shards.
            batch: the step's batch, with the size of each shard.
            run_checks: whether to run checks that block on a GPU.

        Raises:
            StateError: shards changed only some rows of a buffer, which a mean would blend.
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
            # Use `_start` for a shard that changed nothing: its row holds an earlier step's values.
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
        """Restore the values of `begin_step`, and a shard's own values of its per-shard buffers."""
        if self.places.tensors:
            # Absorb first: a tensor that replaced a buffer would otherwise stay in its place and
            # keep the previous shard's values.
            self.absorb()
            self.flat.copy_(self._start)
            for index, left in self.carried.values.items() if shard is not None else ():
                if shard in left:
                    self.flat.views[index].copy_(left[shard])

    def absorb(self) -> None:
        """Copy replaced buffers into this set's memory, and put the original tensors back.

        Raises:
            StateError: the replacement has a different shape or dtype.
        """
        tensors, pointers = self.places.tensors, self._pointers
        for index, (tensor, homes) in enumerate(zip(tensors, self.places.homes, strict=True)):
            # An assignment put another object into the module's table. A buffer may have several
            # homes.
            for owner, name in homes:
                value = buffers_of(owner).get(name)
                if value is not tensor:
                    self.flat.views[index].copy_(self.places.checked(index, value))
                    buffers_of(owner)[name] = tensor
                    tensor.data = self.flat.views[index]
            # .data = ..., resize_() or another Trainer gave the same object other memory.
            if tensor.data_ptr() != pointers[index]:
                self.flat.views[index].copy_(self.places.checked(index, tensor))
                tensor.data = self.flat.views[index]

    def check_shapes(self) -> None:
        """Refuse a buffer that the module tried to resize, which its memory does not allow.

        PyTorch raises in that case, but leaves the tensor with the new shape and too little memory.

        Raises:
            StateError: a buffer's shape differs from its memory; the buffer gets its memory back.
        """
        for index, (tensor, view) in enumerate(
            zip(self.places.tensors, self.flat.views, strict=True)
        ):
            if tensor.shape != view.shape:
                # Use the meta device, for the message only: the tensor itself cannot be read.
                came = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                tensor.data = view
                self.places.checked(index, came)

    def _changed(self, *, exactly: bool) -> list[int]:
        """List the buffers whose bits differ from the start; on a GPU list all, unless ``exactly``.

        Version counters are not enough: batch-norm kernels change statistics without counting.
        Comparing values on a GPU would block on it, so there all buffers are sent.
        """
        if self.flat.device.type != "cpu" and not exactly:
            return list(range(len(self.places.tensors)))
        sections = zip(self.flat.sections, self._start.sections, strict=True)
        # Compare whole sections first: usually nothing changed, and one comparison shows it.
        # Compare bits: by value, NaN would always count as a change, and 0 to -0 never.
        same = [same_bits(now, start) for now, start in sections]
        pairs = zip(self.layout.entries, self.flat.views, self._start.views, strict=True)
        return [
            index
            for index, (entry, now, start) in enumerate(pairs)
            # Always keep a per-shard buffer: `end_step` stores it only for shards that changed it.
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
        """Refuse a mean over a queue, in which shards wrote some rows and left the others."""
        filled = [value for value, size in zip(values, sizes, strict=True) if size]
        entries = [self.layout.entries[index] for index in run.entries]
        # Skip vectors: statistics are vectors, and some of their elements may well stay unchanged.
        wide = [e for e in entries if sum(size > 1 for size in e.shape) > 1 and e.numel]
        if len(filled) < 2 or not wide or not start.is_floating_point():
            return
        differs = torch.stack([as_words(value) != as_words(start) for value in filled]).any(dim=0)
        for entry in wide:
            # A run covers several buffers: `place` is relative to the start of the run.
            place = entry.offset - run.start
            touched = differs[place : place + entry.numel].as_strided(entry.shape, entry.stride)
            if _touched_in_rows(touched):
                raise StateError(
                    f"buffer {entry.name}: each shard wrote some rows and left the others "
                    f"unchanged, as in a queue or a memory bank. Averaging over the shards, the "
                    f"default, would blend old and new rows. Choose a rule: "
                    f'Trainer(buffers={{"{entry.name}": "first"}}) keeps the rows of the first '
                    f'shard; the other rules are "mean", "max" and "sum"'
                )


def _touched_in_rows(touched: torch.Tensor) -> bool:
    """Whether, along some dimension, some rows changed entirely and all others not at all."""
    for dim in range(touched.dim()):
        others = [d for d in range(touched.dim()) if d != dim]
        some, whole = touched.amax(dim=others), touched.amin(dim=others)
        if bool((some == whole).all()) and bool(whole.any()) and not bool(whole.all()):
            return True
    return False


class _BufferRun(NamedTuple):
    """Adjacent buffers with the same rule that the same shards changed."""

    section: int
    start: int
    stop: int
    changed_by: tuple[bool, ...]
    """Whether each shard changed them, (V,)."""
    rule: BufferRule | None
    """None for the default rule of the dtype."""
    entries: tuple[int, ...]


def _runs(
    layout: Layout, changed_by: Sequence[Sequence[bool]], rules: Sequence[BufferRule | None]
) -> list[_BufferRun]:
    """Join the changed buffers into as few runs as possible, to launch few kernels."""
    # The sort is stable: within a section, entries keep the order of their offsets.
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
    """Return the number of samples of each shard, without samples that ``collate`` left out."""
    left = [n - out for n, out in zip(sizes, table.left_out.tolist(), strict=True)]
    return left if any(left) else list(sizes)


def _combine(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int], run: _BufferRun
) -> torch.Tensor:
    """Apply a run's rule to the shards' values; return (stop - start,) of the section's dtype."""
    whole = not (start.is_floating_point() or start.is_complex())
    rule = run.rule or ("max" if whole else "mean")
    filled = [value for value, size in zip(values, sizes, strict=True) if size]
    # Return a single shard's values as they are: a mean would round them.
    if len(filled) == 1:
        return filled[0]
    if rule == "first":
        return next(
            value for value, by_shard in zip(values, run.changed_by, strict=True) if by_shard
        )
    if rule == "max":
        # Convert to a dtype that has amax: PyTorch has none for 8-bit floats, nor for unsigned
        # integers of more than 8 bits.
        known = torch.float64 if start.is_floating_point() else torch.int64
        return torch.stack([value.to(known) for value in filled]).amax(0).to(start.dtype)
    # Round to the buffer's dtype only at the end: otherwise small increments would be lost.
    wide = torch.int64 if whole else torch.complex128 if start.is_complex() else torch.float64
    if rule == "sum":
        base = start.to(wide)
        return (base + fold_rows(torch.stack([v.to(wide) for v in filled]) - base)).to(start.dtype)
    return _mean(values, start, sizes, torch.float64 if whole else wide)


def _mean(
    values: Sequence[torch.Tensor], start: torch.Tensor, sizes: Sequence[int], wide: torch.dtype
) -> torch.Tensor:
    # Stack all shards: on a GPU, launching kernels per shard would take longer than the kernels.
    given = [as_words(value) for value, size in zip(values, sizes, strict=True) if size]
    words = torch.stack(given)  # PyTorch lacks kernels for some numbers of 8 bits
    filled = words.view(start.dtype)
    # (a * n + a * m) / (n + m) is not always a. Detect elements that no shard changed (a mask, a
    # table of positions): they must not drift from step to step.
    alike = words == as_words(start) if start.element_size() == 1 else filled == start
    left_alone = alike.all(dim=0)
    rows = filled.to(wide)
    multiply_each(list(rows.unbind()), [float(size) for size in sizes if size])
    if len(rows) < len(sizes):
        # Insert zeros for empty shards, not 0 times their values: 0 times infinity is NaN.
        coming, zeros = iter(rows), torch.zeros_like(start, dtype=wide)
        rows = torch.stack([next(coming) if size else zeros for size in sizes])
    mean = (fold_rows(rows) / sum(sizes)).to(start.dtype)
    return torch.where(left_alone, start, mean)


class Carried:
    """Buffers with separate values for each shard.

    Args:
        rules: the rules of all buffers of the module.
    """

    def __init__(self, rules: Sequence[str | None]) -> None:
        self.indices = [index for index, rule in enumerate(rules) if rule == "per_shard"]
        """Numbers of the per-shard buffers among all buffers."""
        self.is_paused = False
        """Whether the module shows averages (EMA, SWA), which do not count as a script's change."""
        self.values: dict[int, dict[int, torch.Tensor]] = {index: {} for index in self.indices}
        """Values that shards left in each such buffer, by shard number; shards that have not
        changed it yet are missing."""

    def left(self, names: Sequence[str]) -> Iterable[tuple[str, int, torch.Tensor]]:
        """Yield the values that shards left: name of the buffer, shard number, value.

        Args:
            names: the names of all buffers of the module.
        """
        for index, by_shard in self.values.items():
            for shard, value in sorted(by_shard.items()):
                yield names[index], shard, value

    def go_on(self, left: Mapping[int, Mapping[int, torch.Tensor]]) -> None:
        """Continue with the values of a saved run, by buffer and shard."""
        self.values = {index: dict(left.get(index, {})) for index in self.indices}


class BufferPlaces:
    """Locations and rules of a module's buffers.

    Args:
        module: the user's model.
        rules: rules by name or pattern of buffers.

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
        """Modules that hold each buffer, with the buffer's name there."""
        self.layout = lay_out(named)
        self.rules = _rules_of(self.names, rules or {})
        self._known = [
            (prefix, buffers_of(owner), {n for n, b in buffers_of(owner).items() if b is not None})
            for prefix, owner in module.named_modules()
        ]
        # The modules' own tables: in most steps it suffices to check their lengths.
        self._held = [buffers for _, buffers, _ in self._known]
        self._number = sum(map(len, self._held))
        self._some_are_none = self._number != sum(len(known) for _, _, known in self._known)

    def check(self) -> None:
        """Refuse buffers added after Trainer was created.

        Raises:
            StateError: a buffer was added, or a buffer that was None got a value.
        """
        # If no buffer was None at the start, a new one changes the number of buffers.
        if not self._some_are_none and sum(map(len, self._held)) == self._number:
            return
        # Ignore buffers that are still None: they have no values to combine.
        for prefix, buffers, known in self._known:
            for name, value in buffers.items():
                if value is not None and name not in known:
                    full = f"{prefix}.{name}" if prefix else name
                    raise StateError(
                        f"buffer {full} did not exist, or was None, when Trainer was created. A "
                        f"shard that creates it keeps it to itself, so devices would differ. "
                        f"Register it with a value, or run one forward pass, before creating "
                        f"Trainer"
                    )

    def checked(self, index: int, value: torch.Tensor | None) -> torch.Tensor:
        """Return a buffer's replacement if it fits.

        Raises:
            StateError: the replacement has a different shape or dtype.
        """
        expected = self.layout.entries[index]
        dtype = self.layout.dtypes[expected.section]
        if value is None or tuple(value.shape) != expected.shape or value.dtype != dtype:
            came = "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise StateError(
                f"buffer {self.names[index]}: expected {dtype} {expected.shape} as when Trainer "
                f"was created, got {came}. A buffer must keep its shape and dtype during a run. If "
                f"the first forward pass sets the shape (as quantization observers do), run one "
                f"before creating Trainer"
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
                f"buffers has a rule for {pattern!r}, which matches no buffer of the model "
                f"(its buffers: {', '.join(names) or 'none'})"
            )
        for index in matching:
            found[index] = rule
    return tuple(found)

"""Logged metrics and prediction outputs of shards.

`ShardValues` and `StepValues` hold values that a loss returns in addition to the loss, such as an
accuracy. They are reported and never trained on.

`columns_of` cuts the outputs of a prediction into columns, which are stored until all devices have
them. A value with one row per sample is one column. A list with one tensor per sample, each perhaps
of a different size, is one column too; a list with one dict per sample has a column for each key.
The columns of a shard form a dict, encoded by `onefold.core.encoding`.

Note: how metrics travel
------------------------
Logging a metric must not cost a step another message. So the table has memory for `MOST` numbers
per shard, and metrics are sent together with totals: a row of the table grows by the numbers in
use, and by nothing without metrics. Devices agree on the names once, in the first step that has
them (see `onefold.step.joint`). From then on a shard reports one checksum of its names in eight
bytes of its row, which are 0 without metrics.

Note: outputs
-------------
Rows of samples have no memory on the table. The checksum covers their columns, so all devices learn
from it that outputs exist, and exchange them in a separate message in each step.

Note: nothing blocks
--------------------
Totals stay on their device until the script reads `Step.values`, and so do weights that a GPU
computes: unlike the weights of a loss, they affect no decision. Only outputs block, because they
are copied to the host.

Note: codes below 0
-------------------
A weight is never negative, so a negative number in its place is a code: ``SUM`` if the loss is not
divided, ``SUM - n`` if it has n terms with a denominator each, ``GATHERS`` if it requested the
tensors of other shards, and ``LATE`` if a gradient arrived after its stage was sent. Several
denominators must be known before backward can begin, so such a step restarts: all shards first
compute the loss without gradients, only for its weights; devices exchange these; and then the
shards run with them. A step that gathers, or was late, restarts too.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from onefold.core.call_digest import checksum
from onefold.core.fold import fold_rows
from onefold.core.mean import LossTerms, Mean, detached, weigh
from onefold.core.storage import MOST
from onefold.errors import DisagreementError, LossError

__all__ = [
    "Column",
    "Rows",
    "ShardValues",
    "StepValues",
    "columns_of",
    "names_of",
    "read_values",
    "values_by_name",
    "with_values_detached",
]


Column = str
"""Contents of one column, as JSON: name, dtype and shape of each sample's row; or name, dtype,
number of dimensions, and the key in each sample's dict (null if it is not a dict)."""

Rows = torch.Tensor | list[torch.Tensor]
"""Values of some samples in one column: (samples, ...), or one tensor per sample."""


def columns_of(name: str, value: object, samples: int, where: str) -> dict[Column, Rows]:
    """Cut one value of a shard into columns, copied to the host.

    Args:
        name: name of the value.
        value: a tensor (samples, ...), or a list with one tensor or dict of tensors per sample.
        samples: number of samples in the shard.
        where: batch and shard, for errors.

    Raises:
        LossError: the value does not have one entry per sample, or its entries have other types.
    """
    if isinstance(value, torch.Tensor) and value.dim() and len(value) == samples:
        kind = [name, _dtype_of(value), list(value.shape[1:])]
        # Copy even on the host, because the value may be a view of a large tensor, or of a buffer.
        return {json.dumps(kind): value.detach().to("cpu", copy=True)}
    if isinstance(value, list) and len(value) == samples and samples:
        if all(isinstance(entry, torch.Tensor) for entry in value):
            return _ragged(name, [{None: entry} for entry in value], where)
        if all(_is_of_tensors(entry) for entry in value):
            return _ragged(name, value, where)
    came = tuple(value.shape) if isinstance(value, torch.Tensor) else reprlib.repr(value)
    raise LossError(
        f"{where}: {name!r} must be a tensor with one row, or a list with one tensor or dict of "
        f"tensors, for each of {samples} samples, but got {came}"
    )


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate the values of several parts of a batch in one column."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return torch.cat(tensors) if tensors else [entry for part in parts for entry in part]


def values_by_name(
    parts: Sequence[Mapping[Column, Rows]], columns: Sequence[Column]
) -> dict[str, Any]:
    """Concatenate the values of all shards, in order, by the names of the function."""
    values: dict[str, Any] = {}
    for column in columns:
        name, _, _, *keys = json.loads(column)
        entries = joined_rows([part[column] for part in parts])
        if not keys or keys[0] is None:
            values[name] = entries
            continue
        dicts = values.setdefault(name, [{} for _ in entries])
        for each, entry in zip(dicts, entries, strict=True):
            each[keys[0]] = entry
    return values


def _ragged(
    name: str, entries: Sequence[Mapping[str | None, torch.Tensor]], where: str
) -> dict[Column, Rows]:
    """Make a column of each key; the key is None for an entry that is not a dict."""
    first = entries[0]
    for number, entry in enumerate(entries):
        if entry.keys() != first.keys():
            raise LossError(
                f"{where}: the dicts of {name!r} must have the same keys for all samples, but got "
                f"{list(first)} for sample 0 of the shard and {list(entry)} for sample {number}"
            )
        for key, like in first.items():
            if (entry[key].dtype, entry[key].dim()) != (like.dtype, like.dim()):
                called = repr(name) if key is None else f"{key!r} of {name!r}"
                raise LossError(
                    f"{where}: {called} must have the same dtype and number of dimensions for all "
                    f"samples, but got {_words(like)} for sample 0 of the shard and "
                    f"{_words(entry[key])} for sample {number}. If a sample has no values, return "
                    f"an empty tensor with as many dimensions, such as torch.zeros(0, 4)"
                )
    return {
        json.dumps([name, _dtype_of(like), like.dim(), key]): [
            entry[key].detach().to("cpu", copy=True) for entry in entries
        ]
        for key, like in first.items()
    }


def _is_of_tensors(entry: object) -> bool:
    return (
        isinstance(entry, Mapping)
        and len(entry) > 0
        and all(type(key) is str and torch.is_tensor(each) for key, each in entry.items())
    )


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _words(tensor: torch.Tensor) -> str:
    return f"{_dtype_of(tensor)} {tuple(tensor.shape)}"


_SUM, _MEAN = "sum ", "mean "


@dataclass(frozen=True, slots=True)
class ShardValues:
    """Metrics of one shard, or of a microbatch of it."""

    lines: tuple[str, ...]
    """Entry per number: whether it is divided, and the name of its metric."""
    numbers: torch.Tensor
    """(lines, 2) float64 on the shard's device: totals and their denominators."""
    rows: Mapping[Column, Rows] = field(default_factory=dict)
    """Outputs, with one row per sample, on the host."""

    @property
    def kind(self) -> int:
        """Checksum of the lines, above 0."""
        return 1 + checksum("\n".join([*self.lines, *self.rows]).encode())

    def plus(self, other: ShardValues | None, where: str) -> ShardValues:
        """Add the metrics of the shard's next microbatch.

        Raises:
            DisagreementError: that microbatch has other names.
        """
        if other is None or other.kind != self.kind:
            own = names_of([*self.lines, *self.rows])
            theirs = [] if other is None else names_of([*other.lines, *other.rows])
            raise DisagreementError(
                f"{where}: every microbatch of a shard must return the same metrics, with terms of "
                f"the same kind, but one returned {own} and another one {theirs}"
            )
        rows = {name: joined_rows([own, other.rows[name]]) for name, own in self.rows.items()}
        return ShardValues(self.lines, self.numbers + other.numbers, rows)


@dataclass(frozen=True, slots=True)
class StepValues:
    """Metrics of a step, not yet summed."""

    lines: tuple[str, ...]
    """Lines as in `ShardValues`; the same for all shards."""
    table: torch.Tensor
    """(V, lines, 2) float64, on the lead's compute device; zeros for empty shards."""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """Rows of all samples by name, on the host."""

    @classmethod
    def known(
        cls, values: Mapping[str, float], outputs: Mapping[str, Any], device: torch.device
    ) -> Self:
        """Make the object from final values."""
        pairs = [[[value, 1.0] for value in values.values()]]
        table = torch.tensor(pairs, dtype=torch.float64, device=device)
        lines = tuple(f"{_MEAN}{name}" for name in values)
        return cls(lines, table.view(1, len(lines), 2), outputs)

    def finished(self) -> dict[str, torch.Tensor]:
        """Sum and divide: () float64 for each name, in the order of the loss."""
        # In the order of the fold, like the loss.
        folded = fold_rows(self.table)
        terms: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for line, (total, weight) in zip(self.lines, folded, strict=True):
            divided, name = line.startswith(_MEAN), line.partition(" ")[2]
            divisor = weight if divided else torch.ones_like(weight)
            terms.setdefault(name, []).append((total, divisor))
        return {name: _quotients(pairs) for name, pairs in terms.items()}


def _quotients(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Add up totals over weights; skip terms without weight, and return NaN if all are skipped."""
    known = functools.reduce(torch.logical_or, [weight != 0 for _, weight in pairs])
    terms = [torch.where(weight != 0, total / weight, 0.0) for total, weight in pairs]
    return torch.where(known, functools.reduce(torch.add, terms), math.nan)


def names_of(lines: Sequence[str]) -> list[str]:
    """Return the metric names in lines or columns, each once."""
    # A column is a list in JSON; its first entry is the name.
    named = (json.loads(n)[0] if n.startswith("[") else n.partition(" ")[2] for n in lines)
    return list(dict.fromkeys(named))


def with_values_detached(result: object) -> object:
    """Detach the metrics from the graph of a loss; return any other result unchanged.

    Otherwise, compiled code would compute their gradients too, multiplied by 0 and added; and 0
    times an infinite gradient is NaN.
    """
    if isinstance(result, tuple) and all(isinstance(part, dict) for part in result[1:]):
        beside = [{name: detached(part[name]) for name in part} for part in result[1:]]
        return result[0], *beside
    return result


def read_values(
    values: Mapping[str, object], outputs: Mapping[str, object], samples: int, where: str
) -> ShardValues | None:
    """Read metrics, each like a loss; None if there are none.

    Args:
        values: metrics by name; tensors may be boolean.
        outputs: outputs by name; see `columns_of`.
        samples: number of samples in the shard or microbatch.
        where: step and shard, for errors.

    Raises:
        LossError: a value cannot be read, its name is not a single line, or there are too many.
    """
    if not values and not outputs:
        return None
    lines, pairs, rows = [], [], dict[Column, Rows]()
    for name in (*values, *outputs):
        if not isinstance(name, str) or not name or "\n" in name:
            raise LossError(f"{where}: metric names must be single lines, but got {name!r}")
    for name, value in outputs.items():
        rows |= columns_of(name, value, samples, where)
    for name, value in values.items():
        what = f"the value {name!r} of {where}"
        terms = value.terms if isinstance(value, LossTerms) else (value,)
        for number, term in enumerate(terms, 1):
            words = what if len(terms) == 1 else f"{what}, term {number}"
            divided, total, weight = _term_of(term, samples, words)
            lines.append((_MEAN if divided else _SUM) + name)
            pairs.append((total, weight))
    if len(lines) > MOST:
        raise LossError(
            f"{where}: the metrics of a loss can have at most {MOST} numbers, but got {len(lines)} "
            f"({', '.join(names_of(lines)[:3])}, ...). For more, such as per-class values, use "
            f"trainer.evaluate or trainer.predict, which have no limit"
        )
    return ShardValues(tuple(lines), _numbers(pairs), rows)


def _term_of(
    term: object, samples: int, what: str
) -> tuple[bool, torch.Tensor, torch.Tensor | float]:
    """Return whether a term is divided, its total, () float64, and its weight."""
    waiting = None
    if isinstance(term, Mean) and isinstance(term.weight, torch.Tensor):
        # Unlike in a loss, a weight may require grad here, because metrics have no gradients.
        weight = term.weight.detach()
        is_number = weight.numel() == 1 and weight.dtype != torch.bool and not weight.is_complex()
        if weight.device.type != "cpu" and is_number:
            # Reading it would block on the GPU; 1 is a placeholder while the rest is read.
            waiting, weight = weight.reshape(()).double(), torch.ones(())
        term = Mean(term.total, weight)
    part = weigh(term, samples, what)
    return part.kind != "sum", part.total(), part.known_weight if waiting is None else waiting


def _numbers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | float]]) -> torch.Tensor:
    devices = {total.device for total, _ in pairs}
    if devices <= {torch.device("cpu")}:
        rows = [(float(total), float(weight)) for total, weight in pairs]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2)
    # A metric may have been computed on the host; do not wait for the others.
    device = max(devices, key=lambda each: each.type != "cpu")
    flat = [
        number.to(device) if isinstance(number, torch.Tensor) else _constant(number, device)
        for pair in pairs
        for number in pair
    ]
    return torch.stack(flat).view(-1, 2)


@functools.lru_cache(maxsize=64)
def _constant(number: float, device: torch.device) -> torch.Tensor:
    """Return a cached () float64: usually the number of samples, the same in most steps."""
    return torch.full((), number, dtype=torch.float64, device=device)

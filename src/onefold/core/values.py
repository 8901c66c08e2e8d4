"""What shards return: gradient and loss, the values beside a loss, and the rows of a prediction.

`ShardValues` and `StepValues` are values that a loss returns beside itself, such as an accuracy:
reported, and never trained on. `ShardResult` is the result of one shard in a step: a value that
knows nothing of devices, tables or exchanges.

`columns_of` cuts the values of a prediction into columns, in which they are kept until all devices
have them. A value with one row a sample is one column. A list with one tensor a sample, which may
all be of other sizes, is one as well; a list with one dict a sample has a column for each key. The
columns of a shard are a dict, which travels as `onefold.core.encoding` writes it.

Note: how values travel
-----------------------
A step must not wait for one more message because a loss is logged. So values have room on the table
for `MOST` numbers a shard, and go where totals go: a row of the table grows by the numbers that
there are, and by nothing where there are none. Which names they belong to is agreed on once, in the
first step that has them (see `onefold.step.joint`); from then on a shard reports one
checksum of its names. Without values a shard's row has eight bytes for it, which are 0.

Note: outputs
-------------
Rows of samples have no room on the table: all devices learn from the checksum, which covers their
columns, that there are some, and bring them to each other by a message of their own in each step.

Note: nothing is waited for
---------------------------
Totals stay on their device until somebody reads `Step.values`, and so do weights that a GPU
computes: unlike those of a loss, they decide nothing. For outputs, which are copied to the host,
it waits.

Note: codes below 0
-------------------
A weight is never negative, so a negative number in its place can say that there is none: ``SUM`` if
the loss is not divided, ``SUM - n`` if it has n terms with a divisor each, ``GATHERS`` if it
asked for the tensors of other shards, and ``LATE`` if a gradient came after those of its stage had
been handed over. Several divisors must be known before backward can begin, so such a step is
started over: the loss is first computed without gradients, only for its weights; these are traded;
and then the shards run with them. A step that gathers, or was late, is started over as well.
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
"""What one column holds, as JSON: name, dtype and shape of each sample's row; or name, dtype,
number of dimensions, and the key in each sample's dict (null if it is no dict)."""

Rows = torch.Tensor | list[torch.Tensor]
"""The values of some samples in one column: (samples, ...), or one tensor for each."""


def columns_of(name: str, value: object, samples: int, where: str) -> dict[Column, Rows]:
    """Cut one value of a shard into columns, copied to the host.

    Args:
        name: of the value.
        value: a tensor (samples, ...), or a list with one tensor, or dict of tensors, a sample.
        samples: number of samples in the shard.
        where: batch and shard, for errors.

    Raises:
        LossError: the value has not one entry a sample, or entries of other kinds.
    """
    if isinstance(value, torch.Tensor) and value.dim() and len(value) == samples:
        kind = [name, _dtype_of(value), list(value.shape[1:])]
        # A copy even on the host: the value may be a view of a large tensor, or of a buffer.
        return {json.dumps(kind): value.detach().to("cpu", copy=True)}
    if isinstance(value, list) and len(value) == samples and samples:
        if all(isinstance(entry, torch.Tensor) for entry in value):
            return _ragged(name, [{None: entry} for entry in value], where)
        if all(_is_of_tensors(entry) for entry in value):
            return _ragged(name, value, where)
    came = tuple(value.shape) if isinstance(value, torch.Tensor) else reprlib.repr(value)
    raise LossError(
        f"{where}: expected {name!r} to be a tensor with one row, or a list with one tensor or "
        f"dict of tensors, for each of {samples} samples, got {came}"
    )


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Join the values of several parts of a batch in one column."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return torch.cat(tensors) if tensors else [entry for part in parts for entry in part]


def values_by_name(
    parts: Sequence[Mapping[Column, Rows]], columns: Sequence[Column]
) -> dict[str, Any]:
    """Join the values of all shards, in order, and name them as the function did."""
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
    """Make a column of each key; of what is no dict, the key is None."""
    first = entries[0]
    for number, entry in enumerate(entries):
        if entry.keys() != first.keys():
            raise LossError(
                f"{where}: expected the dicts of {name!r} to have the same keys for all samples, "
                f"got {list(first)} for sample 0 of the shard and {list(entry)} for sample {number}"
            )
        for key, like in first.items():
            if (entry[key].dtype, entry[key].dim()) != (like.dtype, like.dim()):
                called = repr(name) if key is None else f"{key!r} of {name!r}"
                raise LossError(
                    f"{where}: expected {called} to be alike in dtype and number of dimensions for "
                    f"all samples, got {_words(like)} for sample 0 of the shard and "
                    f"{_words(entry[key])} for sample {number}. Where there is nothing, as many "
                    f"dimensions all the same, such as torch.zeros(0, 4)"
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
    """The values beside the loss of one shard, or of a microbatch of it."""

    lines: tuple[str, ...]
    """One for each number: whether it is divided, and the name that it belongs to."""
    numbers: torch.Tensor
    """(lines, 2) float64 on the shard's device: totals, and what they are divided by."""
    rows: Mapping[Column, Rows] = field(default_factory=dict)
    """The outputs, with one row a sample, on the host."""

    @property
    def kind(self) -> int:
        """A checksum of the lines, above 0."""
        return 1 + checksum("\n".join([*self.lines, *self.rows]).encode())

    def plus(self, other: ShardValues | None, where: str) -> ShardValues:
        """Add those of the shard's next microbatch.

        Raises:
            DisagreementError: that microbatch has other names.
        """
        if other is None or other.kind != self.kind:
            own = names_of([*self.lines, *self.rows])
            theirs = [] if other is None else names_of([*other.lines, *other.rows])
            raise DisagreementError(
                f"{where}: the loss returned the values {own} beside itself for one microbatch "
                f"of the shard, and {theirs} for another; expected the same names, and "
                f"terms of the same kind, for every microbatch"
            )
        rows = {name: joined_rows([own, other.rows[name]]) for name, own in self.rows.items()}
        return ShardValues(self.lines, self.numbers + other.numbers, rows)


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values beside the loss of a step, not yet added up."""

    lines: tuple[str, ...]
    """See `ShardValues`; the same for all shards."""
    table: torch.Tensor
    """(V, lines, 2) float64, where the lead computes; zeros for empty shards."""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """For each name the rows of all samples, on the host."""

    @classmethod
    def known(
        cls, values: Mapping[str, float], outputs: Mapping[str, Any], device: torch.device
    ) -> Self:
        """Make them of what they were added up to."""
        pairs = [[[value, 1.0] for value in values.values()]]
        table = torch.tensor(pairs, dtype=torch.float64, device=device)
        lines = tuple(f"{_MEAN}{name}" for name in values)
        return cls(lines, table.view(1, len(lines), 2), outputs)

    def finished(self) -> dict[str, torch.Tensor]:
        """Add up and divide: () float64 for each name, in the order in which the loss has them."""
        # In the fold's order, as the loss is.
        folded = fold_rows(self.table)
        terms: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for line, (total, weight) in zip(self.lines, folded, strict=True):
            divided, name = line.startswith(_MEAN), line.partition(" ")[2]
            divisor = weight if divided else torch.ones_like(weight)
            terms.setdefault(name, []).append((total, divisor))
        return {name: _quotients(pairs) for name, pairs in terms.items()}


def _quotients(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Add up totals over weights; a term without weight is left out, and NaN if all are."""
    known = functools.reduce(torch.logical_or, [weight != 0 for _, weight in pairs])
    terms = [torch.where(weight != 0, total / weight, 0.0) for total, weight in pairs]
    return torch.where(known, functools.reduce(torch.add, terms), math.nan)


def names_of(lines: Sequence[str]) -> list[str]:
    """Return the names that lines belong to, each once."""
    # A column is a list in JSON; its first entry is the name.
    named = (json.loads(n)[0] if n.startswith("[") else n.partition(" ")[2] for n in lines)
    return list(dict.fromkeys(named))


def with_values_detached(result: object) -> object:
    """Take the values beside a loss out of its graph; leave any other result as it is.

    Compiled code would else compute their gradients too, which are multiplied by 0 and added; and 0
    times an infinite gradient is NaN.
    """
    if isinstance(result, tuple) and all(isinstance(part, dict) for part in result[1:]):
        beside = [{name: detached(part[name]) for name in part} for part in result[1:]]
        return result[0], *beside
    return result


def read_values(
    values: Mapping[str, object], outputs: Mapping[str, object], samples: int, where: str
) -> ShardValues | None:
    """Read the values beside a loss, each as a loss is read; None if there are none.

    Args:
        values: by name; tensors may be of bools.
        outputs: by name; see `columns_of`.
        samples: of the shard, or of the microbatch of it.
        where: step and shard, for errors.

    Raises:
        LossError: a value cannot be read, has no name of one line, or there are too many.
    """
    if not values and not outputs:
        return None
    lines, pairs, rows = [], [], dict[Column, Rows]()
    for name in (*values, *outputs):
        if not isinstance(name, str) or not name or "\n" in name:
            raise LossError(f"{where}: expected names of one line for values, got {name!r}")
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
            f"{where}: expected at most {MOST} numbers beside the loss, got {len(lines)} "
            f"({', '.join(names_of(lines)[:3])}, ...). Values of every class, say, come from "
            f"trainer.evaluate or trainer.predict, which have no limit"
        )
    return ShardValues(tuple(lines), _numbers(pairs), rows)


def _term_of(
    term: object, samples: int, what: str
) -> tuple[bool, torch.Tensor, torch.Tensor | float]:
    """Whether a term is divided, its total, () float64, and its weight."""
    waiting = None
    if isinstance(term, Mean) and isinstance(term.weight, torch.Tensor):
        # One that depends on parameters will do here: no gradient is wanted.
        weight = term.weight.detach()
        is_number = weight.numel() == 1 and weight.dtype != torch.bool and not weight.is_complex()
        if weight.device.type != "cpu" and is_number:
            # To read it would wait for the GPU; 1 stands in for it where the rest is read.
            waiting, weight = weight.reshape(()).double(), torch.ones(())
        term = Mean(term.total, weight)
    part = weigh(term, samples, what)
    return part.kind != "sum", part.total(), part.known_weight if waiting is None else waiting


def _numbers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | float]]) -> torch.Tensor:
    devices = {total.device for total, _ in pairs}
    if devices <= {torch.device("cpu")}:
        rows = [(float(total), float(weight)) for total, weight in pairs]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2)
    # A value may have been computed on the host; the others are not waited for.
    device = max(devices, key=lambda each: each.type != "cpu")
    flat = [
        number.to(device) if isinstance(number, torch.Tensor) else _constant(number, device)
        for pair in pairs
        for number in pair
    ]
    return torch.stack(flat).view(-1, 2)


@functools.lru_cache(maxsize=64)
def _constant(number: float, device: torch.device) -> torch.Tensor:
    """() float64: mostly the number of samples, which is the same in most steps."""
    return torch.full((), number, dtype=torch.float64, device=device)

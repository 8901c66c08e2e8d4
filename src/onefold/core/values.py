"""What shards return: gradient and loss, the values beside a loss, and the rows of a prediction.

`ShardValues` and `StepValues` are values that a loss returns beside itself, such as an accuracy:
reported, and never trained on. `ShardResult` is the result of one shard in a step: a value that
knows nothing of devices, tables or exchanges.

`columns_of` cuts the values of a prediction into columns, in which they are kept until all devices
have them. A value with one row a sample is one column. A list with one tensor a sample, which may
all be of other sizes, is one as well; a list with one dict a sample has a column for each key. The
columns of a shard are a dict, which travels as `onefold.core.wire` writes it.

Note: how values travel
-----------------------
A step must not wait for one more message because a loss is logged. So values have room on the table
for `MOST` numbers a shard, and go where totals go: a row of the table grows by the numbers that
there are, and by nothing where there are none. Which names they belong to is agreed on once, in the
first step that has them (see `onefold.step.rows`); from then on a shard reports one
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
import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from onefold.core.call_digest import checksum
from onefold.core.flat import FlatTensors
from onefold.core.fold import fold_rows, fold_shards
from onefold.core.mean import Contribution, LateWeight, LossTerms, Mean, detached, known, weigh
from onefold.errors import DisagreementError, LossError

__all__ = [
    "GATHERS",
    "LATE",
    "MOST",
    "SUM",
    "ChangedBuffers",
    "Column",
    "Gradients",
    "Rows",
    "ShardResult",
    "ShardValues",
    "StepValues",
    "StepWeight",
    "code_of",
    "columns_of",
    "names_of",
    "read_values",
    "split",
    "total_weight",
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


MOST = 32
"""The most numbers beside the loss of a shard; a value of several terms has one for each."""
_EXAMPLE = '(loss, {"accuracy": ...})'
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


def split(result: object, what: str) -> tuple[object, Mapping[str, object], Mapping[str, object]]:
    """Tell a loss from the values and the outputs beside it.

    Args:
        result: what the user's loss returned.
        what: what the loss is called in errors, such as ``the loss of step 7, shard 3``.

    Returns:
        The loss, and the values and outputs by name; none where the result is the loss alone.

    Raises:
        LossError: the result is a dict, or a tuple of something else.
    """
    # Nearly all are tensors, and to tell whether something is a mapping takes far longer.
    if isinstance(result, torch.Tensor) or not isinstance(result, tuple | Mapping):
        return result, {}, {}
    if isinstance(result, Mapping):
        raise LossError(
            f"{what}: expected a loss, or {_EXAMPLE} for values beside it, got a dict of "
            f"{list(result)} alone. Return the tensor itself first, as in {_EXAMPLE}"
        )
    if len(result) in (2, 3) and all(isinstance(part, Mapping) for part in result[1:]):
        loss, values, *outputs = result
        return loss, values, outputs[0] if outputs else {}
    kinds = ", ".join(type(part).__name__ for part in result)
    raise LossError(
        f"{what}: expected a loss, or {_EXAMPLE} for values beside it, or (loss, values, outputs) "
        f"for rows of samples as well, got a tuple of "
        f"({kinds}). Return the loss alone, or give what else is to be reported a name in a dict"
    )


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


@dataclass(frozen=True, slots=True)
class ChangedBuffers:
    """The buffers that a shard changed, and their values afterwards."""

    indices: Sequence[int]
    """Numbers of the changed buffers, in the order of their layout."""
    flat: FlatTensors
    """Values of all buffers, changed or not."""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """The result of one shard, or of some of its microbatches.

    It depends on the parameters, the buffers, the shard's samples, and (seed, step, shard), and on
    nothing else: the same call on another device, or later, returns the same bits.
    """

    gradients: list[torch.Tensor | None]
    """One for each trained parameter, shaped like it; None where the shard computed none. Empty
    if they have been handed over stage by stage."""
    total: torch.Tensor | None
    """() float64: the shard's part of the loss; None until a loss of several terms has divisors."""
    weight: float | LateWeight
    """The shard's part of the divisor, or a code below 0: see `onefold.core.values`."""
    buffers: ChangedBuffers | None = None
    """The buffers that the shard changed; None if it changed none."""
    values: ShardValues | None = None
    """What the loss returned beside itself, if anything."""

    left_out: int = 0
    """How many of the shard's samples ``collate`` has left out."""

    given: Sequence[bool] = ()
    """What `gave` returns of gradients that have been handed over."""

    digest: int | torch.Tensor | None = None
    """Digest of the gradient, () int64; None without `GradientNotes` that make one."""

    @property
    def known_weight(self) -> float:
        """The weight; on an accelerator this may wait for it."""
        return known(self.weight)

    @property
    def gave(self) -> Sequence[bool]:
        """For each trained parameter, whether the shard computed a gradient for it."""
        return self.given or [gradient is not None for gradient in self.gradients]


Gradients = list[torch.Tensor | None]
"""One tensor for each trained parameter, of its shape, in the dtype in which they are added up;
None where a shard gave none."""


SUM = -1.0


GATHERS = -0.5
"""No whole number, as the codes of terms are."""


LATE = -0.25


@dataclass(frozen=True, slots=True)
class StepWeight:
    """What the totals of a step are divided by."""

    value: float
    """The sum of the shards' weights; 1 if the loss is not divided, NaN if it has several terms."""
    divided: bool = True
    """Whether the loss is divided at all."""
    terms: int = 1
    """Number of terms with a divisor each; if there are several, nothing has been computed yet."""
    gathers: bool = False
    """Whether a shard has asked for the tensors of the others; then nothing has been computed."""
    late: bool = False
    """Whether a shard has handed over a stage too early; then sums are not complete."""


def code_of(part: Contribution) -> float | LateWeight:
    """A shard's entry among the table's weights: its weight, or a code below 0."""
    if part.kind == "means":
        # One below SUM for a single term, so that no code is SUM itself.
        return SUM - len(part.parts)
    return SUM if part.kind == "sum" else part.weight


def total_weight(weights: Sequence[float], sizes: Sequence[int], step: int) -> StepWeight:
    """Add up the shards' weights in the order of the fold.

    Args:
        weights: (V,) float64 of the shards; 0 for empty ones.
        sizes: (V,) number of samples in each shard.
        step: number of the step, for errors.

    Raises:
        LossError: some shards' losses are divided and others' are not.
    """
    # Empty shards never ran, so they have no opinion on the kind of the loss. In a sum they count
    # as 0, in their place in the tree.
    filled = [weight for weight, size in zip(weights, sizes, strict=True) if size]
    # Before kinds are compared: what a shard that gathers will return is not known yet.
    if GATHERS in filled:
        return StepWeight(math.nan, gathers=True)
    if LATE in filled:
        return StepWeight(math.nan, late=True)
    least = min(filled)
    if least >= 0:
        return StepWeight(fold_shards(list(weights), operator.add))
    if max(filled) != least:
        kinds = ", ".join(sorted({_kind(weight) for weight in filled}))
        raise LossError(
            f"the loss of step {step} is of several kinds: {kinds}. Expected the same kind for "
            f"every shard, also for one in which there is nothing to count"
        )
    if least == SUM:
        return StepWeight(1.0, divided=False)
    return StepWeight(math.nan, terms=int(-1.0 - least))


def _kind(weight: float) -> str:
    if weight >= 0:
        return "a mean"
    return "onefold.Sum" if weight == SUM else f"a sum of {int(-1.0 - weight)} terms"

"""How the values of a prediction are kept until all devices have them: column by column.

A value with one row a sample is one column. A list with one tensor a sample, which may all be of
other sizes, is one as well; a list with one dict a sample has a column for each key. The columns of
a shard are a dict, which travels as `onefold.core.wire` writes it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onefold.errors import LossError

__all__ = [
    "Column",
    "Rows",
    "columns_of",
    "joined_rows",
    "values_by_name",
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
            return _ragged(name, None, value, where)
        if all(_is_of_tensors(entry) for entry in value):
            return _of_dicts(name, value, where)
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
    name: str, key: str | None, entries: Sequence[torch.Tensor], where: str
) -> dict[Column, Rows]:
    first = entries[0]
    for number, entry in enumerate(entries):
        if (entry.dtype, entry.dim()) != (first.dtype, first.dim()):
            called = repr(name) if key is None else f"{key!r} of {name!r}"
            raise LossError(
                f"{where}: expected {called} to be alike in dtype and number of dimensions for "
                f"all samples, got {_words(first)} for sample 0 of the shard and {_words(entry)} "
                f"for sample {number}. Where there is nothing, as many dimensions all the same, "
                f"such as torch.zeros(0, 4)"
            )
    column = json.dumps([name, _dtype_of(first), first.dim(), key])
    return {column: [entry.detach().to("cpu", copy=True) for entry in entries]}


def _of_dicts(
    name: str, entries: Sequence[Mapping[str, torch.Tensor]], where: str
) -> dict[Column, Rows]:
    keys = list(entries[0])
    for number, entry in enumerate(entries):
        if entry.keys() != set(keys):
            raise LossError(
                f"{where}: expected the dicts of {name!r} to have the same keys for all samples, "
                f"got {keys} for sample 0 of the shard and {list(entry)} for sample {number}"
            )
    columns: dict[Column, Rows] = {}
    for key in keys:
        columns |= _ragged(name, key, [entry[key] for entry in entries], where)
    return columns


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

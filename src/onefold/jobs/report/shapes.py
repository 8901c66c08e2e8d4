"""Which shape the JSON of a run's folder must have for a page to be made of it.

A folder may come from anywhere, and a page takes apart what is in it: of anything but a list or a
number it would raise an error of Python's that names no file. What is only shown may be anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from onefold.errors import DataError

__all__ = ["check_examples", "check_facts", "is_line"]

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A whole number that is also a float without loss, as a chart needs it."""
_List = list[Any] | None
_Object = dict[Any, Any]
"""Not of texts: msgspec takes none with lone surrogates, which the name of a score may have."""
_ERRORS = (msgspec.ValidationError, UnicodeEncodeError)
"""What msgspec raises, the second for a text with lone surrogates, in place of another type."""


class _Best(TypedDict):
    epoch: _Count


class _Facts(TypedDict, total=False):
    best: _Best | None
    classes: _List
    devices: _List
    left_out: _List
    notes: _List


class _Examples(TypedDict, total=False):
    kind: str | None
    classes: _List
    confusion: list[list[_Count]] | None
    samples: list[_Object] | None
    worst: list[_Object] | None


class _Steps(TypedDict):
    step: _Count


class _Epoch(_Steps, total=False):
    epoch: _Count | None
    scores: _Object | None
    devices: list[_Object] | None


def check_facts(facts: object, path: Path) -> None:
    """Refuse a ``run.json`` of another shape than a run writes.

    Raises:
        DataError: a fact that is taken apart has the wrong type; the message names the file.
    """
    _check(facts, _Facts, path)


def check_examples(examples: object, path: Path) -> None:
    """Refuse an ``examples.json`` of another shape than a run writes.

    Raises:
        DataError: a part of it has the wrong type, or the confusion matrix another size than the
            classes; the message names the file.
    """
    _check(examples, _Examples, path)
    given: Any = examples
    counts, classes = given.get("confusion") or [], given.get("classes") or []
    sides = {len(counts), *map(len, counts), *({len(classes)} if counts and classes else ())}
    if len(sides) > 1:
        raise DataError(
            f"{path}: expected a confusion matrix with a row and a column for each class, got "
            f"lengths of {', '.join(map(str, sorted(sides)))}; run the training again"
        )


def is_line(record: object) -> bool:
    """Whether a line of metrics has the shape that a run gives it."""
    # Of other kinds too, which a later version may write: all have a step.
    of_epoch = isinstance(record, dict) and record.get("kind") == "epoch"
    try:
        msgspec.convert(record, _Epoch if of_epoch else _Steps)
    except _ERRORS:
        return False
    return True


def _check(value: object, shape: Any, path: Path) -> None:
    try:
        msgspec.convert(value, shape)
    except _ERRORS as error:
        raise DataError(
            f"{path}: expected what a run writes there: {error}; run the training again"
        ) from error

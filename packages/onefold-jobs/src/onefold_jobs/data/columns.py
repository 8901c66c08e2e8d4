"""The roles of a table's columns, which the user names, or which usual names and values reveal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Columns", "part_column", "rejoined", "usual_column"]

_USUAL = {
    "text": frozenset({
        "text", "sentence", "review", "reviewtext", "content", "comment", "commenttext", "message",
        "tweet", "document", "body",
    }),
    "image": frozenset({
        "image", "imagepath", "imagename", "imagefile", "imageid", "img", "imgpath", "file",
        "filename", "filepath", "path", "picture", "photo",
    }),
    "label": frozenset({
        "label", "labels", "class", "classname", "labelname", "target", "category", "sentiment",
        "tags", "score", "rating",
    }),
    "part": frozenset({"fold", "part", "partition", "set", "split", "subset"}),
}  # fmt: skip
"""Usual column names, in lower case without spaces, underscores and dots."""
_MOST_PARTS = 10
"""Maximum number of different values in a column that splits the data."""
_TRAINED = re.compile(r"train|entra[iî]n|entrena|trein|addestr|apprenti")
_TESTED = re.compile(r"test|val|dev|eval|hold|prueba|prova")
"""Beginnings of the names of training and test sets, in several languages."""


class Columns(NamedTuple):
    """Roles of a table's columns; empty ones are found by their usual names."""

    kind: str
    """Type of the samples: ``text`` or ``image``."""
    sample: str | None = None
    """Sample column; for text also several, separated by commas."""
    label: tuple[str, ...] = ()
    """Label column; for ``multi-label`` also one column of 0 and 1 per class."""

    def samples(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a sample, in a table with these column names."""
        if self.sample is None:
            return []
        several = self.kind == "text" and self.sample not in names
        return rejoined(self.sample.split(","), names) if several else [self.sample]

    def described(self) -> str:
        """Describe both roles, for a message."""
        label = ", ".join(self.label)
        return f"the {self.kind} is in column {self.sample}, the label in {label}"


def rejoined(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that a list names, which was also split at the commas within names.

    >>> rejoined(["title", "size", "large", "other"], ["title", "size, large"])
    ['title', 'size, large', 'other']
    """
    by_parts = {tuple(map(str.strip, name.split(","))): name for name in names}
    left = [part.strip() for each in parts for part in each.split(",")]
    found = []
    while left:
        ends = (end for end in range(1, len(left) + 1) if tuple(left[:end]) in by_parts)
        end = next(ends, 1)
        found.append(by_parts.get(tuple(left[:end]), left[0]))
        left = left[end:]
    return found


def usual_column(names: Sequence[str], kind: str) -> str | None:
    """Find the single column with a usual name for its role; None if there is not exactly one.

    >>> usual_column(["id", "Review Text", "stars"], "text")
    'Review Text'
    """
    found = [
        name for name in names if "".join(filter(str.isalnum, name.casefold())) in _USUAL[kind]
    ]
    return found[0] if len(found) == 1 else None


def part_column(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Find the column with few values that splits the data, by these values or by its name.

    >>> part_column(["a", "Menge"], [{"a": 1, "Menge": "Training"}, {"a": 2, "Menge": "Test"}])
    'Menge'
    """
    values: dict[str, set[str]] = {name: set() for name in names}
    for row in rows:
        for name in [*values]:
            if row.get(name) not in ("", None):
                values[name].add(str(row[name]).strip().casefold())
            if len(values[name]) > _MOST_PARTS:
                del values[name]
        if not values:
            break
    for name, found in values.items():
        tested = {each for each in found if _TESTED.match(each)}
        trained = {each for each in found if _TRAINED.match(each)}
        if trained and tested and found == trained | tested:
            return name
    return usual_column([*values], "part")

"""Decides what the columns of a table are for ``onefold init``: inputs, choices, or a target.

`sort_inputs` looks at the input columns, and `goal_of` at the labels. Both report what the script
leaves out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from onefold.cli import counted
from onefold.errors import DataError
from onefold_jobs.cli.hints import tell
from onefold_jobs.data.columns import part_column
from onefold_jobs.data.files import BadFile, left_out_notes, readable
from onefold_jobs.data.labels import (
    MISSING,
    TaskName,
    check_numbers,
    check_task,
    divided,
    parts_of,
    read_label,
    separator,
    shortened,
    thousands_in,
)
from onefold_jobs.data.samples import require_two

__all__ = ["Cell", "Inputs", "goal_of", "number_of", "sort_inputs"]

Cell = tuple[int, str]
"""Line number and content of a cell."""
_MISSING = frozenset({"", "?", "n/a", "none", *map(str.casefold, MISSING)})
"""Cells that mean a missing value, in lower case."""
_FEW = 20
"""Up to this number of different integers, or strings, are treated as classes."""
_MOST_TEXTS = 0.1
"""Maximum fraction of texts in a column of numbers, where they are probably mistakes."""
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?!\d)")
_FREE = "it contains free text"
_SPLIT = "it seems to split the data; to use it as an input, move it to CHOICES in the script"
_GROUPED = re.compile(r"[-+]?\d+(?:[.,' ]\d+)+")
"""A number with a decimal comma, or with separators of thousands."""
_AMOUNT = re.compile(r"(?:[^\w\s]|[A-Z]{3})?\s*[-+]?\d[\d.,' ]*\s*(?:[^\w\s]|[A-Za-z]{1,3})?")
"""The same, and a number with a unit."""
_MILLIONS = re.compile(r"[-+]?[1-9]\d{0,2}(?:\.\d{3}){2,}")


class _Sorted(NamedTuple):
    """The cells of a column by their content, without empty ones."""

    numbers: list[Cell]
    unknown: list[Cell]
    """Marks of missing values, and numbers that are not finite."""
    texts: list[Cell]

    @classmethod
    def of(cls, cells: Iterable[Cell], delimiter: str) -> _Sorted:
        found = cls([], [], [])
        for line, cell in cells:
            number = number_of(cell, delimiter)
            if number is None:
                found.texts.append((line, cell))
            elif math.isfinite(number):
                found.numbers.append((line, cell))
            elif cell.strip():
                found.unknown.append((line, cell))
        return found

    @property
    def is_numeric(self) -> bool:
        """Whether all cells, but for a few, are numbers."""
        both = len(self.numbers) + len(self.texts)
        # Where points separate millions, they separate thousands in the cells that can be read.
        points = any(_MILLIONS.fullmatch(cell.strip()) for _, cell in self.texts)
        return bool(self.numbers) and len(self.texts) <= _MOST_TEXTS * both and not points

    @property
    def decimal_signs(self) -> set[str]:
        """The signs before decimals: points, commas, or none if they may separate thousands."""
        known = self.is_numeric and not thousands_in(self.numbers)
        return {sign for _, cell in self.numbers for sign in ".," if known and sign in cell}


class Inputs(NamedTuple):
    """The columns of a table that are not inputs as numbers."""

    left_out: dict[str, str]
    """Columns to leave out, with reasons."""
    choices: list[str]
    """Columns with few different strings."""
    texts: list[str]
    """Columns to leave out that contain free text."""
    notes: list[str]
    """Messages about cells that are read as missing, or may have separators of thousands."""
    signs: set[str]
    """Signs before the decimals of all columns of the table, the target included."""


def number_of(cell: str, delimiter: str = ",") -> float | None:
    """Return the number of a cell, as the script reads it; None if it is text.

    A missing value and a number that is not finite are NaN. If the delimiter is not a comma, a
    decimal comma is accepted, too.
    """
    try:
        missing = cell.strip().casefold() in _MISSING
        number = math.nan if missing else float(_with_point(cell, delimiter))
    except ValueError:
        return None
    return number if math.isfinite(number) else math.nan


def _with_point(text: str, delimiter: str) -> str:
    return text if delimiter == "," else text.replace(",", ".")


def sort_inputs(
    path: Path, names: Sequence[str], rows: Sequence[tuple[int, dict[str, str]]], delimiter: str
) -> Inputs:
    """Decide which columns of a table are inputs.

    Args:
        path: path of the table, for messages.
        names: names of the columns.
        rows: line number and cells of each row.
        delimiter: delimiter of the table.
    """
    columns = {
        name: _Sorted.of(((n, row[name]) for n, row in rows), delimiter) for name in rows[0][1]
    }
    # Decimal commas are texts in a table with commas between the cells.
    signs = (_Sorted.of(x.texts, ";") if x.texts else x for x in columns.values())
    found = Inputs({}, [], [], [], {sign for each in signs for sign in each.decimal_signs})
    part = part_column(names, (row for _, row in rows))
    for name in names:
        column, different = columns[name], len({row[name] for _, row in rows})
        if name == part:
            found.left_out[name] = _SPLIT
        # A string that is unique to each row, such as a name, carries no information about others.
        elif column.texts and 1 < different <= min(_FEW, len(rows) // 2):
            found.choices.append(name)
        elif column.is_numeric:
            thousands = thousands_in(column.numbers, found.signs)
            if thousands and thousands.certain:
                found.left_out[name] = f"it has separators of thousands, {thousands.text}"
                continue
            # Between commas, a number such as 1.500 is usually what it seems to be.
            if thousands and delimiter != ",":
                found.notes.append(f"{readable(path)}: column {name}: {thousands.text}")
            if strange := [*column.texts, *column.unknown]:
                (line, cell), count = min(strange), counted(len(strange), "cell")
                found.notes.append(
                    f"{readable(path)}: column {name}: {count} of {len(rows):,} read as missing, "
                    f"such as {shortened(cell)} in line {line}; to keep them as text, add the "
                    f"column to CHOICES in the script"
                )
        else:
            found.left_out[name] = _reason(column.texts, different, len(rows))
            if found.left_out[name].startswith(_FREE):
                found.texts.append(name)
    return found


def _reason(texts: Sequence[Cell], different: int, rows: int) -> str:
    """Return why a column of texts is not an input."""
    if not texts:
        return "it contains no values"
    example = f"such as {shortened(texts[0][1])}"
    if different == 1 < rows:
        return "all of its cells are the same"
    if all(_DATE.match(cell.strip()) for _, cell in texts):
        return f"it contains dates, {example}: write them as numbers, such as year and weekday"
    if all(_AMOUNT.fullmatch(cell.strip()) for _, cell in texts):
        return f"it contains numbers, {example}: write them with digits and a decimal point only"
    return f"{_FREE}, {example}"


def goal_of(
    path: Path,
    labels: Sequence[Cell],
    *,
    delimiter: str = ",",
    typed: bool = False,
    signs: Collection[str] = (),
    labels_as_is: bool = False,
) -> tuple[Literal["class", "labels", "number"], str]:
    """Decide what labels are: classes, several classes each, or numbers.

    Reports samples without a usable label, which the script leaves out.

    Args:
        path: path of the table, for messages.
        labels: labels of the samples, with their line numbers.
        delimiter: delimiter of the table.
        typed: whether the table has numbers, instead of texts that are read as numbers.
        signs: signs before the decimals of the table's columns.
        labels_as_is: accept all labels as class names.

    Returns:
        The goal, and the separator of several classes.

    Raises:
        DataError: there are fewer than two different labels, or they are probably neither classes
            nor numbers; or numbers have separators of thousands.
    """
    column = _Sorted.of(labels, delimiter)
    numbers = {cell.strip() for _, cell in column.numbers}
    few = len(numbers) <= _FEW and all(each.lstrip("-").isdecimal() for each in numbers)
    texts = {cell.strip() for _, cell in column.texts}
    # A few texts such as "3 b" are classes.
    amounts = all(map((_AMOUNT if len(texts) > _FEW else _GROUPED).fullmatch, texts))
    is_number = (column.is_numeric and not few) or bool(texts and amounts)
    is_number &= not labels_as_is
    task: TaskName = "regression" if is_number else "single-label"
    bad, known = [], []
    # Examples of what cannot be used begin with cells that are not empty.
    for line, label in sorted(labels, key=lambda cell: not cell[1].strip()):
        try:
            known.append(read_label(_with_point(label, delimiter) if is_number else label, task))
        except ValueError as wrong:
            bad.append(BadFile(path, str(wrong), line))
    if is_number and not column.is_numeric:
        raise DataError(f"{counted(len(bad), 'line')} of {len(labels):,}: {bad[0]}")
    require_two(known, path, bad)
    notes = []
    if is_number and not typed:
        notes = check_numbers(column.numbers, f"{readable(path)}: the target", signs)
    sign = "" if is_number else separator(known, spaces=False)
    names = {name for label in known for name in parts_of(divided(label, sign))}
    # The same names must be combined repeatedly: "Washington, D.C." is one.
    sign = sign if len(names) < len(set(known)) else ""
    if not sign:
        check_task(known, task, readable(path), labels_as_is=labels_as_is)
    for note in [*notes, *left_out_notes(bad, listed_in=None)]:
        tell(note)
    return "labels" if sign else "number" if is_number else "class", sign

"""What in a data set cannot be used: told all at once before training, or left out."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onefold.errors import DataError

__all__ = ["BadFile", "readable", "refuse", "visible"]

_TOLD = 5


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file, or a line of one, that cannot be used.

    >>> str(BadFile(Path("train.tsv"), "there is no tab", line=3))
    'train.tsv, line 3: there is no tab'
    """

    path: Path
    """Of the file."""
    reason: str
    """What was expected and what came."""
    line: int | None = None
    """Counted from 1."""

    def __str__(self) -> str:
        place = readable(self.path)
        if self.line is not None:
            place = f"{place}, line {self.line}"
        return f"{place}: {self.reason}"


def readable(path: Path) -> str:
    """A path that can be printed and written, even if its name is not UTF-8 or moves the cursor.

    >>> print(readable(Path("a\\x1b[2J.png")))
    a\\x1b[2J.png
    """
    return visible(os.fsencode(path).decode(errors="backslashreplace"))


def visible(text: str) -> str:
    """A text with what controls a screen written out.

    >>> print(visible("one\\ttwo"))
    one\\ttwo
    """
    controls = {letter for letter in text if unicodedata.category(letter) == "Cc"}
    return text.translate({ord(each): repr(each)[1:-1] for each in controls}) if controls else text


def refuse(bad: Sequence[BadFile]) -> None:
    """Raise one error that names what is bad, if anything is.

    Raises:
        DataError: there is something.
    """
    if not bad:
        return
    told = "\n".join(f"  {each}" for each in bad[:_TOLD])
    more = f"\n  and {len(bad) - _TOLD} more" if len(bad) > _TOLD else ""
    raise DataError(
        f"{len(bad)} of the files and lines cannot be used:\n{told}{more}\n"
        f"mend or remove them, or leave them out with --skip-bad"
    )

"""Files and lines that cannot be used: reported all at once before training, or left out."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onefold.errors import DataError

__all__ = ["BadFile", "readable", "refuse", "visible"]

_TOLD = 5
"""How many bad files or lines an error names; it counts the others."""


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file, or a line of one, that cannot be used.

    >>> str(BadFile(Path("train.tsv"), "there is no tab", line=3))
    'train.tsv, line 3: there is no tab'
    """

    path: Path
    """Path of the file."""
    reason: str
    """What was expected, and what was found instead."""
    line: int | None = None
    """Number of the line, from 1; None for the file as a whole."""

    def __str__(self) -> str:
        place = readable(self.path)
        if self.line is not None:
            place = f"{place}, line {self.line}"
        return f"{place}: {self.reason}"


def readable(path: Path) -> str:
    """Spell a path so that it can be printed, even if it is not UTF-8 or has control characters.

    >>> print(readable(Path("a\\x1b[2J.png")))
    a\\x1b[2J.png
    """
    # A name is bytes to the kernel. Python holds those that are not UTF-8 as lone surrogates, which
    # raise UnicodeEncodeError wherever such a name is printed or written to a file.
    return visible(os.fsencode(path).decode(errors="backslashreplace"))


def visible(text: str) -> str:
    """Write out control characters, which a terminal would obey.

    >>> print(visible("one\\ttwo"))
    one\\ttwo
    """
    # Whoever made a data set chose its names, and an escape sequence in one could rewrite what the
    # terminal shows.
    controls = {letter for letter in text if unicodedata.category(letter) == "Cc"}
    return text.translate({ord(each): repr(each)[1:-1] for each in controls}) if controls else text


def refuse(bad: Sequence[BadFile]) -> None:
    """Raise one error that names the first bad files and lines, if there are any.

    Raises:
        DataError: ``bad`` is not empty.
    """
    if not bad:
        return
    named = "\n".join(f"  {each}" for each in bad[:_TOLD])
    more = f"\n  and {len(bad) - _TOLD} more" if len(bad) > _TOLD else ""
    raise DataError(
        f"{len(bad)} of the files and lines cannot be used:\n{named}{more}\n"
        f"mend or remove them, or leave them out with --skip-bad"
    )

"""Completes the messages of the jobs for the user of ``onefold init``, which has few of their
options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from onefold.cli import listed
from onefold.cli import tell as tell_user
from onefold.errors import DataError

__all__ = ["advised", "advising", "tell"]

_OPTION = re.compile(r"onefold train[^;:]*|(--[a-z][a-z-]*)")
"""A command, whose options are its own, or another option."""
_OWN = ("--output", "--labels-as-is")
_COLUMNS = "rename the two columns to text or image, and label, or remove the others"
_INSTEAD = {
    "--data": "name them as its DATA",
    "--image-column": _COLUMNS,
    "--label-column": _COLUMNS,
    "--task": "write bars between the classes of a sample, or change the script",
    "--text-column": _COLUMNS,
}
"""Advice that replaces an option."""


def advised(text: str) -> str:
    """Say which options of a message ``onefold init`` lacks, and what to do without them.

    >>> print(advised("a.csv: use --task multi-label, or --labels-as-is"))
    a.csv: use --task multi-label, or --labels-as-is. The init command has no --task: write bars \
between the classes of a sample, or change the script
    >>> advised("use onefold train text --data a.csv")
    'use onefold train text --data a.csv'
    """
    named = dict.fromkeys(filter(None, _OPTION.findall(text)))
    lacking = [each for each in named if each not in _OWN]
    if not lacking:
        return text
    ways = dict.fromkeys(_INSTEAD[each] for each in lacking if each in _INSTEAD)
    rest = f": {'; '.join(ways)}" if ways else ""
    return f"{text}. The init command has no {listed(lacking)}{rest}"


def tell(text: str) -> None:
    """Print a message to stderr."""
    tell_user(advised(text))


@contextmanager
def advising() -> Iterator[None]:
    """Complete the errors about data that are raised inside the block."""
    try:
        yield
    except DataError as error:
        if (text := advised(str(error))) == str(error):
            raise
        raise DataError(text) from error

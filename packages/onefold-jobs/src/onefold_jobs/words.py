"""How messages count things and list names, and where they go."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable

__all__ = ["OTHER_NAMES", "cause_of", "counted", "in_shell", "listed", "seconds_of", "tell"]

OTHER_NAMES = {
    "bs": "batch_size",
    "early_stopping": "patience",
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
}
"""The names that other programs have for options of the jobs."""


def seconds_of(time: str) -> float:
    """Read a time; 0 if it is none.

    >>> seconds_of("90s"), seconds_of("1h30m"), seconds_of("30")
    (90.0, 5400.0, 0.0)
    """
    parts = re.fullmatch(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", time, re.ASCII)
    numbers = parts.groups(default="0") if parts else ("0", "0", "0")
    return float(sum(int(n) * s for n, s in zip(numbers, (3600, 60, 1), strict=True)))


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "device"), counted(5000, "class")
    ('1 device', '5,000 classes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def in_shell(*words: object) -> str:
    """Quote the words of a command for a shell."""
    return shlex.join(map(str, words))


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> listed(["red", "green", "blue"], most=2)
    'red, green and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown


def cause_of(error: BaseException) -> str:
    """The answer of the network or the disk, below the words that libraries put around it.

    >>> cause_of(ValueError("no room"))
    'no room'
    """
    innermost, each = error, error.__cause__ or error.__context__
    while each is not None:
        innermost = each if isinstance(each, OSError) else innermost
        each = each.__cause__ or each.__context__
    return str(innermost).partition("\n")[0]


def tell(text: str) -> None:
    """Print a message to stderr; stdout is for results."""
    print(f"onefold: {text}", file=sys.stderr)

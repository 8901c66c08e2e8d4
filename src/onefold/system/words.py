"""How messages count things and list names."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["counted", "listed"]


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "device"), counted(5000, "class")
    ('1 device', '5,000 classes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> listed(["red", "green", "blue"], most=2)
    'red, green and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown

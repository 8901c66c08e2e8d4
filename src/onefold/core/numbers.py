"""Checks numbers and choices that a user gives, before any work begins."""

from __future__ import annotations

import math
from typing import get_args

__all__ = ["check_choice", "check_positive", "check_seconds", "check_whole"]

MOST_S = 24 * 86_400
"""24 days: poll() and its like take milliseconds in 31 bits, which is 24.8 days at most."""


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse a value that is none of those of a `typing.Literal`.

    Raises:
        ValueError: it is none of them.
    """
    if value not in get_args(choices):
        listed = ", ".join(f'"{choice}"' for choice in get_args(choices))
        raise ValueError(f"expected {name} to be one of {listed}, got {value!r}")


def check_seconds(name: str, value: object) -> float:
    """Refuse a time limit that is not positive, or too long to wait for.

    Args:
        name: name of the option, for the message.
        value: the limit in seconds.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not above 0, or is above `MOST_S`.

    >>> check_seconds("timeout_s", 2.5)
    2.5
    """
    seconds = _above_zero(name, value)
    if seconds > MOST_S:
        raise ValueError(
            f"expected {name} to be finite and at most {MOST_S} s ({MOST_S // 86_400} days), got "
            f"{seconds}"
        )
    return seconds


def check_whole(name: str, value: object, *, least: int, most: int = 2**63 - 1) -> int:
    """Refuse a value that is not a whole number, or is out of bounds.

    Raises:
        TypeError: the value is not a whole number.
        ValueError: the value is less than ``least`` or more than ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
    if value > most:
        raise ValueError(f"expected {name} of at most {most}, got {value}")
    return value


def check_positive(name: str, value: object) -> None:
    """Refuse a value that is not a finite number above 0.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not above 0, or is infinite.
    """
    if math.isinf(_above_zero(name, value)):
        raise ValueError(f"expected {name} to be finite, got {value}")


def _above_zero(name: str, value: object) -> float:
    # A bool is an int to Python, and never meant as one here.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    # `not >` rather than `<=`: only so is NaN refused as well.
    if not value > 0:
        raise ValueError(f"expected {name} to be more than 0, got {value}")
    return value

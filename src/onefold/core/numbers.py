"""Checks of numbers and choices that a user passes, before any work begins."""

from __future__ import annotations

import math
from typing import get_args

__all__ = ["check_choice", "check_positive", "check_seconds", "check_whole"]

MOST_S = 24 * 86_400
"""24 days: poll() and the like take a 31-bit number of milliseconds, at most 24.8 days."""


def check_choice(name: str, value: object, choices: object) -> None:
    """Check that a value is one of the choices of a `typing.Literal`.

    Raises:
        ValueError: the value is none of them.
    """
    if value not in get_args(choices):
        listed = ", ".join(f'"{choice}"' for choice in get_args(choices))
        raise ValueError(f"{name} must be one of {listed}, but got {value!r}")


def check_seconds(name: str, value: object) -> float:
    """Check that a time limit is positive and not too long for the system's timers.

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
            f"{name} must be finite and at most {MOST_S} s ({MOST_S // 86_400} days), but got "
            f"{seconds}"
        )
    return seconds


def check_whole(name: str, value: object, *, least: int, most: int = 2**63 - 1) -> int:
    """Check that a value is an integer within bounds.

    Raises:
            TypeError: the value is not an integer.
        ValueError: the value is less than ``least`` or more than ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, but got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, but got {value}")
    return value


def check_positive(name: str, value: object) -> None:
    """Check that a value is a finite number above 0.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not above 0, or is infinite.
    """
    if math.isinf(_above_zero(name, value)):
        raise ValueError(f"{name} must be finite, but got {value}")


def _above_zero(name: str, value: object) -> float:
    # Python treats a bool as an int, but here it is a mistake.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, but got {value!r}")
    # `not >` instead of `<=`, so that NaN is rejected too.
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0, but got {value}")
    return value

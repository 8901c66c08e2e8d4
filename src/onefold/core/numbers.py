"""Numbers that a user gives, looked at before any work begins."""

from __future__ import annotations

import math

__all__ = ["MOST_S", "check_positive", "check_seconds", "check_whole"]

MOST_S = 24 * 86_400
"""24 days: what the system waits for is counted in milliseconds of 31 bits, 24.8 days at most."""


def check_seconds(name: str, value: object) -> float:
    """Refuse a time limit that is no limit.

    Args:
        name: of the option, for the message.
        value: seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is not more than 0, or more than `MOST_S`.

    >>> check_seconds("timeout_s", 2.5)
    2.5
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    if not value > 0:
        raise ValueError(f"expected {name} to be more than 0, got {value}")
    if value > MOST_S:
        raise ValueError(
            f"expected {name} to be finite and at most {MOST_S} s ({MOST_S // 86_400} days), got "
            f"{value}"
        )
    return value


def check_whole(name: str, value: object, *, least: int, most: int) -> int:
    """Refuse what is no whole number, or out of bounds.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than ``least`` or more than ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
    if value > most:
        raise ValueError(f"expected {name} of at most {most}, got {value}")
    return value


def check_positive(name: str, value: object) -> None:
    """Refuse what is no finite number above 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is not more than 0, or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    if not value > 0:
        raise ValueError(f"expected {name} to be more than 0, got {value}")
    if math.isinf(value):
        raise ValueError(f"expected {name} to be finite, got {value}")

"""The bounds of a time limit, the same wherever a user gives one."""

from __future__ import annotations

__all__ = ["MOST_S", "check_seconds"]

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

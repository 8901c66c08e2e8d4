"""Formats numbers, times and names for people."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime

from markupsafe import Markup, escape

from onefold_jobs.scores import is_share

__all__ = [
    "NOTHING",
    "amount",
    "breakable",
    "duration",
    "is_share",
    "option",
    "percent",
    "plain",
    "score",
    "speed",
    "when",
]

NOTHING = "–"  # noqa: RUF001 (a dash that is as wide as a digit)
"""Placeholder for a number that is missing or not finite."""


def plain(value: float) -> str:
    """Format a number with four digits.

    >>> plain(0.123456), plain(12345678.0), plain(float("nan"))
    ('0.1235', '1.235e+07', '–')
    """
    return f"{value:.4g}" if math.isfinite(value) else NOTHING


def breakable(name: object) -> Markup:
    """Let a name break after its separators, because a break within a word is hard to read.

    >>> breakable("golden_retriever<"), breakable("BasalCell")
    (Markup('golden_<wbr>retriever&lt;'), Markup('Basal<wbr>Cell'))
    """
    ends = re.compile("(?<=[_/])(?=[^_/])|(?<=[a-z])(?=[A-Z])")
    return Markup(ends.sub("<wbr>", escape(str(name))))


def percent(share: float) -> str:
    """Format a fraction in percent; nonzero fractions never look like 0.

    >>> percent(0.1234), percent(0.0004), percent(1.0)
    ('12.3%', '<0.1%', '100.0%')
    """
    if not math.isfinite(share):
        return NOTHING
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def score(name: str, value: float) -> str:
    """Format a test score: fractions in percent, others as plain numbers.

    >>> score("accuracy", 0.61), score("rmse", 0.5812345)
    ('61.0%', '0.5812')
    """
    return percent(value) if is_share(name) else plain(value)


def speed(samples_per_s: float) -> str:
    """Format a training speed, without its unit.

    >>> speed(61.96), speed(12345.6)
    ('62.0', '12,346')
    """
    if not math.isfinite(samples_per_s):
        return NOTHING
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.1f}"


def duration(time_s: float) -> str:
    """Format a duration in its two largest units.

    >>> duration(6.24), duration(80.1), duration(7260), duration(200_000)
    ('6.2 s', '1 min 20 s', '2 h 1 min', '2 d 7 h')
    """
    if not math.isfinite(time_s):
        return NOTHING
    # Above this, one decimal would round to "60.0 s".
    if time_s < 59.95:
        return f"{time_s:.1f} s"
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def when(moment: object) -> str:
    """Format a time in ISO 8601.

    >>> when("2026-11-21T14:02:03+00:00")
    '2026-11-21 14:02 UTC'
    """
    try:
        parsed = datetime.fromisoformat(str(moment))
        # Without a time zone, the moment is unknown: show the time as it is, without UTC.
        if parsed.tzinfo is None:
            return f"{parsed:%Y-%m-%d %H:%M}"
        return f"{parsed.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    # OverflowError: in UTC, it is before the year 1 or after 9999.
    except (OverflowError, ValueError):
        return NOTHING


def amount(count: object) -> str:
    """Format an integer, if it is known.

    >>> amount(11173962), amount(None)
    ('11,173,962', '–')
    """
    return f"{count:,}" if isinstance(count, int) and count >= 0 else NOTHING


def option(value: object) -> str:
    """Format an option's value as in its file, but strings without quotes.

    >>> option("adam"), option(True), option([1, 2])
    ('adam', 'true', '[1, 2]')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

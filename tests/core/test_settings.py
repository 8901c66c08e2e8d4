"""What a user chose for a run, checked before any work begins."""

from __future__ import annotations

import math
from typing import Any

import pytest

from onefold.core.settings import Settings
from tests.tables import for_each

CHOSEN: dict[str, Any] = {
    "shards": 4,
    "seed": 0,
    "clip_norm": None,
    "deterministic": True,
    "timeout_s": 5.0,
    "threads": None,
}


@for_each(
    "chosen",
    [
        {"shards": 2**31, "seed": -(2**63), "clip_norm": 5e-324},
        {"shards": 1, "seed": 2**63 - 1, "threads": 1, "clip_norm": 3},
    ],
)
def test_what_can_be_is_kept(chosen: dict[str, Any]) -> None:
    settings = Settings(**{**CHOSEN, **chosen})
    assert all(getattr(settings, name) == value for name, value in chosen.items())


@for_each(
    ("name", "value", "words"),
    [
        ("shards", 0, "^expected shards of at least 1, got 0"),
        ("shards", 2**31 + 1, "^expected shards of at most 2147483648"),
        ("seed", 2**63, "^expected seed of at most"),
        ("seed", -(2**63) - 1, "^expected seed of at least"),
        ("threads", 0, "^expected threads of at least 1"),
        ("clip_norm", 0.0, "^expected clip_norm to be more than 0"),
        ("clip_norm", -1.0, "^expected clip_norm to be more than 0"),
        ("clip_norm", math.nan, "^expected clip_norm to be more than 0, got nan"),
        ("clip_norm", math.inf, "^expected clip_norm to be finite"),
        ("shards", 4.0, "^expected shards to be a whole number, got 4.0"),
        ("shards", True, "^expected shards to be a whole number, got True"),
        ("shards", None, "^expected shards to be a whole number"),
        ("seed", "7", "^expected seed to be a whole number, got '7'"),
        ("threads", 1.5, "^expected threads to be a whole number"),
        ("clip_norm", "1", "^expected clip_norm to be a number"),
        ("clip_norm", True, "^expected clip_norm to be a number"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Settings(**{**CHOSEN, name: value})

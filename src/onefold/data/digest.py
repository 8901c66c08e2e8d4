"""Digests data sets, so that a resumed run notices when its samples are no longer the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["digest_of"]


def digest_of(*parts: Any, size_bytes: int = 8) -> str:
    """Digest texts, numbers, and lists of these; 8 bytes give 16 hexadecimal digits.

    >>> digest_of(["a.png", "b.png"], [0, 1])
    '0ef90b3a28133b26'
    """
    # As JSON, whose brackets and quotes mark where each text ends: joined texts ["ab", "c"] and
    # ["a", "bc"] would digest alike. Its default escapes also take names that are not UTF-8.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=size_bytes).hexdigest()

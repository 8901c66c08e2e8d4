"""A digest of a data set: the same for the same samples, so that a run can tell another one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["digest_of"]


def digest_of(*parts: Any, size_bytes: int = 8) -> str:
    """Hexadecimal digits over texts, numbers, and lists of these; 16 for the usual 8 bytes.

    >>> digest_of(["a.png", "b.png"], [0, 1])
    '0ef90b3a28133b26'
    """
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=size_bytes).hexdigest()

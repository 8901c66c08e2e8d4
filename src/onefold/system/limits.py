"""Says what was wanted where the system refuses it, and which of its limits holds."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["naming_limits"]

_FULL = (
    "Name a folder on a larger disk by --home or ONEFOLD_HOME; `onefold plan` shows how large a "
    "model becomes there"
)
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "The limit for the size of files holds for it (ulimit -f)",
    errno.ENOMEM: "The limits for memory (ulimit -v) and for the number of mappings hold for it",
}


@contextmanager
def naming_limits(wanted: str) -> Iterator[None]:
    """Have an error of the system inside this block say what was wanted, and what to do.

    Args:
        wanted: what follows "expected".

    Raises:
        OSError: the same one, in these words.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        advice = f". {_ADVICE[number]}" if number in _ADVICE else ""
        raise OSError(number, f"expected {wanted}, got: {error.strerror}{advice}") from error

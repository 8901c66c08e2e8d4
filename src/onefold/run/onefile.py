"""Recognises errors that come of every process of a run writing the same file."""

from __future__ import annotations

import errno

__all__ = ["advice_on_one_file"]

_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.EAGAIN, errno.EBUSY, errno.ETXTBSY}
"""Somebody else has made it, put something into it, locked it or uses it."""


def advice_on_one_file(error: BaseException, processes: int) -> str:
    """Say what to do where another process may have come first; empty for all other errors.

    Args:
        error: what ended the script.
        processes: how many processes run it.
    """
    if processes < 2 or not isinstance(error, OSError) or error.filename is None:
        return ""
    # A name that was renamed away before, by whoever was faster.
    moved = error.errno == errno.ENOENT and error.filename2 is not None
    if error.errno not in _IN_THE_WAY and not moved:
        return ""
    return (
        f"all {processes} processes of this run execute the script. If each of them writes "
        f"{error.filename}, let the lead alone do it, under `if trainer.is_lead:`, and have the "
        f"others wait in trainer.barrier() where they read it afterwards"
    )

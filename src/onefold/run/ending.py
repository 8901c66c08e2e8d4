"""How a script ends that is asked to stop, or that fails: what then still has to be said."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from onefold.system.words import message_of

__all__ = ["Stopped", "is_failing", "only_noting"]

_log = logging.getLogger("onefold")


class Stopped(SystemExit):
    """The run was asked to stop, and has been saved; raised in a block of the script's."""


@contextmanager
def only_noting() -> Iterator[None]:
    """If the script is failing already, only log what is raised: the user must see the first."""
    failing = is_failing()
    try:
        yield
    except Exception as error:
        if not failing:
            raise
        _log.error(
            "the end of the run was not saved: %s: %s", type(error).__name__, message_of(error)
        )


def is_failing() -> bool:
    """Whether an exception is being handled that ends the script in error."""
    error = sys.exc_info()[1]
    ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
    return error is not None and not ends_well

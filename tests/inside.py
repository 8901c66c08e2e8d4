"""What tests read of a trainer that users do not see, in one place: a change of it is one here."""

from typing import Any

from onefold import Trainer

__all__ = ["engine_in", "run_in", "session_in"]


def session_in(trainer: Trainer) -> Any:
    """The run that stands behind a trainer."""
    return trainer._session


def run_in(trainer: Trainer) -> Any:
    """What the tools of a trainer see."""
    return session_in(trainer).run


def engine_in(trainer: Trainer) -> Any:
    """What computes its steps."""
    return session_in(trainer).engine

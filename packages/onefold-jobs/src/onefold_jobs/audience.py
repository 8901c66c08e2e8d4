"""The reader of a run's messages: the user of a command, or of a Python function in a notebook.

A function takes options as keyword arguments. All messages are written for commands, so `tell` and
`spelled` replace ``--batch-size 32`` by ``batch_size=32`` for its user. Shell commands stay.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from onefold.cli import tell as tell_user

__all__ = ["Audience", "audience", "speaking_to", "spelled", "tell"]

_WORD = r"'[^']*'|[\w./~+=,-]*[\w/~]"
_OPTION = re.compile(
    rf"(?P<command>onefold [a-z]+(?: [a-z]+)?:?(?: --[a-z-]+(?: (?:{_WORD}))?)+)|"
    rf"(?<![\w-])--(?P<name>[a-z][a-z-]*)(?: (?P<value>{_WORD})(?P<colon>:)?)?"
)
_NUMBER = re.compile(r"\d[\d.]*(e-?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """The reader of a run's messages."""

    options: type | None = None
    """Class of the options that a function takes as keyword arguments; None for a command."""
    notebook: bool = False
    """Whether the messages appear in a notebook."""


_COMMAND = Audience()
_AUDIENCE = ContextVar("audience", default=_COMMAND)


def audience() -> Audience:
    """Return the reader of the messages that are written now."""
    return _AUDIENCE.get()


@contextmanager
def speaking_to(reader: Audience) -> Iterator[None]:
    """Write all messages inside the block for this reader."""
    token = _AUDIENCE.set(reader)
    try:
        yield
    finally:
        _AUDIENCE.reset(token)


def tell(text: str) -> None:
    """Print a message to stderr, as `onefold.cli.tell` does."""
    tell_user(spelled(text))


def spelled(text: str) -> str:
    """Spell the options of a message for its reader.

    >>> from onefold_jobs.options import TrainOptions
    >>> with speaking_to(Audience(options=TrainOptions)):
    ...     print(spelled("--lr auto: use --resume, more --epochs, or --batch-size 32"))
    lr="auto": use resume=True, more epochs=, or batch_size=32
    """
    options = audience().options
    if options is None:
        return text
    hints = typing.get_type_hints(options)
    return _OPTION.sub(lambda found: _spelled(found, hints), text)


def _spelled(found: re.Match[str], hints: dict[str, object]) -> str:
    name, value = (found["name"] or "").replace("-", "_"), found["value"] or ""
    if name not in hints:
        return found[0]
    rest = found[0].removeprefix(f"--{found['name']}")
    if hints[name] is bool:
        return f"{name}=True{rest}"
    choices = {each for hint in _parts(hints[name]) for each in typing.get_args(hint)}
    # After these, other words belong to the sentence: "more --epochs or a larger --batch-size".
    if not (found["colon"] or value in choices | {"auto"} or re.search(r"[\d/'_]", value)):
        return f"{name}={rest}"
    given = value if _NUMBER.fullmatch(value) or "'" in value else f'"{value}"'
    return f"{name}={given}{found['colon'] or ''}"


def _parts(hint: object) -> tuple[object, ...]:
    return hint, *typing.get_args(hint)

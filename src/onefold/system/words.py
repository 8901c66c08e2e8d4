"""How messages count things and list names, and where those to the user of a command go.

Whoever made a file chose its names and texts, and a terminal obeys control characters in them. So
`visible` spells these out wherever text leaves: here, in the screens of commands
(`onefold.cli.Screen`), and in messages of the logger ``onefold``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

__all__ = [
    "counted",
    "in_shell",
    "listed",
    "message_of",
    "script_line",
    "seconds_of",
    "show_traceback",
    "tell",
    "visible",
    "words_of_failure",
]

_LONGEST_MESSAGE = 4000
_HIDDEN, _JOINERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}, "\u200c\u200d"
"""Categories of characters that a terminal obeys or does not show; and two that words need."""
_LAYOUT = "\n\t"
"""What messages of several lines have of these."""


def visible(text: str, keep: str = "") -> str:
    """Write out control characters, marks of direction, line separators and lone surrogates.

    Args:
        text: of anybody's.
        keep: characters to leave as they are.

    >>> print(visible("one\\ttwo\\x1b[2J\\u202e"))
    one\\ttwo\\x1b[2J\\u202e
    """
    if text.isprintable():
        return text
    others = set(text) - set(keep + _JOINERS)
    hidden = [each for each in others if unicodedata.category(each) in _HIDDEN]
    return text.translate({ord(each): _spelled(each) for each in hidden})


def _spelled(letter: str) -> str:
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # so Python holds bytes of a name that are not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    # As shells and JSON read it, to which two digits stand for a byte.
    return f"\\u{code:04x}" if 0x80 <= code <= 0xFF else letter.encode("unicode_escape").decode()


class _Spelling(logging.Filter):
    """Spells out what a message of a logger has of control characters."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (shown := visible(text, _LAYOUT)) != text:
            record.msg, record.args = shown, ()
        return True


for _name in ("onefold", "onefold.waiting"):
    logging.getLogger(_name).addFilter(_Spelling())


def seconds_of(time: str) -> float:
    """Read a time; 0 if it is none.

    >>> seconds_of("90s"), seconds_of("1h30m"), seconds_of("30")
    (90.0, 5400.0, 0.0)
    """
    parts = re.fullmatch(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", time, re.ASCII)
    numbers = parts.groups(default="0") if parts else ("0", "0", "0")
    return float(sum(int(n) * s for n, s in zip(numbers, (3600, 60, 1), strict=True)))


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "device"), counted(5000, "class")
    ('1 device', '5,000 classes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def in_shell(*words: object) -> str:
    """Words of a command as a shell takes them: every command in a message is made by it.

    >>> in_shell("predict", "my runs/a", "PATH")
    "predict 'my runs/a' PATH"
    >>> print(in_shell("a\\nonefold: done"))
    $'a\\nonefold: done'
    """
    return " ".join(map(_quoted, map(str, words)))


def _quoted(word: str) -> str:
    # A shell reads what is spelled out in these quotes alone.
    plain = word.replace("\\", r"\\").replace("'", r"\'")
    return shlex.quote(word) if visible(word) == word else f"$'{visible(plain)}'"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> listed(["red", "green", "blue"], most=2)
    'red, green and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown


def message_of(error: BaseException) -> str:
    """The message of an exception of anybody's: of no great length, and what any file can hold.

    >>> message_of(ValueError("no room"))
    'no room'
    """
    try:
        text = str(error)
    # It must not take the place of the error whose message it is.
    except Exception as failed:
        text = f"its message cannot be shown, as its own str() raised {type(failed).__name__}"
    return text[:_LONGEST_MESSAGE].encode(errors="backslashreplace").decode()


def tell(text: str, screen: TextIO | None = None) -> None:
    """Print a message of onefold's own; stdout is left to the script."""
    print(f"onefold: {visible(text, _LAYOUT)}", file=screen or sys.stderr, flush=True)


def show_traceback(text: str) -> None:
    """Print the traceback of a process that has failed; empty for none."""
    print(visible(text, _LAYOUT), file=sys.stderr, end="")


def words_of_failure(failure: BaseException, step: int) -> str:
    """What the other devices are told of the end of one.

    >>> words_of_failure(SystemExit(0), 3)
    'ended by sys.exit(0) in step 3, which all devices must do alike or none'
    """
    if isinstance(failure, SystemExit):
        return (
            f"ended by sys.exit({message_of(failure)}) in step {step}, which all devices must do "
            f"alike or none"
        )
    return f"failed in step {step}: {type(failure).__name__}: {message_of(failure)}"


_OURS = str(Path(__file__).parent.parent)


def script_line() -> str:
    """The file and line of the innermost caller that is not part of onefold.

    >>> script_line().endswith(":1")
    True
    """
    frame = sys._getframe(1)
    # A block is entered and left by way of contextlib, a mapping is read by frozen modules, and a
    # model is called by way of PyTorch.
    torch = str(getattr(sys.modules.get("torch"), "__path__", [_OURS])[0])
    ours = (_OURS, contextlib.__file__, "<frozen ", torch)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

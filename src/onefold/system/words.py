"""Formats counts, lists and errors for messages, and prints messages to the user of a command.

File names and other texts may contain control characters, which a terminal obeys. `visible` escapes
them wherever text is shown: in this module, in the output of commands (`onefold.cli.Screen`), and
in messages of the logger ``onefold``.
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
    "program",
    "script_line",
    "seconds_of",
    "show_traceback",
    "tell",
    "visible",
    "words_of_failure",
]

_LONGEST_MESSAGE = 4000
_HIDDEN, _JOINERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}, "\u200c\u200d"
"""Unicode categories that a terminal obeys or hides, and two joiners that some languages need."""
_LAYOUT = "\n\t"
"""Control characters that messages of several lines use."""


def visible(text: str, keep: str = "") -> str:
    """Escape control characters, direction marks, line separators and lone surrogates.

    Args:
        text: any text.
        keep: characters not to escape.

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
    if 0xDC80 <= code <= 0xDCFF:  # Python's form of a byte in a name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    # Four digits, because two stand for a byte in shells and JSON.
    return f"\\u{code:04x}" if 0x80 <= code <= 0xFF else letter.encode("unicode_escape").decode()


class _Spelling(logging.Filter):
    """Escapes the control characters in a logger's messages."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (shown := visible(text, _LAYOUT)) != text:
            record.msg, record.args = shown, ()
        return True


for _name in ("onefold", "onefold.waiting"):
    logging.getLogger(_name).addFilter(_Spelling())


def seconds_of(time: str) -> float:
    """Convert a duration to seconds; 0 if the text is not a duration.

    >>> seconds_of("90s"), seconds_of("1h30m"), seconds_of("30")
    (90.0, 5400.0, 0.0)
    """
    parts = re.fullmatch(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", time, re.ASCII)
    numbers = parts.groups(default="0") if parts else ("0", "0", "0")
    return float(sum(int(n) * s for n, s in zip(numbers, (3600, 60, 1), strict=True)))


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> counted(1, "device"), counted(5000, "class")
    ('1 device', '5,000 classes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def in_shell(*words: object) -> str:
    """Quote the words of a command for the shell. Every command in a message is built by this.

    >>> in_shell("predict", "my runs/a", "PATH")
    "predict 'my runs/a' PATH"
    >>> print(in_shell("a\\nonefold: done"))
    $'a\\nonefold: done'
    """
    return " ".join(map(_quoted, map(str, words)))


def _quoted(word: str) -> str:
    # A shell resolves escapes only inside these quotes.
    plain = word.replace("\\", r"\\").replace("'", r"\'")
    return shlex.quote(word) if visible(word) == word else f"$'{visible(plain)}'"


def listed(names: Iterable[str], most: int = 5) -> str:
    """List the first names and the number of the others.

    >>> listed(["red", "green", "blue"], most=2)
    'red, green and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown


def message_of(error: BaseException) -> str:
    """Return the message of any exception, shortened and safe to write to any file.

    >>> message_of(ValueError("no room"))
    'no room'
    """
    try:
        text = str(error)
    # A failing __str__ must not replace the error whose message is requested.
    except Exception as failed:
        text = f"its message cannot be shown, because str() raised {type(failed).__name__}"
    return text[:_LONGEST_MESSAGE].encode(errors="backslashreplace").decode()


def tell(text: str, screen: TextIO | None = None) -> None:
    """Print a message of onefold to stderr; stdout belongs to the script."""
    print(f"onefold: {visible(text, _LAYOUT)}", file=screen or sys.stderr, flush=True)


def show_traceback(text: str) -> None:
    """Print the traceback of a failed process; nothing if it is empty."""
    print(visible(text, _LAYOUT), file=sys.stderr, end="")


def words_of_failure(failure: BaseException, step: int) -> str:
    """Describe the failure of one device to the others.

    >>> words_of_failure(SystemExit(0), 3)
    'ended by sys.exit(0) in step 3; either all devices must call it, or none'
    """
    if isinstance(failure, SystemExit):
        return (
            f"ended by sys.exit({message_of(failure)}) in step {step}; either all devices must "
            f"call it, or none"
        )
    return f"failed in step {step}: {type(failure).__name__}: {message_of(failure)}"


def program() -> list[str]:
    """Return this program's file and arguments; empty without a file, as in a notebook.

    Messages and records use this instead of `sys.argv`, which in a notebook names its kernel.
    """
    return sys.argv if hasattr(sys.modules["__main__"], "__file__") else []


_OURS = str(Path(__file__).parent.parent)


def script_line() -> str:
    """Return the file and line of the innermost caller outside onefold.

    >>> script_line().endswith(":1")
    True
    """
    frame = sys._getframe(1)
    # Skip contextlib, which enters and leaves blocks, frozen modules, which read mappings, and
    # PyTorch, which calls models.
    torch = str(getattr(sys.modules.get("torch"), "__path__", [_OURS])[0])
    ours = (_OURS, contextlib.__file__, "<frozen ", torch)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

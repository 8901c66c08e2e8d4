"""Reads texts and their labels from TSV files: on each line a text, a tab and a label, no header.

A line that is wrong is reported, and never mended by guessing; whether the others are used is the
caller's decision (`onefold_jobs.data.files.refuse`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike
from pathlib import Path

from onefold.errors import DataError
from onefold.files import open_plain
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label, TaskName, read_label, shortened
from onefold_jobs.words import in_shell

__all__ = ["LONGEST_LINE_BYTES", "Line", "decoded", "none_of", "read_lines", "read_tsv"]

LONGEST_LINE_BYTES = 1 << 20
"""Of a text and its label; a file without line ends would be read into memory as one line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One sample of a file."""

    text: str
    """As it stands in the file; the path of a picture in a table of pictures."""
    label: Label
    """Without the spaces around it."""
    line_number: int
    """Counted from 1; of a row in a file without lines, its number."""


def read_tsv(
    path: str | PathLike[str], task: TaskName = "single-label"
) -> tuple[list[Line], list[BadFile]]:
    """Read one file: UTF-8 with or without a byte order mark, lines ended by LF or CRLF.

    Args:
        path: the file; blank lines at its end are left out.
        task: what the labels are.

    Returns:
        The valid lines, and what is wrong with the others, both in the file's order.

    Raises:
        OSError: the file cannot be read.
        DataError: the file has no valid line, or is UTF-16.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "train.tsv"
        >>> _ = file.write_bytes(b"a fine film\\t1\\nno label\\n")
        >>> lines, bad = read_tsv(file)
        >>> lines
        [Line(text='a fine film', label='1', line_number=1)]
        >>> bad[0].reason
        "expected a text, a tab and a label, got no tab in 'no label'"
    """
    path = Path(path)
    lines, bad = [], []
    for number, content in enumerate(read_lines(path), start=1):
        try:
            lines.append(_read_line(content, number, task))
        except ValueError as wrong:
            bad.append(BadFile(path, str(wrong), number))
    if not lines:
        raise DataError(f"{path}: expected lines of text, tab and label, got {none_of(bad)}")
    return lines, bad


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends, except blank ones at the end of the file.

    A line that is too long is cut, to a length that `decoded` still refuses.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is UTF-16.
    """
    # Held back until a line with text follows, and so never yielded at the end of the file.
    blank: list[bytes] = []
    with open_plain(path, follow=True) as file:
        # As UTF-8 every single line would be bad, and none of the reports would say why:
        # spreadsheets write UTF-16 as "Unicode text".
        if file.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(
                f"{path}: expected text in UTF-8, this is UTF-16: convert it, such as with iconv "
                f"-f UTF-16 -t UTF-8 {in_shell(path)} > utf8{path.suffix}"
            )
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.read(3)
        # Three bytes more: the two of CRLF, and one that shows that the line is too long.
        while line := file.readline(LONGEST_LINE_BYTES + 3):
            if not line.endswith(b"\n"):
                _skip_rest(file)
            # Not rstrip: a CR or a space before the end belongs to the text.
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            blank.append(line)
            if line.strip():
                yield from blank
                blank.clear()


def _skip_rest(file: BufferedReader) -> None:
    """Skip the rest of a line of which only the beginning has been read."""
    # In pieces: the rest may be as large as the file.
    while (rest := file.readline(LONGEST_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass


def _read_line(content: bytes, number: int, task: TaskName) -> Line:
    """Read one line.

    Raises:
        ValueError: the line is not a text, a tab and a label.
    """
    text, label = _cut(decoded(content))
    if number == 1 and label.casefold() == "label":
        raise ValueError(
            f"expected no header, got {shortened(content.decode())}: remove this line, or name its "
            f"columns with --text-column and --label-column"
        )
    return Line(text, read_label(label, task), number)


def decoded(content: bytes) -> str:
    """Decode a line of `read_lines`.

    Raises:
        ValueError: the line is too long, is not UTF-8, or holds a NUL.
    """
    if len(content) > LONGEST_LINE_BYTES:
        raise ValueError(f"expected a line of at most {LONGEST_LINE_BYTES:,} bytes, got more")
    try:
        line = content.decode()
    except UnicodeDecodeError as wrong:
        byte = f"{content[wrong.start]:02x}"
        raise ValueError(
            f"expected UTF-8, got {byte} as byte {wrong.start + 1}: if it is Latin-1, iconv -f "
            f"WINDOWS-1252 -t UTF-8 converts the file"
        ) from None
    # Valid UTF-8, but in practice the mark of a binary file.
    if "\0" in line:
        raise ValueError(f"expected text, got a NUL as character {line.index(chr(0)) + 1}")
    return line


def _cut(line: str) -> tuple[str, str]:
    """Divide a line into text and label."""
    text, *labels = line.split("\t")
    if len(labels) != 1:
        count = f"{len(labels)} tabs" if labels else "no tab"
        raise ValueError(f"expected a text, a tab and a label, got {count} in {shortened(line)}")
    label = labels[0].strip()
    for part, place in ((text.strip(), "text before"), (label, "label after")):
        if not part:
            raise ValueError(f"expected a {place} the tab, got nothing in {shortened(line)}")
    return text, label


def none_of(bad: list[BadFile]) -> str:
    """Describe a file of which nothing can be used."""
    if not bad:
        return "an empty file"
    return f"none; of {len(bad)} bad ones the first is line {bad[0].line}: {bad[0].reason}"

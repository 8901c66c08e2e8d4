"""Reads samples from TSV files and from tables: CSV, JSONL, Parquet, and saved ``datasets``.

A TSV file has a text, a tab and a label on each line, and no header; the other formats have
columns. CSV and JSONL are read line by line, like TSV. pyarrow would be faster, but it repairs
quotes, rounds numbers, and rejects a whole file because of one bad line. It reads the other formats
(extra ``tables``): the folder that ``Dataset.save_to_disk`` writes contains Arrow files, so
``datasets`` itself is not required. A bad row is reported, and never repaired by guessing.

Note: quotes
------------
In CSV, quoted text may contain line breaks, so an unclosed quote would swallow the rows after it.
Such a file is rejected as a whole, because skipping one row would skip all of those.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader, TextIOWrapper
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from onefold.cli import in_shell, listed
from onefold.errors import DataError
from onefold.files import open_plain, parse_json
from onefold_jobs import require
from onefold_jobs.data.columns import Columns, part_column, rejoined, usual_column
from onefold_jobs.data.files import BadFile, read_json, readable
from onefold_jobs.data.labels import Label, TaskName, read_label, shortened

__all__ = [
    "TABLES",
    "Line",
    "column_names",
    "decoded",
    "is_table",
    "none_of",
    "open_table",
    "part_notes",
    "read_lines",
    "read_table",
    "read_tsv",
]

TABLES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of tables; a TSV file is a table if its columns are named."""
_DELIMITERS = ",;\t|"
_DATASET = "state.json"
"""File that ``datasets`` writes next to the Arrow files of a dataset."""
_HEADER = "remove this line, or name its columns with --text-column and --label-column"
_SHOWN = 30
"""Maximum number of columns that an error names."""
_MOST_JSON_BYTES = 1 << 24
_AS_CSV = "save it as CSV (UTF-8)"
_BINARY = (
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip"),
    (b"\xfd7zXZ\0", "an xz file", "unpack it with unxz"),
    (b"PK\x03\x04", "a zip archive, such as a workbook", f"{_AS_CSV}, or unpack it"),
    (b"\xd0\xcf\x11\xe0", "a workbook of Excel", _AS_CSV),
)
"""Beginnings of files that are not text, with their kinds and remedies."""
_SEP = re.compile(rb"(?i)sep=(.)")
"""First line by which Excel finds the separator of cells."""
_SWITCHES = {
    **dict.fromkeys(("-1", "-1.0", "0", "0.0", "False"), False),
    **dict.fromkeys(("1", "1.0", "True"), True),
}

Row = tuple[int, dict[str, Any] | str]
"""Number of a row, and its cells by column, or what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Table:
    """An open table: its columns, and its rows, which can be read once."""

    path: Path
    names: list[str]
    rows: Iterator[Row]
    delimiter: str = ","
    """Delimiter of a CSV file."""
    has_sep: bool = False
    """Whether a line such as ``sep=;`` precedes the header."""
    numbered: bool = False
    """Whether columns may be named by their numbers, because a CSV file may lack names."""


def is_table(path: Path) -> bool:
    """Whether a path is a file, or a saved dataset, that is read as a table."""
    if path.is_dir():
        return (path / _DATASET).is_file()
    return path.is_file() and path.suffix.lower() in TABLES


def column_names(path: Path) -> list[str]:
    """Read the column names of a table; empty if it cannot be read."""
    with suppress(DataError, OSError):
        return open_table(path).names
    return []


def read_table(
    path: Path, columns: Columns, task: TaskName | None = "single-label"
) -> tuple[list[Line], list[BadFile], Columns]:
    """Read the samples of a table.

    Args:
        path: a file, or a saved dataset.
        columns: roles of the columns.
        task: type of the labels; None accepts any label, or none.

    Returns:
        The valid samples, the bad ones, and the columns with all roles filled in.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is damaged, lacks these columns, or has no valid row.
        LaunchError: pyarrow is required but not installed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "train.csv"
        >>> _ = file.write_text('id,review,label\\n1,"Fine, and long",good\\n2,"Dull",\\n')
        >>> lines, bad, columns = read_table(file, Columns("text"))
        >>> lines
        [Line(text='Fine, and long', label='good', line_number=2)]
        >>> bad[0].reason, columns.sample
        ('expected a label, got nothing', 'review')
    """
    lines: list[Line] = []
    bad: list[BadFile] = []
    no: set[float] = set()
    with _longer_fields():
        table = open_table(path, columns)
        columns = columns._replace(label=tuple(rejoined(columns.label, table.names)))
        columns = _settled(table, columns, task)
        names = columns.samples(table.names)
        for number, cells in table.rows:
            try:
                if isinstance(cells, str):
                    raise ValueError(cells)
                parts = [cells[name] for name in names]
                # Some of several columns, such as title and text, may be empty.
                filled = [each for each in parts if each is not None and str(each).strip()]
                of_kind = (_sample_of(each, columns.kind) for each in filled or parts[:1])
                text = "\n".join(of_kind)
                label = _label_of(cells, columns.label, task, no)
                value = cells[columns.label[0]] if columns.label else ""
                lines.append(Line(text, label, number, value if isinstance(value, str) else ""))
            except ValueError as wrong:
                bad.append(BadFile(path, str(wrong), number))
    if len(no) > 1:
        raise DataError(
            f"{readable(path)}: expected 0 and 1 in the class columns, or -1 and 1, got -1, 0 "
            f"and 1: if one of them means unknown, remove those rows, or write the number that "
            f"it should count as"
        )
    if not lines:
        raise DataError(f"{readable(path)}: expected rows of a table, got {none_of(bad)}")
    return lines, bad, columns


def part_notes(path: Path, columns: Columns, *, tested: bool = False) -> list[str]:
    """Report a column of a table that splits the data, which is not used.

    Args:
        path: path of the table.
        columns: its columns.
        tested: whether there is a test table already.
    """
    with _longer_fields():
        table = open_table(path, columns)
        roles = {*columns.label, *columns.samples(table.names)}
        rows = (cells for _, cells in table.rows if isinstance(cells, dict))
        name = part_column([name for name in table.names if name not in roles], rows)
    advice = "" if tested else "; in onefold train, --dev names a table of the rows to test on"
    return [f"{readable(path)}: column {name} is not used{advice}"] if name else []


def _sample_of(value: object, kind: str) -> str:
    if isinstance(value, dict):
        raise ValueError(
            "expected the path of an image, got the image itself: write the images to files, "
            "and their paths to a column"
        )
    if value is None or not str(value).strip():
        raise ValueError(f"expected {'a text' if kind == 'text' else 'a path'}, got nothing")
    if kind == "text" and not isinstance(value, str):
        raise ValueError(f"expected a text, got {shortened(value)}")
    if len(str(value)) > LONGEST_LINE_BYTES:
        raise ValueError(f"expected a text of at most {LONGEST_LINE_BYTES:,} characters, got more")
    return str(value)


def _label_of(
    cells: dict[str, Any], names: Sequence[str], task: TaskName | None, no: set[float]
) -> Label:
    """Read the label of a row; add the numbers that mean no in its columns to ``no``."""
    if task is None:
        value = cells.get(names[0]) if len(names) == 1 else None
        return "" if value is None else str(value).strip()
    if len(names) == 1:
        return read_label(cells[names[0]], task)
    texts = {name: str(cells[name]).strip() for name in names}
    for name, text in texts.items():
        if text not in _SWITCHES:
            raise ValueError(f"expected 0 or 1 as {name}, got {shortened(cells[name])}")
    no |= {-1.0 if text.startswith("-") else 0.0 for text in texts.values() if not _SWITCHES[text]}
    return tuple(name for name, text in texts.items() if _SWITCHES[text])


def _settled(table: Table, columns: Columns, task: TaskName | None) -> Columns:
    """Find the columns that the user did not name."""
    if len(columns.label) > 1 and task not in ("multi-label", None):
        raise DataError(
            f"--label-column {','.join(columns.label)}: expected one column, got "
            f"{len(columns.label)}: use --task multi-label for one class per column"
        )
    _require(table, columns.label if task else (), "label")
    _require(table, columns.samples(table.names), columns.kind)
    # The other one of two columns is the sample, whatever its name.
    usual = usual_column(table.names, "label")
    others = columns.label or ((usual,) if usual else ())
    sample = columns.sample or _usual(table, columns.kind, others)
    if task is None:
        return columns._replace(sample=sample)
    label = columns.label or (_usual(table, "label", (sample,)),)
    if {*label} & {*columns._replace(sample=sample).samples(table.names)}:
        raise DataError(
            f"{readable(table.path)}: expected the {columns.kind} and the label in two columns, "
            f"got {sample} for both"
        )
    return columns._replace(sample=sample, label=label)


def _usual(table: Table, kind: str, others: Sequence[str]) -> str:
    """Find the single column with a usual name for its role, or the only remaining one."""
    left = [name for name in table.names if name not in others]
    found = left[0] if len(left) == 1 else usual_column(left, kind)
    if not left:
        raise DataError(
            f"{readable(table.path)}: expected two columns, one of them with a {kind}, got only "
            f"{listed(table.names)}"
        )
    if found is None:
        numbers = (
            "; if its first line has no names, name columns by numbers from 1"
            if table.numbered
            else ""
        )
        script = f"; a table of numbers needs a script: onefold init {in_shell(table.path)}"
        raise DataError(
            f"{readable(table.path)}: no single column has a usual name; use --{kind}-column with "
            f"one of its columns, which are {listed(table.names, _SHOWN)}{numbers}"
            f"{'' if kind == 'label' else script}"
        )
    return found


def _require(table: Table, names: Sequence[str], kind: str) -> None:
    for name in names:
        if table.names.count(name) != 1:
            came = f"only {listed(table.names, _SHOWN)}; name another"
            if name in table.names:
                came = f"{table.names.count(name)} of them; rename them, or name another"
            raise DataError(
                f"{readable(table.path)}: expected a column {name!r}, got {came} with "
                f"--{kind}-column"
            )


def open_table(path: Path, columns: Columns = Columns("")) -> Table:  # noqa: B008
    """Open a table, whose rows are read one at a time.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is damaged, or has no column names.
    """
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return _open_arrow(path)
    if path.suffix.lower() in (".json", ".jsonl", ".ndjson"):
        return _open_jsonl(path)
    return _open_csv(path, columns)


class _Decoded(Iterator[str]):
    """The lines of a file for csv; lines that cannot be decoded are recorded."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, read_lines(path)
        self.number = 0
        self.wrong: list[tuple[int, str]] = []

    def __next__(self) -> str:
        content = next(self._lines)
        self.number += 1
        # Raising here would end the reading of all lines.
        try:
            return decoded(content, self._path) + "\n"
        except ValueError as wrong:
            self.wrong.append((self.number, str(wrong)))
            # Keep its quotes, or the rows after it would be parsed differently.
            return content.decode(errors="replace") + "\n"


@contextmanager
def _longer_fields() -> Iterator[None]:
    """Allow csv cells as long as a line; the default limit is an eighth of that."""
    before = csv.field_size_limit(LONGEST_LINE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _open_csv(path: Path, columns: Columns) -> Table:
    line = next(read_lines(path), b"")
    found, first = _SEP.fullmatch(line), line.decode(errors="replace")
    delimiter = found[1].decode(errors="replace") if found else max(_DELIMITERS, key=first.count)
    rows = _csv_rows(path, delimiter, skip=bool(found))
    number, head = next(rows, (0, "expected a line with column names, got an empty file"))
    if isinstance(head, str):
        place = f", line {number}" if number else ""
        raise DataError(f"{readable(path)}{place}: {head}")
    names = [name.strip() for name in head]
    named = [*columns.label, *columns.samples(names)]
    # Column numbers from 1 refer to a file without a header, unless its first line consists of
    # numbers, as pandas writes for columns without names.
    numbers = all(map(str.isdecimal, names)) and set(named) <= set(names)
    if named and all(map(str.isdecimal, named)) and not numbers:
        by_number = {str(number): name for number, name in enumerate(names, start=1)}
        names = [*by_number]
        rows = _csv_rows(path, delimiter, skip=bool(found))
        if _has_names(by_number, columns):
            start, head = next(rows)
            rows = chain([(start, f"expected no header, got {listed(head)}: {_HEADER}")], rows)
    named_rows = ((number, _by_name(names, cells)) for number, cells in rows)
    return Table(path, names, named_rows, delimiter, bool(found), numbered=True)


def _has_names(cells: Mapping[str, str], columns: Columns) -> bool:
    """Whether the cells of the first line, by number, have the usual names of these columns."""
    kinds = [(name, "label") for name in columns.label]
    kinds += [(name, columns.kind) for name in columns.samples([*cells])]
    return all(usual_column([cells.get(name, "")], kind) for name, kind in kinds)


def _by_name(names: Sequence[str], cells: list[str] | str) -> dict[str, Any] | str:
    if isinstance(cells, str):
        return cells
    if len(cells) != len(names):
        return f"expected {len(names)} cells, got {len(cells)} from {shortened(cells[0])} on"
    return dict(zip(names, cells, strict=True))


def _csv_rows(path: Path, delimiter: str, *, skip: bool) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the number of each row's first line, and its cells or what is wrong with it."""
    lines = _Decoded(path)
    if skip:
        next(lines)
    # Strict, or csv would guess a meaning of unmatched quotes.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start = lines.number + 1
        lines.wrong.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.number > start:
                raise DataError(
                    f"{readable(path)}, line {start}: expected a closing quote, got none up to "
                    f"line {lines.number} ({error}): write a quote within quoted text twice"
                ) from error
            expected = (
                f"quotes around a whole cell, or none, and at most {LONGEST_LINE_BYTES:,} bytes"
            )
            yield start, f"expected {expected}: {error}"
            continue
        # An empty line is not a row.
        if lines.wrong or cells:
            yield lines.wrong[0] if lines.wrong else (start, cells)


def _open_jsonl(path: Path) -> Table:
    _, first = next(_jsonl_rows(path), (1, "an empty file"))
    # Read the names from all lines, because the first one may lack keys of others, such as a label.
    found = (cells for _, cells in _jsonl_rows(path) if isinstance(cells, dict))
    # A missing key counts as null, which is reported if the key is needed.
    lacking: dict[str, Any] = {name: None for cells in found for name in cells}
    if not lacking:
        raise DataError(f"{readable(path)}, line 1: {first}")
    rows = _jsonl_rows(path)
    completed = ((n, cells if isinstance(cells, str) else lacking | cells) for n, cells in rows)
    return Table(path, list(lacking), completed)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for number, content in enumerate(read_lines(path), start=1):
        if not content.strip():
            continue
        try:
            line = decoded(content, path)
            value = parse_json(line)
            if not isinstance(value, dict):
                command = f"jq -c '.[]' {in_shell(path)} > lines.jsonl"
                raise ValueError(f"if the file is one list, convert it with {command}")
            yield number, dict(_flat(value))
        except json.JSONDecodeError as wrong:
            yield number, f"expected a JSON object, got {shortened(line)}: {wrong}"
        except ValueError as wrong:
            yield number, f"expected a JSON object: {wrong}"


def _flat(cells: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Name the cells of nested objects by their paths, such as ``review.text``."""
    for name, value in cells.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _open_arrow(path: Path) -> Table:
    """Open a Parquet file, or the Arrow files of a saved dataset."""
    require(f"reading {readable(path)}", "tables", "pyarrow")
    parts = _arrow_parts(path)
    schema = next(parts)
    return Table(path, list(schema.names), _arrow_rows(parts, _class_names(schema)))


def _arrow_parts(path: Path) -> Iterator[Any]:
    """Yield the schema, and then the rows in batches."""
    import pyarrow
    import pyarrow.parquet

    try:
        if not path.is_dir():
            with open_plain(path, follow=True) as file:
                parquet = pyarrow.parquet.ParquetFile(file)
                yield parquet.schema_arrow
                yield from parquet.iter_batches()
            return
        files = read_json(path / _DATASET, _MOST_JSON_BYTES)["_data_files"]
        for number, each in enumerate(files):
            # The list may come from another user: no name may lead out of the folder.
            name = Path(str(each["filename"])).name
            with open_plain(path / name, follow=True) as file:
                stream = pyarrow.ipc.open_stream(file)
                if number == 0:
                    yield stream.schema
                yield from stream
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{readable(path)}: expected a whole table of Parquet or datasets, got {error!r}"
        ) from error


def _arrow_rows(batches: Iterator[Any], named: dict[str, list[str]]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for cells in batch.to_pylist():
            number += 1
            for name, classes in named.items():
                value = cells[name]
                # -1 means an unlabeled sample.
                known = isinstance(value, int) and 0 <= value < len(classes)
                cells[name] = classes[value] if known else None
            yield number, cells


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the class names that ``datasets`` stores for integer columns, by column."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: list(map(str, each["names"]))
            for name, each in features.items()
            if isinstance(each, dict) and each.get("_type") == "ClassLabel"
        }
    return {}


_SEEN_BYTES = 1 << 12
"""Number of bytes that determine the kind of line endings."""
LONGEST_LINE_BYTES = 1 << 20
"""Maximum size of a line; a file without line breaks would be read into memory as one line."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sample of a file."""

    text: str
    """Text as stored in the file, or the path of an image."""
    label: Label
    """Label without surrounding spaces."""
    line_number: int
    """Line number from 1; in a file without lines, the row number."""
    written: str = field(default="", compare=False, repr=False)
    """Text of the label as written; empty for a value with a type, such as a number in JSON."""


def read_tsv(
    path: str | PathLike[str], task: TaskName = "single-label"
) -> tuple[list[Line], list[BadFile]]:
    """Read one file: UTF-8 with or without byte order mark, with LF, CRLF or CR line endings.

    Args:
        path: the file; blank lines at its end are ignored.
        task: type of the labels.

    Returns:
        The valid lines and the bad ones, both in the file's order.

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
            lines.append(_read_line(decoded(content, path), number, task))
        except ValueError as wrong:
            bad.append(BadFile(path, str(wrong), number))
    if not lines:
        raise DataError(f"{path}: expected lines of text, tab and label, got {none_of(bad)}")
    return lines, bad


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without line endings, except blank ones at the end of the file.

    A line that is too long is truncated to a length that `decoded` still rejects.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is UTF-16, an archive or a spreadsheet.
    """
    # Held back until a line with text follows, so never yielded at the end of the file.
    blank: list[bytes] = []
    with open_plain(path, follow=True) as file:
        # Read as UTF-8, every line would be bad, and no report would say why: spreadsheets write
        # UTF-16 as "Unicode text".
        if file.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(
                f"{path}: expected UTF-8, this is UTF-16: convert it with {_iconv('UTF-16', path)}"
            )
        for begin, kind, advice in _BINARY:
            if file.peek(len(begin)).startswith(begin):
                raise DataError(f"{path}: expected text, this is {kind}: {advice}")
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.read(3)
        # Cells may contain line breaks, too. A trailing CR may be the first half of a CRLF.
        seen = file.peek(_SEEN_BYTES)[:-1].replace(b"\r\n", b"\n")
        source = _ReturnEnded(file) if seen.count(b"\r") > seen.count(b"\n") else file
        # Three bytes more: two for CRLF, and one to detect that the line is too long.
        while line := source.readline(LONGEST_LINE_BYTES + 3):
            if not line.endswith(b"\n"):
                _skip_rest(source)
            # Do not use rstrip: a CR or a space before the line ending belongs to the text.
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            blank.append(line)
            if line.strip():
                yield from blank
                blank.clear()


def _iconv(encoding: str, path: Path) -> str:
    """Return the command that converts a file to UTF-8."""
    return f"iconv -f {encoding} -t UTF-8 {in_shell(path)} > utf8{path.suffix}"


class _ReturnEnded:
    """A file with CR line endings, as Excel for Mac writes them."""

    def __init__(self, file: BufferedReader) -> None:
        self._text = TextIOWrapper(file, "latin-1", newline="\r")  # one character is one byte

    def readline(self, size: int) -> bytes:
        """Read a line, with LF at its end."""
        return self._text.readline(size).encode("latin-1").replace(b"\r", b"\n")


def _skip_rest(file: BufferedReader | _ReturnEnded) -> None:
    """Skip the rest of a line that was only partly read."""
    # In chunks, because the rest may be as large as the file.
    while (rest := file.readline(LONGEST_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass


def _read_line(line: str, number: int, task: TaskName) -> Line:
    """Parse one line.

    Raises:
        ValueError: the line is not a text, a tab and a label.
    """
    text, label = _cut(line)
    if number == 1 and label.casefold() == "label":
        raise ValueError(f"expected no header, got {shortened(line)}: {_HEADER}")
    return Line(text, read_label(label, task), number, label)


def decoded(content: bytes, path: Path) -> str:
    """Decode a line from `read_lines`.

    Args:
        content: the line.
        path: file of the line, for errors.

    Raises:
        ValueError: the line is too long, is not UTF-8, or contains a NUL.
    """
    if len(content) > LONGEST_LINE_BYTES:
        raise ValueError(f"expected a line of at most {LONGEST_LINE_BYTES:,} bytes, got more")
    try:
        line = content.decode()
    except UnicodeDecodeError as wrong:
        byte = f"{content[wrong.start]:02x}"
        raise ValueError(
            f"expected UTF-8, got {byte} as byte {wrong.start + 1}: if it is Latin-1, convert the "
            f"file with {_iconv('WINDOWS-1252', path)}"
        ) from None
    # NUL is valid UTF-8, but in practice a sign of a binary file.
    if "\0" in line:
        raise ValueError(f"expected text, got a NUL as character {line.index(chr(0)) + 1}")
    return line


def _cut(line: str) -> tuple[str, str]:
    """Split a line into text and label."""
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
    """Describe a file without usable lines."""
    if not bad:
        return "an empty file"
    return f"none; the first of {len(bad)} bad ones is line {bad[0].line}: {bad[0].reason}"

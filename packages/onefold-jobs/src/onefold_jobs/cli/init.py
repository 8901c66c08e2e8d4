"""``onefold init``: writes a short training script for the user's data.

`look` inspects the data. The script is a starting point that the user owns: it depends only on
PyTorch and the public names of onefold, and all of it can be changed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from onefold.cli import in_shell, listed, tell
from onefold.errors import DataError
from onefold.files import open_plain, write_whole
from onefold_jobs import require
from onefold_jobs.data.classes import class_files
from onefold_jobs.data.layouts import refuse_other_layouts
from onefold_jobs.data.pictures import is_picture, load_picture, visible_folders
from onefold_jobs.data.splits import find_folders
from onefold_jobs.data.tables import open_table

__all__ = ["write_script"]

_MOST_ROWS = 1000
"""Maximum number of table rows to inspect."""
_TABLES = {".parquet": "read_parquet", ".xlsx": "read_excel", ".feather": "read_feather"}
"""pandas functions that read other kinds of tables."""
_MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "None", "?")
"""Cells that stand for a missing value."""
_INPUTS = ("x", "X", "images", "inputs", "data", "features")
_TARGET_ARRAYS = ("y", "Y", "labels", "targets", "target", "label")
_FEW = 20
"""Up to this number of different integers, or strings, are treated as classes."""
_MOST_HEADER_BYTES = 16384
"""Maximum size of an array's header in an NPZ file; NumPy writes about a hundred bytes."""
_LEAST_SIDE = 8
"""Two-dimensional arrays with a shorter side are not treated as images."""
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class Data:
    """Description of the user's data."""

    kind: str
    """``none``, ``pictures``, ``table`` or ``arrays``."""
    path: str = ""
    test: str = ""
    """Test folder of images; empty if a fraction of the images is held out."""
    suffixes: tuple[str, ...] = ()
    """File suffixes of images."""
    classes: bool = True
    """Whether the targets are classes instead of numbers."""
    target: str = ""
    """Name of a table's target column."""
    delimiter: str = ","
    has_sep: bool = False
    """Whether a table has a line such as ``sep=;`` before its header."""
    left_out: tuple[str, ...] = ()
    """Names of a table's columns that are not inputs, because they contain free text."""
    choices: tuple[str, ...] = ()
    """Names of a table's columns with few different strings."""
    form: str | None = None
    """Python expression that turns image arrays into (n, channels, height, width)."""
    arrays: tuple[str, str] = ("x", "y")
    """Names of the arrays of inputs and targets."""


def write_script(data: Path | None, output: Path) -> None:
    """Write a training script for data.

    Args:
        data: a folder of class folders with images, a CSV, TSV or NPZ file, or None.
        output: the file to write, which must not exist.

    Raises:
        DataError: the data do not exist, or are of an unsupported kind.
        FileExistsError: the output file exists.
    """
    text = _script(look(data))
    try:
        write_whole(output, text.encode(), new=True)
    except FileExistsError:
        raise FileExistsError(f"--output {output}: the file exists already") from None


def look(path: Path | None) -> Data:
    """Inspect data.

    Raises:
        DataError: the data do not exist, or are of an unsupported kind.
    """
    if path is None:
        return Data("none")
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".npz":
        return _arrays(path)
    if path.suffix.lower() in (".csv", ".tsv"):
        return _table(path)
    came = "" if path.exists() else " does not exist"
    advice = ""
    if path.suffix.lower() in _TABLES:
        advice = (
            f". Write the table as CSV: pandas.{_TABLES[path.suffix.lower()]}({str(path)!r})"
            f".to_csv({path.stem + '.csv'!r}, index=False)"
        )
    raise DataError(
        f"{path}{came}: expected a folder of class folders with images, or a CSV, TSV or NPZ "
        f"file{advice}"
    )


def _folder(path: Path) -> Data:
    refuse_other_layouts(path, "classify")
    folders = find_folders(path)
    for note in folders.notes:
        tell(note)
    inside = folders.train
    # This rejects images with masks.
    files = class_files(inside, {}, []) if visible_folders(inside) else []
    with_pictures = sorted({str(label) for _, label in files})
    if len(with_pictures) < 2:
        raise DataError(
            f"{inside}: expected two or more class folders with images, found "
            f"{listed(with_pictures) or 'none'}. For texts with labels, "
            f"use the job: onefold train text --data {in_shell(path)}"
        )
    test = ""
    if folders.test:
        test = str(folders.test) if visible_folders(folders.test) else ""
        if not test:
            tell(f"{folders.test}: not used, because it has no class folders")
    _refuse_deep(path, {label: file for file, label in reversed(files)}.values())
    suffixes = tuple(sorted({file.suffix.lower() for file, _ in files}))
    return Data("pictures", str(inside), test=test, suffixes=suffixes)


def _refuse_deep(path: Path, files: Iterable[Path]) -> None:
    """Reject images with more than 8 bits per pixel: Pillow turns all values above 255 white."""
    require("reading pictures", "images", "PIL")
    for file in files:
        if load_picture(file).mode.startswith(("I", "F")):
            raise DataError(
                f"{file}: the image has more than 8 bits per pixel, which a short script cannot "
                f"read: use onefold train classify --data {in_shell(path)}"
            )


def _arrays(path: Path) -> Data:
    try:
        with open_plain(path, follow=True) as file, zipfile.ZipFile(file) as arrays:
            names = [name.removesuffix(".npy") for name in arrays.namelist()]
            inputs = next((name for name in _INPUTS if name in names), None)
            targets = next((name for name in _TARGET_ARRAYS if name in names), None)
            kind = _head(arrays, targets)[1] if targets else ""
            form = _form(*_head(arrays, inputs)) if inputs else None
    # Parsers may raise anything for an untrusted zip file and header.
    except Exception as error:
        raise DataError(f"{path}: expected a NumPy file with arrays x and y: {error}") from error
    if inputs is None or targets is None:
        raise DataError(
            f"{path}: expected arrays x and y, but it contains {listed(sorted(names))}. Name the "
            f"inputs x and the targets y: numpy.savez({str(path)!r}, x=..., y=...)"
        )
    return Data("arrays", str(path), classes=kind in "iub", arrays=(inputs, targets), form=form)


def _head(arrays: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], str]:
    """Return an array's shape and the kind of its dtype, reading only its header."""
    from numpy.lib import format

    with arrays.open(f"{name}.npy") as array:
        head = BytesIO(array.read(_MOST_HEADER_BYTES))
    read = {1: format.read_array_header_1_0, 2: format.read_array_header_2_0}
    shape, _, dtype = read[format.read_magic(head)[0]](head)
    if dtype.hasobject:
        raise ValueError(f"{name} contains Python objects, which may be code")
    return shape, dtype.kind


def _form(shape: tuple[int, ...], kind: str) -> str | None:
    """Return the expression that turns an array into images (n, channels, h, w); None if it
    cannot."""
    last = shape[1:]
    if len(last) not in (2, 3) or (len(last) == 2 and min(last) < _LEAST_SIDE):
        return None
    turned = len(last) == 3 and last[-1] in _CHANNELS and last[0] not in _CHANNELS
    form = "[:, None]" if len(last) == 2 else ".permute(0, 3, 1, 2)" if turned else ""
    return f"{form} / 255" if kind == "u" else form


def _table(path: Path) -> Data:
    table = open_table(path)
    names, delimiter = table.names, table.delimiter
    rows = []
    for number, cells in islice(table.rows, _MOST_ROWS):
        if isinstance(cells, str):
            raise DataError(f"{path}, line {number}: {cells}")
        rows.append(cells)
    if len(names) < 2 or not rows or all(map(_is_number, names)):
        raise DataError(
            f"{path}: expected a header with two or more column names, and rows of data, got "
            f"{listed(names) or 'nothing'}"
        )
    for name in names:
        # Also accept Windows paths.
        paths = (path.parent / row[name].replace("\\", "/") for row in rows)
        if any(is_picture(each) and each.is_file() for each in paths):
            raise DataError(
                f"{path}: the column {name} contains image paths: instead of a script, use onefold "
                f"train classify --data {in_shell(path)} --image-column {in_shell(name)}, and "
                f"--label-column for the target"
            )
    texts = {
        name: len({row[name] for row in rows})
        for name in names[:-1]
        if not all(_is_number(row[name], delimiter) for row in rows)
    }
    # A string that is unique to each row, such as a name, carries no information about others.
    choices = tuple(name for name, count in texts.items() if 1 < count <= min(_FEW, len(rows) // 2))
    left_out = tuple(name for name in texts if name not in choices)
    if len(left_out) == len(names) - 1:
        raise DataError(
            f"{path}: expected numbers in at least one column before the last, which is the "
            f"target, but {listed(left_out)} contain text. For texts with labels, use onefold "
            f"train text --data {in_shell(path)}; for images, see onefold train classify --help"
        )
    targets = [row[names[-1]] for row in rows if row[names[-1]].strip()]
    whole = all(target.strip().lstrip("-").isdecimal() for target in targets)
    classes = (whole and len(set(targets)) <= _FEW) or not all(
        _is_number(target, delimiter) for target in targets
    )
    return Data(
        "table",
        str(path),
        classes=classes,
        target=names[-1],
        delimiter=delimiter,
        has_sep=table.has_sep,
        left_out=left_out,
        choices=choices,
    )


def _is_number(text: str, delimiter: str = ",") -> bool:
    """Whether a cell is a number or missing; a decimal comma is accepted, too."""
    try:
        float("nan" if text.strip() in _MISSING else _with_point(text, delimiter))
    except ValueError:
        return False
    return True


def _with_point(text: str, delimiter: str) -> str:
    return text if delimiter == "," else text.replace(",", ".")


def _script(data: Data) -> str:
    """Return the script for data."""
    environment = Environment(
        loader=PackageLoader(__package__),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("train.py.j2").render(
        data=data,
        missing=_MISSING,
        quoted=_quoted,
        listed=lambda texts: ", ".join(map(_quoted, texts)),
    )


def _quoted(text: str) -> str:
    """Return a Python literal of a string, in double quotes if possible."""
    quoted = repr(text)
    return f'"{text}"' if quoted == f"'{text}'" and '"' not in text else quoted

"""``onefold init``: writes a short training script for the user's data.

`look` inspects the data. The script is a starting point that the user owns: it depends only on
PyTorch and the public names of onefold, and all of it can be changed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from onefold.cli import listed
from onefold.errors import DataError
from onefold.files import open_plain, write_whole
from onefold_jobs import require
from onefold_jobs.classify_job import FETCHED
from onefold_jobs.cli.columns import Cell, goal_of, number_of, sort_inputs
from onefold_jobs.cli.hints import advising, tell
from onefold_jobs.data.arrays import read_labeled
from onefold_jobs.data.classes import class_files, listed_files
from onefold_jobs.data.columns import Columns, usual_column
from onefold_jobs.data.fetch import fetch_dataset
from onefold_jobs.data.files import BadFile, left_out_notes, readable, refuse
from onefold_jobs.data.layouts import refuse_other_layouts
from onefold_jobs.data.masks import (
    AUTO,
    MOST_CLASSES,
    MaskRule,
    look_at_mask,
    require_one_foreground,
)
from onefold_jobs.data.pairs import Pair, pairs_in
from onefold_jobs.data.pictures import (
    is_picture,
    load_picture,
    look_at,
    visible_folders,
    white_of,
)
from onefold_jobs.data.samples import read_listed
from onefold_jobs.data.splits import Folders, find_folders
from onefold_jobs.data.tables import TABLES, Line, Table, is_table, open_table, part_notes

__all__ = ["write_script"]

_MOST_ROWS = 100_000
"""Maximum number of table rows to inspect."""
_TABLES = {
    ".feather": "read_feather",
    ".json": "read_json",
    ".jsonl": "read_json",
    ".parquet": "read_parquet",
    ".xlsx": "read_excel",
}
"""pandas functions that read other kinds of tables."""
_MOST_EXACT = 1000
"""Maximum number of cells per column to check as paths."""
_INPUTS = ("x", "X", "images", "inputs", "data", "features")
_TARGET_ARRAYS = ("y", "Y", "labels", "targets", "target", "label")
_MOST_HEADER_BYTES = 16384
"""Maximum size of an array's header in an NPZ file; NumPy writes about a hundred bytes."""
_MOST_MASKS = 50
"""Maximum number of masks or images to inspect."""
_BORDER = "255"
"""Value of a border between the classes of masks."""
_LEAST_SIDE = 8
"""Two-dimensional arrays with a shorter side are not treated as images."""
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class Data:
    """Description of the user's data."""

    kind: str
    """``none``, ``folders`` of images, ``files`` of images in a table, ``masks``, ``idx``,
    ``digits``, ``texts``, ``table`` or ``arrays``."""
    path: str = ""
    folder: str = ""
    """Folder that the paths of images in a table are relative to."""
    test: str = ""
    """Test folder or file; empty if a fraction of the samples is held out."""
    masks: str = ""
    test_masks: str = ""
    """Folders of masks, if ``path`` and ``test`` are folders of images."""
    suffixes: tuple[str, ...] = ()
    """File suffixes of images."""
    white: int | None = None
    """Brightest value of images with more than 8 bits per pixel."""
    bright: bool = False
    """Whether the foreground of masks is bright, instead of every value above 0."""
    values: tuple[int | tuple[int, ...], ...] = ()
    """Values of the classes of masks, numbers or RGB colors; empty for foreground masks."""
    colored: bool = False
    """Whether the values of masks are colors; without values, whether the foreground is one."""
    channels: bool = False
    """Whether masks of numbers are stored in several equal channels, or with transparency."""
    reader: str = "csv"
    """Format of a file of texts, or of a table of images."""
    goal: str = "class"
    """``class``, ``labels`` for several classes, or ``number``."""
    sign: str = ""
    """Separator of several classes."""
    sample: str = ""
    """Name of the column of texts or images."""
    target: str = ""
    """Name of a table's target column."""
    delimiter: str = ","
    has_sep: bool = False
    """Whether a table has a line such as ``sep=;`` before its header."""
    left_out: tuple[str, ...] = ()
    """Names of a table's columns that are not inputs, such as free text."""
    choices: tuple[str, ...] = ()
    """Names of a table's columns with few different strings."""
    form: str | None = None
    """Python expression that turns image arrays into (n, channels, height, width)."""
    arrays: tuple[str, str] = ("x", "y")
    """Names of the arrays of inputs and targets."""


def write_script(data: Path | None, output: Path, *, labels_as_is: bool = False) -> None:
    """Write a training script for data.

    Args:
        data: any data of a job; a CSV, TSV or NPZ file of numbers; or None.
        output: the file to write, which must not exist.
        labels_as_is: accept all labels, and all folders, as classes.

    Raises:
        DataError: the data do not exist, or are of an unsupported kind.
        FileExistsError: the output file exists.
    """
    with advising():
        text = _script(look(data, labels_as_is=labels_as_is))
    try:
        write_whole(output, text.encode(), new=True)
    except FileExistsError:
        raise FileExistsError(f"--output {output}: the file exists already") from None


def look(path: Path | None, *, labels_as_is: bool = False) -> Data:
    """Inspect data.

    Args:
        path: argument of the command.
        labels_as_is: accept all labels, and all folders, as classes.

    Raises:
        DataError: the data do not exist, or are of an unsupported kind.
    """
    if path is None:
        return Data("none")
    if str(path) in ("digits", *FETCHED) and not path.exists():
        return _named(str(path))
    if path.is_dir() and not is_table(path):
        return _folder(path, labels_as_is=labels_as_is)
    if path.suffix == ".npz":
        return _arrays(path)
    if path.exists() and (path.suffix.lower() in (".csv", ".tsv") or is_table(path)):
        return _table(path, labels_as_is=labels_as_is)
    raise _unknown(path)


def _unknown(path: Path) -> DataError:
    came = "" if path.exists() else " does not exist"
    advice, suffix = "", path.suffix.lower()
    if suffix in _TABLES:
        lines = ", lines=True" if suffix == ".jsonl" else ""
        advice = (
            f". Write the table as CSV: pandas.{_TABLES[suffix]}({str(path)!r}{lines})"
            f".to_csv({path.stem + '.csv'!r}, index=False)"
        )
    return DataError(
        f"{path}{came}: expected a folder of class folders with images, or of images and masks; a "
        f"table of images or texts; or a CSV, TSV or NPZ file{advice}"
    )


def _named(name: str) -> Data:
    """Describe data that have a name instead of a path, which may be downloaded."""
    if name == "digits":
        require("reading the digits", "digits", "sklearn")
        return Data("digits", name, form="")
    return _idx(fetch_dataset(name, Path("~/.cache/onefold").expanduser()))


def _idx(path: Path) -> Data:
    pixels, _ = read_labeled(path, "train")
    read_labeled(path, "t10k")
    return Data("idx", str(path), test=str(path), form=", ".join(map(str, pixels.shape[1:])))


def _folder(path: Path, *, labels_as_is: bool) -> Data:
    if any(path.glob("*-images-idx3-ubyte*")):
        return _idx(path)
    inside = find_folders(path, masks=True)
    if (inside.train / "images").is_dir() and (inside.train / "masks").is_dir():
        return _masks(path, inside)
    files = () if visible_folders(path) else (path / f"train{end}" for end in (".tsv", *TABLES))
    if is_table(path / "train") or any(each.is_file() for each in files):
        return _texts(path, labels_as_is=labels_as_is)
    refuse_other_layouts(path, "classify")
    folders = find_folders(path, as_is=labels_as_is)
    for note in folders.notes:
        tell(note)
    inside_train = folders.train
    # This rejects images with masks.
    found = class_files(inside_train, {}, []) if visible_folders(inside_train) else []
    with_pictures = sorted({str(label) for _, label in found})
    if len(with_pictures) < 2:
        # This rejects class folders of texts, with a command that makes a table of them.
        refuse_other_layouts(path, "text", texts=True)
        raise DataError(
            f"{inside_train}: expected two or more class folders with images, found "
            f"{listed(with_pictures) or 'none'}; or images and masks, or a table of samples and "
            f"labels"
        )
    test = ""
    if folders.test:
        test = str(folders.test) if visible_folders(folders.test) else ""
        if not test:
            tell(f"{folders.test}: not used, because it has no class folders")
    white = _white({label: file for file, label in reversed(found)}.values())
    return Data("folders", str(inside_train), test=test, suffixes=_suffixes(found), white=white)


def _suffixes(files: Iterable[tuple[Path, object]]) -> tuple[str, ...]:
    return tuple(sorted({file.suffix.lower() for file, _ in files}))


def _white(files: Iterable[Path]) -> int | None:
    """Return the brightest value of images with more than 8 bits per pixel; None without any."""
    require("reading pictures", "images", "PIL")
    return white_of([look_at(file) for file in files])


def _masks(path: Path, folders: Folders) -> Data:
    """Describe images with masks, whose classes are the values of the masks unless two differ."""
    bad: list[BadFile] = []
    train, test, _ = pairs_in(path, bad)
    images, masks = _roots(train)
    found = Data("masks", images, masks=masks, white=_white(pair.image for pair in train[:1]))
    if test:
        tested, tested_masks = _roots(test)
        found = replace(found, test=tested, test_masks=tested_masks)
    looked_at = [pair.mask for pair in train[:_MOST_MASKS]]
    found = replace(found, channels=_has_channels(looked_at))
    try:
        looks = [(mask, look_at_mask(mask, MaskRule())) for mask in looked_at]
        require_one_foreground(looks)
        # Gray of a color is darker than its brightest channel, which decides.
        colored = any(look.shade and len({*look.color}) > 1 for _, look in looks)
        return replace(found, bright=any(look.scale == 255 for _, look in looks), colored=colored)
    except DataError:
        rule = MaskRule(classes=AUTO)
        values = {value for mask in looked_at for value in look_at_mask(mask, rule).counts}
    if len(values) > MOST_CLASSES:
        raise DataError(
            f"{path}: expected masks of at most {MOST_CLASSES} classes, got {len(values):,} "
            f"different values, such as {min(values)}"
        )
    if not all(map(str.isdecimal, values)):
        colors = (tuple(bytes.fromhex(value[1:])) for value in sorted(values))
        return replace(found, values=tuple(colors), colored=True)
    # By convention, 255 in masks of class numbers is a border to ignore.
    numbers = sorted(int(value) for value in values if value != _BORDER)
    return replace(found, values=tuple(numbers))


def _has_channels(masks: Iterable[Path]) -> bool:
    return any(load_picture(mask).mode in ("LA", "RGB", "RGBA") for mask in masks)


def _roots(pairs: Sequence[Pair]) -> tuple[str, str]:
    """Return the folders that contain all images, and all masks."""
    images = Path(os.path.commonpath([pair.image.parent for pair in pairs]))
    masks = Path(os.path.commonpath([pair.mask.parent for pair in pairs]))
    return str(images), str(masks)


def _texts(path: Path, columns: Columns = Columns("text"), *, labels_as_is: bool) -> Data:  # noqa: B008
    """Describe a file of texts and labels, or a folder of a training and a test file."""
    samples = read_listed(path, None, columns)
    # A job does not report columns that were named.
    chosen = [f"{readable(path)}: {columns.described()}"] if columns.label else []
    for note in [*chosen, *samples.notes]:
        tell(note)
    train, test = samples.paths
    sample, label = samples.columns.sample or "text", *(samples.columns.label or ("label",))
    found = Data(
        "texts",
        str(train),
        test=str(test) if samples.test is not None else "",
        reader=_reader(train, named=bool(samples.columns.label)),
        sample=sample,
        target=label,
        **_format(train),
    )
    labels = [(line.line_number, str(line.label)) for line in samples.train]
    return _with_goal(found, labels, labels_as_is=labels_as_is)


def _reader(path: Path, *, named: bool) -> str:
    if path.is_dir():
        return "arrow"
    kinds = {".json": "jsonl", ".ndjson": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet"}
    return kinds.get(path.suffix.lower(), "csv" if named else "tsv")


def _format(path: Path) -> dict[str, Any]:
    if path.suffix.lower() not in (".csv", ".tsv"):
        return {}
    table = open_table(path)
    return {"delimiter": table.delimiter, "has_sep": table.has_sep}


def _with_goal(
    found: Data, labels: Sequence[Cell], *, labels_as_is: bool, signs: Collection[str] = ()
) -> Data:
    how: Any = {"delimiter": found.delimiter, "labels_as_is": labels_as_is, "signs": signs}
    how["typed"] = found.reader not in ("csv", "tsv")
    goal, sign = goal_of(Path(found.path), labels, **how)
    return replace(found, goal=goal, sign=sign)


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
    goal = "class" if kind in "iub" else "number"
    return Data("arrays", str(path), goal=goal, arrays=(inputs, targets), form=form)


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


def _table(path: Path, *, labels_as_is: bool) -> Data:
    if _is_tsv_of_texts(path):
        return _texts(path, labels_as_is=labels_as_is)
    table = open_table(path)
    names, rows = table.names, []
    for line, cells in islice(table.rows, _MOST_ROWS):
        if isinstance(cells, str):
            raise DataError(f"{path}, line {line}: {cells}")
        texts = {name: "" if cell is None else str(cell) for name, cell in cells.items()}
        rows.append((line, texts))
    if len(names) < 2 or not rows or all(number_of(name) is not None for name in names):
        raise DataError(
            f"{path}: expected a header with two or more column names, and rows of data, got "
            f"{listed(names) or 'nothing'}"
        )
    if (images := _files(table, rows, labels_as_is=labels_as_is)) is not None:
        return images
    inputs = sort_inputs(path, names[:-1], rows, table.delimiter)
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    text = usual_column(names, "text") or next(iter(inputs.texts), None)
    nothing = len(inputs.left_out) == len(names) - 1
    if text and (not is_csv or nothing or text == usual_column(names, "text")):
        others = [each for each in names if each != text]
        # As in a table of numbers, the last column is the target.
        last = () if usual_column(others, "label") or not is_csv else (others[-1],)
        return _texts(path, Columns("text", text, last), labels_as_is=labels_as_is)
    if not is_csv:
        raise _unknown(path)
    notes = [f"column {name} is left out: {why}" for name, why in inputs.left_out.items()]
    if nothing:
        raise DataError(f"{path}: expected columns of inputs before the target: {'; '.join(notes)}")
    for note in [*(f"{path}: {note}" for note in notes), *inputs.notes]:
        tell(note)
    found = Data(
        "table",
        str(path),
        target=names[-1],
        delimiter=table.delimiter,
        has_sep=table.has_sep,
        left_out=tuple(inputs.left_out),
        choices=tuple(inputs.choices),
    )
    labels = [(line, row[names[-1]]) for line, row in rows]
    return _with_goal(found, labels, labels_as_is=labels_as_is, signs=inputs.signs)


def _is_tsv_of_texts(path: Path) -> bool:
    """Whether a TSV file has a text, a tab and a label on each line, and no header."""
    if path.suffix.lower() != ".tsv":
        return False
    with open_plain(path, follow=True) as file:
        lines = [line.decode(errors="replace") for line in islice(file, _MOST_ROWS)]
    cells = [line.rstrip("\r\n").split("\t") for line in lines if line.strip()]
    if len(cells) < 2 or any(len(row) != 2 for row in cells):
        return False
    # The label of a first line that is not a header occurs again.
    return cells[0][1] in {label for _, label in cells[1:]} and number_of(cells[0][0]) is None


def _files(
    table: Table, rows: Sequence[tuple[int, dict[str, str]]], *, labels_as_is: bool
) -> Data | None:
    """Describe a table of images and labels; None if no column names images."""
    path, names = table.path, table.names
    usual, roots = usual_column(names, "image"), (path.parent, path.parent / os.pardir)
    found: list[tuple[Path, Line]] = []
    for name in names:
        cells = [row[name].replace("\\", "/") for _, row in rows]
        first = [cell for cell in cells[:_MOST_EXACT] if is_picture(Path(cell))]
        exact = (root / cell for cell in first for root in roots)
        # A name without its folder is searched for, as the other one of two columns is by a job.
        short = len(names) == 2 and not any(" " in cell for cell in cells)
        short &= usual_column(names, "label") not in (None, name)
        if name == usual or short or any(each.is_file() for each in exact):
            lines = [Line(row[name], "", line) for line, row in rows if row[name]]
            missing: list[BadFile] = []
            found = listed_files(lines, path, missing)
        if found:
            others = [each for each in names if each != name]
            label = usual_column(others, "label") or others[-1]
            columns = Columns("image", name, (label,))
            tell(f"{readable(path)}: {columns.described()}")
            # The script reads all files, and leaves out rows without one.
            refuse(missing, found, skip=None)
            empty = [line for line, row in rows if not row[name]]
            bad = [BadFile(path, "expected a path, got nothing", line) for line in empty]
            outside = any(file.is_relative_to(roots[1]) for file, _ in found)
            outside &= not any((roots[0] / cell).is_file() for cell in cells)
            data = Data(
                "files",
                str(path),
                folder=os.path.normpath(roots[outside]),
                suffixes=_suffixes(found),
                white=_white(file for file, _ in found[:_MOST_MASKS]),
                reader=_reader(path, named=True),
                sample=name,
                target=label,
                delimiter=table.delimiter,
                has_sep=table.has_sep,
            )
            notes = part_notes(path, columns)
            for note in [*notes, *left_out_notes(bad, listed_in=None)]:
                tell(note)
            labels = [(line, row[label]) for line, row in rows if row[name]]
            return _with_goal(data, labels, labels_as_is=labels_as_is)
    return None


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
        quoted=_quoted,
        listed=lambda texts: ", ".join(map(_quoted, texts)),
    )


def _quoted(text: str) -> str:
    """Return a Python literal of a string, in double quotes if possible."""
    quoted = repr(text)
    return f'"{text}"' if quoted == f"'{text}'" and '"' not in text else quoted

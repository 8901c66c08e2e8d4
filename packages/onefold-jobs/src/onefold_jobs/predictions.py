"""How predictions are written: as CSV or JSON, and over no file that is something else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from onefold_jobs.data.files import require_ours

__all__ = ["MASK_NOTE", "as_csv", "as_json", "mask_name", "require_mask", "require_predictions"]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a spreadsheet takes for the start of a formula; the last four are East Asian wide forms."""
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_QUOTED = ',;"\t\r\n'
_BEGINNING = re.compile(
    rb"file(,line,text)?(,label)?,(class,confidence|labels,|value|mask,share|iou,dice)"
    rb'|\[\n \{\n  "file": |\[\]'
)
"""How files of predictions begin."""
MASK_NOTE = "onefold predict"
"""Stands in the PNG of each mask as the software that made it, and so marks our own."""


def as_json(rows: list[dict[str, Any]]) -> str:
    """Format predictions as a JSON list of objects."""
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Format predictions as CSV, one line a sample; each further class has columns of its own."""
    # All rows have the names of the first: a run has one number of classes, and --top is one.
    flat = [_flat(row) for row in rows]
    lines = [list(flat[0]) if flat else [], *(list(row.values()) for row in flat)]
    return "".join(",".join(_cell(value) for value in line) + "\n" for line in lines)


def _cell(value: object) -> str:
    """Format a value as a cell that no spreadsheet takes for a formula.

    Texts that look like one get an apostrophe in front, unless they are plain numbers. Characters
    that could end the cell are quoted.

    Source: OWASP, CSV Injection.
    """
    text = str(value)
    formula = isinstance(value, str) and text.startswith(_FORMULAS) and not _NUMBER.fullmatch(text)
    if formula:
        text = f"'{text}"
    if formula or any(letter in text for letter in _QUOTED):
        return '"' + text.replace('"', '""') + '"'
    return text


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    # The surest class has the plain names, so that a file of one class has no numbered columns.
    values = {name: value for name, value in row.items() if name != "classes"}
    for place, each in enumerate(row.get("classes", ()), start=1):
        suffix = "" if place == 1 else f"_{place}"
        values[f"class{suffix}"] = each["class"]
        values[f"confidence{suffix}"] = f"{each['confidence']:.6f}"
    return values


def mask_name(name: str) -> str:
    """Name of the mask of a picture: masks are PNG files."""
    return str(Path(name).with_suffix(".png"))


def require_predictions(path: Path) -> None:
    """Refuse to write over a file that holds something other than predictions."""
    require_ours(
        path,
        lambda head: _BEGINNING.match(head) is not None,
        f"--output {path}: expected a new file, or predictions of before",
    )


def require_mask(path: Path, folder: Path) -> None:
    """Refuse to write over a file that is not one of our masks, or through a link."""
    # Each folder on the way, as a linked one would take the masks out of the output folder. What is
    # above that is the user's choice.
    for above in path.parents:
        if above == folder:
            break
        if above.is_symlink():
            raise ValueError(
                f"--output {folder}: expected folders of its own, {above} is a link: remove it, or "
                f"name another folder"
            )
    require_ours(
        path,
        lambda head: MASK_NOTE.encode() in head,
        f"--output {folder}: expected new masks, or masks of before",
    )

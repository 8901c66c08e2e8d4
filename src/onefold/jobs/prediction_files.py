"""Writes predictions, as CSV or JSON, over nothing but earlier ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from onefold.data.files import require_ours

__all__ = ["MASK_NOTE", "as_csv", "as_json", "require_mask", "require_predictions"]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""With these a cell begins that a spreadsheet computes; the last are the wide ones of Asia."""
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_QUOTED = ',;"\t\r\n'
_BEGINNINGS = (
    b"file,class,confidence", b"file,line,text,class,confidence", b"file,mask,share",
    b'[\n {\n  "file": ', b"[]",
)  # fmt: skip
"""Of files of predictions."""
MASK_NOTE = "onefold predict"
"""In a PNG of a mask, as the software that made it."""


def as_json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def as_csv(rows: list[dict[str, Any]]) -> str:
    """One line a sample; further classes have columns of their own."""
    flat = [_flat(row) for row in rows]
    lines = [list(flat[0]) if flat else [], *(list(row.values()) for row in flat)]
    return "".join(",".join(_cell(value) for value in line) + "\n" for line in lines)


def _cell(value: object) -> str:
    """A value as a cell that no spreadsheet takes for a formula: such texts get an apostrophe.

    Numbers stay numbers. What a spreadsheet might take for the end of a cell is quoted.

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
    values = {name: value for name, value in row.items() if name != "classes"}
    for place, each in enumerate(row.get("classes", ()), start=1):
        suffix = "" if place == 1 else f"_{place}"
        values[f"class{suffix}"] = each["class"]
        values[f"confidence{suffix}"] = f"{each['confidence']:.6f}"
    return values


def require_predictions(path: Path) -> None:
    """Refuse to write over what are no predictions."""
    require_ours(
        path,
        lambda head: head.startswith(_BEGINNINGS),
        f"--output {path}: expected a new file, or predictions of before",
    )


def require_mask(path: Path, folder: Path) -> None:
    """Refuse to write over what is no mask, or where a link leads."""
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

"""The lines and differences in the documents are those that ``examples/ports`` has."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.conftest import ROOT
from tests.tables import for_each

COUNTER = runpy.run_path(str(ROOT / "examples" / "ports" / "count_lines.py"))
PAGE = (ROOT / "docs" / "ports.md").read_text(encoding="utf-8")
SHOWN = re.compile(
    r"```diff\n(# examples/ports/plain/(\w+)\.py -> [^\n]*\n.*?)\n```", flags=re.DOTALL
)
"""A script before and after: all of the block, and the script's name."""
BLOCKS = [
    pytest.param(*found, id=f"{page.stem}-{found[1]}")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for found in SHOWN.findall(page.read_text(encoding="utf-8"))
]


def test_the_page_has_the_table_that_is_printed() -> None:
    assert COUNTER["table"]() in PAGE


def test_the_first_table_has_the_same_lines_for_onefold() -> None:
    rows = re.findall(r"^\| \[(\w+)\.py\]\([^)]*\) \|[^|]*\| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    stated = {name: (int(lines_out), int(lines_in)) for name, lines_out, lines_in in rows}
    assert stated == {name: found["onefold"] for name, found in COUNTER["counts"]().items()}


def test_there_are_scripts_before_and_after() -> None:
    assert len(BLOCKS) >= 10


@for_each(("block", "name"), BLOCKS)
def test_a_script_before_and_after_is_as_it_is_printed(block: str, name: str) -> None:
    assert block == COUNTER["difference"](name)

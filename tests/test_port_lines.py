"""The lines that docs/ports.md states are those that ``examples/ports/count_lines.py`` counts."""

from __future__ import annotations

import re
import runpy

from tests.conftest import ROOT

COUNTER = runpy.run_path(str(ROOT / "examples" / "ports" / "count_lines.py"))
PAGE = (ROOT / "docs" / "ports.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_that_is_printed() -> None:
    assert COUNTER["table"]() in PAGE


def test_the_first_table_has_the_same_lines_for_onefold() -> None:
    rows = re.findall(r"^\| \[(\w+)\.py\]\([^)]*\) \|[^|]*\| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    stated = {name: (int(lines_out), int(lines_in)) for name, lines_out, lines_in in rows}
    assert stated == {name: found["onefold"] for name, found in COUNTER["counts"]().items()}

"""What documents name is there, and the lines of ``examples/ports`` are those that they print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import onefold
from tests.conftest import ROOT
from tests.tables import for_each

SOURCE = Path(onefold.__file__).parent
NOT_OURS = {"pickle.py"}
"""Files that somebody else may have put somewhere, of which the documents speak."""
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")})
COUNTER = runpy.run_path(str(ROOT / "examples" / "ports" / "count_lines.py"))
BEFORE_AND_AFTER = r"```diff\n(# examples/ports/plain/(\w+)\.py -> [^\n]*\n.*?)\n```"


@for_each("page", [page for page in PAGES if page.name != "log.md"])  # which speaks of what was
def test_every_module_and_link_of_a_page_leads_somewhere(page: Path) -> None:
    named = set(re.findall(r"`([\w/.]+\.py)`", page.read_text())) - NOT_OURS
    assert [name for name in named if not any((at / name).exists() for at in (ROOT, SOURCE))] == []
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_what_the_architecture_names_is_in_the_module_that_it_names() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    pairs = re.findall(r"`([\w.]+)` (?:in |\()`(\w+/\w+\.py)`", text)
    assert len(pairs) > 20
    for name, path in pairs:
        found = rf"(?m)(?:def|class) {name.split('.')[-1]}\b|^{name}\b"
        assert re.search(found, (SOURCE / path).read_text()), f"{name} in {path}"


def test_the_lines_of_ports_are_those_that_are_counted() -> None:
    page = (ROOT / "docs" / "ports.md").read_text()
    assert COUNTER["table"]() in page
    rows = re.findall(r"(?m)^\| \[(\w+)\.py\]\([^)]*\) \|[^|]*\| (\d+) \| (\d+) \|", page)
    stated = {name: (int(lines_out), int(lines_in)) for name, lines_out, lines_in in rows}
    assert stated == {name: found["onefold"] for name, found in COUNTER["counts"]().items()}
    texts = [each.read_text() for each in sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [found for text in texts for found in re.findall(BEFORE_AND_AFTER, text, re.DOTALL)]
    assert len(blocks) >= 10
    for block, name in blocks:
        assert block == COUNTER["difference"](name)

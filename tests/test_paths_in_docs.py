"""What documents name by its path is there, and the architecture names what modules have."""

from __future__ import annotations

import re
from pathlib import Path

import onefold
from tests.conftest import ROOT
from tests.tables import for_each

SOURCE = Path(onefold.__file__).parent
NOT_OURS = {"pickle.py"}
"""Files that somebody else may have put somewhere, of which the documents speak."""
PAGES = sorted(
    page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    if page.name != "log.md"  # it speaks of what was
)


@for_each("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`([\w/.]+\.py)`", page.read_text())) - NOT_OURS
    missing = [name for name in named if not any((at / name).exists() for at in (ROOT, SOURCE))]
    assert missing == []


@for_each("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_the_tree_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_what_the_architecture_names_is_in_the_module_that_it_names() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    pairs = re.findall(r"`([\w.]+)` (?:in |\()`(\w+/\w+\.py)`", text)
    assert len(pairs) > 20
    wrong = [
        f"{name} in {path}"
        for name, path in pairs
        if not re.search(
            rf"(?:def|class) {name.split('.')[-1]}\b|^{name}\b",
            (SOURCE / path).read_text(),
            re.MULTILINE,
        )
    ]
    assert wrong == []

"""Every guide's examples run, one after the other, as a reader would paste them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables import for_each
from tests.test_between_docs import GUIDES, script_of

PAGES = sorted(page.name for page in GUIDES.glob("*.md"))
NEEDED = {"transformers.md": ("transformers", "accelerate")}
"""Libraries that the examples of a page need beside onefold's own."""


def test_there_are_guides() -> None:
    assert "several-models.md" in PAGES


@for_each("page", PAGES)
def test_the_examples_of_a_guide_run(page: str, tmp_path: Path) -> None:
    for name in NEEDED.get(page, ()):
        pytest.importorskip(name)
    assert script_of(page, tmp_path)

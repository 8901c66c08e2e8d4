"""The whole cross product is for `make test-all`: `tests.golden` has a part of each side of it."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = ("test_smoke.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.name not in QUICK:
            item.add_marker(pytest.mark.full)

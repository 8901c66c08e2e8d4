"""What pytest must know of the tests of this folder."""

import os
from collections.abc import Iterator

import pytest

from tests.pretended import build

# A process with the devices of another kind is no place for other tests: see test_all.py.
OWN = ["test_device.py", "test_costs.py", "test_captured.py"]
collect_ignore = [] if os.environ.get(build.NUMBER) else OWN


@pytest.fixture(autouse=True)
def _nothing_is_reported() -> Iterator[None]:
    """Fail a test that has not looked at what was reported."""
    yield
    if os.environ.get(build.NUMBER):
        from tests.pretended import device

        assert device.reports() == []

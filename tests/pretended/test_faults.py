"""Faults that only an accelerator shows are found on pretended ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import mutants
from tests.gpu.parts import missing
from tests.pretended import build
from tests.pretended.faults import FAULTS, START

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.fresh,
    pytest.mark.skipif(build.missing() is not None, reason=f"needs {build.missing()}"),
]
LIMIT_S = 800.0


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with mutants.copied() as folder:
        yield folder


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_found(copy: Path, fault: mutants.Mutant) -> None:
    if missing(["typer"]) and any(START in test for test in fault.on_accelerator):
        pytest.skip("needs the command line")
    found = mutants.tried(fault, copy, (), LIMIT_S)
    assert found.is_found, found

"""What pytest must know of the tests of this folder, which import nothing of it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE, KIND, ON_GPU, cases_of

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs a GPU; a process with a GPU must not be forked to be another one."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.fresh)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test for all cases that `each` has given it."""
    for name, values in cases_of(metafunc.function):
        metafunc.parametrize(name, values)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of a test at once: the next one may hang."""
    path = os.environ.get("ONEFOLD_GPU_LINES")
    if not path or (report.when != "call" and report.outcome == "passed"):
        return
    text = report.longreprtext
    if isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    line = {
        "test": report.nodeid.removeprefix("tests/gpu/"),
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "text": text,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="session", autouse=True)
def _begun(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the first use of a GPU leaves in a process is no leak of the first test."""
    if KIND == "pretend":
        from tests.pretended import device

        # For what processes report that tests start.
        os.environ[device.LOG] = str(tmp_path_factory.mktemp("pretended") / "log")
        device.start()
    if ON_GPU:
        if not torch.accelerator.is_available():
            pytest.skip("needs a GPU")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.zeros(8, 8, device=DEVICE).mm(torch.zeros(8, 8, device=DEVICE))


@pytest.fixture(autouse=True)
def _nothing_is_reported() -> Iterator[None]:
    """What a pretended card has noticed, which need not show in bits."""
    yield
    if KIND == "pretend":
        from tests.pretended import device

        assert device.reports() == []

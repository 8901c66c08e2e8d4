from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import onefold
from tests.tables import for_each

SOURCE = Path(onefold.__file__).parent

MODULES = sorted(
    ".".join(["onefold", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.stem != "__main__"
)


def test_the_public_names_are_these() -> None:
    types = ["Checkpoint", "DeviceInfo", "Loader", "Mean", "Means", "Outcome", "OwnLength"]
    types += [
        "RunOptions",
        "Selection",
        "Shared",
        "Sliced",
        "Step",
        "Sum",
        "SyncBatchNorm",
        "Trainer",
    ]
    names = ["__version__", "build", "errors", "gather", "is_launched", "launch", "list_devices"]
    names += ["load_weights", "losses", "same_in_all_shards", "select_devices", "supervise"]
    assert onefold.__all__ == [*types, *names]
    assert len(onefold.__all__) <= 27
    assert set(onefold.__all__) == set(dir(onefold))


@for_each("name", onefold.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(onefold, name) is not None


def test_there_are_all_the_modules() -> None:
    assert {"onefold", "onefold.trainer", "onefold.exchange.exchange", "onefold.cli"} <= set(
        MODULES
    )


@for_each("name", MODULES)
def test_every_module_names_what_is_public(name: str) -> None:
    if name == "onefold.integrations.transformers":
        pytest.importorskip("transformers")
    module = importlib.import_module(name)
    assert isinstance(module.__all__, list)
    most = 27 if name == "onefold" else 20
    assert len(set(module.__all__)) == len(module.__all__) <= most
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert missing == []


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'onefold' has no attribute 'trainer_of'"):
        onefold.trainer_of  # noqa: B018


def test_the_errors_are_one_family() -> None:
    for name in onefold.errors.__all__:
        assert issubclass(getattr(onefold.errors, name), onefold.errors.OnefoldError)
    tree = onefold.errors.__doc__ or ""
    assert all(name in tree for name in onefold.errors.__all__)


@pytest.mark.processes
@pytest.mark.parametrize("module", ["onefold", "onefold.cli.main", "onefold.run.worker"])
def test_the_launcher_does_not_load_pytorch(module: str) -> None:
    """Or every run would begin a second later."""
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert answer.stdout == "[]\n"

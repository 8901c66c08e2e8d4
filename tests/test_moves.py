"""The scripts of ``examples/move``: each learns what its counterpart with onefold learns."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tables import for_each

MOVE = ROOT / "examples" / "move"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS = {  # what starts a script, and the library that it needs
    "dataparallel": ((), "torch"),
    "ddp": (TORCHRUN, "torch"),
    "accelerate": (TORCHRUN, "accelerate"),
    "fabric": ((), "lightning_fabric"),
    "lightning": ((), "lightning"),
    "gluon": ((), "mxnet"),
    "transformers": ((), "transformers"),
}
NEEDS_A_GPU = {"apex"}


def printed(name: str, folder: Path, *launcher: str) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(MOVE / f"with_{name}.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"(?:epoch \d+: )?loss ([\d.]+)", text)]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.fresh
@pytest.mark.parametrize("name", WAYS)
def test_a_script_and_that_with_onefold_learn_the_same(name: str, tmp_path: Path) -> None:
    launcher, library = WAYS[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    other = "onefold_transformers" if name == "transformers" else "onefold"
    before, after = losses(printed(name, tmp_path, *launcher)), losses(printed(other, tmp_path))
    assert len(before) == len(after) > 0
    assert before[-1] == pytest.approx(after[-1], abs=0.03)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.fresh
@pytest.mark.parametrize("name", ["onefold", "onefold_fp16", "onefold_transformers"])
def test_a_script_with_onefold_has_one_result(name: str, tmp_path: Path) -> None:
    alone = printed(name, tmp_path)
    run = ("-m", "onefold", "run", "--devices", "2")
    assert losses(printed(name, tmp_path, *run)) == losses(alone)
    if name != "onefold_transformers":
        assert printed(name, tmp_path, *run).splitlines()[-1] == alone.splitlines()[-1]


@for_each("script", sorted(MOVE.glob("*.py")))
def test_every_script_is_shown_on_a_page_and_run(script: Path) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "move").glob("*.md"))
    assert f"examples/move/{script.name}" in pages
    name = script.stem.removeprefix("with_")
    assert name in {*WAYS, *NEEDS_A_GPU} or name.startswith("onefold")
    compile(script.read_text(), script.name, "exec")


def test_every_page_leads_to_verify() -> None:
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "move").glob("*.md")}
    assert "## Run `onefold verify` first" in pages.pop("index")
    assert all(text.count("(index.md#run-onefold-verify-first)") == 1 for text in pages.values())

"""The gallery: what the page shows of each script, and the smallest scripts on simulated devices.

`docs.execute` runs all of them, in a test of the pages that is marked full.
"""

import re
from pathlib import Path
from runpy import run_path

import pytest
import sklearn  # noqa: F401  # sets variables of the environment when it is loaded
from docs import execute

from onefold.testing import simulate
from tests.conftest import ROOT
from tests.tables import for_each

FOLDER = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "examples.md"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
MOST_BYTES = 60_000


@for_each("name", SCRIPTS)
def test_the_page_shows_each_script_on_one_device_and_on_two(name: str) -> None:
    text = PAGE.read_text()
    assert execute.MADE_ON.search(text)
    assert f"(../examples/gallery/{name}.py)" in text
    command = rf"\$ onefold run --devices {{}} examples/gallery/{name}\.py[^\n]*\n((?:[^$`].*\n)+)"
    one, two = (re.findall(command.format(devices), text) for devices in (1, 2))
    assert len(one) == len(two) == 1
    assert one[0].endswith(two[0])
    assert len(execute.FINGERPRINT.findall(two[0])) == 1
    if (picture := f"gallery/{name}.png") in execute.PICTURE.findall(text):
        assert (PAGE.parent / picture).stat().st_size < MOST_BYTES


@for_each("name", ["reinforce", "vae"])
def test_a_short_run_has_the_same_bits_and_a_picture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = run_path(str(FOLDER / f"{name}.py"))["main"]
    one, two = (simulate(main, devices, args=(1,)) for devices in (1, 2))
    assert two == one * 2
    assert (tmp_path / f"{name}.png").exists()

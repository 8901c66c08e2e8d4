from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from onefold.errors import DataError
from onefold.jobs.report import build_report, compare_runs
from onefold.jobs.report.words import NOTHING
from tests.jobs.report import runs
from tests.jobs.report.pages import Page, check_sound

pytest.importorskip("matplotlib", reason='needs pip install "onefold[report]"')

ONE_CPU = 'lr = 0.1\nbatch = 64\ndata = "pets"\ndevices = "cpu:1"\n'
TWO_CPUS = 'devices = "cpu:2"\ndata = "pets"\nbatch = 64\nlr = 0.2\nwarmup = true\n'


def run(folder: Path, *, options: str = ONE_CPU, epochs: int = 3, **facts: object) -> Path:
    told = runs.facts_of("text", name="pets", **facts)
    return runs.write_run(folder, told, metrics=runs.metrics_of(epochs), options=options)


def test_runs_are_side_by_side(tmp_path: Path) -> None:
    """Two of one name, of which the second has no report, and one that has just begun."""
    first = run(tmp_path / "first run #1", fingerprint="663f3e2011a53901", devices=["cpu"])
    build_report(first)
    second = run(tmp_path / "second", options=TWO_CPUS, epochs=5, fingerprint="663f3e2011a53901")
    begun = runs.write_run(tmp_path / "third", runs.facts_of("text", name="<i>&"), options=ONE_CPU)
    page = Page(compare_runs([first, second, begun], tmp_path / "pages" / "all.html"))
    check_sound(page)
    said = ["text, resnet18", "2 x cpu", "highest accuracy"]
    results = [row for row in page.rows if len(row) == 11][1:]
    assert results[0][2:7] == ["1 x cpu", "highest accuracy", "68.3%", "3", "68.3%"]
    assert results[1:] == [
        [*("2. pets", *said, "77.5%", "4", "75.0%", "5", "8 min 20 s", "62.5"), "663f3e2011a53901"],
        ["3. <i>&", *said, NOTHING, NOTHING, NOTHING, "0", NOTHING, NOTHING, NOTHING],
    ]
    assert [row for row in page.rows if len(row) == 4] == [
        ["option", "1. pets", "2. pets", "3. <i>&"],
        ["devices", "cpu:1", "cpu:2", "cpu:1"],
        ["lr", "0.1", "0.2", "0.1"],
        ["warmup", NOTHING, "true", NOTHING],
    ]
    links = [given["href"] for name, given in page.elements if name == "a"]
    assert list(map(unquote, links)) == ["../first run #1/report.html"]
    assert "#" not in links[0]
    told = {label.partition(".")[0]: label for label in page.attributes("aria-label")}
    assert told["Test accuracy by epoch"].endswith(
        "1. pets: from 0.4 to 0.6833; 2. pets: from 0.4 to 0.75"
    )
    assert "2. pets: from 2 to 0.4" in told["Training loss by epoch"]
    assert "Test accuracy by time by minutes" in told
    assert page.attributes("class").count("chart") == 5
    assert "The same model, to the last bit: 1. pets and 2. pets." in page.text


def test_runs_of_other_scores_or_none_can_be_compared(tmp_path: Path) -> None:
    folders = [run(tmp_path / "text"), runs.segmented_run(tmp_path / "segment")]
    page = Page(compare_runs(folders, tmp_path / "all.html"))
    assert page.course("Test iou") == "2. my segment: from 0.4 to 0.75"
    begun = [runs.write_run(tmp_path / name) for name in "ab"]
    page = Page(compare_runs(begun, tmp_path / "all.html"))
    check_sound(page)
    assert "None of the runs has ended an epoch yet" in page.text
    assert "None: the runs were started with the same options." in page.text
    assert "The same model" not in page.text
    with pytest.raises(ValueError, match="expected one run or more, got none"):
        compare_runs([], tmp_path / "none.html")
    with pytest.raises(DataError, match=r"none is not the folder of a run: there is no run\.json"):
        compare_runs([*folders, tmp_path / "none"], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()

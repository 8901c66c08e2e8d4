from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from onefold.errors import DataError
from onefold.jobs.report import build_report, compare_runs
from onefold.jobs.report.words import NOTHING
from tests.jobs.report import runs
from tests.jobs.report.pages import Page, check_accessible, check_stands_alone

pytest.importorskip("matplotlib", reason='needs pip install "onefold[report]"')

ONE_CPU = 'lr = 0.1\nbatch = 64\ndata = "pets"\ndevices = "cpu:1"\n'
TWO_CPUS = 'devices = "cpu:2"\ndata = "pets"\nbatch = 64\nlr = 0.2\nwarmup = true\n'


def run(
    folder: Path, *, name: str = "pets", options: str = ONE_CPU, epochs: int = 3, **facts: object
) -> Path:
    """A run of text with these facts and options."""
    return runs.write_run(
        folder,
        runs.facts_of("text", name=name, **facts),
        metrics=runs.metrics_of(epochs),
        options=options,
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Two runs of one name, of which the second has no report, and one that has just begun."""
    folder = tmp_path_factory.mktemp("compared")
    first = run(folder / "first run #1", fingerprint="663f3e2011a53901", devices=["cpu"])
    build_report(first)
    second = run(folder / "second", options=TWO_CPUS, epochs=5, fingerprint="663f3e2011a53901")
    begun = runs.write_run(folder / "third", runs.facts_of("text", name="<i>&"), options=ONE_CPU)
    return Page(compare_runs([first, second, begun], folder / "pages" / "all.html"))


def test_the_page_is_sound_and_needs_nothing_else(page: Page) -> None:
    check_accessible(page)
    check_stands_alone(page)


def test_results_are_side_by_side(page: Page) -> None:
    said = ["text, resnet18", "2 x cpu", "highest accuracy"]
    results = [row for row in page.rows if len(row) == 11][1:]
    assert results[0][2:7] == ["1 x cpu", "highest accuracy", "68.3%", "3", "68.3%"]
    assert results[1] == [
        *("2. pets", *said, "77.5%", "4", "75.0%", "5", "8 min 20 s", "62.5"),
        "663f3e2011a53901",
    ]
    assert results[2] == [
        *("3. <i>&", *said, NOTHING, NOTHING, NOTHING, "0", NOTHING, NOTHING, NOTHING)
    ]


def test_reports_are_linked_by_relative_path(page: Page) -> None:
    links = [given["href"] for name, given in page.elements if name == "a"]
    assert list(map(unquote, links)) == ["../first run #1/report.html"]
    assert "#" not in links[0]


def test_only_options_that_differ_are_listed(page: Page) -> None:
    rows = [row for row in page.rows if len(row) == 4]
    assert rows == [
        ["option", "1. pets", "2. pets", "3. <i>&"],
        ["devices", "cpu:1", "cpu:2", "cpu:1"],
        ["lr", "0.1", "0.2", "0.1"],
        ["warmup", NOTHING, "true", NOTHING],
    ]


def test_curves_lie_over_each_other(page: Page) -> None:
    told = {label.partition(".")[0]: label for label in page.attributes("aria-label")}
    assert told["Test accuracy by epoch"].endswith(
        "1. pets: from 0.4 to 0.6833; 2. pets: from 0.4 to 0.75"
    )
    assert "2. pets: from 2 to 0.4" in told["Training loss by epoch"]
    assert "Test accuracy by time by minutes" in told
    charts = [given for name, given in page.elements if given.get("class") == "chart"]
    assert len(charts) == 5


def test_models_of_the_same_bits_are_named(page: Page) -> None:
    assert "The same model, to the last bit: 1. pets and 2. pets." in page.text


def test_runs_with_the_same_options_are_told_so(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, fingerprint=name * 8) for name in ("aa", "bb")]
    page = Page(compare_runs(folders, tmp_path / "all.html"))
    assert "None: the runs were started with the same options." in page.text
    assert "The same model" not in page.text


def test_runs_that_have_all_just_begun_can_be_compared(tmp_path: Path) -> None:
    folders = [runs.write_run(tmp_path / name, runs.facts_of("text")) for name in "ab"]
    page = Page(compare_runs(folders, tmp_path / "all.html"))
    assert "None of the runs has ended an epoch yet" in page.text
    check_accessible(page)


def test_jobs_of_different_scores_can_be_compared(tmp_path: Path) -> None:
    folders = [run(tmp_path / "text"), runs.segmented_run(tmp_path / "segment")]
    page = Page(compare_runs(folders, tmp_path / "all.html"))
    (told,) = (label for label in page.attributes("aria-label") if "Test iou" in label)
    assert told == "Test iou by epoch. 2. my segment: from 0.4 to 0.75"


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one run or more, got none"):
        compare_runs([], tmp_path / "all.html")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    good = run(tmp_path / "good")
    with pytest.raises(DataError, match=r"none is not the folder of a run: there is no run\.json"):
        compare_runs([good, tmp_path / "none"], tmp_path / "all.html")
    assert not (tmp_path / "all.html").exists()

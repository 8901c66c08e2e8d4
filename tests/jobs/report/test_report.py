from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold.cli.main import app
from onefold.errors import DataError, LaunchError
from onefold.jobs.report import build_report
from onefold.jobs.report.page import page, write_page
from onefold.jobs.report.words import NOTHING
from tests.jobs.report import runs
from tests.jobs.report.pages import Page, check_accessible, check_stands_alone
from tests.tables import for_each

matplotlib = pytest.importorskip("matplotlib", reason='needs pip install "onefold[report]"')


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages of a finished run of each kind."""
    made = (
        ("classify", runs.classified_run),
        ("text", runs.text_run),
        ("segment", runs.segmented_run),
    )
    folder = tmp_path_factory.mktemp("runs")
    return {kind: Page(build_report(make(folder / kind))) for kind, make in made}


def page_of(folder: Path, **contents: object) -> Page:
    """The page of a run with this and nothing else."""
    return Page(
        build_report(runs.write_run(folder, **{"facts": runs.facts_of("text"), **contents}))
    )


def figure(page: Page, name: str) -> str:
    """What the summary says under a name."""
    pattern = rf"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>"
    (found,) = re.findall(pattern, page.source)
    return re.sub("<[^>]*>", " ", found)


def course(page: Page, title: str) -> str:
    """How a chart is described to those who do not see it; none where there is no chart."""
    told = [label for label in page.attributes("aria-label") if label.startswith(f"{title} by ")]
    return told[0] if told else ""


@pytest.mark.parametrize("kind", ["classify", "text", "segment"])
def test_the_page_is_sound_and_needs_nothing_else(pages: dict[str, Page], kind: str) -> None:
    check_accessible(pages[kind])
    check_stands_alone(pages[kind])


def test_the_page_of_one_run_can_be_written_elsewhere(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"))
    output = tmp_path / "pages" / "one.html"
    assert build_report(folder, output) == output
    assert not (folder / "report.html").exists()
    assert output.read_text() == build_report(folder).read_text()


@for_each("kind", ["a file", "a link"])
def test_a_page_is_not_written_over_files_of_others(tmp_path: Path, kind: str) -> None:
    theirs, output = tmp_path / "theirs.html", tmp_path / "page.html"
    theirs.write_text("<!doctype html><title>theirs</title>")
    if kind == "a file":
        theirs.rename(output)
        theirs = output
    else:
        output.symlink_to(theirs)
    with pytest.raises(ValueError, match="expected a new file, or a page of onefold"):
        write_page(output, page("page.html.j2", title="ours"))
    assert "theirs" in theirs.read_text()
    output.unlink()
    write_page(output, page("page.html.j2", title="before"))
    write_page(output, page("page.html.j2", title="ours"))
    assert "ours" in output.read_text()


def test_a_page_of_before_the_templates_is_written_over(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    policy = "default-src &#x27;none&#x27;; img-src data:; style-src &#x27;unsafe-inline&#x27;"
    output.write_text(f'<!doctype html>\n<html lang="en"><head><meta content="{policy}"></head>')
    write_page(output, page("page.html.j2", title="ours"))
    assert "ours" in output.read_text()


@for_each("count", [1, 2])
def test_the_command_writes_where_it_is_told(tmp_path: Path, count: int) -> None:
    folders = [runs.write_run(tmp_path / f"run {n}", runs.facts_of("text")) for n in range(count)]
    output = tmp_path / "page.html"
    words = ["report", *map(str, folders), "--output", str(output)]
    done = CliRunner().invoke(app, words)
    assert done.exception is None
    pages = [] if count == 1 else [folder / "report.html" for folder in folders]
    assert done.output.splitlines() == [str(page) for page in (*pages, output)]
    assert "<html" in output.read_text()


def test_the_command_does_not_take_a_folder_for_a_page(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"))
    done = CliRunner().invoke(app, ["report", str(folder), "--output", str(tmp_path)])
    assert "expected a file for the page, this is a folder" in str(done.exception)


@for_each(
    ("epoch", "words"),
    [(3, "by the model after epoch 4, the best one."), (9, "by the model after epoch 10.")],
)
def test_it_is_said_of_which_epoch_the_examples_are(tmp_path: Path, epoch: int, words: str) -> None:
    facts = {**runs.facts_of("text"), "best": {"epoch": 3, "score": "accuracy", "value": 0.5}}
    examples = {"kind": "text", "samples": [], "worst": [], "epoch": epoch}
    page = page_of(tmp_path / "run", facts=facts, examples=examples)
    assert f"What follows is {words}" in page.source


def test_the_page_lies_in_the_folder_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"))
    before = {path.name for path in folder.iterdir()}
    assert build_report(folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = runs.text_run(tmp_path / "run")
    first = build_report(folder).read_bytes()
    assert build_report(folder).read_bytes() == first


def test_nothing_global_of_matplotlib_is_touched(tmp_path: Path) -> None:
    def state() -> tuple[bool, dict[str, object]]:
        names = set(matplotlib.rcParams) - {"backend"}  # looking at that one would choose one
        settings = {name: matplotlib.rcParams[name] for name in names}
        return "matplotlib.pyplot" in sys.modules, settings

    before = state()
    build_report(
        runs.write_run(tmp_path / "run", runs.facts_of("text"), metrics=runs.metrics_of(2))
    )
    assert state() == before


def test_the_summary(pages: dict[str, Page]) -> None:
    page = pages["classify"]
    assert page.headings[0] == (1, "my classify")
    assert figure(page, "Best test accuracy").split() == ["82.9%", "in", "epoch", "7"]
    assert figure(page, "Last test accuracy").split() == ["78.8%", "after", "8", "epochs"]
    assert figure(page, "Samples/s in training") == "62.5"
    assert figure(page, "Time of training and tests") == "13 min 20 s"
    assert figure(page, "Model") == "resnet18, 11,173,962 parameters"
    assert figure(page, "Started") == "2026-11-21 14:02 UTC"
    assert figure(page, "Devices") == "2 x cpu, 8 shards"
    assert figure(page, "Samples") == "5,000 to train, 1,000 to test"
    assert "663f3e2011a53901" in figure(page, "Fingerprint of the model")


def test_the_best_epoch_is_found_where_the_run_does_not_tell_it(pages: dict[str, Page]) -> None:
    assert figure(pages["segment"], "Best test iou").split() == ["0.775", "in", "epoch", "4"]


def test_a_score_may_be_best_where_it_is_lowest(tmp_path: Path) -> None:
    lines = [
        runs.epoch_line(epoch, scores={"loss": loss}) for epoch, loss in enumerate((0.9, 0.4, 0.5))
    ]
    page = page_of(
        tmp_path / "run", facts=runs.facts_of("text", score="lowest loss"), metrics=lines
    )
    assert figure(page, "Best test loss").split() == ["0.4", "in", "epoch", "2"]


def test_the_curves_tell_their_course(pages: dict[str, Page]) -> None:
    told = course(pages["classify"], "Loss")
    assert "training, mean of the epoch: from 2 to 0.25" in told
    assert "test: from 1.467 to 0.4235" in told
    assert "accuracy: from 0.4 to 0.7875" in course(pages["classify"], "Test accuracy")
    assert "from 0.0995 to 0.06" in course(pages["classify"], "Learning rate")
    assert "epoch: from 62.5 to 62.5" in course(pages["classify"], "Training speed in samples/s")


def test_charts_take_their_colours_from_the_page(pages: dict[str, Page]) -> None:
    charts = re.findall(r'<svg class="chart".*?</svg>', pages["classify"].source, flags=re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        assert "currentColor" in chart
        assert "var(--c" in chart
        assert not re.search(r"#[0-9a-f]{6}\b(?!-)", chart)


def test_every_epoch_is_told_in_numbers(pages: dict[str, Page]) -> None:
    row = ["2", "200", "1", "0.96", "65.0%", "0.1", "1 min 20 s", "20.0 s", "62.5"]
    assert pages["text"].row("2") == row


def test_the_time_of_each_device_is_told_by_phase(pages: dict[str, Page]) -> None:
    headings = ["data", "forward", "backward", "exchange", "update", "evaluation", "other"]
    page = pages["text"]
    assert ["device", *headings, "together"] in page.rows
    assert page.row("0: cpu") == [
        "0: cpu",
        "0.5% 1.5 s",
        "25.0% 1 min 15 s",
        "48.0% 2 min 24 s",
        "4.0% 12.0 s",
        "1.5% 4.5 s",
        "20.0% 1 min 0 s",
        "1.0% 3.0 s",
        "5 min 0 s",
    ]
    assert page.row("1: cpu")[4] == "4.5% 13.5 s"
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", page.source)]
    assert sum(widths) == pytest.approx(2 * 100, abs=0.01)


def test_right_and_wrong_are_told_in_words(pages: dict[str, Page]) -> None:
    text = pages["classify"].text
    assert text.count("✓ right") == 8
    assert text.count("✗ wrong") == 4 + 4  # each mistake is among the worst once more
    assert "✗ wrong true: ship predicted: cat (95.0%) test/2.png" in text


def test_pictures_are_in_the_page(pages: dict[str, Page]) -> None:
    assert len(pages["classify"].attributes("src")) == 12 + 4
    assert len(pages["segment"].attributes("src")) == 3 * (6 + 2)
    assert "000.jpg: prediction" in pages["segment"].attributes("alt")
    assert "IoU 0.41 , Dice 0.5816" in pages["segment"].text


def test_names_and_sentences_are_text_and_nothing_else(pages: dict[str, Page]) -> None:
    assert '<b>&"' in pages["classify"].text
    assert "<b>&amp;" not in pages["classify"].source
    assert "&lt;b&gt;&amp;&quot;" in pages["classify"].source
    assert runs.EVIL_SENTENCE in pages["text"].text
    assert "<script" not in pages["text"].source
    assert "train/cat/<7>.jpg: cannot be read" in pages["classify"].text


def test_everything_a_run_says_is_escaped(tmp_path: Path) -> None:
    evil = "<img src=http://x onerror=alert(1)>'\""
    facts = runs.facts_of(evil, name=evil, model=evil, fingerprint=evil, devices=[evil])
    facts |= {"score": f"highest {evil}", "left_out": [evil], "classes": [evil], "onefold": evil}
    line = runs.epoch_line(0, scores={"loss": 1.0, evil: 0.5})
    line["devices"][0]["device"] = evil
    sample = {"name": evil, "label": evil, "predicted": evil, "confidence": 1.0, "picture": evil}
    examples = {"kind": "classify", "classes": [evil], "confusion": [[1]], "samples": [sample]}
    page = page_of(
        tmp_path / "run",
        facts=facts,
        metrics=[line],
        examples=examples,
        options=f"{'x'} = '''{evil}'''",
    )
    assert page.attributes("src") == []
    assert "<img" not in page.source
    check_accessible(page)
    check_stands_alone(page)


@for_each("kind", ["segment", "text"])
def test_everything_said_of_a_sample_is_escaped(tmp_path: Path, kind: str) -> None:
    evil = "</b><img src=http://x onerror=alert(1)>{{ 7 * 7 }}'\""
    names = ("name", "label", "predicted", "text", "image", "mask", "prediction", "iou")
    sample = dict.fromkeys(names, evil) | {"text": evil * 20}
    examples = {"kind": kind, "threshold": evil, "samples": [sample], "worst": [sample]}
    facts = runs.facts_of(kind, notes=[evil], left_out=[evil] * 6, started=evil, shards=evil)
    page = page_of(tmp_path / "run", facts=facts, examples=examples)
    assert "<img" not in page.source
    assert "{{ 7 * 7 }}" in page.text
    check_accessible(page)
    check_stands_alone(page)


def test_the_confusion_matrix(pages: dict[str, Page]) -> None:
    page = pages["text"]
    assert [row for row in page.rows if row[0] in ("negative", "positive")] == [
        ["negative", "90 98.9%", "1 1.1%"],
        ["positive", "7 7.2%", "90 92.8%"],
        ["positive", "negative", "7", "7.2%"],
        ["negative", "positive", "1", "1.1%"],
    ]
    assert "Most frequent confusions" in page.text


def test_a_model_without_mistakes_is_told_so(tmp_path: Path) -> None:
    examples = {"kind": "text", "classes": ["a", "b"], "confusion": [[5, 0], [0, 0]]}
    page = page_of(tmp_path / "run", examples=examples)
    assert page.row("a") == ["a", "5 100.0%", "0"]
    assert "There are none: every test sample was classified rightly." in page.text


def test_many_classes_scroll_in_their_box(tmp_path: Path) -> None:
    classes = [f"class {number}" for number in range(100)]
    page = Page(build_report(runs.classified_run(tmp_path / "run", classes=classes, epochs=1)))
    matrix = [row for row in page.rows if len(row) == 101]
    assert len(matrix) == 101
    assert matrix[2][:4] == ["class 1", "7", "90", "1"]
    assert matrix[1][3] == ""
    confusions = [row for row in page.rows if len(row) == 4 and row[0].startswith("class")]
    assert len(confusions) == 10
    assert confusions[0] == ["class 1", "class 0", "7", "7.1%"]
    places = [given for _, given in page.elements]
    (matrix_at,) = (at for at, given in enumerate(places) if given.get("class") == "many confusion")
    assert places[matrix_at - 1]["class"] == "scroll"
    assert places[matrix_at - 1]["tabindex"] == "0"


def test_options_are_folded(pages: dict[str, Page]) -> None:
    assert pages["text"].row("lr") == ["lr", "0.1"]
    assert pages["text"].row("devices") == ["devices", "cpu:2"]
    folded = re.findall(r"<details>.*?</details>", pages["text"].source, flags=re.DOTALL)
    assert any("From config.toml" in part for part in folded)


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    assert figure(page, "Best test accuracy") == NOTHING
    assert figure(page, "Finished") == "not yet"
    assert "No epoch has ended yet" in page.text
    assert "There are no sample predictions yet" in page.text
    assert [text for _, text in page.headings] == ["my text", "Options"]
    check_accessible(page)


def test_before_the_first_epoch_there_are_curves_of_the_steps(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", metrics=[runs.steps_line(50, loss=2.5)])
    assert course(page, "Loss") == "Loss by step. training: from 2.5 to 2.5"
    assert figure(page, "Samples/s in training") == "61.0"


def test_one_epoch_is_enough(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", metrics=runs.metrics_of(1))
    assert figure(page, "Last test accuracy").split() == ["35.0%", "after", "1", "epoch"]
    assert "accuracy: from 0.35 to 0.35" in course(page, "Test accuracy")


def test_numbers_that_were_not_finite_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    lines = [runs.steps_line(step, loss=None if step == 20 else 1.5) for step in (10, 20, 30)]
    nulls = dict.fromkeys(("loss", "lr", "train_s", "evaluate_s", "samples_per_s"))
    scores = {"loss": None, "accuracy": None}
    page = page_of(tmp_path / "run", metrics=[*lines, runs.epoch_line(0, scores=scores, **nulls)])
    assert "training (1 number not finite, left out)" in page.text
    assert course(page, "Test accuracy") == ""
    assert page.row("1") == ["1", "100", *[NOTHING] * 7]
    assert "nan" not in page.text.lower()


def test_a_resumed_run_is_shown_as_one(tmp_path: Path) -> None:
    """It was stopped after step 30 of epoch 2 and went on from the end of epoch 1."""
    first = [runs.steps_line(10, loss=3.0), runs.epoch_line(0, scores={"accuracy": 0.5})]
    lost = [runs.steps_line(120, loss=9.0), runs.steps_line(130, loss=9.0)]
    again = [runs.steps_line(110, loss=2.0), runs.epoch_line(1, scores={"accuracy": 0.6})]
    page = page_of(tmp_path / "run", metrics=[*first, *lost, *again])
    assert "training: from 3 to 2;" in course(page, "Loss")
    assert figure(page, "Time of training and tests") == "3 min 20 s"
    assert figure(page, "Best test accuracy").split() == ["60.0%", "in", "epoch", "2"]


@for_each("cut", ['{"kind": "steps", "epoch": 0, "st', '{"kind": "epoch"}', "17"])
def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path, cut: str) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"), metrics=runs.metrics_of(2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(cut)
    page = Page(build_report(folder))
    assert "1 line of metrics.jsonl left out: cut short" in page.text
    assert figure(page, "Last test accuracy").split() == ["60.0%", "after", "2", "epochs"]


HUGE = 10**400


@for_each(
    "damage",
    [
        {"epoch": "x"},
        {"epoch": HUGE},
        {"step": HUGE},
        {"step": True},
        {"scores": [1]},
        {"scores": "\ud800"},
        {"devices": 3},
        {"devices": [3]},
    ],
)
def test_a_line_of_another_shape_is_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    lines = [*runs.metrics_of(2), {**runs.epoch_line(2, scores={"accuracy": 0.9}), **damage}]
    page = page_of(tmp_path / "run", metrics=lines)
    assert "1 line of metrics.jsonl left out: cut short" in page.text
    assert figure(page, "Last test accuracy").split() == ["60.0%", "after", "2", "epochs"]


def test_a_number_too_large_for_a_float_is_none(tmp_path: Path) -> None:
    best = {"epoch": 0, "score": "accuracy", "value": HUGE}
    lines = [runs.steps_line(10, loss=HUGE), runs.epoch_line(0, scores={"accuracy": HUGE})]
    page = page_of(tmp_path / "run", facts=runs.facts_of("text", best=best), metrics=lines)
    assert figure(page, "Best test accuracy").split() == [NOTHING, "in", "epoch", "1"]
    assert figure(page, "Last test accuracy").split() == [NOTHING, "after", "1", "epoch"]


@for_each(
    ("name", "content"),
    [
        ("run.json", {"best": 3}),
        ("run.json", {"best": {"epoch": "x"}}),
        ("run.json", {"best": {}}),
        ("run.json", {"classes": 3}),
        ("run.json", {"devices": 3}),
        ("run.json", {"notes": True}),
        ("run.json", {"left_out": 1.5}),
        ("examples.json", {"kind": ["text"]}),
        ("examples.json", {"kind": "text", "samples": [3]}),
        ("examples.json", {"kind": "text", "worst": {"label": "a"}}),
        ("examples.json", {"kind": "text", "confusion": [1, 2]}),
        ("examples.json", {"kind": "text", "confusion": [[-1]]}),
        ("examples.json", {"kind": "text", "confusion": [[1, 2], [3]]}),
        ("examples.json", {"kind": "text", "confusion": [[1]], "classes": ["a", "b"]}),
    ],
)
def test_a_file_of_another_shape_is_named(tmp_path: Path, name: str, content: object) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"))
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"{re.escape(name)}: expected"):
        build_report(folder)


@for_each("name", ["metrics.jsonl", "examples.json", "run.json", "config.toml"])
def test_a_link_to_a_file_elsewhere_is_not_read(tmp_path: Path, name: str) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"), metrics=runs.metrics_of(1))
    (tmp_path / "theirs").write_text('{"kind": "theirs"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match=rf"{re.escape(name)}: .*expected a file, got a link"):
        build_report(folder)


@for_each("options", ["a = 1\n" + "#" * (1 << 20), ".".join("a" * 5000) + " = 1"])
def test_options_that_no_run_has_written_are_refused(tmp_path: Path, options: str) -> None:
    with pytest.raises(DataError, match=r"config\.toml: expected TOML"):
        page_of(tmp_path / "run", options=options)


def test_a_moment_that_no_calendar_has_is_not_shown(tmp_path: Path) -> None:
    facts = runs.facts_of("text", started="0001-01-01T00:00:00+23:59")
    assert figure(page_of(tmp_path / "run", facts=facts), "Started") == NOTHING


def test_a_line_behind_one_that_was_cut_short_is_read(tmp_path: Path) -> None:
    """The run went on in the file as it was."""
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"), metrics=runs.metrics_of(1))
    line = json.dumps(runs.epoch_line(1, scores={"accuracy": 0.75}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "steps", "epo' + line + "\n")
    page = Page(build_report(folder))
    assert "1 line of metrics.jsonl left out: cut short" in page.text
    assert figure(page, "Last test accuracy").split() == ["75.0%", "after", "2", "epochs"]


def test_a_character_that_was_cut_in_two_is_left_out(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"), metrics=runs.metrics_of(1))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"kind": "é'.encode()[:-1])
    assert "1 line of metrics.jsonl left out: cut short" in Page(build_report(folder)).text


@for_each("name", ["pictures/none.png", "../secret.png", "run.json", None, "a\0b"])
def test_a_picture_that_is_not_the_runs_own_png_is_not_shown(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.png").write_bytes(runs.coloured(0))
    sample = {"name": "1.png", "label": "a", "predicted": "a", "confidence": None, "picture": name}
    page = page_of(tmp_path / "run", examples={"kind": "classify", "samples": [sample]})
    assert page.attributes("src") == []
    assert "no picture" in page.text
    assert f"predicted: a ({NOTHING})" in page.text


def test_names_that_are_no_text_are_shown_as_far_as_they_are(tmp_path: Path) -> None:
    facts = runs.facts_of("text", left_out=["caf\udce9.jpg: cannot be read"])
    assert "caf?.jpg: cannot be read" in page_of(tmp_path / "run", facts=facts).text


@for_each(
    ("present", "missing"),
    [
        ((), "there is no run.json and no config.toml; give the folder that a training made"),
        (("run.json",), "there is no config.toml"),
        (("config.toml",), "there is no run.json"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    for name in present:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path))} is not .* {missing}"):
        build_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@for_each(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run.json: expected JSON"),
        ("run.json", "[]", "run.json: expected a JSON object, got list"),
        ("config.toml", "lr = ", "config.toml: expected TOML"),
        ("examples.json", "", "examples.json: expected JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"))
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=message):
        build_report(folder)


def test_matplotlib_is_asked_for_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.write_run(tmp_path / "run", runs.facts_of("text"), metrics=runs.metrics_of(1))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LaunchError, match=r'run: pip install "onefold\[report\]"'):
        build_report(folder)


def test_a_long_run_is_drawn_with_fewer_points(tmp_path: Path) -> None:
    lines = [runs.steps_line(step, loss=2 + step % 2) for step in range(1, 20001)]
    page = page_of(tmp_path / "run", metrics=lines)
    assert len(page.source) < 150_000
    assert course(page, "Loss") == "Loss by step. training: from 3 to 2"

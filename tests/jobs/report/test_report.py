import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from onefold.errors import DataError
from onefold_jobs.report import build_report, compare_runs
from onefold_jobs.report.folder import read_reported
from onefold_jobs.report.page import page, write_page
from onefold_jobs.report.words import NOTHING
from tests.jobs.report import runs
from tests.jobs.report.pages import Page, check_sound
from tests.tables import for_each

matplotlib = pytest.importorskip("matplotlib", reason='needs pip install "onefold-jobs[report]"')


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages of a run of each kind, of which the first has finished."""
    made = {"classify": runs.classified_run, "text": runs.text_run, "segment": runs.segmented_run}
    folder = tmp_path_factory.mktemp("runs")
    found = {kind: Page(build_report(make(folder / kind))) for kind, make in made.items()}
    for each in found.values():
        check_sound(each)
    return found


def page_of(folder: Path, **contents: Any) -> Page:
    """The page of a run with this and nothing else."""
    return Page(build_report(runs.write_run(folder, **contents)))


def test_the_page_lies_in_the_folder_or_elsewhere_and_is_always_the_same(tmp_path: Path) -> None:
    folder = runs.text_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    output = tmp_path / "pages" / "one.html"
    assert build_report(folder, output) == output
    assert {path.name for path in folder.iterdir()} == before
    assert build_report(folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    assert output.read_bytes() == (folder / "report.html").read_bytes()


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
    policy = "default-src &#x27;none&#x27;; img-src data:; style-src &#x27;unsafe-inline&#x27;"
    old = f'<!doctype html>\n<html lang="en"><head><meta content="{policy}"></head>'
    output.write_text(old)  # as before there were templates
    for title in ("before", "ours"):
        write_page(output, page("page.html.j2", title=title))
        assert title in output.read_text()


def test_the_summary_is_whole(pages: dict[str, Page]) -> None:
    page = pages["classify"]
    assert page.headings[0] == (1, "my classify")
    assert page.figures == {
        "Best test accuracy": "82.9% in epoch 7, chosen on this test set",
        "Last test accuracy": "78.8% after 8 epochs",
        "Training samples/s": "62.5",
        "Training and test time": "13 min 20 s",
        "Job": "classify",
        "Model": "resnet18, 11,173,962 parameters",
        "Started": "2026-11-21 14:02 UTC",
        "Finished": "2026-11-21 14:20 UTC",
        "Devices": "2 x cpu, 8 shards",
        "Samples": "5,000 training, 1,000 test",
        "Classes": "3",
        "Best epoch selected by": "highest accuracy",
        "Fingerprint after the last epoch": "663f3e2011a53901",
        "Versions": "onefold 0.1.0, PyTorch 2.13.0",
    }
    assert pages["segment"].figures["Best test iou"] == "77.5% in epoch 4, chosen on this test set"
    assert "Image classification" in pages["classify"].text


def test_the_lowest_may_be_best_and_the_speed_is_samples_over_seconds(tmp_path: Path) -> None:
    facts = runs.facts_of("text", score="lowest loss", best={"epoch": 2, "value": 0.4})
    told = ((0.9, 10.0, 100.0), (0.4, 30.0, 20.0), (0.5, 0.0, 1e9))
    lines = [
        runs.epoch_line(epoch, scores={"loss": loss}, train_s=train_s, samples_per_s=speed)
        for epoch, (loss, train_s, speed) in enumerate(told)
    ]
    figures = page_of(tmp_path / "run", facts=facts, metrics=lines).figures
    assert figures["Best test loss"] == "0.4 in epoch 2, chosen on this test set"
    assert figures["Training samples/s"] == "40.0"


def test_the_curves_tell_their_course(pages: dict[str, Page]) -> None:
    page = pages["classify"]
    assert page.course("Loss") == (
        "training: from 2.103 to 0.4274; training, mean of the epoch: from 2 to 0.25; "
        "test: from 1.467 to 0.4235"
    )
    assert page.course("Test accuracy") == "accuracy: from 0.4 to 0.7875"
    assert page.course("Learning rate") == "learning rate: from 0.0995 to 0.06"
    assert page.course("Training speed in samples/s") == (
        "steps: from 66 to 62; mean of the epoch: from 62.5 to 62.5"
    )
    assert page.attributes("class").count("chart") == 4


def test_the_tables_are_whole(pages: dict[str, Page]) -> None:
    page = pages["text"]
    usual = ["0.1", "1 min 20 s", "20.0 s", "62.5"]
    told = "epoch,step,training loss,test loss,test accuracy,learning rate,training,evaluation"
    assert page.rows == [
        [*told.split(","), "samples/s"],
        ["1", "100", "2", "1.467", "40.0%", *usual],
        ["2", "200", "1", "0.96", "65.0%", *usual],
        ["3", "300", "0.6667", "0.7429", "68.3%", *usual],
        ["phase", "0: cpu", "1: cpu"],
        ["data", "0.5% 1.5 s", "0.5% 1.5 s"],
        ["forward", "25.0% 1 min 15 s", "25.0% 1 min 15 s"],
        ["backward", "48.0% 2 min 24 s", "48.0% 2 min 24 s"],
        ["exchange", "4.0% 12.0 s", "4.5% 13.5 s"],
        ["update", "1.5% 4.5 s", "1.5% 4.5 s"],
        ["evaluation", "20.0% 1 min 0 s", "20.0% 1 min 0 s"],
        ["other", "1.0% 3.0 s", "0.5% 1.5 s"],
        ["total", "5 min 0 s", "5 min 0 s"],
        ["class", "test", "precision", "recall", "F1"],
        ["negative", "91", "92.8%", "98.9%", "95.7%"],
        ["positive", "97", "98.9%", "92.8%", "95.7%"],
        ["score", "model", "baseline"],
        ["accuracy", "95.7%", NOTHING],
        ["balanced-accuracy", "95.8%", NOTHING],
        ["macro-f1", "95.7%", NOTHING],
        ["true → predicted", "negative", "positive"],
        ["negative", "90 98.9%", "1 1.1%"],
        ["positive", "7 7.2%", "90 92.8%"],
        ["true class", "predicted class", "count", "share of the true class"],
        ["positive", "negative", "7", "7.2%"],
        ["negative", "positive", "1", "1.1%"],
        ["option", "value"],
        ["devices", "cpu:2"],
        ["job", "classify"],
        ["lr", "0.1"],
    ]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", page.source)]
    assert sum(widths) == pytest.approx(2 * 100, abs=0.01)


@for_each(("least", "warns"), [(0.82, False), (0.8286, True), (0.9, True), (None, False)])
def test_a_model_is_held_against_its_baseline(tmp_path: Path, least: Any, warns: bool) -> None:
    folder = runs.classified_run(tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    facts["baseline"] = {"answer": "<i>cat", "scores": {"accuracy": least, "loss": 1.1}}
    facts["class_counts"], facts["class_weights"] = [[80, 9, 7], [91, 97, 91]], [0.4, 3.5, 4]
    (folder / "run.json").write_text(json.dumps(facts))
    page = Page(build_report(folder))
    check_sound(page)
    several = Page(compare_runs([folder], tmp_path / "all.html"))
    told = (
        "Warning: This run learned nothing. This model is no better than the baseline, which "
        "predicts '<i>cat' for every sample"
    )
    advice = ". More --epochs, another --lr, --class-weights auto or --balanced may help."
    assert [advice in each.text for each in (page, several)] == [warns, warns]
    assert (told in page.text, told[9:] in several.text) == (warns, warns)
    # Before any number.
    assert not warns or page.text.index(told) < page.text.index("82.9%")
    shown = f"; baseline {least:.1%}" if least else ""
    assert page.figures["Best test accuracy"] == f"82.9% in epoch 7, chosen on this test set{shown}"
    assert ("baseline" in page.course("Test accuracy")) == (least is not None)
    assert page.figures["Baseline"] == "&lt;i&gt;cat for every sample"
    assert ["cat", "80", "0.4", "91", "91.8%", "98.9%", "95.2%"] in page.rows
    assert ["accuracy", "96.4%", f"{least:.1%}" if least else NOTHING] in page.rows


def test_what_training_said_is_in_the_report(tmp_path: Path) -> None:
    remarks = ["the run has only 12 steps: use more --epochs", "ended by --patience: <b>"]
    text = page_of(tmp_path / "run", facts=runs.facts_of("text", remarks=remarks)).text
    assert all(remark in text for remark in remarks)


@for_each(
    ("scores", "heights"),
    [
        ((0.122, 0.124, 0.122), (0.0, 0.1)),
        ((0.999, 1.0, 0.999), (0.0, 0.1)),
        ((0.0, 0.001, 0.0), (0.0, 0.1)),
        ((0.5, 0.9, 0.7), (0.6, 1.0)),
    ],
)
def test_an_axis_never_magnifies_noise(scores: Any, heights: Any, tmp_path: Path) -> None:
    """The axis of shares spans 5 points or more; a drawing is 216 points high."""
    lines = [runs.epoch_line(n, scores={"accuracy": each}) for n, each in enumerate(scores)]
    page = page_of(tmp_path / "run", metrics=lines)
    (chart,) = re.findall(r'aria-label="Test accuracy by epoch.*?</svg>', page.source, re.DOTALL)
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--c2\); stroke-width: 2', chart)
    across = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
    assert heights[0] <= (max(across) - min(across)) / 216 <= heights[1]


def test_one_epoch_has_one_mark(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", metrics=runs.metrics_of(1))
    (chart,) = re.findall(r'aria-label="Test accuracy by epoch.*?</svg>', page.source, re.DOTALL)
    # A line of the grid, the shape of a mark, and the axis on the left.
    assert len(re.findall(r'd="M (\S+) \S+\s+L \1 \S+\s+"', chart)) == 3


def test_samples_are_shown_and_judged_in_words(pages: dict[str, Page]) -> None:
    page, segments = pages["classify"], pages["segment"]
    # Once as worst, and two as examples of a confusion.
    assert (page.text.count("✓ right"), page.text.count("✗ wrong")) == (8, 4 + 4 + 2)
    assert "✗ wrong true: ship predicted: cat (95.0%) test/2.png" in page.text
    assert (len(page.attributes("src")), len(segments.attributes("src"))) == (18, 24)
    assert runs.EVIL_SENTENCE in pages["text"].text


def test_the_confusion_matrix_opens_the_examples(pages: dict[str, Page]) -> None:
    """By links alone, because a page has no script."""
    page = pages["classify"]
    links = [given["href"] for name, given in page.elements if name == "a"]
    # The cell of the matrix, and the row of the most frequent confusions.
    assert links == ["#confused-1-0"] * 2
    (opened,) = re.findall(r'id="confused-1-0">.*?</section>', page.source, re.DOTALL)
    assert opened.count("<img ") == 2
    assert (3, "Most frequent confusions") in page.headings
    assert f"{runs.EVIL_CLASS} predicted as cat: 2 of 7" in page.text


def test_class_names_break_at_their_separators(tmp_path: Path) -> None:
    """A narrow screen would break them anywhere."""
    classes = ["golden_retriever", "basalCell", "cat"]
    names = ["golden_<wbr>retriever", "basal<wbr>Cell", "cat"]
    pictures = [f"pictures/{number}.png" for number in range(6)]
    examples = runs.examples_of("classify", classes, 6, picture=pictures)
    page = page_of(tmp_path / "run", facts=runs.facts_of("classify"), examples=examples)
    scores, _, rest = page.source.partition("<h2>Confusion matrix</h2>")
    matrix, _, confusions = rest.partition("<h3>Most frequent confusions</h3>")
    assert [scores.count(f'<th scope="row">{name}</th>') for name in names] == [1, 1, 1]
    assert "<wbr>" not in matrix
    assert f"<h4>{names[1]} predicted as {names[0]}:" in confusions
    assert [confusions.count(f"<b>{name}</b>") > 2 for name in names] == [True] * 3


@for_each("kind", ["classify", "segment", "text"])
def test_everything_a_run_says_is_escaped(tmp_path: Path, kind: str) -> None:
    evil = "</b><img src=http://x onerror=alert(1)>{{ 7 * 7 }}'\""
    texts = ("name", "model", "fingerprint", "started", "shards", "onefold")
    facts = runs.facts_of(kind, **dict.fromkeys(texts, evil), devices=[evil], classes=[evil])
    facts |= {"score": f"highest {evil}", "left_out": [evil] * 6, "notes": [evil]}
    line = runs.epoch_line(0, scores={"loss": 1.0, evil: 0.5})
    line["devices"][0]["device"] = evil
    names = ("name", "label", "predicted", "picture", "image", "mask", "prediction", "iou")
    sample = dict.fromkeys(names, evil) | {"text": evil * 20, "confidence": 1.0}
    examples: dict[str, Any] = {
        "kind": kind,
        "threshold": evil,
        "samples": [sample],
        "worst": [sample],
    }
    examples |= {"classes": [evil], "confusion": [[1]]}
    options = f"x = '''{evil}'''"
    page = page_of(
        tmp_path / "run", facts=facts, metrics=[line], examples=examples, options=options
    )
    assert page.attributes("src") == []
    assert "<img" not in page.source
    assert "{{ 7 * 7 }}" in page.text
    check_sound(page)


HUGE = 10**400


def test_numbers_that_are_none_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    lines = [
        runs.steps_line(step, loss=loss) for step, loss in ((10, 1.5), (20, None), (30, math.inf))
    ]
    nulls = dict.fromkeys(("loss", "lr", "train_s", "evaluate_s", "samples_per_s"))
    scores = {"loss": None, "accuracy": math.inf}
    best = {"epoch": 1, "score": "accuracy", "value": HUGE}
    facts = runs.facts_of("text", best=best, started="0001-01-01T00:00:00+23:59")
    facts["left_out"] = ["caf\udce9.jpg: cannot be read"]
    lines.append(runs.epoch_line(0, scores=scores, **nulls))
    page = page_of(tmp_path / "run", facts=facts, metrics=lines)
    assert "training (2 numbers not finite, left out)" in page.text
    assert page.course("Test accuracy") == ""
    assert ["1", "100", *[NOTHING] * 7] in page.rows
    assert "nan" not in page.text.lower()
    assert page.figures["Best test accuracy"] == f"{NOTHING} in epoch 1"
    assert page.figures["Started"] == NOTHING
    assert "caf?.jpg: cannot be read" in page.text


def test_numbers_that_are_too_large_to_be_drawn_are_left_out(tmp_path: Path) -> None:
    scores: dict[str, float | None] = {"loss": 1e308, "accuracy": 1e308}
    lines = [runs.epoch_line(n, scores=scores, loss=loss) for n, loss in enumerate((1e308, 1e299))]
    page = page_of(tmp_path / "run", metrics=lines)
    assert page.course("Test accuracy") == ""


def test_steps_are_thinned_out_to_means_and_pauses_have_no_speed(tmp_path: Path) -> None:
    """Two epochs of 40 steps; the run was resumed after step 50, an hour later."""
    folder = runs.write_run(tmp_path / "run")
    lines = [
        {**runs.steps_line(step, loss=float(step), samples_per_s=64.0), "epoch": (step - 1) // 40}
        for step in range(1, 81)
    ]
    runs.write_record(folder, lines[:60])
    runs.write_record(folder, lines[50:], resumed=(50, 51))
    found = read_reported(folder).steps
    assert [line.step for line in found] == list(range(2, 81, 2))
    assert [line.loss for line in found] == [step - 0.5 for step in range(2, 81, 2)]
    assert [line.lr for line in found] == [0.1 * (1 - step / 2000) for step in range(2, 81, 2)]
    assert {line.samples_per_s for line in found} == {64.0}


DAMAGES: list[dict[str, Any]] = [{"epoch": "x"}, {"epoch": HUGE}, {"step": 1 << 60}, {"step": -1}]
DAMAGES += [{"scores": [1]}, {"scores": "\ud800"}, {"scores": None}]
DAMAGES += [{"devices": [{"device": "cpu", "epoch": value}]} for value in (None, [3])]


@for_each("damage", DAMAGES)
def test_a_record_with_results_of_another_shape_is_named(tmp_path: Path, damage: Any) -> None:
    line = runs.epoch_line(1, scores={"accuracy": 0.75})
    folder = runs.write_run(tmp_path / "run", metrics=[{**line, **damage}])
    with pytest.raises(DataError, match=r"run\.record: expected the record of a run of onefold tr"):
        build_report(folder)


def test_a_record_that_is_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run", metrics=runs.metrics_of(2))
    file = folder / "run.record"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert Page(build_report(folder)).figures["Last test accuracy"] == "40.0% after 1 epoch"
    file.write_bytes(b"")
    assert "No epoch has finished yet" in Page(build_report(folder)).text
    file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(
        DataError, match=r"run\.record is damaged: the digest of the frame at byte 8 "
    ):
        build_report(folder)


SHAPES: list[dict[str, Any]] = [{"best": 3}, {"best": {"epoch": "x"}}, {"best": {}}]
SHAPES += [{"baseline": 3}, {"baseline": {"scores": [1]}}, {"class_counts": [3]}]
SHAPES += [
    {"class_weights": ["x"]},
    {"classes": 3},
    {"devices": 3},
    {"notes": True},
    {"left_out": 1.5},
]
EXAMPLES: list[dict[str, Any]] = [{"kind": ["text"]}, {"samples": [3]}, {"worst": {"label": "a"}}]
EXAMPLES += [{"confusion": each} for each in ([1, 2], [[-1]], [[1, 2], [3]])]
EXAMPLES += [{"confusion": [[1]], "classes": ["a", "b"]}]
EXAMPLES += [{"confused": each} for each in ([3], [{"label": "a", "predicted": 0}])]
FILES = [("run.json", json.dumps(each)) for each in (*SHAPES, [])]
FILES += [("examples.json", json.dumps({"kind": "text", **each})) for each in EXAMPLES]
FILES += [("run.json", "{"), ("examples.json", ""), ("config.toml", "lr = ")]
FILES += [("config.toml", "a = 1\n" + "#" * (1 << 20)), ("config.toml", "a." * 5000 + "a = 1")]


@for_each(("name", "content"), FILES)
def test_a_file_of_another_shape_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = runs.write_run(tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=rf"{re.escape(name)}: expected"):
        build_report(folder)


@for_each("name", ["run.record", "examples.json", "run.json", "config.toml"])
def test_a_link_to_a_file_elsewhere_is_not_read(tmp_path: Path, name: str) -> None:
    folder = runs.write_run(tmp_path / "run", metrics=runs.metrics_of(1))
    (tmp_path / "theirs").write_text('{"kind": "theirs"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match=rf"{re.escape(name)}: .*expected a file, got a link"):
        build_report(folder)


@for_each("name", ["pictures/none.png", "../secret.png", "run.json", None, "a\0b"])
def test_a_picture_that_is_not_the_runs_own_png_is_not_shown(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.png").write_bytes(runs.colored(0))
    sample = {"name": "1.png", "label": "a", "predicted": "a", "confidence": None, "picture": name}
    page = page_of(tmp_path / "run", examples={"kind": "classify", "samples": [sample]})
    assert page.attributes("src") == []
    assert "no image" in page.text
    assert f"predicted: a ({NOTHING})" in page.text


ONE_CPU = 'lr = 0.1\nbatch = 64\ndata = "pets"\ndevices = "cpu:1"\n'
TWO_CPUS = 'devices = "cpu:2"\ndata = "pets"\nbatch = 64\nlr = 0.2\nwarmup = true\n'


def run(folder: Path, *, options: str = ONE_CPU, epochs: int = 3, **facts: object) -> Path:
    best = {"epoch": 3, "value": 0.6833} if epochs == 3 else {"epoch": 4, "value": 0.775}
    told = runs.facts_of("text", name="pets", best=best, **facts)
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
    assert "Bit-identical models: 1. pets and 2. pets." in page.text


def test_a_device_that_waited_is_named_with_what_helps(tmp_path: Path) -> None:
    """By its last epoch; a run of an earlier version says nothing."""
    lines = [runs.epoch_line(epoch, scores={"accuracy": 0.75}) for epoch in range(2)]
    limit = "limited by data: a step waits for its batch for 62 of 100 ms. Use workers=<4>"
    lines[0]["devices"][0]["limit"] = lines[1]["devices"][1]["limit"] = limit
    lines[1]["devices"][0]["limit"] = ""
    text = page_of(tmp_path / "run", metrics=lines).text
    assert f"Device 1 was {limit}." in text
    assert text.count("limited by") == 1

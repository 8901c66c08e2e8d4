"""A trained run on labeled data: what is read, what is refused, and which scores come of it."""

import gzip
import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onefold
from onefold.errors import DataError
from onefold_jobs.predict import (
    EvaluateOptions,
    Evaluation,
    PredictOptions,
    evaluate_run,
    predict_run,
    write_prediction,
)
from onefold_jobs.report.folder import read_reported
from tests import simulated
from tests.capabilities import needs_text
from tests.jobs.conftest import SMALL
from tests.jobs.tiny import CLASSES, TESTED, WRITERS, run_here
from tests.masked import on_cpu
from tests.tables import for_each

Image = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')
needs_text()

JOBS = tuple(WRITERS)
here = pytest.mark.usefixtures("here")


def evaluated(run: Path, data: Path, **chosen: Any) -> Evaluation:
    return evaluate_run(run, data, EvaluateOptions(**chosen))


def of_training(run: Path) -> dict[str, float]:
    """The scores that the run has kept of its best epoch."""
    read = read_reported(run)
    assert read.best is not None
    return dict(read.epochs[read.best[0] - 1].scores)


def facts_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "run.json").read_text()))


def found_baseline(of: dict[str, Any]) -> dict[str, float]:
    return dict(of["baseline"]["scores"])


@here
@for_each("job", JOBS)
def test_scores_are_those_of_training(job: str, runs: Any, data: Any) -> None:
    whole, part = (evaluated(runs[job], data[job] / name) for name in ("", TESTED[job]))
    assert whole.scores == part.scores == pytest.approx(of_training(runs[job]), rel=1e-6)
    assert whole.data == part.data == data[job] / TESTED[job]
    told = json.loads(json.dumps(whole.as_dict()))
    assert told["samples"] == len(whole.prediction.rows) == {"segment": 3}.get(job, 12)
    assert told["scores"] == whole.scores
    assert found_baseline(told) == pytest.approx(found_baseline(facts_of(runs[job])))
    if job == "segment":
        return
    counts = np.array(told["confusion"])
    assert counts.trace() / counts.sum() == whole.scores["accuracy"]
    assert [each["support"] for each in told["classes"]] == counts.sum(axis=1).tolist()
    assert told["baseline"]["scores"]["accuracy"] == pytest.approx(1 / len(counts))
    is_better = whole.scores["accuracy"] > 1 / len(counts)
    assert (whole.warning is None) == is_better


@here
@for_each("job", ["classify", "text"])
def test_every_sample_has_its_label(job: str, runs: Any, data: Any, tmp_path: Path) -> None:
    options = EvaluateOptions(output=tmp_path / "rows.csv")
    found = evaluate_run(runs[job], data[job], options)
    assert write_prediction(found.prediction, options, io.StringIO()) == options.output
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    names = "file,label,class,confidence" if job == "classify" else "file,line,text,label,class,con"
    assert lines[0].startswith(names)
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    right = [row["label"] == row["class"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(found.scores["accuracy"])
    # Predictions keep the labels that they find, in the same columns.
    usual = predict_run(runs[job], [data[job] / TESTED[job]], PredictOptions())
    assert [row["label"] for row in usual.rows] == [row["label"] for row in rows]
    assert [row["classes"] for row in usual.rows] == [
        row["classes"] for row in found.prediction.rows
    ]
    # Over predictions of before, and over nothing else.
    assert evaluated(runs[job], data[job], output=options.output).scores == found.scores
    assert options.output is not None
    options.output.write_text("mine")
    with pytest.raises(ValueError, match="expected a new file, or earlier predictions"):
        evaluated(runs[job], data[job], output=options.output)


@here
def test_masks_have_scores_of_each_picture(runs: Any, data: Any, tmp_path: Path) -> None:
    options = EvaluateOptions(output=tmp_path / "rows.csv")
    found = evaluate_run(runs["segment"], data["segment"], options)
    write_prediction(found.prediction, options, io.StringIO())
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0] == "file,iou,dice"
    assert [line.split(",")[0] for line in lines[1:]] == ["0.png", "1.png", "2.png"]
    for row in found.prediction.rows:
        assert row["dice"] == pytest.approx(2 * row["iou"] / (1 + row["iou"]))
    shown = json.loads((runs["segment"] / "examples.json").read_text())["samples"]
    assert [(row["iou"], row["dice"]) for row in found.prediction.rows] == [
        (each["iou"], each["dice"]) for each in shown
    ]


@for_each("job", JOBS)
def test_several_devices_give_the_scores_of_one(job: str, runs: Any, data: Any) -> None:
    found = []
    for devices in (1, 3):
        with on_cpu() as patch:
            patch.setattr(onefold, "launch", simulated.launch)
            found.append(evaluated(runs[job], data[job], devices=f"cpu:{devices}", batch_size=5))
    one, three = found
    assert one.scores == three.scores
    assert one.prediction.rows == three.prediction.rows


@here
def test_labels_that_the_run_does_not_know(runs: Any, data: Any, tmp_path: Path) -> None:
    shutil.copytree(data["classify"] / "test", tmp_path / "test")
    (tmp_path / "test" / "plum").rename(tmp_path / "test" / "kiwi")
    told = r"test/kiwi: expected a class of the run \(apple, pear, plum\), got 'kiwi'"
    with pytest.raises(DataError, match=told):
        evaluated(runs["classify"], tmp_path / "test")
    found = evaluated(runs["classify"], tmp_path / "test", skip_bad=True)
    assert len(found.prediction.left_out) == 1
    assert [each["support"] for each in found.as_dict()["classes"]] == [4, 4, 0]
    assert found.as_dict()["classes"][2]["recall"] is None
    # A prediction leaves such a label away.
    rows = predict_run(runs["classify"], [tmp_path / "test"], PredictOptions()).rows
    assert [row["label"] for row in rows] == ["apple"] * 4 + [""] * 4 + ["pear"] * 4

    file = tmp_path / "some.tsv"
    file.write_text("a fine film\tgood\na dull film\tugly\nno label\n")
    with pytest.raises(DataError, match=r"line 2: expected a label of the run .*, got 'ugly'"):
        evaluated(runs["text"], file)
    found = evaluated(runs["text"], file, skip_bad=True)
    assert (len(found.prediction.rows), len(found.prediction.left_out)) == (1, 2)


@here
@for_each(
    ("job", "name", "words"),
    [
        ("classify", "none", "expected a folder of class folders"),
        ("classify", "segment", "which look like images with masks"),
        ("segment", "classify", "expected the folders images and masks"),
        ("text", "classify", "expected a TSV file or a table, or a folder that contains dev.tsv"),
    ],
)
def test_data_of_another_kind_are_refused(
    job: str, name: str, words: str, runs: Any, data: Any
) -> None:
    with pytest.raises(DataError, match=words):
        evaluated(runs[job], data.get(name, Path("/none")))


@here
def test_a_table_is_read_by_the_columns_that_are_named(
    runs: Any, data: Any, tmp_path: Path
) -> None:
    lines = [line.split("\t") for line in (data["text"] / "dev.tsv").read_text().splitlines()]
    named, other = tmp_path / "named.csv", tmp_path / "other.csv"
    named.write_text("text,label\n" + "".join(f'"{x}",{y}\n' for x, y in lines))
    other.write_text("nr,said,meant\n" + "".join(f'1,"{x}",{y}\n' for x, y in lines))
    with pytest.raises(DataError, match="use --text-column with one of its columns"):
        evaluated(runs["text"], other)
    by_name = evaluated(runs["text"], other, text_column="said", label_column=("meant",))
    assert by_name.scores == evaluated(runs["text"], named).scores
    pictures = [path for path in data["classify"].glob("test/*/*") if path.is_file()]
    table = tmp_path / "shots.csv"
    table.write_text(
        "nr,shot,kind\n" + "".join(f"1,{path},{path.parent.name}\n" for path in pictures)
    )
    found = evaluated(runs["classify"], table, image_column="shot", label_column=("kind",))
    whole = evaluated(runs["classify"], data["classify"])
    assert found.scores == pytest.approx(whole.scores)
    # Such a table names what to predict as well, with labels or without.
    usual = predict_run(runs["classify"], pictures, PredictOptions()).rows
    named.write_text("image\n" + "".join(f"{path}\n" for path in pictures))
    rows = predict_run(runs["classify"], [named], PredictOptions()).rows
    assert [row["classes"] for row in rows] == [row["classes"] for row in usual]
    rows = predict_run(runs["classify"], [table], PredictOptions(image_column="shot")).rows
    assert [row["classes"] for row in rows] == [row["classes"] for row in usual]


@here
@for_each("job", JOBS)
def test_samples_of_the_training_are_told(job: str, runs: Any, data: Any) -> None:
    train = data[job] / {"text": "train.tsv"}.get(job, "train")
    seen, unseen = evaluated(runs[job], train), evaluated(runs[job], data[job])
    assert seen.note is not None
    assert seen.note.startswith("The run was trained on samples of")
    assert unseen.note is None


@here
def test_images_of_the_run_in_another_folder_are_told(runs: Any, data: Any, tmp_path: Path) -> None:
    more = tmp_path / "more"
    shutil.copytree(data["classify"] / "train", more)
    pictures = sorted(path for path in more.rglob("*") if path.is_file())
    for path in pictures[:3]:
        image = Image.open(path)
        image.point(lambda value: 255 - value).save(path)
    for path in pictures[3:]:
        path.rename(path.with_stem(f"renamed-{path.stem}"))
    known = len(pictures) - 3
    note = str(evaluated(runs["classify"], more).note)
    assert note.startswith(f"{known} of {len(pictures)} images are also in the data")


@here
@for_each("job", JOBS)
def test_what_a_run_held_out_is_scored_again(
    job: str, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = data[job] / {"text": "train.tsv"}.get(job, "train")
    whole, moved = tmp_path / "whole" / train.name, tmp_path / "moved"
    copy: Any = shutil.copytree if train.is_dir() else shutil.copyfile
    whole.parent.mkdir()
    copy(train, whole)
    if train.is_dir():
        inside = min(path for path in whole.rglob("*") if path.is_file()).parent
        (inside / "broken.png").write_bytes(b"no image")
    else:
        whole.write_text(f"no label\n{whole.read_text()}")
    monkeypatch.chdir(tmp_path)
    named = Path("whole") / ("" if job == "text" else train.name)  # a folder, in any case
    options = {**SMALL[job], "holdout": 0.3, "skip_bad": True}
    run, said = run_here(job, named, tmp_path, name=job, **options)
    monkeypatch.chdir(whole.parent)
    copy(whole, moved.with_suffix(train.suffix))
    for again in (whole, whole.parent if job == "text" else whole, moved.with_suffix(train.suffix)):
        found = evaluated(run, again)
        assert len(found.prediction.rows) == said["test_samples"] < said["train_samples"]
        scores = {name: found.scores[name] for name in of_training(run)}
        assert scores == pytest.approx(of_training(run), rel=1e-5)
        assert "that the run held out were scored" in str(found.note)
    monkeypatch.chdir(tmp_path)
    # Changed, nobody knows which were held out.
    if train.is_dir():
        first = min(path for path in whole.rglob("*") if path.is_file())
        for path in whole.rglob(f"{first.stem}.*"):
            path.unlink()
    else:
        whole.write_text("".join(whole.read_text().splitlines(keepends=True)[3:]))
    found = evaluated(run, whole, skip_bad=True)
    assert "was trained on samples of" in str(found.note)


@here
def test_idx_files_are_scored(runs: Any, tmp_path: Path) -> None:
    def write(name: str, values: np.ndarray[Any, Any]) -> None:
        head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(head + values.tobytes()))

    draw = np.random.default_rng(0)
    write("t10k-images-idx3-ubyte", draw.integers(0, 255, (7, 16, 16), dtype=np.uint8))
    write("t10k-labels-idx1-ubyte", np.arange(7, dtype=np.uint8) % 3)
    found = evaluated(runs["classify"], tmp_path)
    assert [each["support"] for each in found.by_class] == [3, 2, 2]
    assert [row["label"] for row in found.prediction.rows] == [CLASSES[n % 3] for n in range(7)]
    write("t10k-labels-idx1-ubyte", np.arange(7, dtype=np.uint8))
    with pytest.raises(DataError, match="expected labels of the run, 0 to 2, got 6"):
        evaluated(runs["classify"], tmp_path)


@here
def test_a_file_to_test_with_comes_before_the_one_that_chose_the_best_epoch(
    runs: Any, data: Any, tmp_path: Path
) -> None:
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_bytes((data["text"] / f"{name}.tsv").read_bytes())
    lines = (tmp_path / "dev.tsv").read_text().splitlines()[:3]
    (tmp_path / "test.tsv").write_text("\n".join(line.partition("\t")[0] for line in lines))
    # That of a competition has no labels, or numbers its lines.
    assert evaluated(runs["text"], tmp_path).data == tmp_path / "dev.tsv"
    (tmp_path / "test.tsv").write_text("".join(f"{n}\t{x}\n" for n, x in enumerate(lines)))
    assert evaluated(runs["text"], tmp_path).data == tmp_path / "dev.tsv"
    (tmp_path / "test.tsv").unlink()
    (tmp_path / "test.csv").write_text("text\nfine\n")
    assert evaluated(runs["text"], tmp_path).data == tmp_path / "dev.tsv"
    (tmp_path / "test.tsv").write_text("\n".join(lines))
    found = evaluated(runs["text"], tmp_path)
    assert found.data == tmp_path / "test.tsv"
    assert len(found.prediction.rows) == len(lines)

"""Several classes for a sample, and numbers: scores, runs, predictions and evaluations."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import onefold
from onefold.errors import DataError
from onefold_jobs.predict import EvaluateOptions, PredictOptions, as_csv, evaluate_run, predict_run
from onefold_jobs.report import build_report
from onefold_jobs.targets import label_scores, number_scores, target_of
from tests.capabilities import needs_text
from tests.jobs.tiny import run_here, write_class_masks
from tests.tables import for_each

metrics = pytest.importorskip("sklearn.metrics", reason='needs pip install "onefold-jobs[digits]"')


def test_scores_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    for classes in (1, 4):
        truth = draw.integers(0, 2, (50, classes))
        # Few different ones, so that there are ties.
        sure = draw.integers(0, 9, (50, classes)) / 8
        said, found = sure >= 0.5, label_scores(truth, sure)
        expected = {
            "micro-f1": metrics.f1_score(truth, said, average="micro" if classes > 1 else "binary"),
            "macro-f1": np.mean(
                [metrics.f1_score(truth[:, n], said[:, n]) for n in range(classes)]
            ),
            "mean-average-precision": np.mean(
                [metrics.average_precision_score(truth[:, n], sure[:, n]) for n in range(classes)]
            ),
        }
        assert found == pytest.approx(expected)
    values, guesses = draw.normal(size=50), draw.normal(size=50)
    assert number_scores(values, guesses) == pytest.approx({
        "rmse": metrics.mean_squared_error(values, guesses) ** 0.5,
        "mae": metrics.mean_absolute_error(values, guesses),
        "r2": metrics.r2_score(values, guesses),
    })  # fmt: skip
    # A class that no sample has says nothing.
    assert label_scores(np.array([[1, 0]]), np.array([[0.9, 0.1]]))["macro-f1"] == 1.0
    assert target_of("regression", [7.0, 7.0]).std == 1.0


def write_shades(root: Path, count: int = 40) -> None:
    """Pictures of any of three colors, and tables of the colors and of how bright they are."""
    root.mkdir()
    draw = np.random.default_rng(3)
    tags, numbers = [], [["image", "level"]]
    for number in range(count):
        has, level = draw.integers(0, 2, 3), float(draw.uniform(0, 100))
        pixels = draw.integers(0, 40, (16, 16, 3)) + has * 120 + int(level)
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        names = [
            name for name, each in zip(("red", "green", "blue, dark"), has, strict=True) if each
        ]
        tags.append(json.dumps({"image": f"{number}.png", "labels": names}))
        numbers.append([f"{number}.png", str(round(level, 2))])
    (root / "tags.jsonl").write_text("\n".join(tags))
    with (root / "levels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(numbers)


PICTURES = {"model": "lenet", "epochs": 2, "augment": "none"}


def used(run: Path, inputs: Path, table: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The predictions of a run, and its scores."""
    rows = predict_run(run, [inputs], PredictOptions(devices="cpu:1")).rows
    return rows, evaluate_run(run, table, EvaluateOptions(devices="cpu:1")).scores


@pytest.mark.processes
def test_numbers_of_pictures_are_predicted(tmp_path: Path) -> None:
    write_shades(tmp_path / "data")
    table = tmp_path / "data" / "levels.csv"
    with pytest.raises(DataError, match="use --task regression for measured values"):
        run_here("classify", table, tmp_path, label_column=("level",), **PICTURES)
    run, said = run_here(
        "classify", table, tmp_path, task="regression", label_column=("level",), **PICTURES
    )
    assert (said["best"]["score"], said["classes"]) == ("rmse", [])
    assert said["baseline"]["scores"]["r2"] < 0.1
    rows, scores = used(run, table.parent, table)
    assert [*rows[0]] == ["file", "value"]
    assert as_csv(rows).startswith("file,value\n0.png,")
    assert set(scores) == {"loss", "rmse", "mae", "r2"}
    assert "off by" in build_report(run).read_text()
    resumed, said = run_here("classify", table, tmp_path, name=run.name, resume=True, epochs=3)
    assert (resumed, onefold.Record(run).steps["epoch"][-1]) == (run, 2)
    assert said["picture_model"]["target"]["task"] == "regression"


@pytest.mark.processes
def test_several_classes_of_pictures_are_predicted(tmp_path: Path) -> None:
    write_shades(tmp_path / "data")
    table = tmp_path / "data" / "tags.jsonl"
    with pytest.raises(DataError, match=r"got the list .*--task multi-label"):
        run_here("classify", table, tmp_path, **PICTURES)
    run, said = run_here("classify", table, tmp_path, task="multi-label", **PICTURES)
    assert (said["best"]["score"], said["classes"]) == ("micro-f1", ["blue, dark", "green", "red"])
    rows = predict_run(run, [table.parent], PredictOptions(devices="cpu:1")).rows
    assert [*rows[0]] == ["file", "labels", *(f"confidence {c}" for c in said["classes"])]
    # Of other data than those of the run all samples are scored: here of all rows but the last.
    whole = table.with_name("all.jsonl")
    lines = table.read_text().splitlines()[:-1]
    whole.write_text("\n".join(lines))
    found = evaluate_run(run, whole, EvaluateOptions(devices="cpu:1"))
    truth = [json.loads(line)["labels"] for line in lines]
    given = np.array([[name in names for name in said["classes"]] for names in truth])
    sure = [
        [row[f"confidence {name}"] for name in said["classes"]] for row in found.prediction.rows
    ]
    expected = label_scores(given.astype(float), np.array(sure))
    assert {name: found.scores[name] for name in expected} == pytest.approx(expected)
    # In a text a bar is a stronger sign than the comma of a name.
    bars = tmp_path / "data" / "tags.csv"
    tags = (f'{n}.png,"{"|".join(names)}"' for n, names in enumerate(truth))
    bars.write_text("\n".join(("image,labels", *tags)))
    again = evaluate_run(run, bars, EvaluateOptions(devices="cpu:1"))
    assert again.scores == found.scores
    labels = {row["label"] for row in again.prediction.rows}
    assert {"red|green|blue, dark", "blue, dark", ""} <= labels
    # One sign divides all rows, as in training.
    bars.write_text(bars.read_text().replace('"red|green|blue, dark"', '"red, green"'))
    with pytest.raises(DataError, match=r"expected a label of the run .*, got 'red, green'"):
        evaluate_run(run, bars, EvaluateOptions(devices="cpu:1"))
    for table in (bars, tmp_path / "data"):
        with pytest.raises(ValueError, match=r"^--top 2 requires a run with one class per"):
            predict_run(run, [table], PredictOptions(devices="cpu:1", top=2))
    assert [each["support"] for each in found.by_class] == given.sum(axis=0).tolist()
    # The same data for training and for this: so is what answering alike scores.
    shares = np.array(said["class_counts"][0]) / said["train_samples"]
    least = label_scores(given.astype(float), np.tile(shares, (len(given), 1)))
    assert found.baseline is not None
    assert {name: found.baseline.scores[name] for name in least} == pytest.approx(least)
    assert "average precision" in build_report(run).read_text()


@pytest.mark.processes
def test_several_classes_of_texts_are_predicted(tmp_path: Path) -> None:
    needs_text()
    rows: list[list[object]] = [["text", "good", "long"]]
    for number in range(40):
        words = "a fine film" if number % 2 else "a dull film"
        rows.append(
            [f"{words} {'seen by many ' * (number % 3)}{number}", number % 2, number % 3 > 1]
        )
    path = tmp_path / "train.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    options = {"task": "multi-label", "text_column": "text", "label_column": ("good", "long")}
    run, said = run_here("text", path, tmp_path, **options)
    assert said["classes"] == ["good", "long"]
    predicted, scores = used(run, path, path)
    assert [*predicted[0]][:4] == ["file", "line", "text", "labels"]
    assert 0 <= scores["mean-average-precision"] <= 1


@for_each(
    ("options", "words"),
    [
        ({"task": "regression", "best_by": "accuracy"}, "with --task regression: rmse, mae, r2"),
        (
            {"task": "multi-label", "balanced": True},
            "--balanced: expected --task single-label with it",
        ),
        ({"task": "regression", "label_smoothing": 0.1}, "with it, got --task regression"),
    ],
)
def test_options_that_are_not_for_a_task_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run_here("classify", tmp_path, tmp_path, **options)


@pytest.mark.processes
def test_masks_of_several_classes_are_learned_drawn_and_scored(tmp_path: Path) -> None:
    data = write_class_masks(tmp_path / "data")
    options = {
        "classes": ("ground=0", "bird=3", "person=15"),
        "void": ("255",),
        "class_weights": "auto",
    }
    run, said = run_here("segment", data, tmp_path, **options)
    examples = json.loads((run / "examples.json").read_text())
    assert [each["class"] for each in examples["ious"]] == ["ground", "bird", "person"]
    assert said["best"]["score"] == "iou"
    output = tmp_path / "masks"
    rows = predict_run(
        run, [data / "test/images"], PredictOptions(output=output, devices="cpu:1")
    ).rows
    assert [*rows[0]] == ["file", "mask", "share ground", "share bird", "share person"]
    with Image.open(output / "0.png") as mask:
        assert mask.mode == "P"
        assert set(np.unique(np.asarray(mask)).tolist()) <= {0, 3, 15}
        palette = mask.getpalette()
        assert palette is not None
        assert palette[45:48] == [192, 128, 128]
    found = evaluate_run(run, data, EvaluateOptions(devices="cpu:1"))
    assert found.scores["iou"] == said["best"]["value"]
    assert [each["class"] for each in found.by_class] == said["classes"]
    assert found.baseline is not None
    assert asdict(found.baseline) == said["baseline"]
    assert sum(said["class_weights"]) > 3  # of classes as frequent as each other
    page = build_report(run).read_text()
    assert "Overlap on the whole test set" in page
    assert "background: #c08080" in page

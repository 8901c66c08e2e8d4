import math
import typing
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cli import Screen
from onefold_jobs.progress import epoch_line
from onefold_jobs.report.words import score
from onefold_jobs.scores import (
    Baseline,
    ClassScores,
    class_baseline,
    class_tables,
    count_line,
    no_better,
    spell,
)
from onefold_jobs.segment_job import SegmentOptions
from onefold_jobs.targets import BestBy

metrics = pytest.importorskip("sklearn.metrics", reason='needs pip install "onefold-jobs[digits]"')
dummy = pytest.importorskip("sklearn.dummy", reason='needs pip install "onefold-jobs[digits]"')

CLASSES = 5
answers = st.lists(
    st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=60
)


@settings(max_examples=80)
@given(answers)
def test_scores_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, predicted = np.array(pairs).T
    found = ClassScores.of(truth, predicted, CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are not there
        every = [*range(CLASSES)]
        matrix = metrics.confusion_matrix(truth, predicted, labels=every)
        by_class = metrics.precision_recall_fscore_support(truth, predicted, labels=every)
        overall = {
            "accuracy": metrics.accuracy_score(truth, predicted),
            "balanced-accuracy": metrics.balanced_accuracy_score(truth, predicted),
            "macro-f1": metrics.f1_score(truth, predicted, average="macro"),
        }
    assert np.array_equal(found.counts, matrix)
    assert found.overall == pytest.approx(overall)
    tested, met = found.support > 0, found.support + found.predicted > 0
    own = (found.precision, found.recall, found.f1, found.support)
    for here, theirs, known in zip(own, by_class, (met, tested, met, met), strict=True):
        assert here[known] == pytest.approx(theirs[known])
    assert np.isnan(found.precision[~met]).all()
    assert np.isnan(found.recall[~tested]).all()
    assert np.isnan(found.f1[~met]).all()


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), min_size=1)
)
def test_the_baseline_is_that_of_scikit_learn(train: list[int], test: list[int]) -> None:
    train += [0, 1, 2]
    model = dummy.DummyClassifier(strategy="prior").fit(np.zeros((len(train), 1)), train)
    inputs = np.zeros((len(test), 1))
    drawn, asked = (np.bincount(labels, minlength=3).tolist() for labels in (train, test))
    baseline = class_baseline(drawn, asked, ["a", "b", "c"])
    assert baseline.answer == "abc"[int(model.predict(inputs)[0])]
    assert baseline.scores["accuracy"] == pytest.approx(model.score(inputs, test))
    loss = metrics.log_loss(test, model.predict_proba(inputs), labels=[0, 1, 2])
    assert baseline.scores["loss"] == pytest.approx(loss)
    assert baseline.scores["balanced-accuracy"] == pytest.approx(
        1 / len(set(test)) if baseline.scores["accuracy"] else 0.0
    )


def test_a_model_must_be_better_than_the_baseline() -> None:
    baseline = Baseline("dog", {"accuracy": 0.811, "loss": 0.5})
    for rule, value, is_better in (
        ("highest accuracy", 0.811, False),
        ("highest accuracy", 0.8, False),
        ("highest accuracy", math.nan, False),
        ("highest accuracy", 0.812, True),
        ("lowest loss", 0.5, False),
        ("lowest loss", 0.49, True),
        ("highest iou", 0.0, True),  # without a baseline
    ):
        assert (no_better(rule, value, baseline) is None) == is_better
    told = no_better("highest accuracy", 0.811, baseline)
    assert "its test accuracy is 81.1%, and the baseline's is 81.1%" in str(told)


def test_all_scores_but_losses_and_errors_are_shares() -> None:
    """Of every job and task, so that a score looks the same wherever it is told."""
    (of_masks, _) = typing.get_args(typing.get_type_hints(SegmentOptions)["best_by"])
    names = {*typing.get_args(of_masks), *typing.get_args(BestBy), "pixel-accuracy"}
    assert {name for name in names if "%" not in spell(name, 0.25)} == {"loss", "rmse", "mae", "r2"}
    devices = [dict.fromkeys(("data", "forward", "backward", "exchange", "update"), 1.0)]
    times = {"epoch": 1, "loss": 0.5, "lr": 0.1, "train_s": 1.0, "evaluate_s": 1.0}
    line = epoch_line({**times, "devices": devices, "scores": dict.fromkeys(names, 0.25)}, 1)
    for name in names - {"loss"}:
        assert f" {name} 25.00%  " in line or f" {name} 0.25  " in line
        assert ("%" in spell(name, 0.25)) == ("%" in score(name, 0.25)) == (f"{name} 25" in line)


def test_scores_of_a_class_have_names_and_none_for_what_is_unknown() -> None:
    rows = [*ClassScores(np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]])).rows(["a", "b", "c"])]
    assert rows[0] == {
        "class": "a", "precision": 1.0, "recall": 0.75, "f1": pytest.approx(6 / 7), "support": 4
    }  # fmt: skip
    none = {"class": "c", "precision": None, "recall": None, "f1": None, "support": 0}
    assert rows[2] == none


def lines_of(counts: np.ndarray, classes: list[str]) -> list[str]:
    console = Screen(width=80)
    with console.capture() as shown:
        for part in class_tables([*ClassScores(counts).rows(classes)], counts.tolist()):
            console.print(part)
    return [" ".join(line.split()) for line in shown.get().splitlines()]


def test_no_single_class_is_hidden_among_many() -> None:
    for count, hidden in ((13, False), (14, True)):
        names = [f"c{number}" for number in range(count)]
        line = count_line(names, range(count), [0] * count)
        assert ("... 2 others ..." in line, all(name in line for name in names)) == (
            hidden,
            not hidden,
        )


def test_a_terminal_has_the_scores_and_the_matrix_or_the_worst_of_many() -> None:
    assert lines_of(np.array([[3, 1], [0, 1200]]), ["[b]", "dog"]) == [
        "Scores by class, on the test set",
        "class precision recall F1 support",
        "[b] 100.0% 75.0% 85.7% 4",
        "dog 99.9% 100.0% 100.0% 1,200",
        "Test samples by true class (rows) and predicted class (columns)",
        "true [b] dog",
        "[b] 3 1",
        "dog 0 1,200",
    ]
    # The classes 1 and 2 of 30 are taken for each other now and then; class 0 has no sample.
    counts = np.diag([0, *[9] * 29])
    counts[1, 2] = counts[2, 1] = 3
    lines = lines_of(counts, [f"c{number}" for number in range(30)])
    assert lines[0] == "The 20 classes with the lowest F1, of 30"
    assert [line.split()[0] for line in lines[2:5]] == ["c1", "c2", "c3"]
    assert len(lines) == 22

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.jobs.examples import (
    SHOWN,
    choose_examples,
    classifier_examples,
    confusion_matrix,
    save_picture,
)
from tests.tables import for_each


@st.composite
def answers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, what was predicted, and how sure it was; often equally sure."""
    count = draw(st.integers(1, 90))
    labels = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    sure = st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=count, max_size=count)
    return torch.tensor(draw(labels)), torch.tensor(draw(labels)), torch.tensor(draw(sure))


@settings(max_examples=30)
@given(answers())
def test_samples_are_from_all_over_the_test_set(given_: tuple[torch.Tensor, ...]) -> None:
    samples, _ = choose_examples(*given_)
    count = len(given_[0])
    assert len(samples) == min(SHOWN, count)
    assert samples == sorted(set(samples))
    assert all(0 <= number < count for number in samples)
    gaps = [second - first for first, second in zip([*samples], [*samples[1:], count], strict=True)]
    assert max(gaps) - min(gaps) <= 1


@settings(max_examples=30)
@given(answers())
def test_the_worst_are_the_mistakes_that_it_was_surest_of(
    given_: tuple[torch.Tensor, ...],
) -> None:
    truth, predicted, sure = given_
    _, worst = choose_examples(truth, predicted, sure)
    wrong = [number for number in range(len(truth)) if truth[number] != predicted[number]]
    assert worst == sorted(wrong, key=lambda number: (-float(sure[number]), number))[:SHOWN]


@settings(max_examples=30)
@given(answers())
def test_the_matrix_counts_every_sample_once(given_: tuple[torch.Tensor, ...]) -> None:
    truth, predicted, _ = given_
    pairs = Counter(zip(truth.tolist(), predicted.tolist(), strict=True))
    assert confusion_matrix(truth, predicted, 4) == [
        [pairs[label, said] for said in range(4)] for label in range(4)
    ]


def test_a_class_that_is_never_met_has_a_row_and_a_column() -> None:
    label = torch.tensor([0])
    assert confusion_matrix(label, label, 3) == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_each_example_is_told_with_what_was_said_of_it() -> None:
    said = torch.tensor([[0.75, 0.25], [0.625, 0.375], [0.125, 0.875]])
    shown: list[int] = []

    def show(number: int) -> dict[str, Any]:
        shown.append(number)
        return {"name": f"n{number}"}

    told = classifier_examples("text", said, [0, 1, 1], ["ant", "bee"], show)
    lines = [
        {"name": "n0", "label": "ant", "predicted": "ant", "confidence": 0.75},
        {"name": "n1", "label": "bee", "predicted": "ant", "confidence": 0.625},
        {"name": "n2", "label": "bee", "predicted": "bee", "confidence": 0.875},
    ]
    assert told == {
        "kind": "text",
        "classes": ["ant", "bee"],
        "confusion": [[1, 0], [1, 1]],
        "samples": lines,
        "worst": [lines[1]],
    }
    assert shown == [0, 1, 2, 1]


def test_where_nothing_was_wrong_there_is_no_worst() -> None:
    told = classifier_examples("text", torch.eye(2), [0, 1], ["a", "b"], lambda number: {})
    assert told["worst"] == []


@for_each(
    ("size", "kept"),
    [((28, 20), (28, 20)), ((448, 100), (224, 50)), ((10, 900), (2, 224)), ((1, 1), (1, 1))],
)
@for_each("mode", ["L", "RGB"])
def test_a_picture_is_made_small_enough(
    tmp_path: Path, size: tuple[int, int], kept: tuple[int, int], mode: str
) -> None:
    images = pytest.importorskip("PIL.Image", reason='needs pip install "onefold[images]"')
    picture = images.new(mode, size, "white")
    folder = tmp_path / "pictures"
    assert save_picture(picture, folder, 7) == "pictures/7.png"
    assert save_picture(picture, folder, "seven") == "pictures/seven.png"
    assert picture.size == size
    with images.open(folder / "7.png") as written:
        assert (written.size, written.mode) == (kept, mode)

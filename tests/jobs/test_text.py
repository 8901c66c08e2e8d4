from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # noqa: F401  # sets variables of the environment when it is loaded
from safetensors.torch import save_file

from onefold.errors import CheckpointError, DataError
from onefold.jobs.text import (
    TextModel,
    TextOptions,
    build_of_run,
    confidences,
    make_task,
    prepare,
    settle,
)
from tests.jobs.tiny import SMALL, run_here, write_texts
from tests.tables import for_each


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "data")


def options_for(data: Path, **choices: Any) -> TextOptions:
    return TextOptions(data=str(data), **{**SMALL["text"], **choices})


def test_a_model_learns_which_word_decides(data: Path, tmp_path: Path) -> None:
    _, said = run_here("text", data, tmp_path, epochs=12, lr=5e-3, dropout=0.0)
    assert said["best"]["value"] == 1.0
    assert said["classes"] == ["bad", "good"]


def test_the_model_of_a_run_is_built_again(data: Path, tmp_path: Path) -> None:
    folder, _ = run_here("text", data, tmp_path)
    kind = TextModel.of_run(folder)
    model = build_of_run(folder)
    ids = kind.encode(["the film was fine"])
    shard = kind.collate([(ids[0], 0), (ids[0][:3], 1)])
    with torch.no_grad():
        said = confidences(model.eval(), shard)["confidence"]
    torch.testing.assert_close(said.sum(dim=1), torch.ones(2))
    trained = make_task(*both(data)).model
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in trained.named_parameters()
    ]


def both(data: Path, **choices: Any) -> tuple[TextOptions, Any]:
    options = options_for(data, **choices)
    prepared = prepare(options)
    return settle(options, prepared), prepared


def test_words_are_hidden_in_training_alone(data: Path) -> None:
    task = make_task(*both(data, token_dropout=0.5))
    torch.manual_seed(0)
    mask = 4
    assert any((task.train_set[i][0] == mask).any() for i in range(10))
    assert not any((ids == mask).any() for ids, _ in task.test_set)
    assert task.lengths == [len(ids) for ids, _ in task.train_set]


def test_a_folder_with_a_pretrained_model_is_used(data: Path, tmp_path: Path) -> None:
    first = make_task(*both(data))
    before = tmp_path / "before"
    before.mkdir()
    save_file(first.model.state_dict(), before / "model.safetensors")
    (before / "config.json").write_text(first.files["model_config.json"])
    (before / "tokenizer.json").write_text(first.files["tokenizer.json"])
    options, prepared = both(data, model=str(tmp_path / "before"))
    assert (options.epochs, options.lr) == (3, 3e-5)
    task = make_task(options, prepared)
    old, new = first.model.state_dict(), task.model.state_dict()
    body = [name for name in new if name.startswith("roberta.")]
    assert body
    assert all(torch.equal(old[name], new[name]) for name in body)
    folder, said = run_here("text", data, tmp_path / "runs", model=str(tmp_path / "before"))
    assert said["model"] == str(tmp_path / "before")
    assert build_of_run(folder).num_labels == 2  # type: ignore[comparison-overlap]


def test_a_folder_without_a_model_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected config\.json"):
        make_task(*both(data, model=str(tmp_path)))


def test_two_files_do_as_well_as_a_folder(data: Path) -> None:
    options = options_for(data / "train.tsv", dev=str(data / "dev.tsv"))
    assert len(prepare(options).dev) == 12


@for_each(
    ("name", "words"),
    [
        ("nowhere", "--data .*nowhere: expected a folder with train.tsv and dev.tsv"),
        ("data/train.tsv", "expected --dev with it"),
        ("empty", r"empty/train\.tsv: expected a TSV file of text and label"),
    ],
)
def test_what_is_not_there_is_told(name: str, words: str, tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=words):
        prepare(options_for(tmp_path / name))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Texts that a test may change."""
    return write_texts(tmp_path / "own")


def write_lines(path: Path, lines: Sequence[tuple[str, str]]) -> None:
    path.write_text("".join(f"{text}\t{label}\n" for text, label in lines))


def test_a_development_set_of_training_texts_is_refused(own: Path) -> None:
    shutil.copy(own / "train.tsv", own / "dev.tsv")
    words = r"dev\.tsv: 40 of 40 test samples are in the training set as well \(line 1 is the same"
    with pytest.raises(DataError, match=words):
        prepare(options_for(own))


def test_a_few_training_texts_to_score_on_are_mentioned(own: Path) -> None:
    first = (own / "train.tsv").read_text().splitlines()[0]
    with (own / "dev.tsv").open("a") as file:
        file.write(f"{first}\n")
    (note,) = prepare(options_for(own)).notes
    assert note.endswith(f"line 13 is the same as line 1 of {own}/train.tsv")


def test_measured_values_are_refused_and_can_be_taken_for_classes(own: Path) -> None:
    lines = [(f"text {number}", f"{number / 4}") for number in range(40)]
    write_lines(own / "train.tsv", lines)
    write_lines(own / "dev.tsv", [("other", "0.25")])
    with pytest.raises(DataError, match=r"train\.tsv: expected labels that name classes, got 40"):
        prepare(options_for(own))
    prepared = prepare(options_for(own, labels_as_is=True))
    assert len(prepared.classes) == 40
    (note,) = prepared.notes
    assert note == (
        f"{own}/dev.tsv: the test set has no sample of 39 of the 40 classes (0.0, 0.5, 0.75, 1.0, "
        "1.25 and 34 more): the score says nothing about them"
    )


def test_one_label_in_two_spellings_is_refused(own: Path) -> None:
    write_lines(own / "train.tsv", [("a", "Good"), ("b", "good"), ("c", "bad")])
    with pytest.raises(DataError, match="expected one spelling of every class, got 'Good' and"):
        prepare(options_for(own, skip_bad=True))


@for_each(
    ("choices", "words"),
    [
        ({"vocabulary": 100}, "--vocabulary 100: expected 261 or more"),
        ({"width": 9, "heads": 2}, "--width 9: expected a multiple of 2"),
        ({"dropout": 1.0}, "--dropout 1.0: expected 0 or more and less than 1"),
    ],
)
def test_an_option_out_of_range_is_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TextOptions(data="x", **choices)

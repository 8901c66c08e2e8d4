import re
from collections.abc import Iterable

import pytest

from onefold.errors import DataError
from onefold_jobs.data.labels import (
    Sample,
    check_labels,
    check_numbers,
    check_same,
    read_label,
    separator,
)
from onefold_jobs.data.pictures import Look, Sums, white_of
from tests.tables import for_each


def measured(count: int, each: int = 1) -> dict[str, int]:
    return {f"{number / 3:.2f}": each for number in range(count)}


@for_each(
    "counts",
    [
        {"0": 5, "1": 6},
        {str(number): 1 for number in range(10)},
        {f"n{number:08}": 3 for number in range(1000)},
        {"new york": 3, "new jersey": 3, "old york": 2},
        {"red, large": 1, "red, small": 1, "blue, large": 1, "blue, small": 1},
        {"1.0": 5, "0.0": 6},
    ],
)
def test_labels_of_classes_pass_without_a_word(counts: dict[str, int]) -> None:
    assert check_labels(counts, "train.tsv") == []


@for_each(
    ("texts", "expected"),
    [
        (["cat", "dog", "cat dog", "dog cat"], True),
        # Classes of which none is ever alone, as in tables of competitions; and one without any.
        (["clear water", "clear road", "haze water", "haze road", "road water", ""], True),
        (["hot dog, dog", "hot", "cat dog, red cat"], False),
        (["new york", "new jersey", "old york"], False),
        (["hot dog", "bun"], False),
        (["cat", "dog"], False),
    ],
)
def test_spaces_between_classes_are_found(texts: list[str], expected: bool) -> None:
    assert (separator([read_label(text, "multi-label") for text in texts]) == " ") == expected


def test_a_decimal_comma_is_named() -> None:
    with pytest.raises(ValueError, match="got '5,1': write a point for the decimal comma"):
        read_label("5,1", "regression")


ROUNDED = [f"{n}.{n:02}1" for n in range(1, 21)]


@for_each(
    ("cells", "signs", "words"),
    [
        (
            ["554", "5.130", "4.122"],
            "",
            "got '5.130' in line 3, and '554' in line 2: write 5130, or",
        ),
        (["8,570", "-12", "NA"], "", "write 8570, or 8,5700 if its comma precedes decimals"),
        (["7", *ROUNDED], "", "got '1.011' in line 3, and '7' in line 2: write 1011"),
        (["5.132", "4.122"], ",", "got '5.132' in line 2, and decimal commas in other columns"),
        (["5,132", "4,122"], ".", "decimal points in other columns: write 5132, or 5,1320 if"),
    ],
)
def test_separators_of_thousands_are_refused(cells: list[str], signs: str, words: str) -> None:
    with pytest.raises(DataError, match=f"^it: expected numbers without separators.*{words}"):
        check_numbers(enumerate(cells, start=2), "it", signs)


@for_each(
    ("cells", "signs", "noted"),
    [
        # Decimals of which few happen to have three digits, or all: 5 and 12720 have no separator.
        (["554", "5.131", "4.122"], "", True),
        (["5.130", "4.122"], "", True),
        (["0", "5.130", "4.122"], "", True),
        (["5", "12720", "5.130"], "", True),
        (["5.130", "4.122"], ",.", True),
        (["554", "5.130", "0.122"], "", False),
        (["554", "5.130", "4.12"], "", False),
        (["554", "5.130", "4.1220"], ",", False),
        (["554", "1e3", ""], ",", False),
    ],
)
def test_points_that_may_separate_thousands_are_mentioned(
    cells: list[str], signs: str, noted: bool
) -> None:
    notes = check_numbers(enumerate(cells, start=2), "it", signs)
    words = "is read as 5.13[01]; if its point separates thousands, write the number without it"
    assert [bool(re.search(words, note)) for note in notes] == [True] * noted


def test_numbers_that_may_be_measured_are_mentioned() -> None:
    stars = {f"{number / 2}": 9 for number in range(11)}
    for counts, some in ((stars, "'0.5', '1.5', '2.5'"), (measured(20), "'0.33', '0.67', '1.33'")):
        (note,) = check_labels(counts, "train.tsv")
        assert f"numbers, such as {some}, treated as" in note
    for ages in (11, 73):
        (note,) = check_labels({str(age): 30 for age in range(18, 18 + ages)}, "train.tsv")
        assert f"such as '18', '19', '20', treated as {ages} classes: --task regr" in note


def test_labels_that_are_no_classes_are_refused() -> None:
    for counts, words in (
        (measured(21), "got 21 different ones on 21 samples, all of them numbers, such as '0.00'"),
        ({str(n * n): 2 for n in range(80)}, "got 80 different ones on 160 samples, all of them"),
        ({f"word {n}": 1 for n in range(30)}, "30 of them only once, such as 'word 0'"),
        ({"toxic": 5, "toxic,rude": 3, "rude, mean": 2, "mean": 1}, "got lists of them, such as"),
        ({"cat": 5, "dog": 4, "dog cat": 3, "cat dog": 2}, "such as 'dog cat', 'cat dog': use --t"),
        ({"0 1 0": 5, "1 0 0": 4}, "got lists of them, such as '0 1 0', '1 0 0'"),
        ({"Lob": 3, "smash": 3, "lob": 2}, "got 'Lob' and 'lob': use one name"),
        ({"cafe\u0301": 3, "caf\u00e9": 2}, "the same letters in two Unicode encodings"),
        ({"Straße": 3, "STRASSE": 2}, "got 'Straße' and 'STRASSE'"),
        ({"cat": 3, "ca\u200bt": 2}, "expected one spelling of every class"),
        (
            {"cat": 3, "\x1b[2Jdog": 2},
            "expected printable class names, got '.x1b.* --label-column",
        ),
    ):
        with pytest.raises(DataError, match=f"^train.tsv: .*{words}.*--labels-as-is"):
            check_labels(counts, "train.tsv")


def test_white_is_as_many_bits_as_the_largest_value_needs() -> None:
    for deep, white in (
        ([], None),
        ([(0.4, True), (1.0, True)], 1),
        ([(0.4, True), (17.5, False)], 255),
        ([(4095.0, False), (3.0, False)], 4095),
        ([(65535.0, False), (1000.0, False)], 65535),
        ([(100000.0, False)], 131071),
        ([(-3.0, False)], 255),
    ):
        looks = [Look((1, 1), True, Sums(), largest, fractions) for largest, fractions in deep]
        assert white_of([Look((1, 1), True, Sums()), *looks]) == white


def samples_of(contents: Iterable[str]) -> list[Sample]:
    return [Sample(f"name {content}", "label", content) for content in contents]


def test_a_test_set_is_refused_if_more_than_half_of_it_was_trained_with() -> None:
    train = ["a", "b", "c", "d"]
    for same in (0, 2, 3, 4):
        parts = [samples_of(train), samples_of([*train[:same], *"wxyz"[same:]])]
        words = f"pets: {same} of 4 test samples are also in the training set"
        if same > 2:
            with pytest.raises(DataError, match=words):
                check_same(parts, "pets")
        else:
            notes = check_same(parts, "pets")
            assert [note.startswith(words) for note in notes] == [True] * (same > 0)
    # Nothing is known of these.
    assert check_same([samples_of(["", "1"]), samples_of([""])], "pets") == []

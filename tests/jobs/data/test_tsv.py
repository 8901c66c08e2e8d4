from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import DataError
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.samples import TextSplits, read_listed
from onefold_jobs.data.samples import read_splits as make_splits
from onefold_jobs.data.tables import Columns, Line, read_tsv
from tests.jobs.data.pictures import memory_limited
from tests.tables import for_each


def read_splits(train: Path, dev: Path) -> TextSplits:
    return make_splits(read_listed(train, str(dev), Columns("text")), holdout=0.5, seed=0)


UNSPLIT = st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\0\ufeff")
TEXTS = st.text(UNSPLIT, min_size=1).filter(str.strip)
LATIN_1 = (
    "expected UTF-8, got e9 as byte 4: if it is Latin-1, iconv -f WINDOWS-1252 -t UTF-8 converts "
    "the file"
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that many examples of hypothesis write in turn."""
    return tmp_path_factory.mktemp("tsv") / "train.tsv"


@given(
    samples=st.lists(st.tuples(TEXTS, st.sampled_from(["0", "1", "très bon"])), min_size=1),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    blank=st.integers(0, 2),
    last_end=st.booleans(),
)
def test_what_was_written_is_read(
    scratch: Path, samples: list[tuple[str, str]], end: str, mark: str, blank: int, last_end: bool
) -> None:
    content = mark + end.join(f"{text}\t{label}" for text, label in samples)
    scratch.write_bytes((content + end * (last_end + blank)).encode())
    lines, bad = read_tsv(str(scratch))
    assert [(line.text, line.label) for line in lines] == samples
    assert [line.line_number for line in lines] == list(range(1, len(samples) + 1))
    assert bad == []


@for_each(
    ("content", "reason"),
    [
        (b"no tab", "expected a text, a tab and a label, got no tab in 'no tab'"),
        (b"a\tb\t1", r"expected a text, a tab and a label, got 2 tabs in 'a\tb\t1'"),
        (b"  \t1", r"expected a text before the tab, got nothing in '  \t1'"),
        (b"fine\t ", r"expected a label after the tab, got nothing in 'fine\t '"),
        (b"", "expected a text, a tab and a label, got no tab in ''"),
        (b"caf\xe9\t1", LATIN_1),
        (b"a\0b\t1", "expected text, got a NUL as character 2"),
        (b"x" * 99, f"expected a text, a tab and a label, got no tab in '{'x' * 40}…'"),
    ],
)
def test_a_bad_line_is_named_and_others_read(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "train.tsv"
    for end in (b"\n", b"\r\n"):
        file.write_bytes(end.join([b"good\t1", content, b"better\t 2 "]))
        lines, bad = read_tsv(file)
        assert lines == [Line("good", "1", 1), Line("better", "2", 3)]
        assert bad == [BadFile(file, reason, 2)]


def test_a_file_without_a_sound_line_is_refused(tmp_path: Path) -> None:
    for content, complaint in (
        (b"", "lines of .*got an empty file"),
        (b"\xef\xbb\xbf\r\n \n", "lines of .*got an empty file"),
        (b"one\ntwo\n", "lines of .*none; of 2 bad ones the first is line 1: .* no tab in 'one'"),
        (b"caf\xe9\t1\n", "lines of .*first is line 1: expected UTF-8, got e9 as byte 4"),
        ("fine\t1\n".encode("utf-16"), "text in UTF-8, this is UTF-16: convert it"),
    ):
        (tmp_path / "train.tsv").write_bytes(content)
        with pytest.raises(DataError, match=rf"train\.tsv: expected {complaint}"):
            read_tsv(tmp_path / "train.tsv")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            read_tsv(tmp_path / "nowhere")


def splits(folder: Path, train: str, dev: str) -> tuple[Path, Path]:
    paths = folder / "train.tsv", folder / "dev.tsv"
    for path, content in zip(paths, (train, dev), strict=True):
        path.write_text(content)
    return paths


def test_classes_are_in_order(tmp_path: Path) -> None:
    for labels, classes in (
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["10", "9", "good"], ["10", "9", "good"]),
        (["1", "01"], ["01", "1"]),
        (["-", "--1"], ["-", "--1"]),
    ):
        content = "".join(f"text\t{label}\n" for label in labels)
        assert read_splits(*splits(tmp_path, content, content)).classes == classes


def test_bad_lines_of_both_files_are_told_in_order(tmp_path: Path) -> None:
    train, dev = splits(tmp_path, "a\t0\nb\t1\nc\n", "a\t1\nb\t7\nc\nd\t8\n")
    read = read_splits(train, dev)
    assert [line.text for line in read.train] == ["a", "b"]
    assert [line.text for line in read.dev] == ["a"]
    found = [(each.path, each.line) for each in read.left_out]
    assert found == [(train, 3), (dev, 2), (dev, 3), (dev, 4)]
    assert read.left_out[1].reason == "expected a label of the training set (0, 1), got '7'"
    # Of many classes some are named.
    content = "".join(f"text\t{label}\n" for label in range(12))
    bad = read_splits(*splits(tmp_path, content, content + "text\t12\n")).left_out
    assert "(0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more), got '12'" in bad[0].reason


def test_splits_that_cannot_be_trained_on_are_refused(tmp_path: Path) -> None:
    for train, dev, complaint in (
        (
            "a\t1\nb\t1\n",
            "a\t1\n",
            "train.tsv: expected two different labels, got '1' alone, on 2 samples that can",
        ),
        ("a\t1\nb\t0\n", "", "dev.tsv: expected lines of text, tab and label, got an empty file"),
        ("a\t1\nb\t0\n", "a\t2\n", r"dev.tsv: expected a line that can .* \(0, 1\), got '2'"),
    ):
        with pytest.raises(DataError, match=complaint):
            read_splits(*splits(tmp_path, train, dev))


def test_labels_and_lines_without_end_are_bad(tmp_path: Path) -> None:
    train, dev = splits(tmp_path, f"a\t1\nb\t2\nc\t{'7' * 5000}\n", "a\t1\n")
    read = read_splits(train, dev)
    assert read.classes == ["1", "2"]
    assert "expected a label of at most 200 characters, got 5,000" in read.left_out[0].reason
    with train.open("wb") as file:
        file.write(b"fine\t1\n")
        for _ in range(160):
            file.write(b"x" * (1 << 20))
        file.write(b"\t1\nfine as well\t2")
    with memory_limited(64 << 20):
        lines, bad = read_tsv(train)
    assert [(line.line_number, line.label) for line in lines] == [(1, "1"), (3, "2")]
    assert bad == [BadFile(train, "expected a line of at most 1,048,576 bytes, got more", 2)]

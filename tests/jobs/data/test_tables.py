import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import DataError
from onefold_jobs.data.columns import Columns, usual_column
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import check_task
from onefold_jobs.data.samples import TextSplits, read_listed
from onefold_jobs.data.samples import read_splits as make_splits
from onefold_jobs.data.tables import (
    Line,
    column_names,
    is_table,
    read_table,
    read_tsv,
)
from tests.jobs.data.pictures import memory_limited
from tests.tables import for_each

TEXT = Columns("text")
CELLS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff"), min_size=1
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose files many examples of hypothesis write in turn."""
    return tmp_path_factory.mktemp("tables")


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@given(
    texts=st.lists(CELLS.filter(str.strip), min_size=1, max_size=8),
    delimiter=st.sampled_from([",", ";", "\t"]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_what_csv_and_json_write_is_read(
    scratch: Path, texts: list[str], delimiter: str, end: str, mark: str
) -> None:
    if end == "\r":
        texts = [text.replace("\n", "|") for text in texts]
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end)
    writer.writerow(["id", "Review", "label"])
    writer.writerows([[number, text, number % 2] for number, text in enumerate(texts)])
    expected = [(text, str(number % 2)) for number, text in enumerate(texts)]
    lines, bad, columns = read_table(written(scratch / "a.csv", mark + out.getvalue()), TEXT)
    assert [(x.text.replace("\r\n", "\n"), x.label) for x in lines] == expected
    assert (bad, columns) == ([], Columns("text", "Review", ("label",)))
    content = end.join(json.dumps({"text": t, "label": int(label)}) for t, label in expected)
    lines, bad, _ = read_table(written(scratch / "a.jsonl", mark + content), TEXT)
    assert [(x.text, x.label) for x in lines] == expected
    assert ([x.line_number for x in lines], bad) == (list(range(1, len(texts) + 1)), [])


@for_each(
    ("name", "content", "line", "reason"),
    [
        ("a.csv", '"one, two",0,x', 3, "expected 2 cells, got 3 from 'one, two' on"),
        ("a.csv", "only", 3, "expected 2 cells, got 1 from 'only' on"),
        ("a.csv", "dull,", 3, "expected a label, got nothing"),
        ("a.csv", " ,good", 3, "expected a text, got nothing"),
        ("a.csv", f"dull,{'7' * 300}", 3, "expected a label of at most 200 characters, got 300"),
        ("a.csv", '"dull" day,1', 3, "expected quotes around a whole cell, or none"),
        ("a.csv", b"caf\xe9,1", 3, "expected UTF-8, got e9 as byte 4"),
        ("a.csv", '"dull\n\0",1', 4, "expected text, got a NUL as character 1"),
        ("a.jsonl", "{", 2, "expected a JSON object, got '{': "),
        (
            "a.jsonl",
            "[1]",
            2,
            "a.jsonl > lines.jsonl",
        ),
        ("a.jsonl", '{"text": "dull"}', 2, "expected a label, got nothing"),
        ("a.jsonl", '{"text": 7, "label": 1}', 2, "expected a text, got 7"),
        ("a.jsonl", '{"text": "a", "label": ["x", "y"]}', 2, "--task multi-label predicts several"),
        ("a.jsonl", "[" * 5000, 2, "expected a JSON object"),
    ],
)
def test_a_bad_row_is_named_and_others_read(
    tmp_path: Path, name: str, content: str | bytes, line: int, reason: str
) -> None:
    head, row = ("text,label\n", "{},{}\n")
    if name.endswith("jsonl"):
        head, row = "", '{{"text": "{}", "label": "{}"}}\n'
    raw = content if isinstance(content, bytes) else content.encode()
    first, last = row.format("fine", "good"), row.format("poor", "bad")
    file = written(tmp_path / name, (head + first).encode() + raw + b"\n" + last.encode())
    lines, bad, _ = read_table(file, TEXT)
    assert [(x.text, x.label) for x in lines] == [("fine", "good"), ("poor", "bad")]
    assert [(each.path, each.line) for each in bad] == [(file, line)]
    assert reason in bad[0].reason


def test_columns_of_jsonl_are_those_of_all_lines_and_of_nested_objects(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"review": {"body": "fine", "by": {"name": "a"}}},
        {"label": "bad", "review": {"body": "poor"}, "more": {}},
        {"label": "good", "review": {"body": "fair"}},
    ]
    file = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert column_names(file) == ["review.body", "review.by.name", "label"]
    lines, bad, _ = read_table(file, Columns("text", "review.body"))
    assert [(x.text, x.label, x.line_number) for x in lines] == [
        ("poor", "bad", 2),
        ("fair", "good", 3),
    ]
    assert [(each.line, each.reason) for each in bad] == [(1, "expected a label, got nothing")]
    with pytest.raises(DataError, match=r"a column 'body', .* name another with --text-column"):
        read_table(file, Columns("text", "body"))


@for_each("end", ["\n", "\r\n", "\r"])
def test_what_spreadsheets_write_is_read(tmp_path: Path, end: str) -> None:
    rows = ["sep=;", "text;label", "a, b;x", '"c;d";y', ""]
    lines, bad, _ = read_table(written(tmp_path / "it.csv", end.join(rows)), TEXT)
    assert (bad, lines) == ([], [Line("a, b", "x", 3), Line("c;d", "y", 4)])
    assert column_names(tmp_path / "it.csv") == ["text", "label"]
    # Without names, columns have numbers.
    numbered = Columns("text", "1", ("2",))
    lines, _, _ = read_table(written(tmp_path / "it.csv", end.join([rows[0], *rows[2:]])), numbered)
    assert lines == [Line("a, b", "x", 2), Line("c;d", "y", 3)]
    tsv = written(tmp_path / "it.tsv", f"a\tx{end}b\ty{end}")
    assert read_tsv(tsv) == ([Line("a", "x", 1), Line("b", "y", 2)], [])


def test_a_first_line_of_names_is_no_sample_if_columns_are_numbered(tmp_path: Path) -> None:
    """Two columns of one name can only be told apart by numbers, or renamed."""
    path = written(tmp_path / "it.csv", "text,text,label\na,b,x\nc,d,y\n")
    with pytest.raises(DataError, match=r"'text', got 2 of them; rename them, or name another"):
        read_table(path, TEXT._replace(sample="text"))
    lines, bad, _ = read_table(path, Columns("text", "2", ("3",)))
    assert lines == [Line("b", "x", 2), Line("d", "y", 3)]
    assert [each.line for each in bad] == [1]
    assert bad[0].reason.startswith("expected no header, got text, text, label: remove this line")


@for_each(
    ("content", "words"),
    [
        ("text\na\n", "expected two columns, one of them with a label, got only text"),
        (
            "a,x,1\nb,y,2\n",
            "which are a, x, 1; if its first line has no names, name columns by numb",
        ),
        (b"Gr\xf6\xdfe,label\n", "it.csv, line 1: expected UTF-8, got f6 as byte 3: if it is Lat"),
        (gzip.compress(b"text,label\na,x\n"), "this is a gzip file: unpack it with gunzip"),
        (b"PK\x03\x04\x14\0", "this is a zip archive, such as a workbook: save it as CSV"),
    ],
)
def test_a_file_that_is_no_table_is_told_what_it_is(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        read_table(written(tmp_path / "it.csv", content), TEXT)


def test_classes_are_switched_by_two_numbers(tmp_path: Path) -> None:
    """Of 1 and -1, as in CelebA, or of 1 and 0; with all three, one of them may be unknown."""
    columns = Columns("text", "text", ("old", "glad"))

    def read(*cells: str) -> list[Line]:
        rows = "".join(f"{letter},{each}\n" for letter, each in zip("abc", cells, strict=True))
        path = written(tmp_path / "it.csv", f"text,old,glad\n{rows}")
        lines, bad, _ = read_table(path, columns, "multi-label")
        assert not bad
        return lines

    expected = [Line("a", ("old",), 2), Line("b", ("glad",), 3), Line("c", (), 4)]
    assert read("1,-1", "-1,1", "-1,-1") == expected
    assert read("1,0", "0,1", "0,0") == expected
    with pytest.raises(DataError, match="0 and 1 in the class columns, or -1 and 1, got"):
        read("1,0", "-1,1", "0,0")


def test_names_of_class_columns_may_contain_commas(tmp_path: Path) -> None:
    rows = 'text,"big, red",old,"a,b",b\nx,1,0,1,1\ny,0,1,0,0\n'
    path = written(tmp_path / "it.csv", rows)
    # As the command line and a config file divide a list at its commas.
    for named in (("big", "red", "old", "a", "b", "b"), ("big, red", "old", "a,b", "b")):
        lines, bad, columns = read_table(path, Columns("text", "text", named), "multi-label")
        assert columns.label == ("big, red", "old", "a,b", "b")
        assert [line.label for line in lines] == [("big, red", "a,b", "b"), ("old",)]
        assert bad == []
    with pytest.raises(DataError, match="expected a column 'big', got only text, big, red, old"):
        read_table(path, Columns("text", "text", ("big", "old")), "multi-label")
    # A column of labels, and a text in two columns, one of them with a comma in its name.
    written(path, '"title, short",body,"kind, if any"\nx,y,good\n')
    lines, _, _ = read_table(path, Columns("text", "body,title, short", ("kind", "if any")))
    assert lines == [Line("y\nx", "good", 2)]


def test_a_missing_value_is_no_class(tmp_path: Path) -> None:
    path = tmp_path / "it.jsonl"
    path.write_text('{"text": "a", "label": NaN}\n{"text": "b", "label": "x"}\n')
    lines, bad, _ = read_table(path, TEXT)
    assert (lines, bad[0].reason) == ([Line("b", "x", 2)], "expected a label, got nothing")
    written(tmp_path / "it.csv", "text,label\na,nan\nb,x\nc,nan\nd,x\n")
    labels = [each.label for each in read_table(tmp_path / "it.csv", TEXT)[0]]
    for mark, who in {"nan": "pandas and NumPy write", "NA": "R writes"}.items():
        words = f"got {mark!r} for 2 samples, which {who} for a missing value: .*--labels-as-is"
        marked = [mark if label == "nan" else label for label in labels]
        with pytest.raises(DataError, match=words):
            check_task(marked, "single-label", "it", labels_as_is=False)
        assert check_task(marked, "single-label", "it", labels_as_is=True) == []


def test_a_quote_that_is_never_closed_ends_it_all(tmp_path: Path) -> None:
    rows = "text,label\nfine,1\n" + '"dull,0\n' + "fine,1\n" * 9
    file = written(tmp_path / "a.csv", rows)
    with pytest.raises(DataError, match=r"a\.csv, line 3: expected a closing quote"):
        read_table(file, TEXT)
    limit = csv.field_size_limit()
    for size, fits in ((1 << 20, True), ((1 << 20) + 1, False)):
        long = "x\n" * (size // 2) + "x" * (size % 2)
        written(file, f'text,label\nfine,1\n"{long}",0\n')
        if fits:
            assert len(read_table(file, TEXT)[0][1].text) == size
        else:
            with pytest.raises(DataError, match=r"line 3: expected a closing .*field larger than"):
                read_table(file, TEXT)
    assert csv.field_size_limit() == limit


def test_columns_are_found_by_their_names_or_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", "id,title,body,stars\n1,t,b,5\n2,u,c,4\n")
    read = read_table(file, Columns("text", None, ("stars",)))
    assert read[0][0] == Line("b", "5", 2)
    for columns, words in (
        (TEXT, "a.csv: .* use --label-column with one of its columns, which are id, title, body"),
        (Columns("image", None, ("stars",)), r"; a table of numbers .*: onefold init .*a\.csv$"),
        (Columns("text", "text", ("stars",)), "expected a column 'text', got only id, title, body"),
        (Columns("text", "body", ("body",)), "in two columns, got body for both"),
        (Columns("text", "body", ("id", "stars")), "use --task multi-label for one class per"),
    ):
        with pytest.raises(DataError, match=words):
            read_table(file, columns)
    # Two columns of one name; a file without a header, by number; one column for predictions.
    with pytest.raises(DataError, match="expected a column 'a', got 2 of them; rename them"):
        read_table(written(file, "a,a\n1,2\n"), Columns("text", "a", ("a",)))
    lines, _, _ = read_table(written(file, '1,"so, so"\n2,fine\n'), Columns("text", "2", ("1",)))
    assert lines == [Line("so, so", "1", 1), Line("fine", "2", 2)]
    assert [x.text for x in read_table(written(file, "any\nfine\n"), TEXT, None)[0]] == ["fine"]
    assert usual_column(["text", "sentence"], "text") is None
    for content, words in (
        ("", "got an empty file"),
        ("text,label\n", "rows of a table, got an e"),
    ):
        with pytest.raises(DataError, match=words):
            read_table(written(file, content), TEXT)
    assert column_names(tmp_path / "nowhere.csv") == []


def test_a_text_may_be_in_several_columns(tmp_path: Path) -> None:
    table = tmp_path / "posts.csv"
    table.write_text('title,body,kind\nHi,"Fine, and long",good\nOh,,bad\n,,bad\n')
    lines, bad, columns = read_table(table, Columns("text", "title, body", ("kind",)))
    assert [line.text for line in lines] == ["Hi\nFine, and long", "Oh"]
    assert [(each.line, each.reason) for each in bad] == [(4, "expected a text, got nothing")]
    assert columns.sample == "title, body"
    for named, words in (
        ("title,text", "expected a column 'text'"),
        ("title,kind", "in two columns"),
    ):
        with pytest.raises(DataError, match=words):
            read_table(table, Columns("text", named, ("kind",)))
    # A name with a comma in it is one column, and numbers name those of a file without a header.
    table.write_text('"title, body",kind\nHi,good\n')
    assert read_table(table, Columns("text", "title, body"))[0][0].text == "Hi"
    table.write_text("Hi,Fine,good\n")
    assert read_table(table, Columns("text", "1,2", ("3",)))[0][0].text == "Hi\nFine"


def test_parquet_and_the_folders_of_datasets_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    named: dict[str, Any] = {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}
    note = {"huggingface": json.dumps({"info": {"features": named}})}
    columns = {"text": ["fine", "dull", None, "odd"], "label": [1, 0, 1, -1]}
    for metadata, labels in ((None, ["1", "0", "-1"]), (note, ["good", "bad"])):
        file = tmp_path / "a.parquet"
        parquet.write_table(arrow.table(columns).replace_schema_metadata(metadata), file)
        lines, bad, _ = read_table(file, TEXT)
        assert [x.label for x in lines] == labels
        assert (bad[0].line, bad[0].reason) == (3, "expected a text, got nothing")
    folder = tmp_path / "saved"
    folder.mkdir()
    table = arrow.table(columns).replace_schema_metadata(note)
    for number in range(2):
        out = arrow.OSFile(str(folder / f"{number}.arrow"), "wb")
        with out, arrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": f"{number}.arrow"} for number in range(2)]})
    )
    assert is_table(folder)
    lines, bad, _ = read_table(folder, TEXT)
    assert [(x.label, x.line_number) for x in lines] == [
        ("good", 1), ("bad", 2), ("good", 5), ("bad", 6)
    ]  # fmt: skip
    assert [x.line for x in bad] == [3, 4, 7, 8]
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../a.parquet"}]}')
    written(tmp_path / "a.parquet", b"PAR1 and no more")
    for path in (tmp_path / "a.parquet", folder):
        with pytest.raises(DataError, match="expected a whole table of Parquet or datasets"):
            read_table(path, TEXT)


def test_what_datasets_itself_saves_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    # Or its bars would leave a thread behind.
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    classes = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": classes})
    made = datasets.Dataset.from_dict(
        {"text": ["fine", "dull", "odd"], "label": [1, 0, 0]}, features=features
    )
    made.select([0, 2]).save_to_disk(str(tmp_path / "some"))
    lines, bad, _ = read_table(tmp_path / "some", TEXT)
    assert (lines, bad) == ([Line("fine", "good", 1), Line("odd", "bad", 2)], [])


def read_splits(train: Path, dev: Path) -> TextSplits:
    return make_splits(read_listed(train, str(dev), Columns("text")), holdout=0.5, seed=0)


UNSPLIT = st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\0\ufeff")
TEXTS = st.text(UNSPLIT, min_size=1).filter(str.strip)
LATIN_1 = (
    "expected UTF-8, got e9 as byte 4: if it is Latin-1, convert the file with iconv -f "
    "WINDOWS-1252 -t UTF-8 {} > utf8.tsv"
)


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
    file = scratch / "train.tsv"
    file.write_bytes((content + end * (last_end + blank)).encode())
    lines, bad = read_tsv(str(file))
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
        assert bad == [BadFile(file, reason.format(file), 2)]


def test_a_file_without_a_sound_line_is_refused(tmp_path: Path) -> None:
    for content, complaint in (
        (b"", "lines of .*got an empty file"),
        (b"\xef\xbb\xbf\r\n \n", "lines of .*got an empty file"),
        (b"one\ntwo\n", "lines of .*none; the first of 2 bad ones is line 1: .* no tab in 'one'"),
        (b"caf\xe9\t1\n", "lines of .* ones is line 1: expected UTF-8, got e9 as byte 4"),
        ("fine\t1\n".encode("utf-16"), "UTF-8, this is UTF-16: convert it"),
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
            "train.tsv: expected two different labels, got only '1', on 2 usable samples",
        ),
        ("a\t1\nb\t0\n", "", "dev.tsv: expected lines of text, tab and label, got an empty file"),
        ("a\t1\nb\t0\n", "a\t2\n", r"dev.tsv: expected a usable line, .* \(0, 1\), got '2'"),
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

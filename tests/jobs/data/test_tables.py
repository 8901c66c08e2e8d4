import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import DataError
from onefold_jobs.data.tables import Columns, Line, column_names, is_table, read_table, usual_column
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
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_what_csv_and_json_write_is_read(
    scratch: Path, texts: list[str], delimiter: str, end: str, mark: str
) -> None:
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
        ("a.jsonl", "{", 2, "expected an object of JSON, got '{': "),
        ("a.jsonl", "[1]", 2, "expected an object of JSON: if the file is one list, jq -c"),
        ("a.jsonl", '{"text": "dull"}', 2, "expected a label, got nothing"),
        ("a.jsonl", '{"text": 7, "label": 1}', 2, "expected a text, got 7"),
        ("a.jsonl", '{"text": "a", "label": ["x", "y"]}', 2, "--task multi-label predicts several"),
        ("a.jsonl", "[" * 5000, 2, "expected an object of JSON"),
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
    with pytest.raises(DataError, match=r"a column 'body', .* --text-column names another"):
        read_table(file, Columns("text", "body"))


def test_a_quote_that_is_never_closed_ends_it_all(tmp_path: Path) -> None:
    rows = "text,label\nfine,1\n" + '"dull,0\n' + "fine,1\n" * 9
    file = written(tmp_path / "a.csv", rows)
    with pytest.raises(DataError, match=r"a\.csv, line 3: expected a quote that is closed"):
        read_table(file, TEXT)
    limit = csv.field_size_limit()
    for size, fits in ((1 << 20, True), ((1 << 20) + 1, False)):
        long = "x\n" * (size // 2) + "x" * (size % 2)
        written(file, f'text,label\nfine,1\n"{long}",0\n')
        if fits:
            assert len(read_table(file, TEXT)[0][1].text) == size
        else:
            with pytest.raises(DataError, match=r"line 3: expected a quote .*field larger than"):
                read_table(file, TEXT)
    assert csv.field_size_limit() == limit


def test_columns_are_found_by_their_names_or_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", "id,title,body,stars\n1,t,b,5\n2,u,c,4\n")
    read = read_table(file, Columns("text", None, ("stars",)))
    assert read[0][0] == Line("b", "5", 2)
    for columns, words in (
        (TEXT, "a.csv: expected --label-column with one of its columns, which are id, title, body"),
        (Columns("text", "text", ("stars",)), "expected a column 'text', got only id, title, body"),
        (Columns("text", "body", ("body",)), "in two columns, got body for both"),
        (Columns("text", "body", ("id", "stars")), "--task multi-label predicts a class by each"),
    ):
        with pytest.raises(DataError, match=words):
            read_table(file, columns)
    # Two columns of one name; a file without a header, by number; one column for predictions.
    with pytest.raises(DataError, match="expected a column 'a', got two of them"):
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

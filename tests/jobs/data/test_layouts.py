"""Data sets of other kinds, and what is said of them before anything else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onefold.errors import DataError, LaunchError
from onefold_jobs.data.classes import PictureClasses, read_classes
from onefold_jobs.data.columns import Columns
from onefold_jobs.data.layouts import refuse_other_layouts
from onefold_jobs.data.samples import read_listed, read_to_score
from onefold_jobs.run import read_options, run_job
from tests.jobs.tiny import job_of, write_masks, write_pictures, write_texts
from tests.tables import for_each

BOXES = "onefold has no job for object detection: crop the objects"


def put(path: Path, content: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        # Some pixels of each name's own, so that no two pictures are the same.
        draw = np.random.default_rng(list(path.name.encode()))
        Image.fromarray(draw.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(path)
    else:
        path.write_text(content)


COCO = json.dumps({"images": [{"file_name": "x" * 200}] * 1000, "annotations": [{"bbox": [1]}]})
YOLO = "0 0.5 0.5 0.25 0.125\n1 0.1 0.2 0.3 0.4\n"


@for_each(
    ("files", "words"),
    [
        ({"images/a.png": "", "labels/a.txt": YOLO}, "labels/a.txt begins with '0 0.5 0.5 0.25"),
        ({"train/images/a.png": "", "train/labels/a.txt": YOLO}, "train/labels/a.txt begins"),
        ({"images/train/a.png": "", "labels/train/a.txt": YOLO}, "labels/train/a.txt begins"),
        ({"annotations/instances.json": COCO}, "annotations/instances.json has COCO's"),
        ({"train/_annotations.coco.json": COCO, "train/a.png": ""}, "coco.json has COCO's"),
        ({"train2017/a.png": "", "annotations/a.json": COCO}, "annotations/a.json has COCO's"),
        ({"Annotations/a.xml": "<object><bndbox>"}, "Annotations/a.xml has a <bndbox>"),
    ],
)
def test_boxes_are_refused_by_name(tmp_path: Path, files: dict[str, str], words: str) -> None:
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    for name, content in files.items():
        put(tmp_path / "data" / name, content)
    for job in ("classify", "segment"):
        with pytest.raises(DataError, match=f"{words}.*{BOXES}"):
            refuse_other_layouts(tmp_path / "data", job, masks=job == "segment")


def test_a_table_is_made_of_class_folders_of_texts_by_the_command_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("neg/1.txt", "neg/2.txt", "pos/3.txt"):
        put(tmp_path / "my films/train" / name, f'"{name}"\nand more')
    with pytest.raises(DataError, match="got class folders of text files") as error:
        refuse_other_layouts(Path("my films"), "text", texts=True)
    command = str(error.value).splitlines()[1].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True)
    listed = read_listed(Path("train.jsonl"), None, Columns("text"))
    assert [line.label for line in listed.train] == ["neg", "neg", "pos"]
    assert listed.train[2].text == '"pos/3.txt"\nand more'


def test_boxes_are_refused_where_their_file_is_named(tmp_path: Path) -> None:
    put(tmp_path / "boxes.json", COCO)
    with pytest.raises(DataError, match=f"boxes.json has COCO's.*{BOXES}"):
        refuse_other_layouts(tmp_path / "boxes.json", "classify")


@for_each("train", ["train_images", "train2017", "Training Set"])
def test_folders_of_a_competition_are_not_taken_for_classes(tmp_path: Path, train: str) -> None:
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    for name in (f"{train}/a.png", f"{train}/b.png", "test_images/c.png"):
        put(tmp_path / "data" / name)
    words = "got images in .*test_images.*, which name parts of a dataset: sort them into"
    with pytest.raises(DataError, match=words):
        refuse_other_layouts(tmp_path / "data", "classify")
    refuse_other_layouts(tmp_path / "data", "segment", masks=True)
    put(tmp_path / "data" / "train.csv", "image_id,label\na.png,pug\nb.png,boxer\n")
    # Its labels are not those of any picture.
    put(tmp_path / "data" / "sample_submission.csv", "image_id,label\nc.png,pug\n")
    words = r"next to the table train\.csv .* name the table and two of its columns"
    for job, expected in (("classify", "a folder per class"), ("segment", "the folders imag")):
        with pytest.raises(DataError, match=f"expected {expected}.*{words}"):
            refuse_other_layouts(tmp_path / "data", job, masks=job == "segment")


def test_this_comes_before_any_other_message(tmp_path: Path) -> None:
    put(tmp_path / "labels" / "a.txt", YOLO)
    (tmp_path / "runs").write_text("in the way")
    given = {"data": str(tmp_path), "runs": str(tmp_path / "runs"), "pretrained": "nowhere"}
    for data, error in ((tmp_path, DataError), (tmp_path / "labels", LaunchError)):
        options = read_options(job_of("classify"), given | {"data": str(data)}, None)
        with pytest.raises(error):
            run_job(job_of("classify"), options)


def test_pictures_beside_a_table_are_told_apart_from_class_folders(tmp_path: Path) -> None:
    for name in ("train/a.png", "train/b.png", "test/c.png"):
        put(tmp_path / name)
    put(tmp_path / "sample_submission.csv", "id,breed\nc,pug\n")
    put(tmp_path / "labels.csv", "id,label\na,pug\nb,boxer\n")
    words = r"next to the table labels\.csv with the columns id, label: .*--data .*labels\.csv "
    with pytest.raises(DataError, match=f"{words}--image-column id --label-column label"):
        refuse_other_layouts(tmp_path, "classify")
    refuse_other_layouts(tmp_path, "text", texts=True)
    refuse_other_layouts(tmp_path / "labels.csv", "classify")
    for write in (write_pictures, write_masks, write_texts):
        data = write(tmp_path / write.__name__)
        put(data / "notes.csv", "a,b\n1,2\n")
        refuse_other_layouts(data, "classify")


def pictures(table: Path, *, skip: bool = False, dev: Path | None = None) -> PictureClasses:
    found = read_listed(table, str(dev) if dev else None, Columns("image"))
    return read_classes(found, holdout=0.25, seed=0, skip_bad=skip)


def test_pictures_are_found_by_their_paths_in_a_table(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(8)]
    for name in names:
        put(tmp_path / "data" / "shots" / name)
    rows = [f"shots/{name},{'even' if int(name[0]) % 2 == 0 else 'odd'}\n" for name in names]
    table = tmp_path / "data" / "train.csv"
    put(table, "path,label\n" + "".join(rows))
    by_path = pictures(table)
    assert (by_path.classes, len(by_path.train), len(by_path.test)) == (("even", "odd"), 6, 2)
    assert by_path.train.pictures.name(0).startswith("shots/")
    assert by_path.notes == [f"{table}: the image is in column path, the label in label"]
    put(table, "path,label\n" + "".join(rows).replace("/", "\\"))
    assert pictures(table).digest == by_path.digest
    # By names without folder and ending, as in tables of competitions: the same pictures.
    # Of two columns the one that is no label has the pictures.
    put(table, "id,label\n" + "".join(rows).replace("shots/", "").replace(".png", ""))
    assert pictures(table).digest == by_path.digest
    put(tmp_path / "data" / "more" / "3.png")
    put(table, "path,label\n" + "".join(rows) + "gone.png,odd\n3,even\n/nowhere/3.png,odd\n")
    with pytest.raises(DataError) as caught:
        pictures(table)
    for words in (
        r"line 10: expected an image at .*data/gone.png or .*/gone.png, got none",
        r"line 11: expected the path of one image, got '3': 2 have that name",
        r"line 12: expected an image at /nowhere/3.png, got none",
    ):
        assert caught.match(words)
    assert len(pictures(table, skip=True).left_out) == 3


def test_the_same_picture_in_two_rows_is_told_with_its_lines(tmp_path: Path) -> None:
    for number in range(8):
        put(tmp_path / f"{number}.png")
    rows = [f"{n}.png,{'ab'[n % 2]}\n" for n in range(8)]
    train, dev = tmp_path / "train.csv", tmp_path / "dev.csv"
    put(train, "".join(["path,label\n", *rows[:6], "0.png,b\n"]))
    put(dev, "".join(["path,label\n", *rows[6:], rows[3]]))
    tested, torn = sorted(pictures(train, dev=dev).notes[1:])
    words = "3.png (line 4 of dev.csv) is the same as 3.png (line 5 of train.csv)"
    assert tested == f"{train}: 1 of 3 test samples is also in the training set: {words}"
    assert torn.endswith("0.png (line 8 of train.csv) is the same as 0.png (line 2 of train.csv)")
    # Rows may move to other lines.
    digest = pictures(train, dev=dev).digest
    put(train, train.read_text().replace("label\n", "label\n\n"))
    assert pictures(train, dev=dev).digest == digest


def test_pictures_may_be_found_from_the_folder_around_the_table(tmp_path: Path) -> None:
    for number in range(8):
        put(tmp_path / "shots" / f"{number}.png")
    rows = "".join(f"shots/{n}.png,{'ab'[n % 2]}\n" for n in range(8))
    put(tmp_path / "lists" / "train.csv", f"path,label\n{rows}")
    found = pictures(tmp_path / "lists" / "train.csv")
    assert (len(found.train), len(found.test), found.left_out) == (6, 2, [])
    # The names, and so the digest of the data, do not depend on where they are.
    assert found.train.pictures.name(0).startswith("../shots/")
    (tmp_path / "moved").mkdir()
    for name in ("shots", "lists"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert pictures(tmp_path / "moved" / "lists" / "train.csv").digest == found.digest
    # Images next to the table take precedence.
    put(tmp_path / "moved" / "lists" / "shots" / "0.png")
    again = pictures(tmp_path / "moved" / "lists" / "train.csv")
    names = [part.pictures.name(n) for part in (again.train, again.test) for n in range(len(part))]
    assert [name for name in names if ".." not in name] == ["shots/0.png"]


def test_spaces_between_several_classes_divide_them_in_all_tables(tmp_path: Path) -> None:
    train, dev = tmp_path / "train.csv", tmp_path / "dev.csv"
    put(train, "image,labels\n1,scab\n2,rust scab\n3,rust\n4,scab rust\n5,\n")
    put(dev, "image,labels\n6,rust  scab\n7,scab\n")
    columns = Columns("image")
    found = read_listed(train, str(dev), columns, "multi-label")
    several = ("rust", "scab")
    assert [x.label for x in found.train] == [("scab",), several, ("rust",), several[::-1], ()]
    assert [x.label for x in found.test or ()] == [several, ("scab",)]
    assert "'rust scab' is 2 classes; --labels-as-is makes it one class" in found.notes[-1]
    as_is = read_listed(train, str(dev), columns, "multi-label", labels_as_is=True)
    assert as_is.train[1].label == ("rust scab",)


@for_each(
    ("labels", "read"),
    [
        ("a|b; c, d\n2,a", [("a", "b; c, d"), ("a",)]),
        ("a; b, c\n2,b, c", [("a", "b, c"), ("b, c",)]),
        ("a,b (c)\n2,[a]", [("a", "b (c)"), ("a",)]),
        ("(a) b (c)|x\n2,(a) b (c)\n4,(a)", [("(a) b (c)", "x"), ("(a) b (c)",), ("(a)",)]),
        ("['a' 'b, c']\n2,('b, c',)\n4,(1, 2)", [("a", "b, c"), ("b, c",), ("1", "2")]),
    ],
)
def test_the_strongest_sign_between_classes_is_the_only_one(
    labels: str, read: Any, tmp_path: Path
) -> None:
    rows = (row.split(",", 1) for row in f"1,{labels}\n3,\n".splitlines())
    text = "image,labels\n" + "".join(f'{image},"{label}"\n' for image, label in rows)
    put(tmp_path / "train.csv", text)
    for as_is in (False, True):
        found = read_listed(
            tmp_path / "train.csv", None, Columns("image"), "multi-label", labels_as_is=as_is
        )
        assert [x.label for x in found.train] == [*read, ()]


def test_samples_with_an_empty_cell_are_counted(tmp_path: Path) -> None:
    train, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    labels = '"a|b"', '""', "null", "[]", '"b"'
    rows = [f'{{"text": "{number}", "label": {each}}}\n' for number, each in enumerate(labels)]
    put(train, "".join(rows))
    put(dev, "".join(rows[:2]))
    found = read_listed(train, str(dev), Columns("text"), "multi-label")
    # An empty list says that there is no class.
    assert found.notes[1:] == [
        f"{train}: 2 of 5 samples have no class (empty cells)",
        f"{dev}: 1 of 2 samples has no class (empty cells)",
    ]


@for_each(
    ("name", "row"),
    [
        ("it.tsv", "{text}\t{number}"),
        ("it.csv", "{text},{number}"),
        ("it.jsonl", '{{"text": "{text}", "label": "{number}"}}'),
    ],
)
def test_separators_of_thousands_are_refused_in_all_tables(
    name: str, row: str, tmp_path: Path
) -> None:
    table, head = tmp_path / name, ["text,label"] if name == "it.csv" else []

    def write(*numbers: str) -> Path:
        rows = [row.format(text=f"t{n}", number=each) for n, each in enumerate(numbers)]
        put(table, "\n".join([*head, *rows]))
        return table

    text = Columns("text")
    with pytest.raises(DataError, match=r"it\..*: expected numbers without separators of thous"):
        read_listed(write("554", "5.130"), None, text, "regression")
    with pytest.raises(DataError, match=r"it\..*: expected numbers without separators of thous"):
        read_to_score(table, text, "regression", lambda _: True)
    assert "is read as 5.130" in read_listed(write("5.130"), None, text, "regression").notes[-1]
    assert read_listed(write("55.4", "5.130"), None, text, "regression").notes[1:] == []
    # Numbers of JSON mean what they are.
    if name.endswith("l"):
        put(table, table.read_text().replace('"55.4"', "554").replace('"5.130"', "5.130"))
        assert read_listed(table, None, text, "regression").notes[1:] == []


def test_a_list_is_not_divided_as_texts_are(tmp_path: Path) -> None:
    labels = '["x, y", "z"]', '"z, w"', "[]", "\"['x, y']\""
    rows = (f'{{"text": "{number}", "label": {each}}}\n' for number, each in enumerate(labels))
    put(tmp_path / "train.jsonl", "".join(rows))
    found = read_listed(tmp_path / "train.jsonl", None, Columns("text"), "multi-label")
    assert [x.label for x in found.train] == [("x, y", "z"), ("z", "w"), (), ("x, y",)]


@for_each(
    ("name", "values", "noted"),
    [
        ("Split", "01", True),
        ("fold", "01", True),
        ("length", "01", False),
        ("part", range(11), False),
        ("Aufteilung", ("Training", "Test"), True),
        ("jeu", ("entraînement", "validation"), True),
        ("conjunto", ("Entrenamiento", "prueba"), True),
        ("vehicle", ("train", "bus"), False),
        ("vehicle", ("train", "train"), False),
    ],
)
def test_a_column_of_parts_is_noted(name: str, values: Any, noted: bool, tmp_path: Path) -> None:
    rows = "".join(f"{n},{'ab'[n % 2]},{value}\n" for n, value in enumerate(values))
    (tmp_path / "a.csv").write_text(f"image,label,{name}\n{rows}", encoding="utf-8")
    found = read_listed(tmp_path / "a.csv", None, Columns("image"))
    said = f"column {name} is not used; in onefold train, --dev names a table"
    assert any(said in note for note in found.notes) == noted
    tested = read_listed(tmp_path / "a.csv", str(tmp_path / "a.csv"), Columns("image")).notes
    assert [note.endswith(f"column {name} is not used") for note in tested[1:]] == [True] * noted


@for_each(
    ("job", "write"),
    [("classify", write_pictures), ("segment", write_masks), ("text", write_texts)],
)
def test_whether_data_have_a_test_set_is_known(job: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    for data, own in (
        (tmp_path, True),
        (tmp_path / ("train.tsv" if job == "text" else "train"), False),
    ):
        options = read_options(job_of(job), {"data": str(data), "holdout": 0.4}, None)
        assert job_of(job).prepare(options, None).own_test == own


def test_a_table_to_test_with_is_used_unless_it_has_no_labels(tmp_path: Path) -> None:
    for number in range(6):
        put(tmp_path / f"{number}.png")
    put(tmp_path / "train.csv", "file,label\n0.png,a\n1.png,b\n2.png,a\n3.png,b\n")
    put(tmp_path / "test.csv", "file,label\n4.png,b\n5.png,c\n")
    dev = tmp_path / "test.csv"
    data = pictures(tmp_path / "train.csv", dev=dev, skip=True)
    assert (len(data.train), list(data.test.labels)) == (4, [1])
    assert "no usable image of its class 'c' in" in str(data.left_out[0])
    put(dev, "file,id\n4.png,7\n5.png,8\n")
    assert f"{dev}: not used, because it has no column label" in pictures(tmp_path).notes
    with pytest.raises(DataError, match="expected a column 'label', got only file, id"):
        pictures(tmp_path / "train.csv", dev=dev)

"""``onefold init`` writes scripts that run, and refuses what it cannot write one for."""

import json
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from onefold.cli.main import app
from onefold.errors import DataError
from onefold_jobs.cli.hints import advised
from onefold_jobs.cli.init import write_script
from onefold_jobs.run import read_options
from tests.jobs.data.test_arrays import write_four
from tests.jobs.tiny import job_of, write_class_masks, write_masks, write_texts
from tests.tables import for_each

WORDS = ("good fine film", "bad dull movie", "nice and warm", "cold and wet")
TAGS = ("x|y", "x", "y|z", "z")


def texts(label: Callable[[int], object], name: str = "t.csv") -> Callable[[Path], Path]:
    """A table of texts, and of what this returns for each number."""
    rows = [{"id": n, "review": f"{WORDS[n % 4]}, {n}", "label": label(n)} for n in range(40)]

    def write(folder: Path) -> Path:
        lines = [json.dumps(row) for row in rows]
        if name.endswith(".csv"):
            lines = [f'{row["id"]},"{row["review"]}",{row["label"]}' for row in rows]
            lines.insert(0, "id,review,label")
        if name.endswith(".tsv"):
            lines = [f"{row['review']}\t{row['label']}" for row in rows]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join(lines))
        return folder / name

    return write


def listed(label: Callable[[int], object], path: str) -> Callable[[Path], Path]:
    """A table of images and of what this returns for each number."""

    def write(folder: Path) -> Path:
        (folder / "img").mkdir(parents=True)
        numbers = np.random.default_rng(0)
        for each in range(40):
            pixels = numbers.integers(0, 255, (12, 10, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "img" / f"p{each}.png")
        rows = [f"{path.format(each)};{label(each)}" for each in range(40)]
        (folder / "labels.csv").write_text("\n".join(["path;findings", *rows]))
        return folder / "labels.csv"

    return write


def folder_of(write: Callable[[Path], Path], part: str = "") -> Callable[[Path], Path]:
    return lambda folder: write(folder / "data") / part


def digits_of_mnist(folder: Path) -> Path:
    return write_four(folder, [0, 1] * 10, [0, 1])


def photos(folder: Path) -> Path:
    numbers = np.random.default_rng(0)
    for name in ("a b", "c"):
        inside = folder / "photos" / "train" / name
        inside.mkdir(parents=True)
        for each in range(8):
            Image.fromarray(numbers.integers(0, 255, (9, 7, 3), np.uint8)).save(
                inside / f"{each}.PNG"
            )
    return folder / "photos"


def table(rows: str, name: str = "table.csv") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(rows, encoding="utf-8")
        return folder / name

    return write


def arrays(folder: Path, **values: object) -> Path:
    path = folder / "a.npz"
    np.savez(path, **{"x": np.ones((20, 3)), **(values or {"y": np.arange(20) % 2})})  # type: ignore[arg-type]
    return path


def headers(folder: Path, head: str) -> Path:
    """An NPZ file of headers alone, which promise whatever they like."""
    path, packed = folder / "a.npz", head.encode()
    with zipfile.ZipFile(path, "w") as made:
        for name in "xy":
            made.writestr(
                f"{name}.npy", b"\x93NUMPY\x02\0" + struct.pack("<I", len(packed)) + packed
            )
    return path


def sites(folder: Path) -> Path:
    """Class folders within folders that are no classes."""
    for part in ("north/a", "north/b", "south/a", "south/b"):
        (folder / part).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / part / "1.png")
    return folder


CLASSES = "a,b,what\n" + "".join(f"{n},{n % 3},{'xyz'[n % 3]}\n" for n in range(20))
NUMBERS = "a\tprice <SCORE>\n" + "".join(f"{n}\t{n / 3}\n" for n in range(20))
GAPS = "id;body mass;blood group;what it is\n" + "".join(
    f"P-{n};{'NA' if n == 3 else f'{n},5'};A;{'' if n == 4 else 'xyz'[n % 3]}\n" for n in range(20)
)
TOWNS = "town,name,price\n" + "".join(f"{'ab'[n % 2]},n{n},{n / 3}\n" for n in range(20))
QUOTED = '"1,5"'
TAGGED = "a,tags\n" + "".join(f"{n},{('x|y', 'x', 'y|z', 'z')[n % 4]}\n" for n in range(20))
WHOLE = '"a""b",what\n' + "".join(f"{n},{n % 4}\n" for n in range(20))


def run(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "onefold", "run", "--devices", "cpu:1", "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "model.pt").exists()
    return done.stdout


def test_only_the_headers_of_arrays_are_read(tmp_path: Path) -> None:
    large = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000, 28, 28)}\n"
    write_script(headers(tmp_path, large), tmp_path / "train.py")
    assert "[:, None] / 255" in (tmp_path / "train.py").read_text()


def check(make: Callable[[Path], Path | None], score: str, folder: Path) -> None:
    write_script(make(folder), folder / "train.py")
    text = (folder / "train.py").read_text()
    assert max(map(len, text.splitlines())) <= 100 + len(str(folder))
    assert len(text.splitlines()) <= 100
    # Few epochs are enough to see that it trains.
    text = re.sub(r"trainer.epochs\(\d+\)", "trainer.epochs(2)", text)
    (folder / "train.py").write_text(text)
    assert "epoch 2: loss " in run(folder)
    assert score in text


@pytest.mark.processes
@for_each(
    ("make", "score"),
    [
        (photos, "accuracy"),
        (table(NUMBERS, "<PATH>.tsv"), "absolute error"),
        (table(GAPS), 'LEFT_OUT = ["id", "blood group"]'),
        (table(TOWNS), 'CHOICES = ["town"]'),
        (
            lambda folder: arrays(folder, x=np.full((20, 8, 8), 9, "u1"), y=np.arange(20) % 2),
            ".float()[:, None] / 255",
        ),
        (folder_of(write_masks), "IoU of an image"),
    ],
)
def test_the_script_trains(make: Callable[[Path], Path | None], score: str, tmp_path: Path) -> None:
    check(make, score, tmp_path)


@pytest.mark.full
@pytest.mark.processes
@for_each(
    ("make", "score"),
    [
        (lambda _: None, "accuracy"),
        (table(CLASSES), "accuracy"),
        (table(TAGGED), 'row[-1].split("|")'),
        (table(WHOLE), "accuracy"),
        (table(f"sep=,\n{WHOLE}"), "_, names, *rows = "),
        (arrays, "accuracy"),
        (
            lambda folder: arrays(folder, x=np.ones((20, 8, 9, 3)), y=np.arange(20) % 2),
            ".float().permute(0, 3, 1, 2)\n",
        ),
        (lambda folder: arrays(folder, x=np.ones((20, 3, 8, 9)), y=np.ones(20)), ".float()\n"),
        (lambda folder: arrays(folder, x=np.ones((20, 9, 3)), y=np.ones(20)), ".flatten(1)"),
        (lambda folder: arrays(folder, y=np.ones(20)), "absolute error"),
        (lambda folder: arrays(folder, labels=np.arange(20) % 2), 'arrays["labels"]).long()'),
        (
            table(GAPS.replace("xyz"[0], "1,5").replace("y\n", "2\n").replace("z\n", "3\n")),
            "number(row[-1])",
        ),
        (listed(lambda n: n / 7, "img\\p{}.png"), "absolute error"),
        (texts(lambda n: TAGS[n % 4]), 'split("|")'),
        (folder_of(write_class_masks), "VALUES = [0, 3, 15]"),
        (folder_of(lambda root: write_class_masks(root, kind="colors")), "VALUES = [(0, 0, 0), ("),
        (folder_of(write_masks, "train"), "random_split"),
        (folder_of(write_texts), "read("),
        (texts(lambda n: n / 7, "t.jsonl"), "json.loads"),
        (texts(lambda n: "ab"[n % 2], "t.tsv"), 'split("\\t")'),
        (listed(lambda n: "ab"[n % 2], "p{}"), 'delimiter=";"'),
        (listed(lambda n: TAGS[n % 4], "img/p{}.png"), 'split("|")'),
        (lambda _: Path("digits"), "load_digits()"),
        (digits_of_mnist, "gzip.open"),
        (lambda folder: deep(folder, "I;16"), "WHITE = 1023"),
        (lambda folder: deep(folder, "F"), ".convert("),
    ],
)
def test_scripts_for_other_data_train(
    make: Callable[[Path], Path | None], score: str, tmp_path: Path
) -> None:
    check(make, score, tmp_path)


def variables(script: Path, until: str = "\n\ndef loss(") -> dict[str, Any]:
    """The variables of a script's beginning."""
    read, found, _ = script.read_text().partition(until)
    assert found
    names: dict[str, Any] = {}
    exec(read, names)
    return names


def dataset(data: Path, folder: Path) -> Any:
    """The data as the script for them reads them."""
    write_script(data, folder / "train.py")
    return variables(folder / "train.py")["data"]


def masks_of(draw: Callable[[Any, int], Any]) -> Callable[[Path], Path]:
    """Images with masks that this draws from a square of True and a number."""

    def write(folder: Path) -> Path:
        square = np.zeros((12, 12), dtype=bool)
        square[2:8, 3:9] = True
        for kind in ("images", "masks"):
            (folder / "data" / kind).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (12, 12)).save(folder / "data" / "images" / f"{number}.png")
            draw(square, number).save(folder / "data" / "masks" / f"{number}.png")
        return folder / "data"

    return write


def color(square: Any, *rgb: int) -> Image.Image:
    return Image.fromarray(square[..., None] * np.array(rgb, dtype=np.uint8))


def palette(square: Any, *rgb: int) -> Image.Image:
    mask = Image.fromarray(square.astype(np.uint8))
    mask.putpalette([0, 0, 0, *rgb])
    return mask


@for_each(
    ("draw", "found"),
    [
        # The gray of a bright color may be dark.
        (lambda square, _: color(square, 255, 0, 0), [[0, 1]] * 4),
        (lambda square, _: color(square, 0, 0, 255), [[0, 1]] * 4),
        (lambda square, _: palette(square, 128, 0, 0), [[0, 1]] * 4),
        (lambda square, _: color(square, 255, 255, 255, 255), [[0, 1]] * 4),
        (lambda square, _: color(square, 1, 1, 1), [[0, 1]] * 4),
        (lambda square, _: Image.fromarray(square.astype(np.uint16) * 4095), [[0, 1]] * 4),
        # Numbers in three channels.
        (lambda square, _: color(square, 40, 40, 40), [[0, 1]] * 4),
        # One class in each mask, as a color, a number, and the gray of a color.
        (lambda square, n: color(square, *[(255, 0, 0), (0, 0, 255)][n % 2]), [[0, 2], [0, 1]] * 2),
        (lambda square, n: Image.fromarray(square.astype(np.uint8) + n % 2), [[0, 1], [1, 2]] * 2),
        (lambda square, n: color(square, *[160 + 70 * (n % 2)] * 3), [[0, 1], [0, 2]] * 2),
    ],
)
def test_the_script_reads_masks_as_a_job_does(
    draw: Callable[[Any, int], Any], found: list[list[int]], tmp_path: Path
) -> None:
    data = dataset(masks_of(draw)(tmp_path), tmp_path)
    assert [mask.unique().int().tolist() for _, mask in (data[n] for n in range(4))] == found


def turned(picture: Image.Image, path: Path) -> None:
    """Save an image as a camera that was held upright does: lying, with a note."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


def test_the_script_turns_images_as_their_cameras_were_held(tmp_path: Path) -> None:
    picture = Image.linear_gradient("L").convert("RGB")
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        picture.save(tmp_path / "data" / name / "0.png")
        turned(picture, tmp_path / "data" / name / "1.png")
    data = dataset(tmp_path / "data", tmp_path)
    assert torch.equal(data[0][0], data[1][0])


def test_folders_that_may_be_parts_are_classes_if_asked(tmp_path: Path) -> None:
    output = tmp_path / "train.py"
    asked = ["init", str(sites(tmp_path / "data")), "-o", str(output)]
    refused = CliRunner().invoke(app, asked)
    assert (refused.exit_code, "pass --labels-as-is" in str(refused.exception)) == (1, True)
    assert CliRunner().invoke(app, [*asked, "--labels-as-is"]).exit_code == 0
    assert "classes = sorted(" in output.read_text()


@for_each(
    ("make", "words"),
    [
        (lambda folder: folder / "none", "none does not exist: expected a folder of class folders"),
        (table("x", "a.py"), "a.py: expected a folder of class folders"),
        (lambda folder: folder, "expected two or more class folders with images, found none"),
        (table("a,b\nhello,2\n"), "expected two different labels, got only '2', on 1 usable"),
        (table("a,b\n"), "expected a header with two or more column names, and rows of data"),
        (table("1,2\n3,4\n"), "expected a header with two or more column names"),
        (table("a,b\n1,2\n3\n"), "line 3: expected 2 cells, got 1"),
        (sites, "all of north, south contain the folders a, b, so the classes may be either"),
        (table("", "a.xlsx"), "Write the table as CSV: pandas.read_excel"),
        (table('{"a": 1, "b": 2}', "a.jsonl"), "Write the table as CSV: pandas.read_json"),
        (lambda folder: arrays(folder, z=np.ones(20)), "Name the inputs x and the targets y"),
        (table("not a zip", "a.npz"), "expected a NumPy file with arrays x and y"),
        (lambda folder: arrays(folder, y=np.array([None] * 20)), "y contains Python objects"),
        (lambda folder: headers(folder, "-" * 9000), "expected a NumPy file with arrays x and y"),
        (lambda folder: headers(folder, "x" * 20000), "expected a NumPy file with arrays x and y"),
    ],
)
def test_what_has_no_script_is_refused(
    make: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        write_script(make(tmp_path), tmp_path / "train.py")
    assert not (tmp_path / "train.py").exists()


def test_the_script_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["init", "-o", str(tmp_path / "fit.py")])
    assert (result.exit_code, (tmp_path / "fit.py").is_file()) == (0, True)


@pytest.mark.processes
def test_the_folder_to_test_with_is_used(tmp_path: Path) -> None:
    data = photos(tmp_path)
    shutil.copytree(data / "train" / "c", data / "val" / "c")
    shutil.copytree(data / "train" / "c", data / "val" / "untrained")
    # Of a class that has no test sample, the others keep their numbers.
    check(lambda _: data, f'test = data, Pictures(files_in(Path("{data / "val"}")))', tmp_path)


def test_a_folder_to_test_with_that_has_no_classes_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = photos(tmp_path)
    shutil.copytree(data / "train" / "c", data / "test")
    write_script(data, tmp_path / "train.py")
    assert "random_split" in (tmp_path / "train.py").read_text()
    words = f"onefold: {data / 'test'}: not used, because it has no class folders\n"
    assert capsys.readouterr().err == words


def test_the_first_picture_of_each_class_is_looked_at(tmp_path: Path) -> None:
    data = photos(tmp_path)
    (data / "train" / "c" / "7.PNG").write_text("broken")
    write_script(data, tmp_path / "train.py")
    (data / "train" / "c" / "0.PNG").write_text("broken")
    with pytest.raises(DataError, match=r"c/0\.PNG: cannot read the image: a file of"):
        write_script(data, tmp_path / "other.py")


def deep(folder: Path, mode: str) -> Path:
    """Two classes of images with more than 8 bits per pixel."""
    numbers = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / "deep" / name).mkdir(parents=True)
        for each in range(8):
            values = numbers.integers(300, 1000, (9, 7))
            whole = mode == "I;16"
            pixels = values.astype(np.uint16) if whole else (values / 1000).astype(np.float32)
            Image.fromarray(pixels).save(folder / "deep" / name / f"{each}.tif")
    return folder / "deep"


def beside(label: Callable[[int], object]) -> Callable[[Path], Path]:
    """A folder of images with a table of them."""

    def write(folder: Path) -> Path:
        listed(label, "p{}")(folder / "x").rename(folder / "x" / "img" / "labels.csv")
        return folder / "x" / "img"

    return write


COMMAND = re.compile(r"(?:use |Use |such as )(onefold train .*?)(?: with folders|, or |$)")


@for_each(
    ("make", "ends"),
    [
        (beside(lambda n: n / 7), "--label-column findings --task regression"),
        (beside(lambda n: TAGS[n % 4]), "--label-column findings --task multi-label"),
        (beside(lambda n: "ab"[n % 2]), "--label-column findings"),
    ],
)
def test_a_command_in_a_message_is_accepted_as_printed(
    make: Callable[[Path], Path], ends: str, tmp_path: Path
) -> None:
    """Up to the data: they are read, and fit the options."""
    data = make(tmp_path)
    with pytest.raises(DataError) as refused:
        write_script(data, tmp_path / "train.py")
    found = COMMAND.search(str(refused.value))
    assert found is not None
    assert found[1].endswith(ends)
    _, _, job, *words = shlex.split(found[1])
    options = dict(zip((w[2:].replace("-", "_") for w in words[::2]), words[1::2], strict=True))
    kind = job_of(job)
    kind.settle(asked := read_options(kind, options, None), kind.prepare(asked, None))


def test_parts_of_a_data_set_are_no_classes(tmp_path: Path) -> None:
    photos(tmp_path)
    for name, part in (("a b", "train_images"), ("c", "test_images")):
        (tmp_path / "photos" / "train" / name).rename(tmp_path / part)
    shutil.rmtree(tmp_path / "photos")
    with pytest.raises(DataError, match="which name parts of a dataset"):
        write_script(tmp_path, tmp_path / "train.py")


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("mine")
    result = CliRunner().invoke(app, ["init"])
    assert isinstance(result.exception, FileExistsError)
    assert Path("train.py").read_text() == "mine"


def houses(**changed: tuple[int, str]) -> Callable[[Path], Path]:
    """A table of numbers, with one other cell in some columns: row number and content."""
    columns = ["size", "age", "sold", "part", "price"]

    def cell(name: str, number: int) -> str:
        usual = {
            "sold": f"2024-{1 + number % 12}-{1 + number % 28}",
            "part": ("Training", "Test")[number % 5 == 0],
            "price": f"{50_000 + 1000 * number}",
        }
        place, content = changed.get(name, (-1, ""))
        return content if number == place else usual.get(name, str(number))

    lines = [",".join(columns)]
    lines += [",".join(cell(name, number) for name in columns) for number in range(40)]
    return table("\n".join(lines) + "\n")


@for_each("unreadable", ["NULL", '"12,345"', "n/a", "inf", "abc", ""])
def test_a_few_cells_that_are_no_numbers_change_no_column(
    unreadable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = houses(price=(3, unreadable), age=(7, unreadable))(tmp_path)
    write_script(path, tmp_path / "train.py")
    told = capsys.readouterr().err.splitlines()
    shown = unreadable.strip('"')
    reason = f"onefold: left out: {path}, line 5: expected a number, such as 3.5, got {shown!r}"
    assert [line.startswith(reason) for line in told if "onefold: left out" in line] == [True]
    found = [line for line in told if "read as missing" in line]
    words = f"column age: 1 cell of 40 read as missing, such as {shown!r} in line 9; to keep"
    assert found == ([] if unreadable == "" else [found[0]])
    assert all(words in line for line in found)
    assert f"onefold: {path}: column sold is left out: it contains dates, such as '20" in told[0]
    assert f"onefold: {path}: column part is left out: it seems to split the data" in told[1]
    names = variables(tmp_path / "train.py")
    assert names["x"].shape == (39, 2)
    # The missing cell is the mean of its column, which is standardized.
    assert names["x"].abs().max() < 2
    assert names["x"][6, 1] == pytest.approx(0, abs=1e-6)
    assert names["y"].tolist() == [50_000.0 + 1000 * n for n in range(40) if n != 3]


@for_each(
    ("make", "words"),
    [
        (houses(price=(3, "1")), ["sold is left out", "part is left out"]),
        (
            table("a,code,what\n" + "".join(f'{n},"{n},5",{"xy"[n % 2]}\n' for n in range(20))),
            ["column code is left out: it contains numbers, such as '0,5': write"],
        ),
        (
            table("a,void,same,what\n" + "".join(f"{n},,u,{'xy'[n % 2]}\n" for n in range(20))),
            ["void is left out: it contains no values", "same is left out: all of its cells are"],
        ),
        (
            table("a,name,what\n" + "".join(f"{n},m{n},{'xy'[n % 2]}\n" for n in range(20))),
            ["column name is left out: it contains free text, such as 'm0'"],
        ),
        (
            table("a,land,n\n" + "".join(f"{n},{('DE', 'NA')[n % 2]},{n}\n" for n in range(40))),
            [],
        ),
        (
            table("a;b\n" + "".join(f"{n + 1}.500;{n + 1}.250\n" for n in range(40))),
            ["column a: '1.500' in line 2 is read as 1.500; if its", "the target: '1.250' in line"],
        ),
        (
            table(
                "a,b,c\n" + "".join(f"{n + 1}.500,{n + 1}.250,{'xy'[n % 2]}\n" for n in range(40))
            ),
            [],
        ),
        (
            table(
                "a,b,c\n" + "".join(f"{n},{(n + 1, '1.250')[n % 2]},{n % 2}\n" for n in range(40))
            ),
            ["column b is left out: it has separators of thousands, '1.250' in line 3, and '1' in"],
        ),
        (
            listed(lambda n: f"{'ab'[n % 2]}", "img/p{}.png"),
            ["labels.csv: the image is in column path, the label in findings"],
        ),
        (
            table("subject,body,queue\n" + "".join(f"s {n},b {n},{n % 2}\n" for n in range(40))),
            ["the text is in column body, the label in queue"],
        ),
    ],
)
def test_every_column_that_is_no_input_is_told_with_its_reason(
    make: Callable[[Path], Path],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_script(make(tmp_path), tmp_path / "train.py")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(words)
    assert [word in line for word, line in zip(words, told, strict=True)] == [True] * len(words)


@for_each(
    ("make", "words"),
    [
        (
            table("a,b\n" + "".join(f'{n},"{n},5"\n' for n in range(20))),
            r"20 lines of 20: .*, line 2: .* got '0,5': write a point for the decimal comma",
        ),
        (
            table("a,b\n" + "".join(f'{n},"€ {n},500"\n' for n in range(40))),
            r"40 lines of 40: .*, line 2: .* got '€ 0,500': write digits and a decimal point only",
        ),
        (
            table(
                "a;b\n"
                + "".join(f"{n};{(f'{n + 1}.500', '1.200.300')[n == 9]}\n" for n in range(40))
            ),
            r"1 line of 40: .*, line 11: .* got '1.200.300': write digits and a decimal point only",
        ),
        (
            table("a,b\n" + "".join(f"{n},{(n + 1, f'{n}.250')[n % 2]}\n" for n in range(40))),
            "the target: expected numbers without .* got '1.250' in line 3, and '1' in line 2: wri",
        ),
        (
            table("a;b\n" + "".join(f"{n},5;{n + 1}.250\n" for n in range(40))),
            "got '1.250' in line 2, and decimal commas in other columns: write 1250, or 1.2500 if",
        ),
        (
            table("a;b\n" + "".join(f"{n}.5;{n + 1},250\n" for n in range(40))),
            "got '1,250' in line 2, and decimal points in other columns",
        ),
        (
            table("a,b\n" + "".join(f'"{n},5",{n + 1}.250\n' for n in range(40))),
            "expected columns of inputs before the target: column a is left out",
        ),
        (
            table("a,b,c\n" + "".join(f'{n},"{n},5",{n + 1}.250\n' for n in range(40))),
            "got '1.250' in line 2, and decimal commas in other columns",
        ),
        (
            texts(lambda n: (n + 1, f"{n}.250")[n % 2]),
            r"t.csv: the target: expected numbers without .* got '1.250' in line 3, and '1' in",
        ),
        (
            table("a,b\n" + "".join(f"{n},{(QUOTED, n)[n % 2]}\n" for n in range(60))),
            r"30 lines of 60: .*, line 2: expected a number, .*, got '1,5': write a point",
        ),
        (
            table("a,b\n" + "".join(f"{n},{('yes', 'no', 'NA')[n % 3]}\n" for n in range(20))),
            "got 'NA' for 6 samples, which R writes for a missing value: .*--labels-as-is",
        ),
        (
            table("a,b\n" + "".join(f"{n},name {n}\n" for n in range(40))),
            "expected labels that name classes, got 40 different ones on 40 samples, 40 of them",
        ),
        (
            table("a,b\n" + "".join(f"2024-01-{n:02},{n}\n" for n in range(1, 29))),
            "expected columns of inputs before the target: column a is left out: it contains dates",
        ),
    ],
)
def test_a_target_is_what_a_job_accepts(
    make: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        write_script(make(tmp_path), tmp_path / "train.py")


def test_rows_of_images_that_do_not_exist_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = listed(lambda n: "ab"[n % 2], "img/p{}.png")(tmp_path)
    rows = data.read_text()
    data.write_text(f"{rows}\nimg/gone.png;a")
    words = r"line 42: expected an image at .*img/gone.png or .*, got none\nfix them, or remove"
    with pytest.raises(DataError, match=words):
        write_script(data, tmp_path / "train.py")
    data.write_text(f"{rows}\n;a")
    write_script(data, tmp_path / "train.py")
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == f"onefold: left out: {data}, line 42: expected a path, got nothing"
    assert len(variables(tmp_path / "train.py")["data"]) == 40


def test_advice_for_a_job_is_completed_for_init(tmp_path: Path) -> None:
    rows = [{"a": f"b {n}", "c": f"d {n}", "e": "xy"[n % 2]} for n in range(40)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (
        r"use --label-column .*\. The init command has no --label-column: rename the two columns"
    )
    with pytest.raises(DataError, match=words):
        write_script(tmp_path / "x.jsonl", tmp_path / "train.py")
    # What it says makes a script.
    rows = [{"text": row["a"], "c": row["c"], "label": row["e"]} for row in rows]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_script(tmp_path / "x.jsonl", tmp_path / "train.py")
    assert variables(tmp_path / "train.py")["classes"] == ["x", "y"]


@for_each(
    ("text", "lacking"),
    [
        ("use --skip-bad or more --epochs", "--skip-bad, --epochs"),
        ("in onefold train, --dev names a table; or --labels-as-is", ""),
        ("use onefold train text --data a.csv --task regression: it reads --output", ""),
        ("name it with --data", "--data: name them as its DATA"),
    ],
)
def test_options_that_init_lacks_are_named(text: str, lacking: str) -> None:
    rest = f". The init command has no {lacking}" if lacking else ""
    assert advised(text) == text + rest


@for_each(
    ("label", "classes"),
    [
        (lambda n: ("yes", "no", "NA")[n % 3], ["NA", "no", "yes"]),
        (lambda n: 100 + n % 30, [str(n) for n in range(100, 130)]),
    ],
)
def test_labels_are_classes_as_they_are_if_asked(
    label: Callable[[int], object], classes: list[str], tmp_path: Path
) -> None:
    rows = "".join(f"{n},{label(n)}\n" for n in range(60))
    write_script(table(f"a,b\n{rows}")(tmp_path), tmp_path / "train.py", labels_as_is=True)
    assert variables(tmp_path / "train.py")["classes"] == classes


def test_images_may_be_named_relative_to_the_folder_around_the_table(tmp_path: Path) -> None:
    table = listed(lambda n: "ab"[n % 2], "img/p{}.png")(tmp_path)
    (tmp_path / "lists").mkdir()
    table = table.rename(tmp_path / "lists" / "labels.csv")
    write_script(table, tmp_path / "train.py")
    files = [file for file, _ in variables(tmp_path / "train.py")["data"].files]
    assert files == [tmp_path / "img" / f"p{n}.png" for n in range(40)]


@pytest.mark.processes
def test_a_model_of_numbers_is_saved_with_their_scale(tmp_path: Path) -> None:
    check(houses(), "absolute error", tmp_path)
    names = variables(tmp_path / "train.py", until="\noptimizer = ")
    model, x, y = names["model"], names["x"], names["y"]
    saved = torch.load(tmp_path / "model.pt")
    assert (saved["5.bias"], saved["5.weight"]) == (y.mean(), y.std())
    torch.nn.init.zeros_(model[5].weight)
    model.load_state_dict(saved)
    with torch.no_grad():
        error = (model(x).squeeze(1) - y).abs().mean()
    # Two epochs are few: it is about as good as the mean, in the unit of the target.
    assert error < 2 * (y - y.mean()).abs().mean()

"""``onefold init`` writes scripts that run, and refuses what it cannot write one for."""

import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from onefold.cli.main import app
from onefold.errors import DataError
from onefold_jobs.cli.init import write_script
from tests.tables import for_each


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
    assert len(text.splitlines()) <= 75
    assert "epoch 10: loss " in run(folder)
    assert score in text


@pytest.mark.processes
@for_each(
    ("make", "score"),
    [
        (photos, "accuracy"),
        (table(NUMBERS, "<PATH>.tsv"), "squared error"),
        (table(GAPS), 'LEFT_OUT = ["id", "blood group"]'),
        (table(TOWNS), 'CHOICES = ["town"]'),
        (
            lambda folder: arrays(folder, x=np.full((20, 8, 8), 9, "u1"), y=np.arange(20) % 2),
            ".float()[:, None] / 255",
        ),
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
        (table(WHOLE), "accuracy"),
        (table(f"sep=,\n{WHOLE}"), "_, names, *rows = "),
        (arrays, "accuracy"),
        (
            lambda folder: arrays(folder, x=np.ones((20, 8, 9, 3)), y=np.arange(20) % 2),
            ".float().permute(0, 3, 1, 2)\n",
        ),
        (lambda folder: arrays(folder, x=np.ones((20, 3, 8, 9)), y=np.ones(20)), ".float()\n"),
        (lambda folder: arrays(folder, x=np.ones((20, 9, 3)), y=np.ones(20)), ".flatten(1)"),
        (lambda folder: arrays(folder, y=np.ones(20)), "squared error"),
        (lambda folder: arrays(folder, labels=np.arange(20) % 2), 'arrays["labels"]).long()'),
        (
            table(GAPS.replace("xyz"[0], "1,5").replace("y\n", "2\n").replace("z\n", "3\n")),
            "number(row[-1])",
        ),
    ],
)
def test_scripts_for_other_data_train(
    make: Callable[[Path], Path | None], score: str, tmp_path: Path
) -> None:
    check(make, score, tmp_path)


@for_each(
    ("make", "words"),
    [
        (lambda folder: folder / "none", "none does not exist: expected a folder of class folders"),
        (table("x", "a.py"), "a.py: expected a folder of class folders"),
        (lambda folder: folder, "expected two or more class folders with images, found none"),
        (table("a,b\n"), "expected a header with two or more column names, and rows of data"),
        (table("1,2\n3,4\n"), "expected a header with two or more column names"),
        (table("a,b\n1,2\n3\n"), "line 3: expected 2 cells, got 1"),
        (table("a,b\nhello,2\n"), "onefold train text --data .*table.csv"),
        (sites, "all of north, south contain the folders a, b, so the classes may be either"),
        (table("", "a.parquet"), "Write the table as CSV: pandas.read_parquet"),
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


@for_each("part", ["", "train"])
def test_masks_are_a_job(tmp_path: Path, part: str) -> None:
    for name in ("images", "masks"):
        (tmp_path / "data" / part / name).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError, match="onefold train segment --data"):
        write_script(tmp_path / "data", tmp_path / "train.py")


@pytest.mark.processes
def test_the_folder_to_test_with_is_used(tmp_path: Path) -> None:
    data = photos(tmp_path)
    shutil.copytree(data / "train" / "c", data / "val" / "c")
    shutil.copytree(data / "train" / "c", data / "val" / "untrained")
    # Of a class that has no test sample, the others keep their numbers.
    check(lambda _: data, f'test = data, Pictures(Path("{data / "val"}"), classes)', tmp_path)


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


@for_each("mode", ["I;16", "F"])
def test_pictures_that_a_script_would_make_white_are_a_job(mode: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new(mode, (4, 4), 999).save(tmp_path / name / "1.tif")
    with pytest.raises(DataError, match=r"8 bits per pixel, .* onefold train classify --data"):
        write_script(tmp_path, tmp_path / "train.py")


@for_each("path", ["photos/train/c/1.PNG", "photos\\train\\c\\1.PNG"])
def test_a_table_that_names_pictures_is_a_job(path: str, tmp_path: Path) -> None:
    photos(tmp_path)
    rows = "path,findings,n\n" + "".join(f"{path},{'ab'[n % 2]},{n}\n" for n in range(20))
    with pytest.raises(DataError, match=r"onefold train classify --data .* --image-column path"):
        write_script(table(rows)(tmp_path), tmp_path / "train.py")


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

"""What the comparison with other libraries rests on: its data, its scores, its lines."""

from pathlib import Path

import numpy as np
import pytest

from side_by_side import SCRIPTS, SIDES, prepare, score_of, typed_lines

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')


PARTS = ("train", "val", "test")


def save(path: Path, level: int, size: tuple[int, int] = (4, 4), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow.new(mode, size, level if mode == "L" else (level, 0, 0)).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve pictures to train with, the first of which is also one of two to test with."""
    source = tmp_path / "source"
    for number in range(12):
        save(source / f"hotdog/train/dog/{number:02}.png", 20 * number).rename(
            source / f"hotdog/train/dog/{number:02}.jpg"
        )
    for name, level in (("cat/a", 0), ("dog/b", 255)):
        save(source / f"hotdog/test/{name}.png", level).rename(source / f"hotdog/test/{name}.jpg")
    for part in ("train", "test"):
        save(source / f"crackforest/{part}/images/1.jpg", 100)
        mask = save(source / f"crackforest/{part}/masks/1.png", 0, mode="L")
        with pillow.open(mask) as image:
            image.putpixel((3, 0), 255)
            image.save(mask)
    (source / "sst2").mkdir()
    (source / "sst2/test.tsv").write_text("good\t1\nbad\t0\n")
    prepare(source, tmp_path / "data")
    return tmp_path / "data"


def test_nothing_that_is_tested_is_trained_with(data: Path) -> None:
    found = {part: sorted(p.stem for p in data.glob(f"hotdog/{part}/*/*")) for part in PARTS}
    assert found == {
        "train": ["02", "03", "04", "05", "06", "07", "08", "09", "10"],
        "val": ["01", "11"],
        "test": ["a", "b"],
    }
    with pillow.open(data / "crackforest/test/masks/1.png") as mask:
        # A crack of one pixel is one of the halved mask, too.
        assert np.asarray(mask).tolist() == [[0, 255], [0, 0]]


def test_scores_are_of_all_samples_in_any_order(data: Path, tmp_path: Path) -> None:
    table = tmp_path / "predictions.csv"
    table.write_text("text,class\ngood,1\nbad,1\n")
    assert score_of("text", data / "sst2", tmp_path) == 0.5
    table.write_text("file,class\nx/b.jpg,dog\na.jpg,dog\n")
    assert score_of("classify", data / "hotdog", tmp_path) == 0.5
    table.write_text("file,class\nb.jpg,dog\n")
    with pytest.raises(ValueError, match=r"1 images have no prediction, such as a\.jpg"):
        score_of("classify", data / "hotdog", tmp_path)
    with pillow.open(data / "crackforest/test/masks/1.png") as mask:
        mask.putpixel((0, 0), 255)
        (tmp_path / "predictions").mkdir()
        mask.save(tmp_path / "predictions/1.png")
    assert score_of("segment", data / "crackforest", tmp_path) == 0.5


def test_typed_lines_are_those_of_a_user() -> None:
    assert typed_lines("# why\nimport os  # harness\n\nif x:\n    train()  # twice\n") == 2
    names = {path.stem for path in SCRIPTS.iterdir()}
    assert {side.script for side in SIDES} == names

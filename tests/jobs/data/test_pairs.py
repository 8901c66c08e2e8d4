"""Pictures with masks: what is found, what is refused, what is counted."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefold.errors import DataError
from onefold_jobs.data.masks import MaskRule
from onefold_jobs.data.pairs import MaskedPictures, read_pairs
from tests.masked import black_and_white, gray, save, save_pairs
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')

SQUARE = (4, 4)


def read(directory: Path, **choices: Any) -> MaskedPictures:
    usual: dict[str, Any] = {"holdout": 0.25, "seed": 0, "skip_bad": False}
    return read_pairs(directory, **{**usual, **choices})


def names(data: MaskedPictures) -> tuple[list[str], list[str]]:
    return [pair.image.name for pair in data.train], [pair.image.name for pair in data.test]


def pixels_of(path: Path) -> Any:
    return np.asarray(pillow.open(path))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_pairs(tmp_path, [SQUARE] * 8)
    return tmp_path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Three sound pairs to train with, of different sizes, and two to test with."""
    save_pairs(tmp_path / "train", [(4, 4), (5, 3), (8, 8)])
    save_pairs(tmp_path / "test", [SQUARE] * 2, first=3)
    return tmp_path


def test_folders_of_their_own_are_taken_as_they_are(split: Path) -> None:
    folder = split / "test"
    for name in ("test", "val", "valid", "validation"):
        folder = folder.rename(split / name)
        data = read(split)
        assert names(data) == (["0.png", "1.png", "2.png"], ["3.png", "4.png"])
    assert data.train[0].image == split / "train" / "images" / "0.png"
    assert data.train[0].mask == split / "train" / "masks" / "0.png"
    assert (data.shortest, data.left_out) == (3, [])
    save_pairs(split / "test", [SQUARE], first=5)
    assert names(read(split)) == (["0.png", "1.png", "2.png"], ["3.png", "4.png"])
    shutil.rmtree(split / "test")
    folder.rename(split / "later")
    with pytest.raises(DataError, match="contains train, but none of val, valid"):
        read(split)


def test_a_share_is_held_out_where_there_is_no_test_set(whole: Path, tmp_path: Path) -> None:
    (whole / "images" / ".0.png").write_bytes(b"")
    (whole / "masks" / "notes.txt").write_text("by hand")
    for holdout, count in ((0.25, 2), (0.01, 1), (0.99, 7)):
        train, test = names(read(whole, holdout=holdout))
        assert len(test) == count
        assert sorted(train + test) == [f"{number}.png" for number in range(8)]
    drawn = [names(read(whole, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    (linked := tmp_path / "linked").mkdir()
    for name in ("images", "masks"):
        (linked / name).symlink_to(whole / name)
    assert names(read(linked)) == drawn[0]


def test_too_little_is_refused(tmp_path: Path) -> None:
    for made, words in (
        ("masks", "expected .* there is no images"),
        ("images", "images: expected images, found none"),
    ):
        (tmp_path / made).mkdir()
        with pytest.raises(DataError, match=words):
            read(tmp_path)
    save_pairs(tmp_path, [SQUARE])
    with pytest.raises(DataError, match="for training and testing, found 1 and 0"):
        read(tmp_path)


def other_size(folder: Path) -> dict[str, str]:
    save(folder / "masks" / "0.png", black_and_white(4, 5))
    return {"masks/0.png": f"expected a mask of 4x4 pixels, .*{folder}/images/0.png, got 5x4"}


def one_missing(folder: Path) -> dict[str, str]:
    (folder / "masks" / "0.png").unlink()
    (folder / "images" / "1.png").unlink()
    return {
        "images/0.png": "there is no mask of that name in",
        "masks/1.png": "there is no image of that name in",
    }


def broken(folder: Path) -> dict[str, str]:
    (folder / "masks" / "0.png").write_bytes(b"no image")
    path = save(folder / "images" / "1.png", gray(64, 64, 3))
    path.write_bytes(path.read_bytes()[:2000])
    reason = "cannot read the image"
    return {"masks/0.png": reason, "images/1.png": reason}


def twice(folder: Path) -> dict[str, str]:
    save(folder / "images" / "0.jpg", gray(*SQUARE))
    return {
        "images/0.jpg": "expected one file of that name, there is 0.png as well",
        "images/0.png": "expected one file of that name, there is 0.jpg as well",
    }


def numbers_of_classes(folder: Path) -> dict[str, str]:
    save(folder / "masks" / "0.png", np.full(SQUARE, 3, dtype=np.uint8))
    return {"masks/0.png": r"expected a mask of 0 and 1, or of 0 and 255, got 3 \(100.0%\): none"}


@for_each("spoil", [other_size, one_missing, broken, twice, numbers_of_classes])
def test_what_is_bad_is_named_or_left_out(tmp_path: Path, spoil: Any) -> None:
    save_pairs(tmp_path, [SQUARE] * 8)
    reasons = spoil(tmp_path)
    words = f"^{len(reasons)} files? cannot be used"
    with pytest.raises(DataError, match=words) as caught:
        read(tmp_path)
    for path, reason in reasons.items():
        assert re.search(f"{tmp_path / path}: {reason}", str(caught.value))
    data = read(tmp_path, skip_bad=True)
    assert {str(bad.path.relative_to(tmp_path)) for bad in data.left_out} == set(reasons)
    bad = {Path(path).stem for path in reasons}
    train, test = names(data)
    images = 8 - (spoil is one_missing) + (spoil is twice)
    share = f"--skip-bad, which drops {images - len(train + test)} of {images} samples ("
    assert share in str(caught.value)
    assert sorted(train + test) == [f"{n}.png" for n in range(8) if str(n) not in bad]
    for path in (tmp_path / "masks").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="for training and testing, found 0 and 0"):
        read(tmp_path, skip_bad=True)


def test_a_test_set_that_says_nothing_is_refused(split: Path) -> None:
    for number in (3, 4):
        save(split / "test" / "masks" / f"{number}.png", np.zeros(SQUARE, dtype=np.uint8))
    with pytest.raises(DataError, match="none of the 2 has a foreground pixel"):
        read(split)
    shutil.rmtree(split / "test")
    shutil.copytree(split / "train", split / "test")
    with pytest.raises(DataError, match="3 of 3 test samples are also in the training set"):
        read(split)


def test_pixels_are_counted_in_the_training_pictures_that_are_used(split: Path) -> None:
    data = read(split)
    assert data.pixels == data.sums.count == 4 * 4 + 5 * 3 + 8 * 8
    masks = [pixels_of(pair.mask) for pair in data.train]
    assert data.foreground == sum(int((mask == 255).sum()) for mask in masks)
    images = np.concatenate([pixels_of(pair.image).ravel() for pair in data.train])
    assert data.sums.totals == [int(images.sum(dtype=np.int64))] * 3
    save(split / "train" / "masks" / "0.png", black_and_white(9, 9))  # left out
    save(split / "train" / "masks" / "1.png", np.zeros((5, 3), dtype=np.uint8))
    data = read(split, skip_bad=True)
    assert data.pixels == 5 * 3 + 8 * 8
    assert data.foreground == int((masks[2] == 255).sum())


def test_other_data_have_another_digest(whole: Path) -> None:
    digests = [read(whole).digest, read(whole, seed=1).digest]
    assert read(whole).digest == digests[0]
    for kind in ("images", "masks"):
        (whole / kind / "0.png").rename(whole / kind / "x.png")
    assert len({*digests, read(whole).digest}) == 3
    path = whole / "masks" / "3.png"
    save(path, pixels_of(path) // 255)
    with pytest.raises(DataError, match=r"masks/3\.png: expected masks with either 0 and 1"):
        read(whole)


def with_palette(values: Any) -> Any:
    """A mask of indices, whose palette has dark red, dark green and white."""
    mask = pillow.fromarray(values)
    mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, *[0] * 756, 255, 255, 255])
    return mask


def colored(values: Any) -> Any:
    """A mask of colors: red for 1, blue for 2, white for 255."""
    table = np.zeros((256, 3), dtype=np.uint8)
    table[1], table[2], table[255] = (255, 0, 0), (0, 0, 255), (255, 255, 255)
    return table[values]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        # One class in each mask: no mask alone shows that there are two.
        ((colored, 1), (colored, 2), r"has #0000ff, and .*0.png has #ff0000.*'#ff0000,#0000ff'"),
        ((with_palette, 1), (with_palette, 2), r"has 2, and .*0.png has 1.*--foreground 1,2;"),
        ((np.asarray, 160), (np.asarray, 255), r"has 255, and .*0.png has 160.*--foreground 160,"),
        ((colored, 1), (np.asarray, 255), r"has 255, and .*0.png has #ff0000"),
        # The same foreground in other files, and traces of JPEG.
        ((with_palette, 255), (np.asarray, 255), ""),
        ((colored, 1), (colored, 1), ""),
        ((np.asarray, 251), (np.asarray, 255), ""),
        ((np.asarray, 65535), (np.asarray, 255), ""),
    ],
)
def test_a_foreground_that_differs_between_masks_is_refused(
    first: Any, second: Any, words: str, tmp_path: Path
) -> None:
    for number in range(8):
        draw, value = (first, second)[number % 2]
        mask = np.zeros((12, 12), dtype=np.uint16 if value > 255 else np.uint8)
        mask[2:8, 3:9] = value
        save(tmp_path / "images" / f"{number}.png", gray(12, 12, seed=number))
        (tmp_path / "masks").mkdir(exist_ok=True)
        drawn = draw(mask)
        picture = drawn if draw is with_palette else pillow.fromarray(drawn)
        picture.save(tmp_path / "masks" / f"{number}.png")
    if not words:
        assert read(tmp_path).foreground == 36 * 6
        return
    words = f"(?s)masks/1.png: expected masks with one foreground value, but this one {words}"
    with pytest.raises(DataError, match=words):
        read(tmp_path)


def test_soft_edges_have_no_foreground_of_their_own(tmp_path: Path) -> None:
    for number in range(8):
        mask = np.zeros((12, 12), dtype=np.uint8)
        # Lines without an area: most of their pixels are edges of one brightness or another.
        mask[2], mask[3, :4] = np.linspace(140, 250, 12), 150 + 12 * number
        save(tmp_path / "images" / f"{number}.png", gray(12, 12, seed=number))
        save(tmp_path / "masks" / f"{number}.png", mask)
    assert read(tmp_path).foreground == 16 * 6


def test_masks_of_several_classes_need_a_rule(tmp_path: Path) -> None:
    for number in range(8):
        mask = np.zeros((12, 12), dtype=np.uint8)
        mask[1:6, 1:6], mask[6:11, 6:11], mask[6] = 1, 2, 255
        save(tmp_path / "images" / f"{number}.png", gray(12, 12, seed=number))
        save(tmp_path / "masks" / f"{number}.png", mask)
    words = r"masks/1.png: expected a mask of 0 and 1, or of 0 and 255, got 0 .*--foreground 1, and"
    with pytest.raises(DataError, match=f"(?s)8 files cannot be used.*{words}"):
        read(tmp_path)
    data = read(tmp_path, rule=MaskRule(("1", "2"), ("255",)))
    assert len(data.train) == 6
    assert (data.foreground, data.void, data.pixels) == (6 * (25 + 20), 6 * 12, 6 * (144 - 12))
    # What is void is part of the digest.
    one, other = (read(tmp_path, rule=MaskRule(("1",), (void,))) for void in ("2", "255"))
    assert one.foreground == other.foreground
    assert one.digest != other.digest
    with pytest.raises(DataError, match=r"--foreground 7: no mask .* this value; .* 0, 1, 2, 25"):
        read(tmp_path, rule=MaskRule(("7",)))
    with pytest.raises(DataError, match=r"--void #ff0000: no mask in .* has this value"):
        read(tmp_path, rule=MaskRule(("1",), ("#ff0000",)))

"""Pictures with masks: what is found, what is refused, what is counted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefold.data.masks import MaskRule
from onefold.data.pairs import MaskedPictures, read_pairs
from onefold.errors import DataError
from tests.masked import black_and_white, grey, save, save_pairs

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold[images]"')

SQUARE = (4, 4)


def read(directory: Path, **choices: Any) -> MaskedPictures:
    usual: dict[str, Any] = {"holdout": 0.25, "seed": 0, "skip_bad": False}
    return read_pairs(directory, **{**usual, **choices})


def names(data: MaskedPictures) -> tuple[list[str], list[str]]:
    return [pair.name for pair in data.train], [pair.name for pair in data.test]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Eight sound pairs in one folder."""
    save_pairs(tmp_path, [SQUARE] * 8)
    return tmp_path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Three sound pairs to train with, of different sizes, and two to test with."""
    save_pairs(tmp_path / "train", [(4, 4), (5, 3), (8, 8)])
    save_pairs(tmp_path / "test", [SQUARE] * 2, first=3)
    return tmp_path


# Layouts.


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_folders_of_their_own_are_taken_as_they_are(split: Path, test: str) -> None:
    (split / "test").rename(split / test)
    data = read(split)
    assert names(data) == (["0.png", "1.png", "2.png"], ["3.png", "4.png"])
    assert data.train[0].image == split / "train" / "images" / "0.png"
    assert data.train[0].mask == split / "train" / "masks" / "0.png"
    assert (data.shortest, data.left_out) == (3, [])


@pytest.mark.parametrize(("holdout", "count"), [(0.25, 2), (0.01, 1), (0.99, 7)])
def test_a_share_is_held_out_where_there_is_no_test_set(
    whole: Path, holdout: float, count: int
) -> None:
    train, test = names(read(whole, holdout=holdout))
    assert len(test) == count
    assert sorted(train + test) == [f"{number}.png" for number in range(8)]


def test_the_share_depends_on_the_seed_alone(whole: Path) -> None:
    drawn = [names(read(whole, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sub_folders_and_endings_may_differ(tmp_path: Path) -> None:
    for seed, folder in enumerate(("a", "b")):
        save(tmp_path / "images" / folder / "x.1.jpg", grey(4, 4, 3, seed=seed))
        save(tmp_path / "masks" / folder / "x.1.PNG", black_and_white(4, 4))
    data = read(tmp_path)
    both = {(pair.image.parent.name, pair.mask.parent.name) for pair in data.train + data.test}
    assert both == {("a", "a"), ("b", "b")}


def test_hidden_files_and_other_files_are_no_pictures(whole: Path) -> None:
    (whole / "images" / ".0.png").write_bytes(b"")
    (whole / "masks" / "notes.txt").write_text("by hand")
    assert sum(map(len, names(read(whole)))) == 8


def test_folders_may_be_links(whole: Path, tmp_path: Path) -> None:
    (linked := tmp_path / "linked").mkdir()
    for name in ("images", "masks"):
        (linked / name).symlink_to(whole / name)
    assert names(read(linked)) == names(read(whole))


@pytest.mark.parametrize("missing", ["images", "masks"])
def test_a_missing_folder_is_named(whole: Path, missing: str) -> None:
    (whole / missing).rename(whole / "other")
    with pytest.raises(DataError, match=f"{whole}: expected .* there is no {missing}"):
        read(whole)


def test_no_pictures_are_refused(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=f"{tmp_path / 'images'}: expected pictures, found none"):
        read(tmp_path)


def test_a_training_folder_alone_is_refused(split: Path) -> None:
    (split / "test").rename(split / "later")
    with pytest.raises(DataError, match="has a folder train, and none of test, val"):
        read(split)


def test_a_single_pair_cannot_be_parted(tmp_path: Path) -> None:
    save_pairs(tmp_path, [SQUARE])
    with pytest.raises(DataError, match="to train and to test with, found 1 and 0"):
        read(tmp_path)


# What cannot be used.


def other_size(folder: Path) -> dict[str, str]:
    save(folder / "masks" / "0.png", black_and_white(4, 5))
    return {"masks/0.png": f"expected a mask of 4x4 pixels, .*{folder}/images/0.png, got 5x4"}


def no_mask(folder: Path) -> dict[str, str]:
    (folder / "masks" / "0.png").unlink()
    return {"images/0.png": "there is no mask of that name in"}


def no_picture(folder: Path) -> dict[str, str]:
    (folder / "images" / "0.png").unlink()
    return {"masks/0.png": "there is no picture of that name in"}


def broken_mask(folder: Path) -> dict[str, str]:
    (folder / "masks" / "0.png").write_bytes(b"no picture")
    return {"masks/0.png": "expected a picture that can be read"}


def cut_off_picture(folder: Path) -> dict[str, str]:
    path = save(folder / "images" / "0.png", grey(64, 64, 3))
    path.write_bytes(path.read_bytes()[:2000])
    return {"images/0.png": "expected a picture that can be read"}


def picture_twice(folder: Path) -> dict[str, str]:
    save(folder / "images" / "0.jpg", grey(*SQUARE))
    return {
        "images/0.jpg": "expected one file of that name, there is 0.png as well",
        "images/0.png": "expected one file of that name, there is 0.jpg as well",
    }


def mask_twice(folder: Path) -> dict[str, str]:
    save(folder / "masks" / "0.bmp", black_and_white(*SQUARE))
    return {
        "masks/0.bmp": "expected one file of that name, there is 0.png as well",
        "masks/0.png": "expected one file of that name, there is 0.bmp as well",
    }


def numbers_of_classes(folder: Path) -> dict[str, str]:
    save(folder / "masks" / "0.png", np.full(SQUARE, 3, dtype=np.uint8))
    return {"masks/0.png": r"expected a mask of 0 and 1, or of 0 and 255, got 3 \(100.0%\): none"}


BAD = [
    other_size,
    no_mask,
    no_picture,
    broken_mask,
    cut_off_picture,
    picture_twice,
    mask_twice,
    numbers_of_classes,
]
spoilt = pytest.mark.parametrize("spoil", BAD)


@spoilt
@pytest.mark.parametrize("part", ["train", "test"])
def test_what_is_bad_is_named_and_refused(split: Path, spoil: Any, part: str) -> None:
    first = 0 if part == "train" else 3
    for folder in ("images", "masks"):
        (split / part / folder / f"{first}.png").rename(split / part / folder / "0.png")
    told = spoil(split / part)
    with pytest.raises(
        DataError, match=f"^{len(told)} of the files and lines cannot be used"
    ) as caught:
        read(split)
    for path, reason in told.items():
        assert re.search(f"{split / part / path}: {reason}", str(caught.value))
    assert "--skip-bad" in str(caught.value)


@spoilt
def test_what_is_bad_is_left_out_for_whoever_looks(whole: Path, spoil: Any) -> None:
    told = spoil(whole)
    first, second = (read(whole, skip_bad=True) for _ in range(2))
    assert first == second
    assert {str(bad.path.relative_to(whole)) for bad in first.left_out} == set(told)
    train, test = names(first)
    assert sorted(train + test) == [f"{number}.png" for number in range(1, 8)]


def test_all_that_is_bad_is_told_at_once(whole: Path) -> None:
    (whole / "masks" / "0.png").unlink()
    (whole / "masks" / "1.png").write_bytes(b"")
    (whole / "images" / "2.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"^3 of the files and lines cannot") as caught:
        read(whole)
    for path in ("images/0.png", "masks/1.png", "images/2.png"):
        assert f"{whole / path}: " in str(caught.value)


def test_nothing_sound_is_refused_even_where_bad_ones_are_left_out(whole: Path) -> None:
    for path in (whole / "masks").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="to train and to test with, found 0 and 0"):
        read(whole, skip_bad=True)


def test_black_masks_to_test_with_are_refused(split: Path) -> None:
    for number in (3, 4):
        save(split / "test" / "masks" / f"{number}.png", np.zeros(SQUARE, dtype=np.uint8))
    with pytest.raises(DataError, match="none of the 2 to test with has a foreground pixel"):
        read(split)


# Counts.


def test_pixels_are_counted_in_the_training_masks_alone(split: Path) -> None:
    data = read(split)
    masks = [np.asarray(pillow.open(pair.mask)) for pair in data.train]
    assert data.pixels == 4 * 4 + 5 * 3 + 8 * 8
    assert data.foreground == sum(int((mask == 255).sum()) for mask in masks)
    images = np.concatenate([np.asarray(pillow.open(p.image)).ravel() for p in data.train])
    assert data.sums.count == data.pixels
    assert data.sums.totals == [int(images.sum(dtype=np.int64))] * 3


def test_what_is_left_out_is_not_counted(split: Path) -> None:
    save(split / "train" / "masks" / "0.png", black_and_white(9, 9))
    save(split / "train" / "masks" / "1.png", np.zeros((5, 3), dtype=np.uint8))
    data = read(split, skip_bad=True)
    assert data.pixels == 5 * 3 + 8 * 8
    assert data.foreground == int((np.asarray(pillow.open(data.train[1].mask)) == 255).sum())


def test_other_data_have_another_digest(tmp_path: Path) -> None:
    save_pairs(tmp_path / "a", [SQUARE] * 8)
    first = read(tmp_path / "a").digest
    assert read(tmp_path / "a").digest == first
    assert read(tmp_path / "a", seed=1).digest != first
    (tmp_path / "a" / "images" / "0.png").rename(tmp_path / "a" / "images" / "x.png")
    (tmp_path / "a" / "masks" / "0.png").rename(tmp_path / "a" / "masks" / "x.png")
    assert read(tmp_path / "a").digest != first


# Masks of more than two values.


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Eight pictures whose masks have a class 1, a class 2 and a border of 255."""
    for number in range(8):
        mask = np.zeros((12, 12), dtype=np.uint8)
        mask[1:6, 1:6], mask[6:11, 6:11], mask[6] = 1, 2, 255
        save(tmp_path / "images" / f"{number}.png", grey(12, 12, seed=number))
        save(tmp_path / "masks" / f"{number}.png", mask)
    return tmp_path


def test_masks_of_several_classes_are_refused_with_what_to_do(classes: Path) -> None:
    with pytest.raises(DataError, match="8 of the files and lines cannot be used") as caught:
        read(classes)
    assert (
        f"{classes}/masks/1.png: expected a mask of 0 and 1, or of 0 and 255, got 0 (60.4%), "
        f"1 (17.4%), 2 (13.9%), 255 (8.3%): more than two of them cover areas, as numbers of "
        f"classes do. Name the foreground, such as --foreground 1, and with --void what counts as "
        f"neither"
    ) in str(caught.value)


def test_a_rule_says_what_is_foreground_and_what_is_left_out(classes: Path) -> None:
    data = read(classes, rule=MaskRule(("1", "2"), ("255",)))
    assert len(data.train) == 6
    assert (data.foreground, data.void) == (6 * (25 + 20), 6 * 12)
    assert data.pixels == 6 * (144 - 12)


def test_what_is_void_is_part_of_the_digest(classes: Path) -> None:
    one, other = (read(classes, rule=MaskRule(("1",), (void,))) for void in ("2", "255"))
    assert one.foreground == other.foreground
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (MaskRule(("7",)), "--foreground 7: expected a value of the masks, none .* 0, 1, 2, 255"),
        (MaskRule(("1",), ("#ff0000",)), "--void #ff0000: expected a value of the masks, none in"),
    ],
)
def test_a_value_that_no_mask_has_is_refused(classes: Path, rule: MaskRule, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(classes, rule=rule)


def test_masks_of_1_among_masks_of_255_are_refused(tmp_path: Path) -> None:
    save_pairs(tmp_path, [SQUARE] * 8)
    path = tmp_path / "masks" / "3.png"
    save(path, np.asarray(pillow.open(path)) // 255)
    with pytest.raises(DataError, match=r"masks/3\.png: expected masks that are all of 0 and 1"):
        read(tmp_path)
    assert read(tmp_path, rule=MaskRule(("1", "255"))).foreground > 0


def test_test_pictures_that_were_trained_with_are_refused(split: Path) -> None:
    for kind in ("images", "masks"):
        for number in (3, 4):
            source = split / "train" / kind / f"{number - 3}.png"
            save(split / "test" / kind / f"{number}.png", np.asarray(pillow.open(source)))
    with pytest.raises(DataError, match="2 of 2 test samples are in the training set as well"):
        read(split)


def test_pictures_of_more_than_8_bits_have_one_white(tmp_path: Path) -> None:
    save_pairs(tmp_path, [SQUARE] * 8)
    for number in range(8):
        values = np.random.default_rng(number).integers(0, 300 + 400 * number, SQUARE)
        save(tmp_path / "images" / f"{number}.png", values.astype(np.uint16))
    data = read(tmp_path)
    assert data.white == 4095
    assert "4095 is used as white" in data.notes[0]

"""Pictures with masks: what is found, what is refused, what is counted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefold.data.pairs import MaskedPictures, mask_tensor, read_mask, read_pairs
from onefold.errors import DataError
from tests.masked import black_and_white, grey, save, save_pairs

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold[images]"')

SQUARE = (4, 4)
MEANT = np.array([[0, 1, 1], [0, 0, 1]], dtype=np.uint8)


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
    for folder in ("a", "b"):
        save(tmp_path / "images" / folder / "x.1.jpg", grey(4, 4, 3))
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
    return {"masks/0.png": "expected a mask of 0 and 1, or of 0 and 255, the brightest pixel .* 3"}


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
    with pytest.raises(DataError, match="none of the 2 to test with has a pixel that is meant"):
        read(split)


# Kinds of mask.


def palette(*colours: tuple[int, int, int]) -> Any:
    """A picture whose pixels are the numbers of colours."""
    picture = pillow.new("P", (3, 2))
    picture.putdata(MEANT.flatten().tolist())
    picture.putpalette([value for colour in colours for value in colour])
    return picture


BLACK = (0, 0, 0)
KINDS = {
    "0 and 1": MEANT,
    "0 and 255": MEANT * 255,
    "just above half": MEANT * 128,
    "grey outside": np.where(MEANT > 0, 255, 127).astype(np.uint8),
    "0 and 1, 16 bits": MEANT.astype(np.uint16),
    "0 and 255, 16 bits": (MEANT * 255).astype(np.uint16),
    "0 and 65535, 16 bits": MEANT.astype(np.uint16) * 65535,
    "bits": MEANT.astype(bool),
    "white on black": np.stack([MEANT * 255] * 3, axis=2),
    "red on black": np.stack([MEANT * 255, MEANT * 0, MEANT * 0], axis=2),
    "blue on black": np.stack([MEANT * 0, MEANT * 0, MEANT * 255], axis=2),
    "1 in RGB": np.stack([MEANT] * 3, axis=2),
    "opaque": np.stack([MEANT * 255] * 3 + [np.full_like(MEANT, 255)], axis=2),
    "grey, opaque": np.stack([MEANT * 255, np.full_like(MEANT, 255)], axis=2),
    "palette of black and white": palette(BLACK, (255, 255, 255)),
    "palette of VOC": palette(BLACK, (128, 0, 0)),
    "palette the other way round": palette((255, 255, 255), BLACK),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask_means_the_same(tmp_path: Path, kind: str) -> None:
    pixels = KINDS[kind]
    picture = pixels if isinstance(pixels, pillow.Image) else pillow.fromarray(pixels)
    picture.save(tmp_path / "mask.png")
    mask = read_mask(tmp_path / "mask.png")
    expected = 1 - MEANT if kind.endswith("the other way round") else MEANT
    assert mask.mode == "L"
    assert np.array_equal(np.asarray(mask), expected * 255)
    assert mask_tensor(mask).tolist() == expected.astype(float).tolist()


@pytest.mark.parametrize("value", [0, 1, 255])
def test_a_mask_may_be_of_one_value(tmp_path: Path, value: int) -> None:
    path = save(tmp_path / "mask.png", np.full((2, 3), value, dtype=np.uint8))
    assert np.asarray(read_mask(path)).tolist() == [[255 if value else 0] * 3] * 2


@pytest.mark.parametrize("colours", [(), (3,)])
def test_the_noise_of_jpeg_does_not_count(tmp_path: Path, colours: tuple[int, ...]) -> None:
    meant = np.zeros((32, 32, *colours), dtype=np.uint8)
    meant[8:24, 5:21] = 255
    path = save(tmp_path / "mask.jpg", meant, quality=60)
    assert len(np.unique(np.asarray(pillow.open(path)))) > 2
    mask = np.asarray(read_mask(path))
    assert np.array_equal(mask, meant.reshape(32, 32, -1)[..., 0])


@pytest.mark.parametrize("brightest", [2, 127])
def test_a_mask_without_a_bright_pixel_is_refused(tmp_path: Path, brightest: int) -> None:
    path = save(tmp_path / "mask.png", np.array([[0, brightest]], dtype=np.uint8))
    with pytest.raises(DataError, match=f"{path}: expected a mask of 0 and 1.* has {brightest}$"):
        read_mask(path)


# Counts.


def test_pixels_are_counted_in_the_training_masks_alone(split: Path) -> None:
    data = read(split)
    masks = [np.asarray(pillow.open(pair.mask)) for pair in data.train]
    assert data.pixels == 4 * 4 + 5 * 3 + 8 * 8
    assert data.meant == sum(int((mask == 255).sum()) for mask in masks)
    images = np.concatenate([np.asarray(pillow.open(p.image)).ravel() for p in data.train])
    assert data.sums.count == data.pixels
    assert data.sums.totals == [int(images.sum(dtype=np.int64))] * 3


def test_what_is_left_out_is_not_counted(split: Path) -> None:
    save(split / "train" / "masks" / "0.png", black_and_white(9, 9))
    save(split / "train" / "masks" / "1.png", np.zeros((5, 3), dtype=np.uint8))
    data = read(split, skip_bad=True)
    assert data.pixels == 5 * 3 + 8 * 8
    assert data.meant == int((np.asarray(pillow.open(data.train[1].mask)) == 255).sum())


@pytest.mark.parametrize("void", [200, 255])
def test_a_mask_of_two_meanings_is_refused(tmp_path: Path, void: int) -> None:
    path = save(tmp_path / "mask.png", np.array([[0, 1], [void, 0]], dtype=np.uint8))
    with pytest.raises(DataError, match=f"this one has 1 and {void}, so that nobody knows"):
        read_mask(path)


def test_other_data_have_another_digest(tmp_path: Path) -> None:
    save_pairs(tmp_path / "a", [SQUARE] * 8)
    first = read(tmp_path / "a").digest
    assert read(tmp_path / "a").digest == first
    assert read(tmp_path / "a", seed=1).digest != first
    (tmp_path / "a" / "images" / "0.png").rename(tmp_path / "a" / "images" / "x.png")
    (tmp_path / "a" / "masks" / "0.png").rename(tmp_path / "a" / "masks" / "x.png")
    assert read(tmp_path / "a").digest != first

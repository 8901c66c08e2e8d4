"""The white of pictures with more than 8 bits a pixel: what decides it, and what is too dark."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onefold.errors import DataError
from onefold_jobs.data.classes import PictureClasses, read_classes
from onefold_jobs.data.pairs import MaskedPictures, read_pairs
from onefold_jobs.data.pictures import look_at, open_picture
from onefold_jobs.data.scan import Scanning, read_scan
from tests.masked import black_and_white, save
from tests.tables import for_each

LAYOUTS = ("classes", "masks")
HOT = 65535


def plate(number: int, side: int = 40, *, hot: int = 0) -> Any:
    """16 bits a pixel and values to 250, but for the hot ones."""
    pixels = np.random.default_rng(number).integers(0, 251, (side, side)).astype(np.uint16)
    pixels.flat[:hot] = HOT
    return pixels


def write(root: Path, layout: str, train: Any = plate, test: Any = plate) -> list[Path]:
    """Three training and two test pictures of each class, or twice as many with masks."""
    paths = []
    for number in range(10):
        part = "test" if number % 5 > 2 else "train"
        pixels = (test if part == "test" else train)(number)
        if layout == "classes":
            path = root / part / ("few", "many")[number // 5] / f"{number}.tiff"
        else:
            path = root / part / "images" / f"{number}.tiff"
            save(root / part / "masks" / f"{number}.png", black_and_white(*pixels.shape))
        paths.append(save(path, pixels))
    return paths


def read(
    root: Path, layout: str, *, known: Any = None, skip_bad: bool = False
) -> PictureClasses | MaskedPictures:
    how: dict[str, Any] = {
        "holdout": 0.2,
        "seed": 0,
        "skip_bad": skip_bad,
        "scanning": Scanning(known=known or {}),
    }
    return read_classes(root, **how) if layout == "classes" else read_pairs(root, **how)


@for_each("layout", LAYOUTS)
def test_hot_pixels_do_not_decide_white(layout: str, tmp_path: Path) -> None:
    write(tmp_path / "plain", layout)
    write(tmp_path / "hot", layout, train=lambda n: plate(n, hot=1), test=lambda n: plate(n, hot=9))
    for path in list((tmp_path / "hot").rglob("*.tiff"))[:2]:
        first = Image.fromarray(np.asarray(Image.open(path)))
        first.save(path, save_all=True, append_images=[first])
    plain, hot = read(tmp_path / "plain", layout), read(tmp_path / "hot", layout)
    assert plain.white == hot.white == 255
    for one, other in zip(plain.sums.mean_and_std(), hot.sums.mean_and_std(), strict=True):
        assert one == pytest.approx(other, abs=0.002)
    assert (
        "pictures of more than 8 bits a pixel, 6 of 6 to train with, share one white, 255: 99.9% "
        "of each one's values are at most 250, and brighter values than white become white"
    ) in hot.notes
    assert "2 pictures with several pages or frames: only the first is used" in hot.notes
    # Two in 1,600 are more than one in 1,000, and of 400 pixels none may be left out.
    for number, two in enumerate((lambda n: plate(n, hot=2), lambda n: plate(n, side=20, hot=1))):
        write(tmp_path / f"{number}", layout, train=two, test=two)
        assert read(tmp_path / f"{number}", layout).white == HOT


@for_each("layout", LAYOUTS)
def test_what_was_seen_holds_for_the_white_that_was_found(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of other whites than the common one are read a second time, and then never again."""
    write(tmp_path / "data", layout, train=lambda n: plate(n) * (1 + 15 * (n == 0)))
    first = read(tmp_path / "data", layout)
    assert first.white == 4095
    (tmp_path / "scan.json").write_text(first.scan)
    known = read_scan(tmp_path / "scan.json")
    for module in ("scan", "pairs"):
        name = f"onefold_jobs.data.{module}.look_at"
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("read"))
    again = read(tmp_path / "data", layout, known=known)
    assert (again.white, again.sums, again.scan) == (first.white, first.sums, first.scan)
    # In format 3 a picture was remembered by its brightest pixel.
    (tmp_path / "scan.json").write_text(first.scan.replace('"format": 4', '"format": 3'))
    assert read_scan(tmp_path / "scan.json") == {}


@for_each("layout", LAYOUTS)
@for_each("part", ["train", "test"])
def test_what_would_be_black_is_refused(layout: str, part: str, tmp_path: Path) -> None:
    def twelve_bits(number: int) -> Any:
        return plate(number) * 16

    def with_dark(number: int) -> Any:
        """One of them has values to 0.9."""
        dark = number == {"train": 5, "test": 3}[part]
        return (plate(number) / 250 * 0.9).astype(np.float32) if dark else twelve_bits(number)

    pixels: Any = {"train": twelve_bits, "test": twelve_bits, part: with_dark}
    write(tmp_path, layout, **pixels)
    words = r"\.tiff: values of 0 to 0\.9 would all become black, as white is 4095: .* of 16\.1 or"
    with pytest.raises(DataError, match=words):
        read(tmp_path, layout)
    data = read(tmp_path, layout, skip_bad=True)
    assert (data.white, len(data.left_out)) == (4095, 1)


def test_pictures_of_one_value_may_be_black(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tiff", np.full((4, 4), 3, dtype=np.uint16))
    assert open_picture(path, white=4095).getextrema() == (0, 0)
    assert look_at(path, 4095).sums.totals == [0]
    save(path, np.array([[3, 4]], dtype=np.uint16))
    # Without a white of their own, those of 16 bits have 65535.
    for white, named in ((4095, "4095"), (None, "65535")):
        with pytest.raises(DataError, match=rf"a\.tiff: values of 3 to 4 .* as white is {named}: "):
            open_picture(path, white=white)

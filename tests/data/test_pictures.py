from __future__ import annotations

import logging
import os
import pickle
import random
import re
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers
from PIL import Image

from onefold.data import pictures
from onefold.data.decoding import is_picture, open_picture, require_pillow
from onefold.data.pictures import ArrayPictures, PictureFiles, Sums, sum_looks
from onefold.data.scan import scan_pictures
from onefold.errors import DataError, LaunchError
from tests.data.pictures import WAYS_TO_BE_BAD, noise, write_cut_jpeg, write_page
from tests.tables import for_each

SIZE = (12, 10)
NO_EXIF = [
    b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
    b"Exif\0\0II*\0\xff\xff\xff\xff",
    b"Exif\0\0rubbish",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "picture.png"


def truth(arrays: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of all pixels by channel, in float64."""
    flat = [torch.tensor(array).reshape(-1, array.shape[-1]) for array in arrays]
    pixels = torch.cat(flat).to(torch.float64) / 255
    return pixels.mean(dim=0), pixels.std(dim=0, correction=0)


def assert_true(sums: Sums, arrays: list[np.ndarray]) -> None:
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in sums.mean_and_std())
    expected_mean, expected_std = truth(arrays)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-13)
    torch.testing.assert_close(std, expected_std.clamp_min(1 / 255), rtol=0, atol=1e-13)


@for_each(
    ("name", "expected"),
    [
        ("a.jpg", True),
        ("a.JPG", True),
        ("a.Jpeg", True),
        ("a.b.webp", True),
        ("猫 1.png", True),
        ("a.heic", True),
        (".DS_Store", False),
        ("._a.jpg", False),
        (".jpg", False),
        ("Thumbs.db", False),
        ("a.jpg.txt", False),
        ("jpg", False),
    ],
)
def test_a_picture_is_known_by_its_name(name: str, expected: bool) -> None:
    assert is_picture(Path("folder") / name) is expected


@for_each(
    ("mode", "suffix", "expected"),
    [
        ("L", "png", "L"),
        ("LA", "png", "L"),
        ("1", "png", "L"),
        ("L", "jpg", "L"),
        ("RGB", "jpg", "RGB"),
        ("RGB", "webp", "RGB"),
        ("RGBA", "png", "RGB"),
        ("P", "png", "RGB"),
        ("P", "gif", "RGB"),
        ("CMYK", "jpg", "RGB"),
        ("YCbCr", "tiff", "RGB"),
        ("F", "tiff", "L"),
        ("I", "tiff", "L"),
    ],
)
def test_a_picture_is_grey_or_in_colours(
    tmp_path: Path, mode: str, suffix: str, expected: str
) -> None:
    path = tmp_path / f"picture.{suffix}"
    noise(SIZE, mode).save(path)
    picture = open_picture(path)
    assert (picture.mode, picture.size) == (expected, SIZE)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_pixels_are_those_that_were_written(file: Path, mode: str) -> None:
    noise(SIZE, mode).save(file)
    assert open_picture(file).tobytes() == noise(SIZE, mode).tobytes()


@pytest.mark.parametrize("transparency", [3, bytes(range(16))])
def test_a_palette_with_transparency_has_the_colours_of_the_palette(
    file: Path, transparency: object
) -> None:
    picture = noise(SIZE).quantize(16)
    picture.save(file, transparency=transparency)
    assert open_picture(file).tobytes() == picture.convert("RGB").tobytes()


def test_a_jpeg_for_printers_has_about_the_colours_it_was_made_of(tmp_path: Path) -> None:
    Image.new("RGB", SIZE, (250, 10, 120)).convert("CMYK").save(tmp_path / "a.jpg")
    colours = np.asarray(open_picture(tmp_path / "a.jpg")).reshape(-1, 3).mean(axis=0)
    assert np.abs(colours - (250, 10, 120)).max() < 6


@for_each("suffix", ["gif", "webp", "png"])
def test_of_a_film_the_first_picture_is_taken(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"film.{suffix}"
    frames = [Image.new("RGB", SIZE, colour) for colour in ("white", "black")]
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
    assert set(open_picture(path).tobytes()) == {255}


@for_each("orientation", range(1, 9))
@for_each("suffix", ["png", "tiff", "webp"])
def test_a_picture_is_turned_as_its_note_says(
    tmp_path: Path, orientation: int, suffix: str
) -> None:
    path, exif = tmp_path / f"a.{suffix}", Image.Exif()
    exif[0x0112] = orientation
    noise(SIZE).save(path, exif=exif, lossless=True)
    turned = np.asarray(noise(SIZE))
    turned = np.rot90(turned, {3: 2, 4: 2, 6: 3, 7: 3, 8: 1, 5: 1}.get(orientation, 0))
    if orientation in (2, 4):
        turned = turned[:, ::-1]
    elif orientation in (5, 7):
        turned = turned[::-1]
    np.testing.assert_array_equal(np.asarray(open_picture(path)), turned)


def test_a_photograph_taken_upright_is_upright_for_all(tmp_path: Path) -> None:
    path, exif = tmp_path / "a.jpg", Image.Exif()
    exif[0x0112] = 6
    noise((40, 30)).save(path, exif=exif)
    assert open_picture(path).size == scan_pictures([path]).looks[0].size == (30, 40)


@for_each("exif", NO_EXIF)
def test_a_damaged_note_does_no_harm_to_a_picture(tmp_path: Path, exif: bytes) -> None:
    path = tmp_path / "a.jpg"
    noise(SIZE).save(path, exif=exif)
    assert open_picture(path).size == SIZE
    assert scan_pictures([path] * 40).sound == list(range(40))


def test_reading_leaves_the_callers_warnings_alone(tmp_path: Path) -> None:
    noise(SIZE).save(tmp_path / "a.jpg", exif=NO_EXIF[0])
    before = list(warnings.filters)
    open_picture(tmp_path / "a.jpg")
    scan_pictures([tmp_path / "a.jpg"] * 40)
    assert list(warnings.filters) == before


def test_a_large_picture_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(SIZE).save(file)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIZE[0] * SIZE[1] - 1)
    assert open_picture(file).size == SIZE


def test_a_picture_too_large_for_pillow_is_bad(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(SIZE).save(file)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIZE[0] * SIZE[1] // 2 - 1)
    with pytest.raises(DataError, match=r"picture\.png: .*120 pixels\) exceeds limit"):
        open_picture(file)


@for_each(
    ("values", "kind", "suffix", "expected"),
    [
        ([0, 257, 65535], np.uint16, "png", [0, 1, 255]),
        ([0, 200, 255], np.uint16, "png", [0, 0, 0]),
        ([0, 257, 65535], np.int32, "tiff", [0, 1, 255]),
        ([0, 200, 255], np.int32, "tiff", [0, 200, 255]),
        ([-5, 7, 2**20], np.int32, "tiff", [0, 0, 255]),
        ([0, 0.5, 1], np.float32, "tiff", [0, 127, 255]),
        ([0, 100.2, 255], np.float32, "tiff", [0, 100, 255]),
        ([0, 1285, 65535], np.float32, "tiff", [0, 5, 255]),
        ([np.nan, np.inf, 1], np.float32, "tiff", [0, 0, 255]),
        ([np.nan] * 3, np.float32, "tiff", [0, 0, 0]),
    ],
)
def test_more_than_a_byte_for_a_pixel_becomes_a_byte(
    tmp_path: Path, values: list[float], kind: type, suffix: str, expected: list[int]
) -> None:
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(np.array([values], dtype=kind)).save(path)
    picture = open_picture(path)
    assert picture.mode == "L"
    assert list(picture.tobytes()) == expected


@for_each("way", WAYS_TO_BE_BAD)
def test_what_cannot_be_read_is_named_and_told(tmp_path: Path, way: str) -> None:
    write, reason = WAYS_TO_BE_BAD[way]
    path = tmp_path / "bad.jpg"
    write(path)
    words = re.escape(f"{path}: expected a picture that can be read: {reason}")
    with pytest.raises(DataError, match=f"^{words}") as caught:
        open_picture(path)
    (bad,) = scan_pictures([path]).bad
    assert str(bad) == str(caught.value)


def test_a_file_that_goes_while_it_is_read_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Image.open

    def gone(*given: Any, **options: Any) -> Any:
        file.unlink()
        return real(*given, **options)

    write_page(file)
    monkeypatch.setattr(Image, "open", gone)
    with pytest.raises(DataError, match=r"picture\.png: .* no known format that begins with b'<!"):
        open_picture(file)


def test_a_folder_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can be read: expected a file, got a folder"):
        open_picture(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_picture_that_may_not_be_read_is_bad(file: Path) -> None:
    noise(SIZE).save(file)
    file.chmod(0)
    with pytest.raises(DataError, match=r"picture\.png: .*Permission denied"):
        open_picture(file)


def test_a_bad_file_whose_name_is_not_utf_8_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jpg")
    write_page(path)
    with pytest.raises(DataError, match=r"caf\\xe9\.jpg: expected a picture"):
        open_picture(path)
    assert "caf\\xe9.jpg: expected" in str(scan_pictures([path]).bad[0])


def test_want_of_memory_is_not_laid_on_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    noise(SIZE).save(file)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(MemoryError):
        open_picture(file)


@for_each("suffix", ["bmp", "gif", "jpg", "pgm", "png", "tiff", "webp"])
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, exif = tmp_path / f"a.{suffix}", Image.Exif()
    caplog.set_level(logging.CRITICAL, "PIL")
    exif[0x0112] = 6
    noise(SIZE, "L" if suffix == "pgm" else "RGB").save(path, exif=exif)
    sound, draw = path.read_bytes(), random.Random(suffix)
    refused = 0
    for _ in range(60):
        content = bytearray(sound)
        for _ in range(4):
            content[draw.randrange(min(len(content), 150))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            assert open_picture(path).mode in ("L", "RGB")
        except DataError:
            refused += 1
    assert refused > 0


@given(
    arrays=st.lists(
        numbers.arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(3))),
        min_size=1,
        max_size=5,
    ),
    order=st.randoms(use_true_random=False),
)
def test_mean_and_deviation_are_those_of_all_pixels_in_any_order(
    arrays: list[np.ndarray], order: random.Random
) -> None:
    def sums_of(parts: list[np.ndarray]) -> Sums:
        whole = Sums()
        for part in parts:
            one = Sums()
            one.add(part)
            whole.join(one)
        return whole

    sums = sums_of(arrays)
    assert_true(sums, arrays)
    shuffled = order.sample(arrays, len(arrays))
    assert sums_of(shuffled) == sums
    assert sums_of(shuffled).mean_and_std() == sums.mean_and_std()


def test_a_small_deviation_of_bright_pixels_is_not_lost() -> None:
    levels = np.full((1000, 1000, 1), 254, dtype=np.uint8)
    levels[::2] = 252
    sums = Sums()
    for _ in range(50):
        sums.add(levels)
    assert sums.mean_and_std() == ((253 / 255,), (1 / 255,))


def test_many_pixels_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.asarray(noise((31, 17)))
    whole, parts = Sums(), Sums()
    whole.add(pixels)
    monkeypatch.setattr(pictures, "_PIXELS_AT_ONCE", 10)
    parts.add(pixels)
    assert parts == whole
    assert_true(parts, [pixels])


def test_pictures_of_one_colour_do_not_divide_by_nothing() -> None:
    sums = Sums()
    sums.add(np.full((3, 2, 1), 51, dtype=np.uint8))
    assert sums.mean_and_std() == ((0.2,), (1 / 255,))


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """Forty files: grey, colours, and three that are bad."""
    paths = [tmp_path / f"{number:02}.png" for number in range(40)]
    for number, path in enumerate(paths):
        mode = "L" if number % 3 == 0 else "RGB"
        noise((4 + number % 5, 3 + number % 7), mode, seed=number).save(path)
    for number in (0, 17, 39):
        write_cut_jpeg(paths[number])
    return paths


def test_a_look_through_says_what_is_sound_and_what_is_bad(mixed: list[Path]) -> None:
    facts = scan_pictures(mixed)
    assert facts.sound == [n for n in range(40) if n not in (0, 17, 39)]
    assert [bad.path for bad in facts.bad] == [mixed[n] for n in (0, 17, 39)]
    assert [look.size for look in facts.looks] == [(4 + n % 5, 3 + n % 7) for n in facts.sound]
    assert [look.grey for look in facts.looks] == [n % 3 == 0 for n in facts.sound]
    assert not facts.grey


def test_every_look_through_finds_the_same(mixed: list[Path]) -> None:
    assert scan_pictures(mixed) == scan_pictures(mixed)
    backwards = scan_pictures(mixed[::-1])
    forwards = scan_pictures(mixed)
    assert backwards.bad == forwards.bad[::-1]
    assert backwards.looks == forwards.looks[::-1]


def test_grey_pictures_among_coloured_ones_count_in_all_channels(mixed: list[Path]) -> None:
    facts = scan_pictures(mixed)
    arrays = [np.asarray(open_picture(mixed[n]).convert("RGB")) for n in facts.sound]
    assert_true(sum_looks(facts.looks, grey=False), arrays)


def test_grey_pictures_alone_have_one_channel(mixed: list[Path]) -> None:
    facts = scan_pictures(mixed[3:36:3])
    arrays = [np.asarray(open_picture(path))[..., None] for path in mixed[3:36:3]]
    assert facts.grey
    assert_true(sum_looks(facts.looks, grey=True), arrays)


def test_a_look_through_nothing_finds_nothing() -> None:
    facts = scan_pictures([])
    assert (facts.sound, facts.bad, facts.looks, facts.grey) == ([], [], [], False)


def test_little_is_kept_of_a_file(file: Path) -> None:
    noise((100, 100)).save(file, compress_level=1)
    paths = [file] * 400
    scan_pictures(paths[:1])
    tracemalloc.start()
    try:
        facts = scan_pictures(paths)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(facts.sound) == 400
    assert kept / 400 < 1500
    assert most < 4 * 2_000_000  # what four pictures take while they are counted


def test_files_are_named_from_the_root(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    names = ["cat/ñ 1.png", "dog.png", os.fsdecode(b"caf\xe9.png")]
    for number, name in enumerate(names):
        noise(SIZE, seed=number).save(tmp_path / name)
    files = PictureFiles([tmp_path / name for name in names], tmp_path)
    assert len(files) == 3
    assert [files.name(i) for i in range(3)] == ["cat/ñ 1.png", "dog.png", "caf\\xe9.png"]
    copy = pickle.loads(pickle.dumps(files))
    assert [copy[i].tobytes() for i in range(3)] == [
        noise(SIZE, seed=number).tobytes() for number in range(3)
    ]


def test_a_file_that_goes_bad_later_is_named(file: Path) -> None:
    noise(SIZE).save(file)
    files = PictureFiles([file], file.parent)
    write_page(file)
    with pytest.raises(DataError, match=r"picture\.png: expected a picture that can be read"):
        files[0]


def test_pictures_in_memory_are_grey_and_numbered() -> None:
    pixels = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    source = ArrayPictures(pixels, "test picture")
    copy = pickle.loads(pickle.dumps(source))
    assert (len(copy), copy.name(1)) == (2, "test picture 1")
    assert (copy[1].mode, copy[1].size) == ("L", (4, 3))
    assert list(copy[1].tobytes()) == list(range(12, 24))


@for_each("change", [lambda p: p.convert("L"), lambda p: p.crop((0, 0, 4, 3))])
def test_changing_a_picture_leaves_the_memory_alone(
    change: Callable[[Image.Image], Image.Image],
) -> None:
    source = ArrayPictures(torch.zeros(1, 3, 4, dtype=torch.uint8), "picture")
    change(source[0]).paste(9, (0, 0, 4, 3))
    assert source.pixels.sum() == 0


def test_without_pillow_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_pillow()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r'pip install "onefold\[images\]"'):
        require_pillow()

"""Pictures as they are decoded, and what is counted of their pixels."""

import itertools
import logging
import os
import pickle
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from onefold.errors import DataError
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.masks import MaskRule, read_mask
from onefold_jobs.data.pictures import (
    ArrayPictures,
    PictureFiles,
    Sums,
    in_bytes,
    is_picture,
    load_picture,
    look_at,
    open_picture,
    picture_paths,
    sum_looks,
)
from onefold_jobs.data.scan import Seen, notes_of, scan_pictures
from tests.jobs.data.pictures import WAYS_TO_BE_BAD, noise, write_cut_jpeg, write_page
from tests.tables import for_each

SIZE = (12, 10)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "picture.png"


def assert_true(sums: Sums, arrays: list[np.ndarray]) -> None:
    """Mean and standard deviation are those of all pixels by channel."""
    flat = [torch.tensor(array).reshape(-1, array.shape[-1]) for array in arrays]
    pixels = torch.cat(flat).to(torch.float64) / 255
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in sums.mean_and_std())
    torch.testing.assert_close(mean, pixels.mean(dim=0), rtol=0, atol=1e-13)
    expected = pixels.std(dim=0, correction=0).clamp_min(1 / 255)
    torch.testing.assert_close(std, expected, rtol=0, atol=1e-13)


def test_a_picture_is_known_by_its_name() -> None:
    pictures = ["a.jpg", "a.JPG", "a.Jpeg", "a.b.webp", "猫 1.png", "a.heic"]
    others = [".DS_Store", "._a.jpg", ".jpg", "Thumbs.db", "a.jpg.txt", "jpg"]
    assert [name for name in pictures + others if is_picture(Path("x") / name)] == pictures


@for_each(
    ("mode", "suffixes", "expected"),
    [
        *((mode, ["png"], "L") for mode in ("L", "LA", "1")),
        *((mode, ["tiff"], "L") for mode in ("F", "I")),
        ("L", ["jpg", "pgm"], "L"),
        ("RGB", ["jpg", "webp", "gif", "bmp", "tiff", "ppm", "png"], "RGB"),
        *(("RGBA", ["png"], "RGB"), ("P", ["png", "gif"], "RGB"), ("YCbCr", ["tiff"], "RGB")),
    ],
)
def test_pixels_are_pillows(tmp_path: Path, mode: str, suffixes: list[str], expected: str) -> None:
    for suffix in suffixes:
        path = tmp_path / f"picture.{suffix}"
        # Compressed, where there is a choice: some releases of Pillow cannot read their own YCbCr.
        noise(SIZE, mode).save(path, compression="tiff_lzw")
        picture = open_picture(path)
        assert (picture.mode, picture.size) == (expected, SIZE)
        if mode not in ("F", "I"):
            with Image.open(path) as plain:
                assert picture.tobytes() == plain.convert(expected).tobytes()


def hide(mode: str, hidden: int) -> tuple[Image.Image, dict[str, object]]:
    """A picture whose left half is transparent above a color; and how it is to be saved."""
    picture, left = Image.new(mode.removesuffix("A"), SIZE, 9), (0, 0, 6, 10)
    color: int | tuple[int, ...] = (hidden, 3, 3) if mode.startswith("RGB") else hidden
    if mode == "P":  # entry 7 of the palette is transparent, whatever its color
        picture.putpalette([0, 0, 0] * 7 + [hidden, 3, 3, 4, 4, 4, 9, 9, 9])
        picture.paste(7, left)
        return picture, {"transparency": 7}
    picture.paste(color, left)
    if not mode.endswith("A"):  # pixels of this color are
        return picture, {"transparency": color}
    alpha = Image.new("L", SIZE, 255)
    alpha.paste(0, left)
    picture.putalpha(alpha)
    return picture, {}


@for_each(
    ("mode", "suffix"),
    [
        *(("RGBA", each) for each in ("png", "webp", "gif", "tiff")),
        *(("LA", "png"), ("LA", "tiff"), ("P", "png"), ("P", "gif"), ("L", "png"), ("RGB", "png")),
    ],
)
def test_what_is_transparent_lies_on_white(mode: str, suffix: str, tmp_path: Path) -> None:
    """Pictures that look alike are alike, whatever colors their transparent pixels have."""
    for hidden in (40, 200):
        path, (picture, how) = tmp_path / f"a.{suffix}", hide(mode, hidden)
        picture.save(path, **({"lossless": True, "exact": True} if suffix == "webp" else how))
        seen = np.asarray(open_picture(path).convert("RGB"))
        assert seen[:, :6].min() == 255
        assert tuple(seen[0, -1]) == ((9, 0, 0) if mode.startswith("RGB") else (9, 9, 9))
        in_program = in_bytes(load_picture(path), path, None)
        assert np.array_equal(np.asarray(in_program.convert("RGB")), seen)
        (found,) = scan_pictures([path])
        assert isinstance(found, Seen)
        assert found.look.sums.totals[0] == 60 * 255 + 60 * 9
        # Of a mask the values count, as they are stored.
        if mode == "P" and suffix == "png":
            mask = read_mask(path, MaskRule(("7",)))
            assert np.array_equal(np.asarray(mask)[0], [255] * 6 + [0] * 6)


def test_pictures_without_transparency_are_put_on_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "alpha_composite", lambda *_: pytest.fail("composited"))
    for mode in ("1", "L", "P", "RGB", "I;16"):
        picture = noise(SIZE, mode) if mode != "I;16" else Image.new(mode, SIZE)
        picture.save(file)
        assert open_picture(file).size == SIZE


@for_each("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_note_says(tmp_path: Path, orientation: int) -> None:
    path, exif = tmp_path / "a.png", Image.Exif()
    exif[0x0112] = orientation
    noise(SIZE).save(path, exif=exif)
    quarters = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(orientation, 0)
    turned = np.rot90(np.asarray(noise(SIZE)), quarters)
    if orientation in (2, 4, 5, 7):
        turned = np.flip(turned, axis=1 if orientation < 5 else 0)
    np.testing.assert_array_equal(np.asarray(open_picture(path)), turned)
    (found,) = scan_pictures([path])
    assert isinstance(found, Seen)
    assert found.look.size == (turned.shape[1], turned.shape[0])


def test_more_than_a_byte_for_a_pixel_becomes_a_byte(tmp_path: Path) -> None:
    for values, kind, expected in (
        ([0, 257, 65535], np.uint16, [0, 1, 255]),
        ([0, 257, 65535], np.int32, [0, 1, 255]),
        ([0, 200, 255], np.int32, [0, 200, 255]),
        ([-5, 7, 2**20], np.int32, [0, 0, 255]),
        ([0, 0.5, 1], np.float32, [0, 127, 255]),
        ([0, 1285, 65535], np.float32, [0, 5, 255]),
        ([np.nan, np.inf, 1], np.float32, [0, 0, 255]),
    ):
        Image.fromarray(np.array([values], dtype=kind)).save(tmp_path / "deep.tiff")
        picture = open_picture(tmp_path / "deep.tiff")
        assert (picture.mode, list(picture.tobytes())) == ("L", expected)


@for_each("way", WAYS_TO_BE_BAD)
def test_what_cannot_be_read_is_named(tmp_path: Path, way: str) -> None:
    write, reason = WAYS_TO_BE_BAD[way]
    path = tmp_path / os.fsdecode(b"caf\xe9.jpg")
    write(path)
    words = re.escape(f"{tmp_path}/caf\\xe9.jpg: cannot read the image: {reason}")
    with pytest.raises(DataError, match=f"^{words}") as caught:
        open_picture(path)
    (bad,) = scan_pictures([path])
    assert str(bad) == str(caught.value)


@for_each("suffix", ["bmp", "gif", "jpg", "pgm", "png", "tiff", "webp"])
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"a.{suffix}"
    caplog.set_level(logging.CRITICAL, "PIL")
    noise(SIZE, "L" if suffix == "pgm" else "RGB").save(path)
    sound, draw, refused = path.read_bytes(), random.Random(suffix), 0
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


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_picture_starts_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, program = tmp_path / "gs was started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 10.0\ntouch '{trace}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None, raising=False)
    for name in ("a.png", "a.jpg", "a.eps"):
        (tmp_path / name).write_bytes(EPS)
        for read in (open_picture, load_picture, look_at):
            with pytest.raises(DataError, match=r"unknown format that begins with b'%!PS-.* PNG"):
                read(tmp_path / name)
    assert not trace.exists()


def test_too_many_pixels_are_not_decoded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(SIZE).save(file)
    content = file.read_bytes()
    head = b"IHDR" + (12_000).to_bytes(4, "big") * 2 + content[24:29]
    file.write_bytes(content[:12] + head + zlib.crc32(head).to_bytes(4, "big") + content[33:])
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    words = r"re\.png: .* has 12000x12000 pixels, more than the limit of 134,217,728: make it"
    with pytest.raises(DataError, match=words):
        open_picture(file)


def test_links_lead_neither_to_devices_nor_round_without_end(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "b.png")
    (path,) = picture_paths(tmp_path, [])
    (found,) = scan_pictures([path])
    assert "a.png: cannot read the image: expected a file, got a FIFO" in str(found)
    levels = [tmp_path / f"level {number}" for number in range(40)]
    for level in levels:
        level.mkdir()
    for above, beneath in itertools.pairwise(levels):
        (above / "a").symlink_to(beneath)
        (above / "b").symlink_to(beneath)
    noise((4, 4)).save(levels[-1] / "x.png")
    assert picture_paths(levels[0], []) == [levels[0].joinpath(*["a"] * 39, "x.png")]


def test_a_look_through_says_what_is_sound_and_what_is_bad(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02}.png" for number in range(40)]
    for number, path in enumerate(paths):
        mode = "L" if number % 3 == 0 else "RGB"
        noise((4 + number % 5, 3 + number % 7), mode, seed=number).save(path)
    for number in (0, 17, 39):
        write_cut_jpeg(paths[number])
    found = scan_pictures(paths)
    sound = [n for n, each in enumerate(found) if isinstance(each, Seen)]
    looks = [each.look for each in found if isinstance(each, Seen)]
    assert sound == [n for n in range(40) if n not in (0, 17, 39)]
    bad = [each.path for each in found if isinstance(each, BadFile)]
    assert bad == [paths[n] for n in (0, 17, 39)]
    assert [look.size for look in looks] == [(4 + n % 5, 3 + n % 7) for n in sound]
    assert [look.gray for look in looks] == [n % 3 == 0 for n in sound]
    assert scan_pictures(paths[::-1]) == found[::-1]
    # Gray ones among colored ones count in all channels.
    arrays = [np.asarray(open_picture(paths[n]).convert("RGB")) for n in sound]
    assert_true(sum_looks(looks, gray=False), arrays)
    gray = [each.look for each in scan_pictures(paths[3:36:3]) if isinstance(each, Seen)]
    arrays = [np.asarray(open_picture(path))[..., None] for path in paths[3:36:3]]
    assert_true(sum_looks(gray, gray=True), arrays)
    assert scan_pictures([]) == []


@for_each("suffix", ["tiff", "gif", "webp", "png", "mpo"])
def test_what_has_several_pages_is_noted_and_the_first_is_read(suffix: str, tmp_path: Path) -> None:
    frames = [noise(SIZE, seed=number) for number in range(3)]
    for name, more in (("one", []), ("two", frames[1:])):
        path = tmp_path / f"{name}.{suffix}"
        frames[0].save(path, save_all=True, append_images=more, lossless=True)
    # That of a telephone has a preview or the depths, and is a photograph called .jpg.
    if suffix == "mpo":
        path.rename(tmp_path / "two.jpg")
    paths = sorted(tmp_path.iterdir())
    looks = [each.look for each in scan_pictures(paths) if isinstance(each, Seen)]
    assert [look.several for look in looks] == [False, suffix != "mpo"]
    assert open_picture(paths[0]).tobytes() == open_picture(paths[1]).tobytes()
    said = ["1 image with several pages or frames: only the first is used"]
    assert notes_of(looks) == (said if suffix != "mpo" else [])


def test_files_are_named_from_the_root_and_read_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    paths = [tmp_path / name for name in ("cat/ñ 1.png", "dog.png", os.fsdecode(b"caf\xe9.png"))]
    for number, path in enumerate(paths):
        noise(SIZE, seed=number).save(path)
    files = pickle.loads(pickle.dumps(PictureFiles(paths, tmp_path)))
    assert [files.name(i) for i in range(len(files))] == ["cat/ñ 1.png", "dog.png", "caf\\xe9.png"]
    expected = [noise(SIZE, seed=number).tobytes() for number in range(3)]
    assert [files[i].tobytes() for i in range(3)] == expected
    pixels = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    source = pickle.loads(pickle.dumps(ArrayPictures(pixels, "test picture")))
    assert (len(source), source.name(1)) == (2, "test picture 1")
    source[1].convert("L").paste(9, (0, 0, 4, 3))
    assert (source[1].mode, list(source[1].tobytes())) == ("L", list(range(12, 24)))
    write_page(paths[1])
    with pytest.raises(DataError, match=r"dog\.png: cannot read the image"):
        files[1]

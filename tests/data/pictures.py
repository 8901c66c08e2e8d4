"""Small made-up data sets of pictures, for whoever tests with files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

SUFFIXES = (".png", ".jpg")


def noise(size: tuple[int, int], mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture of random pixels.

    Args:
        size: width and height, in pixels.
        mode: any that Pillow converts RGB to.
        seed: draws the pixels.
    """
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_class_folders(
    root: Path,
    classes: Sequence[str],
    train: int = 6,
    test: int = 3,
    size: tuple[int, int] = (12, 10),
    mode: str = "RGB",
    seed: int = 0,
) -> Path:
    """Write ``train/CLASS/...`` and ``test/CLASS/...``, PNG and JPEG in turn.

    The classes differ in brightness, so that they can be learnt.

    Args:
        root: the folder; it may be there.
        classes: names.
        train: training pictures of each class.
        test: test pictures of each class; with 0 the class folders lie in ``root`` itself.
        size: width and height, in pixels.
        mode: ``L``, ``RGB`` or another that Pillow writes as PNG and as JPEG.
        seed: draws the pixels.

    Returns:
        ``root``.
    """
    generator = np.random.default_rng(seed)
    parts = {"train": train, "test": test} if test else {"": train}
    for part, count in parts.items():
        for number, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            low = 200 * number // len(classes)
            for i in range(count):
                pixels = generator.integers(low, low + 56, (size[1], size[0], 3), dtype=np.uint8)
                file = folder / f"{i}{SUFFIXES[i % len(SUFFIXES)]}"
                Image.fromarray(pixels).convert(mode).save(file)
    return root


def write_cut_jpeg(path: Path) -> None:
    """A JPEG that ends too early."""
    noise((40, 30)).save(path, format="JPEG")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def write_page(path: Path) -> None:
    """What a server says when a picture is gone."""
    path.write_text("<!DOCTYPE html><title>404</title>")


def write_nothing(path: Path) -> None:
    """An empty file."""
    path.write_bytes(b"")


def write_dangling_link(path: Path) -> None:
    """A link that leads nowhere."""
    path.symlink_to(path.with_name("gone"))


WAYS_TO_BE_BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (write_cut_jpeg, "image file is truncated"),
    "a web page": (write_page, "a file of no known format that begins with b'<!DOCTYPE html><'"),
    "empty": (write_nothing, "an empty file"),
    "a link to nothing": (write_dangling_link, "No such file or directory"),
}
"""How to write each, and what is said of it."""

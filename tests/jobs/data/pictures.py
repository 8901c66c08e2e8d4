"""Small made-up data sets of pictures, for whoever tests with files."""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

SUFFIXES = (".png", ".jpg")


def noise(size: tuple[int, int], mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture of random pixels, so wide and so high."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_class_folders(root: Path, classes: Sequence[str], train: int = 6, test: int = 3) -> Path:
    """Write ``train/CLASS/...`` and ``test/CLASS/...``, PNG and JPEG in turn.

    Without test pictures the class folders lie in ``root``. The classes differ in brightness.
    """
    generator = np.random.default_rng(0)
    parts = {"train": train, "test": test} if test else {"": train}
    for part, count in parts.items():
        for number, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            low = 200 * number // len(classes)
            for i in range(count):
                pixels = generator.integers(low, low + 56, (10, 12, 3), dtype=np.uint8)
                file = folder / f"{i}{SUFFIXES[i % len(SUFFIXES)]}"
                Image.fromarray(pixels).save(file)
    return root


def write_cut_jpeg(path: Path) -> None:
    noise((40, 30)).save(path, format="JPEG")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def write_page(path: Path) -> None:
    """What a server says when a picture is gone."""
    path.write_text("<!DOCTYPE html><title>404</title>")


WAYS_TO_BE_BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (write_cut_jpeg, "image file is truncated"),
    "a web page": (write_page, "a file of unknown format that begins with b'<!DOCTYPE html><'"),
    "empty": (Path.touch, "an empty file"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "No such file or directory"),
    "a folder": (Path.mkdir, "expected a file, got a folder"),
}
"""How to write each, and what is said of it."""


@contextmanager
def memory_limited(more_bytes: int) -> Iterator[None]:
    """Let this process have no more memory than it has and this."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

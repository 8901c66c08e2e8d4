"""Data sets of a few small files, and runs on them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from onefold_jobs.catalog import JOBS
from onefold_jobs.run import read_options
from onefold_jobs.training import begin_training

TESTED = {"classify": "test", "segment": "test", "text": "dev.tsv"}
"""What of the data of a job is to test with."""
CLASSES = ("apple", "pear", "plum")
job_of = {job.name: job for job in JOBS}.__getitem__


def write_pictures(root: Path, *, train: int = 8, test: int = 4) -> Path:
    """Squares whose color tells their class, as ``train/CLASS/*.png`` and ``test/CLASS/*.png``."""
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for channel, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 120, (16, 16, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def write_masks(root: Path, *, train: int = 6, test: int = 3) -> Path:
    """Bright rectangles on dark ground, and masks of them."""
    draw = np.random.default_rng(1)
    for part, count in (("train", train), ("test", test)):
        for kind in ("images", "masks"):
            (root / part / kind).mkdir(parents=True)
        for number in range(count):
            mask = np.zeros((40, 48), dtype=np.uint8)
            top, left = draw.integers(0, 24, 2)
            mask[top : top + 16, left : left + 16] = 255
            image = (mask[..., None] // 2 + draw.integers(0, 60, (40, 48, 3))).astype(np.uint8)
            Image.fromarray(image).save(root / part / "images" / f"{number}.png")
            Image.fromarray(mask).save(root / part / "masks" / f"{number}.png")
    return root


VOC = {0: (0, 0, 0), 3: (128, 128, 0), 15: (192, 128, 128), 255: (224, 224, 192)}
"""Values of masks as the Pascal VOC challenge has them, and their colors in its palette."""


def write_class_masks(root: Path, *, train: int = 6, test: int = 3, kind: str = "palette") -> Path:
    """Pictures of two kinds of rectangles, and masks with their classes and a border of 255.

    Masks have a ``palette``, or are of plain ``numbers``, or of ``colors``.
    """
    draw = np.random.default_rng(4)
    palette = np.zeros((256, 3), dtype=np.uint8)
    for value, color in VOC.items():
        palette[value] = color
    for part, count in (("train", train), ("test", test)):
        for folder in ("images", "masks"):
            (root / part / folder).mkdir(parents=True)
        for number in range(count):
            mask = np.zeros((48, 64), dtype=np.uint8)
            for value, left in ((15, 0), (3, 32)):
                y, x = draw.integers(2, 24, 2) // (1, 2) + (0, left)
                mask[y - 1 : y + 19, x - 1 : x + 19] = 255
                mask[y : y + 18, x : x + 18] = value
            pixels = palette[mask] // 2 + draw.integers(0, 60, (48, 64, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / part / "images" / f"{number}.png")
            picture = Image.fromarray(palette[mask] if kind == "colors" else mask)
            if kind == "palette":
                picture.putpalette(palette.tobytes())
            picture.save(root / part / "masks" / f"{number}.png")
    return root


def write_texts(root: Path, *, train: int = 40, dev: int = 12) -> Path:
    """Sentences of a good or a bad word among others."""
    draw = np.random.default_rng(2)
    words = ("the", "film", "was", "seen", "by", "many", "people")
    root.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("dev", dev)):
        lines = []
        for number in range(count):
            chosen = list(draw.choice(words, size=int(draw.integers(2, 9))))
            chosen.insert(1, "fine" if number % 2 else "dull")
            lines.append(f"{' '.join(chosen)}\t{'good' if number % 2 else 'bad'}\n")
        (root / f"{name}.tsv").write_text("".join(lines))
    return root


SMALL: dict[str, dict[str, Any]] = {
    "classify": {"model": "resnet18", "augment": "crop", "shards": 3, "batch_size": 8},
    "segment": {"encoder": "resnet18", "width": 4, "crop": 64, "shards": 3, "batch_size": 4},
    "text": {"vocabulary": 300, "width": 16, "heads": 2, "shards": 3, "batch_size": 8},
}
"""Options that make a run of a job short."""

WRITERS: dict[str, Callable[..., Path]] = {
    "classify": write_pictures,
    "segment": write_masks,
    "text": write_texts,
}


def direct(main: Callable[..., Any], *, args: Sequence[Any], **_: Any) -> Any:
    """Computes in this process, in place of `onefold.launch`."""
    return main(*args)


def run_here(job: str, data: Path | str, runs: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Train in this process on one device: the run's folder and what it says in the end."""
    kind = job_of(job)
    given = {"data": str(data), "runs": str(runs), "epochs": 1, **SMALL[job], **options}
    if given.get("resume"):
        given = {"runs": str(runs), **options}
    asked = read_options(kind, given, None)
    prepared = kind.prepare(asked, None)
    settled = kind.settle(asked, prepared)
    task = kind.make_task(settled, prepared)
    return settled.folder, begin_training(settled, kind.name, task, prepared).run()

"""Composes small labeled datasets from MNIST and CrackForest, for docs/studies/results.md.

    python benchmarks/composed.py DATA OUTPUT

DATA contains the folders `mnist-small` (four IDX files, gzipped) and `crackforest` (train and test,
each with images and masks). Two datasets are written to OUTPUT. No digit or road image is in both
the training and the test set.

digits: two digits side by side in an image of 28x28 pixels, each squeezed to half its width.
    `train.jsonl` and `test.jsonl` have the columns `image`, `labels` (the digits) and
    `sum`.
roads: squares of 96 pixels around cracks, each with a digit painted on the road.
    Masks are 0 (road), 1 (crack) or 2 (paint), and paint hides the crack.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

PARTS = {"train": "train", "test": "t10k"}
SIDE, HALF = 28, 14
SAMPLES = {"train": 6000, "test": 1500}
SQUARE, SQUARES = 96, 4
MARGIN = 8  # distance of a painted digit from the border, in pixels


def digits(data: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, 28, 28) uint8 of one part of MNIST, and their digits (n,) uint8."""
    folder = data / "mnist-small"
    pictures = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    values = np.frombuffer(pictures, np.uint8, offset=16).reshape(-1, 28, 28)
    return values, np.frombuffer(labels, np.uint8, offset=8)


def compose_digits(data: Path, output: Path) -> None:
    """Write the dataset `digits`."""
    rng = np.random.default_rng(0)
    for name, part in PARTS.items():
        pictures, labels = digits(data, part)
        (output / name).mkdir(parents=True)
        lines = []
        for number in range(SAMPLES[name]):
            chosen = rng.choice(len(labels), 2, replace=False)
            picture = Image.new("L", (SIDE, SIDE))
            for place, digit in enumerate(chosen):
                half = Image.fromarray(pictures[digit]).resize((HALF, SIDE))
                picture.paste(half, (place * HALF, 0))
            picture.save(output / name / f"{number:04}.png")
            found = sorted({str(labels[digit]) for digit in chosen})
            total = int(labels[chosen].astype(int).sum())
            row = {"image": f"{name}/{number:04}.png", "labels": found, "sum": total}
            lines.append(json.dumps(row) + "\n")
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def cut_square(mask: np.ndarray, rng: np.random.Generator) -> tuple[slice, slice]:
    """Choose a square around a random pixel of the crack, inside the image."""
    y, x = rng.permutation(np.argwhere(mask))[0]
    top = int(np.clip(y - rng.integers(SQUARE), 0, mask.shape[0] - SQUARE))
    left = int(np.clip(x - rng.integers(SQUARE), 0, mask.shape[1] - SQUARE))
    return slice(top, top + SQUARE), slice(left, left + SQUARE)


def compose_roads(data: Path, output: Path) -> None:
    """Write the dataset `roads`."""
    rng = np.random.default_rng(0)
    for name, part in PARTS.items():
        pictures, _ = digits(data, part)
        for folder in ("images", "masks"):
            (output / name / folder).mkdir(parents=True)
        for path in sorted((data / "crackforest" / name / "images").glob("*.jpg")):
            road = np.asarray(Image.open(path).convert("RGB"))
            crack = np.asarray(Image.open(path.parents[1] / "masks" / f"{path.stem}.png")) > 127
            for number in range(SQUARES):
                square = cut_square(crack, rng)
                image, mask = road[square].copy(), crack[square].astype(np.uint8)
                size = int(rng.integers(28, 57))
                top, left = rng.integers(MARGIN, SQUARE - MARGIN - size, 2)
                digit = Image.fromarray(pictures[rng.integers(len(pictures))]).resize((size, size))
                painted = np.asarray(digit) > 127
                where = slice(top, top + size), slice(left, left + size)
                # Worn paint: the road shines through.
                bright = 0.5 * image[where][painted] + 0.5 * rng.integers(170, 240)
                image[where][painted] = bright.astype(np.uint8)
                mask[where][painted] = 2
                for folder, array in (("images", image), ("masks", mask)):
                    file = output / name / folder / f"{path.stem}-{number}.png"
                    Image.fromarray(array).save(file)


if __name__ == "__main__":
    source, target = (Path(argument) for argument in sys.argv[1:])
    compose_digits(source, target / "digits")
    compose_roads(source, target / "roads")

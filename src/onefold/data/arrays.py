"""Reads pictures that come as arrays: IDX files in a folder, and scikit-learn's digits."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from onefold.data.bad import readable
from onefold.data.idx import find_file, read_labelled
from onefold.data.labels import check_labels
from onefold.data.pictures import (
    ArrayPictures,
    Sums,
)
from onefold.data.splits import PictureClasses, Split, digest, held_out, notes_of_same, untested
from onefold.errors import DataError, LaunchError

__all__ = ["read_digits", "read_idx_folder"]


def read_idx_folder(
    directory: Path, names: Sequence[str] | None = None, *, labels_as_is: bool = False
) -> PictureClasses:
    """Read grey pictures from four IDX files named as MNIST's are.

    Args:
        directory: the folder of the files, each plain or ``.gz``.
        names: names of the classes; None names them by their numbers.
        labels_as_is: accept every label as a class, however many there are.

    Raises:
        DataError: the labels are probably not classes, or not those of the names or of the
            training set, or there are fewer than two.
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged.
    """
    train_pixels, train_labels = read_labelled(directory, "train")
    test_pixels, test_labels = read_labelled(directory, "t10k")
    # The largest label decides, not how many labels occur: a number that no picture has still gets
    # its logit, so that label n stays output n.
    count = int(train_labels.max()) + 1
    labels_path = find_file(directory, "train-labels-idx1-ubyte")
    if count < 2:
        raise DataError(f"{labels_path}: expected two classes or more, found only 0")
    if names and count > len(names):
        raise DataError(f"{labels_path}: expected labels 0 to {len(names) - 1}, got {count - 1}")
    # The loss would only fail at the first evaluation, on a GPU with an assertion of the device.
    if int(test_labels.max()) >= count:
        raise DataError(
            f"{find_file(directory, 't10k-labels-idx1-ubyte')}: expected labels of the training "
            f"set, 0 to {count - 1}, got {int(test_labels.max())}"
        )
    counts = Counter(map(str, train_labels.tolist()))
    notes = [] if labels_as_is else check_labels(counts, readable(labels_path))
    classes = tuple(names) if names else tuple(map(str, range(count)))
    data = _of_arrays(train_pixels, train_labels, test_pixels, test_labels, classes)
    tested = {classes[label] for label in data.test.labels}
    notes += untested(classes, tested, readable(directory))
    return replace(data, notes=notes + _arrays_apart(data, readable(directory)))


def read_digits(*, holdout: float, seed: int) -> PictureClasses:
    """Read the 1,797 digits of 8x8 pixels that come with scikit-learn.

    Args:
        holdout: share of each class that becomes the test set, 0 to 1.
        seed: seed of the generator that draws that share.

    Raises:
        LaunchError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise LaunchError(
            "the digits come with scikit-learn, which is not installed here: "
            'pip install "onefold[demo]"'
        )
    from sklearn.datasets import load_digits

    source = load_digits()
    # Its greys are 0.0 to 16.0 in float64; everything downstream expects 0 to 255.
    pixels = torch.from_numpy(source.images * (255 / 16)).to(torch.uint8)
    labels = torch.from_numpy(source.target).to(torch.int64)
    held = held_out([str(label) for label in labels.tolist()], share=holdout, seed=seed)
    # Sorted: the order of a set is no promise, and the numbers of samples seed their augmentation.
    test = torch.tensor(sorted(held))
    train = torch.tensor([i for i in range(len(labels)) if i not in held])
    classes = tuple(map(str, range(10)))
    return _of_arrays(pixels[train], labels[train], pixels[test], labels[test], classes)


def _of_arrays(
    train_pixels: torch.Tensor,  # (n, h, w) uint8
    train_labels: torch.Tensor,  # (n,) int64
    test_pixels: torch.Tensor,  # (m, h, w) uint8
    test_labels: torch.Tensor,  # (m,) int64
    classes: tuple[str, ...],
) -> PictureClasses:
    sums = Sums()
    # Of the training pictures alone: what the test set looks like must not reach the model.
    sums.add(train_pixels.unsqueeze(-1).numpy())
    height, width = train_pixels.shape[1:]
    train = Split(ArrayPictures(train_pixels, "training picture"), train_labels.tolist())
    test = Split(ArrayPictures(test_pixels, "test picture"), test_labels.tolist())
    return PictureClasses(
        train=train,
        test=test,
        digest=digest(classes, *(list(_array_samples(part, classes)) for part in (train, test))),
        classes=classes,
        mode="L",
        sizes=[(width, height)] * len(train_pixels),
        sums=sums,
        left_out=[],
    )


def _arrays_apart(data: PictureClasses, where: str) -> list[str]:
    samples = [list(_array_samples(part, data.classes)) for part in (data.train, data.test)]
    return notes_of_same(
        [[content for _, _, content in part] for part in samples],
        [[name for name, _, _ in part] for part in samples],
        [label for part in samples for _, label, _ in part],
        where,
    )


def _array_samples(split: Split, classes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the class and a digest of the content of each picture."""
    for number, label in enumerate(split.labels):
        pixels = split.pictures[number].tobytes()
        content = hashlib.blake2b(pixels, digest_size=16).hexdigest()
        yield split.pictures.name(number), classes[label], content

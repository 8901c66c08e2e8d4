"""Reads images that are stored as arrays: IDX files in a folder, and scikit-learn's digits.

IDX is the format of MNIST and related datasets, plain or compressed with gzip.
Format: http://yann.lecun.com/exdb/mnist (two zero bytes, a code for the number type, the number of
dimensions, then each dimension as a big-endian uint32, then the numbers in C order).

Note: untrusted headers
-----------------------
Twenty bytes can declare a tensor of any size, and a gzip file of a megabyte can unpack to a
gigabyte. So the header is compared with the file size before memory is allocated for the numbers,
and at most one byte more than the header declares is unpacked, which detects that there is more.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BufferedReader
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import TensorDataset

from onefold.errors import DataError
from onefold.files import open_plain
from onefold_jobs import require
from onefold_jobs.data.classes import PictureClasses, Split, digest
from onefold_jobs.data.files import readable
from onefold_jobs.data.folds import Fold, unused
from onefold_jobs.data.labels import Sample, check_labels, check_same, untested
from onefold_jobs.data.pictures import ArrayPictures, Sums
from onefold_jobs.data.samples import hold_out

__all__ = ["mnist", "read_digits", "read_idx", "read_idx_folder", "read_labeled"]

_File: TypeAlias = BufferedReader | gzip.GzipFile


def read_idx_folder(
    directory: Path,
    names: Sequence[str] | None = None,
    *,
    labels_as_is: bool = False,
    seed: int = 0,
    fold: Fold | None = None,
) -> PictureClasses:
    """Read grayscale images from four IDX files that are named like MNIST's.

    Args:
        directory: folder of the files, each plain or ``.gz``.
        names: class names; None uses the class numbers.
        labels_as_is: accept all labels as class names, even if there are many.
        seed: seed of the folds.
        fold: fold of the training set to test on, instead of the test set.

    Raises:
        DataError: the labels are probably not classes, do not match the names or the training set,
            or there are fewer than two.
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged.
    """
    train_pixels, train_labels = read_labeled(directory, "train")
    test_pixels, test_labels = read_labeled(directory, "t10k")
    # The largest label counts, not the number of distinct labels: an unused number still gets a
    # logit, so that label n stays output n.
    count = int(train_labels.max()) + 1
    labels_path = find_file(directory, "train-labels-idx1-ubyte")
    if count < 2:
        raise DataError(f"{labels_path}: expected two classes or more, found only 0")
    if names and count > len(names):
        raise DataError(f"{labels_path}: expected labels 0 to {len(names) - 1}, got {count - 1}")
    # Otherwise, the loss would fail at the first evaluation, on a GPU with a device-side assertion.
    if int(test_labels.max()) >= count:
        raise DataError(
            f"{find_file(directory, 't10k-labels-idx1-ubyte')}: expected labels of the training "
            f"set, 0 to {count - 1}, got {int(test_labels.max())}"
        )
    counts = Counter(map(str, train_labels.tolist()))
    notes = [] if labels_as_is else check_labels(counts, readable(labels_path))
    classes = tuple(names) if names else tuple(map(str, range(count)))
    tested = {classes[label] for label in test_labels.tolist()}
    notes += untested(classes, tested, readable(directory))
    parts = [(train_pixels, train_labels), (test_pixels, test_labels)]
    if fold:
        notes += [unused(find_file(directory, "t10k-labels-idx1-ubyte"))]
        parts = _divided(*parts[0], share=0.0, seed=seed, fold=fold)
    return _of_arrays(parts, classes, notes=notes, where=readable(directory))


def read_digits(*, holdout: float, seed: int, fold: Fold | None = None) -> PictureClasses:
    """Read the 1,797 digits of 8x8 pixels that scikit-learn includes.

    Args:
        holdout: fraction of each class for the test set, 0 to 1.
        seed: seed of the generator that draws the test set.
        fold: fold to test on, instead.

    Raises:
        LaunchError: scikit-learn is not installed.
    """
    require("reading the digits", "digits", "sklearn")
    from sklearn.datasets import load_digits

    source = load_digits()
    # Its gray values are 0.0 to 16.0 in float64; all other code expects 0 to 255.
    pixels = torch.from_numpy(source.images * (255 / 16)).to(torch.uint8)
    labels = torch.from_numpy(source.target).to(torch.int64)
    parts = _divided(pixels, labels, share=holdout, seed=seed, fold=fold)
    return _of_arrays(parts, tuple(map(str, range(10))), where="digits")


def _divided(
    pixels: torch.Tensor, labels: torch.Tensor, **how: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Divide images into a training and a test set; ``how`` has arguments of `hold_out`."""
    classes = [str(label) for label in labels.tolist()]
    divided = hold_out(range(len(labels)), classes, **how, content=lambda n: _content(pixels[n]))
    return [(pixels[part], labels[part]) for part in divided]


def _content(pixels: torch.Tensor) -> str:
    return hashlib.blake2b(pixels.numpy().tobytes(), digest_size=16).hexdigest()


def _of_arrays(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    classes: tuple[str, ...],
    *,
    where: str,
    notes: Sequence[str] = (),
) -> PictureClasses:
    """Make a dataset from arrays.

    Args:
        parts: images (n, h, w) uint8 and their labels (n,) int64, for training and for testing.
        classes: class names, by number.
        where: file or folder of the data, for errors.
        notes: messages for the user.
    """
    splits = [
        Split(ArrayPictures(pixels, title), labels.tolist())
        for (pixels, labels), title in zip(parts, ("training picture", "test picture"), strict=True)
    ]
    samples = [list(_samples(split, classes)) for split in splits]
    pixels, sums = parts[0][0], Sums()
    # The sums cover only training images, because the test set must not influence the model.
    sums.add(pixels.unsqueeze(-1).numpy())
    count, height, width = pixels.shape
    return PictureClasses(
        train=splits[0],
        test=splits[1],
        digest=digest(classes, samples),
        classes=classes,
        mode="L",
        sizes=[(width, height)] * count,
        sums=sums,
        left_out=[],
        notes=[*notes, *check_same(samples, where)],
    )


def _samples(split: Split, classes: Sequence[str]) -> Iterator[Sample]:
    for number, label in enumerate(split.labels):
        pixels = split.pictures[number].tobytes()
        content = hashlib.blake2b(pixels, digest_size=16).hexdigest()
        yield Sample(split.pictures.name(number), classes[label], content)


GZIP_MAGIC = b"\x1f\x8b"
NUMBER_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_MOST_PACKED = 1100
"""Bytes that a byte of a gzip file may unpack to: DEFLATE is limited to 1032, plus a margin."""
_MOST_UNPACKED_BYTES = 1 << 30
"""Maximum unpacked size of a gzip file, in bytes; MNIST's largest has 47 million."""
# Mean and standard deviation of the 60,000 training images of MNIST, pixels in [0, 1].
MNIST_MEAN = 0.1307
MNIST_STD = 0.3081


def read_idx(path: str | PathLike[str]) -> torch.Tensor:
    """Read one IDX file.

    Args:
        path: path of the file; its content decides whether it is compressed, not its name.

    Returns:
        The numbers in the shape and the dtype that the file declares:
        uint8, int8, int16, int32, float32 or float64.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not IDX, is truncated, has trailing bytes, or is damaged.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "labels.idx"
        >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
        >>> read_idx(file)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    path = Path(path)
    with open_plain(path, follow=True) as file:
        # Size of the open file, because the path may refer to another file by now.
        size = os.fstat(file.fileno()).st_size
        # Check the content: downloads often keep the suffix .gz after a browser has unpacked them.
        if file.peek(2)[:2] != GZIP_MAGIC:
            return _read_numbers(file, path, size_bytes=size)
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _read_numbers(unpacked, path, size_bytes=size, packed=True)
        except (EOFError, gzip.BadGzipFile, zlib.error) as damage:
            raise ValueError(
                f"{path}: expected a whole gzip file, got {size} bytes that do not decompress "
                f"({damage}); download it again"
            ) from damage


def _read_numbers(
    file: _File, path: Path, *, size_bytes: int, packed: bool = False
) -> torch.Tensor:
    """Read the header and exactly the numbers that it declares.

    Args:
        file: content, unpacked on reading.
        path: path of the file, for errors.
        size_bytes: size of the file on disk.
        packed: whether the file is compressed with gzip.

    Raises:
        ValueError: the size of the content differs from the declared one, or could not reach it.
    """
    number_type, shape = _read_header(file, path)
    # Python integers, because in NumPy a crafted shape could overflow to a small number.
    length, head = prod(shape) * number_type.itemsize, 4 + 4 * len(shape)
    expected = (
        f"{path}: expected {head + length} bytes for {number_type.name} numbers of shape {shape}"
    )
    if length > size_bytes * (_MOST_PACKED if packed else 1):
        raise ValueError(f"{expected}, which a file of {size_bytes} bytes cannot hold")
    if packed and length > _MOST_UNPACKED_BYTES:
        raise ValueError(
            f"{expected}, more than the limit of {_MOST_UNPACKED_BYTES} for a gzip file: "
            f"unpack it with gunzip"
        )
    # Ask for one byte more: reading to the end also makes gzip verify its checksum.
    content = file.read(length + 1)
    if len(content) != length:
        raise ValueError(
            f"{expected}, got {'more' if len(content) > length else head + len(content)}"
        )
    # PyTorch has no big-endian dtypes, and requires writable memory: astype copies.
    numbers = np.frombuffer(content, number_type).astype(number_type.newbyteorder("="))
    try:
        return torch.from_numpy(numbers.reshape(shape))
    # The size fits, but the shape is invalid: more dimensions than NumPy supports, or a 0 among
    # dimensions whose product would overflow.
    except ValueError as error:
        raise ValueError(
            f"{path}: expected the shape of a tensor, got one of {len(shape)} dimensions: {error}"
        ) from error


def _read_header(file: _File, path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read the header of an IDX file: big-endian dtype and shape."""
    head = file.read(4)
    # Without two leading zero bytes, read no dimensions either.
    code, dimensions = head[2:4] if head.startswith(b"\0\0") and len(head) == 4 else (0, 0)
    sizes = file.read(4 * dimensions)
    if code not in NUMBER_TYPES or not dimensions or len(sizes) < 4 * dimensions:
        known = ", ".join(f"{number:02x}" for number in NUMBER_TYPES)
        raise ValueError(
            f"{path}: expected an IDX file, which begins with 00 00, a type code of {known}, the "
            f"number of dimensions, and 4 bytes for each; got {(head + sizes)[:20].hex(' ')!r}"
        )
    return np.dtype(NUMBER_TYPES[code]), tuple(np.frombuffer(sizes, ">u4").tolist())


def mnist(directory: str | PathLike[str], train: bool = True) -> TensorDataset:
    """Read MNIST, or a dataset with the same layout, from the IDX files in a folder.

    Args:
        directory: folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
            ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, each plain or ``.gz``.
        train: True for the training images, False for the test images.

    Returns:
        Pairs of an image (1, 28, 28) float32, normalized with MNIST's mean and standard
        deviation, and a label () int64. The whole set is ``dataset.tensors``.

    Raises:
        FileNotFoundError: a file is missing. The message lists the expected names.
        ValueError: a file is damaged, or the two files do not match.
    """
    images, labels = read_labeled(Path(directory), "train" if train else "t10k")
    # Compute in place after a single conversion, because each copy of 60,000 images takes 188 MB.
    pixels = images.unsqueeze(1).to(torch.float32).div_(255)
    return TensorDataset(pixels.sub_(MNIST_MEAN).div_(MNIST_STD), labels)


def read_labeled(directory: Path, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read images and their labels.

    Args:
        directory: folder of the four files.
        prefix: ``train`` or ``t10k``.

    Returns:
        Images (n, h, w) uint8 and labels (n,) int64.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or empty, or the two files do not match.
    """
    images_path = find_file(directory, f"{prefix}-images-idx3-ubyte")
    labels_path = find_file(directory, f"{prefix}-labels-idx1-ubyte")
    images, labels = _read_bytes(images_path, dimensions=3), _read_bytes(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{labels_path}: expected {len(images)} labels, one for each image of "
            f"{images_path.name}, got {len(labels)}"
        )
    if not images.numel():
        raise ValueError(
            f"{images_path}: expected at least one image of at least one pixel, got shape "
            f"{tuple(images.shape)}"
        )
    # cross_entropy requires class numbers in int64.
    return images, labels.to(torch.int64)


def find_file(directory: Path, name: str) -> Path:
    """Find the compressed or plain file with this name; the compressed one takes precedence."""
    candidates = [directory / f"{name}.gz", directory / name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = " or ".join(candidate.name for candidate in candidates)
    raise FileNotFoundError(f"expected {names} in {directory}, found neither")


def _read_bytes(path: Path, *, dimensions: int) -> torch.Tensor:
    """Read an IDX file, and reject valid ones of another kind than MNIST's."""
    numbers = read_idx(path)
    if numbers.dtype != torch.uint8 or numbers.ndim != dimensions:
        raise ValueError(
            f"{path}: expected uint8 numbers of {dimensions} dimensions, "
            f"got {numbers.dtype} of shape {tuple(numbers.shape)}"
        )
    return numbers

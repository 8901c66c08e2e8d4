from __future__ import annotations

import doctest
import gzip
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers
from torch.utils.data import TensorDataset

from onefold.data import arrays, mnist, read_idx
from onefold.data.arrays import read_labelled
from tests.tables import for_each

CODES = {
    "uint8": 0x08,
    "int8": 0x09,
    "int16": 0x0B,
    "int32": 0x0C,
    "float32": 0x0D,
    "float64": 0x0E,
}
FOUR_FILES = {
    "train-images-idx3-ubyte": (6, 28, 28),
    "train-labels-idx1-ubyte": (6,),
    "t10k-images-idx3-ubyte": (4, 28, 28),
    "t10k-labels-idx1-ubyte": (4,),
}


def encode(array: np.ndarray) -> bytes:
    """The IDX file of an array."""
    header = bytes([0, 0, CODES[array.dtype.name], array.ndim])
    shape = np.array(array.shape, ">u4").tobytes()
    return header + shape + array.astype(array.dtype.newbyteorder(">")).tobytes()


def encode_bytes(shape: tuple[int, ...]) -> bytes:
    """The IDX file of some uint8 numbers below 10."""
    return encode(np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) % 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole MNIST of ten images, its training set compressed."""
    for name, shape in FOUR_FILES.items():
        content = encode_bytes(shape)
        if name.startswith("train"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that many examples of hypothesis write in turn."""
    return tmp_path_factory.mktemp("idx") / "numbers"


@given(data=st.data(), kind=st.sampled_from(sorted(CODES)), compressed=st.booleans())
def test_what_was_written_is_read(
    scratch: Path, data: st.DataObject, kind: str, compressed: bool
) -> None:
    shape = data.draw(numbers.array_shapes(max_dims=4, min_side=0, max_side=4))
    array = data.draw(numbers.arrays(kind, shape))
    content = encode(array)
    scratch.write_bytes(gzip.compress(content) if compressed else content)
    tensor = read_idx(scratch)
    assert tensor.dtype == getattr(torch, kind)
    np.testing.assert_array_equal(tensor.numpy(), array)


@for_each(
    ("content", "complaint"),
    [
        (b"", "an IDX header of 4 bytes, got 0"),
        (b"\0\0\x08", "an IDX header of 4 bytes, got 3"),
        (b"PNG rather than IDX", "begins with 00 00, got 50 4e"),
        (b"\0\0\x0a\1\0\0\0\1\0", "type code of 08, 09, 0b, 0c, 0d, 0e, got 0a"),
        (b"\0\0\x08\0\0", "one dimension or more, got 0"),
        (b"\0\0\x08\3\0\0\0\1", "header of 16 bytes for 3 dimensions, got 8"),
        (encode_bytes((2, 3))[:-1], r"18 bytes for uint8 .* \(2, 3\), got 17"),
        (encode_bytes((2, 3)) + b"\0", r"18 bytes for uint8 .* \(2, 3\), got more"),
        (b"\0\0\x0c\1" + b"\xff" * 4, "17179869188 bytes for int32 numbers"),
        (b"\0\0\x08\x64" + b"\0\0\0\1" * 100 + b"\0", "the shape of a tensor, .* 100 dimensions"),
        (b"\0\0\x08\4" + b"\0" * 4 + b"\xff" * 12, "the shape of a tensor, .* 4 dimensions: .*big"),
    ],
)
@for_each("compressed", [False, True])
def test_a_file_that_is_not_sound_idx_is_refused(
    tmp_path: Path, content: bytes, complaint: str, compressed: bool
) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(ValueError, match=rf"images\.gz: expected .*{complaint}"):
        read_idx(path)


def spoil_middle(content: bytes) -> bytes:
    """The content with one byte changed."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


@for_each(
    "damage",
    [
        pytest.param(lambda content: content[:2], id="only the magic number"),
        pytest.param(lambda content: content[: len(content) // 2], id="cut in the middle"),
        pytest.param(lambda content: content[:-4], id="cut at the end"),
        pytest.param(spoil_middle, id="a changed byte"),
        pytest.param(lambda content: content[:-8] + b"\0" * 8, id="a wrong checksum"),
        pytest.param(lambda content: content + b"more", id="something after the end"),
    ],
)
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "labels.gz"
    assert callable(damage)
    path.write_bytes(damage(gzip.compress(encode_bytes((300,)))))
    with pytest.raises(ValueError, match=r"labels\.gz: expected a whole gzip file, got \d+ bytes"):
        read_idx(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_idx(tmp_path / "nowhere")


@pytest.mark.parametrize(("train", "samples"), [(True, 6), (False, 4)])
def test_mnist_is_normalised_images_and_labels(folder: Path, train: bool, samples: int) -> None:
    dataset = mnist(folder, train=train)
    assert type(dataset) is TensorDataset
    images, labels = dataset.tensors
    assert (images.shape, images.dtype) == ((samples, 1, 28, 28), torch.float32)
    assert (labels.tolist(), labels.dtype) == (list(range(samples)), torch.int64)
    pixels = torch.arange(28 * 28, dtype=torch.float32).view(28, 28)  # as encode_bytes made them
    torch.testing.assert_close(images[0, 0], ((pixels % 256 % 10) / 255 - 0.1307) / 0.3081)


def test_missing_files_of_mnist_are_named(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()
    names = r"t10k-labels-idx1-ubyte\.gz or t10k-labels-idx1-ubyte in .*, found neither"
    with pytest.raises(FileNotFoundError, match=names):
        mnist(folder, train=False)


def test_labels_of_another_set_are_refused(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").write_bytes(encode_bytes((5,)))
    with pytest.raises(ValueError, match=r"expected 4 labels, one for each image .*, got 5"):
        mnist(folder, train=False)


@pytest.mark.parametrize(("prefix", "samples"), [("train", 6), ("t10k", 4)])
def test_images_and_labels_are_read_as_they_were_stored(
    folder: Path, prefix: str, samples: int
) -> None:
    images, labels = read_labelled(folder, prefix)
    assert (images.shape, images.dtype) == ((samples, 28, 28), torch.uint8)
    assert images.flatten().tolist() == [n % 256 % 10 for n in range(samples * 28 * 28)]
    assert (labels.tolist(), labels.dtype) == (list(range(samples)), torch.int64)


@pytest.mark.parametrize("shape", [(0, 28, 28), (4, 0, 28), (4, 28, 0)])
def test_images_without_a_pixel_are_refused(folder: Path, shape: tuple[int, int, int]) -> None:
    (folder / "t10k-images-idx3-ubyte").write_bytes(encode_bytes(shape))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(encode_bytes(shape[:1]))
    words = re.escape(f"one image of at least one pixel, got shape {shape}")
    with pytest.raises(ValueError, match=f"t10k-images-idx3-ubyte: expected .*{words}"):
        read_labelled(folder, "t10k")


@pytest.mark.parametrize(
    "array", [np.zeros((4, 28), np.uint8), np.zeros((4, 28, 28), np.float32)], ids=["flat", "float"]
)
def test_sound_files_that_are_not_mnist_are_refused(folder: Path, array: np.ndarray) -> None:
    (folder / "t10k-images-idx3-ubyte").write_bytes(encode(array))
    with pytest.raises(ValueError, match="expected uint8 numbers of 3 dimensions"):
        mnist(folder, train=False)


def test_the_real_mnist_reads(shared_data: Path) -> None:
    for train, samples in ((True, 8000), (False, 2000)):
        images, labels = mnist(shared_data / "mnist-small", train=train).tensors
        assert len(images) == samples
        assert abs(float(images.mean())) < 0.05
        assert abs(float(images.std()) - 1) < 0.05
        assert labels.bincount(minlength=10).min() > samples * 0.07


@for_each("module", [arrays])
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0

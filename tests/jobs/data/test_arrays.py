"""Files of numbers in the format of MNIST, and data sets of pictures made of them."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers
from torch.utils.data import TensorDataset

from onefold.errors import DataError
from onefold_jobs.data import mnist, read_idx
from onefold_jobs.data.arrays import read_idx_folder, read_labeled
from tests.jobs.data.pictures import memory_limited
from tests.tables import for_each

CODES = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def encode(array: np.ndarray) -> bytes:
    header = bytes([0, 0, CODES[array.dtype.name], array.ndim])
    shape = np.array(array.shape, ">u4").tobytes()
    return header + shape + array.astype(array.dtype.newbyteorder(">")).tobytes()


def counted(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) % 10


def write_four(folder: Path, train: list[int], test: list[int]) -> Path:
    """MNIST's four files of these labels and random images, the training set compressed."""
    generator = np.random.default_rng(0)
    for prefix, labels in (("train", train), ("t10k", test)):
        images = generator.integers(0, 256, (len(labels), 5, 4), dtype=np.uint8)
        for kind, array in zip(KINDS, (images, np.array(labels, dtype=np.uint8)), strict=True):
            path, content = folder / f"{prefix}-{kind}", encode(array)
            if prefix == "train":
                path, content = path.with_name(f"{path.name}.gz"), gzip.compress(content)
            path.write_bytes(content)
    return folder


@given(data=st.data(), kind=st.sampled_from(sorted(CODES)), compressed=st.booleans())
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str, compressed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "numbers"
    shapes = numbers.array_shapes(max_dims=4, min_side=0, max_side=4)
    array = data.draw(numbers.arrays(kind, shapes))
    path.write_bytes(gzip.compress(encode(array)) if compressed else encode(array))
    tensor = read_idx(path)
    assert tensor.dtype == getattr(torch, kind)
    np.testing.assert_array_equal(tensor.numpy(), array)


SIX = encode(counted(2, 3))


@for_each(
    ("content", "complaint"),
    [
        (b"", "begins with 00 00, a type code .*; got ''"),
        (b"PNG rather than IDX", "begins with 00 00, .* got '50 4e 47 20'"),
        (b"\0\0\x0a\1\0\0\0\1\0", "type code of 08, 09, 0b, 0c, 0d, 0e, .* got '00 00 0a 01"),
        (b"\0\0\x08\0\0", "the number of dimensions, .* got '00 00 08 00'"),
        (b"\0\0\x08\3\0\0\0\1", "4 bytes for each; got '00 00 08 03 00 00 00 01'"),
        (SIX[:-1], r"18 bytes for uint8 .* \(2, 3\), got 17"),
        (SIX + b"\0", r"18 bytes for uint8 .* \(2, 3\), got more"),
        (b"\0\0\x0c\1" + b"\xff" * 4, "17179869188 bytes for int32 numbers"),
        (b"\0\0\x08\x64" + b"\0\0\0\1" * 100 + b"\0", "the shape of a tensor, .* 100 dimensions"),
        (b"\0\0\x08\4" + b"\0" * 4 + b"\xff" * 12, "the shape of a tensor, .* 4 dimensions: .*big"),
    ],
)
def test_a_file_that_is_no_idx_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "images.gz"
    for written in (content, gzip.compress(content)):
        path.write_bytes(written)
        with pytest.raises(ValueError, match=rf"images\.gz: expected .*{complaint}"):
            read_idx(path)


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path, content = tmp_path / "labels.gz", gzip.compress(encode(counted(300)))
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
    wrong_sum = content[:-8] + b"\0" * 8
    cut = (content[:at] for at in (2, middle, -4))
    for damaged in (*cut, changed, wrong_sum, content + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"labels\.gz: expected a whole gzip file, got \d+ b"):
            read_idx(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="labels"):
        read_idx(path)


MIB = 1 << 20


def test_no_more_is_unpacked_than_the_header_promises(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"\0\0\x08\1" + MIB.to_bytes(4, "big"))
        for _ in range(160):
            file.write(bytes(MIB))
    words = r"expected 1048584 b.*, got more"
    with memory_limited(64 * MIB), pytest.raises(ValueError, match=words):
        read_idx(path)
    path.write_bytes(gzip.compress(b"\0\0\x08\1" + (2**31).to_bytes(4, "big")) + bytes(4 * MIB))
    with pytest.raises(ValueError, match="for a gzip file: unpack it with gunz"):
        read_idx(path)


def test_mnist_is_normalized_images_and_labels(tmp_path: Path) -> None:
    write_four(tmp_path, list(range(6)), [1, 0, 2])
    generator = np.random.default_rng(0)
    for prefix, expected in (("train", list(range(6))), ("t10k", [1, 0, 2])):
        dataset = mnist(tmp_path, train=prefix == "train")
        assert type(dataset) is TensorDataset
        images, labels = dataset.tensors
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert labels.tolist() == expected
        stored, same = read_labeled(tmp_path, prefix)
        assert (stored.dtype, same.tolist()) == (torch.uint8, expected)
        written = generator.integers(0, 256, (len(expected), 5, 4), dtype=np.uint8)
        np.testing.assert_array_equal(stored.numpy(), written)
        torch.testing.assert_close(images, ((stored / 255 - 0.1307) / 0.3081)[:, None])


def test_files_that_are_not_mnist_are_refused(tmp_path: Path) -> None:
    for kind, array, words in (
        (KINDS[1], None, r"t10k-labels-idx1-ubyte\.gz or t10k-labels-idx1-ubyte in .*, found ne"),
        (KINDS[1], counted(5), r"expected 4 labels, one for each image .*, got 5"),
        (KINDS[0], counted(4, 28), "expected uint8 numbers of 3 dimensions"),
        (KINDS[0], np.zeros((4, 28, 28), np.float32), "expected uint8 numbers of 3 dimensions"),
        (KINDS[0], counted(4, 0, 4), r"one image of at least one pixel, got shape \(4, 0, 4\)"),
    ):
        path = write_four(tmp_path, [1], list(range(4))) / f"t10k-{kind}"
        path.unlink()
        if array is not None:
            path.write_bytes(encode(array))
        with pytest.raises((FileNotFoundError, ValueError), match=words):
            mnist(tmp_path, train=False)


def test_four_idx_files_are_a_data_set(tmp_path: Path) -> None:
    read = read_idx_folder(write_four(tmp_path, [2, 0, 1, 2], [1, 0]))
    data = pickle.loads(pickle.dumps(read))
    assert (data.classes, data.mode, data.left_out) == (("0", "1", "2"), "L", [])
    assert (data.train.labels, data.test.labels) == ([2, 0, 1, 2], [1, 0])
    assert data.sizes == [data.train.pictures[0].size] * 4 == [(4, 5)] * 4
    named = data.train.pictures.name(3), data.test.pictures.name(0)
    assert named == ("training picture 3", "test picture 0")
    assert data.test.pictures[0].tobytes() == read.test.pictures[0].tobytes()
    pixels = np.stack([np.asarray(data.train.pictures[i]) for i in range(4)]) / 255
    mean, std = data.sums.mean_and_std()
    assert mean == pytest.approx([pixels.mean()], abs=1e-13)
    assert std == pytest.approx([pixels.std()], abs=1e-13)
    pets = ("ant", "cat", "dog")
    assert read_idx_folder(tmp_path, pets).classes == pets


def test_idx_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    for train, test, words in (
        ([0, 1], [2], "t10k-labels.*expected labels of the training set, 0 to 1, got 2"),
        ([0, 0], [0], "train-labels.*expected two classes or more, found only 0"),
        ([0, 2], [0], "train-labels.*expected labels 0 to 1, got 2"),
    ):
        with pytest.raises(DataError, match=words):
            read_idx_folder(write_four(tmp_path, train, test), ("ant", "cat"))

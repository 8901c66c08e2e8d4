import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from onefold.core.flat import same_bits, storage_order
from onefold.system.accelerator import DTYPES
from onefold.system.tensor_file import Seal, TensorParts, digest_file, write_tensors
from tests.tables import for_each


def parts_of(name: str, tensor: torch.Tensor, cuts: Sequence[int] = ()) -> TensorParts:
    """A dense tensor, cut after so many elements."""
    flat = storage_order(tensor)
    bounds = [0, *cuts, flat.numel()]
    stretches = [flat[a:b] for a, b in pairwise(bounds)]
    arrays = [s.contiguous().view(torch.uint8).numpy() for s in stretches]
    return TensorParts(name, tensor.dtype, tuple(tensor.shape), tensor.stride(), arrays)


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 2, shape, generator=generator) * 3 - 1
    return numbers.abs().to(dtype) if not dtype.is_signed else numbers.to(dtype)


@for_each("dtype", DTYPES)
def test_the_library_reads_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b": values(dtype, (3, 5)), "a": values(torch.int64, ()), "c": torch.zeros(0, 4)}
    parts = [parts_of(name, t, [1, 2] if t.numel() > 2 else []) for name, t in tensors.items()]
    write_tensors(tmp_path / "ours", parts)
    read = load_file(tmp_path / "ours")
    assert {name: t.dtype for name, t in read.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(same_bits(read[name], tensor) for name, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs")
    if dtype == torch.float32:
        assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    write_tensors(tmp_path / "nothing", [])
    assert load_file(tmp_path / "nothing") == {}


@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_other_strides_are_put_in_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("t") / "file"
    numel = int(np.prod(sizes))
    dense = torch.arange(numel, dtype=torch.float32).view([sizes[i] for i in order])
    tensor = dense.permute([order.index(i) for i in range(4)])
    assert list(tensor.shape) == sizes
    write_tensors(path, [parts_of("t", tensor, [numel // 2])])
    assert torch.equal(load_file(path)["t"], tensor)


def test_the_seal_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    seal = write_tensors(path, [parts_of("t", torch.randn(3_000_000), [5, 2_000_000])])
    assert seal == Seal(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert digest_file(path, seal.size) == seal
    assert digest_file(path, seal.size - 1).sha256 == "", "a larger file is not read"


def test_no_file_and_no_tensor_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file could not be written"):
        write_tensors(tmp_path / "file", [])
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="two tensors of a file have the same name, t"):
        write_tensors(tmp_path / "f", [parts_of("t", torch.ones(1)), parts_of("t", torch.ones(2))])

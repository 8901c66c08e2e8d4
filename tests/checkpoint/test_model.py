"""The model between memory and files: copied as it is, and read into one of the same form."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onefold.checkpoint.model import (
    ModelCopy,
    ModelFiles,
    check_model_can_be_saved,
    copy_model,
)
from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from onefold.errors import CheckpointError
from onefold.system.tensorfile import write_tensors
from tests.tables import for_each


class Odd(nn.Module):
    """Tied, turned, empty and scalar tensors of several types, and buffers that stay at home."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.turned = nn.Parameter(torch.randn(4, 2).t())
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        with torch.no_grad():
            for value in self.parameters():
                value.add_(start)


def room(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def print_of(module: nn.Module) -> str:
    return fingerprint_of(tensor_digests(named_tensors(module)))


def written(copy: ModelCopy, folder: Path) -> list[Path]:
    paths = [folder / "model", folder / "buffers"]
    for path, parts in zip(paths, copy.parts(), strict=True):
        write_tensors(path, parts)
    return paths


# Out of memory.


def test_a_copy_has_what_the_model_names_and_what_it_leaves_out() -> None:
    module = Odd()
    copy = copy_model(module, room)
    assert list(copy.model) == list(module.state_dict())
    assert list(copy.rest) == ["mask"]
    assert list(copy.names) == list(named_tensors(module))
    for name, value in module.state_dict().items():
        assert torch.equal(copy.model[name], value)
        assert copy.model[name].dtype == value.dtype
    assert copy.rest["mask"].tolist() == [True, False]
    assert copy.fingerprint() == print_of(module)


def test_a_copy_does_not_follow_the_model() -> None:
    module = Odd()
    copy, before = copy_model(module, room), print_of(module)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value.fill_(1)
    assert copy.fingerprint() == before != print_of(module)


def test_all_copies_lie_in_the_room_and_apart() -> None:
    """The room is used for one copy after the other, and may hold anything."""
    module, asked = Odd(), []

    def full(nbytes: int) -> torch.Tensor:
        asked.append(torch.full((nbytes + 100,), 0xFF, dtype=torch.uint8))
        return asked[0]

    copy = copy_model(module, full)
    assert len(asked) == 1
    start, stop = asked[0].data_ptr(), asked[0].data_ptr() + asked[0].numel()
    places = sorted(
        (value.data_ptr(), value.data_ptr() + value.nbytes)
        for value in (*copy.model.values(), *copy.rest.values())
        if value.nbytes
    )
    assert all(start <= first and last <= stop for first, last in places)
    assert all(one[1] <= other[0] for one, other in pairwise(places))
    assert bool((asked[0][-100:] == 0xFF).all())
    assert copy.fingerprint() == print_of(module)


def test_a_compiled_part_has_its_own_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.ModuleDict({"_orig_mod": plain})
    copy = copy_model(wrapped, room)
    assert list(copy.model) == ["0.weight", "0.bias"]
    assert copy.fingerprint() == print_of(plain)


class Extra(nn.Linear):
    def get_extra_state(self) -> object:
        return torch.zeros(3)

    def set_extra_state(self, state: object) -> None:
        pass


def wide_complex() -> nn.Module:
    module = nn.Module()
    module.register_buffer("wave", torch.zeros(1, dtype=torch.complex128))
    return module


def quiet_complex() -> nn.Module:
    module = nn.Module()
    module.register_buffer("wave", torch.zeros(1, dtype=torch.complex128), persistent=False)
    return module


@for_each(
    ("make", "words"),
    [
        (lambda: nn.Sequential(Extra(1, 1)), "^the model's state_dict holds 0._extra_state, which"),
        (wide_complex, r"^wave is of torch\.complex128, which no safetensors file can hold"),
        (quiet_complex, r"^wave is of torch\.complex128, which no safetensors file can hold"),
    ],
)
def test_what_no_file_holds_is_refused_before_there_is_anything_to_lose(
    make: Callable[[], nn.Module], words: str
) -> None:
    for refused in (check_model_can_be_saved, lambda module: copy_model(module, room)):
        with pytest.raises(TypeError, match=words):
            refused(make())


def test_what_can_be_saved_is_not_refused() -> None:
    check_model_can_be_saved(Odd())
    check_model_can_be_saved(nn.Identity())


# Into files and back.


def test_files_are_what_other_libraries_read(tmp_path: Path) -> None:
    module = Odd()
    model, rest = written(copy_model(module, room), tmp_path)
    found = load_file(model)
    assert found.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(found[name], value)
    assert load_file(rest)["mask"].tolist() == [True, False]


def test_a_model_of_the_same_form_is_filled_where_its_tensors_lie(tmp_path: Path) -> None:
    module, other = Odd(), Odd(start=1.0)
    paths = written(copy_model(module, room), tmp_path)
    other.count.fill_(1)
    other.mask.fill_(True)
    places = [value.data_ptr() for value in named_tensors(other).values()]
    assert print_of(other) != print_of(module)
    with ModelFiles(*paths) as files:
        files.check(other)
        files.fill(other)
        assert set(files.names) == {*module.state_dict(), "mask"}
        assert files.kind_of("turned") == ((2, 4), "F32")
        assert files.read("count").item() == 7
    assert print_of(other) == print_of(module)
    assert [value.data_ptr() for value in named_tensors(other).values()] == places
    assert other.two.weight is other.one.weight
    assert all(value.requires_grad for value in other.parameters())


def changed(change: Callable[[Any], object]) -> nn.Module:
    module = Odd()
    change(module)
    return module


@for_each(
    ("change", "words"),
    [
        (
            lambda m: setattr(m, "more", nn.Linear(2, 1)),
            r"^more\.weight, of shape \(1, 2\), is in this model and not in the checkpoint",
        ),
        (
            lambda m: delattr(m, "low"),
            r"^low, of shape \(5,\), is in the checkpoint and not in this model",
        ),
        (
            lambda m: setattr(m, "low", nn.Parameter(torch.zeros(6).bfloat16())),
            r"^low is BF16 \(5,\) in the checkpoint and BF16 \(6,\) in this model",
        ),
        (
            lambda m: m.register_buffer("count", torch.tensor(7, dtype=torch.int32)),
            r"^count is I64 \(\) in the checkpoint and I32 \(\) in this model",
        ),
        (
            lambda m: m.register_buffer("mask", torch.ones(3).bool(), persistent=False),
            r"^mask is BOOL \(2,\) in the checkpoint and BOOL \(3,\) in this model",
        ),
    ],
)
def test_a_model_of_another_form_is_refused_by_the_first_name(
    tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    paths = written(copy_model(Odd(), room), tmp_path)
    with ModelFiles(*paths) as files:
        files.check(Odd())
        with pytest.raises(CheckpointError, match=words):
            files.check(changed(change))


def test_a_file_that_is_broken_is_named(tmp_path: Path) -> None:
    model, rest = written(copy_model(Odd(), room), tmp_path)
    rest.write_bytes(rest.read_bytes()[:20])
    with (
        pytest.raises(CheckpointError, match="buffers is a broken safetensors file"),
        ModelFiles(model, rest),
    ):
        pass

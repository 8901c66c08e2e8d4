"""Parameters whose values are drawn when somebody needs them."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from onefold.core.recipe import Around, Made, Recipe, Reference, View
from onefold.engine.firstvalues import Undrawn, put_off, reveal, revealed, undrawn_of
from onefold.system.heap import BareMemory

SHAPE = (40, 50)


@pytest.fixture
def parameter(tmp_path: Path) -> nn.Parameter:
    heap = BareMemory(tmp_path)
    memory = heap.room(4 * 40 * 50)
    view = View(torch.float32, SHAPE, (50, 1), 0)
    torch.manual_seed(3)
    call = Made(
        function=torch.Tensor.normal_, args=(Reference(view),), kwargs={}, around=Around.now()
    )
    made = nn.Parameter(view.within(memory))
    put_off(made, Undrawn(Recipe(memory.numel(), (call,)), view, memory, heap))
    return made


def expected() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.empty(SHAPE).normal_()


USES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "a sum": lambda p: p + 0,
    "its data": lambda p: p.data,
    "a product": lambda p: nn.functional.linear(torch.eye(50), p).T.detach(),
    "a copy": lambda p: torch.empty(SHAPE).copy_(p.detach()),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "an address": lambda p: torch.tensor((ctypes.c_float * 2000).from_address(p.data_ptr())).view(
        SHAPE
    ),
    "a deep copy": lambda p: copy.deepcopy(p).detach(),
    "a pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
    "a vmap": lambda p: torch.vmap(lambda x: x * p)(torch.ones(1))[0].detach(),
    "a list": lambda p: torch.tensor(p.tolist()),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_one_gets_its_values(parameter: nn.Parameter, use: str) -> None:
    found = USES[use](parameter)
    assert torch.equal(found, expected())
    assert type(parameter) is nn.Parameter
    assert undrawn_of(parameter) is None


def test_a_copy_is_a_plain_parameter(parameter: nn.Parameter) -> None:
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    assert type(parameter) is nn.Parameter


def test_what_is_put_in_its_place_counts(parameter: nn.Parameter) -> None:
    parameter.data = torch.full(SHAPE, 2.0)
    assert undrawn_of(parameter) is None
    assert torch.equal(parameter, torch.full(SHAPE, 2.0))


def test_what_goes_past_pytorch_finds_no_number(parameter: nn.Parameter) -> None:
    other = nn.Parameter(torch.ones(SHAPE))
    other.data = parameter
    assert bool(other.isnan().all())


def test_after_an_error_it_still_says_when_it_is_used(parameter: nn.Parameter) -> None:
    def fail() -> None:
        with revealed([parameter]):
            assert type(parameter) is nn.Parameter
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert undrawn_of(parameter) is not None
    assert torch.equal(parameter, expected())


def test_who_asks_about_it_draws_nothing(parameter: nn.Parameter) -> None:
    assert parameter.shape == SHAPE
    assert parameter.stride() == (50, 1)
    assert parameter.is_contiguous()
    assert parameter.numel() == 2000
    assert parameter.nbytes == 8000
    assert parameter.dtype is torch.float32
    parameter.requires_grad_(requires_grad=False)
    torch.optim.AdamW([parameter])
    assert undrawn_of(parameter) is not None


def test_drawing_shifts_nobody_elses_numbers(parameter: nn.Parameter) -> None:
    torch.manual_seed(9)
    parameter.sum()
    found = torch.rand(2)
    torch.manual_seed(9)
    assert torch.equal(found, torch.rand(2))


def test_values_may_go_elsewhere(parameter: nn.Parameter) -> None:
    values = undrawn_of(parameter)
    assert values is not None
    there = torch.empty(SHAPE)
    values.write_to(there)
    assert torch.equal(there, expected())
    parameter.data = there
    reveal([parameter, nn.Parameter(torch.ones(2))])
    assert parameter.data_ptr() == there.data_ptr()
    assert torch.equal(parameter, expected())


def test_a_disk_that_is_full_is_told_and_nothing_is_lost(
    parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"room for 8,192 more bytes of the model .*--home"):
            parameter.sum()
    assert undrawn_of(parameter) is not None
    assert torch.equal(parameter, expected())

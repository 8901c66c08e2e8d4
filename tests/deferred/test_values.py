"""Parameters whose values are drawn when somebody needs them."""

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

from onefold.core.flat import lay_out
from onefold.deferred.access import deferred_of
from onefold.deferred.values import DeferredValues, Recipe, RecordedCall, Reference, View, defer
from onefold.placement.distribute import values_of_entry
from onefold.system.file_memory import SparseAllocator
from tests.tables import for_each

SHAPE = (40, 50)


def undrawn(folder: Path) -> nn.Parameter:
    allocator = SparseAllocator(folder)
    memory = allocator.room(4 * 40 * 50)
    view = View(torch.float32, SHAPE, (50, 1), 0)
    torch.manual_seed(3)
    call = RecordedCall(
        function=torch.Tensor.normal_,
        args=(Reference(view),),
        kwargs={},
        state=torch.get_rng_state(),
    )
    made = nn.Parameter(view.within(memory))
    defer(made, DeferredValues(Recipe(memory.numel(), (call,)), view, memory, allocator))
    return made


@pytest.fixture
def parameter(tmp_path: Path) -> nn.Parameter:
    return undrawn(tmp_path)


def expected() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.empty(SHAPE).normal_()


@for_each(
    "use",
    [
        lambda p: p + 0,
        lambda p: p.data,
        lambda p: nn.functional.linear(torch.eye(50), p).T.detach(),
        lambda p: torch.empty(SHAPE).copy_(p.detach()),
        lambda p: torch.from_numpy(p.detach().numpy()),
        lambda p: torch.tensor((ctypes.c_float * 2000).from_address(p.data_ptr())).view(SHAPE),
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)).detach(),
        lambda p: torch.vmap(lambda x: x * p)(torch.ones(1))[0].detach(),
        lambda p: torch.tensor(p.tolist()),
    ],
)
def test_who_uses_one_gets_its_values(use: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    parameter = undrawn(tmp_path)
    torch.manual_seed(9)
    found, drawn = use(parameter), torch.rand(2)
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(2))
    assert torch.equal(found, expected())
    assert type(parameter) is nn.Parameter
    assert type(found) in (torch.Tensor, nn.Parameter)
    assert deferred_of(parameter) is None


def test_what_is_put_in_its_place_counts(parameter: nn.Parameter) -> None:
    other = nn.Parameter(torch.ones(SHAPE))
    other.data = parameter
    assert bool(other.isnan().all())  # what goes past PyTorch finds no number
    parameter.data = torch.full(SHAPE, 2.0)
    assert deferred_of(parameter) is None
    assert torch.equal(parameter, torch.full(SHAPE, 2.0))


def test_who_asks_about_it_draws_nothing(parameter: nn.Parameter) -> None:
    assert (parameter.shape, parameter.stride(), parameter.dtype) == (SHAPE, (50, 1), torch.float32)
    assert parameter.is_contiguous()
    assert parameter.nbytes == 8000
    parameter.requires_grad_(requires_grad=False)  # type: ignore[call-arg]
    torch.optim.AdamW([parameter])
    assert deferred_of(parameter) is not None


def test_a_full_disk_is_told(parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OSError, match=r"cannot get 8,192 more bytes for the model .*--offload-dir"
        ):
            parameter.sum()
    assert deferred_of(parameter) is not None
    assert torch.equal(parameter, expected())


STRIDED = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)


class Drawn:
    """Values that are drawn when they are needed."""

    def write_to(self, view: torch.Tensor) -> None:
        view.copy_(STRIDED)


@for_each("value", [STRIDED, STRIDED.contiguous(), Drawn()])
def test_owners_are_given_them_in_the_order_of_the_layout(value: torch.Tensor | Drawn) -> None:
    found = values_of_entry(value, lay_out({"before": torch.zeros(3), "it": STRIDED}), 1)
    assert torch.equal(found, STRIDED.as_strided((24,), (1,)))

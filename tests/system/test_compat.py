"""The names that PyTorch keeps to itself: each is still there, and does what onefold needs of it.

Where one of these fails with a newer PyTorch, its message says what would break.
"""

from typing import Any

import pytest
import torch
from torch import nn

from onefold.system import compat, internals


def test_backward_hooks_are_hidden_for_a_while() -> None:
    """Or a line of devices would have PyTorch call them with tensors that have no values."""
    layer, called = nn.Linear(2, 2), []
    layer.register_full_backward_hook(lambda *_: called.append("hook"))
    layer.register_full_backward_pre_hook(lambda *_: called.append("before"))
    assert internals.has_backward_hooks(layer)
    x = torch.ones(1, 2, requires_grad=True)
    with internals.hide_backward_hooks(layer):
        assert not internals.has_backward_hooks(layer)
        layer(x).sum().backward()
    assert called == []
    layer(x).sum().backward()
    assert called == ["before", "hook"]


def test_inference_mode_is_left_and_entered_again() -> None:
    """Or what is made under it for later could not be written to."""
    with torch.inference_mode():
        with compat.CallModes.inference(False):
            assert not torch.ones(1).is_inference()
        assert torch.ones(1).is_inference()


def test_differentiation_is_seen() -> None:
    """Or a loss that differentiates past a cut of a line of devices would have other gradients."""
    seen: list[tuple[int, int]] = []
    x = torch.ones(2, requires_grad=True)
    with internals.watch_differentiation(lambda outputs, by: seen.append((len(outputs), len(by)))):
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    x.sum().backward()
    assert seen == [(1, 1), (1, 0)]


def test_kernels_that_repeat_their_bits_can_be_chosen_and_put_back() -> None:
    """Or bits would depend on which algorithm was the fastest at the moment."""
    before = internals.KernelSettings()
    assert not torch.are_deterministic_algorithms_enabled()
    module: Any = torch.utils.deterministic
    fill = module.fill_uninitialized_memory
    internals.KernelSettings.repeat_bits()
    assert torch.are_deterministic_algorithms_enabled()
    assert not module.fill_uninitialized_memory
    assert not torch.backends.cudnn.benchmark
    before.put_back()
    assert not torch.are_deterministic_algorithms_enabled()
    assert module.fill_uninitialized_memory == fill


def test_tables_of_a_module_are_its_own() -> None:
    """Or a parameter or buffer that was replaced would not be seen, and trained by nobody."""
    layer = nn.BatchNorm1d(2)
    assert internals.parameters_of(layer)["weight"] is layer.weight
    assert internals.children_of(nn.Sequential(layer))["0"] is layer
    internals.buffers_of(layer)["running_mean"] = torch.ones(2)
    assert layer.get_buffer("running_mean").tolist() == [1, 1]


def test_fake_tensors_have_the_form_of_a_result_and_no_values() -> None:
    """Or later devices of a pipeline would not follow a loss to their own stages."""
    x = compat.FakeTensor(
        compat.FakeTensorMode(), torch.empty(3, 4, device="meta"), torch.device("cpu")
    )
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        product = x @ x.T
    assert (product.shape, product.dtype, product.device.type) == ((3, 3), torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        product.sum().item()


def test_an_optimizer_declares_every_table_of_hooks_that_it_makes() -> None:
    """Or one that wraps another would lack a table, and fail when it steps or is saved."""
    made = vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    tables = {name for name in made if name.endswith("hooks")}
    assert len(tables) > 4
    bare = torch.optim.SGD.__new__(torch.optim.SGD)
    internals.complete_hooks(bare)
    assert vars(bare).keys() == tables

"""Compiled models: the code for a shape depends on that shape alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onefold.engine.kernels import repeatable_kernels
from tests.small import Batch, bits, line, make_trainer, points, square

SYMBOLIC: list[bool] = []


def recorded(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that notes whether it was given shapes that vary."""
    sizes = [size for each in inputs if isinstance(each, torch.Tensor) for size in each.shape]
    SYMBOLIC.append(any(isinstance(size, torch.SymInt) for size in (*inputs, *sizes)))
    return graph.forward


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    SYMBOLIC.clear()
    yield
    torch._dynamo.reset()


def by_function() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    return torch.compile(line(), backend=recorded), square


class Own(nn.Module):
    """Not one of PyTorch's, which it does not compile by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(inputs).tanh()


def in_place() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    model = Own()
    model.compile(backend=recorded)
    return model, square


def the_loss() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    return line(), torch.compile(square, backend=recorded)


def called_by_the_loss() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    compiled = torch.compile(square, backend=recorded)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return compiled(model, batch)

    return line(), loss


def an_attribute() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    model = line()
    model.activation = torch.compile(torch.tanh, backend=recorded)
    return model, lambda m, b: square(lambda x: m.activation(m(x)), b)


WAYS = [by_function, in_place, the_loss, called_by_the_loss, an_attribute]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_shapes_are_fixed_however_many_there_are(
    way: Callable[[], tuple[nn.Module, Callable[..., torch.Tensor]]],
) -> None:
    """After a second shape, PyTorch would make code for shapes that vary."""
    model, loss = way()
    trainer = make_trainer(model, loss, shards=2)
    for samples in (9, 8, 15, 20, 31, 33, 40, 43, 47, 50, 60):  # more than PyTorch's own limit
        trainer.step(points(samples))
    assert len(SYMBOLIC) > 10
    assert not any(SYMBOLIC)


def test_a_model_that_is_compiled_for_shapes_that_vary_is_refused() -> None:
    for model in (
        torch.compile(line(), backend=recorded, dynamic=True),
        nn.Sequential(torch.compile(line(), backend=recorded, dynamic=True)),
    ):
        with pytest.raises(ValueError, match=r"is compiled with dynamic=True: its bits would"):
            make_trainer(model)
    compiled = torch.compile(square, backend=recorded, dynamic=True)
    with pytest.raises(ValueError, match=r"^the loss is compiled with dynamic=True"):
        make_trainer(line(), compiled)


def test_the_compilers_own_settings_are_put_back() -> None:
    from torch._dynamo import config
    from torch._inductor import config as inductor

    before = config.automatic_dynamic_shapes, config.recompile_limit, inductor.deterministic
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(inductor.deterministic)
        return square(model, batch)

    make_trainer(torch.compile(line(), backend=recorded), loss).step(points(8))
    assert seen == [True] * 4
    after = config.automatic_dynamic_shapes, config.recompile_limit, inductor.deterministic
    assert after == before


def test_the_callers_choice_of_kernels_is_put_back() -> None:
    with repeatable_kernels(deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with repeatable_kernels(deterministic=False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_scripted_model_is_run_as_it_is_written(devices: int) -> None:
    plain = nn.Sequential(line(), nn.Tanh())
    scripted = torch.jit.script(nn.Sequential(line(), nn.Tanh()))
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(torch._C._get_graph_executor_optimize())
        return square(model, batch)

    for model in (plain, scripted):
        trainer = make_trainer(model, loss, devices=devices)
        for samples in (8, 9, 5):
            trainer.step(points(samples))
    assert not any(seen[len(seen) // 2 :])
    assert list(bits(plain).values()) == list(bits(scripted).values())

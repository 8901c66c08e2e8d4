"""Compiled models: the code for a shape depends on that shape alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

SYMBOLIC: list[bool] = []

# Of the compiler of PyTorch 2.11.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
)


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


Made = tuple[nn.Module, Callable[..., torch.Tensor]]


class Own(nn.Module):
    """Not one of PyTorch's, which it does not compile by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(inputs).tanh()


def in_place() -> Made:
    model = Own()
    model.compile(backend=recorded)
    return model, square


def called_by_the_loss() -> Made:
    compiled = torch.compile(square, backend=recorded)
    return line(), lambda model, batch: compiled(model, batch)


def by_function() -> Made:
    compiled: Any = torch.compile(line(), backend=recorded)
    return compiled, square


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@for_each("way", [by_function, in_place, called_by_the_loss])
def test_shapes_are_fixed_however_many_there_are(way: Callable[[], Made]) -> None:
    """After a second shape, PyTorch would make code for shapes that vary."""
    torch._dynamo.reset()
    SYMBOLIC.clear()
    model, loss = way()
    trainer = make_trainer(model, loss, shards=2)
    for samples in (9, 8, 15, 20, 31, 33, 40, 43, 47):  # more than PyTorch's own limit
        trainer.step(points(samples))
    assert len(SYMBOLIC) > 10
    assert not any(SYMBOLIC)


def test_settings_of_compiler_and_kernels_are_put_back() -> None:
    from torch._dynamo import config
    from torch._inductor import config as inductor

    def settings() -> tuple[object, ...]:
        chosen = config.automatic_dynamic_shapes, config.recompile_limit, inductor.deterministic
        return *chosen, torch.are_deterministic_algorithms_enabled()

    before, seen = settings(), []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append((inductor.deterministic, torch.are_deterministic_algorithms_enabled()))
        return square(model, batch)

    model: Any = torch.compile(line(), backend=recorded)
    make_trainer(model, loss).step(points(8))
    assert set(seen) == {(True, True)}
    assert settings() == before
    seen.clear()
    make_trainer(line(), loss, deterministic=False).step(points(8))
    assert not any(kernels for _, kernels in seen)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@for_each("devices", [1, 2])
def test_a_scripted_model_is_run_as_it_is_written(devices: int) -> None:
    models = nn.Sequential(line(), nn.Tanh()), torch.jit.script(nn.Sequential(line(), nn.Tanh()))
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(torch._C._get_graph_executor_optimize())
        return square(model, batch)

    for model in models:
        trainer = make_trainer(model, loss, devices=devices)
        for samples in (8, 9, 5):
            trainer.step(points(samples))
    assert not any(seen[len(seen) // 2 :])
    assert list(bits(models[0]).values()) == list(bits(models[1]).values())

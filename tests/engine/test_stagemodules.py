"""Where models are cut, and when a stage's gradients are said to be complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onefold.core.stages import ROOT
from onefold.engine.stagemodules import StageModules, cut_by_itself
from tests.tables import for_each


class Skips(nn.Module):
    """An encoder whose steps the decoder sees again, two towers, and a head tied to the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.side = nn.Linear(4, 4)
        self.up = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.stem.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.again = False
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        seen = []
        for layer in self.down:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
            seen.append(x)
        y = self.side(seen[0])
        for layer in self.up:
            x = layer(x + seen.pop()).tanh()
        if self.again:
            x = self.down[1](x)
        return self.head(x + y) * self.scale

    @property
    def stages(self) -> list[nn.Module]:
        return [self.stem, *self.down, self.side, *self.up, self.head]


def run(
    model: nn.Module,
    stages: Sequence[nn.Module],
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
) -> tuple[list[int], dict[int, list[torch.Tensor | None]]]:
    """The stages in the order in which they were complete, and their gradients at that time."""
    torch.manual_seed(0)
    modules = StageModules(model, stages, dict(model.named_parameters()))
    parameters = list(model.parameters())
    order: list[int] = []
    gradients = {}

    def done(complete: Sequence[int]) -> None:
        for stage in complete:
            if stage not in order:
                order.append(stage)
                numbers = modules.stages.entries[stage]
                grads = [parameters[number].grad for number in numbers]
                gradients[stage] = [None if g is None else g.clone() for g in grads]

    with modules.watched(done) as begin:
        total = loss(model(torch.randn(3, 4).requires_grad_()))
        begin()
        total.backward()
    for stage, found in gradients.items():
        for number, gradient in zip(modules.stages.entries[stage], found, strict=True):
            final = parameters[number].grad
            assert (gradient is None) == (final is None)
            assert gradient is None or final is None or torch.equal(gradient, final)
    assert not any(part._forward_hooks for part in model.modules())
    return order, gradients


@for_each("reentrant", [None, False, True])
def test_stages_are_complete_from_the_last_to_the_first(reentrant: bool | None) -> None:
    model = Skips()
    model.reentrant = reentrant
    order, gradients = run(model, model.stages)
    assert order == sorted(order, reverse=True)
    # Whatever comes after the first stage, whose own end nobody is told of.
    assert set(order) >= {5, 6, 7, 8, 9}
    if reentrant is not True:
        assert order == [9, 8, 7, 6, 5, 4, 3, 2]
    assert all(g is not None for n in (6, 7, 8) for g in gradients[n])


def test_a_stage_that_is_called_twice_counts_from_its_first_call() -> None:
    model = Skips()
    model.again = True
    order, _ = run(model, model.stages)
    assert order.index(3) > order.index(6)
    assert set(order) == set(range(2, 10))


def test_a_stage_without_gradients_is_complete_as_well() -> None:
    model = Skips()
    model.up[1].requires_grad_(False)
    order, gradients = run(model, model.stages)
    assert 7 in order
    assert gradients[7] == [None, None]


def test_a_gradient_that_the_loss_asks_for_completes_nothing() -> None:
    model = Skips()

    def penalty(output: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(
            output.sum(), [model.down[0].weight], create_graph=True, retain_graph=True
        )
        return output.sum() + slope.square().sum()

    order, _ = run(model, model.stages, penalty)
    assert order == [9, 8, 7, 6, 5, 4, 3, 2]


def test_what_lies_in_no_stage_or_in_two_is_the_root() -> None:
    model = Skips()
    names = list(dict(model.named_parameters()))
    stages = StageModules(model, model.stages, dict(model.named_parameters())).stages
    root = {names[number] for number in stages.entries[ROOT]}
    assert root == {"stem.weight", "scale"}
    assert stages.names[:3] == ("the rest of the model", "stem", "down.0")


def test_a_model_is_cut_at_the_items_of_its_lists() -> None:
    model = Skips()
    assert cut_by_itself(model) == model.stages
    block = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert cut_by_itself(nn.TransformerEncoderLayer(4, 2)) != []
    assert cut_by_itself(block) == [block["mlp"][0]]  # type: ignore[index]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 3, enable_nested_tensor=False)
    assert cut_by_itself(encoder) == list(encoder.layers)
    whole = nn.Linear(2, 2)
    assert cut_by_itself(whole) == [whole]


def test_no_module_is_in_two_stages_of_those_that_are_found() -> None:
    model = nn.Module()
    model.first = nn.Linear(2, 2)
    model.layers = nn.ModuleList([model.first, nn.Sequential(model.first, nn.Linear(2, 2))])
    found = cut_by_itself(model)
    assert found == [model.first, model.layers[1][1]]  # type: ignore[index]
    StageModules(model, found, dict(model.named_parameters()))


@for_each(
    ("stages", "words"),
    [
        (lambda m: [m.stem, "head"], "got 'head' as number 1"),
        (lambda m: [nn.Linear(2, 2)], r"stage 0 \(Linear\) is no part of the model"),
        (lambda m: [m.stem, m.stem], r"stage 1 \(stem\) and stage 0 \(stem\) both hold stem"),
        (lambda m: [m.down, m.down[1]], r"stage 1 \(down.1\) and stage 0 \(down\) both hold"),
    ],
)
def test_stages_that_cannot_be_used_are_refused(
    stages: Callable[[Skips], list[nn.Module]], words: str
) -> None:
    model = Skips()
    with pytest.raises((TypeError, ValueError), match=words):
        StageModules(model, stages(model), dict(model.named_parameters()))

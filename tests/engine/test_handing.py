"""What is handed over while backward runs, and what at its end."""

from __future__ import annotations

import torch
from torch import nn

from onefold.engine.replica import Handing
from onefold.engine.shardtask import ShardPiece
from onefold.engine.stagemodules import StageModules
from onefold.exchange.carrier import Gift


class Early(nn.Module):
    """Uses the second layer's weights before the first layer runs, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.early = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.early:
            x = x @ self.layers[1].weight
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def hand_over(
    model: nn.Module, modules: StageModules, piece: ShardPiece
) -> tuple[Handing, list[Gift]]:
    """Run the model once; what was given, in its order, and by whom."""
    gifts: list[Gift] = []
    parameters = list(model.parameters())

    def take(stage: int) -> list[torch.Tensor | None]:
        found = []
        for number in modules.stages.entries[stage]:
            found.append(parameters[number].grad)
            parameters[number].grad = None
        return found

    handing = Handing(modules, piece, take, gifts.append)
    with handing.watched():
        total = model(torch.ones(2, 3)).square().sum()
        handing.begin_backward()
        total.backward()
        before = len(gifts)
    handing.finish()
    assert before < len(gifts)
    return handing, gifts


def expected(model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def modules_of(model: Early) -> StageModules:
    return StageModules(model, list(model.layers), dict(model.named_parameters()))


def test_each_stage_is_given_once_with_all_of_its_gradients() -> None:
    model = Early()
    model.early = False
    model.layers[1].bias.requires_grad_(False)
    modules, wanted = modules_of(model), expected(model)
    handing, gifts = hand_over(model, modules, ShardPiece(4, 0, 2, 2))
    assert [gift.stage for gift in gifts] == [3, 2, 1, 0]
    assert all(gift.shard == 4 and gift.last for gift in gifts)
    assert not handing.is_late
    for gift in gifts:
        for number, given in zip(modules.stages.entries[gift.stage], gift.gradients, strict=True):
            assert handing.given[number] == (given is not None) == (wanted[number] is not None)
            assert given is None or torch.equal(given, wanted[number])  # type: ignore[arg-type]


def test_only_the_last_piece_of_a_shard_is_the_last() -> None:
    model = Early()
    for piece, last in ((ShardPiece(0, 0, 2, 5), False), (ShardPiece(0, 4, 5, 5), True)):
        _, gifts = hand_over(model, modules_of(model), piece)
        assert [gift.last for gift in gifts] == [last] * 4


def test_what_came_late_is_given_last_from_then_on() -> None:
    model = Early()
    modules, wanted = modules_of(model), expected(model)
    handing, _ = hand_over(model, modules, ShardPiece(0, 0, 2, 2))
    assert handing.is_late
    handing, gifts = hand_over(model, modules, ShardPiece(0, 0, 2, 2))
    assert not handing.is_late
    assert [gift.stage for gift in gifts] == [3, 2, 1, 0]
    found = {
        number: gradient
        for gift in gifts
        for number, gradient in zip(modules.stages.entries[gift.stage], gift.gradients, strict=True)
    }
    for number, gradient in enumerate(wanted):
        assert torch.equal(found[number], gradient)  # type: ignore[arg-type]

"""Where models are cut into stages, and that gradients of each are complete when they are taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.shard.model_parts import StageModules, cut_by_itself
from tests.placement.partitioned import run, samples, squared
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
        self.again = self.early = False
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.early:  # before its layer runs
            x = x @ self.up[1].weight
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


def penalized(model: Any, batch: torch.Tensor) -> torch.Tensor:
    outputs = model(batch)
    (slope,) = torch.autograd.grad(outputs.sum(), [model.down[0].weight], create_graph=True)
    return outputs.square().mean(dim=1) + slope.square().sum()  # type: ignore[no-any-return]


def trained(change: Callable[[Skips], object], loss: Any, settings: dict[str, Any]) -> str:
    torch.manual_seed(3)
    model = Skips()
    change(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=4, threads=1, stages=model.stages, **settings
    )
    for _ in range(3):
        trainer.step(samples(9, 4))
    assert not any(part._forward_hooks for part in model.modules())
    return trainer.fingerprint()


@for_each(
    ("change", "loss", "settings"),
    [
        (lambda m: None, squared, {}),
        (lambda m: setattr(m, "reentrant", False), squared, {}),
        (lambda m: setattr(m, "reentrant", True), squared, {}),
        (lambda m: setattr(m, "again", True), squared, {}),
        (lambda m: setattr(m, "early", True), squared, {"microbatch": 2}),
        (lambda m: m.up[1].requires_grad_(False), squared, {}),
        (lambda m: None, penalized, {}),
    ],
)
def test_no_gradient_of_a_stage_is_lost_or_taken_too_early(
    change: Callable[[Skips], object], loss: Any, settings: dict[str, Any]
) -> None:
    alone = trained(change, loss, settings)
    assert run(trained, change, loss, settings) == alone


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
    twice = nn.Module()
    twice.first = nn.Linear(2, 2)
    twice.layers = nn.ModuleList([twice.first, nn.Sequential(twice.first, nn.Linear(2, 2))])
    assert cut_by_itself(twice) == [twice.first, twice.layers[1][1]]  # type: ignore[index]


@for_each(
    ("stages", "words"),
    [
        (lambda m: [m.stem, "head"], "got 'head' as number 1"),
        (lambda m: [nn.Linear(2, 2)], r"stage 0 \(Linear\) is no part of the model"),
        (lambda m: [m.stem, m.stem], r"stage 1 \(stem\) and stage 0 \(stem\) both hold stem"),
        (lambda m: [m.down, m.down[1]], r"stage 1 \(down.1\) and stage 0 \(down\) both hold"),
    ],
)
def test_unusable_stages_are_refused(stages: Callable[[Skips], list[Any]], words: str) -> None:
    model = Skips()
    with pytest.raises((TypeError, ValueError), match=words):
        StageModules(model, stages(model), dict(model.named_parameters()))

"""Modes are the user's, the parts of a model stay what they were, and state beside the model is not
changed by shards."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import StateError
from onefold.shard.stage_modules import StageModules, cut_by_itself
from tests.placement.partitioned import run, samples, squared
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 2])


def model() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())


def data() -> TensorDataset:
    return TensorDataset(*points(8))


def test_a_model_in_evaluation_mode_trains_as_it_is(caplog: Any) -> None:
    ours, theirs = model().eval(), model().eval()
    trainer, optimizer = make_trainer(ours, shards=1), sgd(theirs)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(3):
            trainer.step(points(8))
            optimizer.zero_grad()
            square(theirs, points(8)).mean().backward()
            optimizer.step()
    assert bits(ours) == bits(theirs)
    assert len([m for m in caplog.messages if "the model is in evaluation mode" in m]) == 1


def test_what_a_loss_changes_of_modes_and_frozen_parameters_is_its_shards_alone() -> None:
    def switching(module: nn.Module, batch: Batch) -> torch.Tensor:
        value = square(module, batch)
        module.eval()
        return value

    def freezing(module: nn.Sequential, batch: Batch) -> torch.Tensor:
        value = switching(module, batch)
        module[2].get_parameter("bias").requires_grad_(False)
        return value

    def failing(module: nn.Sequential, batch: Batch) -> torch.Tensor:
        freezing(module, batch)
        raise ArithmeticError

    def trained(loss: Callable[..., torch.Tensor], devices: int) -> dict[str, bytes]:
        module = model()
        trainer = make_trainer(module, {"plain": loss, "fails": failing}, devices=devices)
        for _ in range(2):
            trainer.step(points(8), loss="plain")
            with pytest.raises(ArithmeticError):
                trainer.step(points(8), loss="fails")
        assert all(part.training for part in module.modules())
        assert module[2].get_parameter("bias").requires_grad
        return bits(module)

    assert trained(switching, 1) == trained(switching, 2) == trained(square, 2)
    assert trained(freezing, 1) == trained(freezing, 2)


def tied() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), line())
    made[1].weight = made[0].weight
    made[1].bias.requires_grad_(False)
    return made


@both
@for_each(
    ("change", "words"),
    [
        (lambda m: m.append(nn.Linear(1, 1)), r"^parameter 3\.weight of the model was added"),
        (lambda m: m.register_buffer("new", torch.ones(1)), "^buffer new of the model was added"),
        (
            lambda m: m.insert(0, nn.Linear(3, 3)),
            "^parameter 0.weight (of the model was|was moved)",
        ),
        (lambda m: setattr(m, "1", nn.Linear(3, 3)), r"^parameter 1\.weight (of the|was moved)"),
        (lambda m: m.pop(1), r"^parameter 1\.\w+ of the model was added, removed"),
        (lambda m: setattr(m, "extra", nn.BatchNorm1d(3, affine=False)), "was added, removed"),
    ],
)
def test_other_parts_are_refused(change: Callable[..., object], words: str, devices: int) -> None:
    module = tied()
    trainer = make_trainer(module, devices=devices)
    trainer.step(points(8))
    change(module)
    for call in (lambda: trainer.step(points(8)), lambda: trainer.save("nowhere")):
        with pytest.raises(ValueError, match=words):
            call()


@both
def test_statistics_and_teachers_that_the_loss_changes_are_refused(devices: int) -> None:
    second, teacher = nn.BatchNorm1d(3), line()

    def normed(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, (second(batch[0]), batch[1]))

    def follows(model: nn.Module) -> None:
        with torch.no_grad():
            teacher.weight.lerp_(model.get_parameter("weight"), 0.1)

    def before(model: nn.Module, batch: Batch) -> torch.Tensor:
        follows(model)
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)

    def after(model: nn.Module, batch: Batch) -> torch.Tensor:
        value = (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)
        follows(model)
        return value

    for loss, words in (
        (normed, r"step 1, the loss: a module of BatchNorm1d is not part .* running_mean"),
        (before, r"a module of Linear is not part .* parameter weight"),
        (after, r"a module of Linear is not part .* parameter weight"),
    ):
        with pytest.raises(StateError, match=words):
            make_trainer(line(), loss, devices=devices).step(points(8))
    with pytest.raises(StateError, match=r"first batch of an evaluation: .* buffer running_mean"):
        make_trainer(devices=devices).evaluate(
            lambda m, b: {"x": second(b[0]).mean(dim=1)}, data(), batch_size=8
        )


@both
def test_a_teacher_that_does_not_learn_and_a_copy_of_the_model_are_fine(devices: int) -> None:
    """A copy of the model with statistics of its own, as in meta-learning."""
    teacher = model().eval()
    before = bits(teacher)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            shift = copy.deepcopy(model)(batch[0]).mean()
        return square(model, batch) + shift + teacher(batch[0]).detach().square().mean(dim=1)

    trainer = make_trainer(model(), loss, devices=devices)
    for _ in range(5):
        trainer.step(points(8))
    assert bits(teacher) == before


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
            x = x @ self.up[1].get_parameter("weight")
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
    return outputs.square().mean(dim=1) + slope.square().sum()


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
        (lambda m: [nn.Linear(2, 2)], r"stage 0 \(Linear\) is not part of the model"),
        (lambda m: [m.stem, m.stem], r"stage 1 \(stem\) and stage 0 \(stem\) both contain stem"),
        (lambda m: [m.down, m.down[1]], r"stage 1 \(down.1\) and stage 0 \(down\) both contain"),
    ],
)
def test_unusable_stages_are_refused(stages: Callable[[Skips], list[Any]], words: str) -> None:
    model = Skips()
    with pytest.raises((TypeError, ValueError), match=words):
        StageModules(model, stages(model), dict(model.named_parameters()))

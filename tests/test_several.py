"""Several models, optimizers and losses in one Trainer: as in a plain loop, with equal bits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import DisagreementError
from onefold.launcher.environment import current_context
from onefold.testing import simulate
from tests.small import Batch, bits, make_trainer, points
from tests.tables import for_each

Models = Mapping[str, nn.Module]
TURNS = ("discriminator", "discriminator", "generator")
"""The losses of a round."""


class Generator(nn.Module):
    """Batch norm and dropout, and a layer of several segments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 1100), nn.BatchNorm1d(1100)
        self.last = nn.Linear(1100, 2)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.norm(self.first(noise)).relu(), 0.1, self.training))


def of_discriminator(models: Models, batch: Batch) -> torch.Tensor:
    real, noise = batch
    fake = models["generator"](noise)  # not detached: its gradients must be dropped
    judge = models["discriminator"]
    return (F.softplus(-judge(real)) + F.softplus(judge(fake))).squeeze(1)


def of_generator(models: Models, batch: Batch) -> torch.Tensor:
    return F.softplus(-models["discriminator"](models["generator"](batch[1]))).squeeze(1)


LOSSES = {"discriminator": of_discriminator, "generator": of_generator}


def made() -> tuple[dict[str, nn.Module], dict[str, Any]]:
    torch.manual_seed(3)
    judge = nn.Sequential(nn.Linear(2, 1050), nn.LeakyReLU(0.2), nn.Linear(1050, 1))
    models = {"generator": Generator(), "discriminator": judge}
    return models, {
        "generator": torch.optim.Adam(models["generator"].parameters(), lr=1e-3),
        "discriminator": torch.optim.SGD(judge.parameters(), lr=1e-2, momentum=0.9),
    }


def scheduled(optimizers: Mapping[str, Any], *names: str) -> dict[str, Any]:
    found = {
        "generator": lrs.StepLR(optimizers["generator"], 2, gamma=0.5),
        "discriminator": lrs.ExponentialLR(optimizers["discriminator"], 0.9),
    }
    return {name: found[name] for name in names or found}


def trainer_of(devices: int | None = 1, *names: str, **choices: Any) -> onefold.Trainer:
    """With schedulers of these names."""
    models, optimizers = made()
    choices = {"model": models, "optimizer": optimizers, "loss": LOSSES, **choices}
    if names:
        choices["scheduler"] = scheduled(choices["optimizer"], *names)
    return make_trainer(devices=devices, **choices)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(30, 2, generator=generator), torch.randn(30, 4, generator=generator)


DATA = TensorDataset(*batch_of(99))


def train(trainer: onefold.Trainer, first: int, last: int) -> onefold.Trainer:
    """Make some rounds."""
    for number in range(first, last + 1):
        for name in TURNS:
            trainer.step(batch_of(number), name)
    return trainer


def judged(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"x": model(batch[1])[:, 0]}


@for_each(("shards", "close"), [(1, 0.0), (3, 1e-4)])
def test_a_plain_loop_comes_to_the_same(
    shards: int, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scheduler for each optimizer, which follows its steps."""
    monkeypatch.setattr(F, "dropout", lambda values, p, training: values)
    if shards > 1:
        monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x * self.weight + self.bias)
    models, optimizers = made()
    schedulers = scheduled(optimizers)
    trainer = trainer_of(1, *LOSSES, shards=shards)
    for number in range(1, 5):
        for name in TURNS:
            optimizers[name].zero_grad()
            loss = LOSSES[name](models, batch_of(number)).mean()
            loss.backward()
            grads = [p.grad for p in models[name].parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(grads)
            optimizers[name].step()
            schedulers[name].step()
            step = trainer.step(batch_of(number), name)
            assert step.name == name
            assert float(step.grad_norm) == pytest.approx(float(norm))
            assert float(step.loss) == pytest.approx(loss.item())
    theirs = nn.ModuleDict(models).state_dict()
    torch.testing.assert_close(trainer.model.state_dict(), theirs, rtol=close, atol=close / 100)


def all_of_it(devices: int | None, folder: Path, **choices: Any) -> tuple[str, ...]:
    """Train, save in the middle, show the average, score one of the models."""
    trainer = trainer_of(devices, *LOSSES, **choices)
    trainer.average(decay=0.9, after="generator")
    train(trainer, 1, 2).save(folder)
    train(trainer, 3, 4)
    scores = trainer.evaluate(judged, DATA, batch_size=8, model="generator")
    with trainer.averaged():
        averaged = trainer.fingerprint()
    found = trainer.fingerprint(), averaged, scores["x"].hex()
    trainer.close()
    return found


@for_each("choices", [{}, {"precision": "bf16-params"}, {"precision": "fp16", "microbatch": 4}])
def test_the_bits_do_not_depend_on_the_devices(choices: dict[str, Any], tmp_path: Path) -> None:
    found = all_of_it(1, tmp_path / "1", **choices)
    assert found == all_of_it(3, tmp_path / "3", shares=(0, 3, 1), **choices)
    going_on = trainer_of(2, *LOSSES, **choices)
    going_on.average(decay=0.9, after="generator")
    going_on.load(tmp_path / "3")
    assert train(going_on, 3, 4).fingerprint() == found[0]
    with going_on.averaged():
        assert going_on.fingerprint() == found[1] != found[0]
    if not choices:
        for exchange in ("shared", "collective"):
            args = (None, tmp_path / exchange)
            assert simulate(all_of_it, 3, args=args, exchange=exchange) == [found] * 3


def test_functions_are_given_one_model_or_all() -> None:
    trainer = trainer_of(2)
    alone = trainer.evaluate(judged, DATA, batch_size=8, model="generator")
    both = trainer.evaluate(lambda m, batch: judged(m["generator"], batch), DATA, batch_size=8)
    rows = trainer.predict(judged, DATA, batch_size=8, model="generator")["x"]
    assert alone == both == {"x": pytest.approx(rows.double().mean().item())}


def test_devices_that_step_different_losses_are_named() -> None:
    words = "device 1 is computing loss 1 of the Trainer and device 0 loss 0"
    with pytest.raises(DisagreementError, match=words):
        simulate(lambda: trainer_of(None).step(batch_of(1), [*LOSSES][current_context().rank]), 2)


def test_gradients_of_two_losses_are_two_steps_outside_of_a_block() -> None:
    trainer = onefold.Trainer(made()[0], None, LOSSES, shards=2, threads=1)
    batch = batch_of(1)
    numbers = [trainer.gradient(batch, name).number for name in (*LOSSES, "generator")]
    assert numbers == [1, 2, 2]
    with trainer.modifying():
        assert len({trainer.gradient(batch, name).number for name in LOSSES}) == 1


# A teacher, a loss with parameters, two losses of one optimizer


def learned(models: Models, batch: Batch) -> Any:
    """By a criterion with parameters."""
    return models["criterion"](models["net"](batch[0]) - batch[1]).square().mean(1)


def flat(models: Models, batch: Batch) -> Any:
    return models["net"](batch[0]).square().mean(1)


@for_each(("shards", "devices"), [(1, 1), (2, 1), (3, 3)])
def test_losses_may_share_an_optimizer_and_have_parameters(shards: int, devices: int) -> None:
    ours, theirs = (
        nn.ModuleDict({"net": nn.Linear(2, 4), "criterion": nn.Linear(4, 2)}) for _ in "12"
    )
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    losses: Any = {"learned": learned, "flat": flat}
    choices = {"optimizer": optimizers[0], "shards": shards, "devices": devices}
    trainer = make_trainer(dict(ours.items()), losses, **choices)  # type: ignore[arg-type]
    for number, name in enumerate(("learned", "flat", "flat", "learned", "learned")):
        trainer.step(batch_of(number), name)
        optimizers[1].zero_grad()
        losses[name](theirs, batch_of(number)).mean().backward()
        optimizers[1].step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def penalized(models: Models, batch: Batch) -> torch.Tensor:
    """What updates the discriminator as well, in steps of its own."""
    return models["discriminator"](batch[0]).square().squeeze(1)


THREE = {**LOSSES, "penalty": penalized}


def sharing(by: str = "discriminator") -> tuple[dict[str, nn.Module], dict[str, Any]]:
    models, optimizers = made()
    return models, {**optimizers, "penalty": optimizers[by]}


@for_each(("shards", "devices"), [(1, 1), (3, 2)])
def test_several_losses_update_one_of_several_optimizers(
    shards: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As StyleGAN's do; the optimizer of both has one state, and its scheduler follows both."""
    monkeypatch.setattr(F, "dropout", lambda values, p, training: values)
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x * self.weight + self.bias)
    (ours, optimizers), (theirs, plain) = sharing(), sharing()
    schedulers = scheduled(plain)
    choices = {"optimizer": optimizers, "shards": shards, "devices": devices}
    trainer = make_trainer(ours, THREE, scheduler=scheduled(optimizers), **choices)  # type: ignore[arg-type]
    for number, name in enumerate((*TURNS, "penalty", *TURNS, "penalty")):
        plain[name].zero_grad()
        THREE[name](theirs, batch_of(number)).mean().backward()
        plain[name].step()
        schedulers[name if name in schedulers else "discriminator"].step()
        assert trainer.step(batch_of(number), name).name == name
    wanted = nn.ModuleDict(theirs).state_dict()
    torch.testing.assert_close(trainer.model.state_dict(), wanted, rtol=1e-4, atol=1e-6)
    for name in LOSSES:
        assert optimizers[name].param_groups[0]["lr"] == plain[name].param_groups[0]["lr"]


def test_devices_whose_losses_update_others_are_refused() -> None:
    def differ() -> None:
        models, optimizers = sharing([*LOSSES][current_context().rank])
        make_trainer(models, THREE, optimizer=optimizers, devices=None)

    with pytest.raises(DisagreementError, match=r"SGD \(discriminator, penalty\)"):
        simulate(differ, 2)


# What is refused


MODELS, OPTIMIZERS = made()
ONE, OPTIMIZER = MODELS["generator"], OPTIMIZERS["generator"]
SCHEDULE = scheduled(OPTIMIZERS)["generator"]
TWICE = torch.optim.SGD(MODELS["discriminator"].parameters())
ALONE = {"model": ONE, "optimizer": OPTIMIZER, "loss": lambda m, batch: m(batch).mean(1)}


@for_each(
    ("changes", "words"),
    [
        ({"optimizer": {"generator": OPTIMIZER}}, "same names, .* optimizers are 'generator'"),
        ({"model": {}}, "at least one model, but got none"),
        ({"model": {"a.b": ONE}}, r"model\['a.b'\]: choose another name"),
        ({"model": MODELS | {"generator": 3}}, r"model\['generator'\] must be a PyTorch Module"),
        (
            {"optimizer": OPTIMIZERS | {"generator": 3}},
            r"optimizer\['generator'\] must be a PyTorch",
        ),
        ({"loss": LOSSES | {"generator": 3}}, r"loss\['generator'\] must be a function"),
        (
            {"optimizer": OPTIMIZERS | {"generator": TWICE}},
            "is in the optimizers 'discriminator' a",
        ),
        ({"microbatch": "auto"}, "finds the largest microbatch of one loss"),
        (
            {"scheduler": {"critic": SCHEDULE}},
            "scheduler has the name 'critic', but the optimizers are",
        ),
        ({"scheduler": SCHEDULE}, "pass a dict of schedulers with the same names"),
        ({"scheduler": {"discriminator": SCHEDULE}}, "belongs to another optimizer"),
        (
            ALONE | {"scheduler": {"generator": SCHEDULE}},
            "a dict of schedulers, but Trainer has a single optimizer",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(changes: dict[str, Any], words: str) -> None:
    choices = {"model": MODELS, "optimizer": OPTIMIZERS, "loss": LOSSES, **changes}
    with pytest.raises((TypeError, ValueError), match=words):
        make_trainer(**choices)


def test_a_step_names_its_loss() -> None:
    models, optimizers = made()
    trainer = trainer_of(model=models, optimizer=optimizers)
    with pytest.raises(TypeError, match=r"such as trainer.step\(batch, 'discriminator'\)"):
        trainer.step(batch_of(1))
    with pytest.raises(ValueError, match="must be one of 'discriminator', 'generator', but got"):
        trainer.step(batch_of(1), "critic")
    with pytest.raises(RuntimeError, match=r"step\(\) was called by the script"):
        optimizers["generator"].step()
    trainer.average(decay=0.9)
    words = "update_bn runs the model through the loss"
    with pytest.raises(ValueError, match=words), trainer.averaged(update_bn=DATA, batch_size=4):
        raise AssertionError("the block is not entered")
    alone = make_trainer()
    with pytest.raises(TypeError, match="has a single, unnamed loss"):
        alone.step(torch.ones(2, 2), "critic")
    with pytest.raises(TypeError, match="not a dict of models"):
        alone.evaluate(judged, DATA, batch_size=2, model="critic")


# Several optimizers for one loss, such as Muon beside AdamW

INPUTS, ROUNDS = 130, 4


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(INPUTS, 140), nn.Tanh(), nn.Linear(140, 1))


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    flat = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(flat, lr=0.01)]


def sgd_and_adam(model: nn.Module) -> list[Optimizer]:
    """Both by element, so that parameters are cut."""
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)]


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    return [StepLR(optimizers[0], 2, gamma=0.5), ExponentialLR(optimizers[1], 0.9)]


def joined(make: Any, kind: Any = list, **choices: Any) -> Any:
    given = make(model := layers())
    both = [kind(given), kind(schedulers_of(given))]
    losses: Any = {"left": squares} if kind is left_and_right else squares
    choices = {"optimizer": both[0], "scheduler": both[1], "clip_norm": 0.5, **choices}
    return make_trainer(model, losses, **choices)


def left_and_right(two: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("left", "right"), two, strict=True))


def train_all(trainer: Any, first: int = 1, last: int = ROUNDS) -> Any:
    for number in range(first, last + 1):
        inputs, targets = points(12, INPUTS)
        trainer.step((inputs * number, targets))
    return trainer


each_way = for_each("make", [muon_and_adamw, sgd_and_adam])


@each_way
@for_each("kind", [list, tuple, left_and_right])
def test_one_shard_has_the_bits_of_a_plain_loop(make: Any, kind: Any) -> None:
    model = layers()
    optimizers = make(model)
    schedulers = schedulers_of(optimizers)
    for number in range(1, ROUNDS + 1):
        model.zero_grad()
        inputs, targets = points(12, INPUTS)
        squares(model, (inputs * number, targets)).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        for each in (*optimizers, *schedulers):
            each.step()
    assert bits(train_all(joined(make, kind, shards=1)).model) == bits(model)


@each_way
@for_each("precision", [None, "fp16", "bf16-params"])
def test_bits_do_not_depend_on_devices(make: Any, precision: Any, tmp_path: Path) -> None:
    one, two, three = (joined(make, devices=n, precision=precision) for n in (1, 2, 3))
    for each in (one, two, three):
        each.average(decay=0.9)
    train_all(one)
    train_all(two, 1, 2).save(tmp_path)
    three.load(tmp_path)
    found = set()
    for each in (one, train_all(two, 3), train_all(three, 3)):
        with each.averaged():
            averaged = each.fingerprint()
        found.add((each.fingerprint(), averaged))
    assert len(found) == 1


@for_each(
    ("change", "message"),
    [
        (lambda o, s: ([], squares, None), "at least one optimizer, but got none"),
        (lambda o, s: (o, squares, s[:1]), "one scheduler or None for each, but got 1 sched"),
        (lambda o, s: (o[0], squares, s), "a list of schedulers needs a list of opt"),
        (lambda o, s: (o, squares, s[0]), "or a list for a list"),
        (lambda o, s: (o, squares, s[::-1]), "belongs to another optimizer"),
        (
            lambda o, s: (o, {"a": squares, "b": squares}, None),
            "or one loss for all optimizers",
        ),
        (
            lambda o, s: ([*o, o[0]], squares, None),
            "in the optimizers '0' and '2', but only one may",
        ),
        (
            lambda o, s: ([o[0], squares], squares, None),
            r"optimizer\['1'\] must be a PyTorch",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    optimizers = sgd_and_adam(model := layers())
    given, losses, scheduler = change(optimizers, schedulers_of(optimizers))
    with pytest.raises((TypeError, ValueError), match=message):
        onefold.Trainer(model, given, losses, shards=1, scheduler=scheduler)

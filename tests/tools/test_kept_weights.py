"""Weights that a script keeps in memory are saved and restored; others raise when used."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import StateError
from onefold.tools.kept_weights import watch_copies
from tests.checkpoint.inprocess import Life, Runs, Script
from tests.small import points, sgd, square
from tests.tables import some

EPOCHS = 3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "run", monkeypatch)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": square(model, batch)}


def words_of(*tensors: torch.Tensor) -> list[str]:
    return [float(tensor.detach().double().sum()).hex() for tensor in tensors]


class Kept:
    """What a script does with weights, after each step and after each epoch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def after_step(self) -> None: ...

    def after_epoch(self, score: float) -> None: ...

    def at_end(self, trainer: onefold.Trainer) -> object: ...


def script_of(kind: Callable[[nn.Module], Kept]) -> Script:
    def script(life: Life) -> str:
        watch_copies()  # as the process of a run does before its script begins
        model = network()
        kept = kind(model)
        trainer = life.trainer(model, square, optimizer=sgd(model))
        data = TensorDataset(*points(24))
        loader = trainer.loader(data, batch_size=8, shuffle=True)
        for _ in trainer.epochs(EPOCHS):
            for batch in loader:
                trainer.step(batch)
                life.tick()
                kept.after_step()
                life.tick()
            with trainer.modifying(), torch.no_grad():
                model[3].bias.add_(0.1 * trainer.steps)  # type: ignore[index]
            kept.after_epoch(trainer.evaluate(score, data, batch_size=8)["loss"])
            life.tick()
        return f"{kept.at_end(trainer)} {trainer.fingerprint()}"

    return script


def by_deepcopy(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def by_clone(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_detached_clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


class Best(Kept):
    """The best weights so far, as tutorials keep them; they are loaded in the end."""

    def __init__(self, model: nn.Module, take: Any = by_deepcopy) -> None:
        super().__init__(model)
        self.take, self.best, self.least = take, take(model), float("inf")

    def after_epoch(self, score: float) -> None:
        if score < self.least:
            self.least, self.best = score, self.take(self.model)

    def at_end(self, trainer: onefold.Trainer) -> object:
        with trainer.modifying():
            self.model.load_state_dict(self.best)
        return words_of(*self.best.values())


class Mean(Kept):
    """The mean of the weights of all epochs, in a model of the script's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.mean, self.all = network(), list[Any]()

    def after_epoch(self, score: float) -> None:
        self.all.append(copy.deepcopy(self.model.state_dict()))
        each = {name: [one[name] for one in self.all] for name in self.all[0]}
        self.mean.load_state_dict({name: sum(v) / len(v) for name, v in each.items()})

    def at_end(self, trainer: onefold.Trainer) -> object:
        return words_of(*self.mean.parameters())


class Averaged(Kept):
    """`torch.optim.swa_utils.AveragedModel`, updated after each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after_step(self) -> None:
        self.average.update_parameters(self.model)

    def at_end(self, trainer: onefold.Trainer) -> object:
        return words_of(*self.average.parameters())


class Shadows(Kept):
    """Averages as torch_ema keeps them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shadows = [p.clone().detach() for p in model.parameters()]

    def after_step(self) -> None:
        with torch.no_grad():
            for shadow, parameter in zip(self.shadows, self.model.parameters(), strict=True):
                by = shadow - parameter
                by.mul_(0.1)
                shadow.sub_(by)

    def at_end(self, trainer: onefold.Trainer) -> object:
        return words_of(*self.shadows)


class Follower(Kept):
    """A copy that follows the model by ``.data``, made after a few steps."""

    copied: nn.Module | None = None

    def after_step(self) -> None:
        if self.copied is None:
            self.copied = copy.deepcopy(self.model)
        pairs = zip(self.copied.parameters(), self.model.parameters(), strict=True)
        for ours, theirs in pairs:
            ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    def at_end(self, trainer: onefold.Trainer) -> object:
        assert self.copied is not None
        return words_of(*self.copied.parameters())


KINDS = (
    *(Best, partial(Best, take=by_clone), partial(Best, take=by_detached_clones)),
    *(Mean, Averaged, Shadows, Follower),
)


@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_kept_weights_are_what_they_were(runs: Runs, kind: Callable[[nn.Module], Kept]) -> None:
    """Wherever the script died, on other numbers of devices."""
    script = script_of(kind)
    whole = runs.whole(script)
    for dies in some(range(1, runs.ticks + 1), 4):
        again = runs.below(dies)
        assert again.start(script, 2, dies=dies) is None
        if dies % 3:
            assert again.start(script, 1, dies=dies + 1) is None
        assert again.start(script, 1 + dies % 3) == whole, dies


class Sums(Kept):
    """Sums that the script makes of weights itself, which no checkpoint has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sums = [torch.zeros_like(p) for p in model.parameters()]

    def after_step(self) -> None:
        with torch.no_grad():
            for place, parameter in zip(self.sums, self.model.parameters(), strict=True):
                place.add_(parameter)


class OwnVector(Kept):
    """All weights in one vector, kept and added to another one in the end."""

    vector = torch.zeros(1)

    def after_epoch(self, score: float) -> None:
        self.vector = nn.utils.parameters_to_vector(self.model.parameters())

    def at_end(self, trainer: onefold.Trainer) -> object:
        return (self.vector + 1).sum().item()


@pytest.mark.parametrize("kind", [Sums, OwnVector])
def test_what_a_checkpoint_lacks_raises_where_it_is_used(
    runs: Runs, kind: Callable[[nn.Module], Kept]
) -> None:
    script = script_of(kind)
    assert runs.start(script, dies=16 if kind is OwnVector else 7) is None
    if kind is OwnVector:
        # The last epoch takes another vector: what was taken before is not used again.
        assert runs.start(script) == runs.whole(script)
        return
    words = rf"{__file__}:\d+: these weights were made at {__file__}:\d+ during replay, after step"
    with pytest.raises(StateError, match=words):
        runs.start(script)


def norm(model: nn.Module) -> object:
    return float(next(model.parameters()).detach().norm())


def is_large(model: nn.Module) -> object:
    return bool((model.state_dict()["0.weight"] > 9).any())


def as_array(model: nn.Module) -> object:
    return next(model.parameters()).detach().numpy().copy()


def as_list(model: nn.Module) -> object:
    return dict(model.named_buffers())["1.running_mean"].tolist()


def equal(model: nn.Module) -> object:
    return torch.equal(*[copy.deepcopy(next(model.parameters())) for _ in range(2)])


READS = (norm, is_large, as_array, as_list, equal)


@pytest.mark.parametrize("read", READS)
def test_numbers_of_weights_are_refused_in_the_part_that_is_done(runs: Runs, read: Any) -> None:
    class Reads(Kept):
        guard: Any = staticmethod(lambda: False)

        def after_step(self) -> None:
            if not self.guard():
                read(self.model)

    script = script_of(Reads)
    assert runs.start(script, dies=7) is None
    with pytest.raises(
        StateError, match=rf"{__file__}:\d+: the script reads weights during replay"
    ):
        runs.start(script)
    life: list[Life] = []

    def guarded(now: Life) -> str:
        life.append(now)
        return script(now)

    Reads.guard = staticmethod(lambda: life[-1].made is not None and life[-1].made.replaying)
    assert runs.start(guarded, 2) is not None


def test_what_shows_no_values_goes_on_in_the_part_that_is_done(runs: Runs) -> None:
    class Looks(Kept):
        def after_step(self) -> None:
            model = self.model
            assert sum(p.numel() * p.element_size() for p in model.parameters()) == 144
            model.to("cpu").float().train()
            for parameter in model.parameters():
                assert isinstance(parameter, nn.Parameter)
                assert parameter.is_contiguous()
                assert parameter.stride()
                assert len({p.data_ptr() for p in model.parameters()}) == 6
                f"{parameter} {parameter.norm():.3f} {model}"
                parameter.requires_grad_(True).grad = None
            copy.deepcopy(model)
            model.load_state_dict(model.state_dict())

    script = script_of(Looks)
    assert runs.start(script, dies=9) is None
    assert runs.start(script, 2) == runs.whole(script)

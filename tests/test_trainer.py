"""The public interface, in one process."""

import math
import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import onefold
from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext
from onefold.core.settings import Settings
from onefold.errors import GradientError, LaunchError, LossError
from onefold.session.forming import settle_process
from onefold.system import accelerator
from tests.small import Batch, bits, line, make_trainer, points, result, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 3])


class Noisy(nn.Module):
    """Dropout, batch norm, tied weights and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.frozen.weight
        self.last = line(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        return self.last(F.dropout(self.twin(self.frozen(hidden)), 0.3, self.training))


def drawn() -> tuple[float, ...]:
    """From every generator."""
    return torch.rand(()).item(), random.random(), np.random.rand()


def noisy_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return square(model, batch) * sum(drawn())


def trained(steps: int = 3, samples: int = 11, **choices: Any) -> str:
    trainer = make_trainer(Noisy(), noisy_loss, **choices)
    for _ in range(steps):
        trainer.step(points(samples))
    return trainer.fingerprint()


# Steps


@both
def test_a_step_is_a_record_of_what_was_before_its_update(devices: int) -> None:
    """A parameter that is replaced is refused: its optimizer would go on with the one before."""
    trainer = make_trainer(devices=devices)
    expected = square(trainer.model, points(7)).double().mean().detach()
    first = trainer.step(points(7))
    others = [trainer.step(points(samples)) for samples in (3, 1)]
    torch.testing.assert_close(first.loss, expected, rtol=1e-6, atol=0)  # in double precision
    assert not first.loss.requires_grad
    counted = [(s.number, s.samples, s.epoch, s.skipped) for s in (first, *others)]
    assert counted == [(1, 7, 0, ""), (2, 3, 0, ""), (3, 1, 0, "")]
    assert (trainer.steps, len(trainer.devices), trainer.shards) == (3, devices, 4)
    before = trainer.fingerprint()
    trainer.close()
    trainer.close()
    assert trainer.fingerprint() == before
    trainer = make_trainer(devices=devices)
    trainer.model.weight = nn.Parameter(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"^parameter weight of the model was .* Change values"):
        trainer.step(points(8))


@both
def test_what_is_the_scripts_is_left_alone(devices: int) -> None:
    """The model's identity, names and modes, and the generators."""
    model = Noisy()
    model.norm.eval()
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    trainer = make_trainer(model, noisy_loss, devices=devices)
    numbers = []
    for steps in (0, 1):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(4)
        for _ in range(steps):
            trainer.step(points(8))
        numbers.append(drawn())
    assert numbers[0] == numbers[1]
    assert trainer.model is model
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.twin.weight is model.frozen.weight
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name for name, part in model.named_modules() if not part.training} == {"norm"}


# The same bits


def test_a_plan_may_change_between_steps_and_trainers_do_not_disturb_each_other() -> None:
    one = make_trainer(Noisy(), noisy_loss)
    other = make_trainer(Noisy(), noisy_loss, devices=3)
    assert other.shares == (2, 1, 1)
    for shares in [(4, 0, 0), (0, 1, 3), (1, 1, 2)]:
        other.shares = shares
        assert other.shares == shares
        assert one.step(points(11)).number == other.step(points(11)).number
    assert one.fingerprint() == other.fingerprint() == trained()
    for wrong in ((4,), (1, 1, 1), (5, -1, 0), ()):
        with pytest.raises(ValueError, match=r"this run has 3 devices and 4|zero or more shards"):
            other.shares = wrong
    assert other.shares == shares


def test_the_bits_depend_on_seed_shards_and_data() -> None:
    choices: list[dict[str, Any]] = [{}, {"seed": 1}, {"shards": 3}, {"samples": 10}, {"steps": 2}]
    assert len({trained(**choice) for choice in choices}) == len(choices)
    assert trained() == trained()


@for_each("fails", [1, 3, "nan"])
@both
def test_a_step_that_failed_may_be_repeated_or_passed_over(devices: int, fails: Any) -> None:
    """Also where other shards had their gradients, or the script has left some of its own."""
    calls_left = math.inf

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == -1:
            raise MemoryError("for a moment")
        return square(model, batch)

    trainer, expected = make_trainer(loss=loss, devices=devices), make_trainer(devices=devices)
    square(trainer.model, points(5)).mean().backward()
    for samples in (8, 7):
        inputs, targets = points(samples)
        if fails == "nan":
            inputs *= math.nan
        else:
            calls_left = fails
        with pytest.raises((LossError, MemoryError), match=r"is nan|for a moment"):
            trainer.step((inputs, targets))
        assert trainer.step(points(samples)).number == expected.step(points(samples)).number
    assert trainer.fingerprint() == expected.fingerprint()


def in_portions(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A layer that runs several times, and again in backward."""
    x = batch[0].clone().requires_grad_()
    for _ in range(4):
        x = checkpoint(lambda t: model(t).tanh().expand(-1, 3), x, use_reentrant=True)
    return x.square().mean(dim=1)


def test_gradients_that_come_in_portions_fold_to_the_same_bits() -> None:
    trainers = [make_trainer(loss=in_portions, devices=devices) for devices in (1, 2, 4)]
    assert len({result(trainer, [points(12), points(11)]) for trainer in trainers}) == 1


@for_each("width", [5, 70_000])
@for_each(("shards", "devices"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_gradients_in_the_same_memory_are_added_once(width: int, shards: int, devices: int) -> None:
    """Of parameters that are added up through views: backward gives both the same memory."""
    model = nn.ParameterList([torch.zeros(width), torch.zeros(width)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    choices: dict[str, Any] = {"optimizer": optimizer, "shards": shards, "devices": devices}
    loss = lambda model, x: (x * (model[0].view(1, -1) + model[1].view(1, -1))).sum(1)  # noqa: E731
    trainer = make_trainer(model, loss, **choices)
    trainer.step(torch.arange(1.0, 5.0).view(4, 1).expand(4, width))
    # the mean of 1 to 4
    assert [set(p.tolist()) for p in model.parameters()] == [{-2.5}] * 2


# Loaders and threads


@both
def test_batches_of_a_loader_and_whole_batches_give_the_same_bits(devices: int) -> None:
    data = TensorDataset(*points(20))
    batches = [*make_trainer(devices=devices).loader(data, batch_size=6)]
    loaded, whole = make_trainer(devices=devices), make_trainer(devices=devices)
    wholes = [data[start : start + 6] for start in range(0, 20, 6)]
    assert result(loaded, batches) == result(whole, wholes)
    others: tuple[dict[str, Any], ...] = ({"devices": devices, "shards": 3}, {"devices": 2})
    for other in others:
        with pytest.raises(ValueError, match=r"was cut for .* but this run has"):
            make_trainer(**other).step(batches[0])


def test_threads_are_shared_among_the_shards_and_idle_cores_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onefold.session.forming.cores", lambda: 16)
    monkeypatch.setattr("sys.argv", ["train.py"])
    program = ModuleType("__main__")
    program.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", program)
    for shards, number, threads in ((5, None, 3), (64, None, 1), (4, 2, 2)):
        make_trainer(shards=shards, threads=number)
        assert torch.get_num_threads() == threads
    caplog.clear()
    chosen: dict[str, Any] = {"seed": 0, "clip_norm": None, "deterministic": True, "timeout_s": 5.0}
    for trainer in (0, 1):
        devices = Devices(
            all=(torch.device("cpu"),), own=(0,), context=LaunchContext(), trainer=trainer
        )
        settle_process(devices, Settings(shards=5, threads=None, **chosen))
    assert caplog.text.count("using 3 of 16 cores: a CPU device has 3 threads with 5 sh") == 1
    assert "onefold run --devices auto train.py" in caplog.text
    del program.__file__  # as in a notebook
    devices.trainer = 0
    settle_process(devices, Settings(shards=5, threads=None, **chosen))
    assert caplog.text.rstrip().endswith("To use all cores: onefold.launch(main)")


# What is refused


@for_each(
    ("choice", "words"),
    [
        ({"clip_norm": math.nan}, "clip_norm must be greater than 0, but got nan"),
        ({"timeout_s": math.inf}, "timeout_s must be finite"),
        ({"shares": 4}, "shares must be a list of integers, but got 4"),
        (
            {"shares": (1, 1)},
            r"run has 2 devices and .*, but the shares \(1, 1\) are for 2 devices and 2 shards",
        ),
        ({"loss": None}, "loss must be a function of model and batch, but got NoneType"),
        ({"model": [line()], "optimizer": sgd(line())}, "model must be a torch.nn.Module"),
        ({"optimizer": "sgd"}, "expected a torch.optim.Optimizer, but got str"),
        ({"devices": 5}, "5 devices cannot share 4 shards: a shard is never divided"),
    ],
)
def test_an_argument_that_is_not_usable_is_refused(choice: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make_trainer(**{"devices": 2} | choice)


@for_each(
    ("devices", "words"),
    [
        (["cpu", "cuda:7"], r"^cuda:7 does not exist: PyTorch sees \d GPUs on this machine"),
        (["cpu", "cuda:1"], "devices of a run must have the same type, but got cpu, cuda:1"),
        (["mps"], "^devices must be cpu or cuda devices, but got mps"),
        (["gpu"], "devices must be .*'gpu'"),
        ("cpu", "devices must be a list of devices"),
        (2, "devices must be a list of devices"),
    ],
)
def test_devices_that_cannot_be_had_are_explained(
    devices: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    with pytest.raises((LaunchError, TypeError, ValueError), match=words):
        onefold.Trainer(model := line(), sgd(model), square, shards=4, devices=devices)


def in_shard_2(value: float) -> Batch:
    inputs, targets = points(8)
    targets[5] = value
    return inputs, targets


def sparse(model: nn.Module, batch: Batch) -> torch.Tensor:
    rows = torch.zeros(len(batch[0]), dtype=torch.long)
    return F.embedding(rows, model.get_parameter("weight"), sparse=True).sum(dim=1)


SCALAR = r"^the loss of step 1, shard 0.*"
NO_GRADIENT = "^the loss of step 1 does not depend on any parameter .* no_grad or from detached"
BATCHES: list[tuple[Any, type[Exception], str]] = [
    ((torch.ones(4, 3), torch.ones(3, 1)), ValueError, r"has 4, batch\[1\] has 3"),
    ((torch.ones(0, 3), torch.ones(0, 1)), ValueError, "^the batch is empty"),
    ([[1.0, 2.0]], TypeError, r"^batch\[0\]\[0\] must be .* got float"),
    (in_shard_2(math.nan), LossError, "^the loss of step 1, shard 2 is nan, but must be finite"),
    (in_shard_2(-math.inf), LossError, "^the loss of step 1, shard 2 is inf, but must be finite"),
]
OF_SQUARES: list[tuple[Any, type[Exception], str]] = [
    (lambda x: x.detach(), LossError, NO_GRADIENT),
    (lambda x: x[:, None].expand(-1, 3), LossError, SCALAR + r"got shape \(2, 3\)"),
    (lambda x: onefold.Mean(x, 2), LossError, SCALAR + r"total .* a scalar tensor, got \(2,\)"),
    (lambda x: onefold.Mean(x.sum(), -1), LossError, SCALAR + "finite and >= 0, got -1"),
    (lambda x: onefold.Mean(x.sum(), math.inf), LossError, SCALAR + "the weight .*, got inf"),
    (lambda x: dict[str, Any]()["a label"], KeyError, "a label"),
]


@both
@for_each(
    ("loss", "batch", "kind", "words"),
    [
        *((square, *row) for row in BATCHES),
        *((lambda m, b, of=of: of(square(m, b)), points(8), *row) for of, *row in OF_SQUARES),
        (sparse, points(8), GradientError, "^step 1, shard 0: parameter weight has a sparse"),
    ],
)
def test_what_cannot_be_computed_changes_nothing(
    devices: int, loss: Any, batch: Any, kind: type[Exception], words: str
) -> None:
    losses = [loss]
    trainer = make_trainer(loss=lambda *given: losses[-1](*given), devices=devices)
    before = bits(trainer.model)
    with pytest.raises(kind, match=words) as caught:
        trainer.step(batch)
    if kind is KeyError:
        assert caught.value.__notes__ == ["raised in step 1, shard 0, on device 0 (cpu)"]
    assert bits(trainer.model) == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    losses.append(square)
    assert trainer.step(points(4)).number == 1

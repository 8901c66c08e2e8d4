"""State that shards leave on objects: refused, reported, or of no concern."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import StateError
from tests.checkpoint.inprocess import Life, Runs
from tests.tables import for_each

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


class Meter:
    """As in PyTorch's example for ImageNet."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.avg, self.sum, self.count = 0.0, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n
        self.avg = self.sum / self.count


class Metric(nn.Module):
    """As torchmetrics has it: calls put new tensors in the place of old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.values = torch.tensor(0.0), [torch.zeros(1)][:0]

    def __hash__(self) -> int:
        return hash((type(self).__name__, len(self.values)))

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value.sum()

    def reset(self) -> None:
        self.total = torch.tensor(0.0)

    def compute(self) -> torch.Tensor:
        return self.total

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.update(value)
        return value


class Net(nn.Module):
    """A layer, and room for what shards leave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.metric = Metric()
        self.seen, self.many = torch.tensor(0), torch.zeros(3)
        self.number, self.size, self.kept, self.outputs = 0, 0, torch.zeros(2), [0.0]
        self.cache: dict[str, torch.Tensor] = {}
        self.meters = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


Leave = Callable[[Net, torch.Tensor, torch.Tensor], object]
METER, METRIC = Meter(), Metric()
OUTSIDE = {"metric": METRIC}


def trainer_of(leave: Leave, shards: int = 4, optimizer: Any = torch.optim.SGD) -> onefold.Trainer:
    net = Net()

    def loss(model: Net, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        leave(model, x, out)
        return out.square().mean(dim=1)

    made = optimizer and optimizer(net.parameters(), lr=0.01)
    return onefold.Trainer(net, made, loss, shards=shards, threads=1)


def in_place(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.seen += len(x)


def through_data(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.seen.data.add_(len(x))


def of_parameter(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    def keep(gradient: torch.Tensor) -> None:
        net.layer.weight.grad_sample = gradient.detach()  # type: ignore[attr-defined]

    out.register_hook(keep)


def in_list_of_parameter(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.layer.bias.__dict__.setdefault("parts", []).append(out.detach())


REFUSED: list[tuple[Leave, str]] = [
    (in_place, "seen of the Net"),
    (through_data, "seen of the Net"),
    (lambda net, x, out: net.metric(out), "the shards changed module metric (Metric)"),
    (lambda net, x, out: net.meters.update(1.0), "the shards changed the Meter"),
    (
        lambda net, x, out: net.metric.values.append(out.detach()),
        "the shards changed module metric (Metric)",
    ),
    (of_parameter, "grad_sample of parameter layer.weight"),
    (in_list_of_parameter, "parts of parameter layer.bias"),
]


@for_each(("leave", "place"), REFUSED)
def test_what_adds_up_shards_is_refused_by_name(leave: Leave, place: str) -> None:
    trainer = trainer_of(leave)
    with pytest.raises(StateError) as caught:
        trainer.step(X)
    assert place in str(caught.value)
    assert "step 1, the loss: the shards changed " in str(caught.value)
    alone = trainer_of(leave, shards=1)  # as a plain loop
    for _ in range(2):
        alone.step(X)


def test_metrics_outside_of_the_model_are_found() -> None:
    def of_global(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        METER.update(float(len(x)))
        return model(x).square().mean(dim=1)

    def in_dict(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        OUTSIDE["metric"].update(x)
        return {"loss": model(x).square().mean(dim=1)}

    net = Net()
    make = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = onefold.Trainer(net, make, of_global, shards=4, threads=1)
    with pytest.raises(StateError, match="the shards changed the Meter"):
        trainer.step(X)
    trainer = trainer_of(lambda *_: None)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(
            StateError, match=r"the first batch of .* the shards changed the Metric"
        ):
            call(in_dict, X, batch_size=6)


NORM = nn.BatchNorm1d(2)


def run_alone(leave: Leave, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Run steps with one shard under ``onefold run --checkpoint``."""

    def loss(model: Net, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        leave(model, x, out)
        return out.square().mean(dim=1)

    def script(life: Life) -> str:
        trainer = life.trainer(Net(), loss, shards=1)
        model: Any = trainer.model
        for _ in range(4):
            trainer.step(X)
            with trainer.modifying():
                model.kept.sum()
        return trainer.fingerprint()

    return Runs(folder, monkeypatch).start(script)


@for_each(
    ("leave", "place"),
    [(lambda net, x, out: NORM(out), "BatchNorm1d is not part of the model"), *REFUSED[:5]],
)
def test_what_a_resumed_run_would_lose_is_refused_with_one_shard_too(
    leave: Leave, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StateError) as caught:
        run_alone(leave, tmp_path / "run", monkeypatch)
    assert place in str(caught.value)


def lazy(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.cache.setdefault("table", torch.arange(4.0))


def sized(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.size = len(x)
    net.kept = out.detach()


def zeroed(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.seen.zero_()


def drawn(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.many = torch.full((3,), float("nan"))


@for_each("leave", [lazy, sized, zeroed, drawn, lambda *_: None])
def test_what_each_shard_overwrites_stays_allowed(
    leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    trainer = trainer_of(leave)
    model: Any = trainer.model
    model.many = torch.full((3,), float("nan"))
    for _ in range(4):
        trainer.step(X)
        METER.update(1.0)  # between steps it is the script's
        model.metric(X)
    assert "the shards changed" not in caplog.text


@for_each("leave", [lazy, sized, drawn, of_parameter, in_list_of_parameter])
def test_one_shard_may_leave_what_each_step_leaves_anew(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_alone(leave, tmp_path / "run", monkeypatch)


def counted(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.number += len(x)


def listed(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.outputs.append(float(out.detach().sum()))


def written(net: Net, x: torch.Tensor, out: torch.Tensor) -> None:
    net.many.add_(1.0)


@for_each(("leave", "place"), [(counted, "number"), (listed, "outputs"), (written, "many")])
def test_what_grows_step_after_step_is_reported_once(
    leave: Leave, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(leave)
    said = []
    for _ in range(4):
        trainer.step(X)
        said.append(caplog.text.count(f"the shards changed {place} of the Net"))
    assert said == [0, 0, 1, 1]


class Hooked(torch.optim.SGD):
    """Gathers inputs by hooks, as optimizers with curvature do."""

    def watch(self, layer: nn.Module) -> None:
        self.inputs: dict[nn.Module, torch.Tensor] = {}
        layer.register_forward_pre_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any) -> None:
        self.inputs[layer] = inputs[0].T @ inputs[0]


def test_an_optimizer_that_keeps_what_shards_see_is_refused() -> None:
    made: list[Hooked] = []

    def hooked(parameters: Any, lr: float) -> Hooked:
        made.append(Hooked(parameters, lr=lr))
        return made[0]

    trainer = trainer_of(lambda *_: None, optimizer=hooked)
    made[0].watch(trainer.model.get_submodule("layer"))
    with pytest.raises(StateError, match=r"inputs of the Hooked\. Each device would have values"):
        trainer.step(X)


def modified(read: Callable[[Net], object]) -> None:
    trainer = trainer_of(sized, optimizer=None)
    trainer.gradient(X)
    with trainer.modifying():
        model: Any = trainer.model
        read(model)
        model.layer.bias.data.add_(1.0)
    trainer.gradient(X)


@for_each(
    "read",
    [
        lambda net: net.kept.sum(),
        lambda net: torch.cat([net.kept, net.kept]),
        lambda net: torch.add(torch.ones(1), other=net.kept),
        lambda net: net.kept.tolist(),
    ],
)
def test_what_the_last_shard_left_is_not_read_by_an_update(read: Callable[[Net], object]) -> None:
    with pytest.raises(StateError, match=r"kept of the Net is read in .*modifying"):
        modified(read)
    torch.ones(2).sum()  # nothing is watched any more


class Tabled(nn.Module):
    """Keeps a table that its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        out: torch.Tensor = self.layer(x + self.table)
        return out


def test_a_module_may_read_its_own_table_in_an_update() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean(dim=1)

    model = Tabled()
    trainer = onefold.Trainer(model, None, loss, shards=4, threads=1)
    trainer.gradient(X)
    with trainer.modifying():
        model(X)
    with pytest.raises(StateError, match="table of the Tabled"), trainer.modifying():
        model.table.sum()  # type: ignore[union-attr]


@for_each("read", [copy.deepcopy, lambda net: net.layer.weight.grad.sum(), lambda net: net.size])
def test_an_update_may_use_anything_else(read: Callable[[Net], object]) -> None:
    modified(read)


class GradSampleModule(nn.Linear):
    """By the name of Opacus'."""


class DPOptimizer(torch.optim.SGD):
    """By the name of Opacus'."""


class DistributedDPOptimizer(DPOptimizer):
    """By the name of Opacus'."""


def test_gradients_of_single_samples_are_refused_by_the_names_of_opacus() -> None:
    for model, kind in (
        (nn.Sequential(GradSampleModule(4, 2)), torch.optim.SGD),
        (nn.Linear(4, 2), DistributedDPOptimizer),
    ):
        words = "keeps per-sample gradients.* does not support differential privacy"
        with pytest.raises(TypeError, match=words):
            onefold.Trainer(model, kind(model.parameters(), lr=0.1), lambda m, x: m(x), shards=2)

"""Devices that share no memory and keep their spans alone: what a step brings, and what a script
may do between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.lending import SpanLending
from onefold.engine.lentparameter import Elsewhere, LentParameters
from onefold.errors import DisagreementError, LossError, StateError
from onefold.exchange.carrier import Want
from tests import simulated
from tests.inside import engine_in
from tests.tables import for_each

FEATURES = 12


class Skipping(nn.Module):
    """Uses parameters of its layers before, in and after the layers that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.beside = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.layers[3].weight)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        self.beside = torch.stack([p.square().sum() for p in self.layers[0].parameters()]).sum()
        biases = torch.stack([layer.bias for layer in self.layers]).sum(dim=0)
        return x * torch.cat([self.layers[1].bias[:6], self.layers[2].bias[6:]]) + biases


def penalised(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    outputs = model(batch).square().mean(dim=1)
    penalty = sum(p.abs().sum() for p in model.parameters())
    assert isinstance(model, Skipping)
    return outputs + 0.01 * penalty + 0.001 * model.beside  # type: ignore[no-any-return]


def trainer_of(
    make: Callable[[], nn.Module] = Skipping,
    loss: Callable[[Any, Any], Any] = penalised,
    **settings: Any,
) -> onefold.Trainer:
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return onefold.Trainer(model, optimizer, loss, shards=4, threads=1, **settings)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(9, FEATURES, generator=generator) for _ in range(count)]


def trained(trainer: onefold.Trainer, steps: int = 4) -> str:
    for batch in batches(steps):
        trainer.step(batch)
    return trainer.fingerprint()


def launched(
    function: Callable[..., Any], *given: Any, devices: int = 2, keep: str = "span"
) -> Any:
    """In processes: for those whose functions change what a process has one of."""
    return onefold.launch(
        function,
        devices=f"cpu:{devices}",
        args=given,
        keep=keep,
        exchange="collective",
        timeout_s=300,
    )


def run(function: Callable[..., Any], *given: Any, devices: int = 2, keep: str = "span") -> Any:
    return simulated.launch(
        function, devices=f"cpu:{devices}", args=given, keep=keep, exchange="collective"
    )


def with_a_model_that_skips() -> str:
    return trained(trainer_of())


def test_parameters_that_are_used_outside_of_their_stage() -> None:
    alone = with_a_model_that_skips()
    assert [run(with_a_model_that_skips, devices=n) for n in (2, 3)] == [alone] * 2


def looked_at_between_steps() -> dict[str, str]:
    trainer = trainer_of()
    trained(trainer, 1)
    model = trainer.model
    found: dict[str, str] = {}
    for name, look in {
        "sum": lambda: model.scale.sum(),
        "state": model.state_dict,
        "copy": lambda: copy.deepcopy(model),
        "data": lambda: model.scale.data,
        "item": lambda: model.layers[0].weight[0, 0].item(),
        "call": lambda: model(batches(1)[0]),
        "numpy": lambda: model.scale.detach().numpy(),
    }.items():
        try:
            look()
        except RuntimeError as error:
            found[name] = str(error)
    assert sum(p.numel() for p in model.parameters()) > 600
    assert [p.shape[0] for p in model.parameters()] == [FEATURES] * 9
    assert all(
        p.requires_grad and p.is_leaf and p.dtype == torch.float32 for p in model.parameters()
    )
    assert isinstance(model.scale, nn.Parameter)
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = None
    return found


def test_a_script_cannot_read_what_is_not_there() -> None:
    found = run(looked_at_between_steps)
    assert sorted(found) == ["call", "copy", "data", "item", "numpy", "state", "sum"]
    assert all("with trainer.whole()" in text for text in found.values())
    assert "parameter scale was read on device 0" in found["sum"]


def read_in_the_block() -> tuple[bool, list[float], list[float], str]:
    trainer = trainer_of()
    before = trained(trainer, 2)
    with trainer.whole():
        array = trainer.model.scale.detach().numpy()
        values = trainer.model.state_dict()["scale"]
        same = trainer.fingerprint() == before and values.tolist() == array.tolist()
        with trainer.whole():
            copied = copy.deepcopy(trainer.model.layers)
        trainer.step(batches(1)[0])
    return same, array.tolist(), copied[0].bias.tolist(), trainer.fingerprint()


def test_a_script_reads_and_trains_in_the_block() -> None:
    assert run(read_in_the_block) == read_in_the_block()


def distilled() -> tuple[str, str]:
    """A student learns from a model that another Trainer of the run has trained."""
    first = trainer_of()
    trained(first, 2)
    teacher = first.model

    def distil(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = teacher(batch)
        return (model(batch) - goal).square().mean(dim=1)

    second = trainer_of(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()), distil)
    with first.whole():
        for batch in batches(2):
            second.step(batch)
    second.barrier()
    return first.fingerprint(), second.fingerprint()


def test_a_model_of_another_trainer_is_a_teacher_in_the_block() -> None:
    assert run(distilled) == distilled()


def distilled_without_the_block() -> None:
    first = trainer_of()
    second = trainer_of(loss=lambda model, batch: (model(batch) - first.model(batch)).mean(dim=1))
    second.step(batches(1)[0])


def test_a_teacher_that_is_not_there_is_named_where_it_is_used() -> None:
    words = r"parameter layers.3.weight was read on device \d, .* `with trainer\.whole\(\):`"
    with pytest.raises(Elsewhere, match=words) as caught:
        run(distilled_without_the_block)
    assert any("raised in step 1, shard" in note for note in caught.value.__notes__)


def changed_and_averaged() -> list[Any]:
    trainer = trainer_of()
    trainer.average(decay=0.5)
    trained(trainer, 2)
    with trainer.changing():
        trainer.model.scale.data.mul_(0.5)
    found: list[Any] = [trained(trainer, 1)]
    with trainer.averaged():
        found.append(
            trainer.evaluate(lambda m, b: {"mean": m(b).mean(dim=1)}, batches(1)[0], batch_size=4)
        )
        found.append(trainer.fingerprint())
    return [*found, trained(trainer, 2)]


def test_changes_and_averages() -> None:
    assert run(changed_and_averaged, devices=3) == changed_and_averaged()


def terms(model: nn.Module, batch: torch.Tensor) -> Any:
    values = model(batch)
    many = (values > 0).sum()
    return onefold.Mean(values.clamp_min(0).sum(), many) + onefold.Mean(values.sum(), len(batch))


def gathering(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    values = model(batch)
    return (values @ onefold.gather(values).T).square().mean(dim=1)


def with_loss(loss: Callable[[Any, Any], Any], settings: dict[str, Any]) -> str:
    return trained(trainer_of(loss=loss, **settings))


@for_each(
    ("loss", "settings"),
    [
        (terms, {}),
        (gathering, {}),
        (penalised, {"microbatch": "auto"}),
        (penalised, {"microbatch": 2, "clip_norm": 0.1}),
        (penalised, {"precision": "bf16"}),
        (penalised, {"precision": "bf16-params"}),
    ],
    ids=["terms", "gathering", "searching", "pieces", "bf16", "bf16-params"],
)
def test_steps_that_are_no_plain_ones(
    loss: Callable[[Any, Any], Any], settings: dict[str, Any]
) -> None:
    assert run(with_loss, loss, settings) == with_loss(loss, settings)


class Renormed(nn.Module):
    """Writes to a parameter in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(5, FEATURES, max_norm=0.1), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers[0](torch.arange(len(x)) % 5)  # type: ignore[no-any-return]


def with_a_write() -> str:
    def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)  # type: ignore[no-any-return]

    trainer = trainer_of(Renormed, plain)
    try:
        trainer.step(batches(1)[0])
    except StateError as error:
        return str(error)
    return ""


def test_a_loss_may_not_write_to_what_was_brought() -> None:
    assert "layers.0.weight was written to while the loss was" in run(with_a_write)


class Masked(nn.Module):
    """Writes to a parameter in its forward pass, so that PyTorch does not count it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.layers[1].register_forward_pre_hook(self.mask)

    @staticmethod
    def mask(layer: nn.Module, _: Any) -> None:
        layer.weight.data[:, 5].zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def with_a_hidden_write() -> None:
    trainer_of(Masked, lambda model, batch: model(batch).square().mean(dim=1)).step(batches(1)[0])


@for_each("keep", ["span", "stages"])
def test_what_is_written_past_pytorch_is_named(keep: str) -> None:
    words = "^parameter layers.1.weight was written to while .* in a buffer"
    with pytest.raises(StateError, match=words):
        run(with_a_hidden_write, keep=keep)


class Scaling(Masked):
    """Halves a weight when it is evaluated first, as models for mixed precision do."""

    counted = False

    def mask(self, layer: nn.Module, _: Any) -> None:  # type: ignore[override]
        if not self.training and not hasattr(self, "is_scaled"):
            self.is_scaled = True
            with torch.no_grad():
                (layer.weight if self.counted else layer.weight.data).mul_(0.5)


class ScalingInSight(Scaling):
    """The same where PyTorch counts it."""

    counted = True


def with_a_write_in_an_evaluation(make: type[Scaling], call: str) -> None:
    trainer = trainer_of(make, lambda model, batch: model(batch).square().mean(dim=1))
    trained(trainer, 1)
    getattr(trainer, call)(lambda m, b: {"mean": m(b).mean(dim=1)}, batches(1)[0], batch_size=9)


@for_each("call", ["evaluate", "predict"])
@for_each("make", [Scaling, ScalingInSight])
@for_each("keep", ["span", "stages"])
def test_what_an_evaluation_writes_to_is_named(keep: str, make: type[Scaling], call: str) -> None:
    words = r"parameter layers\.1\.weight was written to while"
    with pytest.raises(StateError, match=words):
        run(with_a_write_in_an_evaluation, make, call, keep=keep)


def with_torch_func() -> str:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda x: model(x).square().sum())(batch)
        return slope.square().mean(dim=1)  # type: ignore[no-any-return]

    try:
        trainer_of(loss=loss).step(batches(1)[0])
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return ""


def test_what_cannot_be_used_in_a_loss_is_said() -> None:
    assert "use torch.autograd.grad in the loss" in run(with_torch_func)


def with_a_spoilt_sample() -> str:
    trainer = trainer_of()
    trained(trainer, 1)
    batch = batches(1)[0]
    batch[7] = torch.nan
    try:
        trainer.step(batch)
    except LossError as error:
        return str(error)
    return ""


def test_what_is_not_finite_is_named_as_ever() -> None:
    found = run(with_a_spoilt_sample)
    assert found == with_a_spoilt_sample()
    assert "shard 3" in found


def alone_in_the_block() -> str:
    trainer = trainer_of()
    trained(trainer, 1)
    try:
        if trainer.is_lead:
            with trainer.whole():
                pass
        else:
            trainer.step(batches(1)[0])
    except DisagreementError as error:
        return str(error)
    return ""


def test_one_device_alone_is_told_so() -> None:
    assert "trainer.whole" in run(alone_in_the_block)


def stages_brought() -> tuple[list[int], list[bool], int, bool]:
    """The stages that a step brings to this device, and the most of them at one time."""
    wishes: list[Want] = []
    most = 0

    def noting(wish: Want) -> None:
        nonlocal most
        wishes.append(wish)
        most = max(most, len({*lending._rooms, *lending._coming, wish.stage}))
        want(wish)

    def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)  # type: ignore[no-any-return]

    def layers() -> nn.Module:
        return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(5)])

    trainer = trainer_of(layers, plain)
    lending = engine_in(trainer).lending
    assert isinstance(lending, SpanLending)
    want = lending._fold.want
    lending._fold.want = noting  # type: ignore[method-assign]
    trainer.step(batches(1)[0])
    (flat,) = engine_in(trainer).exchange.memory.trained.values()
    return [w.stage for w in wishes], [w.ahead for w in wishes], most, flat.is_there


def test_a_step_brings_one_stage_after_the_other() -> None:
    brought, ahead, most, is_there = run(stages_brought)
    # The last is still here when backward begins, and nothing needs the first one's weight then.
    assert brought == [0, *[1, 2, 3, 4, 5, 4, 3, 2] * 2]
    # Nobody knows what the first shard needs next. Later ones begin with a stage that is waited
    # for, as nothing is computed before it.
    assert ahead == [False] * (1 + 8 + 1) + [True] * 7
    assert most == 4  # the root, the stage, the one before it, and the one after it
    assert not is_there


def test_a_parameter_says_when_it_is_used() -> None:
    used: list[int] = []

    class Own(nn.Parameter):
        pass

    parameters = [nn.Parameter(torch.ones(2)), Own(torch.ones(2))]
    kinds = [type(parameter) for parameter in parameters]

    def bring(found: Any) -> None:
        used.append(len(found))
        lent.show(found)

    lent = LentParameters(bring)
    lent.hide(parameters)
    assert [p.shape for p in parameters] == [(2,), (2,)]
    assert used == []
    total = torch.stack([torch.cat([*parameters]), torch.zeros(4)]).sum()
    assert used == [2]
    assert [type(parameter) for parameter in parameters] == kinds
    total.backward()
    assert all(p.grad is not None and p.grad.tolist() == [1, 1] for p in parameters)
    lent.hide(parameters)
    lent.hide(parameters)
    lent.show(parameters)
    assert [type(parameter) for parameter in parameters] == kinds

"""How the user's own optimizer is divided, what is refused, and that hooks see whole parameters."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import onefold
from onefold.checks.model import updates_by_element
from onefold.core.flat import same_bits
from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import StateError
from onefold.update.state import packed, unpack
from tests.inside import engine_in
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 3])


class Branches(nn.Module):
    """One branch for all samples, one for those that begin with a large number, one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.unused = line(), line(), line(300)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.usual(inputs)
        chosen = inputs[:, :1] > 50
        return result + self.rare(inputs) * chosen if bool(chosen.any()) else result


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups with settings of their own."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if "bias" in name]
    weights = [p for name, p in named.items() if "bias" not in name]
    groups: list[dict[str, Any]] = [{"params": biases, "lr": 0.3}, {"params": weights}]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)


def test_which_optimizers_may_cut_a_parameter() -> None:
    kinds = torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop
    derived = type("Derived", (torch.optim.SGD,), {})  # nobody knows what it does
    others = torch.optim.Adafactor, torch.optim.Muon, derived
    model = nn.Linear(2, 2, bias=False)
    for kind in (*kinds, *others):
        assert updates_by_element(kind(model.parameters(), lr=0.1)) == (kind in kinds)


def with_a_strange_parameter(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 2))]})
    return optimizer


def in_use(model: nn.Module) -> torch.optim.Optimizer:
    """The second trainer would not find the state again that the first one cut up."""
    make_trainer(model, optimizer=(optimizer := sgd(model)))
    return optimizer


@for_each(
    ("build", "words"),
    [
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            "LBFGS requires a closure that runs the model",
        ),
        (
            lambda m: torch.optim.SparseAdam(m.parameters()),
            "SparseAdam requires sparse gradients, .* Adam differs",
        ),
        (with_a_strange_parameter, r"parameter 0 of group 1, of shape \(4, 2\), is not"),
        (lambda m: sgd(copy.deepcopy(m)), r"Create the optimizer from this model's parameters\(\)"),
        (lambda m: sgd(m.requires_grad_(False)), "holds no parameter that requires a gradient"),
        (in_use, "already belongs to a Trainer, which has partitioned its state and is deleted"),
    ],
)
def test_optimizers_that_cannot_be_divided(build: Callable[..., Any], words: str) -> None:
    model = line()
    optimizer = build(model)
    with pytest.raises((TypeError, ValueError), match=words):
        make_trainer(model, optimizer=optimizer)


CHANGES: list[Callable[[torch.optim.Optimizer, nn.Module], object]] = [
    lambda o, m: o.add_param_group({"params": list(m.parameters())}),
    lambda o, m: o.param_groups.pop(),
    lambda o, m: o.param_groups[1]["params"].append(m.weight),
]


@for_each("change", CHANGES)
def test_groups_that_were_changed_afterwards_are_refused(change: Callable[..., object]) -> None:
    model = nn.Sequential(line(), nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [{"params": list(model[i].parameters()), "lr": 0.1} for i in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    before = bits(model)
    change(optimizer, model[2])
    for call in (lambda: trainer.save("nowhere"), lambda: trainer.step(points(4))):
        with pytest.raises(ValueError, match="parameter groups changed after Trainer was created"):
            call()
    assert bits(model) == before


@both
def test_what_is_unused_or_frozen_for_a_step_is_skipped_as_in_plain_pytorch(devices: int) -> None:
    """Weight decay would change them, and so would a gradient of zeros."""
    ours, theirs = Branches().double(), Branches().double()
    trainer = make_trainer(ours, optimizer=decaying(ours), devices=devices)
    other = decaying(theirs)
    inputs, targets = (tensor.double() for tensor in points(8))
    usual, rarely = (inputs, targets), (inputs.clone(), targets.clone())
    rarely[0][6, 0] = 99.0  # one sample, in the last of four shards
    for batch, used, rests in ((usual, (), False), (rarely, ("rare",), True), (usual, (), False)):
        for model in (ours, theirs):
            model.usual.bias.requires_grad_(not rests)
        before = bits(ours)
        trainer.step(batch)
        other.zero_grad()
        square(theirs, batch).mean().backward()
        other.step()
        named = [dict(model.named_parameters()) for model in (ours, theirs)]
        torch.testing.assert_close(*named)
        after = bits(ours)
        changed = {name.split(".")[0] for name in after if after[name] != before[name]}
        assert changed == {"usual", *used}
        assert (after["usual.bias"] == before["usual.bias"]) is rests


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        return super().step(closure)


@both
def test_state_under_a_key_that_is_no_parameter_is_kept(devices: int, tmp_path: Path) -> None:
    model = line()
    optimizer = Counting(model.parameters(), lr=0.1)
    state: dict[Any, Any] = optimizer.state
    state["steps"] = 5
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    for _ in range(2):
        trainer.step(points(8))
    assert state["steps"] == 7
    with pytest.raises(TypeError, match="keeps 'steps' in its state, under no parameter"):
        trainer.save(tmp_path)


@for_each("precision", [None, "bf16-params"])
@for_each("to_others", [False, True])
def test_it_is_divided_again_with_equal_bits(precision: Any, to_others: bool) -> None:
    """The state is handed over by `states` and `take_states`."""
    found = []
    for divides in (False, True):
        model = Branches()
        trainer = make_trainer(model, optimizer=decaying(model), devices=3, precision=precision)
        trainer.average(decay=0.9)
        trainer.step(points(8))
        if divides:
            engine = engine_in(trainer)
            update, given = engine.context.update, engine.assignment
            others = replace(given, partitions=given.partitions[1:] + given.partitions[:1])
            for assignment in (others, given) if to_others else (given, given):
                # Copies, as a segment's values are replaced with it.
                states = [*unpack(packed(update.states()))]
                update.divide(update.storage, engine.context.exchange.memory.trained, assignment)
                assert [each.number for each in update.owned] == [*chain(*assignment.partitions)]
                update.take_states(states)
        trainer.step(points(8))
        with trainer.averaged():
            averages = bits(model)
        state = {
            (each.segment, each.key): each.value
            for each in engine_in(trainer).context.update.states()
        }
        found.append((bits(model), averages, state))
    one, other = found
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    for place, value in one[2].items():
        assert same_bits(torch.as_tensor(value), torch.as_tensor(other[2][place])), place


class Noisy(torch.optim.SGD):
    """Draws in its steps from some number on, as annealed noise or stochastic rounding does."""

    draw: Callable[[], object] = staticmethod(lambda: None)
    begins = 1
    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        if self.done >= self.begins:
            self.draw()
        return super().step(closure)


def noisy(draw: Any, devices: int = 1, begins: int = 1, own: Any = None) -> onefold.Trainer:
    model = line()
    optimizer: Any = Noisy(model.parameters(), lr=0.1)
    optimizer.draw, optimizer.begins, optimizer.own = draw, begins, own
    return make_trainer(model, optimizer=optimizer, devices=devices)


@both
@for_each(
    ("draw", "name"),
    [
        (lambda: torch.randn(()), "PyTorch's generator"),
        (random.random, "Python's random"),
        (np.random.rand, "NumPy's generator"),
        (np.random.standard_normal, "NumPy's generator"),  # the half of a pair
    ],
)
def test_one_that_draws_is_refused(draw: Callable[[], object], name: str, devices: int) -> None:
    words = rf"Noisy draws random numbers in step\(\), from {name}, but each.*Trainer\(model, N"
    with pytest.raises(StateError, match=words):
        noisy(draw, devices).step(points(8))


def test_one_that_begins_later_or_has_a_generator_of_its_own_is_noticed() -> None:
    trainer = noisy(lambda: torch.randn(()), begins=10)

    def train() -> None:
        for _ in range(120):  # it is looked at now and then
            trainer.step(points(8))

    with pytest.raises(StateError, match="Noisy draws"):
        train()
    assert trainer.steps > 5
    own = np.random.default_rng(1)
    with pytest.raises(StateError, match=r"Noisy draws .*, from a generator of its own"):
        noisy(own.normal, own=own).step(points(8))


def test_an_optimizer_of_the_script_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may count its calls, or look at all parameters together."""
    context = LaunchContext(options=RunOptions(placement="offload"))
    monkeypatch.setattr("onefold.trainer.current_context", lambda: context)
    model = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 40), nn.Linear(40, 1))
    optimizer = Noisy(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer, devices=None)
    for _ in range(2):
        trainer.step(points(8))
    assert optimizer.done == 2
    trainer.close()


Hook = Callable[..., None]


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(130, 140), nn.Tanh(), nn.Linear(140, 1))


def mean_square(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.grad is not None)


def by_itself(optimizer: Optimizer, *_: Any) -> None:
    """As in DINO."""
    for p in parameters_of(optimizer):
        assert p.grad is not None
        p.grad.mul_((0.01 / (p.grad.norm() + 1e-6)).clamp(max=1.0))


def by_value(optimizer: Optimizer, *_: Any) -> None:
    clip_grad_value_(parameters_of(optimizer), 0.001)


@torch.no_grad()
def to_unit_rows(optimizer: Optimizer, *_: Any) -> None:
    for p in parameters_of(optimizer):
        if p.dim() > 1:
            p.div_(p.norm(dim=1, keepdim=True))


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def wrap(optimizer: Optimizer, hook: Hook) -> None:
    step = optimizer.step

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook(optimizer)
        return step(*args, **kwargs)

    optimizer.step = wrapper.__get__(optimizer)  # type: ignore[method-assign]


@contextmanager
def registered(way: str, optimizer: Optimizer, hook: Hook) -> Iterator[None]:
    handle: Any = None
    if way == "of all":
        handle = register_optimizer_step_pre_hook(hook)
    elif way == "wrapped":
        wrap(optimizer, hook)
    elif way == "before":
        optimizer.register_step_pre_hook(hook)
    else:
        optimizer.register_step_post_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def trained(way: str, hook: Hook, *, clip: float | None = None, shards: int, devices: int) -> Any:
    """The bits after three steps; in a plain loop on no device."""
    model = model_of()
    optimizer = adam(model)
    with registered(way, optimizer, hook):
        if devices:
            choices: Any = {"shards": shards, "devices": devices, "clip_norm": clip}
            trainer = make_trainer(model, mean_square, optimizer=optimizer, **choices)
        for _ in range(3):
            if devices:
                trainer.step(points(12, 130))
                continue
            optimizer.zero_grad()
            mean_square(model, points(12, 130)).backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return bits(model)


@for_each(
    ("way", "hook", "clip"),
    [
        ("before", by_itself, 0.05),
        ("of all", by_itself, None),
        ("wrapped", by_itself, None),
        ("before", by_value, 0.05),
        ("after", to_unit_rows, 0.05),
    ],
)
def test_bits_are_those_of_a_plain_loop(way: str, hook: Hook, clip: float | None) -> None:
    plain = trained(way, hook, clip=clip, shards=1, devices=0)
    assert trained(way, hook, clip=clip, shards=1, devices=1) == plain
    assert trained(way, lambda *_: None, clip=clip, shards=1, devices=0) != plain
    found = [trained(way, hook, shards=4, devices=devices) for devices in (1, 3)]
    assert found[0] == found[1]


def of_all_together(optimizer: Optimizer, *_: Any) -> None:
    clip_grad_norm_(parameters_of(optimizer), 0.01)


class JointShards(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        of_all_together(self)
        return super().step(closure)


@for_each("devices", [1, 3])
@for_each("hook", [of_all_together, None])
def test_a_norm_of_several_is_refused(hook: Hook | None, devices: int) -> None:
    model = model_of()
    optimizer = adam(model) if hook else JointShards(model.parameters(), lr=0.1)
    if hook:
        optimizer.register_step_pre_hook(hook)
    trainer = make_trainer(model, mean_square, optimizer=optimizer, devices=devices)
    name = type(optimizer).__name__
    with pytest.raises(RuntimeError, match=rf"several parameters in the step of {name} \(.*clip_n"):
        trainer.step(points(12, 130))


@for_each(("way", "devices"), [("before", 1), ("wrapped", 2)])
def test_a_hook_that_comes_too_late_is_refused(way: str, devices: int) -> None:
    model = model_of()
    optimizer = adam(model)
    trainer = make_trainer(model, mean_square, optimizer=optimizer, devices=devices)
    trainer.step(points(12, 130))
    with (
        registered(way, optimizer, by_itself),
        pytest.raises(ValueError, match=r"Adam got a hook on its step, .* Register it before"),
    ):
        trainer.step(points(12, 130))


@for_each("first", ["hook", "wrapper, scheduler", "scheduler, wrapper"])
def test_a_hook_beside_a_scheduler_sees_whole_parameters(first: str) -> None:
    """A scheduler wraps ``step``, too."""
    model = model_of()
    optimizer = adam(model)
    seen: list[torch.Size] = []

    def look(*_: Any) -> None:
        seen.extend(p.shape for p in parameters_of(optimizer))

    for each in first.split(", "):
        if each == "scheduler":
            lr_scheduler.StepLR(optimizer, 1)
        elif each == "hook":
            optimizer.register_step_pre_hook(look)
        else:
            wrap(optimizer, look)
    make_trainer(model, mean_square, optimizer=optimizer).step(points(12, 130))
    assert seen == [p.shape for p in model.parameters()]


def test_an_optimizer_that_another_merely_knows_stays_the_scripts() -> None:
    """Of another Trainer, or of a model beside; also where they know one another."""
    models = [model_of(), model_of()]
    both = [adam(model) for model in models]
    beside = adam(own := model_of())
    for one, other in ((both[0], both[1]), (both[1], both[0])):
        one.other, one.beside = other, beside  # type: ignore[attr-defined]
    for model, optimizer in zip(models, both, strict=True):
        trainer = make_trainer(model, mean_square, optimizer=optimizer)
        trainer.step(points(12, 130))
    own(points(12, 130)[0]).sum().backward()
    before = [parameter.detach().clone() for parameter in own.parameters()]
    beside.step()
    assert not any(map(torch.equal, before, own.parameters()))

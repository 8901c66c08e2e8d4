"""How the user's own optimizer is divided, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.optimizercheck import check_optimizer, updates_by_element
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 3])


class Branches(nn.Module):
    """One branch for all samples, one for those that begin with a large number, one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.unused = line(), line(), line()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.usual(inputs)
        chosen = inputs[:, :1] > 50
        return result + self.rare(inputs) * chosen if bool(chosen.any()) else result


class OwnSGD(torch.optim.SGD):
    """Nobody knows what a derived class does."""


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> torch.optim.Optimizer:
    optimizer.zero_grad()
    square(model, batch).mean().backward()
    optimizer.step()
    return optimizer


def close(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@for_each(
    ("kind", "by_element"),
    [
        (torch.optim.SGD, True),
        (torch.optim.AdamW, True),
        (torch.optim.Rprop, True),
        (torch.optim.Adafactor, False),
        (torch.optim.Muon, False),
        (OwnSGD, False),
    ],
)
def test_which_optimizers_may_cut_a_parameter(
    kind: type[torch.optim.Optimizer], by_element: bool
) -> None:
    model = nn.Linear(2, 2, bias=False)
    assert updates_by_element(kind(model.parameters(), lr=0.1)) == by_element


@for_each(
    ("build", "words"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure that runs the model several times"),
        (NeedsClosure, "NeedsClosure needs a closure"),
        (torch.optim.SparseAdam, "SparseAdam works on sparse gradients; use Adam"),
        (lambda parameters: "sgd", "expected a torch.optim.Optimizer, got str"),
        (lambda parameters: torch.optim.SGD, "expected a torch.optim.Optimizer, got type"),
    ],
)
def test_optimizers_that_cannot_be_divided_are_refused(
    build: Callable[[Any], object], words: str
) -> None:
    model = line()
    with pytest.raises(TypeError, match=words):
        check_optimizer(build(model.parameters()), model)


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    model = line()
    optimizer = sgd(model)
    strange = nn.Parameter(torch.zeros(4, 2))
    optimizer.add_param_group({"params": [strange]})
    with pytest.raises(ValueError, match=r"SGD: parameter 0 of group 1, of shape \(4, 2\), is not"):
        make_trainer(model, optimizer=optimizer)


def test_an_optimizer_of_another_copy_of_the_model_is_refused() -> None:
    model = line()
    with pytest.raises(ValueError, match=r"Make the optimizer from this model's parameters\(\)"):
        make_trainer(model, optimizer=sgd(copy.deepcopy(model)))


def test_an_optimizer_with_nothing_to_train_is_refused() -> None:
    model = line().requires_grad_(False)
    with pytest.raises(ValueError, match="holds no parameter that requires a gradient"):
        make_trainer(model)


@for_each("change", ["a group more", "a group less", "a parameter more"])
def test_groups_that_were_changed_afterwards_are_refused(change: str) -> None:
    model = nn.Sequential(line(), nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [{"params": list(model[i].parameters()), "lr": 0.1} for i in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.step(points(4))
    before = bits(model)
    if change == "a group more":
        optimizer.add_param_group({"params": list(model[2].parameters())})
    elif change == "a group less":
        optimizer.param_groups.pop()
    else:
        optimizer.param_groups[1]["params"].append(model[2].weight)
    with pytest.raises(ValueError, match="parameter groups were changed after Trainer was made"):
        trainer.save("nowhere")
    with pytest.raises(ValueError, match="parameter groups were changed after Trainer was made"):
        trainer.step(points(4))
    assert bits(model) == before


@for_each("call", ["save", "load"])
def test_the_divided_state_is_not_given_away_as_if_it_were_whole(call: str) -> None:
    model = line()
    optimizer = sgd(model)
    whole = optimizer.state_dict()
    make_trainer(model, optimizer=optimizer).step(points(4))
    with pytest.raises(RuntimeError, match="state is divided among the devices of the run"):
        optimizer.state_dict() if call == "save" else optimizer.load_state_dict(whole)


@both
def test_the_groups_hold_the_users_parameters_again_after_a_step(devices: int) -> None:
    model = nn.Sequential(nn.Linear(3, 200), nn.Linear(200, 100), nn.Linear(100, 1))
    parameters = list(model.parameters())
    optimizer = sgd(model)
    users = optimizer.param_groups[0]["params"]
    make_trainer(model, optimizer=optimizer, devices=devices).step(points(4))
    held = optimizer.param_groups[0]["params"]
    assert held is users
    assert len(held) == len(parameters)
    assert all(a is b for a, b in zip(held, parameters, strict=True))


def test_the_groups_hold_the_users_parameters_again_after_a_failure() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise KeyError("no state")

    model = line()
    optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(KeyError, match="no state"):
        make_trainer(model, optimizer=optimizer).step(points(4))
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert model.weight.grad is None


@both
def test_unused_parameters_are_skipped_as_plain_pytorch_does(devices: int) -> None:
    """Weight decay would change them, and so would a gradient of zeros."""
    ours, theirs = Branches().double(), Branches().double()
    trainer = make_trainer(ours, optimizer=decaying(ours), devices=devices)
    other = decaying(theirs)
    usual = tuple(tensor.double() for tensor in points(8))
    rarely = tuple(tensor.clone() for tensor in usual)
    rarely[0][6, 0] = 99.0  # one sample, in the last of four shards
    for batch, used in ((usual, False), (rarely, True), (usual, False)):
        before = bits(ours)
        trainer.step(batch)
        plain_step(theirs, other, batch)
        close(ours, theirs)
        after = bits(ours)
        changed = {name.split(".")[0] for name in after if after[name] != before[name]}
        assert changed == ({"usual", "rare"} if used else {"usual"})


@both
def test_frozen_parameters_stay(devices: int) -> None:
    model = Branches()
    model.usual.bias.requires_grad_(False)
    before = bits(model)
    make_trainer(model, optimizer=decaying(model), devices=devices).step(points(8))
    after = bits(model)
    assert after["usual.bias"] == before["usual.bias"]
    assert after["usual.weight"] != before["usual.weight"]


@both
def test_parameters_that_no_optimizer_holds_stay(devices: int) -> None:
    model = Branches()
    before = bits(model)
    optimizer = decaying(model.rare)
    batch = points(8)
    batch[0][:, 0] = 99.0
    make_trainer(model, optimizer=optimizer, devices=devices).step(batch)
    changed = {name for name, value in bits(model).items() if value != before[name]}
    assert changed == {"rare.weight", "rare.bias"}
    assert all(p.grad is None for p in model.parameters())


@both
def test_a_parameter_that_is_unfrozen_later_is_refused_by_name(devices: int) -> None:
    model = Branches()
    model.rare.weight.requires_grad_(False)
    trainer = make_trainer(model, devices=devices)
    trainer.step(points(8))
    before = bits(model)
    model.rare.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^parameter rare\.weight was frozen when Trainer was"):
        trainer.step(points(8))
    assert bits(model) == before


@for_each(
    "devices",
    [1, 3],
)
def test_a_parameter_may_be_frozen_later_and_unfrozen_again(devices: int) -> None:
    ours, theirs = Branches(), Branches()
    trainer = make_trainer(ours, optimizer=decaying(ours), devices=devices)
    other = decaying(theirs)
    for frozen in (False, True, False):
        for model in (ours, theirs):
            model.usual.bias.requires_grad_(not frozen)
        trainer.step(points(8))
        plain_step(theirs, other, points(8))
        close(ours, theirs)


@both
def test_every_group_has_its_own_settings(devices: int) -> None:
    ours, theirs = line(), line()

    def groups(model: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [model.bias], "lr": 1.0}, {"params": [model.weight]}], lr=0.01
        )

    make_trainer(ours, optimizer=groups(ours), devices=devices).step(points(8))
    plain_step(theirs, groups(theirs), points(8))
    close(ours, theirs)


@both
def test_the_optimizers_own_hooks_run_once_a_step(devices: int) -> None:
    model = line()
    optimizer = sgd(model)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    for _ in range(2):
        trainer.step(points(8))
    assert calls == ["pre", "post"] * 2


def test_an_optimizer_cannot_be_divided_twice() -> None:
    """The second trainer would not find the state again that the first one cut up."""
    model = nn.Linear(300, 100)
    optimizer = sgd(model)
    make_trainer(model, optimizer=optimizer).step((torch.ones(8, 300), torch.ones(8, 100)))
    with pytest.raises(ValueError, match="already belongs to a Trainer"):
        make_trainer(model, optimizer=optimizer)


@for_each("devices", [1, 2])
def test_parameters_that_were_given_other_memory_are_noticed(devices: int) -> None:
    """By a second trainer of the same model, by ``model.to(...)``, or by ``.data = ...``."""
    model = nn.Linear(300, 100)
    trainer = make_trainer(model, devices=devices)
    model.weight.data = model.weight.data.clone()
    with pytest.raises(ValueError, match=r"^parameter weight "):
        trainer.step((torch.ones(8, 300), torch.ones(8, 100)))


def test_two_optimizers_of_one_class_are_independent() -> None:
    """A hook of one must not refuse what the other one is asked."""
    optimizer = sgd(line())
    onefold.Trainer(model := line(), sgd(model), square, shards=1, threads=1)
    assert optimizer.state_dict()["state"] == {}


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


@for_each("devices", [1, 2])
def test_state_under_a_key_that_is_no_parameter_is_kept(devices: int, tmp_path: Path) -> None:
    model = line()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.state["steps"] = 5
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    for _ in range(2):
        trainer.step(points(8))
    assert optimizer.state["steps"] == 7
    with pytest.raises(TypeError, match="keeps 'steps' in its state, under no parameter"):
        trainer.save(tmp_path)


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_lists_of_low_precision_on_a_processor_are_refused(dtype: torch.dtype) -> None:
    """PyTorch's SGD rounds a parameter in two ways, by whether its neighbours have momentum."""
    model = nn.Linear(40, 1).to(dtype)
    for foreach, momentum in ((None, 0.9), (False, 0.9), (True, 0.0)):
        made = torch.optim.SGD(model.parameters(), foreach=foreach, momentum=momentum)
        check_optimizer(made, model)
    lists = torch.optim.SGD(model.parameters(), foreach=True, momentum=0.9)
    with pytest.raises(ValueError, match=r"group 0 has foreach=True, .* Leave foreach out"):
        check_optimizer(lists, model)
    model.float()
    check_optimizer(torch.optim.SGD(model.parameters(), foreach=True, momentum=0.9), model)


def test_adafactor_of_two_precisions_needs_its_eps() -> None:
    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = parameters()

    model = Two()
    words = r"Adafactor: group 0 has parameters of torch.bfloat16, torch.float32 and the default"
    with pytest.raises(ValueError, match=words):
        check_optimizer(torch.optim.Adafactor(model.parameters()), model)
    check_optimizer(torch.optim.Adafactor(model.parameters(), eps=(1e-7, 1e-3)), model)
    groups = [{"params": [p]} for p in model.parameters()]
    check_optimizer(torch.optim.Adafactor(groups), model)


@for_each("devices", [2, 3])
def test_a_span_without_any_gradient_is_left_alone(devices: int) -> None:
    """With a weight that is not the number of samples, gradients are scaled: also none of them."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = line()
            self.unused = nn.Linear(300, 300)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)

    def loss(model: nn.Module, batch: Batch) -> onefold.Mean:
        return onefold.Mean(square(model, batch).sum(), 3.0 * len(batch[0]))

    results = []
    for count in (1, devices):
        torch.manual_seed(0)
        model = Half()
        make_trainer(model, loss, devices=count, clip_norm=0.1).step(points(8))
        results.append(bits(model))
    assert results[0] == results[1]

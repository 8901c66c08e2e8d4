"""Whose gradient it is: a shard's own until it is done, and then nobody's but onefold's."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from onefold.core.fold import fold_shards
from onefold.errors import GradientError, StateError
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

SHARDS = 8
SAMPLES = 24


def trained(
    build: Callable[[], nn.Module],
    loss: Callable[..., object] = square,
    *,
    devices: int = 1,
    steps: int = 3,
    **settings: Any,
) -> dict[str, bytes]:
    """The bits after some steps, and the norms of their gradients."""
    torch.manual_seed(0)
    trainer = make_trainer(build(), loss, shards=SHARDS, devices=devices, **settings)
    norms = [trainer.step(points(SAMPLES)).grad_norm for _ in range(steps)]
    return bits(trainer.model) | {"norms": repr(norms).encode()}


def fgsm(model: nn.Module, batch: Batch) -> torch.Tensor:
    """An attack as tutorials write it: a backward of its own, and zero_grad."""
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_(True)
    square(model, (inputs, targets)).mean().backward()
    assert inputs.grad is not None
    attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
    model.zero_grad()
    return square(model, (attacked, targets))


class Fused(nn.Module):
    """Queries, keys and values by one product, as attention is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.eye(3) + n) for n in range(3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, torch.cat(list(self.parts))).sum(dim=1, keepdim=True)


def layered() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 1))


@for_each(("shards", "devices"), [(1, 1), (3, 2), (4, 3), (5, 5)])
@for_each(("build", "loss"), [(layered, square), (line, fgsm), (Fused, square)])
def test_the_optimizer_is_given_the_fold_over_the_gradients_of_shards(
    build: Callable[[], nn.Module], loss: Callable[..., torch.Tensor], shards: int, devices: int
) -> None:
    """To the bit, as plain PyTorch computes them."""
    model, batch = build(), points(11)
    plain = copy.deepcopy(model)

    def of_shard(number: int) -> list[torch.Tensor]:
        part = tuple(torch.tensor_split(tensor, shards)[number] for tensor in batch)
        return list(torch.autograd.grad(loss(plain, part).sum() / 11, list(plain.parameters())))

    expected = fold_shards(
        [of_shard(number) for number in range(shards)],
        lambda left, right: [a + b for a, b in zip(left, right, strict=True)],
    )
    given: list[bytes] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def note(*_: object) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        given.extend(grad.numpy().tobytes() for grad in grads)

    optimizer.register_step_pre_hook(note)
    make_trainer(model, loss, optimizer=optimizer, shards=shards, devices=devices).step(batch)
    assert given == [gradient.numpy().tobytes() for gradient in expected]


def test_a_hook_sees_the_gradient_of_its_shard_alone_and_may_put_another_there() -> None:
    seen: list[float] = []

    def clamped(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad.abs().max()))
        parameter.grad = parameter.grad.clamp(-0.05, 0.05)

    def hooked() -> nn.Module:
        model = line()
        model.weight.register_post_accumulate_grad_hook(clamped)
        return model

    found = []
    for devices in (1, 2, 8):
        seen.clear()
        found.append((trained(hooked, devices=devices, steps=1), sorted(seen)))
    assert found[0] == found[1] == found[2]
    assert len(seen) == SHARDS


OTHER_STRIDES: list[Callable[[Any], None]] = [
    lambda p: setattr(p, "grad", p.grad.sum().expand_as(p)),
    lambda p: setattr(p, "grad", p.grad.t().contiguous().t()),
]


@for_each("hook", OTHER_STRIDES)
def test_other_strides_have_the_same_bits(hook: Callable[[nn.Parameter], None]) -> None:
    """The norm by which it is clipped is added up in the order of the memory."""

    def build() -> nn.Module:
        middle = [nn.Linear(64, 64) for _ in range(9)]
        model = nn.Sequential(nn.Linear(3, 37), nn.Linear(37, 64), *middle, nn.Linear(64, 1))
        for part in (model[0], model[1]):
            part.get_parameter("weight").register_post_accumulate_grad_hook(hook)
        return model

    found = [trained(build, devices=n, steps=6, clip_norm=1e-3) for n in (1, 3, 8)]
    assert found[0] == found[1] == found[2]


def test_a_tensor_that_is_given_for_two_shards_behind_the_hooks_is_refused() -> None:
    """By a hook of autograd's own node, which a parameter does not know of."""
    model = line()
    kept = torch.zeros(1, 3)
    trainer = make_trainer(model)
    node: Any = model.weight.view_as(model.weight).grad_fn
    node = node.next_functions[0][0]

    node.register_hook(lambda *_: setattr(model.weight, "grad", kept))
    with pytest.raises(GradientError, match=r"the same tensor into \.grad for two shards"):
        trainer.step(points(8))


def test_what_an_inner_backward_leaves_is_refused_unless_it_is_nothing() -> None:
    zeroes = [False]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        square(model, batch).mean().backward()
        if zeroes[0]:
            model.zero_grad(set_to_none=False)
        return square(model, batch)

    with pytest.raises(GradientError, match=r"step 1, shard 0: .* left a gradient in weight.grad"):
        trained(line, loss)
    zeroes[0] = True
    assert trained(line, loss) == trained(line)


class Written(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.line = line()
        self.table = nn.Embedding(4, 1, max_norm=0.1)
        self.shadow = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.how = how

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.how == "max_norm":
            return self.line(inputs) + self.table(torch.arange(len(inputs)) % 4)
        with torch.no_grad():
            if self.how == "mask":
                self.line.weight.mul_(torch.tensor([1.0, 0.0, 1.0]))
            elif self.how == "momentum":
                self.shadow.mul_(0.9).add_(inputs.mean(dim=0))
            else:
                self.line.weight.data.mul_(0.5)
        return self.line(inputs)


def summed(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"sum": model(batch[0]).sum(dim=1)}


@for_each(("call", "devices"), [("step", 1), ("step", 2), ("evaluate", 2), ("predict", 1)])
@for_each(
    ("how", "name"),
    [
        ("max_norm", "parameter table.weight"),
        ("mask", "parameter line.weight"),
        ("momentum", "parameter shadow"),
        ("data", r"a parameter \(through .data\)"),
    ],
)
def test_written_parameters_are_refused(how: str, name: str, call: str, devices: int) -> None:
    trainer = make_trainer(Written(how), devices=devices)
    where = "step 1" if call == "step" else "an evaluation"
    data: Any = TensorDataset(*points(8))
    given = (points(8),) if call == "step" else (summed, data)
    choices = {} if call == "step" else {"batch_size": 8}
    with pytest.raises(StateError, match=f"{where}: {name} was written to while "):
        getattr(trainer, call)(*given, **choices)


def test_with_one_shard_they_may_be_written_to_as_in_a_plain_loop() -> None:
    ours = Written("max_norm")
    theirs = copy.deepcopy(ours)
    trainer = make_trainer(ours, shards=1)
    optimizer = sgd(theirs)
    for _ in range(3):
        trainer.step(points(8))
        optimizer.zero_grad()
        square(theirs, points(8)).mean().backward()
        optimizer.step()
    assert bits(ours) == bits(theirs)
    trainer.evaluate(summed, TensorDataset(*points(8)), batch_size=8)
    trainer.step(points(8))


@for_each("foreach", [None, False, True])
def test_lines_of_a_plain_loop_that_do_nothing_any_more_are_refused(foreach: bool | None) -> None:
    model, other = line(), line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.step(points(8))
    for given in (model.parameters(), model.weight, [other.weight, model.bias]):
        with pytest.raises(RuntimeError, match=r"do nothing\. .* pass clip_norm to Trainer"):
            clip_grad_norm_(given, 1.0, foreach=foreach)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called by the script"):
        optimizer.step()
    trainer.step(points(8))
    assert float(clip_grad_norm_(other.parameters(), 1.0)) == 0.0
    square(other, points(8)).mean().backward()
    before = copy.deepcopy(other.weight.grad)
    assert before is not None
    norm = clip_grad_norm_((p for p in other.parameters()), 1e-3, foreach=foreach)
    torch.testing.assert_close(other.weight.grad, before * (1e-3 / (norm + 1e-6)))
    held = weakref.ref(model.weight)
    trainer.close()
    del trainer, model, optimizer, given
    gc.collect()
    assert held() is None

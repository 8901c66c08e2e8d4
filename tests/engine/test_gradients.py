"""Whose gradient it is: a shard's own until it is done, and then nobody's but onefold's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onefold.engine.gradients import add_gradients, take_gradients
from onefold.errors import GradientError, StateError
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

SHARDS = 8
SAMPLES = 24


def trained(
    build: Callable[[], nn.Module], loss: Callable[..., object], devices: int, steps: int = 3
) -> dict[str, bytes]:
    """The bits after some steps."""
    torch.manual_seed(0)
    trainer = make_trainer(build(), loss, shards=SHARDS, devices=devices)
    for _ in range(steps):
        trainer.step(points(SAMPLES))
    return bits(trainer.model)


def whole(build: Callable[[], nn.Module], loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the whole batch, as a plain loop has them, in float64."""
    torch.manual_seed(0)
    model = build().double()
    batch = tuple(tensor.double() for tensor in points(SAMPLES))
    loss(model, batch).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def stepped(build: Callable[[], nn.Module], loss: Callable[..., object]) -> list[torch.Tensor]:
    """The gradients of one step, from what plain descent at a rate of 1 has changed."""
    torch.manual_seed(0)
    model = build().double()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model, loss, optimizer=optimizer, shards=SHARDS)
    trainer.step(tuple(tensor.double() for tensor in points(SAMPLES)))
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


def fgsm(model: nn.Module, batch: Batch) -> torch.Tensor:
    """An attack as tutorials write it: a backward of its own, and zero_grad."""
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_(True)
    square(model, (inputs, targets)).mean().backward()
    attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
    model.zero_grad()
    return square(model, (attacked, targets))


class Joined(nn.Module):
    """Parameters that are views of one gradient, cut at different places."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 2, 2, 3)
        self.parts = nn.ParameterList(
            [nn.Parameter(torch.arange(float(n)) / 10 + n) for n in sizes]
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.parts
        weight = torch.cat([a, b]) + torch.cat([c, d])
        return (inputs.repeat(1, 2)[:, :5] * weight).sum(dim=1, keepdim=True)


class Fused(nn.Module):
    """Queries, keys and values by one product, as attention is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.eye(3) + n) for n in range(3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, torch.cat(list(self.parts))).sum(dim=1, keepdim=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "attack": (line, fgsm),
    "cut elsewhere": (Joined, square),
    "cat of parameters": (Fused, square),
}


@for_each("case", CASES)
def test_the_gradient_is_that_of_the_whole_batch(case: str) -> None:
    for ours, theirs in zip(stepped(*CASES[case]), whole(*CASES[case]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@for_each("devices", [2, 3, 8])
@for_each("case", CASES)
def test_the_bits_do_not_depend_on_the_devices(case: str, devices: int) -> None:
    assert trained(*CASES[case], devices) == trained(*CASES[case], 1)


def halved(parameter: nn.Parameter) -> None:
    """A hook that looks at what has come, and puts something else there."""
    assert parameter.grad is not None
    seen.append(float(parameter.grad.abs().max()))
    parameter.grad = parameter.grad.clamp(-0.05, 0.05)


seen: list[float] = []


def hooked() -> nn.Module:
    model = line()
    model.weight.register_post_accumulate_grad_hook(halved)
    return model


@for_each("devices", [2, 8])
def test_a_hook_sees_the_gradient_of_its_shard_alone(devices: int) -> None:
    seen.clear()
    alone = trained(hooked, square, 1, steps=1)
    first = sorted(seen)
    seen.clear()
    assert trained(hooked, square, devices, steps=1) == alone
    assert sorted(seen) == first
    assert len(seen) == SHARDS


def test_what_an_inner_backward_leaves_is_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        square(model, batch).mean().backward()
        return square(model, batch)

    trainer = make_trainer(line(), loss)
    with pytest.raises(GradientError, match=r"step 1, shard 0: .* left a gradient in weight.grad"):
        trainer.step(points(8))


def test_zeros_that_an_inner_backward_leaves_are_nothing() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        square(model, batch).mean().backward()
        model.zero_grad(set_to_none=False)
        return square(model, batch)

    assert trained(line, loss, 1) == trained(line, square, 1)


@for_each("devices", [1, 2, 4])
def test_what_a_hook_keeps_stays_its_own(devices: int) -> None:
    """One tensor for all shards, or views of one memory: what is added up is a copy."""
    results = []
    for count in (1, devices):
        model = line()
        memory = torch.zeros(4)

        def keep(parameter: nn.Parameter, memory: torch.Tensor = memory) -> None:
            view = memory[: parameter.numel()].view(parameter.shape)
            parameter.grad = view.copy_(parameter.grad)

        model.weight.register_post_accumulate_grad_hook(keep)
        trainer = make_trainer(model, shards=4, devices=count)
        trainer.step(points(8))
        results.append((bits(model), memory.tolist()))
    plain = line()
    make_trainer(plain, shards=4).step(points(8))
    assert results[0] == results[1]
    assert results[0][0] == bits(plain)


def test_gradients_that_share_memory_are_set_apart() -> None:
    memory = torch.arange(10.0)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 6, 3, 10)]
    views = [memory[:4], memory[4:], memory[3:6], memory.clone()]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    taken = take_gradients(parameters, [(1,)] * 4, list("abcd"), "here")
    assert all(parameter.grad is None for parameter in parameters)
    assert [g.tolist() for g in taken if g is not None] == [view.tolist() for view in views]
    added = add_gradients(taken, [torch.ones_like(p) for p in parameters])
    expected = [(view + 1).tolist() for view in (range_of(0, 4), range_of(4, 10), range_of(3, 6))]
    assert [g.tolist() for g in added[:3] if g is not None] == expected


def range_of(start: int, stop: int) -> torch.Tensor:
    return torch.arange(float(start), float(stop))


def test_an_expanded_gradient_gets_memory_of_its_own() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    other = nn.Parameter(torch.zeros(1))
    base = torch.ones(4)
    parameter.grad, other.grad = base[1:2].expand(2, 3), base[1:2]
    taken = take_gradients([parameter, other], [(3, 1), (1,)], ["a", "b"], "here")
    add_gradients(taken, [torch.ones(2, 3), torch.ones(1)])
    assert [g.tolist() for g in taken if g is not None] == [[[2.0] * 3] * 2, [2.0]]


def expanded(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.sum().expand_as(parameter)


def turned(parameter: nn.Parameter) -> None:
    """The same values in other strides than the parameter's."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t().contiguous().t()


@for_each("devices", [2, 3, 8])
@for_each("hook", [expanded, turned])
def test_a_gradient_that_a_hook_lays_out_otherwise_has_the_same_bits(
    hook: Callable[[nn.Parameter], None], devices: int
) -> None:
    """The norm by which it is clipped is added up in the order of the memory."""

    def train(number: int) -> dict[str, bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 64), nn.Linear(64, 1))
        for part in (model[0], model[2]):
            part.weight.register_post_accumulate_grad_hook(hook)
        trainer = make_trainer(model, shards=SHARDS, devices=number, clip_norm=1e-3)
        for _ in range(12):
            trainer.step(points(SAMPLES))
        return bits(model)

    assert train(devices) == train(1)


@for_each("devices", [2, 3, 8])
def test_gradients_that_no_optimizer_takes_are_their_shards_too(devices: int) -> None:
    """A hook may look at them: they must not pile up on a device."""

    def train(number: int) -> dict[str, bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

        def looking(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            beside = model[1].bias.grad
            parameter.grad = parameter.grad + (0.0 if beside is None else beside.mean())

        model[0].weight.register_post_accumulate_grad_hook(looking)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        trainer = make_trainer(model, optimizer=optimizer, shards=SHARDS, devices=number)
        for _ in range(2):
            trainer.step(points(SAMPLES))
        return bits(model)

    assert train(devices) == train(1)


class Written(nn.Module):
    """Writes to a parameter while it computes."""

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


@for_each("devices", [1, 2])
@for_each(
    ("how", "name"),
    [
        ("max_norm", "parameter table.weight"),
        ("mask", "parameter line.weight"),
        ("momentum", "parameter shadow"),
        ("data", r"parameters \(through .data\)"),
    ],
)
def test_parameters_that_the_forward_pass_writes_to_are_refused(
    how: str, name: str, devices: int
) -> None:
    trainer = make_trainer(Written(how), devices=devices)
    with pytest.raises(StateError, match=f"step 1: {name} was written to while the loss"):
        trainer.step(points(8))


@for_each("devices", [1, 2])
@for_each("call", ["evaluate", "predict"])
@for_each(
    ("how", "name"),
    [
        ("max_norm", "parameter table.weight"),
        ("mask", "parameter line.weight"),
        ("data", r"parameters \(through .data\)"),
    ],
)
def test_so_are_those_that_an_evaluation_writes_to(
    how: str, name: str, call: str, devices: int
) -> None:
    model = Written(how)
    trainer = make_trainer(model, devices=devices)
    inputs, targets = points(8)

    def score(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, object]:
        return {"sum": model(batch[0]).sum(dim=1)}

    data = torch.utils.data.TensorDataset(inputs, targets)
    with pytest.raises(StateError, match=f"an evaluation: {name} was written to while scores"):
        getattr(trainer, call)(score, data, batch_size=8)


def test_with_one_shard_an_evaluation_may_write_as_in_a_plain_loop() -> None:
    trainer = make_trainer(Written("max_norm"), shards=1)
    trainer.step(points(8))
    data = torch.utils.data.TensorDataset(*points(8))
    trainer.evaluate(lambda model, batch: {"sum": model(batch[0]).sum(dim=1)}, data, batch_size=8)
    trainer.step(points(8))


def test_with_one_shard_they_may_be_written_to_as_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    ours = Written("max_norm")
    theirs = Written("max_norm")
    theirs.load_state_dict(ours.state_dict())
    trainer = make_trainer(ours, shards=1)
    optimizer = torch.optim.SGD(
        [p for p in theirs.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    for _ in range(3):
        trainer.step(points(8))
        optimizer.zero_grad()
        square(theirs, points(8)).mean().backward()
        optimizer.step()
    assert bits(ours) == bits(theirs)


def test_lines_of_a_plain_loop_that_do_nothing_any_more_are_refused() -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.step(points(8))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ .* give clip_norm to Trainer"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called by the script"):
        optimizer.step()
    trainer.step(points(8))


def test_clipping_is_what_it_was_for_other_parameters() -> None:
    make_trainer()
    other = line()
    square(other, points(8)).mean().backward()
    norm = nn.utils.clip_grad_norm_(other.parameters(), 1e-3)
    assert float(norm) > 1e-3
    assert float(other.weight.grad.norm()) < 1e-3
    assert float(nn.utils.clip_grad_norm_(line().parameters(), 1.0)) == 0.0


@for_each("fused", [False, True])
def test_clipping_with_one_shard_has_pytorchs_bits(fused: bool) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 1))
    theirs = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 1))
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, fused=fused)
    trainer = make_trainer(ours, optimizer=optimizer, shards=1, clip_norm=0.01)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, fused=fused)
    for _ in range(4):
        trainer.step(points(8))
        plain.zero_grad()
        square(theirs, points(8)).mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        plain.step()
    assert bits(ours) == bits(theirs)


class TwoPrecisions(nn.Module):
    """One layer in half precision, one in single."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(3, 90, dtype=torch.bfloat16)
        self.single = nn.Linear(90, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.single(self.low(inputs.bfloat16()).float().tanh())


def test_clipping_is_as_fine_in_half_precision() -> None:
    """The factor is not rounded to the gradient's precision first."""
    torch.manual_seed(0)
    ours, theirs = TwoPrecisions(), TwoPrecisions()
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    trainer = make_trainer(ours, optimizer=optimizer, shards=1, clip_norm=0.3)
    plain = torch.optim.SGD(theirs.parameters(), lr=1.0)
    for _ in range(4):
        trainer.step(points(8))
        plain.zero_grad()
        square(theirs, points(8)).mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        plain.step()
    assert bits(ours) == bits(theirs)


def test_a_tensor_that_is_given_for_two_shards_behind_the_hooks_is_refused() -> None:
    """By a hook of autograd's own node, which a parameter does not know of."""
    model = line()
    kept = torch.zeros(1, 3)
    trainer = make_trainer(model)
    node = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]

    def keep(*_: object) -> None:
        model.weight.grad = kept

    node.register_hook(keep)
    with pytest.raises(GradientError, match=r"the same tensor into \.grad for two shards"):
        trainer.step(points(8))

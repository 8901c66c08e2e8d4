"""Models and losses that a line of devices cannot compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import onefold

WIDTH = 6
DEVICES = 3
Forward = Callable[["Layers", torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Layers that each are a stage, called as a function says."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self, forward: Forward, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.between = nn.Tanh()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


class Linear(nn.Linear):
    """A layer that may be given more than it uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        return super().forward(x)


class Overwriting(Linear):
    """A layer that writes to what it is given beside its input."""

    def forward(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        for other in others:
            assert isinstance(other, torch.Tensor)
            other.add_(1.0)
        return super().forward(x)


class Vectorised(Linear):
    """A layer that takes one sample at a time."""

    def forward(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        out: torch.Tensor = torch.vmap(super().forward)(x)
        return out


class Averaging(Linear):
    """A layer that leaves its mean in a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.mean.copy_(out.detach().mean(dim=0))
        return out


class Rows(torch.Tensor):
    """A kind of tensor that a script has made."""


class Thinning(Linear):
    """A layer that draws what it multiplies by, and tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor, *told: float) -> Any:
        factor = random.random()
        if told:
            return super().forward(x) * factor, factor
        self.factor = factor
        return super().forward(x) * factor


class Choosing(Linear):
    """A layer that computes with some of its rows, as experts do."""

    def forward(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        out = x.clone()
        chosen = x.sum(dim=1) > 0
        out[chosen] = super().forward(x[chosen])
        return out


class Wrapped(nn.Module):
    """A layer with a part that can be called alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x).tanh()
        return out


def by_parts(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Wrapped)
        x = layer.inner(x) if number == 2 else layer(x)
    return x


def in_order(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def by(numbers: list[int]) -> Forward:
    def forward(model: Layers, x: torch.Tensor) -> torch.Tensor:
        for number in numbers:
            x = model.layers[number](x)
        return x

    return forward


def looking_at_values(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x) if bool(x.sum() > -1e9) else x
    return x


def passing_by(model: Layers, x: torch.Tensor) -> torch.Tensor:
    first = model.layers[0](x)
    return by([1, 2, 3, 4, 5])(model, first) + first


def passing_by_in_an_argument(model: Layers, x: torch.Tensor) -> torch.Tensor:
    y = first = model.layers[0](x)
    for number, layer in enumerate(model.layers[1:]):
        y = layer(y, first) if number == 3 else layer(y)
    return y


def writing_down(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        model.mean.copy_(x.detach().mean(dim=0))
    return x


def looking_at_the_class(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, x if type(x) is torch.Tensor else x[:1])
    return x


def numbering(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        # Nothing but a line would make a difference.
        x = layer(x, int(type(x) is torch.Tensor))
    return x


def drawing(model: Layers, x: torch.Tensor) -> torch.Tensor:
    factor = 1.0
    for layer in model.layers:
        x, factor = layer(x, factor)
    return x * factor


def drawing_in_a_hook(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x) * torch.rand(())
    return x


def at_once(model: Layers, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(lambda y: in_order(model, y), x, use_reentrant=False)
    return out


def reentrant(model: Layers, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out: torch.Tensor = checkpoint(lambda y: in_order(model, y), x, use_reentrant=True)
    return out


def redrawing(model: Layers, x: torch.Tensor) -> torch.Tensor:
    def dropping(y: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            y = F.dropout(layer(y), 0.3)
        return y

    out: torch.Tensor = checkpoint(dropping, x, use_reentrant=False, preserve_rng_state=False)
    return out


def counting(model: Layers, x: torch.Tensor) -> torch.Tensor:
    def counted(y: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        return in_order(model, y)

    out: torch.Tensor = checkpoint(counted, x, use_reentrant=False)
    return out


def with_the_batch(model: Layers, x: torch.Tensor) -> torch.Tensor:
    y = x
    for number, layer in enumerate(model.layers):
        y = layer(y, x) if number == 0 else layer(y.clone())
    return y


def with_a_mask(model: Layers, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(WIDTH)
    for number, layer in enumerate(model.layers):
        x = layer(x, mask) if number == 4 else layer(x)
    return x * mask


def with_views(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(model.layers):
        y = x.detach().clone()
        x = layer(x, y[0], y[0]) if number == 4 else layer(x)
    return x


def keeping_a_mean(model: Layers, x: torch.Tensor) -> torch.Tensor:
    x = model.layers[0](x)
    mean = model.layers[0].mean.clone()
    return by([1, 2, 3, 4, 5])(model, x) + mean


def with_an_attribute(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        x.origin = "here"  # type: ignore[attr-defined]
    return x


def with_its_dtype(model: Layers, x: torch.Tensor) -> torch.Tensor:
    x = model.layers[0](x)
    scale = torch.full((1,), 0.37, dtype=x.dtype)  # a linear layer's, in bf16
    return torch.nn.Sequential(*model.layers[1:])(x) * scale


def of_another_kind(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, x.detach().as_subclass(Rows))
    return x


def sparse(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, torch.eye(3).to_sparse())
    return x


def scaling(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x) * model.scale
    return x


def squashing(model: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = model.between(layer(x))
    return x


def far(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean(dim=1)


def of_its_gradient(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return far(model, batch.clone().requires_grad_())


def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return far(model, batch) + far(model, batch + 1)


def penalised(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return far(model, batch) + sum(p.square().sum() for p in model.parameters())


def gathering(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)
    return (out - onefold.gather(out).mean(dim=0)).square().mean(dim=1)


def of_two_terms(model: nn.Module, batch: torch.Tensor) -> Any:
    out = model(batch)
    return onefold.Mean(out.sum(), out.numel()) + onefold.Mean(out.square().sum(), len(out))


def differentiating(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.clone().requires_grad_()
    losses = far(model, batch)
    (gradient,) = torch.autograd.grad(losses.sum(), batch, create_graph=True)
    return losses + gradient.square().mean(dim=1)


def one_by_one(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.vmap(lambda x: (model(x[None])[0] - x).square().mean())(batch)
    return out


def normalising(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.mul_(0.5)
    return model(batch.clone()).square().mean(dim=1)


def hooked(model: Layers) -> None:
    model.register_full_backward_hook(lambda *_: None)


def hooked_between(model: Layers) -> None:
    model.between.register_full_backward_hook(lambda *_: None)


@dataclass(frozen=True)
class Refused:
    """What a line of devices refuses."""

    match: str
    forward: Forward = in_order
    loss: Callable[..., Any] = far
    layer: Callable[[], nn.Module] = Linear
    prepare: Callable[[Layers], None] = lambda _: None
    stops_early: bool = True
    precision: str = "fp32"
    in_processes: str = ""
    """What is said where each device has a process; the same if empty, nothing if "-"."""


REFUSED = {
    "values": Refused("the script computes __bool__ of what a stage", looking_at_values),
    "skip": Refused("uses something made before stage layers.. again after it", passing_by),
    "argument": Refused("is called with something made before stage", passing_by_in_an_argument),
    "writing": Refused("writes what a stage on another device gives into", writing_down),
    "shapes": Refused("tensor of shape .* there, and .* here", looking_at_the_class),
    "numbers": Refused(r"argument .* is 1 there, and argument .* is 0 here", numbering),
    "drawn": Refused("draws random numbers, and gives a number", drawing, layer=Thinning),
    "kept": Refused("draws random numbers, and .* keeps one", in_order, layer=Thinning),
    "one by one": Refused("is called inside of torch.vmap", loss=one_by_one),
    "draws": Refused("draws random numbers between two stages", drawing_in_a_hook, layer=Linear),
    "order": Refused("stage layers.1 is called after stage layers.2", by([0, 2, 1, 3, 4, 5])),
    "dropped": Refused(
        r"stage layers.4 is called .*, where layers.2 was expected: .* must be called all the same",
        by([0, 1, 4, 5]),
    ),
    "experts": Refused(
        r"stage layers.0 is another device's, and computes __getitem__, .* depends on values",
        layer=Choosing,
    ),
    "a part": Refused(
        r"parameter layers.2.inner.weight .* outside of its stage, .*: in a part of it that is",
        by_parts,
        layer=Wrapped,
    ),
    "backwards": Refused("layers.5 is called first, where layers.2 was", by([5, 4, 3, 2, 1, 0])),
    "twice": Refused("stage layers.0 is called after stage layers", loss=twice),
    "left out": Refused("came to its end on device 1", by([0, 1, 2, 3])),
    "no early stop": Refused("would be computed once more", at_once, stops_early=False),
    "reentrant": Refused("use_reentrant=True", reentrant),
    "other draws": Refused("once more with other random numbers", redrawing),
    "counting": Refused("changes a buffer of the model before stage", counting),
    "batch": Refused(
        "the loss changes its batch",
        with_the_batch,
        layer=Overwriting,
        in_processes="that is not its own",
    ),
    "mask": Refused("writes in place to a tensor of shape", with_a_mask, layer=Overwriting),
    "views": Refused("shares memory with the batch or with", with_views, layer=Overwriting),
    "scale": Refused("parameter scale is used on device 1 and on a later one", scaling),
    "penalty": Refused("parameter .* is used on device 2, outside of its stage", loss=penalised),
    "gather": Refused("the loss calls onefold.gather", loss=gathering),
    "terms": Refused("several terms with divisors of their own", loss=of_two_terms),
    "grad": Refused("the loss differentiates something itself", loss=differentiating),
    "in place": Refused("the loss changes its batch", loss=normalising, in_processes="-"),
    "attribute": Refused("a tensor that has an attribute origin", with_an_attribute),
    "kind": Refused("is called with a Rows", of_another_kind),
    "mean": Refused("something made before stage", keeping_a_mean, layer=Averaging),
    "dtype": Refused("asks for the dtype", with_its_dtype, precision="bf16"),
    "sparse": Refused("is called with a tensor of layout torch.sparse_coo", sparse),
    "vmap": Refused("could not be computed in shape alone", layer=Vectorised),
    "hook": Refused(
        "has a backward hook, and stages on several devices", loss=of_its_gradient, prepare=hooked
    ),
    "hook between": Refused("is no stage nor part of one", squashing, prepare=hooked_between),
}


def attempt(name: str, devices: list[str] | None = None) -> None:
    """Make a step that is refused."""
    case = REFUSED[name]
    torch.manual_seed(3)
    model = Layers(case.forward, case.layer)
    case.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Any = {"shards": 4, "threads": 1, "precision": case.precision}
    trainer = onefold.Trainer(model, optimizer, case.loss, devices=devices, **settings)
    batch = F.normalize(torch.randn(9, WIDTH))
    try:
        with set_checkpoint_early_stop(case.stops_early):
            trainer.step(batch)
    finally:
        trainer.close()

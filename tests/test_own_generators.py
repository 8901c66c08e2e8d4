"""Random generators of a script's own, which the loss, the model, a hook or a score draws from."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import onefold
from onefold.errors import StateError
from onefold.testing import simulate
from tests.small import points, square

HELD: list[Any] = []


def in_closure(model: torch.nn.Module, own: Any) -> Callable[..., Any]:
    return lambda net, batch: square(net, (batch[0] + own.random(), batch[1]))


def in_module(model: torch.nn.Module, own: Any) -> Callable[..., Any]:
    model.own = own
    return lambda net, batch: square(net, batch) * (1 + net.own.random())


def in_hook(model: torch.nn.Module, own: Any) -> Callable[..., Any]:
    model.register_forward_hook(lambda *given: given[-1] + own.random())
    return square


def in_partial(model: torch.nn.Module, own: Any) -> Callable[..., Any]:
    return partial(
        lambda rng, net, batch: square(net, batch) + rng.random() * net(batch[0])[:, 0], own
    )


def in_gathering(model: torch.nn.Module, own: Any) -> Callable[..., Any]:
    def loss(net: Any, batch: Any) -> Any:
        before = own.random()
        rows = onefold.gather(net(batch[0]))
        return square(net, batch) * (before + own.random()) + rows.mean()

    return loss


def trained(place: Callable[..., Any], kind: str, devices: Any = None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    own: Any = random.Random(1) if kind == "python" else np.random.default_rng(1)
    model = torch.nn.Linear(3, 1)
    loss = place(model, own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen: dict[str, Any] = {} if devices is None else {"devices": ["cpu"] * devices}
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, **chosen)

    def score(net: Any, batch: Any) -> dict[str, Any]:
        return {"loss": square(net, batch) + own.random()}

    seen = []
    batch = points(10)
    for _ in range(3):
        seen.append(float(trainer.step(batch).loss))
        seen.append(trainer.evaluate(score, list(zip(*batch, strict=True)), batch_size=5)["loss"])
        seen.append(own.random())  # the script's own draw goes on from where it was
    return trainer.fingerprint(), *seen


@pytest.mark.parametrize("kind", ["python", "numpy"])
@pytest.mark.parametrize("place", [in_closure, in_module, in_hook, in_partial, in_gathering])
def test_a_generator_of_ones_own_is_seeded_for_each_shard(place: Any, kind: str) -> None:
    alone = simulate(trained, 1, args=(place, kind))[0]
    for devices in (2, 3):
        assert set(simulate(trained, devices, args=(place, kind))) == {alone}
    if place is not in_module:  # of which each device of a process has a copy
        assert trained(place, kind, devices=2) == alone
    own: Any = random.Random(1) if kind == "python" else np.random.default_rng(1)
    assert list(alone[3::3]) == [own.random() for _ in range(3)]


def test_a_generator_that_a_shard_makes_is_refused() -> None:
    def script() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)

        def loss(net: Any, batch: Any) -> Any:
            if not hasattr(net, "own"):
                net.own = np.random.default_rng(3)
            return square(net, batch) * net.own.random()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
        trainer.step(points(10))

    with pytest.raises(StateError, match=r"step 1: the loss or the model created a random gen"):
        simulate(script, 2)


class Noisy(torch.optim.SGD):
    """Draws from a generator that lies deep in it."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(self.parts["a"][0].random())  # type: ignore[attr-defined]
        return found


def test_an_optimizer_that_draws_is_refused_wherever_it_holds_its_generator() -> None:
    model = torch.nn.Linear(3, 1)
    noisy, hooked = Noisy(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    own = np.random.default_rng(1)
    noisy.parts = {"a": [own]}  # type: ignore[attr-defined]

    def draw(*_: object) -> None:
        own.random()

    hooked.register_step_post_hook(draw)
    for optimizer in (noisy, hooked):
        trainer = onefold.Trainer(model, optimizer, square, shards=2, threads=1)
        with pytest.raises(
            StateError, match=r"draws random numbers .* from a generator of its own"
        ):
            trainer.step(points(4))
        trainer.close()

"""What a script reads and changes in an optimizer's state between steps, on any devices."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.testing import simulate
from tests.small import Batch, bits, make_trainer, points
from tests.tables import for_each

INPUTS = 130


class Polyak(torch.optim.SGD):
    """Keeps an average, and swaps it with the weights; as SWA of torchcontrib does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mean", p.data.clone()).lerp_(p.data, 0.5)

    @torch.no_grad()
    def swap(self) -> None:
        for p in self.param_groups[0]["params"]:
            kept, mean = p.clone(), self.state[p]["mean"]
            p.copy_(mean)
            mean.copy_(kept)


Change = Callable[[Any], object]
Make = Callable[[nn.Module], Any]


def polyak(model: nn.Module) -> Polyak:
    return Polyak(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adafactor(model: nn.Module) -> Optimizer:
    """Of whole parameters, without methods of its own."""
    return torch.optim.Adafactor(model.parameters(), lr=0.01, eps=(1e-7, 1e-3))


def halve(optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        for value in optimizer.state[p].values():
            if value.dim():
                value.mul_(0.5)


def forget(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def reload(optimizer: Any) -> None:
    found = optimizer.state_dict()
    for state in found["state"].values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    optimizer.load_state_dict(found)


CASES: dict[str, tuple[Make, Change]] = {
    "polyak": (polyak, lambda optimizer: optimizer.swap()),
    "halved": (adam, halve),
    "halved, whole": (adafactor, halve),
    "forgotten": (adam, forget),
    "cleared": (adam, lambda optimizer: optimizer.state.clear()),
    "loaded": (adam, reload),
}


def model_of() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(INPUTS, 140), nn.Tanh(), nn.Linear(140, 1))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def stepped(make: Make, **choices: Any) -> tuple[onefold.Trainer, Any]:
    """A trainer after one step, and its optimizer."""
    optimizer = make(model := model_of())
    trainer = make_trainer(model, loss, optimizer=optimizer, **choices)
    trainer.step(points(12, INPUTS))
    return trainer, optimizer


def plainly(make: Make, change: Change) -> dict[str, bytes]:
    optimizer = make(model := model_of())
    for _ in range(3):
        for _ in range(2):
            model.zero_grad()
            loss(model, points(12, INPUTS)).backward()
            optimizer.step()
        change(optimizer)
    return bits(model)


def folded(name: str, *, devices: int | None = 1, state: Any = True, **choices: Any) -> Any:
    make, change = CASES[name]
    optimizer = make(model := model_of())
    trainer = make_trainer(model, loss, optimizer=optimizer, devices=devices, **choices)
    for _ in range(3):
        for _ in range(2):
            trainer.step(points(12, INPUTS))
        with trainer.modifying(optimizer_state=state):
            change(optimizer)
    with trainer.gathered():
        found = bits(model)
    trainer.close()
    return found


@for_each("name", CASES)
def test_one_shard_has_the_bits_of_a_plain_loop(name: str) -> None:
    make, change = CASES[name]
    expected = plainly(make, change)
    assert folded(name, shards=1) == expected != plainly(make, lambda _: None)


@for_each(
    ("name", "exchange", "placement"),
    [
        ("polyak", "collective", "offload"),
        ("polyak", "shared", "replicate"),
        ("halved", "collective", "partition"),
        ("halved, whole", "shared", "pipeline"),
        ("forgotten", "shared", "partition"),
        ("cleared", "collective", "replicate"),
        ("loaded", "shared", "offload"),
    ],
)
def test_bits_do_not_depend_on_devices(name: str, exchange: Any, placement: str) -> None:
    alone = folded(name)
    # An optimizer with methods of its own needs no word.
    assert folded(name, devices=2, state=None if name == "polyak" else True) == alone
    run = lambda: folded(name, devices=None)  # noqa: E731
    assert simulate(run, 2, exchange=exchange, placement=placement) == [alone] * 2


LOOKUPS: list[tuple[Make, Change]] = [
    (adam, lambda o: o.state[o.param_groups[0]["params"][0]]),
    (adam, lambda o: o.param_groups[0]["params"][0] in o.state),
    (adam, lambda o: list(o.state.values())),
    (adam, lambda o: len(o.state)),
    (adam, lambda o: o.state.update({o.param_groups[0]["params"][0]: {}})),
    (polyak, lambda o: o.swap()),
]


@for_each("devices", [1, 2])
@for_each(("make", "look"), LOOKUPS)
def test_elsewhere_it_is_refused(make: Make, look: Change, devices: int) -> None:
    trainer, optimizer = stepped(make, devices=devices)
    words = (
        r"the state of \w+ was accessed while it is partitioned.*modifying\(optimizer_state=True\)"
    )
    if make is polyak and devices == 1:
        look(optimizer)  # nothing is divided
        return
    with pytest.raises(RuntimeError, match=words):
        look(optimizer)
    if make is adam:  # without methods of its own
        with pytest.raises(RuntimeError, match=words), trainer.modifying():
            look(optimizer)


def test_it_begins_anew_between_steps_too() -> None:
    found = []
    for devices, change in ((1, forget), (2, forget), (1, id)):
        trainer, optimizer = stepped(adam, devices=devices)
        change(optimizer)
        trainer.step(points(12, INPUTS))
        found.append(bits(trainer.model))
    assert found[0] == found[1] != found[2]


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    (first, _), (whole, one), (second, other) = (stepped(polyak, devices=n) for n in (2, 1, 3))
    first.save(tmp_path)
    second.load(tmp_path)
    for trainer, swapping in ((whole, one), (second, other)):
        with trainer.modifying():
            swapping.swap()
        trainer.step(points(12, INPUTS))
    assert bits(second.model) == bits(whole.model)


class Lookahead(Optimizer):
    """As that of timm: works by another optimizer, whose groups are its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for p in self.param_groups[0]["params"]:
            slow = self.base.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


class Bare(Optimizer):
    """As that of torch_optimizer: never calls ``Optimizer.__init__``, and has state of its own."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


@for_each("make", [lambda base: Bare(base), lambda base: Bare(Bare(base))])
def test_an_optimizer_that_does_not_initialize_its_base_class_trains(
    make: Callable[..., Optimizer],
) -> None:
    plain = make(polyak(model := model_of()))
    for _ in range(2):
        model.zero_grad()
        loss(model, points(12, INPUTS)).backward()
        plain.step()
    found = []
    for devices in (1, 3):
        trainer, optimizer = stepped(lambda model: make(polyak(model)), devices=devices)
        trainer.step(points(12, INPUTS))
        found.append(bits(trainer.model))
        for name, value in trainer.model.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name])
        with pytest.raises(RuntimeError, match="step\\(\\) was called by the script"):
            optimizer.step()
    assert found[0] == found[1]
    plain.step()  # Trainer has left the class alone


def test_an_optimizer_in_another_is_not_taken_for_one(tmp_path: Path) -> None:
    found = []
    for devices in (1, 2):
        trainer, _ = stepped(lambda model: Lookahead(polyak(model)), devices=devices)
        trainer.step(points(12, INPUTS))
        found.append(bits(trainer.model))
        words = "Lookahead works with Polyak, whose state onefold cannot save"
        with pytest.raises(TypeError, match=words):
            trainer.save(tmp_path)
    assert found[0] == found[1]

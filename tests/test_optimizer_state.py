"""What a script reads and changes in an optimizer's state between steps, on any devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World
from tests import simulated
from tests.inside import engine_in
from tests.small import Batch, bits, make_trainer, points
from tests.tables import for_each

INPUTS = 130


class ScheduleFree(Optimizer):
    """As those of the package ``schedulefree``: its own methods move weights by its state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _move(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] is not training:
                group["training"] = training
                weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        self._move(training=True)

    def eval(self) -> None:
        self._move(training=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                state["z"].sub_(p.grad, alpha=group["lr"])


class Polyak(torch.optim.SGD):
    """Keeps an average, and swaps it with the weights; as SWA of torchcontrib does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p.data))
                state["count"] = state.get("count", 0) + 1
                mean.lerp_(p.data, 1 / state["count"])

    @torch.no_grad()
    def swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"]
                kept = p.clone()
                p.copy_(mean)
                mean.copy_(kept)


Change = Callable[[Any], object]
Make = Callable[[nn.Module], Any]


def schedule_free(model: nn.Module) -> Optimizer:
    return ScheduleFree(model.parameters())


def polyak(model: nn.Module) -> Optimizer:
    return Polyak(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def lion_like(model: nn.Module) -> Optimizer:
    """Of whole parameters, without methods of its own."""
    return torch.optim.Adafactor(model.parameters(), lr=0.01, eps=(1e-7, 1e-3))


def back_and_forth(optimizer: Any) -> None:
    optimizer.eval()
    optimizer.train()


def halve(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            for value in optimizer.state[p].values():
                if value.dim():
                    value.mul_(0.5)


def forget(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def reload(optimizer: Any) -> None:
    found = optimizer.state_dict()
    for state in found["state"].values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    optimizer.load_state_dict(found)


CASES: dict[str, tuple[Make, Change]] = {
    "schedule-free": (schedule_free, back_and_forth),
    "polyak": (polyak, lambda optimizer: optimizer.swap()),
    "halved": (adam, halve),
    "halved, whole": (lion_like, halve),
    "forgotten": (adam, forget),
    "cleared": (adam, clear),
    "loaded": (adam, reload),
}


def model_of() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(INPUTS, 140), nn.Tanh(), nn.Linear(140, 1))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def plainly(make: Make, change: Change) -> dict[str, bytes]:
    torch.set_num_threads(1)
    model = model_of()
    optimizer = make(model)
    for _ in range(3):
        for _ in range(2):
            model.zero_grad()
            loss(model, points(12, INPUTS)).backward()
            optimizer.step()
        change(optimizer)
    return bits(model)


def folded(make: Make, change: Change, *, state: bool | None = True, **choices: Any) -> Any:
    model = model_of()
    optimizer = make(model)
    trainer = make_trainer(model, loss, optimizer=optimizer, **choices)
    for _ in range(3):
        for _ in range(2):
            trainer.step(points(12, INPUTS))
        with trainer.changing(optimizer_state=state):
            change(optimizer)
    with trainer.whole():
        found = bits(model)
    trainer.close()
    return found


@for_each("name", CASES)
def test_one_shard_has_the_bits_of_a_plain_loop(name: str) -> None:
    make, change = CASES[name]
    expected = plainly(make, change)
    assert folded(make, change, shards=1) == expected
    if name != "schedule-free":  # whose methods undo each other, but for rounding
        assert plainly(make, lambda _: None) != expected


@for_each("name", CASES)
def test_bits_do_not_depend_on_devices(name: str) -> None:
    found = [folded(*CASES[name], devices=n) for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


@for_each("keep", ["host", "stages"])
@for_each("name", ["schedule-free", "halved"])
def test_what_devices_keep_is_no_matter(
    name: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = folded(*CASES[name])
    world = World(options=RunOptions(keep=keep))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    assert folded(*CASES[name], devices=2) == expected


def test_methods_of_its_own_need_no_word() -> None:
    make, change = CASES["polyak"]
    assert folded(make, change, state=None, devices=2) == folded(make, change, devices=1)


def of_a_process(name: str) -> dict[str, bytes]:
    found: dict[str, bytes] = folded(*CASES[name], devices=None)
    return found


@for_each(
    ("name", "choices"),
    [
        ("schedule-free", {}),
        ("schedule-free", {"exchange": "collective"}),
        ("loaded", {}),
        ("halved", {"exchange": "collective", "keep": "span"}),
    ],
)
def test_every_process_has_the_same(name: str, choices: Any) -> None:
    found = simulated.launch(of_a_process, devices="cpu:3", args=(name,), **choices)
    assert found == folded(*CASES[name], devices=1)


@for_each("devices", [1, 2])
def test_state_is_read_as_in_a_plain_loop(devices: int) -> None:
    torch.set_num_threads(1)
    plain, model = model_of(), model_of()
    theirs, ours = adam(plain), adam(model)
    trainer = make_trainer(model, loss, optimizer=ours, shards=1 if devices == 1 else 4)
    if devices == 2:
        trainer = make_trainer(
            model := model_of(), loss, optimizer=(ours := adam(model)), devices=2
        )
    loss(plain, points(12, INPUTS)).backward()
    theirs.step()
    trainer.step(points(12, INPUTS))
    with trainer.changing(optimizer_state=True):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.state[p].keys() == theirs.state[q].keys()
            for key, value in theirs.state[q].items():
                torch.testing.assert_close(ours.state[p][key], value)
        assert len(ours.state) == len(theirs.state)


LOOKUPS: dict[str, Change] = {
    "item": lambda o: o.state[o.param_groups[0]["params"][0]],
    "get": lambda o: o.state.get(o.param_groups[0]["params"][0]),
    "in": lambda o: o.param_groups[0]["params"][0] in o.state,
    "values": lambda o: list(o.state.values()),
    "len": lambda o: len(o.state),
    "set": lambda o: o.state.update({o.param_groups[0]["params"][0]: {}}),
}


@for_each("where", ["between", "changing"])
@for_each("devices", [1, 2])
@for_each("look", LOOKUPS.values(), ids=LOOKUPS)
def test_elsewhere_it_is_refused(look: Change, devices: int, where: str) -> None:
    model = model_of()
    trainer = make_trainer(model, loss, optimizer=(optimizer := adam(model)), devices=devices)
    trainer.step(points(12, INPUTS))
    message = r"state of Adam was looked up where it is divided.*changing\(optimizer_state=True\)"
    if where == "changing":
        with pytest.raises(RuntimeError, match=message), trainer.changing():
            look(optimizer)
    else:
        with pytest.raises(RuntimeError, match=message):
            look(optimizer)


def test_methods_outside_of_the_block_are_refused() -> None:
    model = model_of()
    optimizer = ScheduleFree(model.parameters())
    trainer = make_trainer(model, loss, optimizer=optimizer, devices=2)
    trainer.step(points(12, INPUTS))
    with pytest.raises(RuntimeError, match="the state of ScheduleFree was looked up where it is"):
        optimizer.eval()


def test_where_nothing_is_divided_it_is_there() -> None:
    model = model_of()
    trainer = make_trainer(model, loss, optimizer=(optimizer := polyak(model)))
    trainer.step(points(12, INPUTS))
    assert all("mean" in optimizer.state[p] for p in model.parameters())


def test_it_begins_anew_between_steps_too() -> None:
    found = []
    for devices in (1, 2):
        model = model_of()
        trainer = make_trainer(model, loss, optimizer=(optimizer := adam(model)), devices=devices)
        for _ in range(2):
            trainer.step(points(12, INPUTS))
            optimizer.state = defaultdict(dict)
        found.append(bits(model))
    assert found[0] == found[1]
    assert found[0] != folded(adam, lambda _: None)


def test_each_of_several_has_its_own() -> None:
    found = []
    for devices in (1, 2, 3):
        model = model_of()
        first, last = ScheduleFree(model[0].parameters()), polyak(model[2])
        named = ["cpu"] * devices
        trainer = onefold.Trainer(model, [first, last], loss, shards=4, threads=1, devices=named)
        for _ in range(2):
            trainer.step(points(12, INPUTS))
            with trainer.changing():
                back_and_forth(first)
                last.swap()  # type: ignore[attr-defined]
                assert set(first.state) == set(model[0].parameters())
        found.append(bits(model))
    assert found[0] == found[1] == found[2]


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    def run(devices: int, first: int, last: int, *, load: bool) -> tuple[Any, dict[str, bytes]]:
        model = model_of()
        optimizer = ScheduleFree(model.parameters())
        trainer = make_trainer(model, loss, optimizer=optimizer, devices=devices)
        if load:
            trainer.load(tmp_path)
        for _ in range(first, last):
            trainer.step(points(12, INPUTS))
            with trainer.changing():
                back_and_forth(optimizer)
        return trainer, bits(model)

    whole = run(1, 0, 4, load=False)[1]
    run(2, 0, 2, load=False)[0].save(tmp_path)
    assert run(3, 2, 4, load=True)[1] == whole


class Listing(ScheduleFree):
    """Keeps what cannot be sent."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["shape"] = p.shape, object()


def test_state_that_cannot_be_sent_is_refused_where_it_is_looked_up() -> None:
    model = model_of()
    optimizer = Listing(model.parameters())
    trainer = make_trainer(model, loss, optimizer=optimizer, devices=2)
    trainer.step(points(12, INPUTS))
    with trainer.changing(), torch.no_grad():  # as ever, for what looks at no state
        model[0].weight.mul_(0.5)
    with (
        pytest.raises(RuntimeError, match=r"whole parameters: .*the optimizer's shape"),
        trainer.changing(),
    ):
        optimizer.eval()


class Lookahead(Optimizer):
    """As that of timm: works by another optimizer, whose groups are its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.base.state[p]
                slow = state.setdefault("slow", p.clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def sync(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.base.state[p]["slow"].copy_(p.data)


def test_an_optimizer_in_another_is_not_taken_for_one(tmp_path: Path) -> None:
    found = []
    for devices in (1, 2):
        model = model_of()
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        trainer = make_trainer(model, loss, optimizer=optimizer, devices=devices)
        for _ in range(3):
            trainer.step(points(12, INPUTS))
        found.append(bits(model))
        with pytest.raises(TypeError, match="Lookahead works with SGD, whose state no checkpoint"):
            trainer.save(tmp_path)
    assert found[0] == found[1]
    trainer = make_trainer(model, loss, optimizer=Lookahead(adam(model)), devices=2)
    trainer.step(points(12, INPUTS))
    with pytest.raises(RuntimeError, match="the state of Adam was looked up"), trainer.changing():
        engine_in(trainer).update.optimizer.sync()  # type: ignore[attr-defined]

"""One shard gives the bits of a plain loop, whatever its devices keep of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World
from onefold.errors import GradientError
from tests import simulated
from tests.tables import for_each

KEEPS = [("all", 1), ("host", 1), ("stages", 1), ("stages", 3)]
CLIP = 0.05


class Mixed(nn.Module):
    """A parameter of more than one piece, one in bfloat16, one that is rarely used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 150)
        self.wide = nn.Linear(150, 150)
        self.low = nn.Linear(150, 4).to(torch.bfloat16)
        self.rare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(torch.tanh(self.first(x)))
        out = self.low(hidden.to(torch.bfloat16)).float()
        return out + self.rare(out) if bool(x[0, 0] > 0) else out  # type: ignore[no-any-return]


class Plain(nn.Module):
    """The same without a choice that a line of devices cannot make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(6, 150), nn.Linear(150, 150)
        self.low = nn.Linear(150, 4).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(torch.tanh(self.first(x))).to(torch.bfloat16)
        return self.low(hidden).float()  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 3).square().mean()  # type: ignore[no-any-return]


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        yield torch.randn(10, 6, generator=generator)


@pytest.fixture(params=KEEPS, ids=lambda keep: f"{keep[0]}-{keep[1]}")
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    keep, devices = request.param
    world = World(options=RunOptions(keep=keep))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    return {"devices": ["cpu"] * devices} if devices > 1 else {}


def trainer_of(
    model: nn.Module, settings: dict[str, Any], loss: Any = loss_of, **more: Any
) -> onefold.Trainer:
    stages = [part for part in model.children() if isinstance(part, nn.Linear)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return onefold.Trainer(
        model, optimizer, loss, shards=1, threads=1, stages=stages, **settings, **more
    )


def plain(model: nn.Module) -> list[float]:
    """The loop that everybody writes; returns the norms."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return norms


def hooked(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Have a gradient changed before anybody takes it."""
    weight: Any = model.get_parameter("wide.weight")
    return weight.register_hook(change)


def made(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(2)
    return Plain() if settings else Mixed()


def test_the_gradient_is_clipped_as_a_plain_loop_clips(settings: dict[str, Any]) -> None:
    expected, ours = made(settings), made(settings)
    norms = plain(expected)
    trainer = trainer_of(ours, settings, clip_norm=CLIP)
    assert [trainer.step(batch).grad_norm for batch in batches()] == norms
    assert all(norm > CLIP for norm in norms)
    for (name, found), wanted in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    trainer.close()


def test_a_loss_of_onefold_has_the_bits_of_pytorchs(settings: dict[str, Any]) -> None:
    """With options whose mean is not the bits of a sum that is divided."""
    weight, targets = torch.tensor([0.3, 2.0, 1.1, 0.7]), torch.arange(10) % 4

    def with_kit(kit: Any) -> Callable[[nn.Module, torch.Tensor], Any]:
        return lambda model, batch: kit.cross_entropy(
            model(batch), targets, weight, label_smoothing=0.1
        )

    expected, ours = made(settings), made(settings)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    torch.set_num_threads(1)
    trainer = trainer_of(ours, settings, loss=with_kit(onefold.losses))
    for batch in batches():
        optimizer.zero_grad()
        value = with_kit(nn.functional)(expected, batch)
        value.backward()
        optimizer.step()
        assert float(trainer.step(batch).loss) == value.item()
    for (name, found), wanted in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    trainer.close()


def test_a_gradient_that_is_not_finite_is_found(settings: dict[str, Any]) -> None:
    model = made(settings)
    trainer = trainer_of(model, settings)
    hook = hooked(model, lambda grad: grad * torch.nan)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(GradientError, match=r"wide\.weight is not finite"):
        trainer.step(next(batches()))
    hook.remove()
    assert all(map(torch.equal, before, model.parameters()))
    trainer.close()


def test_such_a_step_is_skipped_where_that_is_asked_for(settings: dict[str, Any]) -> None:
    model = made(settings)
    trainer = trainer_of(model, settings, on_nonfinite="skip")
    hook = hooked(model, lambda grad: grad * torch.inf)
    assert trainer.step(next(batches())).skipped
    hook.remove()
    assert not trainer.step(next(batches())).skipped
    trainer.close()


def test_a_norm_that_overflows_in_its_dtype_is_found_exactly(settings: dict[str, Any]) -> None:
    model = made(settings)
    trainer = trainer_of(model, settings)
    hook = hooked(model, lambda grad: grad * 1e22)
    norm = trainer.step(next(batches())).grad_norm
    hook.remove()
    assert norm is not None
    assert 1e19 < norm < 1e30
    trainer.close()


def clipped() -> tuple[list[Any], list[list[float]]]:
    """The norms and the model of a run of a few steps."""
    torch.manual_seed(2)
    model = Plain()
    trainer = trainer_of(model, {}, clip_norm=CLIP)
    norms = [trainer.step(batch).grad_norm for batch in batches()]
    with trainer.whole():
        return norms, [parameter.flatten().tolist() for parameter in model.parameters()]


@for_each("exchange", ["shared", "collective"])
def test_processes_of_a_line_share_the_norms_of_their_parameters(exchange: Any) -> None:
    torch.manual_seed(2)
    expected = Plain()
    norms = plain(expected)
    found = simulated.launch(clipped, devices="cpu:3", keep="stages", exchange=exchange)
    assert found == (norms, [parameter.flatten().tolist() for parameter in expected.parameters()])

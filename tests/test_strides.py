"""Values do not depend on how a tensor lies in memory: a model with one parameter and two buffers
in each memory format does in every respect what its contiguous twin does."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.testing import simulate
from tests.small import make_trainer
from tests.tables import for_each

Layout = Callable[[torch.Tensor], torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def complex_of(*shape: int) -> torch.Tensor:
    return torch.complex(drawn(*shape), drawn(*shape) - 1)


REAL: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: drawn(3, 4),
    "transposed": lambda: drawn(4, 3).t(),
    "permuted": lambda: drawn(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: drawn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: drawn(2, 3, 2, 2, 3).to(memory_format=torch.channels_last_3d),
    "gaps": lambda: drawn(6, 8)[::2, 1::2],
    "part, transposed": lambda: drawn(8, 6)[1:4].t(),
    "lengths of one": lambda: drawn(4).as_strided((1, 4, 1), (77, 1, 13)),
    "single number": lambda: drawn(1)[0],
    "empty": lambda: drawn(3, 0).t(),
    "negative bit": lambda: complex_of(4, 3).conj().imag.t(),
    "bfloat16": lambda: drawn(4, 3, dtype=torch.bfloat16).t(),
    "float64": lambda: drawn(4, 3, dtype=torch.float64).t(),
}
FORMS = REAL | {
    "expanded": lambda: drawn(3, 1).expand(3, 4),
    "int64": lambda: torch.arange(12).view(4, 3).t(),
    "uint8": lambda: torch.arange(24, dtype=torch.uint8)[::2],
    "bool": lambda: (torch.arange(12) % 5 == 0).view(4, 3).t(),
    "complex64": lambda: complex_of(4, 3).t(),
    "conjugate bit": lambda: complex_of(4, 3).conj().t(),
}
OF_EACH_SHARD = ("transposed", "channels_last", "conjugate bit")
SAMPLES = drawn(10, 3)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous."""
    laid = tensor.detach().resolve_conj().resolve_neg()
    return laid.clone(memory_format=torch.contiguous_format)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def total(tensor: torch.Tensor) -> torch.Tensor:
    """A number in which the place of each element counts."""
    here = tensor.resolve_conj().resolve_neg().contiguous()
    parts = torch.view_as_real(here).sum(-1) if here.is_complex() else here.float()
    return (parts * (torch.arange(parts.numel()) % 7).view(parts.shape)).sum()


class Cell(nn.Module):
    """A parameter and two buffers of one form; the buffers change in every shard."""

    def __init__(self, name: str, laid_out: Layout) -> None:
        super().__init__()
        # Complex and whole numbers cannot be trained.
        self.weight = nn.Parameter(laid_out(REAL.get(name, REAL["plain"])()))
        self.register_buffer("kept", laid_out(FORMS[name]()))
        self.register_buffer("passing", laid_out(FORMS[name]()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer in self.buffers():
                if self.training and (buffer.is_floating_point() or buffer.is_complex()):
                    steps = (torch.arange(buffer.numel()) % 5).view(buffer.shape)
                    buffer.copy_((buffer * 0.5 + x.mean() * steps).to(buffer.dtype))
            moved = sum(total(buffer) for buffer in self.buffers())
        return x + 0.01 * (total(self.weight) + moved) * x.tanh()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean(dim=1)


def outputs(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    pixels = x[:, :, None, None] * torch.ones(2, 2)
    return {
        "expanded": x[:, :1].expand(-1, 4),
        "transposed": x.t().contiguous().t(),
        "channels_last": pixels.contiguous(memory_format=torch.channels_last),
        "gaps": x[:, ::2],
        "conjugate bit": torch.complex(x, x + 1).conj(),
        "negative bit": torch.complex(x, x + 1).conj().imag,
    }


def trainer_of(laid_out: Layout) -> onefold.Trainer:
    model = nn.Sequential(*(Cell(name, laid_out) for name in FORMS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    buffers = {f"{list(FORMS).index(name)}.*": "per_shard" for name in OF_EACH_SHARD}
    choices: dict[str, Any] = {"optimizer": optimizer, "stages": list(model), "buffers": buffers}
    trainer = make_trainer(model, loss, devices=None, **choices)
    trainer.average(decay=0.5)
    return trainer


def values(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, object]:
    return {name: (plain(value).tolist(), value.dtype) for name, value in named}


def seen(trainer: onefold.Trainer) -> list[object]:
    """Fingerprints and values of what is trained and of its average, and predictions."""
    found: list[object] = [values(trainer.predict(outputs, SAMPLES, batch_size=7).items())]
    for shows in (nullcontext, trainer.averaged):
        with shows(), trainer.gathered():
            every = [*trainer.model.named_parameters(), *trainer.model.named_buffers()]
            found += [trainer.fingerprint(), values(every)]
    return found


def story(laid_out: Layout, folder: Path, loads: bool) -> list[object]:
    """Train, save and go on; or load, and go on from there."""
    trainer = trainer_of(laid_out)
    begin(trainer, folder, loads)
    found: list[object] = [seen(trainer)]
    trainer.step(SAMPLES)
    found.append(seen(trainer))
    trainer.close()
    return found


def begin(trainer: onefold.Trainer, folder: Path, loads: bool) -> None:
    if loads:
        trainer.load(folder)
    else:
        trainer.step(SAMPLES)
        trainer.step(SAMPLES)
        trainer.save(folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The story of a model whose tensors are all contiguous."""
    folder = tmp_path_factory.mktemp("plain")
    found = simulate(story, 1, args=(plain, folder, False))[0]
    assert simulate(story, 1, args=(plain, folder, True))[0] == found
    return found


@pytest.mark.parametrize(
    ("placement", "exchange", "devices", "others"),
    [
        ("replicate", "collective", 1, 3),
        ("replicate", "shared", 2, 1),
        ("partition", "collective", 2, 3),
        ("pipeline", "shared", 3, 2),
        ("offload", "shared", 1, 2),
    ],
)
def test_values_do_not_depend_on_how_tensors_lie(
    placement: str, exchange: Any, devices: int, others: int, expected: list[object], tmp_path: Path
) -> None:
    for count, loads in ((devices, False), (others, True)):
        args = (itself, tmp_path, loads)
        found = simulate(story, count, args=args, placement=placement, exchange=exchange)
        assert found == [expected] * count


class Rotating(torch.optim.SGD):
    """Keeps matrices beside whole parameters, as SOAP and Shampoo do: some lie column by column."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            if not state:
                state["image"] = drawn(2, 3, 2, 2).to(memory_format=torch.channels_last)
                # Of the parameter's own shape where that is square, and never in its strides.
                state["mean"] = torch.zeros(gradient.shape[::-1]).t()
            state["basis"] = torch.linalg.qr(gradient @ gradient.t())[0].t()
            state["mean"].lerp_(state["basis"] @ gradient, 0.5)
            state["image"].mul_(state["mean"].std())
            parameter.sub_(0.05 * state["basis"].t() @ state["mean"] * state["image"].std())


def rotated(folder: Path, loads: bool) -> list[object]:
    """What a run ends with that is saved after two steps, or goes on from there."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 24, bias=False), nn.Tanh(), nn.Linear(24, 24, bias=False))
    optimizer = Rotating(model.parameters(), lr=0.05)
    trainer = make_trainer(model, loss, optimizer=optimizer, devices=None, stages=list(model))
    begin(trainer, folder, loads)
    with trainer.modifying(optimizer_state=True):  # states go to all devices and back
        states = [optimizer.state[p] for p in model.parameters()]
        strides = [(key, value.stride()) for each in states for key, value in each.items()]
    for _ in range(3):
        trainer.step(SAMPLES)
    found: list[object] = [sorted(strides), trainer.fingerprint()]
    trainer.close()
    return found


@for_each(
    ("placement", "devices", "others"),
    [("replicate", 1, 1), ("replicate", 1, 2), ("partition", 2, 1), ("offload", 2, 2)],
)
def test_matrices_of_an_optimizer_lie_as_they_did(
    placement: str, devices: int, others: int, tmp_path: Path
) -> None:
    first: Any
    (first, *_) = simulate(rotated, devices, args=(tmp_path, False), placement=placement)
    assert ("mean", (1, 24)) in first[0]
    assert simulate(rotated, others, args=(tmp_path, True), placement=placement) == [first] * others

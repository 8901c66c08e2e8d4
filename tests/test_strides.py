"""Values do not depend on how a tensor lies in memory: a model with one parameter and two buffers
in each memory format does in every respect what its contiguous twin does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.core.flat import bits_of, same_bits
from onefold.core.options import RunOptions
from onefold.core.wire import decode, encode
from onefold.core.world import World
from tests.inside import engine_in
from tests.small import make_trainer
from tests.tables import for_each

Form = Callable[[], torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def complex_of(*shape: int) -> torch.Tensor:
    return torch.complex(drawn(*shape), drawn(*shape) - 1)


REAL: dict[str, Form] = {
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
CONSTANT: dict[str, Form] = {
    "expanded": lambda: drawn(3, 1).expand(3, 4),
    "int64": lambda: torch.arange(12).view(4, 3).t(),
    "uint8": lambda: torch.arange(24, dtype=torch.uint8)[::2],
    "bool": lambda: (torch.arange(12) % 5 == 0).view(4, 3).t(),
    "complex64": lambda: complex_of(4, 3).t(),
    "conjugate bit": lambda: complex_of(4, 3).conj().t(),
}
FORMS = REAL | CONSTANT
OF_EACH_SHARD = ("transposed", "channels_last", "conjugate bit")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous."""
    laid = tensor.detach().resolve_conj().resolve_neg()
    return laid.clone(memory_format=torch.contiguous_format)


def total(tensor: torch.Tensor) -> torch.Tensor:
    """A number in which the place of each element counts."""
    here = tensor.resolve_conj().resolve_neg().contiguous()
    parts = torch.view_as_real(here).sum(-1) if here.is_complex() else here.float()
    return (parts * (torch.arange(parts.numel()) % 7).view(parts.shape)).sum()


class Cell(nn.Module):
    """A parameter and two buffers of one form; the buffers change in every shard."""

    def __init__(self, name: str, laid_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
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


class Forms(nn.Module):
    def __init__(self, laid_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.line = nn.ModuleList([Cell(name, laid_out) for name in FORMS])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.line:
            x = cell(x)
        return x


SAMPLES = drawn(10, 3)
OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "transposed": lambda x: x.t().contiguous().t(),
    "channels_last": lambda x: (x[:, :, None, None] * torch.ones(2, 2)).contiguous(
        memory_format=torch.channels_last
    ),
    "gaps": lambda x: x[:, ::2],
    "conjugate bit": lambda x: torch.complex(x, x + 1).conj(),
    "negative bit": lambda x: torch.complex(x, x + 1).conj().imag,
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean(dim=1)  # type: ignore[no-any-return]


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def trainer_of(laid_out: Callable[[torch.Tensor], torch.Tensor], devices: int) -> onefold.Trainer:
    model = Forms(laid_out)
    trainer = make_trainer(
        model,
        loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        devices=devices,
        stages=list(model.line),
        buffers={f"line.{list(FORMS).index(name)}.*": "shard" for name in OF_EACH_SHARD},
    )
    trainer.average(decay=0.5)
    return trainer


def values(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, object]:
    return {name: (plain(value).tolist(), value.dtype) for name, value in named}


def of_model(model: nn.Module) -> dict[str, object]:
    return values([*model.named_parameters(), *model.named_buffers()])


def seen(trainer: onefold.Trainer) -> list[object]:
    """Fingerprints and values of what is trained and of its average, and predictions."""
    found: list[object] = []
    with trainer.whole():
        found += [trainer.fingerprint(), of_model(trainer.model)]
    with trainer.averaged():
        found.append(trainer.fingerprint())
        with trainer.whole():
            found.append(of_model(trainer.model))
    said = trainer.predict(
        lambda _, x: {name: make(x) for name, make in OUTPUTS.items()}, SAMPLES, batch_size=7
    )
    return [*found, values(said.items()), trainer.fingerprint()]


def story(
    laid_out: Callable[[torch.Tensor], torch.Tensor], devices: int, others: int, folder: Path
) -> list[object]:
    """Train, save and go on; and load on another number of devices, and go on from there."""
    found: list[object] = []
    for count, loads in ((devices, False), (others, True)):
        trainer = trainer_of(laid_out, count)
        if loads:
            trainer.load(folder)
        else:
            for _ in range(2):
                trainer.step(SAMPLES)
            trainer.save(folder)
        found.append(seen(trainer))
        for _ in range(2):
            trainer.step(SAMPLES)
        found.append(seen(trainer))
        trainer.close()
    assert found[:2] == found[2:]
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The story of a model whose tensors are all contiguous."""
    return story(plain, 1, 1, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("keep", "devices", "others"),
    [("all", 1, 3), ("all", 2, 1), ("span", 2, 3), ("stages", 3, 2), ("host", 1, 2)],
)
def test_values_do_not_depend_on_how_tensors_lie(
    keep: str,
    devices: int,
    others: int,
    expected: list[object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    world = World(options=RunOptions(keep=keep))  # type: ignore[arg-type]
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    assert story(itself, devices, others, tmp_path) == expected


@for_each(("source", "target"), [(itself, plain), (plain, itself)])
@for_each("kind", ["file", "checkpoint"])
def test_weights_of_one_layout_load_into_another(
    source: Callable[[torch.Tensor], torch.Tensor],
    target: Callable[[torch.Tensor], torch.Tensor],
    kind: str,
    tmp_path: Path,
) -> None:
    trainer = trainer_of(source, 2)
    trainer.step(SAMPLES)
    path = tmp_path / "weights.pth"
    if kind == "checkpoint":
        path = trainer.save(tmp_path)
    else:
        torch.save(trainer.model.state_dict(), path)
    model = Forms(target)
    for name, buffer in model.named_buffers():
        if any(stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, plain(buffer))
    onefold.load_weights(model, path)
    assert values(model.state_dict().items()) == values(trainer.model.state_dict().items())


@for_each("name", [name for name in REAL if name not in ("single number", "empty")])
def test_rows_are_gathered_whatever_they_lie_in(name: str) -> None:
    """Into the loss of every shard, with the gradients that a contiguous tensor gets."""

    def run(laid_out: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[object], str]:
        form = laid_out(REAL[name]())
        rows: list[object] = []

        def gathering(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            given = torch.empty_like(form).copy_(form) * model(x[: len(form)]).mean().to(form.dtype)
            given = given if laid_out is itself else given.contiguous()
            everybody = onefold.gather(given)
            rows.append(values([("all", everybody)]))
            return everybody.square().flatten(1).mean(1).float()[: len(x)] + model(x).mean(1)

        trainer = make_trainer(loss=gathering, shards=2, devices=2)
        trainer.step(drawn(2 * len(form), 3))
        found = trainer.fingerprint()
        trainer.close()
        return rows, found

    assert run(itself) == run(plain)


@for_each("name", FORMS)
def test_bits_are_those_of_the_values(name: str) -> None:
    """For comparisons, fingerprints, and what travels between devices."""
    ours, theirs = FORMS[name](), plain(FORMS[name]())
    assert same_bits(ours, theirs)
    assert bits_of(ours).tolist() == theirs.reshape(-1).view(torch.uint8).tolist()
    received = decode(encode(ours, "a form"))
    assert values([(name, received)]) == values([(name, theirs)])


class Rotating(torch.optim.Optimizer):
    """Keeps matrices beside whole parameters, as SOAP and Shampoo do: some lie column by column."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.flatten(1), self.state[parameter]
            if not state:
                state["square"] = torch.zeros(len(gradient), len(gradient))
                state["image"] = drawn(2, 3, 2, 2).to(memory_format=torch.channels_last)
                # Of the parameter's own shape where that is square, and never in its strides.
                state["mean"] = torch.zeros(gradient.shape[::-1]).t()
            state["square"] += gradient @ gradient.t()
            state["basis"] = torch.linalg.qr(state["square"])[0]
            state["mean"].lerp_(state["basis"] @ gradient, 0.5)
            state["image"].mul_(state["basis"].diagonal().sum())
            change = state["basis"].t() @ state["mean"] * state["image"].std()
            parameter.sub_(0.05 * change.view(parameter.shape))

    def reset(self) -> None:
        """An optimizer with methods of its own has the states of all parameters in `changing`."""


def rotating(devices: int) -> onefold.Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 5))
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    for layer in model[::2]:
        layer.bias.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return make_trainer(model, loss, optimizer=Rotating(weights), devices=devices, stages=[*model])


def strides_of(trainer: onefold.Trainer) -> list[dict[str, tuple[int, ...]]]:
    states = engine_in(trainer).update.optimizer_states()
    return [{s.key: s.value.stride()} for s in sorted(states, key=lambda s: (s.piece, s.key))]


@for_each("keep", ["all", "span", "host"])
@for_each(("devices", "others"), [(1, 1), (1, 2), (2, 1)])
def test_matrices_of_an_optimizer_lie_as_they_did(
    keep: str, devices: int, others: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(options=RunOptions(keep=keep))  # type: ignore[arg-type]
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    trainer = rotating(devices)
    for _ in range(2):
        trainer.step(SAMPLES)
    trainer.save(tmp_path)
    expected = strides_of(trainer)
    with trainer.changing():
        pass  # states go to all devices and back
    assert strides_of(trainer) == expected
    assert (1, 24) in [stride for each in expected for stride in each.values()]
    for _ in range(3):
        trainer.step(SAMPLES)
    resumed = rotating(others)
    resumed.load(tmp_path)
    assert strides_of(resumed) == expected
    for _ in range(3):
        resumed.step(SAMPLES)
    assert resumed.fingerprint() == trainer.fingerprint()
    trainer.close()
    resumed.close()

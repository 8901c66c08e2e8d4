"""Models that are recorded while they are made: values drawn later have the plain way's bits."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onefold.deferred.access import deferred_of
from onefold.deferred.recording import Recording
from onefold.system.file_memory import SparseAllocator
from onefold_jobs.models.resnet import resnet18
from tests.tables import for_each, some


def in_channels_last(layer: nn.Conv2d) -> nn.Conv2d:
    layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return layer


class Drawn(nn.Module):
    """Layers as they are, drawn anew, in parts, by generators of their own, and from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32, padding_idx=3)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(32, 32, 2)
        self.pictures = in_channels_last(nn.Conv2d(3, 40, 5))
        self.drawn = nn.Parameter(torch.randn(64, 33))
        self.truncated = nn.Parameter(torch.zeros(64, 33))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        nn.init.trunc_normal_(self.words.weight, a=1.0, b=2.0)
        self.apply(self.draw)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(6))
        self.low = nn.Linear(64, 50).to(torch.bfloat16)
        with torch.no_grad():
            own = torch.Generator().manual_seed(3)
            self.words.weight[2:].copy_(torch.empty(48, 32).normal_(generator=own))
            weight = self.recurrent.get_parameter("weight_ih_l0")
            weight[:32] *= 2
            weight[32:64] = torch.tensor(1.5)
        self.twin = copy.deepcopy(self.pictures)
        nn.init.xavier_uniform_(self.pictures.weight)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def draw(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(0, 0.02)
            part.bias.data.zero_()


def from_meta() -> nn.Module:
    """A model without memory, which is given some and filled."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "drawn": Drawn,
    "resnet18": lambda: resnet18(in_channels=3),
    "halved": lambda: nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30)).half().float(),
    "from meta": from_meta,
}


def share_undrawn(model: nn.Module) -> float:
    every = list(model.parameters())
    waiting = [each for each in every if deferred_of(each) is not None]
    return sum(each.nbytes for each in waiting) / sum(each.nbytes for each in every)


def recorded(make: Callable[[], object], folder: Path, least_bytes: int = 1) -> object:
    recording = Recording(SparseAllocator(folder), least_bytes)
    with recording.active():
        made = make()
    recording.finish(made)
    return made


def check_alike(make: Callable[[], nn.Module], folder: Path, least_bytes: int = 1) -> float:
    """Compare with the plain way; return how much was left without values."""
    torch.manual_seed(4)
    plain = make()
    after = torch.rand(3)
    torch.manual_seed(4)
    model = recorded(make, folder, least_bytes)
    assert isinstance(model, nn.Module)
    assert torch.equal(torch.rand(3), after), "the generator goes on as it does"
    share = share_undrawn(model)
    for name, parameter in model.named_parameters():
        values, expected = deferred_of(parameter), plain.get_parameter(name)
        assert parameter.requires_grad == expected.requires_grad
        if values is not None:
            there = torch.full_like(expected, 7).detach()
            values.write_to(there)
            assert torch.equal(there, expected), name
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, found[name]), name
        assert (value.stride(), value.dtype) == (found[name].stride(), found[name].dtype), name
    return share


@for_each("least_bytes", some([1, 4096], 2))
@for_each("name", MODELS)
def test_the_bits_are_those_of_the_plain_way(name: str, least_bytes: int, tmp_path: Path) -> None:
    share = check_alike(MODELS[name], tmp_path, least_bytes)
    assert share == pytest.approx(1, abs=0.02 if least_bytes == 1 else 0.2)


class Reading(nn.Module):
    """Looks at values while it is made."""

    def __init__(self, read: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(40, 30).normal_())
        self.read = read(self.first)
        self.second = nn.Parameter(torch.empty(40, 30).normal_())


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "a norm": lambda p: p.norm().item(),
    "a choice": lambda p: p[[1, 2]].sum().item(),
    "a flag": lambda p: p[p > 0].sum().item(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "a decomposition": lambda p: torch.linalg.svd(p)[1].tolist(),
    "a graph": lambda p: (p.double().sum() * 2).item(),
    "a derivative": lambda p: torch.autograd.grad((p * p).sum(), p)[0].sum().item(),
    "a list": lambda p: torch.tensor([p.detach()[0, 0], p.detach()[1, 1]]).tolist(),
    "a text": lambda p: f"{p.detach()}",
    "a copy": lambda p: copy.deepcopy(p.detach()).sum().item(),
}


@for_each("read", some(READS, 3))
def test_what_is_read_is_drawn(read: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = Reading(READS[read])
    torch.manual_seed(4)
    model = recorded(lambda: Reading(READS[read]), tmp_path)
    assert isinstance(model, Reading)
    assert model.read == plain.read
    assert torch.equal(model.first, plain.first)
    assert deferred_of(model.second) is not None
    assert torch.equal(model.second, plain.second)


def test_what_others_look_at_has_its_values(tmp_path: Path) -> None:
    """Views, parameters and layers that are nobody's, and what a failed function leaves."""
    kept: list[Any] = []

    def make() -> nn.Module:
        model = nn.Linear(30, 40)
        model.buffer = torch.ones(70, 70).tril()
        kept.extend([model.weight.data[5:10], nn.Parameter(torch.randn(30, 30)), model.buffer])
        model.alone = nn.Parameter(torch.empty(60, 20).uniform_())
        with contextlib.suppress(ArithmeticError):
            kept.append(nn.Linear(30, 40).weight)
            raise ArithmeticError
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            script: Callable[[nn.Module], nn.Module] = torch.jit.script
            kept.append(script(nn.Linear(30, 40)).weight)
        return model

    torch.manual_seed(4)
    plain: Any = make()
    expected, kept[:] = list(kept), []
    torch.manual_seed(4)
    model: Any = recorded(make, tmp_path)
    for found, wanted in zip(kept, expected, strict=True):
        assert torch.equal(found, wanted)
    assert (deferred_of(model.weight), deferred_of(model.alone) is None) == (None, False)
    with torch.device("meta"):  # another default device changes nothing
        assert torch.equal(model.alone, plain.alone)
    kept[0].zero_()
    assert not model.weight[5:10].any()


class Row(nn.Module):
    """One parameter, which a function has made or changed."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def steps_by_a_tensor() -> nn.Module:
    w, n = torch.zeros(100, 30), torch.tensor(0)
    for i in range(4):
        w[n : n + 2] = i + 1.0
        n += 2
    return Row(w)


def by_a_number_without_values() -> nn.Module:
    t, w = torch.arange(2000), torch.empty(60, 30).normal_()
    start, row, first = t[5], t[7], t[30].float()
    part = torch.narrow(w, 0, start, 20) + w.select(0, row)  # type: ignore[arg-type]
    return Row(part * torch.arange(first, 60.0))  # type: ignore[call-overload]


def changed_later() -> nn.Module:
    row, factor, listed = torch.arange(30.0), torch.tensor(2.0), [[1.0, 2.0]] * 40
    model = Row(torch.zeros(40, 30).copy_(row).mul_(factor))
    model.listed = nn.Parameter(torch.tensor(listed))
    row.zero_()
    factor.fill_(5.0)
    listed[0][0] = 9.0
    return model


def scaled() -> nn.Module:
    return Row(0.02 * torch.randn(40, 30) / 3 - 1)


def of_an_out() -> nn.Module:
    big = torch.ones(100, 100) * 0
    v = big[:50]
    torch.full((50, 100), 3.0, out=v)
    v.mul_(2)
    nn.init.eye_(big[50:])
    return Row(big)


def of_an_array() -> nn.Module:
    array = np.ones((40, 30), dtype=np.float32)
    x, w = torch.from_numpy(array), torch.empty(40, 30)
    y = x.to(w)
    array[:] = 5
    return Row(y)


def after_an_error() -> nn.Module:
    model = Row(torch.empty(40, 30).normal_())
    for attempt in (
        lambda: model.weight.data.copy_(torch.ones(7, 7)),
        lambda: model.weight.data.__setitem__(200, 1),
        lambda: model.weight.fill_(3.0),
    ):
        with contextlib.suppress(RuntimeError, IndexError):
            attempt()
            model.weight.data.zero_()
    return model


def doubled() -> nn.Module:
    value = torch.randn(40, 30)
    for _ in range(20):
        value = value + value * 0.5
    return Row(value)


def mapped() -> nn.Module:
    rows = torch.randn(3, 40, 30)
    return Row(torch.vmap(lambda row: row * 2 + torch.ones(40, 30))(rows))


def scripted() -> nn.Module:
    script: Callable[[nn.Module], nn.Module] = torch.jit.script
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return Row(script(nn.Linear(30, 40))(torch.randn(50, 30)).detach())


def of_another_dtype() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Row(torch.randn(40, 30) + torch.arange(30) * 0.1)
    finally:
        torch.set_default_dtype(before)


def by_shifts() -> nn.Module:
    numbers = torch.arange(3000)
    return Row(((numbers << 2) + numbers.__rshift__(1)).float())


ODD: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        *(steps_by_a_tensor, by_a_number_without_values, changed_later, scaled, of_an_out),
        *(of_an_array, after_an_error, doubled, mapped, scripted, of_another_dtype, by_shifts),
    )
}


@for_each("name", some(ODD, 2))
def test_odd_ways_have_the_bits_of_the_plain_way(name: str, tmp_path: Path) -> None:
    share = check_alike(ODD[name], tmp_path)
    assert name not in ("scaled", "doubled", "of_another_dtype") or share == 1

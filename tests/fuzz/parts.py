"""Parts of drawn models, each with a trait that training on many devices could get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.fuzz.losses import CLASSES, FEATURES, WORDS, Fields

__all__ = ["BLOCKS", "STEMS", "Net", "Traits"]

WIDTH = 8
_KINDS = (
    *("float16", "bfloat16", "int16", "uint8", "bool", "float64", "int32", "uint16", "uint32"),
    *("uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "int8"),
)


@dataclass(frozen=True)
class Traits:
    """What may be expected of a part."""

    exact: bool = True
    """Its gradient is the sum over samples, in full precision: a plain loop has the same one."""
    seeded: bool = True
    """With one shard it has the bits of a plain loop that draws from the same seed."""
    pairs: bool = False
    """Each shard needs two samples."""


class Step(nn.Module):
    """Something that keeps the width, then tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def inner(self, h: torch.Tensor) -> Any:
        return self.line(h)

    def forward(self, h: torch.Tensor) -> Any:
        return self.inner(h).tanh()


class Checkpointed(Step):
    def inner(self, h: torch.Tensor) -> Any:
        return F.dropout(self.line(h), 0.2, self.training)

    def forward(self, h: torch.Tensor) -> Any:
        return checkpoint(super().forward, h, use_reentrant=True)


class Experts(nn.Module):
    """Each sample goes to one expert; some get none, one never any."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        where = (h[:, 0] > 0).long() + (h[:, 1] > 0).long()
        result = h.clone()
        for number in where.unique().tolist():
            mine = where == number
            result[mine] = self.experts[number](h[mine]).tanh()
        return result


class Odd(Step):
    """Buffers of every type, strides of several kinds, and none, which nothing depends on."""

    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", None)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("turned", torch.ones(3, 4).t())
        for name in _KINDS:
            self.register_buffer(f"of_{name}", torch.zeros(3, 2).to(getattr(torch, name)))

    def _apply(self, *given: Any, **named: Any) -> Odd:
        self.line._apply(*given, **named)
        return self

    def forward(self, h: torch.Tensor) -> Any:
        value = h.detach().abs().mean().float()
        self.hidden.data = torch.full((2,), float(value))
        for name in _KINDS:
            number = torch.full((3, 2), float(int(value * 10) % 5))
            setattr(self, f"of_{name}", number.to(getattr(torch, name)))
        with torch.no_grad():
            self.turned.mul_(0.5).add_(value)
        return super().forward(h)


class Shapes(Step):
    """An empty parameter, a single number, one that is frozen, and strides of several kinds."""

    def __init__(self, *, sliced: bool = False) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.factor = nn.Parameter(torch.tensor(0.7))
        self.unused, self.frozen = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(WIDTH))
        self.frozen.requires_grad_(False)
        turned = torch.randn(WIDTH, 2 * WIDTH) * 0.3
        # Sliced, it does not fill its memory.
        self.turned = nn.Parameter(turned[:, ::2] if sliced else turned.t())

    def inner(self, h: torch.Tensor) -> Any:
        more = h @ self.turned[:WIDTH] + self.empty.sum()
        return self.line(h) * self.factor * self.frozen + more


BLOCKS: dict[str, tuple[Callable[[], nn.Module], Traits]] = {
    "step": (Step, Traits()),
    "wide": (  # large enough to be cut into segments
        lambda: nn.Sequential(nn.Linear(WIDTH, 2100), nn.Tanh(), nn.Linear(2100, WIDTH)),
        Traits(),
    ),
    "batchnorm": (lambda: nn.BatchNorm1d(WIDTH), Traits(exact=False, pairs=True)),
    "layernorm": (lambda: nn.LayerNorm(WIDTH), Traits()),
    "dropout": (lambda: nn.Dropout(0.2), Traits(exact=False)),
    "experts": (Experts, Traits()),
    "odd": (Odd, Traits()),
    "shapes": (Shapes, Traits()),
    "sliced": (lambda: Shapes(sliced=True), Traits(seeded=False)),
    "reentrant": (Checkpointed, Traits(exact=False)),
    "spectralnorm": (
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        Traits(exact=False),
    ),
}


class LinearStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, WIDTH)

    def forward(self, fields: Fields) -> Any:
        return self.line(fields.x)


class ConvStem(nn.Module):
    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (2, 3), padding=1)
        self.line = nn.Linear(4 * 3 * 3, WIDTH)
        self.order = torch.channels_last if last else torch.contiguous_format
        self.conv.to(memory_format=self.order)  # type: ignore[call-overload]

    def forward(self, fields: Fields) -> Any:
        picture = fields.x.view(-1, 2, 2, 3).contiguous(memory_format=self.order)
        return self.line(self.conv(picture).tanh().flatten(1))


class WordStem(nn.Module):
    """The mean of the words, or what a recurrent layer makes of them."""

    def __init__(self, *, recurrent: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True) if recurrent else None

    def forward(self, fields: Fields) -> Any:
        words = self.words(fields.tokens)
        return words.mean(dim=1) if self.rnn is None else self.rnn(words)[0][:, -1]


STEMS: dict[str, tuple[Callable[[], nn.Module], Traits]] = {
    "linear": (LinearStem, Traits()),
    "conv": (ConvStem, Traits()),
    "conv-last": (lambda: ConvStem(last=True), Traits()),
    "bag": (WordStem, Traits()),
    "lstm": (lambda: WordStem(recurrent=True), Traits()),
}


class Net(nn.Module):
    """A stem, some blocks and a head; ``factor`` is an attribute that scripts may change."""

    def __init__(self, stem: str, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.stem = STEMS[stem][0]()
        self.blocks = nn.Sequential(*(BLOCKS[name][0]() for name in blocks))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.factor = 1.0

    def forward(self, fields: Fields) -> Any:
        return self.head(self.blocks(self.stem(fields).tanh())) * self.factor

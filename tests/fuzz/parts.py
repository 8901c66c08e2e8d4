"""Parts of drawn models, each with a trait that training on many devices could get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.fuzz.data import CLASSES, FEATURES, WORDS, Fields

__all__ = ["BLOCKS", "STEMS", "Net", "Traits"]

WIDTH = 8
_KINDS = ("float16", "bfloat16", "int16", "uint8", "bool", "float64", "int32")
_ODD_KINDS = ("uint16", "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True)
class Traits:
    """What may be expected of a part."""

    exact: bool = True
    """Its gradient is the sum over samples, in full precision: a plain loop has the same one."""
    seeded: bool = True
    """With one shard it has the bits of a plain loop that draws from the same seed."""
    pairs: bool = False
    """Each shard needs two samples."""
    twice: bool = True
    """Its gradient has a gradient."""
    stateful: bool = False
    """What it computes depends on buffers that change."""
    dtypes: bool = False
    """It has parameters of a dtype of its own."""


class Step(nn.Module):
    """Something that keeps the width, then tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return self.line(h)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h).tanh()


class Checkpointed(Step):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, h, use_reentrant=self.reentrant)


class CheckpointedDropout(Checkpointed):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.line(h), 0.2, self.training)


class Wide(nn.Sequential):
    """Large enough to be cut into pieces."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2100), nn.Tanh(), nn.Linear(2100, WIDTH))


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


class Joined(nn.Module):
    """Parameters joined before use, so that their gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            [nn.Parameter(torch.randn(n, WIDTH) * 0.3) for n in (3, 5, 5, 3)]
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.parts
        return F.linear(h, torch.cat([a, b]) + torch.cat([c, d])).tanh()


class Viewed(nn.Module):
    """One parameter used in several shapes and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(2 * WIDTH * WIDTH) * 0.3)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        first, second = self.all.view(2, WIDTH, WIDTH).unbind()
        return h + (h @ first).tanh() @ second.t() * self.all[:1]


class Tied(nn.Module):
    """The same weight twice, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.two.weight = self.one.weight
        self.again = self.one

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.again(self.two(self.one(h).tanh())).tanh()


class Counting(Step):
    """Counts of several types, which nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", None)
        self.register_buffer("largest", torch.zeros(WIDTH))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        for name in _KINDS:
            self.register_buffer(f"of_{name}", torch.zeros(3, dtype=getattr(torch, name)))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        value = h.detach().abs().mean().double()
        self.calls += 1
        self.largest = h.detach().amax(dim=0).to(self.largest)
        self.hidden.data = torch.full_like(self.hidden, float(value))
        self.of_int16 = self.of_int16 + len(h)
        self.of_uint8.fill_(len(h) % 7)
        self.of_bool[0] = bool(value > 0.3)
        for name in ("float16", "bfloat16", "float64"):
            getattr(self, f"of_{name}").mul_(0.5).add_(value)
        return super().forward(h)


class Odd(Step):
    """Buffers of types for which PyTorch has few kernels, and of strides of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        for name in _ODD_KINDS:
            self.register_buffer(f"of_{name}", torch.zeros(3, 2).to(getattr(torch, name)))
        self.register_buffer("turned", torch.ones(3, 4).t())

    def _apply(self, *_: object, **__: object) -> Odd:
        self.line._apply(*_, **__)
        return self

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        value = h.detach().abs().mean().float()
        for name in _ODD_KINDS:
            number = torch.full((3, 2), float(int(value * 10) % 5))
            setattr(self, f"of_{name}", number.to(getattr(torch, name)))
        with torch.no_grad():
            self.turned.mul_(0.5).add_(value)
        return super().forward(h)


class Averaging(Step):
    """Computes with an average that it keeps, as batch norm does, but by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        result = super().forward(h - self.average)
        if self.training:
            with torch.no_grad():
                self.average = 0.9 * self.average + 0.1 * h.detach().mean(dim=0).to(self.average)
        return result


class Shapes(Step):
    """An empty parameter, a single number, and strides of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.factor = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) * 0.3).t())
        self.unused = nn.Parameter(torch.zeros(5))

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return self.line(h) * self.factor + h @ self.turned[:WIDTH] + self.empty.sum()


class Sliced(Step):
    """A parameter that does not fill its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter((torch.randn(2 * WIDTH, WIDTH) * 0.3)[::2])

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return self.line(h) + h @ self.rows


class OfDtype(nn.Module):
    """A part in a precision of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.line(h.to(self.line.weight.dtype)).to(h).tanh()

    def _apply(self, *_: object, **__: object) -> OfDtype:
        return self  # keeps its precision whatever the model is moved to


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        parts = h.view(len(h), WIDTH // 2, 2)
        return h + self.inner(parts, parts, parts, need_weights=False)[0].reshape(h.shape).tanh()


class Frozen(Step):
    def __init__(self) -> None:
        super().__init__()
        self.line.requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return super().inner(h) + self.bias


class Sometimes(Step):
    """Adds a branch only where some sample asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        asked = h.detach()[:, :1] > 0.6
        result = super().inner(h)
        return result + asked * self.rare(h) if bool(asked.any()) else result


class Skipping(Step):
    """Leaves itself out at random, by each of the generators in turn."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.2:
            return h * float(np.random.uniform(0.5, 1.0))
        if self.training and bool(torch.rand(()) < 0.2):
            return h
        return super().forward(h)


class Conv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.conv(h.view(len(h), 2, WIDTH // 2)).reshape(h.shape).tanh()


BLOCKS: dict[str, tuple[Callable[[], nn.Module], Traits]] = {
    "step": (Step, Traits()),
    "wide": (Wide, Traits()),
    "batchnorm": (
        lambda: nn.BatchNorm1d(WIDTH),
        Traits(exact=False, pairs=True, stateful=True),
    ),
    "batchnorm-count": (
        lambda: nn.BatchNorm1d(WIDTH, momentum=None),
        Traits(exact=False, pairs=True, stateful=True),
    ),
    "groupnorm": (lambda: nn.GroupNorm(2, WIDTH), Traits()),
    "layernorm": (lambda: nn.LayerNorm(WIDTH), Traits()),
    "rmsnorm": (lambda: nn.RMSNorm(WIDTH), Traits()),
    "dropout": (lambda: nn.Dropout(0.2), Traits(exact=False)),
    "alphadropout": (lambda: nn.AlphaDropout(0.1), Traits(exact=False)),
    "rrelu": (nn.RReLU, Traits(exact=False)),
    "experts": (Experts, Traits()),
    "joined": (Joined, Traits()),
    "viewed": (Viewed, Traits()),
    "tied": (Tied, Traits()),
    "counting": (Counting, Traits()),
    "odd": (Odd, Traits()),
    "averaging": (Averaging, Traits(exact=False, stateful=True)),
    "shapes": (Shapes, Traits()),
    "sliced": (Sliced, Traits(seeded=False)),
    "half": (lambda: OfDtype(torch.bfloat16), Traits(exact=False, dtypes=True)),
    "single": (lambda: OfDtype(torch.float32), Traits(exact=False, dtypes=True)),
    "double": (lambda: OfDtype(torch.float64), Traits(dtypes=True)),
    "attention": (Attention, Traits(twice=False)),
    "frozen": (Frozen, Traits()),
    "sometimes": (Sometimes, Traits()),
    "skipping": (Skipping, Traits(exact=False)),
    "conv1d": (Conv1d, Traits()),
    "reentrant": (lambda: Checkpointed(reentrant=True), Traits(twice=False)),
    "nonreentrant": (lambda: Checkpointed(reentrant=False), Traits()),
    "reentrant-dropout": (
        lambda: CheckpointedDropout(reentrant=True),
        Traits(exact=False, twice=False),
    ),
    "nonreentrant-dropout": (lambda: CheckpointedDropout(reentrant=False), Traits(exact=False)),
    "weightnorm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Traits()),
    "spectralnorm": (
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        Traits(exact=False, stateful=True),
    ),
}


class LinearStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, WIDTH)

    def forward(self, fields: Fields) -> torch.Tensor:
        return self.line(fields.x)


class ConvStem(nn.Module):
    def __init__(self, *, channels_last: bool = False, weights_last: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (2, 3), padding=1)
        self.line = nn.Linear(4 * 3 * 3, WIDTH)
        self.channels_last = channels_last
        if weights_last:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, fields: Fields) -> torch.Tensor:
        picture = fields.x.view(-1, 2, 2, 3)
        if self.channels_last:
            picture = picture.contiguous(memory_format=torch.channels_last)
        return self.line(self.conv(picture).tanh().flatten(1))


class BagStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)

    def forward(self, fields: Fields) -> torch.Tensor:
        return self.words(fields.tokens).mean(dim=1)


class RecurrentStem(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.rnn = kind(6, WIDTH, batch_first=True, **options)

    def forward(self, fields: Fields) -> torch.Tensor:
        return self.rnn(self.words(fields.tokens))[0][:, -1]


STEMS: dict[str, tuple[Callable[[], nn.Module], Traits]] = {
    "linear": (LinearStem, Traits()),
    "conv": (ConvStem, Traits()),
    "conv-last": (lambda: ConvStem(channels_last=True), Traits()),
    "conv-weights-last": (lambda: ConvStem(channels_last=True, weights_last=True), Traits()),
    "bag": (BagStem, Traits(twice=False)),
    "gru": (lambda: RecurrentStem(nn.GRU), Traits(twice=False)),
    "lstm": (lambda: RecurrentStem(nn.LSTM), Traits(twice=False)),
    "lstm-dropout": (
        lambda: RecurrentStem(nn.LSTM, num_layers=2, dropout=0.2),
        Traits(exact=False, twice=False),
    ),
}


class Net(nn.Module):
    """A stem, some blocks and a head; ``factor`` is an attribute that scripts may change."""

    def __init__(self, stem: str, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.stem = STEMS[stem][0]()
        self.blocks = nn.Sequential(*(BLOCKS[name][0]() for name in blocks))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.factor = 1.0

    def forward(self, fields: Fields) -> torch.Tensor:
        return self.head(self.blocks(self.stem(fields).tanh())) * self.factor

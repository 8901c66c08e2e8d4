"""Models that are cut into stages, and runs of them. Also called in launched processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold

STEPS = 3
SHARDS = 8
TOKENS, LENGTH = 40, 10


class Block(nn.Module):
    """Attention and a perceptron, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + F.dropout(self.mlp(self.norms[1](x)), 0.1, self.training)


class GPT(nn.Module):
    """A text model, perhaps with the first and the last layer tied, perhaps with checkpoints."""

    def __init__(self, *, tied: bool, checkpoints: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 24), nn.Embedding(LENGTH, 24)
        self.blocks = nn.ModuleList(Block(24) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, TOKENS, bias=False)
        self.checkpoints = checkpoints
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x)).flatten(1)


class UNet(nn.Module):
    """Skips from each level down to the same level up, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(TOKENS, 8)
        self.down = nn.ModuleList(self._level(8, 8) for _ in range(3))
        self.middle = self._level(8, 8)
        self.up = nn.ModuleList(self._level(16, 8) for _ in range(3))
        self.head = nn.Conv1d(8, 3, 1)

    @staticmethod
    def _level(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(inputs, outputs, 3, padding=1), nn.BatchNorm1d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).transpose(1, 2)
        seen = []
        for level in self.down:
            x = level(x).relu()
            seen.append(x)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([x, seen.pop()], dim=1)).relu()
        return self.head(x).flatten(1)


class EncoderDecoder(nn.Module):
    """A decoder every layer of which sees the encoder's end, and a loss over all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 16)
        settings = {"dim_feedforward": 32, "dropout": 0.1, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, **settings) for _ in "ab")  # type: ignore[arg-type]
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, **settings) for _ in "ab")  # type: ignore[arg-type]
        self.rare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.tokens(x)
        for layer in self.encoder:
            memory = layer(memory)
        y = self.tokens(x.flip(1))
        for layer in self.decoder:
            y = layer(y, memory)
        if bool((x[:, 0] < 8).any()):
            y = y + self.rare(y)
        return self.head(y).flatten(1)


class LoRA(nn.Module):
    """A frozen model, to each matrix of which a small product is added."""

    def __init__(self) -> None:
        super().__init__()
        self.base = GPT(tied=True).requires_grad_(False)
        self.low = nn.ModuleList(nn.Linear(24, 2, bias=False) for _ in self.base.blocks)
        self.high = nn.ModuleList(nn.Linear(2, 24, bias=False) for _ in self.base.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base.tokens(x)
        for block, low, high in zip(self.base.blocks, self.low, self.high, strict=True):
            y = block(y) + high(low(y))
        return self.base.head(y).flatten(1)


class Wandering(nn.Module):
    """Uses the last layer's weights first, and the others in an order that samples decide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.embedding(x, self.head.weight)
        turn = int(x.sum()) % 3
        for number in range(4 - turn):
            y = y + self.layers[(number + turn) % 4](y).tanh()
        return self.head(y).flatten(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: GPT(tied=True),
    "untied": lambda: GPT(tied=False),
    "checkpoints": lambda: GPT(tied=True, checkpoints=True),
    "u-net": UNet,
    "encoder-decoder": EncoderDecoder,
    "lora": LoRA,
    "wandering": Wandering,
}


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    chosen = [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]
    return torch.optim.Muon(chosen, lr=0.02) if chosen else torch.optim.SGD(model.parameters())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "muon": _muon,
}


@dataclass(frozen=True)
class Case:
    """One run, which is cut at the named parts or by itself."""

    model: str
    optimizer: str
    samples: int = 13
    uneven: bool = False
    by_hand: bool = False
    clip: bool = True
    microbatch: int | None = None


CASES = [
    *(Case(model, "adamw", 13, uneven=True) for model in MODELS),
    *(Case(model, "sgd", 5, by_hand=True) for model in MODELS),
    *(Case(model, "adamw-fused", 13, clip=False, microbatch=1) for model in MODELS),
    *(Case(model, "muon", 13, uneven=True, by_hand=True) for model in ("untied", "lora")),
]


def run(case: Case, devices: Sequence[str] | None = None) -> tuple[str, str]:
    """Train for some steps; the fingerprint and the last loss, to the last bit."""
    torch.manual_seed(5)
    model = MODELS[case.model]()
    optimizer = OPTIMIZERS[case.optimizer](model)
    by_hand = [part for part in model.children() if not isinstance(part, nn.ModuleList)]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=SHARDS,
        seed=2,
        devices=devices,
        threads=1,
        clip_norm=0.5 if case.clip else None,
        microbatch=case.microbatch,
        stages=by_hand if case.by_hand else "auto",
    )
    count = len(trainer.devices)
    if case.uneven and count > 1:
        trainer.shares = (SHARDS - count + 2, *([1] * (count - 2)), 0) if count > 2 else (3, 5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        step = trainer.step(torch.randint(0, TOKENS, (case.samples, LENGTH), generator=generator))
    result = trainer.fingerprint(), float(step.loss).hex()
    trainer.close()
    return result

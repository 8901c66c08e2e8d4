"""A frozen model with small trained parts, and runs of it. Also called in launched processes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from tests.bits.large import LENGTH, TOKENS, Block
from tests.inside import engine_in

SHARDS, WIDTH, STEPS = 8, 24, 4


class Layer(nn.Module):
    """A frozen layer in 16 bits and in whole numbers, with a trained product beside it."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 40 * WIDTH, dtype=kind).requires_grad_(False)
        self.back = nn.Linear(40 * WIDTH, WIDTH, dtype=kind).requires_grad_(False)
        whole = torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8)
        self.rounded = nn.Parameter(whole, requires_grad=False)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.unheld = nn.Parameter(torch.ones(WIDTH))
        """Has gradients that no optimizer wants."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.back(self.wide(x.to(self.wide.weight.dtype)).relu()).to(x.dtype)
        y = y + x @ self.rounded.to(x.dtype) / 1000
        return x + y * self.unheld + self.high(self.low(x))


class Adapted(nn.Module):
    """Stages that are frozen in part and as a whole, and frozen parameters in none or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH).requires_grad_(False)
        self.frozen = nn.ModuleList(Block(WIDTH).requires_grad_(False) for _ in range(2))
        kinds = torch.bfloat16, torch.float64, torch.float32
        self.layers = nn.ModuleList(map(Layer, kinds))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, TOKENS, bias=False)
        self.again.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x)
        for part in (*self.frozen, *self.layers):
            y = part(y)
        return self.again(self.head(y * self.scale)).flatten(1)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)


def batches(count: int, first: int = 0) -> list[torch.Tensor]:
    generators = (torch.Generator().manual_seed(n) for n in range(first, first + count))
    return [torch.randint(0, TOKENS, (13, LENGTH), generator=g) for g in generators]


def trainer_of(devices: list[str] | None = None, seed: int = 5) -> onefold.Trainer:
    torch.manual_seed(seed)
    model = Adapted()
    trained = [
        p for name, p in model.named_parameters() if p.requires_grad and "unheld" not in name
    ]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    return onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=SHARDS,
        seed=2,
        threads=1,
        clip_norm=0.5,
        devices=devices,
    )


def all_that_a_run_can_be(devices: list[str] | None, average: bool) -> list[Any]:
    """Train, evaluate, predict, and look at the model: what each gives, bit by bit."""
    trainer = trainer_of(devices)
    if average:
        trainer.average(decay=0.5)
    found: list[Any] = [trainer.fingerprint()]
    for batch in batches(STEPS):
        found.append(float(trainer.step(batch).loss).hex())
    data = torch.cat(batches(2))
    scores = trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, data, batch_size=7)
    found += [scores, trainer.predict(lambda m, b: {"y": m(b)}, data, batch_size=7)["y"].tolist()]
    if not average:
        trainer.gradient(data)
        found += [p.grad.tolist() for p in trainer.model.parameters() if p.grad is not None]
        trainer.model.zero_grad()
    with trainer.gathered():
        found.append({name: p.tolist() for name, p in trainer.model.named_parameters()})
        found.append(float(trainer.step(batches(1)[0]).loss).hex())
    if average:
        with trainer.averaged():
            found.append(trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, data, batch_size=7))
    model: Any = trainer.model
    with trainer.modifying(), torch.no_grad():
        if trainer.is_lead:
            for parameter in model.layers[1].parameters():
                parameter.sub_(parameter * 2)
            model.frozen[0].mlp[0].weight.data.mul_(0.5)
    found += [trainer.fingerprint(), float(trainer.step(batches(1)[0]).loss).hex()]
    found.append(trainer.fingerprint())
    trainer.close()
    return found


def part_of_a_run(folder: Path | None, stop: int, seed: int = 5) -> tuple[str, str]:
    """Go on from what is in a folder, if it is given, to some step; save; the fingerprint."""
    trainer = trainer_of(seed=seed)
    first = 0
    if folder is not None and folder.exists():
        first = trainer.load(folder).step
    for batch in batches(stop - first, first):
        trainer.step(batch)
    saved = "" if folder is None else str(trainer.save(folder))
    found = trainer.fingerprint()
    trainer.close()
    return found, saved


def at_hand() -> tuple[int, int, list[str]]:
    """Bytes of the frozen parameters that this device keeps, and those of all of them; and which
    have values here between steps."""
    trainer = trainer_of()
    trainer.step(batches(1)[0])
    frozen = {n: p for n, p in trainer.model.named_parameters() if not p.requires_grad}
    here = []
    for name, parameter in frozen.items():
        with suppress(RuntimeError):
            parameter.sum()
            here.append(name)
    memory: Any = engine_in(trainer).context.exchange.memory
    kept = sum(memory.frozen.part(number).nbytes for number in memory.frozen.numbers)
    assert not memory.frozen.flat.is_there
    trainer.close()
    return kept, sum(p.nbytes for p in frozen.values()), here

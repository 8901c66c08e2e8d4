"""Low-rank adapters on a frozen model: only a few parameters are trained.

Changes from the plain loop: only the loop itself. Parameters that require no gradient are not
trained, exchanged or optimized; the script still controls modes and the adapters' dropout.

Usually the base is loaded from a file (`onefold.load_weights(model, FILE)`). Here it has
random features, which are sufficient for the task.

    python examples/ports/lora.py
    onefold run --devices 2 examples/ports/lora.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import onefold

WORDS, LENGTH, CLASSES = 60, 16, 4


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        inside = self.norm1(x)
        split = (
            each(inside).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        x = x + F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        return x + self.mlp(self.norm2(x))


class Base(nn.Module):
    """A small transformer that classifies words (n, time) int64 into one of four classes."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words):
        return self.head(self.layers(self.words(words)).mean(dim=1))


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank layer that is initially zero."""

    def __init__(self, frozen, rank=4, scale=2.0):
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return self.frozen(x) + self.scale * F.linear(F.linear(self.dropout(x), self.down), self.up)


def add_adapters(model):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.query, layer.value = Adapted(layer.query), Adapted(layer.value)
    model.head.requires_grad_(True)


def make_texts(size, seed):
    """Make texts in which the words of one class are slightly more frequent than others."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    words = torch.randint(WORDS, (size, LENGTH), generator=generator)
    own = torch.randint(WORDS // CLASSES, (size, LENGTH), generator=generator) * CLASSES
    chosen = torch.rand(size, LENGTH, generator=generator) < 0.25
    return torch.utils.data.TensorDataset(words.where(~chosen, own + labels[:, None]), labels)


def loss(model, batch):
    words, labels = batch
    return F.cross_entropy(model(words), labels, reduction="none")


def score(model, batch):
    words, labels = batch
    return {"accuracy": model(words).argmax(dim=1) == labels}


def main(epochs=6, output=None):
    torch.manual_seed(0)
    model = Base()
    add_adapters(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    everything = sum(p.numel() for p in model.parameters())
    print(f"{sum(p.numel() for p in trained)} of {everything} numbers are trained")
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0)
    loader = trainer.loader(make_texts(640, seed=1), batch_size=64, shuffle=True)
    held_out = make_texts(300, seed=2)
    for epoch in trainer.epochs(epochs):
        step = None
        for batch in loader:
            step = trainer.step(batch)
        scores = trainer.evaluate(score, held_out, batch_size=100)
        if step is not None:
            print(f"epoch {epoch}: loss {step.loss:.4f}, accuracy {scores['accuracy']:.1%}")
    if output is not None and trainer.is_lead:
        state = trainer.model.named_parameters()
        torch.save({name: p.detach().clone() for name, p in state if p.requires_grad}, output)
    return trainer.fingerprint()


if __name__ == "__main__":
    main()

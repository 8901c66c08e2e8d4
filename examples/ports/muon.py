"""Muon for the matrices of a language model, AdamW for the rest: two optimizers, one loss.

Changes from the plain loop:

- Trainer receives both optimizers and both schedulers in lists; each update uses all
  of them.
- Muon sees whole matrices, whichever device updates them; the norm covers all parameters.
- `trainer.batches` draws the windows, so that a resumed run continues with the same ones.

    python examples/ports/muon.py
    onefold run --devices 2 examples/ports/muon.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

WORDS, LENGTH, WIDTH, BATCH = 32, 24, 32, 16


def make_text(size=6000):
    """Make words that mostly determine the next one: (size,) int64."""
    generator = torch.Generator().manual_seed(1)
    follows = torch.randint(WORDS, (WORDS, 2), generator=generator)
    choices = torch.rand(size, generator=generator)
    words = [0]
    for choice in choices.tolist():
        first, second = follows[words[-1]].tolist()
        words.append(first if choice < 0.7 else second)
    return torch.tensor(words[1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.back = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.mix(self.norms[0](x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.back(F.relu(self.wide(self.norms[1](x))).square())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_optimizers(model):
    """Return Muon for the matrices of the blocks, and AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3),
    ]


def make_schedulers(optimizers, steps):
    def rate(step):
        return min(1.0, (step + 1) / 8) * (1 - step / (steps + 1))

    return [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]


def loss(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)


def main(steps=60):
    torch.manual_seed(0)
    text, model = make_text(), Model()
    optimizers = make_optimizers(model)
    schedulers = make_schedulers(optimizers, steps)
    windows = text.unfold(0, LENGTH + 1, 1)
    trainer = onefold.Trainer(
        model, optimizers, loss, shards=4, seed=0, scheduler=schedulers, clip_norm=1.0
    )

    def draw(number, generator):
        return windows[torch.randint(len(windows), (BATCH,), generator=generator)]

    for batch in trainer.batches(draw, per_epoch=steps):
        step = trainer.step(batch)
        if (step.number - 1) % 20 == 0:
            print(f"step {step.number - 1}: loss {step.loss:.4f}")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()

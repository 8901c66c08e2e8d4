"""A loop like nanoGPT's: random windows of one long text, counted in steps instead of epochs.

Changes from the plain loop:

- `shards` replaces gradient accumulation: a device with several shards runs them one by one.
- The trainer does autocast, clipping and the update. The script still sets the learning rate.
- `trainer.batches` takes the function that draws a batch, and passes it a generator: a run that
  resumes from a checkpoint sees the same batches as an uninterrupted run. The steps between two
  evaluations are an epoch.
- The held-out loss covers all of the held-out text instead of a few random windows.

    python examples/ports/gpt.py
    onefold run --devices 2 examples/ports/gpt.py
"""

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

import onefold

CONTEXT, BATCH = 32, 32
RATE, LOWEST, WARM_UP = 1e-2, 1e-3, 10


def make_text(words=6000):
    """Make a text of invented words as letter numbers; also return the number of letters."""
    draw = random.Random(0)
    known = ["".join(draw.choices("abcdefghijk", k=draw.randint(2, 6))) for _ in range(40)]
    text = " ".join(draw.choices(known, k=words))
    letters = sorted(set(text))
    return torch.tensor([letters.index(letter) for letter in text]), len(letters)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x):
        n, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(n, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters, width=48, heads=4, layers=2):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        nn.init.normal_(self.letters.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.letters.weight  # tied

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.letters(x) + self.places(places))))


def loss(model, batch):
    x, y = batch
    return onefold.losses.cross_entropy(model(x).flatten(0, 1), y.flatten())


def score(model, batch):
    return {"loss": loss(model, batch)}


def draw_batch(text, generator):
    """Draw windows of the text, and the same windows one letter later: (BATCH, CONTEXT) int64."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    places = starts[:, None] + torch.arange(CONTEXT)
    return text[places], text[places + 1]


def rate_of(step, steps):
    """Return the learning rate: linear warmup, then cosine decay to the minimum."""
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LOWEST + 0.5 * (1 + math.cos(math.pi * done)) * (RATE - LOWEST)


def main(steps=60, evaluate_every=10, checkpoint=None):
    text, letters = make_text()
    text, rest = text[:-2000], text[-2000:]
    windows = rest[: len(rest) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    held_out = torch.utils.data.TensorDataset(windows[:, :-1], windows[:, 1:])

    torch.manual_seed(0)
    model = GPT(letters)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=4, seed=0, precision="bf16", clip_norm=1.0
    )
    batches = trainer.batches(lambda _, g: draw_batch(text, g), per_epoch=evaluate_every)
    if checkpoint is not None:
        trainer.load(checkpoint, if_any=True)
    for _ in trainer.epochs(steps // evaluate_every):
        for batch in batches:
            for group in optimizer.param_groups:
                group["lr"] = rate_of(trainer.steps, steps)
            step = trainer.step(batch)
        scores = trainer.evaluate(score, held_out, batch_size=32)
        print(f"step {step.number}: loss {step.loss:.4f}, held out {scores['loss']:.4f}")
        if checkpoint is not None:
            trainer.save(checkpoint, scores=scores, best="lowest loss")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()

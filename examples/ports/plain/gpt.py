"""The plain loop of ../gpt.py, on one device."""

import math
import os
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

CONTEXT, BATCH, ACCUMULATED = 32, 8, 4
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
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model, held_out):
    model.eval()
    batches = DataLoader(held_out, batch_size=32)
    total = sum(loss(model, batch).item() * len(batch[0]) for batch in batches)
    model.train()
    return total / len(held_out)


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
    generator = torch.Generator().manual_seed(0)
    first, best = 0, math.inf
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, best = saved["step"], saved["best"]
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, steps)
        optimizer.zero_grad()
        for _ in range(ACCUMULATED):
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model, draw_batch(text, generator)) / ACCUMULATED
            value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % evaluate_every == 0:
            found = evaluate(model, held_out)
            print(f"step {step + 1}: loss {value * ACCUMULATED:.4f}, held out {found:.4f}")
            if checkpoint is not None and found < best:
                best = found
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1, "best": best}, checkpoint)
    return model


if __name__ == "__main__":
    main()

"""A small GPT that writes like the reference of Python, word by word.

    onefold run --devices 2 examples/gallery/gpt.py

Reads the text that Python has for help(); prints a sample.
"""

import math
import re
import textwrap
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold

CONTEXT, BATCH, RATE = 32, 32, 5e-3


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        n, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(n, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, words, width=96, heads=4, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.words.weight  # tied

    def forward(self, x):
        places = self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(self.words(x) + places)))


def loss(model, batch):
    x, y = batch
    return onefold.losses.cross_entropy(model(x).flatten(0, 1), y.flatten())


def score(model, batch):
    return {"loss": loss(model, batch)}


def draw_batch(text, generator):
    """Draw windows of the text, and the same windows one word later: (BATCH, CONTEXT) int64."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    places = starts[:, None] + torch.arange(CONTEXT)
    return text[places], text[places + 1]


def make_text():
    """Return the text as word numbers, and the words; a rare word is the first one."""
    text = " ".join(topics[name] for name in sorted(topics))
    split = re.findall(r"[A-Za-z]+|[.,](?=\s)", text)
    words = ["...", *sorted(word for word, n in Counter(split).items() if n >= 5)]
    numbers = {word: n for n, word in enumerate(words)}
    return torch.tensor([numbers.get(word, 0) for word in split]), words


@torch.no_grad()
def write(model, text, length=80, temperature=0.6):
    generator, device = torch.Generator().manual_seed(1), model.head.weight.device
    for _ in range(length):
        logits = model(text[-CONTEXT:].unsqueeze(0).to(device))[0, -1].cpu()
        logits[0] = -torch.inf  # no rare word
        chances = (logits / temperature).softmax(dim=0)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)])
    return text


def main(steps=300):
    text, words = make_text()
    train, rest = text[:-4000], text[-4000:]
    windows = rest[: len(rest) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    held_out = TensorDataset(windows[:, :-1], windows[:, 1:])
    torch.manual_seed(0)
    model = GPT(len(words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min((n + 1) / 40, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, n / steps)))),
    )
    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=2,
        seed=0,
        threads=1,
        scheduler=scheduler,
        clip_norm=1.0,
    )
    for batch in trainer.batches(lambda _, g: draw_batch(train, g), per_epoch=steps):
        trainer.step(batch)
    scores = trainer.evaluate(score, held_out, batch_size=52)
    prompt = torch.tensor([words.index(word) for word in ("The", "value", "of")])
    written = " ".join(words[n] for n in write(trainer.model, prompt))
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(textwrap.fill(re.sub(r" (?=[.,])", "", written), 80))
        print(f"held-out loss {scores['loss']:.2f}, of guessing {math.log(len(words)):.2f}")
        print(f"fingerprint {fingerprint}")
    return fingerprint


if __name__ == "__main__":
    main()

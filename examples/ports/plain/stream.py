"""The plain loop of ../stream.py, on one device."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

WORDS, LENGTH, BUFFER = 50, 8, 64


class Sentences(IterableDataset):
    """Sentences like those from a pipe, shuffled in a buffer.

    Each is a dict of words (LENGTH,) and the next word, which follows a pattern of the
    invented language: twice the second-to-last word plus the last.
    """

    def __init__(self, samples):
        self.samples = samples

    def lines(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(self.samples):
            words = torch.randint(12, (LENGTH,), generator=generator)
            yield {"words": words, "next": (2 * words[-2] + words[-1]) % WORDS}

    def __iter__(self):
        waiting = []
        for line in self.lines():
            if len(waiting) < BUFFER:
                waiting.append(line)
                continue
            place = int(torch.randint(BUFFER, ()))
            yield waiting[place]
            waiting[place] = line
        for place in torch.randperm(len(waiting)).tolist():
            yield waiting[place]


class NextWord(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(nn.Linear(LENGTH * width, 96), nn.ReLU(), nn.Linear(96, WORDS))

    def forward(self, words):
        return self.layers(self.words(words).flatten(1))


def loss(model, batch):
    logits = model(batch["words"])
    return F.cross_entropy(logits, batch["next"]), {
        "accuracy": (logits.argmax(dim=1) == batch["next"]).float().mean()
    }


def main(epochs=5):
    torch.manual_seed(0)
    model = NextWord()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(Sentences(1600), batch_size=64)
    for epoch in range(epochs):
        total = right = samples = 0
        for batch in loader:
            optimizer.zero_grad()
            value, values = loss(model, batch)
            value.backward()
            optimizer.step()
            count = len(batch["next"])
            total, samples = total + value.item() * count, samples + count
            right = right + values["accuracy"] * count
        print(f"epoch {epoch}: loss {total / max(samples, 1):.4f}, {right / max(samples, 1):.1%}")
    return model


if __name__ == "__main__":
    main()

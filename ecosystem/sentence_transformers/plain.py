"""Pairs of sentences with the cosine loss of sentence-transformers, in a plain loop."""

import torch
from ecosystem.common import BATCH, EPOCHS, SAMPLES, report
from sentence_transformers import SentenceTransformer, losses
from torch.utils.data import DataLoader

model = SentenceTransformer("tiny")
pairs = [(f"w{n % 7} w{n % 5}", f"w{n % 11}", float(n % 2)) for n in range(SAMPLES)]


def collate(rows):
    first, second, labels = zip(*rows, strict=True)
    return [model.tokenize(list(first)), model.tokenize(list(second))], torch.tensor(labels)


optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = losses.CosineSimilarityLoss(model)
loader = DataLoader(pairs, batch_size=BATCH, collate_fn=collate)
for _ in range(EPOCHS):
    for features, labels in loader:
        loss = criterion(features, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)

"""The script with onefold: the library's loss is a mean over samples."""

import torch
from ecosystem.common import BATCH, EPOCHS, SAMPLES, SHARDS, report
from sentence_transformers import SentenceTransformer, losses

import onefold

model = SentenceTransformer("tiny")
pairs = [(f"w{n % 7} w{n % 5}", f"w{n % 11}", float(n % 2)) for n in range(SAMPLES)]


def collate(rows):
    first, second, labels = zip(*rows, strict=True)
    return [model.tokenize(list(first)), model.tokenize(list(second))], torch.tensor(labels)


def loss(model, batch):
    return losses.CosineSimilarityLoss(model)(*batch)


optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(pairs, batch_size=BATCH, collate=collate)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)

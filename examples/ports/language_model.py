"""The word language model: an LSTM whose hidden state is carried from batch to batch.

Changes from the plain loop:

- The state is a pair of buffers of the size of a shard, with the rule `"per_shard"`: each shard
  continues with its own state, whichever device runs it, also after a checkpoint.
- `trainer.batches` takes the function that cuts the next segment of the text. Rows are the first
  dimension here, not time.
- The script steps the scheduler, which divides the learning rate by four without progress; the
  trainer saves it.

    python examples/ports/language_model.py
    onefold run --devices 2 examples/ports/language_model.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import onefold

WORDS, ROWS, SHARDS, TIME = 40, 16, 4, 16


def make_text(length, seed):
    """Make words, each followed by one of three others: (length,) int64."""
    follows = torch.randint(WORDS, (WORDS, 3), generator=torch.Generator().manual_seed(0)).tolist()
    choices = torch.randint(3, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = [0]
    for choice in choices[1:]:
        text.append(follows[text[-1]][choice])
    return torch.tensor(text)


def in_rows(text):
    """Split the text into ROWS rows of equal length: (ROWS, length)."""
    return text[: len(text) // ROWS * ROWS].view(ROWS, -1)


class LanguageModel(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, width), nn.Dropout(0.1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("hidden", torch.zeros(1, ROWS // SHARDS, width))
        self.register_buffer("cell", torch.zeros(1, ROWS // SHARDS, width))

    def forward(self, words, begins):
        rows = len(words)
        kept = 1 - begins.to(self.hidden.dtype)[None, :, None]  # 0 at the beginning of a text
        state = self.hidden[:, :rows] * kept, self.cell[:, :rows] * kept
        found, state = self.lstm(self.dropout(self.words(words)), state)
        if self.training:
            self.hidden, self.cell = (each.detach() for each in state)
        return self.head(self.dropout(found))


def loss(model, batch):
    words, begins = batch
    logits = model(words[:, :-1], begins)
    return F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none").mean(dim=1)


def score(model, batch):
    (words,) = batch  # whole rows, each read from its beginning
    return {"loss": loss(model, (words, torch.ones(len(words), device=words.device)))}


def main(epochs=8):
    text, held_out = in_rows(make_text(6000, seed=1)), in_rows(make_text(2000, seed=2))
    pieces = (text.shape[1] - 1) // TIME

    def next_piece(step, _):
        start = step % pieces * TIME
        begins = torch.full((ROWS,), float(start == 0))
        return text[:, start : start + TIME + 1], begins

    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=SHARDS,
        seed=0,
        clip_norm=0.25,
        buffers={"hidden": "per_shard", "cell": "per_shard"},
        scheduler=scheduler,
        scheduler_every="script",
    )
    batches = trainer.batches(next_piece, per_epoch=pieces)
    for epoch in trainer.epochs(epochs):
        total = steps = 0
        for batch in batches:
            total, steps = total + trainer.step(batch).loss, steps + 1
        found = trainer.evaluate(score, torch.utils.data.TensorDataset(held_out), batch_size=8)
        scheduler.step(found["loss"])
        print(
            f"epoch {epoch}: perplexity {math.exp(total / max(steps, 1)):.2f}, held out "
            f"{math.exp(found['loss']):.2f}, rate {optimizer.param_groups[0]['lr']:g}"
        )
    return trainer.fingerprint()


if __name__ == "__main__":
    main()

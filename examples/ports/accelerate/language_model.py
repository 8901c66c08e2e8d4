"""The script of ../language_model.py with Accelerate, for `accelerate launch`."""

import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

WORDS, ROWS, TIME = 40, 16, 16


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

    def forward(self, words, state):
        found, state = self.lstm(self.dropout(self.words(words)), state)
        return self.head(self.dropout(found)), tuple(each.detach() for each in state)


def loss(model, words, state):
    logits, state = model(words[:, :-1], state)
    return F.cross_entropy(logits.transpose(1, 2), words[:, 1:]), state


@torch.no_grad()
def evaluate(model, words, accelerator):
    model.eval()
    found, _ = loss(model, words, None)
    model.train()
    return accelerator.reduce(found, "mean").item()


def main(epochs=8):
    accelerator = Accelerator()
    text, held_out = in_rows(make_text(6000, seed=1)), in_rows(make_text(2000, seed=2))
    rank, world = accelerator.process_index, accelerator.num_processes
    text = text[rank::world].to(accelerator.device)  # this process's rows
    held_out = held_out[rank::world].to(accelerator.device)
    pieces = (text.shape[1] - 1) // TIME

    def next_piece(number):
        start = number * TIME
        return text[:, start : start + TIME + 1]

    set_seed(0, device_specific=True)  # different noise on each process
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(epochs):
        total = steps = 0
        state = None
        for number in range(pieces):
            optimizer.zero_grad()
            value, state = loss(model, next_piece(number), state)
            accelerator.backward(value)
            accelerator.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            total += accelerator.reduce(value.detach(), "mean").item()
            steps += 1
        found = evaluate(model, held_out, accelerator)
        scheduler.step(found)
        accelerator.print(
            f"epoch {epoch}: perplexity {math.exp(total / max(steps, 1)):.2f}, held out "
            f"{math.exp(found):.2f}, rate {optimizer.param_groups[0]['lr']:g}"
        )
    accelerator.end_training()
    return model


if __name__ == "__main__":
    main()

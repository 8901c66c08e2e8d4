"""The script of ../language_model.py with DistributedDataParallel, for torchrun."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
def evaluate(model, words):
    model.eval()
    found, _ = loss(model, words, None)
    model.train()
    return mean_over_ranks(found).item()


def set_up():
    """Join torchrun's process group; return rank, world size and device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main(epochs=8):
    rank, world, device = set_up()
    text, held_out = in_rows(make_text(6000, seed=1)), in_rows(make_text(2000, seed=2))
    text = text[rank::world].to(device)  # each rank keeps the state of its own rows
    held_out = held_out[rank::world].to(device)
    pieces = (text.shape[1] - 1) // TIME

    def next_piece(number):
        start = number * TIME
        return text[:, start : start + TIME + 1]

    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = LanguageModel().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    for epoch in range(epochs):
        total = steps = 0
        state = None
        for number in range(pieces):
            optimizer.zero_grad()
            value, state = loss(ddp, next_piece(number), state)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            total, steps = total + mean_over_ranks(value).item(), steps + 1
        found = evaluate(model, held_out)
        scheduler.step(found)
        if rank == 0:
            print(
                f"epoch {epoch}: perplexity {math.exp(total / max(steps, 1)):.2f}, held out "
                f"{math.exp(found):.2f}, rate {optimizer.param_groups[0]['lr']:g}"
            )
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()

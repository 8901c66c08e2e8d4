"""The script of ../glue.py with Accelerate, for `accelerate launch`."""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

WORDS, LONGEST, PADDING, BATCH = 80, 24, 0, 32


def make_texts(size, seed):
    """Make texts of 6 to 24 words, as dicts; the label is the more frequent kind of word."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    while len(texts) < size:
        length = int(torch.randint(6, LONGEST + 1, (), generator=generator))
        words = torch.randint(1, WORDS, (length,), generator=generator)
        difference = int((words % 4 == 1).sum() - (words % 4 == 2).sum())
        if difference:
            texts.append({"input_ids": words, "label": int(difference > 0)})
    return texts


def collate(texts):
    """Pad texts to the longest one, and return the mask of their words."""
    words = pad_sequence([text["input_ids"] for text in texts], True, PADDING)
    labels = torch.tensor([text["label"] for text in texts])
    return {"input_ids": words, "attention_mask": words != PADDING, "labels": labels}


class Classifier(nn.Module):
    def __init__(self, width=48, heads=4, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.norm(self.words(input_ids) + self.places(places))
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~attention_mask)
        seen = attention_mask[..., None]
        return self.head((hidden * seen).sum(dim=1) / seen.sum(dim=1))


def loss(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits, batch["labels"])


@torch.no_grad()
def logits_of(model, batches, accelerator):
    model.eval()
    logits = []
    for batch in batches:
        found = model(batch["input_ids"], batch["attention_mask"])
        logits.append(accelerator.gather_for_metrics(found))
    model.train()
    return torch.cat(logits).cpu()


def metric(predictions, references):
    """Return accuracy and F1; F1 is not a mean over samples."""
    right = int(((predictions == 1) & (references == 1)).sum())
    both = int((predictions == 1).sum() + (references == 1).sum())
    accuracy = float((predictions == references).float().mean())
    return {"accuracy": accuracy, "f1": 2 * right / both if both else 0.0}


def grouped(model):
    """Return parameter groups without weight decay for biases and normalization."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def main(epochs=5, checkpoint=None):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    train_set, dev_set = make_texts(480, seed=1), make_texts(160, seed=2)
    dev = DataLoader(dev_set, batch_size=64, collate_fn=collate)
    references = torch.tensor([text["label"] for text in dev_set])
    set_seed(0, device_specific=True)  # different noise on each process
    model = Classifier()
    optimizer = torch.optim.AdamW(grouped(model), lr=2e-3)
    plain = DataLoader(train_set, batch_size=BATCH, shuffle=True, collate_fn=collate)
    steps = epochs * len(plain)
    warm_up = steps // 10
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / (warm_up + 1), (steps - n) / max(1, steps - warm_up))
    )
    model, optimizer, plain, dev, scheduler = accelerator.prepare(
        model, optimizer, plain, dev, scheduler
    )
    first = 0
    if checkpoint is not None and os.path.exists(checkpoint):
        accelerator.load_state(checkpoint)
        first = scheduler.scheduler.last_epoch // len(plain)
    for epoch in range(first, epochs):
        total = samples = 0
        for batch in plain:
            optimizer.zero_grad()
            value = loss(model, batch)
            accelerator.backward(value)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            value = accelerator.reduce(value.detach(), "mean")
            count = len(batch["labels"])
            total, samples = total + value.item() * count, samples + count
        logits = logits_of(model, dev, accelerator)
        scores = metric(logits.argmax(dim=1), references)
        accelerator.print(
            f"epoch {epoch}: loss {total / max(samples, 1):.4f}, "
            f"accuracy {scores['accuracy']:.1%}, F1 {scores['f1']:.3f}"
        )
        if checkpoint is not None:
            accelerator.save_state(checkpoint)
    accelerator.end_training()
    return model


if __name__ == "__main__":
    main()

"""Made-up texts, and a model of the least size for them."""

import random
from typing import Any

import torch
from torch import nn

from onefold_jobs.text_models import build_classifier, encode_texts, pad_shard

VOCABULARY_SIZE = 300
TEXTS = [
    "".join(random.Random(number).choices("fine dull film été", k=50)) for number in range(200)
]


def small(num_classes: int = 2, **changed: Any) -> nn.Module:
    """A classifier of the least size, always with the same weights."""
    options = {"width": 16, "layers": 2, "heads": 2, "max_length": 12, "dropout": 0.1} | changed
    torch.manual_seed(3)
    return build_classifier(VOCABULARY_SIZE, num_classes, **options)


def shard(tokenizer: str) -> dict[str, torch.Tensor]:
    """Three texts, each shorter than the one before it."""
    texts = [TEXTS[number][: 30 - 10 * number] for number in range(3)]
    ids = encode_texts(texts, tokenizer, max_length=12)
    return pad_shard([(each, number % 2) for number, each in enumerate(ids)])


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    answer: torch.Tensor = model(**inputs).logits
    return answer

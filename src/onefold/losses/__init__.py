"""PyTorch's losses, with the denominators that they have over the whole batch.

Each function takes the arguments of its namesake in `torch.nn.functional`. A shard does not know
what the loss of the whole batch is divided by (the weights of its classes, the number of targets
that are not ignored), so the division is left to the engine:

- ``reduction="mean"`` returns a `Mean`: the total, and the shard's part of PyTorch's denominator,
- ``reduction="sum"`` returns a `Sum`,
- ``reduction="none"`` returns PyTorch's own tensor.

>>> import torch
>>> from onefold import losses
>>> logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, -100, -100])
>>> losses.cross_entropy(logits, targets)
Mean(total=tensor(1.3863), weight=tensor(2))
>>> losses.cross_entropy(logits, targets) + 0.1 * losses.mse_loss(logits, logits, reduction="sum")
Means(terms=(Mean(total=tensor(1.3863), weight=tensor(2)), Sum(total=tensor(0.))))

Losses that compare samples with each other (contrastive ones) are missing, because their value over
a batch is not a sum over its shards. Totals of half precision are added up in float32.
"""

from __future__ import annotations

from onefold.losses.classes import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    ctc_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    multilabel_soft_margin_loss,
    nll_loss,
    soft_margin_loss,
)
from onefold.losses.values import (
    cosine_embedding_loss,
    gaussian_nll_loss,
    hinge_embedding_loss,
    huber_loss,
    kl_div,
    l1_loss,
    margin_ranking_loss,
    mse_loss,
    poisson_nll_loss,
    smooth_l1_loss,
    triplet_margin_loss,
)

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
]

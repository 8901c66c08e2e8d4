"""Learning rates: scaled to the batch size, and as they rise and fall during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from onefold.jobs.options import TrainOptions

__all__ = ["make_optimizer", "rate_factor", "scaled_rate", "usual_rate"]


def scaled_rate(options: TrainOptions) -> float:
    """The learning rate for the batch size.

    Linear after Goyal et al., 2017, "Accurate, large minibatch SGD"; by the square root after
    Krizhevsky, 2014, "One weird trick".
    """
    rate = usual_rate(options) if options.lr is None else options.lr
    ratio = options.batch_size / options.base_batch_size
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return rate * scale[options.scale_lr]


def usual_rate(options: TrainOptions, *, fine: bool = False) -> float:
    """The learning rate of an optimizer if none was given; a fifth of it for fine-tuning."""
    # Adam divides by the size of its gradients, so its steps are as long as the rate says.
    rates = {False: (0.05, 0.001), True: (0.01, 0.0002)}
    sgd, adaptive = rates[fine]
    return sgd if options.optimizer == "sgd" else adaptive


def rate_factor(options: TrainOptions, *, epochs: int, steps: int) -> Callable[[int], float]:
    """Return the function from steps done to what the full learning rate is multiplied by.

    Args:
        options: of the run.
        epochs: of the run.
        steps: of an epoch.
    """
    warmup = options.warmup_epochs * steps
    total = epochs * steps
    every = (options.decay_epochs or max(1, epochs // 3)) * steps

    # A plain function, of which LambdaLR saves nothing: a run that resumes with more epochs follows
    # the schedule of its new length.
    def factor(done: int) -> float:
        # Never 0: the first step would change nothing.
        if done < warmup:
            return (done + 1) / (warmup + 1)
        if options.schedule == "cosine":
            # The warm-up may be longer than the whole run.
            share = min(1.0, (done - warmup) / max(1.0, total - warmup))
            return 0.5 * (1 + math.cos(math.pi * share))
        if options.schedule == "step":
            return float(options.decay ** (done // every))
        return 1.0

    return factor


def make_optimizer(
    options: TrainOptions, groups: Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the optimizer of a run.

    Args:
        options: of the run.
        groups: parameters by group, each group with its learning rate ``lr``.
    """
    parameters = list(groups)
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, momentum=options.momentum, weight_decay=options.weight_decay
        )
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, weight_decay=options.weight_decay)

"""Logs every step's metrics to TensorBoard, Weights & Biases, MLflow or trackio, on the lead only.

    from onefold.integrations.loggers import log_steps

The script creates the logger; onefold imports none of these libraries.
https://onefold.example/do/loggers.html has an example of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onefold import Step, Trainer

__all__ = ["StepLog", "log_steps"]

Write = Callable[[dict[str, float], int], object]
"""Called with metrics by name, and their step number."""


class StepLog:
    """Writes a run's metrics. Call it to log other metrics, such as scores.

    Example:
        >>> log = StepLog(trainer, lambda numbers, step: print(step, numbers))
        >>> log({"accuracy": 0.5})
        0 {'accuracy': 0.5}
    """

    def __init__(self, trainer: Trainer, write: Write | None) -> None:
        self._trainer = trainer
        self._write = write

    def __call__(self, numbers: Mapping[str, Any]) -> None:
        """Write metrics of the last completed step; does nothing except on the lead.

        Args:
            numbers: metrics by name, as floats or tensors of one element.
        """
        if self._write is not None and not self._trainer.replaying:
            found = {name: float(value) for name, value in numbers.items()}
            self._write(found, self._trainer.steps)


def log_steps(
    trainer: Trainer,
    logger: object,
    *,
    every: int = 10,
    prefix: str = "train/",
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
) -> StepLog:
    """Log the metrics of a run's steps: loss, logged values, gradient norm and speed.

    Call it on every device; only the lead writes. Each step up to a checkpoint is written once.
    Steps that are repeated after a stop between two checkpoints are written again, with the same
    values.

    Args:
        trainer: the run's trainer.
        logger: a ``SummaryWriter`` of TensorBoard; a run of Weights & Biases or trackio, as
            returned by ``wandb.init`` or ``trackio.init``; the module ``mlflow`` or an
            ``MlflowClient``-like object with ``log_metrics(numbers, step=...)``; or a function of a
            dict of metrics and the step.
            Only the lead uses it; on other devices it may be None.
        every: interval in steps; the first step is always written.
        prefix: prefix of each name, as in ``train/loss``.
        optimizer: optimizer whose learning rates are written as well, with their values after the
            step.

    Returns:
        A function for other metrics: ``log({"validation/accuracy": 0.9})``.

    Raises:
        TypeError: the logger has none of these types.
        ValueError: ``every`` is not a positive integer.

    Example:
        >>> log = log_steps(trainer, lambda numbers, step: print(step, sorted(numbers)), every=2)
        >>> for _ in range(3):
        ...     step = trainer.step(torch.ones(6, 2))
        1 ['train/grad_norm', 'train/loss']
        2 ['train/grad_norm', 'train/loss', 'train/samples_per_s']
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a positive number of steps, but got {every!r}")
    write = _writing(logger) if trainer.is_lead else None
    samples, since, written = 0, 0.0, False

    def follow(step: Step) -> None:
        nonlocal samples, since, written
        if trainer.replaying:
            # The previous run has already written this step, with the same values.
            samples, since, written = 0, time.perf_counter(), True
            return
        samples += step.samples
        if write is None or (written and step.number % every):
            return
        found = {"loss": float(step.loss), "grad_norm": step.grad_norm}
        found |= {name: float(value) for name, value in step.values.items()}
        own = f"{prefix}{step.name}/" if step.name else prefix
        numbers = {own + name: value for name, value in found.items()}
        numbers |= {prefix + name: rate for name, rate in _rates(optimizer).items()}
        # Take the time after reading the loss, which blocks until a GPU has finished the step.
        now = time.perf_counter()
        if written:
            numbers[f"{prefix}samples_per_s"] = samples / (now - since)
        samples, since, written = 0, now, True
        write(numbers, step.number)

    # Only the lead calls this function.
    trainer.on_step(follow)
    return StepLog(trainer, write)


def _rates(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
) -> dict[str, float]:
    """Return the learning rates by name, such as ``lr``, ``lr/0`` and ``generator/lr``."""
    several = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    found = {}
    for name, each in several.items():
        groups = each.param_groups if each is not None else []
        own = f"{name}/lr" if name else "lr"
        for number, group in enumerate(groups):
            if group.get("lr") is not None:  # None: the optimizer computes its own rate
                found[own if len(groups) == 1 else f"{own}/{number}"] = float(group["lr"])
    return found


def _writing(logger: Any) -> Write:
    """Return the function that writes to a logger."""
    if hasattr(logger, "add_scalar"):

        def add(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                logger.add_scalar(name, value, step)

        return add
    if hasattr(logger, "log_metrics"):
        return lambda numbers, step: logger.log_metrics(numbers, step=step)
    module = getattr(logger, "__name__", type(logger).__module__)
    if hasattr(logger, "define_metric") or module.split(".")[0] == "trackio":
        return lambda numbers, step: logger.log(numbers, step=step)
    if callable(logger):
        write: Write = logger
        return write
    raise TypeError(
        f"expected logger to be a SummaryWriter, a run of Weights & Biases or trackio, the module "
        f"mlflow, or a function of a dict and a step, but got {type(logger).__name__}"
    )

"""Every step's numbers to TensorBoard, Weights & Biases, MLflow or trackio, from the lead alone.

    from onefold.integrations.loggers import log_steps

The logger is the script's: onefold makes none, and needs none of these libraries itself.
docs/do/loggers.md has an example of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onefold import Step, Trainer

__all__ = ["StepLog", "log_steps"]

Write = Callable[[dict[str, float], int], object]
"""Called with numbers by name, and the step that they belong to."""


class StepLog:
    """What writes the numbers of a run; called with more of them, such as scores.

    Example:
        >>> log = StepLog(trainer, lambda numbers, step: print(step, numbers))
        >>> log({"accuracy": 0.5})
        0 {'accuracy': 0.5}
    """

    def __init__(self, trainer: Trainer, write: Write | None) -> None:
        self._trainer = trainer
        self._write = write

    def __call__(self, numbers: Mapping[str, Any]) -> None:
        """Write numbers of the step that is done last; on devices other than the lead do nothing.

        Args:
            numbers: by name; floats, or tensors of one element.
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
    """Write the numbers of a run's steps: loss, values beside it, norm of the gradient, speed.

    Called on every device; what is written comes from the lead. It is there for every step that a
    checkpoint holds, and written once. Steps that are made once more, after a stop between two
    checkpoints, are written once more, with the same numbers.

    Args:
        trainer: of the run.
        logger: a ``SummaryWriter`` of TensorBoard; a run of Weights & Biases or trackio, as
            ``wandb.init`` and ``trackio.init`` return it; the module ``mlflow`` or an
            ``MlflowClient``-like object with ``log_metrics(numbers, step=...)``; or a function of a
            dict of numbers and the step.
            Not used on devices other than the lead, where it may be None.
        every: write every so many steps, and the first.
        prefix: begins each name, as in ``train/loss``.
        optimizer: whose learning rates to write as well, as they are after the step.

    Returns:
        a function for other numbers: ``log({"validation/accuracy": 0.9})``.

    Raises:
        TypeError: the logger is none of these.
        ValueError: ``every`` is no positive whole number.

    Example:
        >>> log = log_steps(trainer, lambda numbers, step: print(step, sorted(numbers)), every=2)
        >>> for _ in range(3):
        ...     step = trainer.step(torch.ones(6, 2))
        1 ['train/grad_norm', 'train/loss']
        2 ['train/grad_norm', 'train/loss', 'train/samples_per_s']
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a positive whole number of steps, got {every!r}")
    write = _writing(logger) if trainer.is_lead else None
    samples, since, written = 0, 0.0, False

    def follow(step: Step) -> None:
        nonlocal samples, since, written
        if trainer.replaying:
            # The run before has written it, with the same numbers.
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
        # Read after the loss, for which a GPU finishes the step.
        now = time.perf_counter()
        if written:
            numbers[f"{prefix}samples_per_s"] = samples / (now - since)
        samples, since, written = 0, now, True
        write(numbers, step.number)

    # On the lead alone.
    trainer.on_step(follow)
    return StepLog(trainer, write)


def _rates(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
) -> dict[str, float]:
    """The learning rates, by names such as ``lr``, ``lr/0`` and ``generator/lr``."""
    several = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    found = {}
    for name, each in several.items():
        groups = each.param_groups if each is not None else []
        own = f"{name}/lr" if name else "lr"
        for number, group in enumerate(groups):
            if group.get("lr") is not None:  # else the optimizer finds its rate itself
                found[own if len(groups) == 1 else f"{own}/{number}"] = float(group["lr"])
    return found


def _writing(logger: Any) -> Write:
    """How a logger is written to."""
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
        f"expected a SummaryWriter, a run of Weights & Biases or trackio, the module mlflow, or a "
        f"function of a dict and a step; got {type(logger).__name__}"
    )

"""`transformers.Trainer` on any number of devices, with the bits of one.

    from onefold.integrations.transformers import Trainer

in the place of transformers' own, before any ``TrainingArguments`` are made. Its loop, callbacks,
checkpoints and evaluation stay; docs/move/transformers.md has an example. `check_arguments`
decides which `transformers.TrainingArguments` a run of several devices can have.

Note: how its loop is driven
----------------------------
On every device the loop is that of a single process, with the whole batch: RANK and WORLD_SIZE are
removed here, or it would divide the work itself. `Trainer.training_step` asks onefold for the
batch's gradient, of which each device computes its shards; the loop then clips it and updates, on
every device. The update is inside of `onefold.Trainer.modifying`, at whose end the lead's values
are everybody's. Files, bars and logs are the lead's: the others are told that they are not the
first process.

Note: what a shard's loss is divided by
---------------------------------------
The loop counts the labels of the whole batch, and losses that take this number are sums divided by
it: those of shards add up. Other losses are means and must be weighted. The signature does not tell
(many models accept the number and ignore it), the graph does: the loss has a derivative by the
number, or has none.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import onefold

__all__ = ["Trainer"]


if onefold.is_launched():
    for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(_name, None)

_IGNORED = -100  # the label of what has no part in the loss
_FOLDER = "onefold"
"""In each checkpoint of the loop's: what onefold knows of the run, such as the step's number."""
_CLOSE = 1e-3


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose batches are cut into shards, over all devices of the run.

    Args:
        given, named: as for `transformers.Trainer`, but for ``model_init``.
            ``per_device_train_batch_size`` is the size of the whole batch.
        shards: into how many parts every batch is cut: the most devices that may share it.
        devices, shares, precision: as for `onefold.Trainer`; precision may be ``"bf16"``.

    Raises:
        ValueError: an argument cannot be had here; says which, and what to do.

    Example: ``Trainer(model, args, train_dataset=data, shards=8).train()``; a whole script is in
    docs/move/transformers.md.
    """

    args: Any

    def __init__(
        self,
        *given: Any,
        shards: int,
        devices: Sequence[str | torch.device] | None = None,
        shares: Sequence[int] | None = None,
        precision: Literal["fp32", "bf16"] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        check_arguments(self.args, self.model_init)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # further ones are named in ``devices``
        self._train_batch_size = self.args.train_batch_size
        self.folded = onefold.Trainer(
            self.model,
            None,
            self._loss_of_shard,
            shards=shards,
            seed=self.args.seed,
            devices=devices,
            shares=shares,
            precision=precision,
        )
        check_place(self.model, self.args)
        self._items: torch.Tensor | int | None = None
        self._divides_known = False
        self._update = contextlib.ExitStack()
        self.add_callback(_Update(self))
        if not self.folded.is_lead:
            self.args = silenced(self.args)
            transformers.logging.set_verbosity(self.args.get_process_log_level())
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()

    def is_world_process_zero(self) -> bool:
        """Whether this process has device 0."""
        return not hasattr(self, "folded") or self.folded.is_lead  # asked before all is made

    is_local_process_zero = is_world_process_zero

    def train(self, *given: Any, **named: Any) -> Any:
        """As that of `transformers.Trainer`; called on every device."""
        with self._update:  # an update that fails leaves its block
            return super().train(*given, **named)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Leave the gradient of the whole batch in ``.grad``, and return its loss."""
        model.train()
        self._items = num_items_in_batch
        step = self.folded.gradient(self._prepare_inputs(inputs))
        return step.loss.to(self.args.device)

    def shard_weight(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """How much a shard's loss counts where it is a mean of the model's own; may be overridden.

        Returns the number of integer labels that are not ignored, (), or None for all samples.

        >>> class Weighted(Trainer):
        ...     def shard_weight(self, inputs):
        ...         return inputs["weights"].sum()
        """
        labels = inputs.get("labels")
        if not torch.is_tensor(labels) or labels.is_floating_point():
            return None
        if self._loss_shifts_labels:
            labels = inputs.get("shift_labels", labels[..., 1:])
        return labels.ne(_IGNORED).sum()

    def _loss_of_shard(self, model: torch.nn.Module, inputs: dict[str, Any]) -> object:
        weight, items = self.shard_weight(inputs), None
        if self._items is not None:
            place = next(model.parameters()).device
            items = (torch.as_tensor(self._items, device=place) * 1.0).requires_grad_()
        # A copy, as labels are taken out of it.
        loss = self.compute_loss(model, copy.copy(inputs), num_items_in_batch=items)
        if items is not None and self._is_divided(loss, items):
            return onefold.Sum(loss)
        return loss if weight is None else onefold.Mean(loss * weight, weight)

    def _is_divided(self, loss: torch.Tensor, items: torch.Tensor) -> bool:
        """Whether a loss is a sum divided by the number of items; looks at its value once."""
        (slope,) = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)
        if slope is None:
            return False
        if not self._divides_known:
            total, expected = float(-slope * items.detach()), float(loss.detach())
            if abs(total - expected) > _CLOSE * abs(expected):
                raise ValueError(
                    f"expected a loss that is a sum divided by num_items_in_batch, or one that "
                    f"does not use it; of this one ({expected:g}) only {total:g} is divided by it. "
                    f"Leave out what is added, such as a router's loss: shards would add it up"
                )
            self._divides_known = True
        return True

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        best = self.state.best_model_checkpoint  # only the lead knows when it has been written
        self.state.best_model_checkpoint = self.folded.broadcast(best)
        if not self.args.save_only_model:
            name = f"checkpoint-{self.state.global_step}"
            self.folded.save(Path(self._get_output_dir(trial), name, _FOLDER))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.folded.is_lead:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self.folded.modifying():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.folded.load(Path(resume_from_checkpoint, _FOLDER), if_any=True)

    def _load_best_model(self) -> None:
        with self.folded.modifying():
            super()._load_best_model()


class _Update(transformers.TrainerCallback):  # type: ignore[misc]
    """Has the optimizer's step inside of a block of changes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer._update.enter_context(self._trainer.folded.modifying())

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer._update.close()


_DIVIDES = "onefold divides the work itself"
_REFUSED = {
    "gradient_accumulation_steps": (
        1,
        "shards are the accumulation, so let per_device_train_batch_size be the whole batch's",
    ),
    "fp16": (False, "of the low precisions there is precision='bf16', of onefold's Trainer"),
    "bf16": (False, "give precision='bf16' to onefold's Trainer instead"),
    "deepspeed": (None, _DIVIDES),
    "fsdp": (None, _DIVIDES),
    "parallelism_config": (None, _DIVIDES),
    "torch_compile": (False, "the loop would compile the model that onefold has copied"),
    "auto_find_batch_size": (False, "the batch is part of the result, so give more shards instead"),
    "neftune_noise_alpha": (None, "its noise is added to the model that onefold has copied"),
}
"""Arguments that have to stay as they are, and what to do instead."""


def check_arguments(args: Any, model_init: object) -> None:
    """Raises ValueError for what would change the work of one device, and names it."""
    for name, (expected, advice) in _REFUSED.items():
        value = getattr(args, name, expected)
        if value and value != expected:
            raise ValueError(f"expected {name}={expected!r}, got {value!r}: {advice}")
    if model_init is not None:
        raise ValueError("expected model, got model_init: make the model before the Trainer")
    if args.world_size > 1:
        raise ValueError(
            f"expected transformers to see one process, and it sees {args.world_size}: import "
            f"onefold.integrations.transformers before TrainingArguments are made"
        )


def check_place(model: torch.nn.Module, args: Any) -> None:
    """Raises ValueError if onefold trains the model elsewhere than transformers expects it."""
    place = next(model.parameters()).device
    if place != args.device:
        raise ValueError(
            f"onefold has put the model on {place}, and transformers computes on {args.device}: "
            f"on the CPU give TrainingArguments(use_cpu=True), and have several GPUs driven by "
            f"one process, with devices=['cuda:0', 'cuda:1'] for onefold's Trainer"
        )


def silenced(args: Any) -> Any:
    """The same arguments for a process that writes no files and prints nothing."""
    silent = copy.copy(args)
    kind = type(args)
    silent.__class__ = type(kind.__name__, (kind,), {"should_save": False, "should_log": False})
    return silent

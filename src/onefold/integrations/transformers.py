"""Runs `transformers.Trainer` on any number of devices, with the bits of one device.

    from onefold.integrations.transformers import Trainer

Import it instead of transformers' Trainer, before creating any ``TrainingArguments``. The loop,
callbacks, checkpoints and evaluation do not change; https://onefold.example/move/transformers.html
has an example.
`check_arguments` refuses `transformers.TrainingArguments` that onefold does not support.

Note: how the loop runs
-----------------------
On every device the loop runs as a single process, with the global batch: RANK and WORLD_SIZE are
removed here, because it would otherwise divide the work itself. `Trainer.training_step` calls
onefold for the batch's gradient, and each device computes its shards. The loop then clips the
gradient and updates, on every device. The update runs inside `onefold.Trainer.modifying`, which
broadcasts the lead's values at its end. Only the lead writes files, progress bars and logs: on
other devices, the loop runs as a process that is not the first one.

Note: the denominator of a shard's loss
---------------------------------------
The loop counts the labels of the global batch. A loss that uses this number is a sum divided by it,
so the losses of shards add up. Other losses are means and must be weighted. The signature does not
distinguish them, because many models accept the number and ignore it. The graph does: only the
former have a derivative with respect to the number.
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

_IGNORED = -100  # label of positions that the loss ignores
_FOLDER = "onefold"
"""Directory of onefold's state, such as the step number, in each checkpoint of the loop."""
_CLOSE = 1e-3


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that cuts each batch into shards for all devices of the run.

    Args:
        given, named: as for `transformers.Trainer`, except ``model_init``.
            ``per_device_train_batch_size`` is the global batch size.
        shards: number of shards per batch, which is the maximum number of devices.
        devices, shares, precision: as for `onefold.Trainer`; precision may be ``"bf16"``.

    Raises:
        ValueError: an argument is not supported; the message names it and an alternative.

    Example: ``Trainer(model, args, train_dataset=data, shards=8).train()``;
    https://onefold.example/move/transformers.html has a complete script.
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
        self.args._n_gpu = min(self.args.n_gpu, 1)  # ``devices`` names the others
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
        return not hasattr(self, "folded") or self.folded.is_lead  # also called by __init__

    is_local_process_zero = is_world_process_zero

    def train(self, *given: Any, **named: Any) -> Any:
        """Train, as in `transformers.Trainer`. Call it on every device."""
        with self._update:  # leaves `modifying` if an update fails
            return super().train(*given, **named)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Leave the gradient of the global batch in ``.grad``, and return its loss."""
        model.train()
        self._items = num_items_in_batch
        step = self.folded.gradient(self._prepare_inputs(inputs))
        return step.loss.to(self.args.device)

    def shard_weight(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the weight of a shard's loss if the model returns a mean; may be overridden.

        This is the number of integer labels that are not ignored, (), or None for all samples.

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
        # Pass a copy, because compute_loss may remove labels from it.
        loss = self.compute_loss(model, copy.copy(inputs), num_items_in_batch=items)
        if items is not None and self._is_divided(loss, items):
            return onefold.Sum(loss)
        return loss if weight is None else onefold.Mean(loss * weight, weight)

    def _is_divided(self, loss: torch.Tensor, items: torch.Tensor) -> bool:
        """Whether a loss is a sum divided by the number of items; checks its value once."""
        (slope,) = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)
        if slope is None:
            return False
        if not self._divides_known:
            total, expected = float(-slope * items.detach()), float(loss.detach())
            if abs(total - expected) > _CLOSE * abs(expected):
                raise ValueError(
                    f"only a part of the loss ({total:g} of {expected:g}) is divided by "
                    f"num_items_in_batch, so the rest would be added once per shard. Divide the "
                    f"whole loss or nothing by it; leave out added terms, such as a router's loss"
                )
            self._divides_known = True
        return True

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        best = self.state.best_model_checkpoint  # only the lead knows which checkpoint it wrote
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
    """Runs the optimizer's step inside `onefold.Trainer.modifying`."""

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
        "shards replace accumulation, so set per_device_train_batch_size to the global batch size",
    ),
    "fp16": (False, "the only low precision is precision='bf16' of onefold's Trainer"),
    "bf16": (False, "pass precision='bf16' to onefold's Trainer instead"),
    "deepspeed": (None, _DIVIDES),
    "fsdp": (None, _DIVIDES),
    "parallelism_config": (None, _DIVIDES),
    "torch_compile": (False, "the loop would compile the model that onefold has copied"),
    "auto_find_batch_size": (False, "the batch size affects the result: use more shards instead"),
    "neftune_noise_alpha": (None, "its noise is added to the model that onefold has copied"),
}
"""Arguments that must keep their default, with that default and advice."""


def check_arguments(args: Any, model_init: object) -> None:
    """Raise ValueError for an argument that onefold does not support."""
    for name, (expected, advice) in _REFUSED.items():
        value = getattr(args, name, expected)
        if value and value != expected:
            raise ValueError(f"expected {name}={expected!r}, but got {value!r}: {advice}")
    if model_init is not None:
        raise ValueError("model_init is not supported: pass model, created before Trainer")
    if args.world_size > 1:
        raise ValueError(
            f"transformers must see a single process, but sees {args.world_size}: import "
            f"onefold.integrations.transformers before creating TrainingArguments"
        )


def check_place(model: torch.nn.Module, args: Any) -> None:
    """Raise ValueError if onefold trains the model on a device that transformers does not use."""
    place = next(model.parameters()).device
    if place != args.device:
        raise ValueError(
            f"onefold moved the model to {place}, but transformers computes on {args.device}. For "
            f"the CPU, pass TrainingArguments(use_cpu=True); drive several GPUs by one process, "
            f"with devices=['cuda:0', 'cuda:1'] for onefold's Trainer"
        )


def silenced(args: Any) -> Any:
    """Return a copy of the arguments for a process that writes no files and prints nothing."""
    silent = copy.copy(args)
    kind = type(args)
    silent.__class__ = type(kind.__name__, (kind,), {"should_save": False, "should_log": False})
    return silent

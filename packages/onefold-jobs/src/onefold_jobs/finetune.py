"""Starts from pretrained weights: new last layer, frozen parts, separate learning rates.

Note: frozen batch norms
------------------------
Batch norm changes even if its parameters do not: in training it normalizes by batch statistics, and
updates its running statistics. A frozen one must do neither, so it stays in evaluation mode. (A
momentum of 0 would keep the statistics, but still normalize by the batch.) Every ``model.train()``
would put it back into training mode, so its class is replaced by one that ignores this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

import onefold
from onefold.cli import listed
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold.weights import Loaded, bare_name, best_scored, check_finite, check_weights
from onefold_jobs.models.catalog import head_name, head_of
from onefold_jobs.named_weights import find_weights
from onefold_jobs.options import TrainOptions, scaled_rate
from onefold_jobs.runfolder import CHECKPOINTS, RUN, SavedName, read_run
from onefold_jobs.scores import saved_rule

__all__ = [
    "best_checkpoint",
    "chosen_checkpoint",
    "freeze",
    "load_body",
    "load_finite",
    "parameter_groups",
    "require_pretrained",
    "run_of",
    "with_weights",
]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Head = str | tuple[str, ...]
"""Names of the modules that make up the last layer, usually one."""

_SHOWN = 80
_STEP = re.compile(r"step-([0-9]{8,})")


def run_of(pretrained: str | None) -> Path | None:
    """Return the folder of the run to start from; None if weights come from a file, or there are
    none."""
    path = Path(pretrained or "")
    return path if pretrained and (path / RUN).is_file() else None


class _Best(msgspec.Struct):
    """The entries of the best epoch in ``run.json`` that loading needs."""

    checkpoint: SavedName


def best_checkpoint(run: Path) -> Path:
    """Find the folder of a run's best weights.

    Raises:
        DataError: the folder does not contain a run, or its ``run.json`` is damaged.
        CheckpointError: the run has not finished an epoch yet, or has no checkpoint with a score.
    """
    facts = read_run(run)
    best = facts.get("best")
    if not best:
        raise CheckpointError(
            f"{run} has not finished an epoch yet, so it has no best weights; its "
            f"checkpoints are in {run / CHECKPOINTS}"
        )
    try:
        # Another user may have written run.json: its path must not lead out of the run's folder.
        folder = run / msgspec.convert(best, _Best).checkpoint
    except ValueError as error:
        raise DataError(
            f"{run / 'run.json'}: expected the best checkpoint to be one of the run, such as "
            f"{CHECKPOINTS}/step-00000100, got {str(best)[:_SHOWN]!r}"
        ) from error
    if folder.is_dir():
        return folder
    # The run was killed after a better checkpoint replaced this one, but before run.json named the
    # better one.
    found = None
    with suppress(ValueError):
        found = best_scored(run / CHECKPOINTS, saved_rule(str(facts.get("score"))))
    if found is None:
        raise CheckpointError(f"{folder}: expected the run's best weights there, found nothing")
    return found


def chosen_checkpoint(run: Path, which: Literal["best", "last"]) -> Path:
    """Find the folder of a run's best weights, or of its newest ones.

    Raises:
        DataError, CheckpointError: see `best_checkpoint`; also if the run has no checkpoint.
    """
    if which == "best":
        return best_checkpoint(run)
    # Sort by number instead of name, because names grow longer beyond 99,999,999 steps.
    steps = (_STEP.fullmatch(path.name) for path in (run / CHECKPOINTS).glob("step-*"))
    names = {int(step[1]): step[0] for step in steps if step is not None}
    if not names:
        raise CheckpointError(f"{run / CHECKPOINTS}: expected the run's checkpoints, found none")
    return run / CHECKPOINTS / names[max(names)]


def require_pretrained(
    pretrained: str | None, job: str, pretrained_classes: str | None = None
) -> None:
    """Reject weights that are missing or damaged, before anything takes time.

    Args:
        pretrained: a weights file, or the folder of a run or a checkpoint.
        job: job that the run must belong to, if it is a run.
        pretrained_classes: a file of class names.

    Raises:
        CheckpointError: the weights are missing or damaged, or the run has none yet.
        DataError: the run belongs to another job.
    """
    run = run_of(pretrained)
    if run is not None:
        read_run(run, job)
        check_weights(best_checkpoint(run))
    elif pretrained and not (weights := find_weights(pretrained)).exists():
        raise CheckpointError(
            f"--pretrained {pretrained}: expected a weights file, the folder of a run, or a name "
            f"that starts with torchvision:, timm: or hf:, but it does not exist"
        )
    elif pretrained:
        check_weights(weights)
    if pretrained_classes and not Path(pretrained_classes).is_file():
        raise CheckpointError(
            f"--pretrained-classes {pretrained_classes}: expected a file of class names, one per "
            f"line, but it does not exist"
        )


def load_finite(
    model: nn.Module, weights: Path, *, key: str | None = None, strict: bool = True
) -> Loaded:
    """Load weights with `onefold.load_weights`, and reject NaN or infinite parameters.

    Raises:
        CheckpointError: the weights do not fit, are damaged, or are not finite.
    """
    loaded = onefold.load_weights(model, weights, key=key, strict=strict)
    check_finite(model, weights)
    return loaded


def load_body(model: nn.Module, weights: Path, head: str, *, key: str | None) -> None:
    """Load the weights of a file into everything but a model's last layer.

    Args:
        model: the model.
        weights: a weights file, or the folder of a checkpoint.
        head: name of the last layer, which is left to the caller; empty for an encoder, which has
            no last layer.
        key: key of the weights in the file, if they are nested in a dict.

    Raises:
        CheckpointError: the weights do not fit the model; some may already be loaded.
    """
    # Load with strict=False, because the file's last layer is for other classes. So check here
    # whether anything else is missing.
    loaded = load_finite(model, weights, key=key, strict=False)

    def counts(name: str) -> bool:
        # Files older than PyTorch 0.4.1 lack these counters, which nothing here uses.
        return not _is_under(name, head) and not name.endswith("num_batches_tracked")

    lacking = [name for name in loaded.missing if counts(name)]
    # Extra layers within parts of this model mean that the file belongs to another model.
    parts = {name.partition(".")[0] for name in model.state_dict() if not _is_under(name, head)}
    plain = map(bare_name, loaded.unexpected)
    strange = [name for name in plain if counts(name) and name.partition(".")[0] in parts]
    if lacking or strange:
        part = f"everything but {head}" if head else "the whole encoder"
        found = f"none for {listed(lacking)}" if lacking else f"also some for {listed(strange)}"
        raise CheckpointError(
            f"{weights}: expected values of the right shape for {part}, but the file has {found}"
        )


def new_head(head: nn.Module) -> None:
    """Initialize a last layer: Xavier weights (Glorot and Bengio, 2010), zero biases."""
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)


def reuse_rows(
    new: nn.Module, classes: Sequence[str], old: nn.Module, old_classes: Sequence[str]
) -> None:
    """Copy the rows of a last layer for the classes that both label sets contain.

    Args:
        new: layer to copy to, with one row per class.
        classes: class names of its rows.
        old: layer to copy from.
        old_classes: class names of its rows.

    Raises:
        LaunchError: the label sets have no class in common.
    """
    shared = [name for name in classes if name in old_classes]
    if not shared:
        raise LaunchError(
            f"--reuse-classes: the data ({listed(classes)}) and the pretrained model "
            f"({listed(old_classes)}) have no class in common"
        )
    source = dict(old.named_parameters())
    rows, old_rows = ([names.index(label) for label in shared] for names in (classes, old_classes))
    # Autograd does not allow in-place writes to a parameter while it records.
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            parameter[rows] = source[name][old_rows]


def with_weights(options: Any, kind: Any) -> tuple[nn.Module, Any]:
    """Build a classifier from pretrained weights, with their stem and a new last layer.

    Args:
        options: options of the run.
        kind: description of the model.

    Returns:
        The model, and its description with the stem of the weights.

    Raises:
        CheckpointError: the weights do not fit.
        LaunchError: the old classes are unknown, or none of them is in the data.
    """
    run = run_of(options.pretrained)
    weights = best_checkpoint(run) if run else find_weights(options.pretrained or "")
    stems = [kind.small_stem]
    if kind.small_stem is not None and options.stem == "auto":
        stems.append(not kind.small_stem)
    errors = []
    # The file determines which stem it needs; the stem that suits the images is tried first.
    for stem in stems:
        kind = msgspec.structs.replace(kind, small_stem=stem)
        # Seeded each time, because the draws must not depend on the number of earlier attempts.
        torch.manual_seed(options.seed)
        model = kind.build()
        head = head_name(model)
        try:
            load_body(model, weights, head, key=options.pretrained_key)
            break
        except CheckpointError as error:
            errors.append(error)
    else:
        # Report the error of the stem that the options ask for.
        raise errors[0]
    # Seeded again, because the number of draws so far depends on the stems that were tried.
    torch.manual_seed(options.seed)
    new_head(model.get_submodule(head))
    if options.reuse_classes:
        old_classes = _old_classes(options, kind, run)
        old = msgspec.structs.replace(kind, classes=tuple(old_classes)).build()
        load_finite(old, weights, key=options.pretrained_key)
        reuse_rows(model.get_submodule(head), kind.classes, head_of(old), old_classes)
    return model, kind


def _old_classes(options: Any, kind: Any, run: Path | None) -> list[str]:
    if options.pretrained_classes:
        lines = Path(options.pretrained_classes).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    if run is None:
        raise LaunchError(
            "--reuse-classes: a weights file does not contain its class names: give "
            "--pretrained-classes with a file of their names, one per line, in order"
        )
    return list(kind.of_run(run).classes)


class _Still(nn.Module):
    """A batch norm that stays in evaluation mode; see the note on frozen batch norms."""

    def train(self, mode: bool = True) -> _Still:
        super().train(False)
        return self


@cache
def _still(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the frozen version of a batch norm class."""
    # Derived from that class, because some in timm do more than normalize.
    return type(f"Still{kind.__name__}", (_Still, kind), {})


def freeze(model: nn.Module, options: TrainOptions, head: Head) -> list[str]:
    """Freeze the parts that the options name, including the statistics of their batch norms.

    Args:
        model: the model of the run.
        options: ``freeze`` and ``freeze_until`` are used.
        head: name of the last layer, which must stay trainable.

    Returns:
        Names of the frozen parameters.

    Raises:
        ValueError: a name is not a part of the model, or the last layer would be frozen.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for prefix in options.freeze for name in _names_under(prefix, names, "freeze")}
    if options.freeze_until:
        first = _names_under(options.freeze_until, names, "freeze-until")[0]
        # Parameters are in the order in which the model registered its parts, which for all models
        # of the catalog is the order of computation.
        frozen.update(names[: names.index(first)])
    if any(_is_under(name, head) for name in frozen):
        raise ValueError(
            f"--freeze and --freeze-until would freeze the model's last layer, {head}: name only "
            f"parts before it"
        )
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for path, module in model.named_modules():
        # A batch norm without own parameters cannot be named, and so is never frozen.
        own = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if isinstance(module, BATCH_NORMS) and own and all(name in frozen for name in own):
            # Keep the object, and with it its parameters, its hooks and all references to it.
            module.__class__ = _still(type(module))  # type: ignore[assignment, arg-type]
            module.train(False)
    return [name for name in names if name in frozen]


def parameter_groups(model: nn.Module, options: TrainOptions, head: Head) -> list[dict[str, Any]]:
    """Make the optimizer's groups: the last layer may have its own learning rate.

    Args:
        model: the model of the run.
        options: the learning rate and ``head_lr_scale`` are used.
        head: name of the last layer.

    Raises:
        ValueError: the last layer has no trainable parameters.
    """
    body: list[nn.Parameter] = []
    last: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (last if _is_under(name, head) else body).append(parameter)
    if not last:
        raise ValueError(f"the model's last layer {head} has no trainable parameters")
    rate, scale = scaled_rate(options), options.head_lr_scale
    if scale == 1.0 or not body:
        return [{"params": body + last, "lr": rate * scale}]
    return [{"params": body, "lr": rate}, {"params": last, "lr": rate * scale}]


def _names_under(prefix: str, names: Sequence[str], option: str) -> list[str]:
    found = [name for name in names if _is_under(name, prefix)]
    if not found:
        parts = dict.fromkeys(name.partition(".")[0] for name in names)
        raise ValueError(
            f"--{option} {prefix}: the model has no such part. Its parts are {', '.join(parts)}, "
            f"with names such as {names[0]}"
        )
    return found


def _is_under(name: str, parts: Head) -> bool:
    named = (parts,) if isinstance(parts, str) else parts
    return any(name == part or name.startswith(f"{part}.") for part in named)

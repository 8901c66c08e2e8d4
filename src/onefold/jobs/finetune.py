"""Begins with somebody's weights: a new last layer, frozen parts, and rates of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold.jobs.options import TrainOptions
from onefold.jobs.runfolder import CHECKPOINTS, read_run
from onefold.system.compat import BatchNorm
from onefold.system.words import listed
from onefold.weights.file import check_weights, scored_checkpoints
from onefold.weights.load import Loaded, refuse_spoilt

__all__ = [
    "best_checkpoint",
    "freeze",
    "is_run",
    "lacking_names",
    "load_body",
    "load_finite",
    "new_head",
    "parameter_groups",
    "require_pretrained",
    "reuse_rows",
    "run_of",
]

Head = str | tuple[str, ...]
"""Names of the parts that make the last layer, mostly one."""

_SHOWN = 80
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/step-[0-9]{{8,}}")
_WRAPPERS = ("module", "_orig_mod")
"""Words that DataParallel and torch.compile put into names."""


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run of onefold, rather than a file of weights."""
    return (path / "run.json").is_file()


def run_of(pretrained: str | None) -> Path | None:
    """The run whose weights are the beginning, if it is one and not a file."""
    path = Path(pretrained or "")
    return path if pretrained and is_run(path) else None


def best_checkpoint(run: Path) -> Path:
    """The folder of a run's best weights.

    Raises:
        DataError: it is not the folder of a run.
        CheckpointError: the run has not come to the end of an epoch, or the folder is gone.
    """
    said = read_run(run)
    best = said.get("best")
    if not best:
        raise CheckpointError(
            f"{run} has not come to the end of an epoch yet, so it has no best weights; what it "
            f"has saved is in {run / CHECKPOINTS}"
        )
    named = best.get("checkpoint") if isinstance(best, dict) else best
    if not (isinstance(named, str) and _CHECKPOINT.fullmatch(named)):
        raise DataError(
            f"{run / 'run.json'}: expected the best checkpoint to be one of the run, such as "
            f"{CHECKPOINTS}/step-00000100, got {str(named)[:_SHOWN]!r}"
        )
    folder = run / named
    if folder.is_dir():
        return folder
    # The run was killed after a better checkpoint had taken its place, and before it said so.
    scored = scored_checkpoints(run / CHECKPOINTS, str(best.get("score")))
    if not scored:
        raise CheckpointError(f"{folder}: expected the run's best weights there, found nothing")
    highest = str(said.get("score", "highest")).startswith("highest")
    return max(scored)[1] if highest else min(scored)[1]


def require_pretrained(
    pretrained: str | None, job: str, pretrained_classes: str | None = None
) -> None:
    """Refuse weights that are not there, before anything takes time.

    Args:
        pretrained: a file of weights, or a folder of a run or a checkpoint.
        job: whose run it must be, if it is one.
        pretrained_classes: a file of names.

    Raises:
        CheckpointError: there is nothing of that name, or the run has no weights yet.
        DataError: the run is of another job.
    """
    run = run_of(pretrained)
    if run is not None:
        read_run(run, job)
        check_weights(best_checkpoint(run))
    elif pretrained and not Path(pretrained).exists():
        raise CheckpointError(
            f"--pretrained {pretrained}: expected a file of weights, or the folder of a run; there "
            f"is nothing of that name"
        )
    elif pretrained:
        check_weights(Path(pretrained))
    if pretrained_classes and not Path(pretrained_classes).is_file():
        raise CheckpointError(
            f"--pretrained-classes {pretrained_classes}: expected a file of class names, one a "
            f"line; there is no such file"
        )


def load_finite(
    model: nn.Module, weights: Path, *, key: str | None = None, strict: bool = True
) -> Loaded:
    """`onefold.load_weights`, and a look at what came: NaN and infinities are of no use.

    Raises:
        CheckpointError: it does not fit, is damaged, or is not finite.
    """
    loaded = onefold.load_weights(model, weights, key=key, strict=strict)
    refuse_spoilt(model, weights)
    return loaded


def load_body(
    build: Sequence[Callable[[], nn.Module]], weights: Path, head: str, *, key: str | None
) -> nn.Module:
    """A model with the weights of a file in all but its last layer.

    Args:
        build: how the model may be made: the first that fits is taken.
        weights: a file, or the folder of a checkpoint.
        head: name of the last layer, whose values are left to the caller.
        key: where the file keeps the weights, if it is in a dict.

    Raises:
        CheckpointError: the file fits none of them.
    """
    reasons = []
    for make in build:
        model = make()
        try:
            loaded = load_finite(model, weights, key=key, strict=False)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        lacking = lacking_names(loaded.missing, head)
        strange = _strange(loaded.unexpected, model, head)
        if not lacking and not strange:
            return model
        told = f"none for {listed(lacking)}" if lacking else f"also some for {listed(strange)}"
        reasons.append(
            f"{weights}: expected values of the right shape for the whole model but {head}, it has "
            f"{told}"
        )
    raise CheckpointError(reasons[0])


def lacking_names(missing: Iterable[str], head: str) -> list[str]:
    """Names that weights should have had: all but the last layer's and counts of batches."""
    return [
        name
        for name in missing
        if not _is_under(name, head) and not name.endswith("num_batches_tracked")
    ]


def _strange(unexpected: Iterable[str], model: nn.Module, head: str) -> list[str]:
    """Names of a file that say that its model is another: of layers that this one's parts lack."""
    parts = {name.partition(".")[0] for name in model.state_dict() if not _is_under(name, head)}
    plain = [
        ".".join(word for word in name.split(".") if word not in _WRAPPERS) for name in unexpected
    ]
    return [name for name in lacking_names(plain, head) if name.partition(".")[0] in parts]


def new_head(head: nn.Module) -> None:
    """Draw a last layer anew: Xavier for weights (Glorot and Bengio, 2010), 0 for biases."""
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)


def reuse_rows(
    new: nn.Module, classes: Sequence[str], old: nn.Module, old_classes: Sequence[str]
) -> list[str]:
    """Copy a last layer's rows for the classes that both label sets have.

    Args:
        new: to copy to, one row a class.
        classes: its classes.
        old: to copy from.
        old_classes: its classes.

    Returns:
        The classes that were copied.

    Raises:
        LaunchError: the label sets have no class in common.
    """
    shared = [name for name in classes if name in old_classes]
    if not shared:
        raise LaunchError(
            f"--reuse-classes: no class of the data ({listed(classes)}) is one of the pretrained "
            f"model ({listed(old_classes)})"
        )
    source = dict(old.named_parameters())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            for label in shared:
                row = source[name][old_classes.index(label)]
                parameter[classes.index(label)].copy_(row)
    return shared


class _Still(nn.Module):
    """A batch norm that uses and keeps its statistics, in training too."""

    def train(self, mode: bool = True) -> _Still:
        super().train(False)
        return self


@cache
def _still(kind: type[nn.Module]) -> type[nn.Module]:
    """The same kind of batch norm, but still; it may do more than normalise, as some of timm do."""
    return type(f"Still{kind.__name__}", (_Still, kind), {})


def freeze(model: nn.Module, options: TrainOptions, head: Head) -> list[str]:
    """Freeze what the options name; the statistics of frozen batch norms are kept as well.

    Args:
        model: of the run.
        options: ``freeze`` and ``freeze_until``.
        head: name of the last layer, which must stay trainable.

    Returns:
        Names of the frozen parameters.

    Raises:
        ValueError: a name is no part of the model, or nothing would be left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for prefix in options.freeze for name in _names_under(prefix, names, "freeze")}
    if options.freeze_until:
        first = _names_under(options.freeze_until, names, "freeze-until")[0]
        frozen.update(names[: names.index(first)])
    if any(_is_under(name, head) for name in frozen):
        raise ValueError(
            f"--freeze and --freeze-until would freeze the model's last layer, {head}: expected "
            f"names of what comes before it"
        )
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    _still_batch_norms(model, frozen)
    return [name for name in names if name in frozen]


def _still_batch_norms(model: nn.Module, frozen: set[str]) -> None:
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if isinstance(module, BatchNorm) and own and all(name in frozen for name in own):
            module.__class__ = _still(type(module))  # type: ignore[assignment, arg-type]
            module.train(False)


def parameter_groups(
    model: nn.Module, *, rate: float, head: Head, head_scale: float
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the last layer at a rate of its own; frozen parameters are left out.

    Args:
        model: of the run.
        rate: learning rate of all but the last layer.
        head: name of the last layer.
        head_scale: how many times as high the last layer's rate is.
    """
    parts: Mapping[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts[_is_under(name, head)].append(parameter)
    if not parts[True]:
        raise ValueError(f"the model has no last layer {head} that could be trained")
    if head_scale == 1.0:
        return [{"params": parts[False] + parts[True], "lr": rate}]
    groups = [
        {"params": parts[False], "lr": rate},
        {"params": parts[True], "lr": rate * head_scale},
    ]
    return [group for group in groups if group["params"]]


def _names_under(prefix: str, names: Sequence[str], option: str) -> list[str]:
    found = [name for name in names if _is_under(name, prefix)]
    if not found:
        parts = dict.fromkeys(name.partition(".")[0] for name in names)
        raise ValueError(
            f"--{option} {prefix}: the model has no such part; its parts are {', '.join(parts)}, "
            f"and names such as {names[0]}"
        )
    return found


def _is_under(name: str, parts: Head) -> bool:
    named = (parts,) if isinstance(parts, str) else parts
    return any(name == part or name.startswith(f"{part}.") for part in named)

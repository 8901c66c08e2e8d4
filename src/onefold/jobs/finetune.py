"""Starts from weights trained elsewhere: a new last layer, frozen parts, rates of their own.

Note: frozen batch norms
------------------------
Batch norm changes without its parameters: in training it normalises by the batch, and moves its
running statistics. A frozen one must do neither, so it stays in evaluation mode. (A momentum of 0
would keep the statistics, but still normalise by the batch.) Every ``model.train()`` would put it
back into training mode, so its class is exchanged for one that ignores this.
"""

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
from onefold.weights.file import best_scored, check_weights
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
"""Names of the parts that make up the last layer, usually a single one."""

_SHOWN = 80
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/step-[0-9]{{8,}}")
_WRAPPERS = ("module", "_orig_mod")
"""Parts of parameter names that DataParallel and torch.compile add."""


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run of onefold, rather than a file of weights."""
    return (path / "run.json").is_file()


def run_of(pretrained: str | None) -> Path | None:
    """The folder of the run to start from; None if weights come from a file, or from nowhere."""
    path = Path(pretrained or "")
    return path if pretrained and is_run(path) else None


def best_checkpoint(run: Path) -> Path:
    """Find the folder of a run's best weights.

    Raises:
        DataError: the folder is not that of a run, or its ``run.json`` is damaged.
        CheckpointError: the run has not finished an epoch yet, or has no checkpoint with a score.
    """
    facts = read_run(run)
    best = facts.get("best")
    if not best:
        raise CheckpointError(
            f"{run} has not come to the end of an epoch yet, so it has no best weights; what it "
            f"has saved is in {run / CHECKPOINTS}"
        )
    # Anybody may have written run.json: a path in it must not lead out of the run's folder.
    named = best.get("checkpoint") if isinstance(best, dict) else best
    if not (isinstance(named, str) and _CHECKPOINT.fullmatch(named)):
        raise DataError(
            f"{run / 'run.json'}: expected the best checkpoint to be one of the run, such as "
            f"{CHECKPOINTS}/step-00000100, got {str(named)[:_SHOWN]!r}"
        )
    folder = run / named
    if folder.is_dir():
        return folder
    # The run was killed after a better checkpoint had replaced this one, and before run.json named
    # that.
    score = best.get("score") if isinstance(best, dict) else None
    highest = str(facts.get("score", "highest")).startswith("highest")
    rule = f"{'highest' if highest else 'lowest'} {score}"
    found = best_scored(run / CHECKPOINTS, rule)
    if found is None:
        raise CheckpointError(f"{folder}: expected the run's best weights there, found nothing")
    return found


def require_pretrained(
    pretrained: str | None, job: str, pretrained_classes: str | None = None
) -> None:
    """Refuse weights that are missing or damaged, before anything takes time.

    Args:
        pretrained: a file of weights, or the folder of a run or a checkpoint.
        job: the job that the run must be of, if it is a run.
        pretrained_classes: a file of class names.

    Raises:
        CheckpointError: the weights are missing or damaged, or the run has none yet.
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
    """Load weights with `onefold.load_weights`, and refuse parameters that are NaN or infinite.

    Raises:
        CheckpointError: the weights do not fit, are damaged, or are not finite.
    """
    loaded = onefold.load_weights(model, weights, key=key, strict=strict)
    refuse_spoilt(model, weights)
    return loaded


def load_body(
    build: Sequence[Callable[[], nn.Module]], weights: Path, head: str, *, key: str | None
) -> nn.Module:
    """Build a model with the weights of a file in all but its last layer.

    Args:
        build: ways to build the model; the first that the weights fit is used.
        weights: a file, or the folder of a checkpoint.
        head: name of the last layer, whose values are left to the caller.
        key: the key under which the file keeps its weights, if they are in a dict.

    Raises:
        CheckpointError: the weights fit none of the models.
    """
    reasons = []
    for make in build:
        model = make()
        try:
            # Not strict, as the last layer of the file is for other classes; so what else is
            # missing must be looked for here.
            loaded = load_finite(model, weights, key=key, strict=False)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        lacking = lacking_names(loaded.missing, head)
        strange = _strange(loaded.unexpected, model, head)
        if not lacking and not strange:
            return model
        found = f"none for {listed(lacking)}" if lacking else f"also some for {listed(strange)}"
        reasons.append(
            f"{weights}: expected values of the right shape for the whole model but {head}, it has "
            f"{found}"
        )
    # Of the first way to build it, which is the one that the options ask for.
    raise CheckpointError(reasons[0])


def lacking_names(missing: Iterable[str], head: str) -> list[str]:
    """Names that the weights should have had: all but the last layer's and batch counts."""
    # Files from before PyTorch 0.4.1 have no counts, and nothing here depends on them.
    return [
        name
        for name in missing
        if not _is_under(name, head) and not name.endswith("num_batches_tracked")
    ]


def _strange(unexpected: Iterable[str], model: nn.Module, head: str) -> list[str]:
    """Names that show that the file is of another model: further layers in parts of this one."""
    parts = {name.partition(".")[0] for name in model.state_dict() if not _is_under(name, head)}
    plain = [
        ".".join(word for word in name.split(".") if word not in _WRAPPERS) for name in unexpected
    ]
    return [name for name in lacking_names(plain, head) if name.partition(".")[0] in parts]


def new_head(head: nn.Module) -> None:
    """Initialise a last layer: Xavier for weights (Glorot and Bengio, 2010), 0 for biases."""
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
        new: the layer to copy to, with one row a class.
        classes: the classes of its rows, in order.
        old: the layer to copy from.
        old_classes: the classes of its rows, in order.

    Returns:
        The classes that both have.

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
    # Autograd refuses to write into a parameter, unless nothing is recorded.
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            for label in shared:
                row = source[name][old_classes.index(label)]
                parameter[classes.index(label)].copy_(row)
    return shared


class _Still(nn.Module):
    """A batch norm that stays in evaluation mode; see the note on frozen ones."""

    def train(self, mode: bool = True) -> _Still:
        super().train(False)
        return self


@cache
def _still(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the frozen class of a kind of batch norm."""
    # Derived from that kind: it may do more than normalise, as some of timm do.
    return type(f"Still{kind.__name__}", (_Still, kind), {})


def freeze(model: nn.Module, options: TrainOptions, head: Head) -> list[str]:
    """Freeze the parts that the options name, with the statistics of their batch norms.

    Args:
        model: the model of the run.
        options: ``freeze`` and ``freeze_until`` are read.
        head: name of the last layer, which must stay trainable.

    Returns:
        Names of the frozen parameters.

    Raises:
        ValueError: a name is no part of the model, or the last layer would be frozen.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for prefix in options.freeze for name in _names_under(prefix, names, "freeze")}
    if options.freeze_until:
        first = _names_under(options.freeze_until, names, "freeze-until")[0]
        # Parameters come in the order in which the model registered its parts, which is the order
        # in which it computes for all models of the catalog.
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
        # One without parameters of its own cannot be named, and so is never frozen.
        own = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if isinstance(module, BatchNorm) and own and all(name in frozen for name in own):
            # The object stays, and with it its parameters, its hooks and all that refer to it.
            module.__class__ = _still(type(module))  # type: ignore[assignment, arg-type]
            module.train(False)


def parameter_groups(
    model: nn.Module, *, rate: float, head: Head, head_scale: float
) -> list[dict[str, Any]]:
    """Make an optimizer's groups: the last layer may have its own rate; frozen parts are left out.

    Args:
        model: the model of the run.
        rate: learning rate of everything but the last layer.
        head: name of the last layer.
        head_scale: how many times as high the last layer's rate is.

    Raises:
        ValueError: the last layer has no parameters that are trained.
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

"""Options of the ready-made jobs, and the optimizers and learning rates that come of them.

An `option` has a name, a help, a default and a check. Options come from a config file and from the
command line, which takes precedence. Those that are left open are settled once the data are known
(`dataclasses.replace`), and all are saved with the run.

`scaled_rate` scales a learning rate to the batch size. `rate_factor` has it rise and fall during a
run.

Note: why everything has a largest value
----------------------------------------
A config file may be anybody's, and a typo on the command line is quickly made. A number that no
machine can serve would not fail as what it is, but as an overflow in PyTorch, a process killed for
want of memory, or a loop that never ends. So each option that sets a size or a factor has a bound,
far above anything sensible.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w
import torch

from onefold.jobs.data.files import read_whole
from onefold.system.ownfiles import nested_too_deeply, write_whole

__all__ = [
    "RUN_OPTIONS",
    "Augment",
    "Optimizer",
    "TrainOptions",
    "expect",
    "from_mapping",
    "make_optimizer",
    "option",
    "rate_factor",
    "read_config",
    "scaled_rate",
    "usual_rate",
    "write_config",
]


Optimizer = Literal["sgd", "adam", "adamw"]
Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "step", "cosine"]
ScaleRate = Literal["none", "linear", "sqrt"]
Augment = Literal["auto", "none", "shift", "crop"]

MOST_STEPS = 10**9
"""The most epochs, and the most steps between two checkpoints."""
MOST_SAMPLES = 10**9
"""The most samples of a batch."""
MOST_SHARDS = 10**6
MOST_WORKERS = 1024
MOST_FACTOR = 10**6
"""The largest learning rate, and the largest factor of one."""
MOST_SIDE = 1 << 14
"""The longest side of a picture, in pixels."""
_MOST_CONFIG_BYTES = 1 << 20
_SHOWN_CHARACTERS = 30

_Options = TypeVar("_Options", bound="TrainOptions")


def option(
    default: Any,
    help: str,
    *,
    shown: str | None = None,
    most: float | None = None,
    variable: str | None = None,
) -> Any:
    """Declare an option, as the field of a dataclass.

    Args:
        default: the option's value if none is given.
        help: one line of text.
        shown: how the help describes the default; None shows the value itself.
        most: the largest number that the option takes.
        variable: what in the environment counts as if it were given on the command line.
    """
    notes = {"help": help, "shown": shown, "most": most, "variable": variable}
    return dataclasses.field(default=default, metadata=notes)


def expect(condition: bool, name: str, value: object, expected: str) -> None:
    """Refuse an option's value if a condition does not hold.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        given = f"--{name.replace('_', '-')} {value}".rstrip()
        raise ValueError(f"{given}: expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options that all jobs have."""

    data: str = option("", "Where the data are.", shown="none, it must be given")
    name: str = option("", "Name of the run and its folder.", shown="the job and a number")
    runs: str = option("runs", "Folder of all runs.")
    resume: bool = option(False, "Go on with the run of this name from its last checkpoint.")
    devices: str = option("auto", "N, auto, cpu:N, or a list of GPUs such as cuda:1,cuda:3.")
    placement: str = option(
        "replicate",
        "Where parameters lie: replicate, shard, offload, pipeline or pipeline:N.",
        variable="ONEFOLD_PLACEMENT",
    )
    shards: int = option(
        8, "Parts of every batch: the most devices that may share one.", most=MOST_SHARDS
    )
    batch_size: int = option(64, "Samples of a batch, over all devices.", most=MOST_SAMPLES)
    epochs: int | None = option(
        None, "Times that the training set is read.", shown="10", most=MOST_STEPS
    )
    lr: float | None = option(
        None, "Learning rate.", shown="0.05 with sgd, else 0.001", most=MOST_FACTOR
    )
    optimizer: Optimizer = option("sgd", "How the parameters are updated.")
    momentum: float = option(0.9, "Of sgd.")
    weight_decay: float = option(5e-4, "Pull of the parameters towards zero.", most=MOST_FACTOR)
    clip_norm: float | None = option(
        None, "Scale larger gradients down to this norm.", shown="no limit", most=1e20
    )
    precision: Precision = option("fp32", "What is computed in: low precision is quicker on GPUs.")
    schedule: Schedule = option("cosine", "How the learning rate goes on after the warm-up.")
    warmup_epochs: float = option(
        0.5, "Epochs in which the learning rate rises to its full value.", most=MOST_STEPS
    )
    decay_epochs: int | None = option(
        None,
        "With --schedule step: epochs from one decay to the next.",
        shown="a third of all",
        most=MOST_STEPS,
    )
    decay: float = option(0.1, "With --schedule step: what the learning rate is multiplied by.")
    scale_lr: ScaleRate = option(
        "none", "Scale the learning rate with batch size / base batch size, or its square root."
    )
    base_batch_size: int = option(
        256, "With --scale-lr: the batch size that --lr is meant for.", most=MOST_SAMPLES
    )
    seed: int = option(0, "Of first weights, order, augmentation and dropout.")
    workers: int = option(0, "Processes that read ahead, for each device.", most=MOST_WORKERS)
    save_every: int = option(
        200, "Steps from one checkpoint to the next within an epoch.", most=MOST_STEPS
    )
    skip_bad: bool = option(False, "Leave out files and lines that cannot be used, and say so.")
    head_lr_scale: float = option(
        1.0, "How much faster the model's last layer learns.", most=MOST_FACTOR
    )
    freeze: tuple[str, ...] = option(
        (),
        "Parts of the model that keep their values, such as layer1 or layer2.0.",
        shown="none",
    )
    freeze_until: str | None = option(
        None, "Freeze all that comes before this part of the model.", shown="none"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # First, as every comparison with NaN is false: it would be refused as too large.
            finite = not isinstance(value, float) or math.isfinite(value)
            expect(finite, field.name, value, "a finite number")
            most = field.metadata["most"]
            small = value is None or most is None or value <= most
            expect(small, field.name, _short(value), f"{most:,} or less" if most else "")
        for name in ("shards", "batch_size", "base_batch_size", "save_every"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("epochs", "decay_epochs"):
            value = getattr(self, name)
            expect(value is None or value >= 1, name, value, "1 or more")
        for name in ("lr", "clip_norm", "head_lr_scale"):
            value = getattr(self, name)
            expect(value is None or value > 0, name, value, "more than 0")
        for name in ("weight_decay", "warmup_epochs", "workers"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        known = (
            re.fullmatch("replicate|shard|offload|pipeline(:[1-9][0-9]*)?", self.placement)
            is not None
        )
        expect(
            known,
            "placement",
            self.placement,
            "replicate, shard, offload, pipeline, or pipeline:2 and so on",
        )
        # What both TOML and torch.manual_seed can hold.
        expect(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a number of 64 bits")
        expect(0 <= self.momentum < 1, "momentum", self.momentum, "0 or more and less than 1")
        expect(0 < self.decay <= 1, "decay", self.decay, "more than 0 and at most 1")
        expect(bool(self.runs), "runs", self.runs, "the name of a folder")
        # Or the run's folder would lie outside the folder of all runs.
        expect(
            self.name == Path(self.name).name and self.name not in (".", ".."),
            "name",
            self.name,
            "a name without slashes",
        )
        expect(not self.resume or bool(self.name), "resume", "", "with --name, which run it is")

    @property
    def folder(self) -> Path:
        """The folder of the run; its name must be settled."""
        return Path(self.runs) / self.name


RUN_OPTIONS = frozenset(
    {"data", "devices", "epochs", "placement", "resume", "runs", "save_every", "workers"}
)
"""Options that may change when a run resumes. The data may have moved: their digest is compared."""


def from_mapping(kind: type[_Options], values: Mapping[str, Any], source: str) -> _Options:
    """Make options from names and values.

    Args:
        kind: the class of the options.
        values: values by name; options that are not in it keep their default.
        source: where the values come from, for errors.

    Raises:
        ValueError: a name is unknown, or a value has the wrong type or is out of range.
    """
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise ValueError(
            f"{source}: there is no option {', '.join(unknown)}; known are {', '.join(fields)}"
        )
    checked = {name: _typed(name, value, hints[name], source) for name, value in values.items()}
    return kind(**checked)


def _typed(name: str, value: Any, hint: Any, source: str) -> Any:
    """Convert a value to its option's type.

    Raises:
        ValueError: the value has another type.
    """
    try:
        # Strict: "1" is no number, and true is not 1. A whole number does for a float, and TOML's
        # lists become tuples.
        return msgspec.convert(value, hint)
    # UnicodeEncodeError: msgspec reads no text with lone surrogates, which stand on a command line
    # for bytes that are not UTF-8.
    except (UnicodeEncodeError, msgspec.ValidationError):
        choices = [choice for choice in _parts(hint) if choice is not types.NoneType]
        expected, got = " or ".join(map(_told, choices)), _short(repr(value))
        raise ValueError(f"{source}: {name}: expected {expected}, got {got}") from None


def _short(value: object) -> str:
    """Shorten a long value, so that it can be shown in a message."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _parts(hint: Any) -> tuple[Any, ...]:
    """Split a union into its types; any other type stands alone."""
    # Before Python 3.14, `int | None` and `Optional[int]` have different origins.
    united = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if united else (hint,)


def _told(choice: Any) -> str:
    if typing.get_origin(choice) is Literal:
        return ", ".join(typing.get_args(choice))
    if typing.get_origin(choice) is tuple:
        return "a list of texts"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names[choice]


def read_config(path: Path, job: str) -> dict[str, Any]:
    """Read names and values from a config file.

    Args:
        path: a TOML file.
        job: the job whose options are wanted; if the file names a ``job``, it must be this one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not TOML, is too large, or is of another job.
    """
    content = read_whole(path, _MOST_CONFIG_BYTES)
    try:
        values = tomllib.loads(content.decode())
    except RecursionError:
        # tomllib reads nested lists by recursion, and sets no limit of its own.
        raise ValueError(f"{path}: expected a TOML file, got lists without end") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected a TOML file: {error}") from error
    # Dots in a name make tables within each other, without any recursion of tomllib's.
    if nested_too_deeply(values):
        raise ValueError(f"{path}: expected a TOML file, got tables without end")
    found = values.pop("job", job)
    if found != job:
        raise ValueError(f"{path}: expected options of onefold train {job}, got those of {found}")
    return values


def write_config(options: TrainOptions, job: str, path: Path) -> None:
    """Write options as a file for `read_config`."""
    # Whether a run resumes belongs to one command, and not to the run.
    values = {"job": job, **given_options(options, ("resume",))}
    write_whole(path, tomli_w.dumps(values).encode())


def given_options(options: TrainOptions, without: Collection[str]) -> dict[str, Any]:
    """Return options by name, as a config file can hold them."""
    # TOML has no null, so an option without a value is left out, and reads as its default.
    values = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in without
    }
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


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

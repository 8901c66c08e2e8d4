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
import difflib
import math
import operator
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w
import torch

import onefold
from onefold.cli import seconds_of
from onefold.files import local_path, nested_too_deeply, write_whole
from onefold_jobs.data.files import read_whole
from onefold_jobs.loggers import LoggerName

__all__ = [
    "OTHER_NAMES",
    "Augment",
    "PictureOptions",
    "TrainOptions",
    "again",
    "check_limits",
    "expect",
    "from_mapping",
    "full_rate",
    "make_optimizer",
    "option",
    "parse_toml",
    "rate_factor",
    "read_config",
    "scaled_rate",
    "write_config",
]


Optimizer = Literal["sgd", "adam", "adamw"]
Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "step", "cosine"]
ScaleRate = Literal["none", "linear", "sqrt"]
Augment = Literal["auto", "none", "shift", "crop"]
Normalization = Literal["auto", "imagenet", "data", "none"]

MOST_SHARDS = 10**6
MOST_WORKERS = 1024
MOST_FACTOR = 10**6
"""The largest learning rate, and the largest factor of one."""
MOST_SIDE = 1 << 14
"""The longest side of a picture, in pixels."""
OTHER_NAMES = {
    "bs": "batch_size",
    "early_stopping": "patience",
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
}
"""The names that other programs have for options of the jobs."""
_MOST_CONFIG_BYTES = 1 << 20
_MOST_DOTS = 1000
_SHOWN_CHARACTERS = 30
_RUN = {field.name: field for field in dataclasses.fields(onefold.RunOptions)}

_Options = TypeVar("_Options", bound="TrainOptions")
Limits = Mapping[str, float]
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "least": (operator.ge, "{:,} or more"),
    "above": (operator.gt, "more than {:,}"),
    "below": (operator.lt, "less than {:,}"),
    "most": (operator.le, "at most {:,}"),
}
"""How a number is compared with each kind of limit, and how a message names the limit."""


def within(least: float, most: float) -> Limits:
    """The limits of numbers from one to another, both included."""
    return {"least": least, "most": most}


COUNT = within(1, 10**9)
"""Of epochs, steps and samples."""
FACTOR: Limits = {"above": 0, "most": MOST_FACTOR}
"""Of learning rates, and of factors of them."""
FRACTION: Limits = {"above": 0, "most": 1}
SHARE: Limits = {"least": 0, "below": 1}
PART: Limits = {"above": 0, "below": 1}
"""Of shares of a whole: which may be all of it, or nothing, or neither."""


def option(
    default: Any,
    help: str,
    limits: Limits = MappingProxyType({}),
    *,
    shown: str | None = None,
    variable: str | None = None,
    heading: str | None = None,
) -> Any:
    """Declare an option, as the field of a dataclass.

    Args:
        default: the option's value if none is given.
        help: one line of text.
        limits: of the numbers that the option takes: any of least, above, below and most.
        shown: how the help describes the default; None shows the value itself.
        variable: what in the environment counts as if it were given on the command line.
        heading: the heading of the help that lists it; None for that of the option's name.
    """
    notes = {"help": help, "shown": shown, "variable": variable, "limits": limits}
    notes["heading"] = heading
    return dataclasses.field(default=default, metadata=notes)


def again(name: str, default: Any = None, **notes: str | None) -> Any:
    """Declare an option of several jobs once more, for a job in which it is not quite the same.

    Args:
        name: name of the option.
        default: the option's value in this job if none is given.
        notes: ``help`` or ``shown``, where it differs.
    """
    common = PictureOptions.__dataclass_fields__[name].metadata
    return dataclasses.field(default=default, metadata={**common, **notes})


def expect(condition: bool, name: str, value: object, expected: str) -> None:
    """Refuse an option's value if a condition does not hold.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        given = f"--{name.replace('_', '-')} {value}".rstrip()
        raise ValueError(f"{given}: expected {expected}")


def check_limits(options: Any) -> None:
    """Refuse numbers beyond the limits with which their options were declared.

    Args:
        options: a dataclass, the limits of whose fields were given to `option`.

    Raises:
        ValueError: a number is beyond its limits, or not finite.
    """
    for field in dataclasses.fields(options):
        value, limits = getattr(options, field.name), field.metadata.get("limits", {})
        # First, as every comparison with NaN is false: it would be refused as too large.
        finite = not isinstance(value, float) or math.isfinite(value)
        expect(finite, field.name, value, "a finite number")
        words = " and ".join(_LIMITS[kind][1].format(limit) for kind, limit in limits.items())
        fits = value is None or all(_LIMITS[kind][0](value, limits[kind]) for kind in limits)
        expect(fits, field.name, _short(value), words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options that all jobs have."""

    data: str = option("", "Folder or file of the data.", shown="none, it must be given")
    name: str = option("", "Name of the run and its folder.", shown="the job and a number")
    runs: str = option("runs", "Folder of all runs.")
    resume: bool = option(False, "Resume the run of this name from its last checkpoint.")
    devices: str = option("auto", "N, auto, cpu:N, or a list of GPUs such as cuda:1,cuda:3.")
    placement: str = option(
        _RUN["placement"].default, _RUN["placement"].metadata["help"], variable="ONEFOLD_PLACEMENT"
    )
    holdout: float = option(
        0.1, "Share (of each class) to test with, where there is no test set.", PART
    )
    shards: int = option(
        8, "Parts of every batch: the most devices that may share one.", within(1, MOST_SHARDS)
    )
    batch_size: int = option(64, "Samples of a batch, over all devices.", COUNT)
    epochs: int | None = option(None, "How many times the training set is read.", COUNT, shown="10")
    lr: float | None = option(None, "Learning rate.", FACTOR, shown="0.001, or 0.05 with sgd")
    optimizer: Optimizer = option("adamw", "Optimizer.")
    momentum: float = option(0.9, "Momentum (sgd only).", SHARE)
    weight_decay: float | None = option(
        None,
        "Weight decay: pull of the parameters toward zero.",
        within(0, MOST_FACTOR),
        shown="0.01 with adamw, else 0.0005",
    )
    clip_norm: float | None = option(
        None,
        "Scale larger gradients down to this norm.",
        {"above": 0, "most": 10**20},
        shown="no limit",
    )
    precision: Precision = option(
        "fp32", "Precision of the computation; bf16 and fp16 are faster on GPUs."
    )
    schedule: Schedule = option("cosine", "Course of the learning rate after the warm-up.")
    warmup_epochs: float = option(
        0.5, "Epochs in which the learning rate rises to its full value.", within(0, 10**9)
    )
    decay_epochs: int | None = option(
        None,
        "With --schedule step: epochs from one decay to the next.",
        COUNT,
        shown="a third of all",
    )
    decay: float = option(
        0.1, "With --schedule step: what the learning rate is multiplied by.", FRACTION
    )
    scale_lr: ScaleRate = option(
        "none", "Scale the learning rate with batch size / base batch size, or its square root."
    )
    base_batch_size: int = option(
        256, "With --scale-lr: the batch size that --lr is meant for.", COUNT
    )
    patience: int | None = option(
        None, "Early stopping: after so many epochs without a better score.", COUNT, shown="never"
    )
    max_time: str | None = option(
        None, "Stop training after this time, such as 45m or 1h30m.", shown="no limit"
    )
    ema: float | None = option(
        None,
        "Test and keep a moving average of the weights with this decay, such as 0.999.",
        SHARE,
        shown="none",
    )
    compile: bool = option(False, "Compile the model and its loss with torch.compile.")
    microbatch: str | None = option(
        None,
        "Run each shard in microbatches of so many samples; auto: as many as fit into memory.",
        shown="whole shards",
    )
    log: LoggerName | None = option(
        None,
        "Logger of the run's numbers: tensorboard, wandb, mlflow, trackio, or none.",
        shown="tensorboard if it is installed",
    )
    best_by: str | None = option(None, "Score of the test set by which the best epoch is chosen.")
    seed: int = option(0, "Seed of initial weights, order, augmentation and dropout.")
    workers: int = option(0, "Processes that read ahead, for each device.", within(0, MOST_WORKERS))
    save_every: int = option(200, "Steps from one checkpoint to the next within an epoch.", COUNT)
    skip_bad: bool = option(False, "Leave out files and lines that cannot be used, and say so.")
    head_lr_scale: float = option(
        1.0, "Factor of the learning rate of the model's last layer.", FACTOR
    )
    freeze: tuple[str, ...] = option(
        (), "Parts of the model that keep their values, such as layer1 or layer2.0.", shown="none"
    )
    freeze_until: str | None = option(
        None, "Freeze all that comes before this part of the model.", shown="none"
    )

    def __post_init__(self) -> None:
        check_limits(self)
        # Refused here, and not by the trainer, which is made after the data are read.
        try:
            run = onefold.RunOptions(placement=self.placement)
            run.check_combination(compile=self.compile, microbatch=self.microbatch)
        except ValueError as error:
            raise ValueError(f"--placement {self.placement}: {error}") from None
        # What both TOML and torch.manual_seed can hold.
        expect(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a number of 64 bits")
        expect(bool(self.runs), "runs", self.runs, "the name of a folder")
        local_path("runs", self.runs)
        # Or the run's folder would lie outside the folder of all runs.
        inside = self.name == Path(self.name).name and self.name not in (".", "..")
        expect(inside, "name", self.name, "a name without slashes")
        expect(not self.resume or bool(self.name), "resume", "", "with --name, which run it is")
        times = "a time, such as 90s, 45m or 1h30m"
        expect(self.max_time is None or self.time_limit_s > 0, "max_time", self.max_time, times)
        pieces = re.fullmatch(r"auto|[1-9][0-9]{0,8}", self.microbatch or "auto")
        expect(pieces is not None, "microbatch", self.microbatch, "auto, or a number of samples")

    @property
    def folder(self) -> Path:
        """The folder of the run; its name must be settled."""
        return Path(self.runs) / self.name

    @property
    def pieces(self) -> int | Literal["auto"] | None:
        """``microbatch`` as a Trainer takes it."""
        given = self.microbatch
        return "auto" if given == "auto" else int(given) if given else None

    @property
    def time_limit_s(self) -> float:
        """Seconds after which training stops; 0 if ``max_time`` is no time, infinity without it."""
        return math.inf if self.max_time is None else seconds_of(self.max_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOptions(TrainOptions):
    """The options that the jobs of pictures have besides."""

    normalize: Normalization = option(
        "auto",
        "Normalize pictures by the numbers of ImageNet or of the data; auto: as pretrained "
        "weights need it.",
    )
    pretrained: str | None = option(
        None,
        "Begin with weights: a file, a run, torchvision:NAME, timm:NAME or hf:ORG/NAME.",
        shown="none",
    )
    pretrained_key: str | None = option(
        None, "Where the file keeps its weights, such as state_dict.", shown="at the top"
    )

    def __post_init__(self) -> None:
        # Not super(): dataclass(slots=True) makes the class a second time, and super() without
        # arguments still looks for the first.
        TrainOptions.__post_init__(self)
        # An option that would do nothing is more likely a mistake than intended.
        for name in ("pretrained_key", "pretrained_classes", "reuse_classes"):
            useful = self.pretrained is not None or not getattr(self, name, None)
            expect(useful, name, "", "with --pretrained")


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
        close = (
            difflib.get_close_matches(OTHER_NAMES.get(name, name), fields, 1) for name in unknown
        )
        meant = "".join(f"; did you mean {each[0]}?" for each in close if each)
        raise ValueError(f"{source}: there is no option {', '.join(unknown)}{meant}")
    checked = {name: _typed(name, value, hints[name], source) for name, value in values.items()}
    return kind(**checked)


def _typed(name: str, value: Any, hint: Any, source: str) -> Any:
    """Convert a value to its option's type.

    Numbers and paths do for texts, and for a list a text as on the command line does.

    Raises:
        ValueError: the value has another type.
    """
    plain, several = value, typing.get_origin(hint) is tuple
    if str in (hint, *typing.get_args(hint)):
        plain = [*map(_spelled, value)] if isinstance(value, list | tuple) else _spelled(value)
    if several and isinstance(plain, str):
        plain = [part for part in map(str.strip, plain.split(",")) if part]
    try:
        # Strict: "1" is no number, and true is not 1. A whole number does for a float, and TOML's
        # lists become tuples.
        return msgspec.convert(plain, hint)
    # With UnicodeEncodeError: msgspec reads no text with lone surrogates, which stand on a command
    # line for bytes that are not UTF-8.
    except ValueError:
        got = _short(repr(value))
        raise ValueError(f"{source}: {name}: expected {_words(hint)}, got {got}") from None


def _spelled(value: object) -> object:
    return str(value) if type(value) in (int, float) or isinstance(value, Path) else value


def _short(value: object) -> str:
    """Shorten a long value, so that it can be shown in a message."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _words(hint: Any) -> str:
    """Describe the values of a type."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if hint in plain:
        return plain[hint]
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(choices)
    if typing.get_origin(hint) is tuple:
        return "a list of texts"
    return " or ".join(_words(choice) for choice in choices if choice is not NoneType)


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ValueError: the content is not TOML, or is nested too deeply.
    """
    # Dots in a name make tables within each other: tomllib takes time and memory by their square.
    if any(line.count(b".") > _MOST_DOTS for line in content.splitlines()):
        raise ValueError(f"it is nested too deeply, by a line of more than {_MOST_DOTS:,} dots")
    try:
        values = tomllib.loads(content.decode())
    # tomllib reads nested lists by recursion, and sets no limit of its own.
    except RecursionError:
        values = None
    if values is None or nested_too_deeply(values):
        raise ValueError("it is nested too deeply")
    return values


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
        values = parse_toml(content)
    except ValueError as error:
        raise ValueError(f"{path}: expected a TOML file: {error}") from error
    found = values.pop("job", job)
    if found != job:
        raise ValueError(f"{path}: expected options of onefold train {job}, got those of {found}")
    return values


def write_config(options: TrainOptions, job: str, path: Path) -> None:
    """Write options as a file for `read_config`."""
    values = dataclasses.asdict(options)
    # Whether a run resumes belongs to one command, and not to the run.
    del values["resume"]
    # TOML has no null: an option without a value is left out, and reads as its default.
    given = {name: value for name, value in values.items() if value is not None}
    write_whole(path, tomli_w.dumps({"job": job, **given}).encode())


def scaled_rate(options: TrainOptions) -> float:
    """The learning rate for the batch size.

    Linear after Goyal et al., 2017, "Accurate, large minibatch SGD"; by the square root after
    Krizhevsky, 2014, "One weird trick".
    """
    ratio = options.batch_size / options.base_batch_size
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return full_rate(options) * scale[options.scale_lr]


def full_rate(options: TrainOptions, *, fine: bool = False, small: bool = False) -> float:
    """The learning rate, or that of the optimizer if none was given; a fifth of it when ``fine``.

    Args:
        options: of the run.
        fine: whether the run begins with trained weights.
        small: whether the model is a small one.
    """
    if options.lr is not None:
        return options.lr
    # Adam divides by the size of its gradients, so its steps are as long as the rate says.
    usual = 0.05 if options.optimizer == "sgd" else 0.003 if small else 0.001
    return usual / 5 if fine else usual


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
    parameters, decay = [*groups], options.weight_decay
    if decay is None:
        # That of Adam and SGD is a part of the gradient, that of AdamW is scaled by the rate.
        decay = 0.01 if options.optimizer == "adamw" else 5e-4
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=options.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, weight_decay=decay)

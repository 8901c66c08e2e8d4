"""Options of the ready-made jobs, and the optimizers and learning rates built from them.

An `option` has a name, a help text, a default and limits. Values come from a config file and from
the command line, which takes precedence. Options without a value are filled in once the data are
known (`dataclasses.replace`), and all options are saved with the run.

`scaled_rate` scales the learning rate by the batch size. `rate_factor` is its schedule.


Note: why every number has an upper limit
-----------------------------------------
A config file may come from another user, and a typo on the command line is easily made. A number
that no machine can handle would surface as an overflow in PyTorch, an out-of-memory kill, or a loop
that never ends, and not as a bad option. So each option that sets a size or a factor has a limit,
far above any sensible value.
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
from onefold_jobs.data.folds import Fold
from onefold_jobs.loggers import LoggerName

__all__ = [
    "OTHER_NAMES",
    "Augment",
    "PictureOptions",
    "Rate",
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
Rate = float | Literal["auto"] | None
"""A learning rate; ``auto`` finds one, and None is the optimizer's default."""

MOST_SHARDS = 10**6
MOST_WORKERS = 1024
MOST_FACTOR = 10**6
"""Largest learning rate, and largest factor of a learning rate."""
MOST_SIDE = 1 << 14
"""Longest side of an image, in pixels."""
OTHER_NAMES = {
    "bs": "batch_size",
    "early_stopping": "patience",
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
}
"""Names that other programs use for options of the jobs."""
_FOLDS = "a number of folds, 2 or more, such as 5, or one of them, such as 2/5"
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
"""Comparison for each kind of limit, and its wording in messages."""


def within(least: float, most: float) -> Limits:
    """Limits of a range that includes both ends."""
    return {"least": least, "most": most}


COUNT = within(1, 10**9)
"""Limits of numbers of epochs, steps and samples."""
FACTOR: Limits = {"above": 0, "most": MOST_FACTOR}
"""Limits of learning rates and their factors."""
FRACTION: Limits = {"above": 0, "most": 1}
SHARE: Limits = {"least": 0, "below": 1}
PART: Limits = {"above": 0, "below": 1}
"""Limits of fractions: up to all, from none, or strictly between."""


def option(
    default: Any,
    help: str,
    limits: Limits = MappingProxyType({}),
    *,
    shown: str | None = None,
    variable: str | None = None,
    heading: str | None = None,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: value if the option is not given.
        help: help text, one line.
        limits: limits of a number, any of least, above, below and most.
        shown: description of the default in the help; None shows the value itself.
        variable: environment variable that sets the option like the command line.
        heading: heading of the option in the help; None looks it up by the option's name.
    """
    notes = {"help": help, "shown": shown, "variable": variable, "limits": limits}
    notes["heading"] = heading
    return dataclasses.field(default=default, metadata=notes)


def again(name: str, default: Any = None, **notes: str | None) -> Any:
    """Redeclare a shared option, for a job in which it differs slightly.

    Args:
        name: name of the option.
        default: value in this job if the option is not given.
        notes: ``help`` or ``shown``, if it differs.
    """
    common = PictureOptions.__dataclass_fields__[name].metadata
    return dataclasses.field(default=default, metadata={**common, **notes})


def expect(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise an error about an option's value unless a condition holds.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        given = f"--{name.replace('_', '-')} {value}".rstrip()
        raise ValueError(f"{given}: expected {expected}")


def check_limits(options: Any) -> None:
    """Reject numbers outside the declared limits of their options.

    Args:
        options: a dataclass whose fields were declared by `option`.

    Raises:
        ValueError: a number is outside its limits, or not finite.
    """
    for field in dataclasses.fields(options):
        value, limits = getattr(options, field.name), field.metadata.get("limits", {})
        # First, because every comparison with NaN is false: NaN would be reported as too large.
        finite = not isinstance(value, float) or math.isfinite(value)
        expect(finite, field.name, value, "a finite number")
        words = " and ".join(_LIMITS[kind][1].format(limit) for kind, limit in limits.items())
        # Limits are of numbers; "auto" is none.
        free = value is None or isinstance(value, str)
        fits = free or all(_LIMITS[kind][0](value, limits[kind]) for kind in limits)
        expect(fits, field.name, _short(value), words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of all jobs."""

    data: str = option("", "Folder or file of the data.", shown="required")
    name: str = option("", "Name of the run's folder.", shown="job and number")
    runs: str = option("runs", "Folder of all runs.")
    resume: bool = option(False, "Resume the run NAME at its last checkpoint.")
    devices: str = option("auto", "N, auto, cpu:N, or GPUs: cuda:1,cuda:3.")
    placement: str = option(
        _RUN["placement"].default,
        "Parameter placement, as in onefold run.",
        variable="ONEFOLD_PLACEMENT",
    )
    holdout: float = option(0.1, "Fraction held out if there is no test set.", PART)
    folds: str | None = option(None, "Cross-validate: N runs; 2/N is the second.", shown="one run")
    shards: int = option(
        8, "Shards of each batch; the maximum number of devices.", within(1, MOST_SHARDS)
    )
    batch_size: int = option(64, "Global batch size, over all devices.", COUNT)
    epochs: int | None = option(None, "Passes over the training set.", COUNT, shown="10")
    lr: Rate = option(None, "Learning rate, or auto to find one.", FACTOR, shown="by model")
    optimizer: Optimizer = option("adamw", "Optimizer.")
    momentum: float = option(0.9, "Momentum of sgd.", SHARE)
    weight_decay: float | None = option(
        None, "Weight decay.", within(0, MOST_FACTOR), shown="0.0005; adamw: 0.01"
    )
    clip_norm: float | None = option(
        None, "Maximum gradient norm.", {"above": 0, "most": 10**20}, shown="no limit"
    )
    precision: Precision = option("fp32", "Precision.")
    schedule: Schedule = option("cosine", "Learning rate.")
    warmup_epochs: float = option(0.5, "Epochs of learning rate warmup.", within(0, 10**9))
    decay_epochs: int | None = option(
        None, "Epochs between decays (schedule step).", COUNT, shown="epochs/3"
    )
    decay: float = option(0.1, "Factor of each decay (schedule step).", FRACTION)
    scale_lr: ScaleRate = option("none", "Scale lr by batch size.")
    base_batch_size: int = option(256, "Batch size that --lr is for (--scale-lr).", COUNT)
    patience: int | None = option(
        None, "Stop after N epochs without a new best.", COUNT, shown="never"
    )
    max_time: str | None = option(None, "Stop after this time, such as 45m.", shown="no limit")
    ema: float | None = option(None, "Average weights with this decay: 0.999.", SHARE, shown="none")
    compile: bool = option(False, "Compile model and loss with torch.compile.")
    microbatch: str | None = option(None, "Microbatch size, or auto to fit memory.", shown="none")
    log: LoggerName | None = option(None, "Logger.", shown="")
    best_by: str | None = option(None, "Test score that selects the best epoch.")
    seed: int = option(0, "Seed of all random numbers.")
    workers: str = option("auto", "Data loader processes per device, or auto.")
    save_every: int = option(200, "Steps between checkpoints in an epoch.", COUNT)
    skip_bad: bool = option(False, "Skip and report unusable files and lines.")
    head_lr_scale: float = option(1.0, "Learning rate factor of the last layer.", FACTOR)
    freeze: tuple[str, ...] = option((), "Parts to freeze, such as layer1.", shown="none")
    freeze_until: str | None = option(None, "Freeze all parts before this one.", shown="none")

    def __post_init__(self) -> None:
        check_limits(self)
        # Check here already, because the trainer is created only after the data are read.
        try:
            run = onefold.RunOptions(placement=self.placement)
            run.check_combination(compile=self.compile, microbatch=self.microbatch)
        except ValueError as error:
            raise ValueError(f"--placement {self.placement}: {error}") from None
        # The range that both TOML and torch.manual_seed accept.
        expect(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        expect(bool(self.runs), "runs", self.runs, "a folder name")
        local_path("runs", self.runs)
        # Otherwise the run's folder would be outside the folder of all runs.
        inside = self.name == Path(self.name).name and self.name not in (".", "..")
        expect(inside, "name", self.name, "a name without slashes")
        expect(not self.resume or bool(self.name), "resume", "", "--name with it, to say which run")
        times = "a time, such as 90s, 45m or 1h30m"
        expect(self.max_time is None or self.time_limit_s > 0, "max_time", self.max_time, times)
        expect(self.folds is None or self.fold is not None, "folds", self.folds, _FOLDS)
        given = self.folds and self.holdout != type(self).__dataclass_fields__["holdout"].default
        expect(not given, "holdout", self.holdout, "it without --folds")
        dev = getattr(self, "dev", None) if self.folds else None
        expect(dev is None, "dev", dev, "it without --folds, which tests on training samples")
        scaled = self.lr == "auto" and self.scale_lr != "none"
        expect(not scaled, "scale_lr", self.scale_lr, "none with --lr auto, found for this batch")
        pieces = re.fullmatch(r"auto|[1-9][0-9]{0,8}", self.microbatch or "auto")
        expect(pieces is not None, "microbatch", self.microbatch, "auto, or a number of samples")
        known = self.workers == "auto" or re.fullmatch("[0-9]{1,4}", self.workers)
        numbers = f"auto, or a number from 0 to {MOST_WORKERS:,}"
        fits = known and self.worker_count <= MOST_WORKERS
        expect(bool(fits), "workers", self.workers, numbers)

    @property
    def fold(self) -> Fold | None:
        """Fold to test on, with the number 0 for all in turn; None if ``folds`` is not valid."""
        found = re.fullmatch(r"(?:([1-9]\d{0,3})/)?([1-9]\d{0,3})", self.folds or "")
        fold = Fold(int(found[1] or 0), int(found[2])) if found else None
        return fold if fold and 1 < fold.of >= fold.number else None

    @property
    def folder(self) -> Path:
        """Folder of the run. Requires a filled-in name."""
        return Path(self.runs) / self.name

    @property
    def pieces(self) -> int | Literal["auto"] | None:
        """Value of ``microbatch`` for a Trainer."""
        given = self.microbatch
        return "auto" if given == "auto" else int(given) if given else None

    @property
    def worker_count(self) -> int:
        """Number of data loader processes to start with."""
        return 0 if self.workers == "auto" else int(self.workers)

    @property
    def time_limit_s(self) -> float:
        """Time limit in seconds; 0 if ``max_time`` is invalid, infinity if it is not given."""
        return math.inf if self.max_time is None else seconds_of(self.max_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOptions(TrainOptions):
    """Additional options of the image jobs."""

    normalize: Normalization = option("auto", "Statistics.")
    pretrained: str | None = option(
        None, "File, run, torchvision:, timm: or hf:NAME.", shown="none"
    )
    pretrained_key: str | None = option(None, "Key of the weights in the file.", shown="none")

    def __post_init__(self) -> None:
        # super() would fail: dataclass(slots=True) creates the class a second time, and super()
        # without arguments refers to the first one.
        TrainOptions.__post_init__(self)
        # An option without effect is more likely a mistake than intended.
        for name in ("pretrained_key", "pretrained_classes", "reuse_classes"):
            useful = self.pretrained is not None or not getattr(self, name, None)
            expect(useful, name, "", "with --pretrained")


def from_mapping(kind: type[_Options], values: Mapping[str, Any], source: str) -> _Options:
    """Make options from names and values.

    Args:
        kind: class of the options.
        values: values by name. Other options keep their default.
        source: origin of the values, for errors.

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

    Numbers and paths are converted to strings, and strings to lists as on the command line.

    Raises:
        ValueError: the value has the wrong type.
    """
    plain, several = value, typing.get_origin(hint) is tuple
    if str in (hint, *typing.get_args(hint)):
        plain = [*map(_spelled, value)] if isinstance(value, list | tuple) else _spelled(value)
    if several and isinstance(plain, str):
        plain = [part for part in map(str.strip, plain.split(",")) if part]
    try:
        # Strict: "1" is not a number, and true is not 1. An integer is accepted as a float, and
        # TOML lists become tuples.
        return msgspec.convert(plain, hint)
    # This includes UnicodeEncodeError: msgspec rejects strings with lone surrogates, which
    # represent bytes on the command line that are not UTF-8.
    except ValueError:
        got = _short(repr(value))
        raise ValueError(f"{source}: {name}: expected {_words(hint)}, got {got}") from None


def _spelled(value: object) -> object:
    return str(value) if type(value) in (int, float) or isinstance(value, Path) else value


def _short(value: object) -> str:
    """Truncate a long value for a message."""
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
    # Dots in a key create nested tables; tomllib takes quadratic time and memory for them.
    if any(line.count(b".") > _MOST_DOTS for line in content.splitlines()):
        raise ValueError(f"it is nested too deeply: a line has more than {_MOST_DOTS:,} dots")
    try:
        values = tomllib.loads(content.decode())
    # tomllib parses nested lists recursively, without a depth limit of its own.
    except RecursionError:
        values = None
    if values is None or nested_too_deeply(values):
        raise ValueError("it is nested too deeply")
    return values


def read_config(path: Path, job: str) -> dict[str, Any]:
    """Read names and values from a config file.

    Args:
        path: a TOML file.
        job: name of the job. If the file contains ``job``, the two must match.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not TOML, is too large, or belongs to another job.
    """
    content = read_whole(path, _MOST_CONFIG_BYTES)
    try:
        values = parse_toml(content)
    except ValueError as error:
        raise ValueError(f"{path}: expected a TOML file: {error}") from error
    found = values.pop("job", job)
    if found != job:
        raise ValueError(f"{path}: expected options of onefold train {job}, not of {found}")
    return values


def write_config(options: TrainOptions, job: str, path: Path) -> None:
    """Write options to a file that `read_config` reads."""
    values = dataclasses.asdict(options)
    # ``resume`` is a property of a single command, not of the run.
    del values["resume"]
    # TOML has no null: an option without a value is omitted, and reads as its default.
    given = {name: value for name, value in values.items() if value is not None}
    write_whole(path, tomli_w.dumps({"job": job, **given}).encode())


def scaled_rate(options: TrainOptions) -> float:
    """Return the learning rate for the batch size.

    ``linear`` follows Goyal et al., 2017, "Accurate, large minibatch SGD"; ``sqrt`` follows
    Krizhevsky, 2014, "One weird trick".
    """
    ratio = options.batch_size / options.base_batch_size
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    rate = full_rate(options)
    assert isinstance(rate, float | int), "onefold_jobs.range_test finds the rate first"
    return rate * scale[options.scale_lr]


def full_rate(
    options: TrainOptions, *, fine: bool = False, small: bool = False
) -> float | Literal["auto"]:
    """Return the learning rate, or the optimizer's default: a fifth of it if ``fine``.

    Args:
        options: options of the run.
        fine: whether the run starts from trained weights.
        small: whether the model is small.
    """
    if options.lr is not None:
        return options.lr
    # Adam normalizes gradients by their magnitude, so its step length is the learning rate.
    usual = 0.05 if options.optimizer == "sgd" else 0.003 if small else 0.001
    return usual / 5 if fine else usual


def rate_factor(options: TrainOptions, *, epochs: int, steps: int) -> Callable[[int], float]:
    """Return the learning rate schedule: a function from completed steps to a factor.

    Args:
        options: options of the run.
        epochs: number of epochs.
        steps: steps per epoch.
    """
    warmup = options.warmup_epochs * steps
    total = epochs * steps
    every = (options.decay_epochs or max(1, epochs // 3)) * steps

    # A plain function: LambdaLR saves nothing of it, so a run that resumes with more epochs follows
    # the schedule of its new length.
    def factor(done: int) -> float:
        # The factor is never 0, or the first step would change nothing.
        if done < warmup:
            return (done + 1) / (warmup + 1)
        if options.schedule == "cosine":
            # The warmup may be longer than the whole run.
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
        options: options of the run.
        groups: parameter groups, each with its learning rate ``lr``.
    """
    parameters, decay = [*groups], options.weight_decay
    if decay is None:
        # Adam and SGD add weight decay to the gradient; AdamW scales it by the learning rate.
        decay = 0.01 if options.optimizer == "adamw" else 5e-4
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=options.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, weight_decay=decay)

"""What stands out in a run: in its record, and in a step that is computed once more.

`first_departure` finds the first step that leaves the run's own history. `Inspection` asks for a
step to be computed again, and `Findings` has what that shows.

Note: the rule
--------------
A number is compared with those of the 50 steps before it. It stands out if it is not finite, or if
it lies further above their median than 8 times their spread. The spread is the median absolute
deviation times 1.4826, which is the standard deviation of normal numbers; and at least 5% of the
median. Both medians stay what they are where a few of the numbers are far off (Hampel, "The
influence curve and its role in robust estimation", 1974). At least 10 numbers are a history.

The loss of each shard is compared in the same way, with those of all shards of these steps and of
its own: one bad sample moves the loss of its shard V times as far as that of the batch, and the
first steps have a history so. There are V times as many of them, of fewer samples each, so 20 times
the spread is asked for.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from onefold.errors import DataError, RecordError
from onefold.record import Record, shards_of
from onefold.record.entries import FailureEntry, StepEntry, decode
from onefold.shard.operations import ShardOperation
from onefold.system.safe_files import RECORD_BYTES
from onefold.system.words import message_of

__all__ = [
    "RULE",
    "BundleFacts",
    "Departure",
    "Findings",
    "Inspection",
    "LayerFinding",
    "SampleFinding",
    "ShardFinding",
    "first_departure",
    "unpack_bundle",
]


class Inspection(Struct, frozen=True, kw_only=True):
    """What is to be looked at."""

    record: str
    """File of the record; empty where there is none to compare with."""
    step: int
    trainer: int = 0
    """Number of the Trainer among those of the script."""
    shards: list[int] | None = None
    """Which shards are computed once more, operation by operation; None for all."""
    samples: bool = True
    """Whether the samples of these shards are told apart."""
    digests: bool = False
    """Whether each operation of them, and each parameter before each step, is digested."""
    after: int = 0
    """After which step the Trainer stands when it is made; 0 where the run begins."""
    scale: float = 0.0
    """What losses are multiplied by, in a precision that needs it; 0 for what the run has."""
    bundle: str = ""
    """File in which the step is put, to be computed elsewhere; empty for none."""
    function: str = ""
    """``FILE:NAME`` of a function to call with the step; empty for none."""
    terminal: str = ""
    """The terminal at which a Python prompt is opened in the step; empty for none."""
    findings: str
    """File in which the lead writes what is found."""


class SampleFinding(Struct, frozen=True, kw_only=True):
    """A sample of a shard."""

    place: int
    """In the batch."""
    number: int | None
    """In the data set; None of a batch of the script's own."""
    loss: float | None
    """None where it is not known, or not finite."""
    finite: bool
    """Whether its loss, and its gradient where that was looked at, are finite."""
    words: str
    """What it holds, and what the data set says of it."""
    digest: str = ""
    """Of what it holds; empty where none was asked for."""


class LayerFinding(Struct, frozen=True, kw_only=True):
    """The gradient of a parameter, over the whole batch."""

    name: str
    norm: float | None
    """None where it is not finite."""
    given: bool
    """Whether there is a gradient."""
    of_parameter: float | None
    """The norm of the parameter itself."""


class ShardFinding(Struct, frozen=True, kw_only=True):
    """A shard that was computed once more by itself."""

    shard: int
    total: float | None
    """Its part of the loss; None where it is not finite."""
    equal: bool
    """Whether it has the same bits as in the step."""
    norm: float | None
    """Of its gradient; None where it is not finite."""
    bad_gradients: list[str]
    """Parameters whose gradients are not finite."""
    samples: list[SampleFinding]
    operations: list[ShardOperation]
    first: ShardOperation | None = None
    """The first operation that made something that is not finite, or far too large."""
    times: float | None = None
    """How many times as large as in other shards; None of what is not finite."""


class Findings(Struct, kw_only=True):
    """What was found."""

    step: int
    description: dict[str, str] = {}
    """What the numbers depend on, in words; see `onefold.record.entries.StartEntry`."""
    name: str = ""
    """Of the loss, where there are several."""
    samples: int = 0
    begun: int | None = None
    """After which step the computation began."""
    compared: int = 0
    """How many shards of how many steps were compared with the record."""
    differs: list[str] = []
    """What differs from the record, in the first step that does."""
    loss: float | None = None
    norm: float | None = None
    totals: list[float | None] = []
    weights: list[float] = []
    digests: list[int] = []
    printed: str = ""
    """What the function has printed that was called."""
    made: bool = False
    """Whether the record has the step itself."""
    layers: list[LayerFinding] = []
    shards: list[ShardFinding] = []
    parameters: dict[int, dict[str, str]] = {}
    """Digests of the model's tensors before each step, if they were asked for."""


class BundleFacts(Struct, frozen=True, kw_only=True):
    """What a bundle says of its step, in ``about.json``."""

    step: Annotated[int, Meta(ge=1, lt=1 << 62)]
    scale: float
    description: dict[str, str]
    """See `onefold.record.entries.StartEntry`."""


def unpack_bundle(path: Path, folder: Path) -> tuple[BundleFacts, bytes]:
    """Put the step of a bundle into a folder; return what is said of it, and its entry, if any.

    Raises:
        DataError: the file is no bundle; nothing of it has been run.
    """
    try:
        with zipfile.ZipFile(path) as bundle:
            sizes = {each.filename: each.file_size for each in bundle.infolist()}
            if any(each.compress_type != zipfile.ZIP_STORED for each in bundle.infolist()):
                raise ValueError("its parts are compressed, as no bundle's are")
            if sizes.get("about.json", 0) + sizes.get("entry", 0) > RECORD_BYTES:
                raise ValueError("its about.json or entry is too large")
            about = msgspec.json.decode(bundle.read("about.json"), type=BundleFacts)
            bundle.extract("step.pt", folder)
            entry = bundle.read("entry") if "entry" in sizes else b""
            if entry:
                decode(entry, "its entry")
            return about, entry
    except (*_UNUSABLE, RecordError) as error:
        why = message_of(error)
        raise DataError(f"{path}: expected a bundle of onefold replay: {why}") from None


_UNUSABLE = (
    zipfile.BadZipFile, msgspec.DecodeError, RuntimeError, ValueError, LookupError, EOFError
)  # fmt: skip
"""What is raised for a ZIP file or a JSON text that is not as it must be."""
_WINDOW, _LEAST, _AT_ONCE = 50, 10, 1 << 19
_SPREADS, _SPREADS_OF_SHARD = 8.0, 20.0
_LEAST_SPREAD = 0.05
RULE = (
    f"not finite, or above the median of the {_WINDOW} steps before by more than {_SPREADS:.0f} "
    f"times their spread (1.4826 times the median absolute deviation, at least "
    f"{_LEAST_SPREAD:.0%} of the median); the loss of a shard, above that of all shards of these "
    f"steps by more than {_SPREADS_OF_SHARD:.0f} times"
)


class Departure(NamedTuple):
    """A number of a step that stands out."""

    step: int
    what: str
    """``loss``, ``norm``, ``loss of shard N``, or the name of a value that the loss returned."""
    value: float
    usual: float
    """The median of the steps before; NaN where there is none."""
    spread: float
    text: str = ""
    """The error that ended the step; empty where the step was made."""


def first_departure(record: Record) -> Departure | None:
    """The first step in which a loss, norm or value stands out; None if none does.

    Steps of several losses are compared with those of the same loss. Fewer samples give larger
    numbers by chance, so a batch of less than half the usual size counts only where no other step
    stands out, or with numbers that are not finite.
    """
    made = [each for each in record.entries if isinstance(each, StepEntry)]
    usual = np.median([each.samples for each in made]) if made else 0.0
    whole = [each for each in made if 2 * each.samples >= usual or not _is_finite(each)]
    return _first_of(record, whole) or _first_of(record, made)


def _is_finite(entry: StepEntry) -> bool:
    return math.isfinite(entry.loss) and math.isfinite(entry.norm)


def _first_of(record: Record, made: Sequence[StepEntry]) -> Departure | None:
    """The first that stands out of these steps, or has failed."""
    found: list[Departure | None] = []
    for loss in dict.fromkeys(each.name for each in made):
        own = [each for each in made if each.name == loss]
        # A batch without weight has no loss, and is skipped for that.
        rows = [each for each in own if each.weight > 0]
        normed = [each for each in rows if not _lacks_norm(each)]
        found.append(_first(rows, lambda each: {"loss": each.loss}))
        found.append(_first(normed, lambda each: {"norm": each.norm}))
        found.append(_first(rows, lambda each: each.values, may_lack=True))
        found.append(_first_shard(own))
    for entry in record.entries:
        if isinstance(entry, FailureEntry):
            text = f"{entry.error}: {entry.text}"
            found.append(Departure(entry.step + 1, "loss", math.nan, math.nan, math.nan, text))
    return min(filter(None, found), default=None, key=lambda each: (each.step, each.what))


def _lacks_norm(entry: StepEntry) -> bool:
    """Whether a step was skipped for another reason than its norm itself, and has none."""
    none = bool(entry.skipped) and math.isnan(entry.norm) and math.isfinite(entry.loss)
    # The scale of the losses is lowered now and then until no gradient overflows.
    return none or entry.skipped.startswith("a gradient overflowed")


def _first_shard(entries: Sequence[StepEntry]) -> Departure | None:
    means = [_means(entry) for entry in entries]
    for place, own in enumerate(means):
        near = np.concatenate(means[max(0, place - _WINDOW) : place + 1])
        if np.isfinite(near).sum() < _LEAST or len(own) < 2:
            continue
        usual, spread = map(float, _usual(near))
        largest = int(np.argmax(own))
        if own[largest] - usual > _SPREADS_OF_SHARD * spread:
            what = f"loss of shard {largest}"
            return Departure(entries[place].step, what, float(own[largest]), usual, spread)
    return None


def _means(entry: StepEntry) -> np.ndarray:
    totals, weights, _ = shards_of(entry)
    means: np.ndarray = totals / np.where(weights > 0, weights, 1.0)
    return means


def _usual(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median of the finite numbers in the last axis, NaN of none, and their spread."""
    usual = _median(values)
    spread = 1.4826 * _median(np.abs(values - usual[..., None]))
    return usual, np.maximum(spread, _LEAST_SPREAD * np.abs(usual))


def _median(values: np.ndarray) -> np.ndarray:
    finite = np.isfinite(values)
    ordered = np.sort(np.where(finite, values, np.inf), axis=-1)
    number = finite.sum(axis=-1, keepdims=True)
    places = np.maximum(number - 1, 0) // 2, np.minimum(number // 2, values.shape[-1] - 1)
    low, high = (np.take_along_axis(ordered, each, axis=-1) for each in places)
    median: np.ndarray = np.where(number > 0, (low + high) / 2, np.nan)[..., 0]
    return median


def _windows(rows: np.ndarray) -> np.ndarray:
    """For each row behind the first ones, those before it: (rows, columns, `_WINDOW`)."""
    return np.lib.stride_tricks.sliding_window_view(rows, _WINDOW, axis=0)[:-1]


def _first(
    entries: Sequence[StepEntry],
    values: Callable[[StepEntry], Mapping[str, float]],
    *,
    may_lack: bool = False,
) -> Departure | None:
    """The first step one of whose values, by name, stands out.

    Args:
        entries: of the steps.
        values: returns those of a step.
        may_lack: whether a value may be missing until the first step that has it.
    """
    past, names, begin = np.full((_WINDOW, 0), np.nan), list[str](), 0
    while begin < len(entries):
        # As many steps at once as do not take much memory.
        here, end = dict.fromkeys(names, 0.0), begin
        while end < len(entries):
            wider = {**here, **values(entries[end])}
            if end > begin and (end - begin) * len(wider) > _AT_ONCE:
                break
            here, end = wider, end + 1
        own = [[values(each).get(name, np.nan) for name in here] for each in entries[begin:end]]
        now = np.array(own, float).reshape(end - begin, len(here))
        rows = np.full((_WINDOW + len(now), len(here)), np.nan)
        rows[:_WINDOW, : len(names)], rows[_WINDOW:] = past, now  # the old names come first
        before = _windows(rows)
        number = np.isfinite(before).sum(axis=-1)
        known, bad = number >= _LEAST, ~np.isfinite(now)
        # Whatever stands out is so far above half of them: only of these a median is needed.
        above = _windows(rows + 0.99 * _SPREADS * _LEAST_SPREAD * np.abs(rows)) <= now[..., None]
        high = known & (2 * above.sum(axis=-1) >= number)
        usual, spread = _usual(before[high])
        bad[high] |= now[high] - usual > _SPREADS * spread
        bad &= ~(may_lack & np.isnan(now) & (number == 0))
        if bad.any():
            at = int(bad.any(axis=1).argmax())
            what, column = min((name, n) for n, name in enumerate(here) if bad[at, n])
            place = at, column
            spent = map(float, _usual(before[place])) if known[place] else (math.nan, math.nan)
            return Departure(entries[begin + at].step, what, float(now[place]), *spent)
        past, begin = rows[-_WINDOW:], end
        kept = np.isfinite(past).any(axis=0)
        past, names = past[:, kept], list(compress(here, kept.tolist()))
    return None

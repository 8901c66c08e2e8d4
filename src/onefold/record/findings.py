"""Outliers in a run's record, and the findings of a replayed step.

`first_departure` finds the first step that departs from the run's own history. `Inspection`
requests a replay of a step, and `Findings` holds its results.

Note: the rule
--------------
Each number is compared with its values in the previous 50 steps. It is an outlier if it is not
finite, or exceeds their median by more than 8 times their spread. The spread is the median absolute
deviation times 1.4826, which equals the standard deviation for normally distributed numbers, but at
least 5% of the median. A few extreme numbers change neither median (Hampel, "The influence curve
and its role in robust estimation", 1974). At least 10 numbers are required.

The loss of each shard is compared in the same way with the losses of all shards in these steps and
in its own step: one bad sample moves its shard's loss V times as far as the batch's loss, and the
first steps have enough numbers this way. There are V times as many shard losses, each over fewer
samples, so the threshold is 20 times the spread.
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
    """A request to replay a step and inspect it."""

    record: str
    """Path of the record; empty if there is none to compare with."""
    step: int
    trainer: int = 0
    """Number of the Trainer among the script's Trainers."""
    shards: list[int] | None = None
    """Shards to compute again, operation by operation; None for all."""
    samples: bool = True
    """Whether to inspect the samples of these shards one by one."""
    digests: bool = False
    """Whether to digest each of their operations, and each parameter before each step."""
    after: int = 0
    """Number of finished steps when the Trainer is created; 0 at the start of the run."""
    scale: float = 0.0
    """Loss scale, for a precision that needs one; 0 for the run's own scale."""
    bundle: str = ""
    """File to store the step in, to be computed elsewhere; empty for none."""
    function: str = ""
    """``FILE:NAME`` of a function to call with the step; empty for none."""
    terminal: str = ""
    """Terminal at which to open a Python prompt in the step; empty for none."""
    findings: str
    """File for the findings, written by the lead."""


class SampleFinding(Struct, frozen=True, kw_only=True):
    """A sample of a shard."""

    place: int
    """Position in the batch."""
    number: int | None
    """Index in the data set; None if the script made the batch itself."""
    loss: float | None
    """Loss of the sample; None if it is unknown or not finite."""
    finite: bool
    """Whether its loss, and its gradient if inspected, are finite."""
    words: str
    """Description of its contents, and of its source in the data set."""
    digest: str = ""
    """Digest of its contents; empty if none was requested."""


class LayerFinding(Struct, frozen=True, kw_only=True):
    """The gradient of a parameter, over the whole batch."""

    name: str
    norm: float | None
    """Norm of the gradient; None if it is not finite."""
    given: bool
    """Whether there is a gradient."""
    of_parameter: float | None
    """Norm of the parameter itself."""


class ShardFinding(Struct, frozen=True, kw_only=True):
    """A shard that was computed again separately."""

    shard: int
    total: float | None
    """The shard's part of the loss; None if it is not finite."""
    equal: bool
    """Whether the shard has the same bits as in the step."""
    norm: float | None
    """Norm of its gradient; None if it is not finite."""
    bad_gradients: list[str]
    """Names of parameters whose gradients are not finite."""
    samples: list[SampleFinding]
    operations: list[ShardOperation]
    first: ShardOperation | None = None
    """First operation with an output that is not finite, or far too large."""
    times: float | None = None
    """Ratio of the output's size to that in other shards; None if it is not finite."""


class Findings(Struct, kw_only=True):
    """The results of an inspection."""

    step: int
    description: dict[str, str] = {}
    """Everything that the numbers depend on; see `onefold.record.entries.StartEntry`."""
    name: str = ""
    """Name of the loss, if there are several."""
    samples: int = 0
    begun: int | None = None
    """Number of finished steps when the replay began."""
    compared: int = 0
    """Number of shards, over all steps, that were compared with the record."""
    differs: list[str] = []
    """Differences from the record in the first step that has any."""
    loss: float | None = None
    norm: float | None = None
    totals: list[float | None] = []
    weights: list[float] = []
    digests: list[int] = []
    printed: str = ""
    """Output that the called function printed."""
    made: bool = False
    """Whether the record contains the step itself."""
    layers: list[LayerFinding] = []
    shards: list[ShardFinding] = []
    parameters: dict[int, dict[str, str]] = {}
    """Digests of the model's tensors before each step, if requested."""


class BundleFacts(Struct, frozen=True, kw_only=True):
    """Description of a bundle's step, stored in ``about.json``."""

    step: Annotated[int, Meta(ge=1, lt=1 << 62)]
    scale: float
    description: dict[str, str]
    """See `onefold.record.entries.StartEntry`."""


def unpack_bundle(path: Path, folder: Path) -> tuple[BundleFacts, bytes]:
    """Extract a bundle's step to a directory; return its description, and its entry if any.

    Raises:
        DataError: the file is not a bundle. No code from it has run.
    """
    try:
        with zipfile.ZipFile(path) as bundle:
            sizes = {each.filename: each.file_size for each in bundle.infolist()}
            if any(each.compress_type != zipfile.ZIP_STORED for each in bundle.infolist()):
                raise ValueError("its parts are compressed, but a bundle's parts never are")
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
        raise DataError(f"{path} is not a bundle of onefold replay: {why}") from None


_UNUSABLE = (
    zipfile.BadZipFile, msgspec.DecodeError, RuntimeError, ValueError, LookupError, EOFError
)  # fmt: skip
"""Exceptions that an invalid ZIP or JSON file raises."""
_WINDOW, _LEAST, _AT_ONCE = 50, 10, 1 << 19
_SPREADS, _SPREADS_OF_SHARD = 8.0, 20.0
_LEAST_SPREAD = 0.05
RULE = (
    f"not finite, or above the median of the previous {_WINDOW} steps by more than "
    f"{_SPREADS:.0f} times their spread (1.4826 times the median absolute deviation, at least "
    f"{_LEAST_SPREAD:.0%} of the median); for a shard's loss, above the median over all shards of "
    f"these steps by more than {_SPREADS_OF_SHARD:.0f} times the spread"
)


class Departure(NamedTuple):
    """An outlier in a step."""

    step: int
    what: str
    """``loss``, ``norm``, ``loss of shard N``, or the name of a metric that the loss returned."""
    value: float
    usual: float
    """Median of the previous steps; NaN if there is none."""
    spread: float
    text: str = ""
    """The error that ended the step; empty if the step finished."""


def first_departure(record: Record) -> Departure | None:
    """Return the first step whose loss, norm or metric is an outlier; None if there is none.

    With several losses, a step is compared only with steps of the same loss. Fewer samples give
    larger numbers by chance, so a batch of less than half the usual size counts only if no other
    step has an outlier, or if its numbers are not finite.
    """
    made = [each for each in record.entries if isinstance(each, StepEntry)]
    usual = np.median([each.samples for each in made]) if made else 0.0
    whole = [each for each in made if 2 * each.samples >= usual or not _is_finite(each)]
    return _first_of(record, whole) or _first_of(record, made)


def _is_finite(entry: StepEntry) -> bool:
    return math.isfinite(entry.loss) and math.isfinite(entry.norm)


def _first_of(record: Record, made: Sequence[StepEntry]) -> Departure | None:
    """Return the first of these steps that has an outlier or failed."""
    found: list[Departure | None] = []
    for loss in dict.fromkeys(each.name for each in made):
        own = [each for each in made if each.name == loss]
        # A batch with zero weight has no loss and is skipped for that reason.
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
    """Whether a step lacks a norm for a reason other than the norm itself."""
    none = bool(entry.skipped) and math.isnan(entry.norm) and math.isfinite(entry.loss)
    # The loss scale is lowered from time to time until no gradient overflows.
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
    """Return the median of the finite numbers in the last axis, NaN for none, and their spread."""
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
    """Return the rows before each row after the first ones: (rows, columns, `_WINDOW`)."""
    return np.lib.stride_tricks.sliding_window_view(rows, _WINDOW, axis=0)[:-1]


def _first(
    entries: Sequence[StepEntry],
    values: Callable[[StepEntry], Mapping[str, float]],
    *,
    may_lack: bool = False,
) -> Departure | None:
    """Return the first step with an outlier among its named values.

    Args:
        entries: the steps.
        values: returns the values of a step.
        may_lack: whether a value may be missing until the first step that has it.
    """
    past, names, begin = np.full((_WINDOW, 0), np.nan), list[str](), 0
    while begin < len(entries):
        # Process steps in blocks, which bounds memory.
        here, end = dict.fromkeys(names, 0.0), begin
        while end < len(entries):
            wider = {**here, **values(entries[end])}
            if end > begin and (end - begin) * len(wider) > _AT_ONCE:
                break
            here, end = wider, end + 1
        own = [[values(each).get(name, np.nan) for name in here] for each in entries[begin:end]]
        now = np.array(own, float).reshape(end - begin, len(here))
        rows = np.full((_WINDOW + len(now), len(here)), np.nan)
        rows[:_WINDOW, : len(names)], rows[_WINDOW:] = past, now  # known names come first
        before = _windows(rows)
        number = np.isfinite(before).sum(axis=-1)
        known, bad = number >= _LEAST, ~np.isfinite(now)
        # An outlier lies at least this far above half of the window: compute medians for those
        # only.
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

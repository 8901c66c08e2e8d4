"""Reads ``run.json``: checks its contents before any of it is used, and compares checkpoints.

The digest of ``run.json`` detects damage, but cannot prove that a run wrote the file. All entries
that are used later are checked here, so that a forged file causes one clear error. `_Stored` and
`_Run` define the format: every entry with its type and range. An entry with a default may be
missing.

Note: why msgspec does not decode the text
------------------------------------------
msgspec's decoder rejects NaN, and text with lone surrogates, which file names may contain. So
Python parses the JSON, and msgspec checks the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from onefold.core.encoding import Count, from_json
from onefold.core.settings import ALLOWED_AS, PRECISIONS, SchedulerEvery, Settings
from onefold.data_order.position import SavedLoader
from onefold.system.tensor_file import Seal

__all__ = [
    "RUN",
    "TENSOR_FILES",
    "Place",
    "age_of",
    "best_of",
    "check_run",
    "check_stored",
    "next_serial",
    "read_rule",
    "superseded",
]

RUN = "run.json"
"""The file that describes the run. It is written last, so if it exists, the others were complete.

Its digests tell whether they still are."""

TENSOR_FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "buffers.safetensors",
    "training.safetensors",
    "kept.safetensors",
)

Place = Literal["step", "end"] | None
"""Position of the script when the checkpoint was made: the start of the next step, the end of the
script, or (None) a call of `Trainer.save`."""

_Key = TypeVar("_Key", str, Path)
"""Name of a checkpoint: a folder, or an object storage's."""
_MOST = 1 << 62
"""Limit of integers: steps, sizes and seeds fit, and the sum of two stays below 2**63."""
_SHOWN = 60
_Positive = Annotated[int, Meta(ge=1, lt=_MOST)]
_Number = Annotated[int, Meta(gt=-_MOST, lt=_MOST)] | float
_Values = dict[str, Any]


def _one_of(names: Iterable[str]) -> Meta:
    # A pattern, because the errors of a Literal do not list the allowed values.
    return Meta(pattern=rf"\A({'|'.join(names)})\Z")


class _Stored(Struct):
    step: Count
    run: str
    keep: _Positive | None
    best: Annotated[str, Meta(pattern=r"\A(highest|lowest) [\s\S]")] | None
    scores: _Values
    files: dict[str, Seal]
    serial: Count

    def __post_init__(self) -> None:
        # Otherwise a forged record could make onefold open any file of the machine.
        for name in self.files.keys() - set(TENSOR_FILES):
            raise ValueError(
                f"it lists {_shown(name)} among its files, but allowed are only "
                f"{', '.join(TENSOR_FILES)}"
            )


class _Optimizer(Struct, rename={"kind": "class"}):
    kind: str
    parameters: list[list[str]]
    settings: list[_Values]
    settings_at_start: list[_Values]
    tensors: dict[str, list[str]]
    other_state: dict[str, _Values]
    strides: dict[str, list[Count]]

    def __post_init__(self) -> None:
        from_json([*self.settings, *self.settings_at_start, *self.other_state.values()])
        if any(group.keys() & {"params", "param_names"} for group in self.settings):
            raise ValueError("the settings of the optimizer must not contain its parameters")


class _Scheduler(Struct, rename={"kind": "class"}):
    kind: str
    state: _Values
    every: Annotated[str, _one_of(get_args(SchedulerEvery))]
    open: Count | None
    settings_at_start: _Values = {}

    def __post_init__(self) -> None:
        from_json([*self.settings_at_start.values()])


class _Average(Struct):
    decay: Annotated[float, Meta(ge=0, lt=1)] | None
    every: _Positive
    steps: Count
    after: str


class _Recorded(Struct):
    entries: Count
    head: Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")]


class _Libraries(Struct):
    torch: str


class _Run(Struct, kw_only=True):
    files: _Values
    epoch: Count
    seed: Annotated[int, Meta(ge=-2 * _MOST)]
    shards: _Positive
    clip_norm: _Number | None
    clip_value: _Number | None
    precision: Annotated[str, _one_of(PRECISIONS)] | None
    microbatch: _Positive | None
    microbatch_trials: Annotated[int, Meta(ge=0, le=2)] | None
    loss_scale: _Number
    good_steps: Count
    average: _Average | None
    place: Annotated[str, _one_of(("step", "end"))] | None
    recorded: _Recorded
    trained: dict[str, list[str]]
    fingerprint: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    threads: _Positive
    device: str
    libraries: _Libraries
    scheduler: _Scheduler | None
    optimizer: _Optimizer
    position: list[SavedLoader]
    extra: Any

    def __post_init__(self) -> None:
        missing = set(TENSOR_FILES[:2]) - self.files.keys()
        if missing:
            raise ValueError(f"its files do not include {' and '.join(sorted(missing))}")
        # Bounds that msgspec cannot express.
        if self.seed >= 4 * _MOST:
            raise ValueError(f"seed must be below {4 * _MOST}, but got {_shown(self.seed)}")
        from_json(self.extra)


_KINDS = get_type_hints(Settings)
_Settings = msgspec.defstruct(
    "_Settings",
    [(name, _KINDS[name]) for name in ALLOWED_AS if name not in _Run.__struct_fields__],
)
"""Saved settings without limits of their own in `_Run`."""


def check_stored(record: object) -> None:
    """Check the entries that every checkpoint must have.

    Raises:
        ValueError: an entry is missing or has a wrong type.
    """
    _check(record, _Stored)
    _check(from_json(record["scores"]), dict[str, _Number], "scores")  # type: ignore[index]


def check_run(run: Mapping[str, Any]) -> None:
    """Check the entries that are needed to resume a run.

    Args:
        run: contents of ``run.json``, checked by `check_stored`.

    Raises:
        ValueError: an entry is missing or has a wrong type.
    """
    _check(run, _Run)
    _check(run, _Settings)


def next_serial(records: Iterable[Mapping[str, Any]]) -> int:
    """Return the serial number for a new checkpoint in a directory.

    If one number is at the limit, as in a forged record, all later ones are too; then the step
    numbers tell which checkpoint is the newest.

    >>> next_serial([{"serial": 3}, {}])
    4
    """
    return min(1 + max((record.get("serial", 0) for record in records), default=0), _MOST - 1)


def age_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return a key that sorts the checkpoints of a directory by their time of writing."""
    return record.get("serial", 0), record.get("step", 0)


def read_rule(rule: str) -> list[tuple[str, int]]:
    """Return each score's name in a rule, and 1 if the highest is best, -1 if the lowest is.

    Raises:
        ValueError: the rule is not a list of ``"highest NAME"`` or ``"lowest NAME"``.
    """
    parts = [part.partition(" ")[::2] for part in re.split(", (?=highest |lowest )", rule)]
    if not all(order in ("highest", "lowest") and score for order, score in parts):
        raise ValueError(f'best must be "highest NAME" or "lowest NAME", but got {rule!r}')
    return [(score, 1 if order == "highest" else -1) for order, score in parts]


def best_of(records: Mapping[_Key, Mapping[str, Any]], rule: str) -> set[_Key]:
    """Find the best checkpoint by a rule, the newest of equal ones; none if none has the score.

    Args:
        records: the ``run.json`` of each checkpoint.
        rule: ``"highest NAME"`` or ``"lowest NAME"``, with the name of a score; several, separated
            by commas, each decide if those before it are equal.

    Raises:
        ValueError: the rule has another form.
    """
    scored = []
    for folder, record in records.items():
        scores = from_json(record["scores"])
        values = [sign * scores.get(name, math.nan) for name, sign in read_rule(rule)]
        if not math.isnan(values[0]):
            merits = [-math.inf if math.isnan(value) else value for value in values]
            scored.append((merits, age_of(record), folder))
    return {max(scored)[2]} if scored else set()


def superseded(records: Mapping[_Key, Mapping[str, Any]], keep: int) -> list[_Key]:
    """Return the checkpoints of one run that its rules do not keep, the oldest first.

    Args:
        records: the ``run.json`` of each checkpoint.
        keep: number of newest checkpoints to keep.
    """
    ordered = sorted(records, key=lambda each: age_of(records[each]))
    kept = set(ordered[-keep:])
    kept |= {each for each, record in records.items() if record["keep"] is None}
    for rule in {record["best"] for record in records.values() if record["best"]}:
        kept |= best_of(records, rule)
    return [each for each in ordered if each not in kept]


def _check(record: Any, kind: Any, name: str = "") -> None:
    try:
        msgspec.convert(record, kind)
    except UnicodeEncodeError as error:
        # msgspec raises this for text with a lone surrogate in place of a number or a list.
        raise ValueError(f"the text {_shown(error.object)} has the wrong type") from None
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at ")
        inner = path.strip("`").rpartition("$")[2]
        place = (name + inner).removeprefix(".")
        if said.startswith("Object missing"):
            missing = said.split("`")[1]
            raise ValueError(f"{place}.{missing} is missing".removeprefix(".")) from None
        if not said.startswith("Expected `"):
            raise ValueError(f"{place}: {said}".removeprefix(": ")) from None
        # The path shows user keys as "[...]": descend only up to the first, and show all of its
        # parent.
        for key in re.findall(r"\w+", inner.partition("[...]")[0]):
            record = record[int(key) if isinstance(record, list) else key]
        of = "keys of " if path.startswith("`key`") else ""
        expected = said.partition(", got ")[0].removeprefix("Expected ")
        raise ValueError(
            f"expected {of}{place or 'the whole'} to be {expected}, but got {_shown(record)}"
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

"""Checks the content of a checkpoint's ``run.json`` before any of it is used.

Its digest detects damage, but cannot prove that a run has written it. Everything that is used of it
later is checked here, so that a made-up file ends in one clear error. `_Stored` and `_Run` are the
format: every entry with its type and its range. An entry with a default may be missing.

Note: why the text is not decoded by msgspec
--------------------------------------------
Its own decoder refuses text with lone surrogates, as a name of a file may have, and NaN. So Python
reads the JSON, and msgspec checks the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from onefold.core.encoding import from_json
from onefold.core.settings import ALLOWED_AS, PRECISIONS, SchedulerEvery, Settings
from onefold.data_order.position import Count, SavedLoader
from onefold.system.tensor_file import Seal

__all__ = ["RUN", "TENSOR_FILES", "Place", "check_run", "check_stored", "next_serial"]

RUN = "run.json"
"""The file that says where the run is; written last, so if it exists, the others were whole then.

Whether they still are, its digests tell."""

TENSOR_FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "buffers.safetensors",
    "training.safetensors",
    "kept.safetensors",
)

Place = Literal["step", "end"] | None
"""Where the script was as a checkpoint was made: at the beginning of the next step, at its end, or
where it called `Trainer.save`."""

_MOST = 1 << 62
"""Limit of any whole number: steps, sizes and seeds fit, and the sum of two is below 2**63."""
_SHOWN = 60
_Positive = Annotated[int, Meta(ge=1, lt=_MOST)]
_Number = Annotated[int, Meta(gt=-_MOST, lt=_MOST)] | float
_Values = dict[str, Any]


def _one_of(names: Iterable[str]) -> Meta:
    # And no Literal, which does not say what was expected.
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
        # Else a made-up record could have any file of the machine opened.
        for name in self.files.keys() - set(TENSOR_FILES):
            raise ValueError(
                f"it names {_shown(name)} as one of its files: expected {', '.join(TENSOR_FILES)}"
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
            raise ValueError("expected settings of the optimizer, got its parameters among them")


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
            raise ValueError(f"it names no {' and no '.join(sorted(missing))} among its files")
        # Beyond the bounds that msgspec can express.
        if self.seed >= 4 * _MOST:
            raise ValueError(f"expected seed to be below {4 * _MOST}, got {_shown(self.seed)}")
        from_json(self.extra)


_KINDS = get_type_hints(Settings)
_Settings = msgspec.defstruct(
    "_Settings",
    [(name, _KINDS[name]) for name in ALLOWED_AS if name not in _Run.__struct_fields__],
)
"""Settings that are saved and have no limits here of their own."""


def check_stored(record: object) -> None:
    """Check what every checkpoint must say, whatever run it is from.

    Raises:
        ValueError: an entry is missing, or of a wrong kind.
    """
    _check(record, _Stored)
    _check(from_json(record["scores"]), dict[str, _Number], "scores")  # type: ignore[index]


def check_run(run: Mapping[str, Any]) -> None:
    """Check what a run needs to be resumed.

    Args:
        run: the content of ``run.json``, checked by `check_stored`.

    Raises:
        ValueError: an entry is missing, or of a wrong kind.
    """
    _check(run, _Run)
    _check(run, _Settings)


def next_serial(records: Iterable[Mapping[str, Any]]) -> int:
    """The serial number of a checkpoint that is written beside others.

    Where one of them is at the limit, as a made-up one may be, so are all that follow: their steps
    then say which is the newest.

    >>> next_serial([{"serial": 3}, {}])
    4
    """
    return min(1 + max((record.get("serial", 0) for record in records), default=0), _MOST - 1)


def _check(record: Any, kind: Any, name: str = "") -> None:
    try:
        msgspec.convert(record, kind)
    except UnicodeEncodeError as error:
        # What msgspec raises for text with a lone surrogate in place of a number or a list.
        raise ValueError(f"the text {_shown(error.object)} stands for another value") from None
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at ")
        inner = path.strip("`").rpartition("$")[2]
        place = (name + inner).removeprefix(".")
        if said.startswith("Object missing"):
            missing = said.split("`")[1]
            raise ValueError(f"{place}.{missing} is missing".removeprefix(".")) from None
        if not said.startswith("Expected `"):
            raise ValueError(f"{place}: {said}".removeprefix(": ")) from None
        # A key of the user's is "[...]" in the path: what came is shown with all beside it.
        for key in re.findall(r"\w+", inner.partition("[...]")[0]):
            record = record[int(key) if isinstance(record, list) else key]
        of = "keys of " if path.startswith("`key`") else ""
        expected = said.partition(", got ")[0].removeprefix("Expected ")
        raise ValueError(
            f"expected {of}{place or 'the whole'} to be {expected}, got {_shown(record)}"
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

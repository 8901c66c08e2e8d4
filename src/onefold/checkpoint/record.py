"""Checks the content of a checkpoint's ``run.json`` before any of it is used.

Its digest detects damage, but cannot prove that a run has written it. Everything that is used of it
later is checked here, so that a made-up file ends in one clear error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from onefold.core.jsonvalue import from_json
from onefold.core.precision import PRECISIONS
from onefold.core.settings import ScheduleEvery

__all__ = ["RUN", "TENSOR_FILES", "Place", "check_run", "check_stored", "next_serial"]

RUN = "run.json"
"""The file that says where the run is; written last, so if it exists, the others were whole then.

Whether they still are, its digests tell."""

TENSOR_FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "buffers.safetensors",
    "training.safetensors",
)

Place = Literal["step", "end"] | None
"""Where the script was as a checkpoint was made: at the beginning of the next step, at its end, or
where it called `Trainer.save`."""

_MOST = 1 << 62
"""Limit of any whole number: steps, sizes and seeds fit, and the sum of two is below 2**63."""
_SHA256_DIGITS = 64
_MOST_DIGITS = 19
_SHOWN = 60
_OF_A_GROUP = {"params", "param_names"}
"""Keys of an optimizer's group that are not settings."""

_Check = Callable[[Any], bool]


def check_stored(record: object) -> None:
    """Check what every checkpoint must say, whatever run it is from.

    Raises:
        ValueError: an entry is missing, or of a wrong kind.
    """
    run = _mapping(record, "the whole")
    for name, check, expected in _STORED:
        _expect(run, name, check, expected)
    for name, seal in run["files"].items():
        # Else a made-up record could have any file of the machine opened.
        if name not in TENSOR_FILES:
            raise ValueError(
                f"it names {_shown(name)} as one of its files: expected {', '.join(TENSOR_FILES)}"
            )
        whole = isinstance(seal, dict) and seal.keys() == {"size", "sha256"}
        if not (whole and _is_count(seal["size"]) and _is_digest(seal["sha256"])):
            raise ValueError(f"expected size and sha256 of {name}, got {_shown(seal)}")
    scores = from_json(run["scores"])
    if not (isinstance(scores, dict) and all(map(_is_number, scores.values()))):
        raise ValueError(f"expected scores to be numbers by name, got {_shown(run['scores'])}")


def check_run(run: Mapping[str, Any]) -> None:
    """Check what a run needs to be resumed.

    Args:
        run: the content of ``run.json``, checked by `check_stored`.

    Raises:
        ValueError: an entry is missing, or of a wrong kind.
    """
    for name, check, expected in _RUN:
        _expect(run, name, check, expected)
    missing = {"model.safetensors", "optimizer.safetensors"} - run["files"].keys()
    if missing:
        raise ValueError(f"it names no {' and no '.join(sorted(missing))} among its files")
    if not isinstance(run["libraries"].get("torch"), str):
        raise ValueError("expected libraries to say which torch, it does not")
    for name, check, expected in _OPTIMIZER:
        _expect(run["optimizer"], name, check, expected, "optimizer.")
    if run["schedule"] is not None:
        _expect(run["schedule"], "class", _is_text, "a text", "schedule.")
        _expect(run["schedule"], "state", _is_object, "values by name", "schedule.")
        _expect(run["schedule"], "every?", _is_every, "step, epoch or script", "schedule.")
        _expect(run["schedule"], "open?", _or_none(_is_count), "an epoch or null", "schedule.")
    for number, loader in enumerate(run["position"]):
        for name, check, expected in _LOADER:
            _expect(_mapping(loader, "position"), name, check, expected, f"position[{number}].")
    for name, check, expected in _AVERAGE if run.get("average") is not None else ():
        _expect(run["average"], name, check, expected, "average.")
    from_json(run["extra"])


def next_serial(records: Iterable[Mapping[str, Any]]) -> int:
    """The serial number of a checkpoint that is written beside others.

    Where one of them is at the limit, as a made-up one may be, so are all that follow: their steps
    then say which is the newest.

    >>> next_serial([{"serial": 3}, {}])
    4
    """
    return min(1 + max((record.get("serial", 0) for record in records), default=0), _MOST - 1)


def _expect(
    place: Mapping[str, Any], name: str, check: _Check, expected: str, within: str = ""
) -> None:
    optional = name.endswith("?")
    name = name.removesuffix("?")
    if name not in place:
        if not optional:
            raise ValueError(f"{within}{name} is missing")
        return
    if not check(place[name]):
        raise ValueError(f"expected {within}{name} to be {expected}, got {_shown(place[name])}")


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected {what} to be values by name, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    # Python refuses to print an integer of very many digits, so a large one is described instead.
    text = str(value) if isinstance(value, int | float) and abs(value) < _MOST else ""
    text = text or (f"a number beyond {_MOST}" if isinstance(value, int) else repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


# Kinds of values


# By `type`, not `isinstance`: True and False are ints as well.
def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_one_or_more(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_whole(value: Any) -> bool:
    return type(value) is int and -2 * _MOST <= value < 4 * _MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_MOST < value < _MOST)


def _is_decay(value: Any) -> bool:
    return type(value) is float and 0 <= value < 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _SHA256_DIGITS


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_every(value: Any) -> bool:
    return isinstance(value, str) and value in get_args(ScheduleEvery)


def _is_rule(value: Any) -> bool:
    order, _, score = value.partition(" ") if isinstance(value, str) else ("", "", "")
    return order in ("highest", "lowest") and bool(score)


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _by_name(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _by_pass(check: _Check) -> _Check:
    return lambda value: _by_name(check)(value) and all(map(_is_number_of_pass, value))


def _is_number_of_pass(name: str) -> bool:
    return name.isdecimal() and len(name) < _MOST_DIGITS


def _is_pass(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and not value.keys() & _OF_A_GROUP and _is_value(value)


def _is_value(value: Any) -> bool:
    from_json(value)
    return True


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and _is_value(value)


_STORED: tuple[tuple[str, _Check, str], ...] = (
    ("step", _is_count, "a number of steps"),
    ("run", _is_text, "a text"),
    ("serial?", _is_count, "a whole number"),
    ("keep", _or_none(_is_one_or_more), "a number of 1 or more, or null"),
    ("best", _or_none(_is_rule), '"highest NAME", "lowest NAME" or null'),
    ("scores", _is_object, "numbers by name"),
    ("files", _is_object, "seals by name"),
)

_RUN: tuple[tuple[str, _Check, str], ...] = (
    ("epoch", _is_count, "a whole number"),
    ("seed", _is_whole, "a whole number"),
    ("shards", _is_one_or_more, "a number of 1 or more"),
    ("clip_norm", _or_none(_is_number), "a number or null"),
    ("clip_value?", _or_none(_is_number), "a number or null"),
    ("precision?", _or_none(lambda value: value in PRECISIONS), "a precision or null"),
    ("microbatch?", _or_none(_is_one_or_more), "a number of 1 or more, or null"),
    ("compile?", _is_truth, "true or false"),
    ("microbatch_trials?", _or_none(lambda value: value in (0, 1, 2)), "0, 1, 2 or null"),
    ("loss_scale", _is_number, "a number"),
    ("good_steps?", _is_count, "a whole number"),
    ("average?", _or_none(_is_object), "values by name, or null"),
    ("place?", lambda value: value in ("step", "end", None), "step, end or null"),
    ("trained?", _by_name(_list_of(_is_text)), "names of parameters for each loss"),
    ("fingerprint", _is_text, "a text"),
    ("threads", _is_one_or_more, "a number of 1 or more"),
    ("device", _is_text, "a text"),
    ("libraries", _is_object, "versions by name"),
    ("schedule", _or_none(_is_object), "values by name, or null"),
    ("optimizer", _is_object, "values by name"),
    ("position", _list_of(_is_object), "a list of loaders"),
    ("extra", lambda value: True, "anything"),
)

_OPTIMIZER: tuple[tuple[str, _Check, str], ...] = (
    ("class", _is_text, "a text"),
    ("parameters", _list_of(_list_of(_is_text)), "names for each group"),
    ("settings", _list_of(_is_settings), "settings for each group"),
    ("settings_at_start", _list_of(_is_object), "settings for each group"),
    ("tensors", _by_name(_list_of(_is_text)), "lists of keys by name"),
    ("other_state", _by_name(_is_state), "values by name"),
    ("strides?", _by_name(_list_of(_is_count)), "strides by name"),
)

_AVERAGE: tuple[tuple[str, _Check, str], ...] = (
    ("decay", _or_none(_is_decay), "a number from 0 to less than 1, or null"),
    ("every", _is_one_or_more, "a number of 1 or more"),
    ("after?", _is_text, "a text"),
    ("steps", _is_count, "a number of steps"),
)

_LOADER: tuple[tuple[str, _Check, str], ...] = (
    ("made_in_epoch", _or_none(_is_count), "a whole number or null"),
    ("number", _is_count, "a whole number"),
    ("loader?", _is_count, "a whole number"),
    ("samples", _is_count, "a whole number"),
    ("batch_size", _is_one_or_more, "a number of 1 or more"),
    ("drop_last", _is_truth, "true or false"),
    ("shuffle", _is_truth, "true or false"),
    ("lengths?", _is_text, "a text"),
    ("subset?", _is_text, "a text"),
    ("kind?", _is_text, "a text"),
    ("orders?", _by_pass(_is_text), "a text for each pass"),
    ("streams?", _by_pass(_is_object), "values for each pass"),
    ("first_pass", _is_count, "a whole number"),
    ("empty_passes", _is_count, "a whole number"),
    ("passes", _list_of(_is_pass), "pairs of a pass and its samples used"),
)

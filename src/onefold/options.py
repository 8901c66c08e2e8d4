"""Defines the options of ``onefold run`` and their environment variables, in one table.

``--save-every 10m`` and ``ONEFOLD_SAVE_EVERY=10m`` mean the same. ``onefold run`` reads both; the
command line takes precedence. Processes of other launchers, and processes without a launcher, read
the variables. `variables_of` writes options as variables for a process that joins a run.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from onefold.core.options import RunOptions
from onefold.errors import LaunchError
from onefold.system.caches import place_of_copy
from onefold.system.process import NOTICES, STOP_SIGNALS, TOOLS_VARIABLE
from onefold.system.safe_files import local_path
from onefold.system.words import seconds_of

__all__ = [
    "CLOUD_NAMES",
    "HEADINGS",
    "OF_OPTION",
    "OPTIONS",
    "RunOption",
    "describe",
    "options_of",
    "read_interval",
    "staged",
    "variable",
    "variables_of",
]


class RunOption(NamedTuple):
    """An option of ``onefold run``."""

    heading: str
    """Heading in the help; one of `HEADINGS`."""
    metavar: str
    help: str
    """One line for the help and the docs."""
    read: Callable[[str], Any]
    """Parses the text of the option; raises ValueError."""
    field: str = ""
    """Field of `RunOptions`; empty if it has the name of the option."""
    launches: bool = False
    """Whether only ``onefold run`` as a launcher uses it."""


def _folder(text: str) -> str:
    # Absolute, because the script may change its folder before the path is used.
    return os.path.abspath(local_path("a folder", text))


def _place(text: str) -> str:
    return text.rstrip("/") if "://" in text else _folder(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _hosts(text: str) -> tuple[str, ...]:
    """Read names, or a file with one name per line; # begins a comment."""
    names = text.split(",")
    if os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            names = [line.partition("#")[0] for line in file]
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise ValueError(f"expected names of hosts, but {text} has none")
    for name in names:
        if len(name.split()) > 1 or name.startswith("-"):
            raise ValueError(f"expected names of hosts, one per line of a file, but got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"hosts must differ, but got {', '.join(names)}")
    return tuple(names)


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(name.removeprefix("SIG") for name in text.replace(",", " ").split())
    known = [each.name.removeprefix("SIG") for each in (*STOP_SIGNALS, *NOTICES)]
    if not set(names) <= set(known):
        raise ValueError(f"choose from {', '.join(known)}")
    return names


def _notice(text: str) -> str:
    # A misspelled cloud must not become a file that never appears.
    if text in CLOUD_NAMES:
        return text
    if "/" not in text:
        raise ValueError(f"choose from {', '.join(CLOUD_NAMES)}, or a file with its folder: ./stop")
    return os.path.abspath(local_path("a notice file", text))


def read_interval(text: str) -> tuple[int, float]:
    """Read an interval between checkpoints: 200, 10m, or 200,10m for whichever ends first.

    Returns:
        Steps and seconds; one of them may be 0.

    Raises:
        ValueError: the text is neither a number of steps nor a time.

    >>> read_interval("500,1h")
    (500, 3600.0)
    """
    steps, seconds = 0, 0.0
    for part in text.split(","):
        if time_s := seconds_of(part):
            seconds = time_s
        elif part.isascii() and part.isdecimal() and int(part):
            steps = int(part)
        else:
            raise ValueError(
                "pass a number of steps (at least 1), a time such as 30s, 10m or 1h, or both, as "
                "in 500,1h"
            )
    return steps, seconds


CLOUD_NAMES = ("aws", "gcp", "azure")
"""Clouds whose metadata servers announce the end of an instance."""
_HELP_OF_PLACEMENT = RunOptions.__dataclass_fields__["placement"].metadata["help"]
_DEVICES, _STOP, _INSPECT = HEADINGS = ("Devices", "Stop and resume", "Inspect the run")
OPTIONS = {
    "placement": RunOption(_DEVICES, "KIND", _HELP_OF_PLACEMENT, str),
    "exchange": RunOption(_DEVICES, "auto|shared|collective", "Transport between devices.", str),
    "timeout": RunOption(
        _DEVICES,
        "SECONDS",
        "Timeout for waiting on another device.",
        float,
        field="timeout_s",
    ),
    "offload_dir": RunOption(
        _DEVICES, "DIR", "Folder on a disk, for the file of --placement offload.", _folder
    ),
    "hosts": RunOption(
        _DEVICES, "NAMES|FILE", "Hosts of the run, this one first.", _hosts, launches=True
    ),
    "via": RunOption(
        _DEVICES, "COMMAND", 'Command that reaches a host ("ssh {host}").', str, launches=True
    ),
    "checkpoint": RunOption(
        _STOP, "DIR|URL", "Resume from this folder's last checkpoint; save here.", _place
    ),
    "save_every": RunOption(
        _STOP,
        "N|TIME",
        "Checkpoint interval: steps, time, or both (500,1h).",
        read_interval,
    ),
    "keep_last": RunOption(_STOP, "N", "Number of recent checkpoints to keep.", int),
    "max_restarts": RunOption(
        _STOP, "N", "Maximum restarts without a new checkpoint.", int, launches=True
    ),
    "restart_devices": RunOption(
        _STOP,
        "same|fewer",
        "Devices of a restart; fewer drops a lost one.",
        str,
        launches=True,
    ),
    "grace_period": RunOption(
        _STOP, "SECONDS", "Time to save after a stop signal.", float, field="grace_period_s"
    ),
    "stop_signal": RunOption(
        _STOP,
        "NAMES",
        "Stop signals under another launcher (TERM,USR1).",
        _signals,
        field="stop_signals",
    ),
    "stop_notice": RunOption(
        _STOP, "FILE|aws|gcp|azure", "Stop if this file appears, or at a cloud's notice.", _notice
    ),
    "allow_changed": RunOption(
        _STOP, "NAMES", "Settings that may differ from the saved run, such as seed.", _names
    ),
    "record": RunOption(_INSPECT, "DIR", "Folder for the record of the run.", _folder),
    "logs": RunOption(
        _INSPECT,
        "DIR",
        "Folder for the other devices' output (device-1.log).",
        _folder,
        launches=True,
    ),
    "profile": RunOption(
        _INSPECT, "DIR", "Folder for a timeline, to open in Perfetto.", _folder, launches=True
    ),
    "audit": RunOption(
        _INSPECT, "FRACTION", "Fraction of shards to recompute on another device.", float
    ),
    "on_corruption": RunOption(
        _INSPECT, "heal|stop", "On a one-time wrong result: correct it, or stop.", str
    ),
}
"""All options, by their names in Python; each variable is ONEFOLD_ and the name in capitals."""
_DEFAULT = RunOptions()
_PREFIX = "ONEFOLD_"
_OTHERS = ("ONEFOLD_CONTEXT", TOOLS_VARIABLE, "ONEFOLD_SECRET")
_LIKE = 0.75
"""How similar a name must be to a known one to count as misspelled."""
_STOP_SIGNALS = ("TERM", "USR1", "USR2")
"""Not INT and HUP, which a terminal sends to every process, and which launchers repeat."""


def variable(name: str) -> str:
    """Return the variable of an option.

    >>> variable("save_every")
    'ONEFOLD_SAVE_EVERY'
    """
    return f"{_PREFIX}{name.upper()}"


def options_of(environment: Mapping[str, str]) -> RunOptions:
    """Read the options of a run from the environment.

    Raises:
        LaunchError: a value cannot be read, or a name is a known one misspelled.

    >>> options_of({"ONEFOLD_SAVE_EVERY": "10m"}).save_every_s
    600.0
    """
    _refuse_misspelled(environment)
    chosen: dict[str, Any] = {}
    given = []
    for name, option in OPTIONS.items():
        if text := environment.get(variable(name), ""):
            given.append(f"{variable(name)}={text!r}")
            try:
                value = option.read(text)
            except ValueError as error:
                raise LaunchError(f"{given[-1]} is not valid: {error}") from None
            chosen |= _as_fields(name, value)
    if chosen.get("checkpoint"):
        chosen.setdefault("stop_signals", _STOP_SIGNALS)
    try:
        return staged(RunOptions(**chosen), environment)
    except ValueError as error:
        raise LaunchError(f"{', '.join(given)} is not valid: {error}") from None


def staged(options: RunOptions, environment: Mapping[str, str]) -> RunOptions:
    """Replace a URL of object storage by the folder of its copy on this machine.

    Raises:
        LaunchError: a package for the URL is missing, or the folder cannot be used.
    """
    url = options.checkpoint
    if "://" not in url:
        return options
    try:
        import fsspec

        fsspec.get_filesystem_class(url.partition("://")[0])
        copy = place_of_copy(environment, url)
    except (ImportError, ValueError, OSError) as error:
        raise LaunchError(
            f"checkpoints cannot be kept in {url}: {error}. Object storage requires "
            f"onefold[storage] and the package of its protocol, such as s3fs or gcsfs, and a copy "
            f"on this machine in a folder that only you can write to, below XDG_CACHE_HOME"
        ) from error
    return replace(options, checkpoint=str(copy), remote=url)


def describe(options: RunOptions) -> dict[str, str]:
    """Describe the options, except defaults, that every process of another launcher must share.

    >>> describe(RunOptions(checkpoint="/tmp/run", audit=0.5))
    {'the option checkpoint': 'set', 'the option audit': '0.5'}
    """
    found = {}
    for name in RunOptions.__slots__:
        value = getattr(options, name)
        if name not in _OF_A_HOST and value != getattr(_DEFAULT, name):
            found[f"{OF_OPTION}{name}"] = "set" if name in _FOLDERS else str(value)
    return found


OF_OPTION = "the option "
"""Prefix of the names that `describe` gives."""
_FOLDERS = ("checkpoint", "record")
"""Fields that name a folder, which may differ between hosts, and that all processes need."""
_OF_A_HOST = {
    *("hosts", "logs", "max_restarts", "offload_dir", "placement", "profile", "program", "quiet"),
    *("restart_devices", "stop_notice", "stop_signals", "tools", "via"),
}
"""Fields that name places on a host or belong to its launcher; and the placement, which is
compared in any case."""


def _as_fields(name: str, value: Any) -> dict[str, Any]:
    if name == "save_every":
        return dict(zip(("save_every", "save_every_s"), value, strict=True))
    return {OPTIONS[name].field or name: value}


def variables_of(options: RunOptions) -> dict[str, str]:
    """Write options as variables, except those that have their default.

    >>> variables_of(RunOptions(save_every=0, save_every_s=90.0, audit=0.5))
    {'ONEFOLD_SAVE_EVERY': '90s', 'ONEFOLD_AUDIT': '0.5'}
    """
    found = {}
    for name, option in OPTIONS.items():
        field = option.field or name
        value = getattr(options, field)
        if name == "save_every":
            time = f"{options.save_every_s:.0f}s" if options.save_every_s else ""
            text = ",".join(filter(None, [str(value or ""), time]))
            same = (value, options.save_every_s) == (_DEFAULT.save_every, 0.0)
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            same = value == getattr(_DEFAULT, field)
        if not same:
            found[variable(name)] = text
    return found


def _refuse_misspelled(environment: Mapping[str, str]) -> None:
    known = [*_OTHERS, *map(variable, OPTIONS)]
    for name in environment:
        if name.startswith(_PREFIX) and name not in known:
            ends = [each.removeprefix(_PREFIX) for each in known]
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1, cutoff=_LIKE)
            if near:
                raise LaunchError(
                    f"the environment variable {name} is unknown. Set {_PREFIX}{near[0]} if you "
                    f"meant that one; otherwise unset {name}"
                )

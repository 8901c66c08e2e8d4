"""``onefold run``, and what the commands that run a script have in common.

Of the arguments of ``onefold run``, ``onefold verify`` and ``onefold plan``, only those before the
script, or before the module behind ``-m``, are the command's: everything behind belongs to the
script, whatever it is called. ``--`` may stand between the two.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from onefold import Outcome, RunOptions, Selection, select_devices, supervise
from onefold.cli import print_json, tell_next
from onefold.errors import LaunchError
from onefold.system.process import STOPPED_CODE
from onefold.system.words import in_shell, seconds_of, show_traceback, tell, visible

__all__ = [
    "DEFAULT_PLACEMENT",
    "SCRIPT",
    "AsJson",
    "Devices",
    "Exchange",
    "Module",
    "OffloadDir",
    "PlacementOption",
    "Script",
    "Timeout",
    "absolute_dir",
    "come_too_late",
    "command_of",
    "confirm",
    "run",
]

SCRIPT = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Settings of a command that ends at its first argument, and hands on all others."""
PLACEMENT_VARIABLE = "ONEFOLD_PLACEMENT"

_DEFAULTS = RunOptions()
DEFAULT_PLACEMENT = _DEFAULTS.placement
_HELP = {each.name: each.metadata.get("help", "") for each in fields(RunOptions)}
_OF_CHECKPOINTS = (
    "save_every",
    "keep_last",
    "grace_period",
    "allow_changed",
    "max_restarts",
    "restart_devices",
)
"""Options of ``onefold run`` that make no sense without ``--checkpoint``."""
_USAGE = 2
"""The exit code of a program that cannot use its arguments."""
_of_devices, _of_stopping, _of_watching = (
    partial(Option, rich_help_panel=heading)
    for heading in ("Devices", "Stop and resume", "Look into the run")
)
"""Options, each under the heading of its group."""

Script = Annotated[
    str | None,
    Argument(
        metavar="SCRIPT [ARGS]...",
        help="The script, or with -m the module. What follows it are its own arguments.",
    ),
]
Module = Annotated[
    bool,
    _of_devices("-m", help="Run a module instead of a script, as python -m does."),
]
Devices = Annotated[
    str,
    _of_devices(metavar="N|auto|LIST", help="N, auto, cpu:N, or GPUs such as cuda:1,cuda:3."),
]
PlacementOption = Annotated[
    str,
    _of_devices(
        envvar=PLACEMENT_VARIABLE,
        metavar="KIND",
        help=_HELP["placement"],
    ),
]
OffloadDir = Annotated[
    Path | None,
    _of_devices(
        metavar="DIR",
        help="Folder on a disk for the file of --placement offload.",
        show_default="TMPDIR",
    ),
]
Exchange = Annotated[
    str,
    _of_devices(metavar="auto|shared|collective", help="How devices exchange gradients."),
]
Timeout = Annotated[
    float,
    _of_devices(metavar="SECONDS", help="How long a device waits for another one."),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object; text goes to stderr.")]


def run(
    context: typer.Context,
    script: Script = None,
    devices: Devices = "auto",
    placement: PlacementOption = DEFAULT_PLACEMENT,
    module: Module = False,
    checkpoint: Annotated[
        Path | None,
        _of_stopping(
            metavar="DIR",
            help="Resume from the newest checkpoint in this folder, and write new ones.",
        ),
    ] = None,
    save_every: Annotated[
        str,
        _of_stopping(
            metavar="N|TIME",
            help="From one checkpoint to the next: steps, time, or both (200; 10m; 500,1h).",
        ),
    ] = str(_DEFAULTS.save_every),
    keep_last: Annotated[
        int,
        _of_stopping(metavar="N", help="How many of the newest checkpoints stay."),
    ] = _DEFAULTS.keep_last,
    max_restarts: Annotated[
        int,
        _of_stopping(
            metavar="N", help="Start again after at most so many crashes without progress."
        ),
    ] = _DEFAULTS.max_restarts,
    restart_devices: Annotated[
        Literal["same", "fewer"],
        _of_stopping(help="Devices of a restart: the same, or fewer, without one that was lost."),
    ] = _DEFAULTS.restart_devices,
    grace_period: Annotated[
        float,
        _of_stopping(metavar="SECONDS", help="Time for saving after a signal to stop."),
    ] = _DEFAULTS.grace_period_s,
    allow_changed: Annotated[
        str | None,
        _of_stopping(
            metavar="NAMES", help="What differs on purpose from the saved run, such as seed."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        _of_watching(
            metavar="DIR",
            help="Write the record of the run into this folder.",
            show_default="that of --checkpoint",
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        _of_watching(
            metavar="DIR",
            help="Keep the output of the other devices in this folder, as device-1.log.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        _of_watching(metavar="DIR", help="Write a timeline into this folder, to open in Perfetto."),
    ] = None,
    audit: Annotated[
        float,
        _of_watching(
            metavar="SHARE",
            help="Compute this share of all shards on another device as well, and compare.",
        ),
    ] = _DEFAULTS.audit,
    on_corruption: Annotated[
        Literal["heal", "stop"],
        _of_watching(help="After a result that was wrong once, go on with the right one, or stop."),
    ] = _DEFAULTS.on_corruption,
    as_json: Annotated[
        bool,
        _of_watching(
            "--json", help="Print how the run ended as a JSON object, in the last line of stdout."
        ),
    ] = False,
    exchange: Exchange = "auto",
    timeout: Timeout = _DEFAULTS.timeout_s,
    offload_dir: OffloadDir = None,
) -> None:
    """Run a script on the devices of this machine.

    With --checkpoint, the first SIGTERM, SIGHUP or Ctrl-C has the run save itself at the end of its
    step and exit with code 75; the same command resumes it. The second one ends it at once. SIGUSR1
    and SIGUSR2, by which cluster schedulers give notice, have it save itself as well.
    """
    # All that is wrong with the command is refused here, before any process is started.
    command = command_of(script, module, context.args)
    for folder in (profile, record):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    steps, seconds = _read_interval(save_every)
    if checkpoint is not None:
        if checkpoint.exists() and not checkpoint.is_dir():
            raise LaunchError(f"--checkpoint {checkpoint}: expected a folder, this is a file")
        checkpoint.mkdir(parents=True, exist_ok=True)
    elif given := [each for each in _OF_CHECKPOINTS if _is_given(context, each)]:
        named = ", ".join(f"--{each.replace('_', '-')}" for each in given)
        raise LaunchError(f"{named}: expected with --checkpoint, which names the directory")
    # Absolute paths: the script may change its folder before a worker uses them.
    options = RunOptions(
        placement=placement,
        offload_dir=absolute_dir(offload_dir, placement),
        exchange=exchange,  # type: ignore[arg-type]  # RunOptions checks it
        timeout_s=timeout,
        checkpoint=_absolute(checkpoint),
        save_every=steps,
        save_every_s=seconds,
        keep_last=keep_last,
        grace_period_s=grace_period,
        allow_changed=tuple(allow_changed.split(",")) if allow_changed else (),
        max_restarts=max_restarts,
        restart_devices=restart_devices,
        record=_absolute(record),
        profile=_absolute(profile),
        logs=_absolute(logs),
        audit=audit,
        on_corruption=on_corruption,
    )
    selection = select_devices(devices)
    outcome = supervise(command, selection, options)
    _tell_end(outcome)
    _tell_of_late_options(context, command, outcome)
    if as_json:
        print_json(_as_json(outcome, selection, options))
    else:
        _tell_what_is_next(outcome, command, options)
    raise typer.Exit(outcome.exit_code)


def come_too_late(given: Sequence[str], options: Collection[str]) -> list[str]:
    """List the words among a script's arguments that are options of the command.

    >>> come_too_late(["--lr", "0.1", "--devices=2"], {"--devices", "-m"})
    ['--devices']
    """
    words = [each.partition("=")[0] for each in given if each.startswith("-")]
    return [word for word in words if word in options]


def command_of(script: str | None, module: bool, rest: list[str]) -> list[str]:
    """Return what a worker has to run; a script must exist.

    Raises:
        LaunchError: there is no script of this name, or none was given.
    """
    if script is None:
        raise LaunchError("expected a script, or -m and the name of a module")
    if module:
        return ["-m", script, *(rest[1:] if rest[:1] == ["--"] else rest)]
    if not Path(script).is_file():
        raise LaunchError(
            f"there is no script {script}: expected the path of a Python file, from this folder "
            f"({Path.cwd()})"
        )
    return [script, *rest]


def absolute_dir(offload_dir: Path | None, placement: str) -> str:
    """The folder of ``--offload-dir``; empty if none is named."""
    if offload_dir is None:
        return ""
    kept = [RunOptions(placement=each.strip()) for each in placement.split(",")]
    if all(each.placement_kind.keeps_whole for each in kept):
        kept[0].check_combination(offload_dir=str(offload_dir))
    return _absolute(offload_dir)


def confirm(text: str) -> None:
    """Have the user agree to run code from a file.

    Raises:
        LaunchError: the user does not, or cannot be asked.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise LaunchError(
            f"{text} It would run as you: read it, and add --yes if you trust whoever made it"
        )
    if not typer.confirm(f"{visible(text)} It would run as you. Run it?", err=True):
        raise LaunchError("nothing was run")


def _absolute(path: Path | None) -> str:
    return str(path.absolute()) if path else ""


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_interval(text: str) -> tuple[int, float]:
    """Read how far apart checkpoints are: 200, 10m, or 200,10m for whichever comes first.

    Returns:
        Steps and seconds, of which one may be 0.

    Raises:
        LaunchError: it is neither a number of steps nor a time.
    """
    steps, seconds = 0, 0.0
    for part in text.split(","):
        if time_s := seconds_of(part):
            seconds = time_s
        elif part.isascii() and part.isdecimal() and int(part):
            steps = int(part)
        else:
            raise LaunchError(
                f"--save-every {text}: expected a number of steps of at least 1, a time such as "
                f"30s, 10m or 1h, or both as in 500,1h"
            )
    return steps, seconds


def _as_json(outcome: Outcome, selection: Selection, options: RunOptions) -> dict[str, Any]:
    return {
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "stopped_by": outcome.stopped_by.name if outcome.stopped_by else None,
        "devices": list(selection.devices),
        "step": outcome.step if outcome.exit_code and outcome.step >= 0 else None,
        "checkpoint": options.checkpoint or None,
        "record": options.record or options.checkpoint or None,
        "timeline": outcome.timeline or None,
        "logs": outcome.logs or None,
    }


def _tell_end(outcome: Outcome) -> None:
    """Report how a run ended; stdout is left to the script."""
    if outcome.timeline:
        tell(f"timeline: {outcome.timeline} (opens in ui.perfetto.dev)")
    if not outcome.exit_code:
        return
    show_traceback(outcome.traceback)
    tell(outcome.message)
    if outcome.logs:
        tell(f"output of the other devices: {outcome.logs}")


def _tell_what_is_next(outcome: Outcome, command: Sequence[str], options: RunOptions) -> None:
    record = options.record or options.checkpoint
    if outcome.exit_code == STOPPED_CODE:
        tell_next("the same command, which resumes the run")
    elif not outcome.exit_code and record:
        tell_next(f"onefold record show {in_shell(record)}")
    elif not outcome.exit_code:
        tell_next(f"onefold verify --devices 1,2 {in_shell(*command)}")


def _tell_of_late_options(context: typer.Context, command: list[str], outcome: Outcome) -> None:
    """Where a script has refused its arguments, say which of them are ours elsewhere."""
    # As argparse, click and typer end a program; an exception would have come with a traceback.
    if outcome.exit_code != _USAGE or outcome.traceback:
        return
    given = command[2:] if command[0] == "-m" else command[1:]
    own = {name for option in context.command.params for name in option.opts}
    late = come_too_late(given, own)
    if late:
        tell(
            f"what stands after the script is the script's: give {', '.join(late)} before it if "
            f"onefold run was meant"
        )

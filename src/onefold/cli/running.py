"""``onefold run``, and options that all commands that run a script share.

The arguments of ``onefold run``, ``onefold verify`` and ``onefold plan`` belong to the command only
before the script, or before the module of ``-m``. All later arguments belong to the script,
whatever their names. ``--`` may separate the two.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from onefold import Outcome, RunOptions, Selection, select_devices, supervise
from onefold.cli import print_json, tell_failure, tell_next
from onefold.errors import LaunchError
from onefold.options import (
    HEADINGS,
    OPTIONS,
    staged,
    variable,
)
from onefold.system.process import STOPPED_CODE
from onefold.system.words import in_shell, tell, visible

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
"""Settings of a command that stops parsing at its first argument, and passes the others on."""

_DEFAULTS = RunOptions()
DEFAULT_PLACEMENT = _DEFAULTS.placement
_OF_CHECKPOINTS = (
    "save_every",
    "keep_last",
    "grace_period",
    "allow_changed",
    "max_restarts",
    "restart_devices",
)
"""Options of ``onefold run`` that require ``--checkpoint``."""
_USAGE = 2
"""Exit code of a program that cannot use its arguments."""
_panel = partial(Option, rich_help_panel=HEADINGS[0])


def _option(name: str, **more: Any) -> Any:
    """Return an option of the table, which its variable sets as well."""
    option = OPTIONS[name]
    return Option(
        envvar=variable(name),
        show_envvar=False,
        metavar=option.metavar,
        help=option.help,
        rich_help_panel=option.heading,
        **more,
    )


Script = Annotated[
    str | None,
    Argument(
        metavar="SCRIPT [ARGS]...",
        help="Script, or module with -m. It receives all later arguments.",
    ),
]
Module = Annotated[
    bool,
    _panel("-m", help="Run a module instead of a script, as python -m does."),
]
Devices = Annotated[
    str,
    _panel(metavar="N|auto|LIST", help="N, auto, cpu:N, or GPUs such as cuda:1,cuda:3."),
]
PlacementOption = Annotated[str, _option("placement")]
OffloadDir = Annotated[Path | None, _option("offload_dir", show_default="TMPDIR")]
Exchange = Annotated[str, _option("exchange")]
Timeout = Annotated[float, _option("timeout")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object; text goes to stderr.")]


def run(
    context: typer.Context,
    script: Script = None,
    devices: Devices = "auto",
    placement: PlacementOption = DEFAULT_PLACEMENT,
    hosts: Annotated[str | None, _option("hosts")] = None,
    via: Annotated[str, _option("via")] = _DEFAULTS.via,
    module: Module = False,
    checkpoint: Annotated[str | None, _option("checkpoint")] = None,
    save_every: Annotated[str, _option("save_every")] = str(_DEFAULTS.save_every),
    keep_last: Annotated[int, _option("keep_last")] = _DEFAULTS.keep_last,
    max_restarts: Annotated[int, _option("max_restarts")] = _DEFAULTS.max_restarts,
    restart_devices: Annotated[
        Literal["same", "fewer"], _option("restart_devices")
    ] = _DEFAULTS.restart_devices,
    grace_period: Annotated[float, _option("grace_period")] = _DEFAULTS.grace_period_s,
    stop_notice: Annotated[str | None, _option("stop_notice")] = None,
    allow_changed: Annotated[str | None, _option("allow_changed")] = None,
    record: Annotated[
        Path | None, _option("record", show_default="the --checkpoint folder")
    ] = None,
    logs: Annotated[Path | None, _option("logs")] = None,
    profile: Annotated[Path | None, _option("profile")] = None,
    audit: Annotated[float, _option("audit")] = _DEFAULTS.audit,
    on_corruption: Annotated[
        Literal["heal", "stop"], _option("on_corruption")
    ] = _DEFAULTS.on_corruption,
    as_json: Annotated[
        bool,
        Option(
            "--json",
            rich_help_panel=HEADINGS[2],
            help="Print the outcome as JSON, in the last line of stdout.",
        ),
    ] = False,
    exchange: Exchange = "auto",
    timeout: Timeout = _DEFAULTS.timeout_s,
    offload_dir: OffloadDir = None,
) -> None:
    """Run a script on the devices of this machine, or of several hosts.

    Under torchrun or srun with several processes, this process becomes a device of their run,
    unless --devices is given. Every option can also be set by a variable: ONEFOLD_SAVE_EVERY for
    --save-every, and so on.

    With --checkpoint, the first SIGTERM, SIGHUP or Ctrl-C makes the run save itself at the end of
    its step and exit with code 75. The same command resumes it. A second signal ends the run at
    once. SIGUSR1 and SIGUSR2, which cluster schedulers send as notice, also make the run save
    itself and exit.
    """
    # Refuse every error in the command here, before any process starts.
    command = command_of(script, module, context.args)
    for folder in (profile, record):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    steps, seconds = _read("save_every", save_every)
    named = _read("hosts", hosts) if hosts else ()
    if checkpoint is not None:
        checkpoint = _place(checkpoint)
    elif given := [each for each in _OF_CHECKPOINTS if _is_given(context, each)]:
        words = ", ".join(f"--{each.replace('_', '-')}" for each in given)
        raise LaunchError(f"{words} requires --checkpoint DIR")
    # Absolute paths, because the script may change its folder before a worker uses them.
    options = RunOptions(
        placement=placement,
        offload_dir=absolute_dir(offload_dir, placement),
        exchange=exchange,  # type: ignore[arg-type]  # RunOptions checks it
        timeout_s=timeout,
        checkpoint=checkpoint or "",
        save_every=steps,
        save_every_s=seconds,
        keep_last=keep_last,
        grace_period_s=grace_period,
        saves=_saves_by_variable(),
        stop_notice=_read("stop_notice", stop_notice) if stop_notice else "",
        allow_changed=tuple(allow_changed.split(",")) if allow_changed else (),
        max_restarts=max_restarts,
        restart_devices=restart_devices,
        record=_absolute(record),
        profile=_absolute(profile),
        logs=_absolute(logs),
        audit=audit,
        on_corruption=on_corruption,
        hosts=named,
        via=via,
    )
    # Each of several hosts selects its own devices.
    selection = Selection((), choice=devices) if named else select_devices(devices)
    joins = not (named or _is_given(context, "devices"))
    outcome = supervise(command, selection, options, joins=joins)
    _tell_end(outcome)
    _tell_of_late_options(context, command, outcome)
    if as_json:
        print_json(_as_json(outcome, options))
    else:
        _tell_what_is_next(outcome, command, options)
    raise typer.Exit(outcome.exit_code)


def _read(name: str, text: str) -> Any:
    """Read the value of an option as its variable is read."""
    try:
        return OPTIONS[name].read(text)
    except ValueError as error:
        raise LaunchError(f"--{name.replace('_', '-')} {text} is not valid: {error}") from None


def _saves_by_variable() -> bool:
    """Whether a variable says that the script saves itself on signals, here on all of them."""
    name = variable("stop_signal")
    try:
        return bool(OPTIONS["stop_signal"].read(text := os.environ.get(name, "")))
    except ValueError as error:
        raise LaunchError(f"{name}={text!r} is not valid: {error}") from None


def come_too_late(given: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the words among a script's arguments that are options of the command.

    >>> come_too_late(["--lr", "0.1", "--devices=2"], {"--devices", "-m"})
    ['--devices']
    """
    words = [each.partition("=")[0] for each in given if each.startswith("-")]
    return [word for word in words if word in options]


def command_of(script: str | None, module: bool, rest: list[str]) -> list[str]:
    """Return the arguments of a worker; the script must exist.

    Raises:
        LaunchError: no script was given, or it does not exist.
    """
    if script is None:
        raise LaunchError("no script was given. Pass a script, or -m and the name of a module")
    if module:
        return ["-m", script, *(rest[1:] if rest[:1] == ["--"] else rest)]
    if not Path(script).is_file():
        raise LaunchError(
            f"script {script} does not exist. Pass the path of a Python file, relative to this "
            f"folder ({Path.cwd()})"
        )
    return [script, *rest]


def absolute_dir(offload_dir: Path | None, placement: str) -> str:
    """Return the absolute path of ``--offload-dir``; empty if it is not set."""
    if offload_dir is None:
        return ""
    kept = [RunOptions(placement=each.strip()) for each in placement.split(",")]
    if all(each.placement_kind.keeps_whole for each in kept):
        kept[0].check_combination(offload_dir=str(offload_dir))
    return _absolute(offload_dir)


def confirm(text: str) -> None:
    """Ask the user to agree to run code from a file.

    Raises:
        LaunchError: the user does not agree, or cannot be asked.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise LaunchError(
            f"{text} It would run as you. Read it, and pass --yes if you trust its author"
        )
    if not typer.confirm(f"{visible(text)} It would run as you. Run it?", err=True):
        raise LaunchError("you did not agree, so nothing was run")


def _place(text: str) -> str:
    """Return the URL of ``--checkpoint``, or the absolute path of its folder, which is created."""
    try:
        place: str = OPTIONS["checkpoint"].read(text)
    except ValueError as error:
        raise LaunchError(f"--checkpoint is not valid: {error}") from None
    if "://" not in place:
        folder = Path(place)
        if folder.exists() and not folder.is_dir():
            raise LaunchError(f"--checkpoint {text} must be a folder, but is a file")
        folder.mkdir(parents=True, exist_ok=True)
    return place


def _absolute(path: Path | None) -> str:
    return str(path.absolute()) if path else ""


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _as_json(outcome: Outcome, options: RunOptions) -> dict[str, Any]:
    return {
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "stopped_by": outcome.stopped_by.name if outcome.stopped_by else None,
        "devices": list(outcome.devices),
        "step": outcome.step if outcome.exit_code and outcome.step >= 0 else None,
        "checkpoint": options.checkpoint or None,
        "record": options.record or staged(options, os.environ).checkpoint or None,
        "timeline": outcome.timeline or None,
        "logs": outcome.logs or None,
    }


def _tell_end(outcome: Outcome) -> None:
    """Report how a run ended on stderr; stdout belongs to the script."""
    if outcome.timeline:
        tell(f"timeline: {outcome.timeline} (opens in ui.perfetto.dev)")
    if not outcome.exit_code:
        return
    tell_failure(outcome.message, outcome.traceback)
    if outcome.logs:
        tell(f"output of the other devices: {outcome.logs}")


def _tell_what_is_next(outcome: Outcome, command: Sequence[str], options: RunOptions) -> None:
    record = options.record or staged(options, os.environ).checkpoint
    if outcome.exit_code == STOPPED_CODE:
        tell_next("the same command, which resumes the run")
    elif not outcome.exit_code and record:
        tell_next(f"onefold record show {in_shell(record)}")
    elif not outcome.exit_code:
        tell_next(f"onefold verify --devices 1,2 {in_shell(*command)}")


def _tell_of_late_options(context: typer.Context, command: list[str], outcome: Outcome) -> None:
    """Explain options that the user placed after a script that rejected its arguments."""
    # argparse, click and typer exit like this; an exception would have come with a traceback.
    if outcome.exit_code != _USAGE or outcome.traceback:
        return
    given = command[2:] if command[0] == "-m" else command[1:]
    own = {name for option in context.command.params for name in option.opts}
    late = come_too_late(given, own)
    if late:
        tell(
            f"arguments after the script belong to the script. To pass {', '.join(late)} to "
            f"onefold run, put it before the script"
        )

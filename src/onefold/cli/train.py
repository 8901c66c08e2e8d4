"""``onefold train``: one command for each job, made from the fields of its options.

Note: commands that nobody wrote
--------------------------------
typer makes a command's options from the signature and the annotations of a function. Those are
built here from the fields of the job's options, so that an option, its help and its default stand
once, in the dataclass. Every parameter has the default None, which means that the option was not
given: only so can the command line take precedence over a config file, and can a resumed run be
compared with what was asked for. The defaults that the help shows are texts.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from onefold import is_launched, select_devices
from onefold.errors import LaunchError
from onefold.jobs.catalog import JOBS
from onefold.jobs.options import TrainOptions
from onefold.jobs.run import Job, read_options, run_job

__all__ = ["add_jobs"]

_WORDS = {"True": "yes", "False": "no"}
_COMMON = frozenset(field.name for field in dataclasses.fields(TrainOptions))


Config = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="TOML file of the same names as these options."),
]


def add_jobs(app: typer.Typer) -> None:
    """Add a command for each job to ``app``."""
    for job in JOBS:
        app.command(job.name, help=job.help)(_command(job))


def _command(job: Job) -> Callable[..., None]:
    """Make a function with one parameter for each option, as typer reads them."""

    def command(config: Path | None, **chosen: Any) -> None:
        # typer gives an empty list for a list that was not given. 0 and False were given.
        given = {name: _split(value) for name, value in chosen.items() if value not in (None, [])}
        options = read_options(job, given, config)
        _require_devices(options)
        result = run_job(job, options)
        if result["is_lead"]:
            _tell(result, Path(result["folder"]))

    # The fields hold their types as text, since their module postpones annotations.
    hints = typing.get_type_hints(job.options)
    # In the help, the options of the job come first, and then those of all jobs.
    fields = sorted(dataclasses.fields(job.options), key=lambda field: field.name in _COMMON)
    parameters = [_keyword("config", Config)]
    parameters += [_parameter(field, hints[field.name], job) for field in fields]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _require_devices(options: TrainOptions) -> None:
    """Refuse devices that do not exist, and more of them than there are shards.

    Raises:
        LaunchError, ValueError: a device does not exist, or there are more devices than shards.
    """
    # In a process of another launcher, that launcher has chosen them.
    if is_launched():
        return
    chosen = select_devices(options.devices)
    count = len(chosen.devices)
    # With --devices auto, those that find no shard may leave.
    if count > options.shards and not chosen.may_leave:
        raise LaunchError(
            f"--devices {options.devices}: {count} devices cannot share {options.shards} shards: a "
            f"shard is never divided. Use --devices {options.shards} or fewer, or --shards {count}"
        )


def _parameter(field: dataclasses.Field[Any], hint: Any, job: Job) -> inspect.Parameter:
    shown = field.metadata["shown"]
    default = _WORDS.get(str(field.default), str(field.default)) if shown is None else shown
    # Written by ourselves and escaped, as rich would take the brackets for a style.
    note = f" [default: {default}]" if default else ""
    described = typer.Option(
        help=escape(f"{field.metadata['help']}{note}"),
        envvar=field.metadata["variable"],
        rich_help_panel="Options of all jobs" if field.name in _COMMON else f"{job.name}",
    )
    return _keyword(field.name, Annotated[_asked(hint), described])


def _keyword(name: str, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _asked(hint: Any) -> Any:
    """The type of a parameter: that of its option, or None if it was not given."""
    # typer has no tuples of any length; a list may be given by naming the option several times.
    return (list[str] if typing.get_origin(hint) is tuple else hint) | None


def _split(value: Any) -> Any:
    """Split a list at commas, by which it may be given as well."""
    if not isinstance(value, list):
        return value
    return tuple(part for each in value for part in each.split(",") if part)


def _tell(result: dict[str, Any], folder: Path) -> None:
    """Print the result of a run: its best epoch, its fingerprint, its report."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    best = result["best"]
    if best:
        console.print(
            f"Best: {best['score']} {best['value']:.4f} after epoch {best['epoch'] + 1}, kept in "
            f"{folder / best['checkpoint']}"
        )
    console.print(f"Fingerprint: {result['fingerprint']}")
    none = f"No report, without matplotlib; later: onefold report {folder}"
    console.print(f"Report: {result['report']}" if result["report"] else none)

"""Opens the logger that ``--log`` names, in which a run's numbers are written besides its record.

Each library is set up as it is everywhere, by its own variables and files: where its server is, and
to which project or experiment a run belongs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onefold.errors import LaunchError
from onefold_jobs import require

__all__ = ["LoggerName", "OpenLogger", "open_logger", "require_logger"]

LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "none"]
_PROJECT = "onefold"
"""Of Trackio, which has no default of its own."""


@dataclass(frozen=True, slots=True)
class OpenLogger:
    """A logger that is open."""

    write: Callable[[dict[str, float], int], object]
    """Called with numbers by name, and the step that they belong to."""
    close: Callable[[], object]
    run_id: str = ""
    """By which the library finds the run again; empty where it goes by the folder or the name."""


def require_logger(name: LoggerName | None) -> None:
    """Refuse a logger whose library is not installed.

    Raises:
        LaunchError: it is not; the message has the command that installs it.
    """
    if name not in (None, "none"):
        extra = {"tensorboard": "report", "trackio": "trackio"}.get(name, "loggers")
        require(f"--log {name}", extra, name)


def open_logger(
    name: LoggerName, folder: Path, options: Mapping[str, Any], *, step: int, run_id: str = ""
) -> OpenLogger:
    """Open a logger, on the lead alone.

    Args:
        name: of the library.
        folder: of the run.
        options: of the run, which the library shows beside its numbers.
        step: the first that is written from here on.
        run_id: what the logger of this run had before, if the run resumes.

    Raises:
        LaunchError: the library refuses, for want of a login perhaps.
    """
    try:
        return _OPENERS[name](folder, dict(options), step, run_id)
    # Of another library, and perhaps its server: any error may come.
    except Exception as error:
        raise LaunchError(
            f"--log {name}: the logger cannot be opened: {error}; see to it, or leave --log out"
        ) from error


def _open_tensorboard(folder: Path, options: dict[str, Any], step: int, _: str) -> OpenLogger:
    from torch.utils.tensorboard import SummaryWriter

    # It drops earlier events from this step on: those of steps that are now done again.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return OpenLogger(write, writer.close)


def _open_wandb(folder: Path, options: dict[str, Any], step: int, run_id: str) -> OpenLogger:
    wandb: Any = importlib.import_module("wandb")
    where = {"name": folder.name, "dir": str(folder), "config": options}
    run = wandb.init(id=run_id or None, resume="allow", **where)
    return OpenLogger(lambda numbers, step: run.log(numbers, step=step), run.finish, run.id)


def _open_mlflow(folder: Path, options: dict[str, Any], step: int, run_id: str) -> OpenLogger:
    mlflow: Any = importlib.import_module("mlflow")
    run = mlflow.start_run(run_id=run_id or None, run_name=folder.name)
    # It refuses other values than those of before, and a resumed run may have more epochs.
    if not run_id:
        mlflow.log_params(options)
    write = lambda numbers, step: mlflow.log_metrics(numbers, step=step)  # noqa: E731
    return OpenLogger(write, mlflow.end_run, run.info.run_id)


def _open_trackio(folder: Path, options: dict[str, Any], step: int, _: str) -> OpenLogger:
    trackio: Any = importlib.import_module("trackio")
    trackio.init(project=_PROJECT, name=folder.name, config=options, resume="allow")
    return OpenLogger(lambda numbers, step: trackio.log(numbers, step=step), trackio.finish)


_OPENERS: Mapping[LoggerName, Callable[[Path, dict[str, Any], int, str], OpenLogger]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}

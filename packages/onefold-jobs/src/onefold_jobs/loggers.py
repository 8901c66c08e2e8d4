"""Opens the logger that ``--log`` names, which receives a run's metrics in addition to its record.

Each library is configured as usual, by its own environment variables and files: its server, and the
project or experiment of the run.
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
"""Project in Trackio, which has no default."""


@dataclass(frozen=True, slots=True)
class OpenLogger:
    """An open logger."""

    write: Callable[[dict[str, float], int], object]
    """Logs numbers by name for a step."""
    close: Callable[[], object]
    run_id: str = ""
    """ID by which the library finds the run again; empty if it uses the folder or the name."""


def require_logger(name: LoggerName | None) -> None:
    """Reject a logger whose library is not installed.

    Raises:
        LaunchError: the library is not installed; the message gives the install command.
    """
    if name not in (None, "none"):
        extra = {"tensorboard": "report", "trackio": "trackio"}.get(name, "loggers")
        require(f"--log {name}", extra, name)


def open_logger(
    name: LoggerName, folder: Path, options: Mapping[str, Any], *, step: int, run_id: str = ""
) -> OpenLogger:
    """Open a logger, on the lead only.

    Args:
        name: name of the library.
        folder: folder of the run.
        options: options of the run, which the library displays.
        step: first step to log.
        run_id: ID of the run in the logger before, if the run resumes.

    Raises:
        LaunchError: the library fails, for example because of a missing login.
    """
    try:
        return _OPENERS[name](folder, dict(options), step, run_id)
    # Another library, and perhaps its server, may raise anything.
    except Exception as error:
        raise LaunchError(
            f"--log {name}: cannot open the logger: {error}. Fix this, or leave out --log"
        ) from error


def _open_tensorboard(folder: Path, options: dict[str, Any], step: int, _: str) -> OpenLogger:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step drops earlier events from this step on, because these steps are repeated.
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
    # MLflow rejects changed parameters, and a resumed run may have more epochs.
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

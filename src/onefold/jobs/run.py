"""From options to a finished run: checks, starts the devices, and says how it ended."""

from __future__ import annotations

import errno
import importlib.util
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import onefold
from onefold.data.bad import visible
from onefold.data.scan import Scanning, read_scan
from onefold.errors import CheckpointError, DataError, LaunchError, PeerFailed, PeerLost, RunFailed
from onefold.jobs.options import (
    RUN_OPTIONS,
    TrainOptions,
    from_mapping,
    read_config,
)
from onefold.jobs.progress import ReadingBar
from onefold.jobs.runfolder import (
    CONFIG,
    RUN,
    SCAN,
    check_folder,
    next_name,
    read_run,
    require_room,
)
from onefold.jobs.training import Task, begin_training
from onefold.system.interrupt import STOP_SIGNALS, STOPPED_CODE, Stopped

__all__ = ["Job", "read_options", "run_job"]

_MAY_CHANGE = RUN_OPTIONS | {"cache", "dev", "labels_as_is"}
"""The same, with options of single jobs: where data lie, and what is refused of them."""
_GRACE_S = 60.0
"""How long a run may take to save itself when it is asked to stop."""
_STOPPED = frozenset({STOPPED_CODE, *(128 + number for number in STOP_SIGNALS)})
"""Exit codes of a run that somebody has stopped."""
_REFUSED = 2
_OUTER = frozenset({
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS,
})  # fmt: skip
"""What a disk or its owner refuses, whatever the program does."""


@dataclass(frozen=True, slots=True)
class Job:
    """A ready-made job."""

    name: str
    help: str
    """One line."""
    options: type[Any]
    """A kind of `TrainOptions`."""
    check_early: Callable[[Any], None]
    """Refuses options that can be known to fail before the data are read."""
    prepare: Callable[..., Any]
    """Reads the data, with a `Scanning`, and refuses before training what cannot be used."""
    settle: Callable[[Any, Any], Any]
    """Fills in options that were left to the data."""
    make_task: Callable[[Any, Any], Task]
    """Builds the model and the rest, on every device."""


def read_options(job: Job, given: dict[str, Any], config: Path | None) -> TrainOptions:
    """Options from a config file, what the command line gave, and what a run was begun with.

    Raises:
        ValueError: one of them is not right; ``--resume`` with another value than the run has.
        LaunchError: there is no such run, or one of that name.
    """
    values = read_config(config, job.name) if config else {}
    asked: TrainOptions = from_mapping(job.options, {**values, **given}, str(config or "options"))
    if not asked.data and not asked.resume:
        raise ValueError("--data: expected where the data are")
    if not asked.name:
        asked = replace(asked, name=next_name(Path(asked.runs), job.name))
    check_folder(asked.folder, resume=asked.resume)
    if not asked.resume:
        return asked
    source = asked.folder / CONFIG
    saved = read_config(source, job.name)
    named = {**values, **given}
    before: TrainOptions = from_mapping(job.options, saved, str(source))
    for field in fields(asked):
        now, then = getattr(asked, field.name), getattr(before, field.name)
        asked_for = field.name in named and now != "auto"
        if asked_for and field.name not in _MAY_CHANGE | {"name"} and now != then:
            raise ValueError(
                f"--{field.name.replace('_', '-')} {now}: the run {asked.name} was begun with "
                f"{then}, and --resume goes on with the same; a new --name begins another run"
            )
    kept = {**saved, **{name: value for name, value in named.items() if name in _MAY_CHANGE}}
    resumed: TrainOptions = from_mapping(job.options, {**kept, "resume": True}, str(source))
    return resumed


def run_job(job: Job, options: TrainOptions) -> dict[str, Any]:
    """Train on the devices that the options name.

    Returns:
        What ``run.json`` says in the end.

    Raises:
        DataError: the data cannot be used.
        LaunchError: a device or a library is not there.
        RunFailed: a device failed, or the run was stopped.
    """
    before = _said_before(options)
    _check_unfinished(options, before)
    require_room(options.folder)
    job.check_early(options)
    data = _read_data(job, options)
    for each in [*(f"left out: {bad}" for bad in data.left_out), *data.notes, *_without_report()]:
        print(f"onefold: {visible(each)}", file=sys.stderr)
    _check_same_data(options, before, data.digest)
    settled = job.settle(options, data)
    try:
        result: dict[str, Any] | Exception = onefold.launch(
            _train, devices=options.devices, args=(job, settled, data), grace_s=_GRACE_S
        )
    except RunFailed as failure:
        if failure.exit_code not in _STOPPED:
            raise
        where = "there" if failure.exit_code == STOPPED_CODE else "its last checkpoint"
        raise RunFailed(
            f"{failure}: onefold train {job.name} --runs {options.runs} --name {options.name} "
            f"--resume goes on from {where}",
            failure.exit_code,
        ) from None
    if isinstance(result, OSError):
        place = f"{result.filename}: " if result.filename else ""
        raise RunFailed(
            f"{options.folder}: the run cannot be written any more: {place}{result.strerror}. Once "
            f"that is mended, --runs {options.runs} --name {options.name} --resume goes on from "
            f"its last checkpoint",
            _REFUSED,
        )
    if isinstance(result, Exception):
        raise result
    report = _report(settled.folder) if result["is_lead"] else None
    return {**result, "folder": str(settled.folder), "report": report}


def _read_data(job: Job, options: TrainOptions) -> Any:
    """What `Job.prepare` makes of the data; files that the run has seen are not read again."""
    known = read_scan(options.folder / SCAN) if options.resume else {}
    try:
        with ReadingBar() as bar:
            return job.prepare(options, Scanning(known=known, watch=bar.watch))
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        stopped = "stopped while the data were read, before anything was trained or written"
        raise RunFailed(stopped, 128 + number) from None


def _without_report() -> list[str]:
    """What to mention if no report can be drawn."""
    if importlib.util.find_spec("matplotlib") is not None:
        return []
    note = (
        "there will be no report, as matplotlib is not installed here: after pip install "
        '"onefold[report]", onefold report makes it from the folder of the run'
    )
    return [note]


def _said_before(options: TrainOptions) -> dict[str, Any]:
    """What the run said that is to go on; nothing if it is new, or was stopped too early."""
    if options.resume and (options.folder / RUN).is_file():
        return read_run(options.folder)
    return {}


def _check_unfinished(options: TrainOptions, before: dict[str, Any]) -> None:
    if before.get("finished") and (options.epochs or 0) <= before.get("epochs", 0):
        raise LaunchError(
            f"{options.folder}: the run has finished its {before['epochs']} epochs; --resume with "
            f"more --epochs goes on with it"
        )


def _check_same_data(options: TrainOptions, before: dict[str, Any], digest: str) -> None:
    then = before.get("data", digest)
    if isinstance(then, str) and len(then) < len(digest):
        raise DataError(
            f"{options.data}: the run {options.name} was begun by a onefold that noted less of its "
            f"data, so nobody can tell whether these are the same. A new --name begins another "
            f"run; --pretrained {options.folder} begins it with these weights"
        )
    if then != digest:
        raise DataError(
            f"{options.data}: expected the data that the run {options.name} was begun with, these "
            f"are others (digest {digest}, then {then}): samples were added, left out, renamed "
            f"or changed, and a test set may now hold what was trained with. A new --name begins "
            f"another run; --pretrained {options.folder} begins it with these weights"
        )


def _report(folder: Path) -> str | None:
    """The run's report, or None where the library that draws it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from onefold.jobs.report import build_report

    return str(build_report(folder))


def _train(job: Job, options: TrainOptions, data: Any) -> dict[str, Any] | Exception:
    """On every device; what is no fault of the program comes back, and is no traceback.

    Options that do not suit the model, and a folder that cannot be written to from the beginning,
    come back alike from all devices. If the lead cannot write later, it comes back from there, and
    the other devices only notice that the lead has left.
    """
    try:
        task = job.make_task(options, data)
        training = begin_training(options, job.name, task)
    except (LaunchError, DataError, CheckpointError, ValueError, OSError) as error:
        return error
    try:
        return training.run()
    except LaunchError as error:
        return error
    except OSError as error:
        if training.is_lead and error.errno in _OUTER:
            return error
        raise
    except (PeerFailed, PeerLost) as error:
        if training.is_lead:
            raise
        return error

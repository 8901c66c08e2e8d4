"""Turns options into a finished run: checks everything, starts the devices, reports the end.

Note: errors that come back as values
-------------------------------------
What a device raises ends its process, and the launcher shows a traceback. That is right for a fault
of the program; a wrong option, a damaged file or a full disk deserves one line. So `_train` returns
such errors, and `run_job`, in the process of the command, raises them. An error that all devices
meet alike may be returned by all of them. One that only the lead meets may not: the others still
wait for it, and when it leaves they see a lost device, which they return in silence, as the lead's
result is the one that counts.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import onefold
from onefold.cli import counted, in_shell, tell
from onefold.errors import CheckpointError, DataError, LaunchError, PeerFailed, PeerLost, RunFailed
from onefold_jobs.data.files import left_out_notes
from onefold_jobs.data.layouts import refuse_other_layouts
from onefold_jobs.data.scan import Scanning, read_scan
from onefold_jobs.job import Job
from onefold_jobs.loggers import require_logger
from onefold_jobs.options import TrainOptions, from_mapping, read_config
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import (
    CONFIG,
    RUN,
    SCAN,
    check_folder,
    next_name,
    read_run,
    require_room,
)
from onefold_jobs.training import STOPPED_CODE, begin_training

__all__ = ["MAY_CHANGE", "read_options", "run_job"]

MAY_CHANGE = frozenset(
    {"data", "devices", "epochs", "log", "max_time", "name", "patience", "placement"}
    | {"resume", "runs", "save_every", "workers", "cache", "dev", "labels_as_is"}
)
"""Options that may change when a run resumes; the last three are those of single jobs. The data may
have moved: their digest is compared."""
_GRACE_S = 60.0
"""How many seconds a run may take to save itself when it is asked to stop."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers announce an end."""
_STOPPED = frozenset({STOPPED_CODE, *(128 + number for number in (*_STOP_SIGNALS, *_NOTICES))})
"""Exit codes of a run that somebody has stopped."""
_REFUSED = 2
_OUTER = frozenset({
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS,
})  # fmt: skip
"""Errors of a disk that is full, broken or not ours, and so no fault of the program."""


class _Before(TypedDict, total=False):
    """What a run that resumes takes apart of its ``run.json``."""

    epochs: int
    data: str
    ended: str | None
    stale: int


def read_options(job: Job, given: dict[str, Any], config: Path | None) -> TrainOptions:
    """Join the options of a config file, of the command line, and of the run that is resumed.

    Raises:
        ValueError: an option is not usable, or differs from the run that is to be resumed.
        LaunchError: the run to resume does not exist, or the new one does.
    """
    named = {**(read_config(config, job.name) if config else {}), **given}
    asked: TrainOptions = from_mapping(job.options, named, str(config or "options"))
    if not asked.data and not asked.resume:
        raise ValueError("--data: expected the folder or file of the data, got none")
    if not asked.name:
        asked = replace(asked, name=next_name(Path(asked.runs), job.name))
    check_folder(asked.folder, resume=asked.resume)
    if not asked.resume:
        return asked
    source = asked.folder / CONFIG
    saved = read_config(source, job.name)
    before: TrainOptions = from_mapping(job.options, saved, str(source))
    # Only options that were given are compared: the others have their defaults, which say nothing.
    for name in named:
        now, then = getattr(asked, name), getattr(before, name)
        # The saved options are settled: "auto" has become something else in them.
        if name not in MAY_CHANGE and now not in ("auto", then):
            raise ValueError(
                f"--{name.replace('_', '-')} {now}: the run {asked.name} was begun with {then}, "
                f"and --resume goes on with the same; a new --name begins another run"
            )
    kept = {**saved, **{name: value for name, value in named.items() if name in MAY_CHANGE}}
    # Of the folder that was named: what a file in it says of its own place may be another run's.
    kept |= {"resume": True, "runs": asked.runs, "name": asked.name}
    resumed: TrainOptions = from_mapping(job.options, kept, str(source))
    return resumed


def run_job(job: Job, options: TrainOptions) -> dict[str, Any]:
    """Train on the devices that the options name, and build the report.

    Returns:
        What ``run.json`` holds in the end, the folder, and the path of the report.

    Raises:
        DataError: the data cannot be used.
        LaunchError: a device or a library is missing.
        RunFailed: a device failed, or the run was stopped.
    """
    # In the order of what they cost: whatever can be refused at once is, before the data are read.
    _require_devices(options)
    begun = options.resume and (options.folder / RUN).is_file()
    before = read_run(options.folder, job.name, shape=_Before) if begun else {}
    _check_unfinished(options, before)
    refuse_other_layouts(Path(options.data), job.name, texts=job.sample == "text", masks=job.draws)
    require_room(options.folder)
    require_logger(options.log)
    job.check_early(options)
    data = _read_data(job, options)
    notes = [*left_out_notes(data.left_out), *data.notes]
    if data.own_test and options.holdout != TrainOptions.__dataclass_fields__["holdout"].default:
        notes.append(f"--holdout {options.holdout} is not used: the data have a test set")
    drawn = importlib.util.find_spec("matplotlib") is not None
    if not drawn:
        notes.append(
            "there will be no report, as matplotlib is not installed here: after pip install "
            '"onefold-jobs[report]", onefold report makes it from the folder of the run'
        )
    for note in notes:
        tell(note)
    _check_same_data(options, before, data.digest)
    settled = job.settle(options, data)
    # The devices are sent what was found here, so all of them have the same samples and labels.
    try:
        result: dict[str, Any] | Exception = onefold.launch(
            _train,
            devices=options.devices,
            placement=options.placement,
            offload_dir=_offload_dir(options),
            args=(job, settled, data),
            grace_period_s=_GRACE_S,
        )
    except RunFailed as failure:
        # Stopped, and not failed: the user must know how to continue. Only one exit code promises
        # that the run has been saved right there.
        if failure.exit_code not in _STOPPED:
            raise
        where = "there" if failure.exit_code == STOPPED_CODE else "its last checkpoint"
        raise RunFailed(
            f"{failure}: onefold train {job.name} --runs {in_shell(options.runs)} --name "
            f"{in_shell(options.name)} --resume goes on from {where}",
            failure.exit_code,
        ) from None
    if isinstance(result, OSError):
        place = f"{result.filename}: " if result.filename else ""
        raise RunFailed(
            f"{options.folder}: the run cannot be written any more: {place}{result.strerror}. Once "
            f"that is mended, --runs {in_shell(options.runs)} --name {in_shell(options.name)} "
            f"--resume goes on from its last checkpoint",
            _REFUSED,
        )
    if isinstance(result, Exception):
        raise result
    report = None
    # Under another launcher, such as torchrun, every process comes here, and one writes.
    if drawn and result["is_lead"]:
        from onefold_jobs.report import build_report

        with _unstoppable():
            report = str(build_report(settled.folder))
    return {**result, "folder": str(settled.folder), "report": report}


@contextmanager
def _unstoppable() -> Iterator[None]:
    """Ignore requests to stop: the run has ended, and its page takes a few seconds."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, signal.SIG_IGN) for each in _STOP_SIGNALS if in_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_data(job: Job, options: TrainOptions) -> Any:
    """Read the data; files that the run has seen before, unchanged, are not read again."""
    known = read_scan(options.folder / SCAN) if options.resume else {}
    try:
        with reading_bar() as watch:
            return job.prepare(options, Scanning(known=known, watch=watch))
    except KeyboardInterrupt as stop:
        # The command line raises a subclass with a number for SIGTERM and SIGHUP.
        number = getattr(stop, "number", signal.SIGINT)
        stopped = "stopped while the data were read, before anything was trained or written"
        raise RunFailed(stopped, 128 + number) from None


def _require_devices(options: TrainOptions) -> None:
    """Refuse devices that do not exist, and more of them than there are shards.

    Raises:
        LaunchError, ValueError: a device does not exist, or there are more devices than shards.
    """
    # In a process of another launcher, that launcher has chosen them.
    if onefold.is_launched():
        return
    chosen = onefold.select_devices(options.devices)
    count = len(chosen.devices)
    # With --devices auto, those that find no shard may leave.
    if count > options.shards and not chosen.may_leave:
        raise LaunchError(
            f"--devices {options.devices}: {count} devices cannot share "
            f"{counted(options.shards, 'shard')}: a shard is never divided. Use --devices "
            f"{options.shards} or fewer, or --shards {count}"
        )


def _offload_dir(options: TrainOptions) -> str:
    """Where the model lies if devices do not keep it: on the disk of the run, if that is known."""
    if onefold.RunOptions(placement=options.placement).placement_kind.keeps_whole:
        return ""
    # Nothing is made here: the lead makes the folder of the run once its lock is taken.
    return str(next(each for each in options.folder.absolute().parents if each.is_dir()))


def _check_unfinished(options: TrainOptions, before: dict[str, Any]) -> None:
    done, ended, stale = before.get("epochs", 0), before.get("ended"), before.get("stale", 0)
    if ended == "patience" and stale >= (options.patience or math.inf):
        raise LaunchError(
            f"{options.folder}: the run has ended by --patience {options.patience}; --resume with "
            f"a larger --patience goes on with it"
        )
    if before.get("finished") and not ended and (options.epochs or 0) <= done:
        raise LaunchError(
            f"{options.folder}: the run has finished {counted(done, 'epoch')}; --resume with more "
            f"--epochs goes on with it"
        )


def _check_same_data(options: TrainOptions, before: dict[str, Any], digest: str) -> None:
    then = before.get("data", digest)
    if then != digest:
        raise DataError(
            f"{options.data}: expected the data that the run {options.name} was begun with, these "
            f"are others (digest {digest}, then {then}): samples were added, left out, renamed "
            f"or changed, and a test set may now hold what was trained with. A new --name begins "
            f"another run; --pretrained {in_shell(options.folder)} begins it with these weights"
        )


def _train(job: Job, options: TrainOptions, data: Any) -> dict[str, Any] | Exception:
    """Train, on every device; return the result, or an error that needs no traceback."""
    # Here all devices fail alike: they build the same model from the same options and files.
    try:
        task = job.make_task(options, data)
        training = begin_training(options, job.name, task, data)
    except (LaunchError, DataError, CheckpointError, ValueError, OSError) as error:
        return error
    try:
        return training.run()
    except (CheckpointError, LaunchError) as error:
        # No checkpoint could be loaded, or the folder not be written to from the beginning, on
        # which all devices have agreed.
        return error
    except OSError as error:
        # The disk filled up, say. On another device it is something else, such as a broken socket.
        if training.trainer.is_lead and error.errno in _OUTER:
            return error
        raise
    except (PeerFailed, PeerLost) as error:
        # Perhaps only because the lead has returned its error; if not, the lead raises this, too.
        if training.trainer.is_lead:
            raise
        return error

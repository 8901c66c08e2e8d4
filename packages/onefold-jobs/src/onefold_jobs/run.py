"""Turns options into a finished run: checks everything, launches the devices, reports the end.

Note: errors that are returned
------------------------------
An exception on a device ends its process, and the launcher shows a traceback. That is right for a
bug, but a wrong option, a damaged file or a full disk deserves one line. So `_train` returns such
errors, and `run_job` raises them in the process of the command. If all devices meet an error, all
of them return it. If only the lead meets it, the other devices still wait for the lead: when it
exits, they see a lost device, and return that error, which is ignored because only the lead's
result counts.
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
from onefold.cli import counted, in_shell
from onefold.errors import CheckpointError, DataError, LaunchError, PeerFailed, PeerLost, RunFailed
from onefold_jobs.audience import Audience, audience, speaking_to, tell
from onefold_jobs.data.files import left_out_notes
from onefold_jobs.data.layouts import refuse_other_layouts
from onefold_jobs.data.scan import Scanning, read_scan, unpack_scan
from onefold_jobs.finetune import run_of
from onefold_jobs.job import Job
from onefold_jobs.loggers import require_logger
from onefold_jobs.options import TrainOptions, from_mapping, read_config
from onefold_jobs.progress import reading_bar
from onefold_jobs.range_test import with_rate
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

__all__ = [
    "MAY_CHANGE",
    "check_run",
    "read_data",
    "read_options",
    "resume_command",
    "run_job",
]

MAY_CHANGE = frozenset(
    {"data", "devices", "epochs", "log", "max_time", "name", "patience", "placement"}
    | {"resume", "runs", "save_every", "workers", "cache", "dev", "labels_as_is"}
)
"""Options that may change on a resume; the last three belong to single jobs. The data may have
moved, because their digest is compared."""
_GRACE_S = 60.0
"""Maximum time for saving after a request to stop, in seconds."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send as notice of an end."""
_STOPPED = frozenset({STOPPED_CODE, *(128 + number for number in (*_STOP_SIGNALS, *_NOTICES))})
"""Exit codes of a run that was stopped on request."""
_REFUSED = 2
_OUTER = frozenset({
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS,
})  # fmt: skip
"""Errors of a full, broken or read-only disk, which are not bugs of the program."""


class _Before(TypedDict, total=False):
    """The entries of ``run.json`` that a resume, or a run that starts from this one, needs."""

    epochs: int
    data: str
    ended: str | None
    stale: int
    train_samples: int


def read_options(job: Job, given: dict[str, Any], config: Path | None) -> TrainOptions:
    """Merge the options of a config file, the command line, and the run that is resumed.

    Raises:
        ValueError: an option is invalid, or differs from the run that is resumed.
        LaunchError: the run to resume does not exist, or the new run already exists.
    """
    named = {**(read_config(config, job.name) if config else {}), **given}
    asked: TrainOptions = from_mapping(job.options, named, str(config or "options"))
    if not asked.data and not asked.resume:
        raise ValueError("--data is missing: give the folder or file of the data")
    if not asked.name:
        asked = replace(asked, name=next_name(Path(asked.runs), job.name))
    check_folder(asked.folder, resume=asked.resume)
    if not asked.resume:
        return asked
    source = asked.folder / CONFIG
    saved = read_config(source, job.name)
    before: TrainOptions = from_mapping(job.options, saved, str(source))
    # Compare only given options: the others have defaults, which express no wish.
    for name in named:
        now, then = getattr(asked, name), getattr(before, name)
        # The saved options are filled in: "auto" is replaced by a value in them.
        if name not in MAY_CHANGE and now not in ("auto", then):
            raise ValueError(
                f"--{name.replace('_', '-')} {now}: the run {asked.name} was started with {then}, "
                f"and --resume cannot change it; start another run with a new --name"
            )
    kept = {**saved, **{name: value for name, value in named.items() if name in MAY_CHANGE}}
    # Use the folder that the user named: a copied file may contain the place of another run.
    kept |= {"resume": True, "runs": asked.runs, "name": asked.name}
    resumed: TrainOptions = from_mapping(job.options, kept, str(source))
    return resumed


def check_run(job: Job, options: TrainOptions) -> dict[str, Any]:
    """Reject everything that can be rejected before the data are read.

    Returns:
        Entries of the ``run.json`` of a run that is resumed; empty for a new run.

    Raises:
        LaunchError: a device does not exist, or a library is not installed.
        OnefoldError, OSError, ValueError: an option or the run's folder cannot be used.
    """
    # Ordered by cost.
    _require_devices(options)
    begun = options.resume and (options.folder / RUN).is_file()
    before = read_run(options.folder, job.name, shape=_Before) if begun else {}
    _check_unfinished(options, before)
    refuse_other_layouts(Path(options.data), job.name, texts=job.sample == "text", masks=job.draws)
    require_room(options.folder)
    require_logger(options.log)
    job.check_early(options)
    return before


def run_job(job: Job, options: TrainOptions, resumed_by: str = "") -> dict[str, Any]:
    """Train on the devices that the options name, and build the report.

    Args:
        job: the job.
        options: options of the run.
        resumed_by: command that resumes the run, for errors; empty for ``onefold train`` itself.

    Returns:
        Final content of ``run.json``, the folder, and the path of the report.

    Raises:
        DataError: the data cannot be used.
        LaunchError: a device does not exist, or a library is not installed.
        RunFailed: a device failed, or the run was stopped.
    """
    before = check_run(job, options)
    data = read_data(job, options)
    if data.own_test and options.holdout != TrainOptions.__dataclass_fields__["holdout"].default:
        unused = f"--holdout {options.holdout} is not used, because the data have a test set"
        data = replace(data, notes=[*data.notes, unused])
    data = replace(data, notes=[*data.notes, *_seen_by_pretrained(options, data)])
    notes = [*left_out_notes(data.left_out), *data.notes]
    drawn = importlib.util.find_spec("matplotlib") is not None
    if not drawn:
        notes.append(
            "no report will be written, because matplotlib is not installed: after pip install "
            '"onefold-jobs[report]", write it with onefold report'
        )
    for note in notes:
        tell(note)
    _check_same_data(options, before, data.digest)
    settled = job.settle(options, data)
    resume = resumed_by or resume_command("train", job, options)
    # The devices receive the results of this process, so all have the same samples and labels.
    try:
        result: dict[str, Any] | Exception = onefold.launch(
            _train,
            devices=options.devices,
            placement=options.placement,
            offload_dir=_offload_dir(options),
            args=(job, settled, data, audience()),
            grace_period_s=_GRACE_S,
        )
    except RunFailed as failure:
        # Stopped on request, not failed: tell the user how to continue. Only one exit code
        # guarantees that the run was saved at this very step.
        if failure.exit_code not in _STOPPED:
            raise
        if not (options.folder / CONFIG).is_file():
            words = f"{failure}: nothing was trained or written"
            raise RunFailed(words, failure.exit_code) from None
        where = "there" if failure.exit_code == STOPPED_CODE else "its last checkpoint"
        words = f"{failure}: {resume} continues from {where}"
        raise RunFailed(words, failure.exit_code) from None
    if isinstance(result, OSError):
        place = f"{result.filename}: " if result.filename else ""
        raise RunFailed(
            f"{options.folder}: cannot write the run: {place}{result.strerror}. Fix this, and then "
            f"continue from the last checkpoint: {resume}",
            _REFUSED,
        )
    if isinstance(result, Exception):
        raise result
    report = None
    # Under another launcher, such as torchrun, every process gets here, but only one writes.
    if drawn and result["is_lead"]:
        from onefold_jobs.report import build_report

        with _unstoppable():
            report = str(build_report(settled.folder))
    return {**result, "folder": str(settled.folder), "report": report}


def _seen_by_pretrained(options: TrainOptions, data: Any) -> list[str]:
    """Report test images that the run of ``--pretrained`` was trained on."""
    run = run_of(getattr(options, "pretrained", None))
    if run is None or not data.scan:
        return []
    scans = read_scan(run / SCAN), unpack_scan(data.scan)
    # The training set is the first part of both scans.
    before, now = ([x.content for x in scan.values() if x.kind == "picture"] for scan in scans)
    trained = {*before[: read_run(run, shape=_Before).get("train_samples")]} - {""}
    tested = now[len(data.train) :]
    seen = sum(content in trained for content in tested)
    note = (
        f"{seen:,} of {counted(len(tested), 'test image')} are in the training set of {run}, so "
        f"the score is better than on new images: use the --holdout and --seed of that run, or "
        f"test images that it was not trained on"
    )
    return [note] if seen else []


def resume_command(command: str, job: Job, options: TrainOptions) -> str:
    """Return the command that resumes what the options name; for a function, the call."""
    if audience().options is not None:
        place = f"runs={options.runs!r}, name={options.name!r}, resume=True"
        return f"onefold_jobs.{job.name}(data={options.data!r}, {place})"
    place = f"--runs {in_shell(options.runs)} --name {in_shell(options.name)}"
    return f"onefold {command} {job.name} {place} --resume"


@contextmanager
def _unstoppable() -> Iterator[None]:
    """Ignore stop signals: the run has ended, and its report takes a few seconds."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, signal.SIG_IGN) for each in _STOP_SIGNALS if in_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_data(job: Job, options: TrainOptions) -> Any:
    """Read the data. Unchanged files that the run, or others of its series, scanned are skipped.

    Raises:
        DataError: the data cannot be used.
        RunFailed: a signal stopped the reading.
    """
    # A folder of several runs has their scan; see `onefold_jobs.series`.
    known = read_scan(options.folder / SCAN) or read_scan(options.folder.parent / SCAN)
    try:
        with reading_bar() as watch:
            return job.prepare(options, Scanning(known=known, watch=watch))
    except KeyboardInterrupt as stop:
        # For SIGTERM and SIGHUP, the command line raises a subclass with the signal number.
        number = getattr(stop, "number", signal.SIGINT)
        stopped = "stopped while reading the data; nothing was trained or written"
        raise RunFailed(stopped, 128 + number) from None


def _require_devices(options: TrainOptions) -> None:
    """Reject devices that do not exist, or more devices than shards.

    Raises:
        LaunchError, ValueError: a device does not exist, or there are more devices than shards.
    """
    # Under another launcher, that launcher chose the devices.
    if onefold.is_launched():
        return
    chosen = onefold.select_devices(options.devices)
    count = len(chosen.devices)
    # The value auto leaves out devices without a shard.
    if count > options.shards and not chosen.may_leave:
        raise LaunchError(
            f"--devices {options.devices}: {count} devices cannot share "
            f"{counted(options.shards, 'shard')}, because a shard is never split. Use --devices "
            f"{options.shards} or fewer, or --shards {count}"
        )


def _offload_dir(options: TrainOptions) -> str:
    """Return the folder for offloaded state: on the disk of the run, or unset."""
    if onefold.RunOptions(placement=options.placement).placement_kind.keeps_whole:
        return ""
    # Do not create anything here: the lead creates the run's folder once it holds the lock.
    return str(next(each for each in options.folder.absolute().parents if each.is_dir()))


def _check_unfinished(options: TrainOptions, before: dict[str, Any]) -> None:
    done, ended, stale = before.get("epochs", 0), before.get("ended"), before.get("stale", 0)
    if ended == "patience" and stale >= (options.patience or math.inf):
        raise LaunchError(
            f"{options.folder}: the run was ended by --patience {options.patience}; continue it "
            f"with --resume and a larger --patience"
        )
    if before.get("finished") and not ended and (options.epochs or 0) <= done:
        raise LaunchError(
            f"{options.folder}: the run has finished {counted(done, 'epoch')}; continue it with "
            f"--resume and more --epochs"
        )


def _check_same_data(options: TrainOptions, before: dict[str, Any], digest: str) -> None:
    then = before.get("data", digest)
    if then != digest:
        raise DataError(
            f"{options.data}: the data differ from those that the run {options.name} was started "
            f"with (digest {digest}, before {then}): samples were added, left out, renamed or "
            f"changed, and the test set may now contain training samples. Start another run with a "
            f"new --name; --pretrained {in_shell(options.folder)} starts it from these weights"
        )


def _train(
    job: Job, options: TrainOptions, data: Any, reader: Audience
) -> dict[str, Any] | Exception:
    """Train on every device; return the result, or an error that needs no traceback."""
    with speaking_to(reader):
        return _trained(job, options, data)


def _trained(job: Job, options: TrainOptions, data: Any) -> dict[str, Any] | Exception:
    # All devices fail the same way here: they build the same model from the same options and files.
    try:
        options, task = with_rate(options, job.make_task(options, data))
        training = begin_training(options, job.name, task, data)
    except (LaunchError, DataError, CheckpointError, ValueError, OSError) as error:
        return error
    try:
        return training.run()
    except (CheckpointError, LaunchError) as error:
        # No checkpoint could be loaded, or the folder was not writable from the beginning; all
        # devices agreed on this error.
        return error
    except OSError as error:
        # Such as a full disk. On other devices, it is something else, such as a broken socket.
        if training.trainer.is_lead and error.errno in _OUTER:
            return error
        raise
    except (PeerFailed, PeerLost) as error:
        # Probably the lead returned its own error. If not, the lead raises this error, too.
        if training.trainer.is_lead:
            raise
        return error

"""The ready-made jobs by name, for the command line, and as functions, for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onefold.errors import DataError
from onefold_jobs.classify_use import CLASSIFY
from onefold_jobs.job import Job
from onefold_jobs.report.folder import read_run
from onefold_jobs.run import read_options, run_job
from onefold_jobs.runfolder import read_run as read_facts
from onefold_jobs.segment_use import SEGMENT
from onefold_jobs.text_use import TEXT

__all__ = ["JOBS", "JobResult", "classify", "job_of", "segment", "text"]

JOBS = (CLASSIFY, SEGMENT, TEXT)


def job_of(run: Path) -> Job:
    """Find the job that made a run.

    Raises:
        DataError: the folder is not that of a run, or no job has its name.
    """
    name = read_facts(run).get("job")
    for job in JOBS:
        if job.name == name:
            return job
    known = ", ".join(each.name for each in JOBS)
    raise DataError(f"{run}: expected a run of {known}, got {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a job. ``onefold_jobs.load_run(result.folder)`` has its model.

    Example:
        >>> result = JobResult(folder=Path("runs/a"), epoch=3, scores={"accuracy": 0.9})
        >>> result.folder, result.scores["accuracy"]
        (PosixPath('runs/a'), 0.9)
    """

    folder: Path
    """Of the run: checkpoints, record, report."""
    epoch: int | None
    """The best epoch, counted from 0; None if none was evaluated."""
    scores: dict[str, float]
    """Of the test set, by name, after that epoch."""
    report: Path | None = None
    """A page that a browser shows; None where matplotlib is not installed."""


def classify(*, data: str | Path, devices: int | str = "auto", **options: Any) -> JobResult:
    """Train on pictures with one label each, as ``onefold train classify`` does.

    Args:
        data: a folder with class folders, or what else that command takes.
        devices: how many devices of this machine, or which.
        options: those of the command, which ``onefold train classify --help`` and docs/do/jobs.md
            list: ``batch_size=32`` for ``--batch-size 32``. A list such as
            ``freeze=["layer1", "layer2"]`` may also be a text, ``freeze="layer1,layer2"``.

    Raises:
        ValueError: there is no such option, or it has a value that it cannot have.
        OnefoldError: as the command ends with; the message says what to do.

    Example:
        >>> import tempfile
        >>> small = {"model": "lenet", "epochs": 1, "runs": tempfile.mkdtemp(), "name": "a"}
        >>> result = onefold_jobs.classify(data="digits", devices=1, **small)
        >>> result.folder.name, sorted(result.scores)[:2]
        ('a', ['accuracy', 'balanced-accuracy'])
    """
    return _run("classify", data, devices, options)


def segment(*, data: str | Path, devices: int | str = "auto", **options: Any) -> JobResult:
    """Train on pictures with a mask each, as ``onefold train segment`` does.

    Args, Raises: as `classify`.

    Example:
        >>> onefold_jobs.segment(data="no such folder")
        Traceback (most recent call last):
            ...
        onefold.errors.DataError: ...
    """
    return _run("segment", data, devices, options)


def text(*, data: str | Path, devices: int | str = "auto", **options: Any) -> JobResult:
    """Train on texts with one label each, as ``onefold train text`` does.

    Args, Raises: as `classify`.

    Example:
        >>> onefold_jobs.text(data="reviews", mixup=0.2)
        Traceback (most recent call last):
            ...
        ValueError: options: there is no option mixup in onefold_jobs.text: ...
    """
    return _run("text", data, devices, options)


def _run(name: str, data: str | Path, devices: int | str, options: dict[str, Any]) -> JobResult:
    job, *others = sorted(JOBS, key=lambda each: each.name != name)
    for option in (each for each in options if each not in job.options.__dataclass_fields__):
        have = [each.name for each in others if option in each.options.__dataclass_fields__]
        if have:
            where = " and ".join(f"onefold_jobs.{each}" for each in have)
            words = f"there is no option {option} in onefold_jobs.{name}: it is one of {where}"
            raise ValueError(f"options: {words}")
    given = {"data": data, "devices": str(devices), **options}
    # Options are text and numbers, as in a file of them.
    plain = {
        each: str(value) if isinstance(value, Path) else value for each, value in given.items()
    }
    result = run_job(job, read_options(job, plain, None))
    folder, best = Path(result["folder"]), result["best"]
    epochs = {line.epoch: line.scores for line in read_run(folder).epochs}
    return JobResult(
        folder=folder,
        epoch=best["epoch"] if best else None,
        scores=epochs[best["epoch"]] if best else {},
        report=Path(result["report"]) if result["report"] else None,
    )

"""The ready-made jobs: by name for the command line, and as functions for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

import onefold
from onefold.cli import Screen
from onefold.errors import DataError, OnefoldError
from onefold.integrations.ipython import as_table
from onefold.weights import check_weights
from onefold_jobs.audience import Audience, speaking_to, spelled
from onefold_jobs.classify_job import CLASSIFY
from onefold_jobs.finetune import chosen_checkpoint, load_finite
from onefold_jobs.job import Batch, Job
from onefold_jobs.options import TrainOptions
from onefold_jobs.report.folder import read_reported
from onefold_jobs.run import read_options, run_job
from onefold_jobs.runfolder import read_run
from onefold_jobs.segment_job import SEGMENT
from onefold_jobs.series import cross_validate
from onefold_jobs.text_job import TEXT

__all__ = ["JOBS", "JobResult", "LoadedRun", "classify", "job_of", "load_run", "segment", "text"]

JOBS = (CLASSIFY, SEGMENT, TEXT)


def job_of(run: Path) -> Job:
    """Find the job that made a run.

    Raises:
        DataError: the folder is not a run's folder, or no job has the recorded name.
    """
    name = read_run(run).get("job")
    for job in JOBS:
        if job.name == name:
            return job
    known = ", ".join(each.name for each in JOBS)
    raise DataError(f"{run}: expected a run of {known}, got {name}")


@as_table("folder", "epoch", "scores", "report")
@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of a job. ``onefold_jobs.load_run(result.folder)`` loads its model.

    Example:
        >>> result = JobResult(folder=Path("runs/a"), epoch=3, scores={"accuracy": 0.9})
        >>> result.folder, result.scores["accuracy"]
        (PosixPath('runs/a'), 0.9)
    """

    folder: Path
    """Folder of the run, with its checkpoints, record and report."""
    epoch: int | None
    """Best epoch, counted from 1; None if no epoch was evaluated, and for several folds."""
    scores: dict[str, float]
    """Test scores after that epoch, by name; with ``folds``, their means."""
    report: Path | None = None
    """HTML report; None if matplotlib is not installed."""


def classify(*, data: str | Path, devices: int | str = "auto", **options: Any) -> JobResult:
    """Train on images with one label each, like ``onefold train classify``.

    Args:
        data: a folder of class folders, or any other data that the command accepts.
        devices: number of devices of this machine, or a list of devices.
        options: options of the command, as ``onefold train classify --help`` and
            https://onefold.example/do/jobs-options.html list them: ``batch_size=32`` for
            ``--batch-size 32``. A list such as
            ``freeze=["layer1", "layer2"]`` can also be given as ``freeze="layer1,layer2"``.

    Raises:
        ValueError: an option does not exist or has an invalid value.
        OnefoldError: any error of the command. The message explains what to do.

    Example:
        >>> import tempfile
        >>> small = {"model": "lenet", "epochs": 1, "runs": tempfile.mkdtemp(), "name": "a"}
        >>> result = onefold_jobs.classify(data="digits", devices=1, **small)
        >>> result.folder.name, sorted(result.scores)[:2]
        ('a', ['accuracy', 'balanced-accuracy'])
    """
    return _run("classify", data, devices, options)


def segment(*, data: str | Path, devices: int | str = "auto", **options: Any) -> JobResult:
    """Train on images with one mask each, like ``onefold train segment``.

    Args and Raises: see `classify`.

    Example:
        >>> onefold_jobs.segment(data="no such folder")
        Traceback (most recent call last):
            ...
        onefold.errors.DataError: ...
    """
    return _run("segment", data, devices, options)


def text(*, data: str | Path, devices: int | str = "auto", **options: Any) -> JobResult:
    """Train on texts with one label each, like ``onefold train text``.

    Args and Raises: see `classify`.

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
            words = f"there is no option {option} in onefold_jobs.{name}: it belongs to {where}"
            raise ValueError(f"options: {words}")
    given = {"data": data, "devices": devices, **options}
    with speaking_to(Audience(options=job.options, notebook=Screen().is_jupyter)):
        try:
            return _result(job, read_options(job, given, None))
        except (OnefoldError, ValueError) as error:
            error.args = tuple(spelled(a) if isinstance(a, str) else a for a in error.args)
            raise


def _result(job: Job, asked: TrainOptions) -> JobResult:
    if asked.fold and not asked.fold.number:
        found = cross_validate(job, asked)
        return JobResult(
            folder=found.folder, epoch=None, scores=dict(found.scores), report=found.report
        )
    result = run_job(job, asked)
    folder, best = Path(result["folder"]), result["best"]
    epochs = {line.epoch: line.scores for line in read_reported(folder).epochs}
    return JobResult(
        folder=folder,
        epoch=best["epoch"] if best else None,
        scores=epochs[best["epoch"]] if best else {},
        report=Path(result["report"]) if result["report"] else None,
    )


@as_table("job", "classes", "weights")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A trained run, loaded for use in a program; see `load_run`."""

    job: str
    """``classify``, ``segment`` or ``text``."""
    module: nn.Module
    """The model in evaluation mode, on the CPU. It takes the result of ``preprocess`` and returns
    logits: (n, classes) float32, or (n, 1 or classes, h, w) for masks. A regression model returns
    (n, 1) float32, standardized by the mean and deviation in ``description["target"]``."""
    preprocess: Callable[[Sequence[Any]], Batch]
    """Makes a batch from a list of texts, or of images: paths, Pillow images, or arrays (h, w) or
    (h, w, 3) uint8, or (h, w) uint16. Each input is prepared separately, as in training without
    augmentation. For masks, images are padded on the right and at the bottom to a common size."""
    classes: tuple[str, ...]
    """Class names in the order of the logits; empty for regression and for foreground masks."""
    weights: Path
    """Folder of the checkpoint."""
    description: dict[str, object] = field(repr=False)
    """Description of model, classes and preprocessing, for programs without onefold."""


def load_run(folder: str | Path, *, weights: Literal["best", "last"] = "best") -> LoadedRun:
    """Load a run of ``onefold train``.

    Args:
        folder: folder of the run.
        weights: whether to load the best checkpoint or the last one.

    Raises:
        DataError: the folder is not a run's folder, or is damaged.
        CheckpointError: the run has no weights yet, or they are damaged or not finite.
        LaunchError: a library that reads the run's inputs is not installed.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> small = {"model": "lenet", "epochs": 1, "runs": tempfile.mkdtemp()}
        >>> result = onefold_jobs.classify(data="digits", devices=1, **small)
        >>> run = onefold_jobs.load_run(result.folder)
        >>> batch = run.preprocess([Image.new("L", (8, 8)), Image.new("L", (9, 7))])
        >>> run.module(**batch).softmax(dim=1).shape
        torch.Size([2, 10])
    """
    path = Path(folder)
    job = job_of(path)
    checkpoint = chosen_checkpoint(path, weights)
    check_weights(checkpoint)
    loaded = job.load(path)
    load_finite(loaded.model, checkpoint)
    loaded.module.requires_grad_(False).eval()
    common = {"onefold": onefold.__version__, "job": job.name, "model": read_run(path).get("model")}
    return LoadedRun(
        job=job.name,
        module=loaded.module,
        preprocess=partial(_preprocessed, loaded.preprocess),
        classes=tuple(loaded.description.get("classes", ())),
        weights=checkpoint,
        description={**common, **loaded.description},
    )


def _preprocessed(preprocess: Callable[[Sequence[Any]], Batch], inputs: Iterable[Any]) -> Batch:
    """Make a batch from a list of inputs. A plain string would be read letter by letter."""
    if isinstance(inputs, str | Path | np.ndarray) or not isinstance(inputs, Iterable):
        raise TypeError(f"preprocess: expected a list of inputs, got {type(inputs).__name__}")
    if not (several := [*inputs]):
        raise ValueError("preprocess: the list of inputs is empty")
    return preprocess(several)

"""Scores a trained run on labeled samples: overall, by class, and sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from onefold.errors import DataError, OnefoldError
from onefold_jobs.catalog import job_of
from onefold_jobs.data.files import readable, refuse
from onefold_jobs.data.scan import Scanning, read_scan
from onefold_jobs.job import EvaluateOptions, Job, Labeled, RunFacts, Use
from onefold_jobs.options import from_mapping, read_config
from onefold_jobs.predict import Prediction, check_files_stay, chosen_weights, require_output, start
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import CONFIG, SCAN, kept_facts, read_run
from onefold_jobs.scores import Baseline

__all__ = ["EvaluateOptions", "Evaluation", "evaluate_run"]

_PATHS = ("run", "data", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of `evaluate_run`."""

    run: Path
    """Folder of the run."""
    data: Path
    """Where the samples were found: a folder, or a file of texts."""
    weights: Path
    """The checkpoint that was scored."""
    prediction: Prediction
    """What was predicted of each sample."""
    scores: dict[str, float]
    """Of all samples, by the names that the job has for them."""
    by_class: Sequence[dict[str, Any]] = ()
    """Each class with its scores; none for numbers, and for masks of one foreground."""
    confusion: Sequence[Sequence[int]] = ()
    """Number of samples by true class (rows) and predicted class, where a sample has one."""
    baseline: Baseline | None = None
    """What answering alike for every sample scores here; None if there is no such thing."""
    warning: str | None = None
    """That the model is no better than the baseline."""
    note: str | None = None
    """That the run was trained on these samples, or on others of the same data."""

    def as_dict(self) -> dict[str, Any]:
        """All but the samples, for JSON."""
        found: dict[str, Any] = {name: str(getattr(self, name)) for name in _PATHS}
        found["samples"] = len(self.prediction.rows)
        found["left_out"] = [str(each) for each in self.prediction.left_out]
        found["scores"] = self.scores
        baseline = self.baseline and msgspec.to_builtins(self.baseline)
        some = {"classes": self.by_class, "confusion": self.confusion, "baseline": baseline}
        found |= {name: value for name, value in some.items() if value}
        return {**found, "warning": self.warning, "note": self.note}


def evaluate_run(run: Path, data: Path, options: EvaluateOptions) -> Evaluation:
    """Score a run's model on labeled samples.

    Args:
        run: folder of a run.
        data: a data set as the run's job reads it, of which the test set is used, or the share that
            the run held out; or class folders, or ``images`` and ``masks``, alone; for texts, a TSV
            file or a folder with dev.tsv.
        options: devices, checkpoint, output and the like.

    Raises:
        DataError: the folder is not that of a run, or the data are missing, cannot be read, or have
            labels that the run does not know.
        CheckpointError: the run has no weights yet, or they are damaged or not finite.
        ValueError: an option does not suit the run.
    """
    job = job_of(run)
    facts = msgspec.convert({**read_run(run, shape=RunFacts), "run": run}, RunFacts)
    weights = chosen_weights(run, options)
    require_output(options.output, masks=False)
    found = job.use.labeled(run, data, facts, options)
    found, note = _unseen(job, run, data, facts, found)
    if not options.skip_bad:
        refuse(found.left_out, found.inputs)
    if not found.inputs:
        raise DataError(f"{readable(found.where)}: expected labeled samples, found none")
    if options.output is not None:
        check_files_stay(found.inputs, options.output, masks=False)
    use = Use(run, weights, found.inputs, options, job.use.score, True, found.arrays)
    rows, measured = start(use)
    with kept_facts(run):
        scores = job.use.sum_up(measured, [each.label for each in found.inputs], facts)
    prediction = Prediction(rows, found.left_out)
    return Evaluation(
        run=run, data=found.where, weights=weights, prediction=prediction, note=note, **scores
    )


def _unseen(
    job: Job, run: Path, data: Path, facts: RunFacts, found: Labeled
) -> tuple[Labeled, str | None]:
    """Of the data of a run, the share that it held out; and a note of what it was trained with."""
    config = read_config(run / CONFIG, job.name)
    # Of arrays, those of the test set are scored.
    if found.arrays is None and len(found.inputs) == facts.train_samples + facts.test_samples:
        options = from_mapping(job.options, {**config, "data": str(data)}, str(run / CONFIG))
        # Other data may be none that the job takes.
        with suppress(OnefoldError, OSError, ValueError), reading_bar() as watch:
            scanning = Scanning(known=read_scan(run / SCAN), watch=watch)
            prepared = job.prepare(options, scanning)
            tested = set(job.use.tested(prepared))
            unseen = [each for each in found.inputs if (each.path.resolve(), each.line) in tested]
            if prepared.digest == facts.data and unseen:
                # Whatever else is there was left out of the run.
                return replace(found, inputs=unseen, left_out=[]), (
                    f"Only the samples of {readable(data)} that the run held out were scored: it "
                    f"was trained on the others"
                )
    where, trained = found.where.resolve(), Path(str(config.get("data"))).resolve()
    if where != trained and (where.parent, where.stem) != (trained, "train"):
        return found, None
    return found, (
        f"The run was trained with samples of {readable(found.where)}, so that it scores better "
        f"here than on new ones: evaluate it on samples that it has not seen"
    )

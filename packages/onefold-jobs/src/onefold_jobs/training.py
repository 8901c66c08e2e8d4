"""The training loop of all jobs: epochs, evaluations, checkpoints and records.

It uses only the public interface, so it is also an example of that interface.

`read_saved` reads the state that a run stores in its checkpoints in addition to the model: its
progress and its best epoch. A checkpoint with valid digests may still belong to another script that
was put in the run's folder.

Note: consistency after a crash
-------------------------------
Only the checkpoints determine where a run resumes; ``run.record`` and ``run.json`` follow them. A
checkpoint counts the entries of the record that precede it, and later entries become invalid once
the run resumes. The scores and times of an epoch are recorded before the checkpoint that ends the
epoch, so they cannot be missing. ``run.json`` names the best checkpoint only after that checkpoint
is on disk. The checkpoint that it named before may be deleted by then, in which case
`onefold_jobs.finetune.best_checkpoint` searches for the best existing one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

import onefold
from onefold.cli import counted
from onefold.errors import CheckpointError, LaunchError
from onefold_jobs.data.files import ReadData, counted_bad
from onefold_jobs.finetune import freeze, parameter_groups
from onefold_jobs.options import TrainOptions, make_optimizer, rate_factor
from onefold_jobs.progress import Meter, TimeLimit, TrainingBar, epoch_line
from onefold_jobs.reading import Workers
from onefold_jobs.runfolder import CHECKPOINTS, RunFolder, SavedName
from onefold_jobs.scores import (
    FEW_STEPS,
    Baseline,
    Measure,
    Measured,
    Predict,
    count_line,
    rule_of,
    saved_rule,
    spell,
)

__all__ = ["Task", "begin_training", "loader_of", "trainer_of"]


_log = logging.getLogger("onefold")
STOPPED_CODE = 75
"""Exit code of a run that saved itself after a request to stop (EX_TEMPFAIL)."""
_LINES = 20
"""Number of times per epoch that training metrics are logged, in addition to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The result of a job's `make_task`: everything that `begin_training` needs."""

    model: nn.Module
    head: str | tuple[str, ...]
    """Names of the modules that make up the model's last layer."""
    loss: Callable[[nn.Module, Any], Any]
    """Loss, as in `onefold.Trainer`."""
    measure: Measure
    """Computes the values of each test sample, as in ``Trainer.predict``."""
    score: Callable[[Measured], dict[str, float]]
    """Computes the scores of a test set from these values, by name; includes ``loss``."""
    baseline: Baseline | None = None
    """Scores of a constant prediction."""
    class_counts: tuple[Sequence[int], Sequence[int]] | None = None
    """Number of training and test samples of each class."""
    class_weights: Sequence[float] | None = None
    """Loss weight of each class; None for equal weights."""
    sample_weights: Sequence[float] | None = None
    """Relative frequency of each training sample; None reads each one once per epoch."""
    train_set: Any
    test_set: Any
    collate: Callable[[list[Any]], Any] | None = None
    train_collate: Callable[[list[Any]], Any] | None = None
    """Makes a training shard, if it differs from ``collate``."""
    lengths: Sequence[int] | None = None
    """Lengths of the training samples, if samples of similar length should share a batch."""
    least_shard: int = 1
    """Minimum number of samples of a shard, such as 2 for batch norm. A last batch that is too
    short is dropped."""
    evaluation_batch_size: int = 256
    examples: Callable[[Predict, RunFolder], dict[str, Any]]
    """Makes the report's examples of the trained model. Called on every device."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional entries of ``run.json``, such as classes and the model's name."""
    notes: Sequence[str] = ()
    """Messages for the user about the samples, in addition to the data's own notes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that later use of the model requires: content by name."""


def begin_training(options: TrainOptions, job: str, task: Task, data: ReadData) -> Training:
    """Build the trainer of a run without writing anything yet. Called on every device.

    Args:
        options: options with all values filled in.
        job: name of the job.
        task: task to train.
        data: data of the task.

    Raises:
        ValueError: the options do not suit the task or the devices.
    """
    epochs, steps = options.epochs or 1, _steps_of_epoch(options, task)
    facts = {
        "data": data.digest,
        "left_out": [str(each) for each in data.left_out],
        "left_out_count": counted_bad(data.left_out),
        "columns": data.columns,
        "class_counts": task.class_counts,
        "class_weights": task.class_weights,
        "baseline": asdict(task.baseline) if task.baseline else None,
        "notes": [*data.notes, *task.notes],
        "frozen": freeze(task.model, options, task.head),
        **task.facts,
    }
    trainer, optimizer = trainer_of(
        options, task, task.model, rate_factor(options, epochs=epochs, steps=steps)
    )
    # The trainer determines which process is the lead, and only the lead may write.
    folder = RunFolder(options.folder, is_lead=trainer.is_lead)
    return Training(
        options, job, task, trainer, folder, optimizer, facts, data.scan, epochs=epochs, steps=steps
    )


def trainer_of(
    options: TrainOptions, task: Task, model: nn.Module, factor: Callable[[int], float], **more: Any
) -> tuple[onefold.Trainer, torch.optim.Optimizer]:
    """Make a trainer with the options of a run, and its optimizer.

    Args:
        options: options with all values filled in.
        task: task to train.
        model: model of the task, or a copy.
        factor: schedule of the learning rate: from completed steps to a factor.
        more: other arguments of the trainer.
    """
    optimizer = make_optimizer(options, parameter_groups(model, options, task.head))
    how: dict[str, Any] = {
        "shards": options.shards,
        "seed": options.seed,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        "clip_norm": options.clip_norm,
        "precision": None if options.precision == "fp32" else options.precision,
        "compile": options.compile,
        "microbatch": options.pieces,
    }
    return onefold.Trainer(model, optimizer, task.loss, **{**how, **more}), optimizer


def loader_of(trainer: onefold.Trainer, options: TrainOptions, task: Task) -> onefold.Loader:
    """Make the loader of a run's training set."""
    if task.sample_weights is None:
        order: dict[str, Any] = {"shuffle": True, "lengths": task.lengths}
    else:
        order = {"sampler": WeightedRandomSampler(task.sample_weights, len(task.train_set))}
    return trainer.loader(
        task.train_set,
        batch_size=options.batch_size,
        **order,
        # Drops only a last batch that is too short for the shards; see `_steps_of_epoch`.
        drop_last=_steps_of_epoch(options, task) * options.batch_size <= len(task.train_set),
        workers=options.worker_count,
        collate=task.train_collate or task.collate,
    )


def _steps_of_epoch(options: TrainOptions, task: Task) -> int:
    """Return the number of batches per epoch, without a last one that is too short.

    Raises:
        ValueError: even a full batch has too few samples for its shards.
    """
    samples, size = len(task.train_set), options.batch_size
    # An empty shard is skipped, but a shard with one sample is not, and batch norm fails on it or
    # learns nothing. If a shard needs two samples, all shards of a batch must have them.
    least = task.least_shard * options.shards if task.least_shard > 1 else 1
    most = min(size, samples)
    if most < least:
        raise ValueError(
            f"a batch has at most {most} samples (--batch-size {size}, {samples} training "
            f"samples), but this model needs {task.least_shard} or more in each of its "
            f"{options.shards} shards. Use fewer --shards or a larger batch"
        )
    return samples // size + int(samples % size >= least)


_Count = Annotated[int, msgspec.Meta(ge=0)]


class Best(TypedDict):
    """The best epoch so far."""

    epoch: _Count
    """Number of the epoch, from 1, as in all that a job shows or writes."""
    score: str
    value: float
    # Must be a checkpoint of the run, because it is loaded for the examples.
    checkpoint: SavedName
    loss: NotRequired[float]
    """Test loss, which decides between equal scores; missing in runs of earlier versions."""


class Peak(TypedDict):
    """State of ``--patience``. Only whole epochs count; otherwise a run that ended by
    ``--max-time`` and resumed would stop at a different epoch than an uninterrupted run."""

    value: float
    stale: _Count
    """Number of epochs since the score last improved."""


class Saved(TypedDict):
    """State that a run stores in its checkpoints in addition to the model."""

    part: dict[str, float]
    """Numbers of an unfinished epoch, from `Meter.saved`."""
    epochs_done: _Count
    best: Best | None
    peak: NotRequired[Peak]


@dataclass(slots=True)
class Training:
    """A training, from its beginning or last checkpoint to its end. Created by `begin_training`."""

    options: TrainOptions
    job: str
    task: Task
    trainer: onefold.Trainer
    folder: RunFolder
    optimizer: torch.optim.Optimizer
    facts: Mapping[str, Any]
    """Entries of ``run.json`` about the data and the task."""
    scan: str
    """Result of scanning the data files, stored for a run that resumes."""
    epochs: int
    steps: int
    """Steps per epoch."""
    saved: Saved = field(default_factory=lambda: Saved(part={}, epochs_done=0, best=None))
    ended: Literal["patience", "max-time"] | None = None
    """Option that ended the training before its last epoch."""
    _cut: Best | None = None
    """The model at which ``--max-time`` cut an epoch short. It is not saved: a resumed run
    evaluates only whole epochs, like an uninterrupted run."""
    _has_shown_limit: bool = False
    _workers: Workers | None = None
    _remarks: list[str] = field(default_factory=list)
    """Messages of the training for the report, apart from its numbers."""

    def run(self) -> dict[str, Any]:
        """Train to the end, and return the final content of ``run.json``.

        Raises:
            CheckpointError: the run's checkpoints cannot be loaded; nothing was trained.
            LaunchError: the run's folder cannot be written, or is in use; nothing was trained.
            OSError: a later write failed, for example because the disk is full.
            SystemExit: the launcher asked the run to stop, and the run saved itself.
        """
        self._begin()
        try:
            self._train()
            return self._finish()
        finally:
            self.folder.close()

    def _begin(self) -> None:
        """Create the folder, or load the last checkpoint."""
        # Load before writing to the folder, so that a failed load changes nothing. A run that was
        # killed before its first checkpoint starts again in the same folder.
        if self.options.ema is not None:
            self.trainer.average(decay=self.options.ema)
        if self.options.resume:
            loaded = self.trainer.load(self.folder.checkpoints, if_any=True)
            if loaded is not None:
                self.saved = read_saved(loaded.extra, self.folder.checkpoints)
        if self.trainer.steps > self.epochs * self.steps:
            raise LaunchError(
                f"--epochs {self.epochs}: the run {self.options.name} has already made "
                f"{self.trainer.steps:,} steps, with {self.steps:,} per epoch. Give more --epochs"
            )
        self._agree(self._open_folder)
        self.trainer.record(self.folder.path)
        if not self.trainer.steps and (found := self.facts.get("range_test")):
            # The record keeps what is broadcast.
            self.trainer.broadcast({"range_test": found})

    def _open_folder(self) -> None:
        if self.options.resume:
            self.folder.go_on(self.options, self.job)
        else:
            self.folder.create(self.options, self.job, self.task.files)
            self.folder.say(started=_now())
        self.folder.keep_scan(self.scan)
        self.folder.open_events(self.options, self.trainer.steps + 1)
        self.folder.say(**self._facts())

    def _agree(self, write: Callable[[], None]) -> None:
        """Write on the lead, and raise a failure as the same error on all devices.

        Raises:
            LaunchError: another process uses the folder, or it cannot be written.
        """
        failure: LaunchError | None = None
        try:
            write()
        except LaunchError as error:
            failure = error
        except OSError as error:
            words = error.strerror or str(error)
            failure = LaunchError(f"{self.folder.path}: cannot write the run there: {words}")
            failure.__cause__ = error
        # All devices gather, whether they failed or not: if the lead raised immediately, the others
        # would wait until their timeout and then report a lost device instead of the folder.
        failed = self.trainer.gather({"failed": float(failure is not None)})
        if failure is None and any(device["failed"] for device in failed):
            failure = LaunchError(f"{self.folder.path}: the lead could not write there")
        if failure is not None:
            self.folder.close()
            raise failure

    def _opening(self) -> list[str]:
        """Return the first lines of output: the data, the model, and anything that looks wrong."""
        facts, trainer = self._facts(), self.trainer
        classes = f" in {counted(len(facts['classes']), 'class')}" if facts.get("classes") else ""
        side = facts.get("picture_model", {}).get("image_size")
        pixels = f" for images of {side}x{side} pixels" if side else ""
        opening = (
            f"{self.folder.path}: {facts['train_samples']:,} training samples, "
            f"{facts['test_samples']:,} test samples{classes}; {facts['model']} with "
            f"{facts['parameters']:,} parameters{pixels}; {counted(len(trainer.devices), 'device')}"
        )
        lines = [opening]
        if self.task.class_counts:
            each = self.task.baseline.each if self.task.baseline else "sample"
            counts = self.task.class_counts
            lines.append(count_line(facts["classes"], *counts, each))
        if self.task.baseline:
            rule, baseline = self._rule, self.task.baseline
            name = rule.partition(" ")[2]
            lines.append(
                f"baseline: predicting {baseline} has test {name} "
                f"{spell(name, baseline.scores[name])}; the {rule} chooses the best epoch"
            )
        lines.extend(self.task.notes)
        if trainer.steps:
            epoch = self.saved["epochs_done"] + 1
            lines.append(f"resumes after step {trainer.steps:,}, in epoch {epoch}")
        return lines

    def _train(self) -> None:
        """Train the remaining epochs."""
        task, options, trainer = self.task, self.options, self.trainer
        batches = loader_of(trainer, options, task)
        self._workers = Workers(
            options.workers, batches, steps=self.steps, devices=len(trainer.devices)
        )
        samples = len(task.train_set)
        done = self.saved["epochs_done"] * samples + int(self.saved["part"].get("samples", 0))
        with TrainingBar(trainer, samples=samples, epochs=self.epochs, done=done) as bar:
            for line in self._opening():
                bar.say(line)
            total = self.steps * self.epochs
            if total < FEW_STEPS and not trainer.steps:
                more = "use more --epochs or a smaller --batch-size"
                self._remark(bar, f"the run has only {counted(total, 'step')}: {more}")
            limit = TimeLimit(trainer, options.time_limit_s)
            for epoch in trainer.epochs(self.epochs):
                if self._has_ended(limit):
                    break
                meter = Meter(self.saved["part"])
                self._train_epoch(epoch, batches, meter, bar, limit)
            if self.ended:
                self._remark(bar, self._reason)

    def _remark(self, bar: TrainingBar, text: str) -> None:
        """Print a line, and keep it for the report."""
        bar.say(text)
        self._remarks.append(text)
        self.folder.say(remarks=self._remarks)

    def _has_ended(self, limit: TimeLimit) -> bool:
        """Whether an option ends the training before the next epoch."""
        if self.ended is None and self._stale >= (self.options.patience or math.inf):
            self.ended = "patience"
        elif self.ended is None and limit.is_over():
            self.ended = "max-time"
        return self.ended is not None

    @property
    def _reason(self) -> str:
        """Reason why the training ended early, as a message."""
        if self.ended == "patience":
            direction, _, score = self._rule.partition(" ")
            better = f"{direction.removesuffix('est')}er {score}"
            return f"ended by --patience: {counted(self._stale, 'epoch')} without a {better}"
        where = f"after step {self.trainer.steps:,} of {self.steps * self.epochs:,}"
        return f"ended by --max-time {self.options.max_time}, {where}; continue with --resume"

    def _averaged(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights that are tested and used later."""
        return nullcontext() if self.options.ema is None else self.trainer.averaged()

    def _finish(self) -> dict[str, Any]:
        """Record examples of the best model, and the end of the run."""
        # The fingerprint of the last model: computed before the examples load the best one
        # temporarily.
        with self._averaged():
            fingerprint = self.trainer.fingerprint()
        examples = self._examples()
        self.folder.write_examples(examples)
        end = {
            "finished": _now(),
            "fingerprint": fingerprint,
            "best": self._best,
            "ended": self.ended,
            "stale": self._stale,
            "steps": self.trainer.steps,
        }
        self.folder.say(**end)
        shown = {name: examples.get(name) for name in ("confusion", "labels", "ious")}
        return {**self._facts(), **end, **shown, "is_lead": self.trainer.is_lead}

    def _examples(self) -> dict[str, Any]:
        """Make the examples from the best model; leaves the trainer unchanged.

        If the best checkpoint cannot be read, the last model is used instead.
        """
        epoch, best = self.saved["epochs_done"] + bool(self.saved["part"]), self._best
        # Read before the best checkpoint is loaded, which also changes the number of steps.
        last = self._checkpoint
        is_last = best is None or best["checkpoint"] == last
        if best is not None and not is_last:
            try:
                self.trainer.load(self.folder.path / best["checkpoint"])
                epoch = best["epoch"]
            except CheckpointError:
                # All devices raise this error, with nothing changed, so none is left behind.
                is_last = True
        predict = partial(self.trainer.predict, **self._reading)
        with self._averaged():
            examples = self.task.examples(predict, self.folder)
        if not is_last:
            try:
                self.trainer.load(self.folder.path / last)
            # Raised on all devices. Nothing below needs the model, and a finished training should
            # not end in an error, but the run could not be resumed from this checkpoint.
            except CheckpointError as error:
                if self.trainer.is_lead:
                    _log.warning("cannot reload the last checkpoint: %s", error)
        return {"kind": self.job, **examples, "epoch": epoch}

    def _train_epoch(
        self, epoch: int, batches: Any, meter: Meter, bar: TrainingBar, limit: TimeLimit
    ) -> None:
        """Train to the end of an epoch or of the time limit, and evaluate."""
        every = max(1, len(batches) // _LINES)
        for batch in batches:
            # Read before the step, which ends by advancing the schedule.
            rate = self.optimizer.param_groups[0]["lr"]
            step = self.trainer.step(batch)
            meter.add(step, rate)
            if self._workers and (remark := self._workers.note(step)):
                self._remark(bar, remark)
                meter.restart_limit()
            bar.advance(step, mean_loss=meter.mean_loss)
            if step.number % every == 0:
                self.folder.add_events("train", step.number, meter.take_line())
            # The devices agreed on this in the step, so either all of them save now or none does.
            stop = self.trainer.asked_to_stop
            if stop or step.number % self.options.save_every == 0:
                extra = {**self.saved, "part": meter.saved()}
                # Save in the background while training continues; before a stop, wait until it is
                # on the disk.
                self.trainer.save(self.folder.checkpoints, keep=KEPT, wait=stop, extra=extra)
            if stop:
                raise SystemExit(STOPPED_CODE)
            # After the last step of an epoch, its evaluation comes first.
            if step.number % self.steps and limit.is_over():
                self.ended = "max-time"
                # Inside the loop: a run that resumes treats a pass that was left as finished.
                with self._averaged():
                    self._evaluate(epoch, meter, bar, done=False)
                return
        with self._averaged():
            self._evaluate(epoch, meter, bar, done=True)

    def _evaluate(self, epoch: int, meter: Meter, bar: TrainingBar, *, done: bool) -> None:
        """Evaluate and save, at the end of an epoch or, unless ``done``, within it."""
        # Before the evaluation, whose time is measured separately.
        training, task, start_s = meter.whole(), self.task, time.perf_counter()
        part = {} if done else meter.saved()
        # The rows do not depend on the number of devices, so neither do the scores.
        scores = task.score(self.trainer.predict(task.measure, task.test_set, **self._reading))
        training["evaluate_s"] = time.perf_counter() - start_s
        # gather also records its result: the report takes the numbers of the epoch from it.
        workers = self._workers
        limit = workers.advised(meter.limit) if workers else meter.limit
        own = {"epoch": epoch + 1, "scores": scores, **training, **meter.phases, "limit": limit}
        own["workers"] = workers.number if workers else 0
        devices = self.trainer.gather(own)
        # The checkpoint below stores the best epoch; for the order of the rest, see the note.
        self._note_best(epoch, scores, done=done)
        self.folder.add_events("epoch", self.trainer.steps, training)
        self.folder.add_events("test", self.trainer.steps, scores)
        line = {**devices[0], "devices": devices}
        bar.say(epoch_line(line, self.epochs))
        if line["limit"] and not self._has_shown_limit:
            bar.say(f"device 0 is {line['limit']}")
            self._has_shown_limit = True
        # After a whole pass, a run that resumes from here starts with the next epoch: this epoch
        # must be counted, and the meter must be empty.
        self.saved["part"], self.saved["epochs_done"] = part, epoch + done
        # The scores of a partial epoch could get the best whole epoch deleted.
        kept = {"scores": scores, "best": saved_rule(self._rule)}
        rule: dict[str, Any] = kept if done else {}
        self.trainer.save(self.folder.checkpoints, keep=KEPT, extra={**self.saved}, **rule)
        self.folder.say(best=self._best)

    def _note_best(self, epoch: int, scores: Mapping[str, float], *, done: bool) -> None:
        name = self._rule.partition(" ")[2]
        found = Best(
            epoch=epoch + 1,
            score=name,
            value=scores[name],
            checkpoint=self._checkpoint,
            loss=scores["loss"],
        )
        if not done:
            self._cut = found
            return
        self._note_peak(scores[name], self._sign)
        self.saved["best"] = self._better(found)

    def _better(self, found: Best) -> Best:
        """Return the best whole epoch, or ``found`` if it is better."""
        best = self.saved["best"]
        return found if best is None or self._merit(found) >= self._merit(best) else best

    def _merit(self, each: Best) -> tuple[float, float]:
        """Return a key that is larger for better epochs; of equal ones, the later one is better."""
        # Like the deletion of old checkpoints; otherwise run.json would name a deleted one.
        merits = self._sign * each["value"], -each.get("loss", math.inf)
        first, second = (-math.inf if math.isnan(merit) else merit for merit in merits)
        return first, second

    @property
    def _best(self) -> Best | None:
        return self._better(self._cut) if self._cut else self.saved["best"]

    @property
    def _sign(self) -> int:
        """1 if the highest score is the best, -1 if the lowest is."""
        return 1 if self._rule.startswith("highest") else -1

    def _note_peak(self, value: float, sign: int) -> None:
        peak = self.saved.get("peak", Peak(value=math.nan, stale=0))
        # A tie is not progress: a model with constant predictions would never run out of patience.
        if sign * value > sign * peak["value"] or math.isnan(peak["value"]) > math.isnan(value):
            self.saved["peak"] = Peak(value=value, stale=0)
        else:
            self.saved["peak"] = Peak(value=peak["value"], stale=peak["stale"] + 1)

    @property
    def _stale(self) -> int:
        """Number of epochs since the score last improved."""
        return self.saved["peak"]["stale"] if "peak" in self.saved else 0

    @property
    def _reading(self) -> dict[str, Any]:
        """Arguments for reading test samples."""
        return {
            "batch_size": self.task.evaluation_batch_size,
            "workers": self._workers.number if self._workers else self.options.worker_count,
            "collate": self.task.collate,
        }

    @property
    def _rule(self) -> str:
        """Rule for the best checkpoint, as in ``Trainer.save``."""
        return rule_of(str(self.options.best_by))

    @property
    def _checkpoint(self) -> str:
        """Path of the last step's checkpoint, relative to the run's folder."""
        return f"{CHECKPOINTS}/step-{self.trainer.steps:08d}"

    def _facts(self) -> dict[str, Any]:
        model = self.trainer.model
        return {
            "job": self.job,
            "name": self.options.name,
            "onefold": onefold.__version__,
            "torch": torch.__version__,
            "devices": [str(device) for device in self.trainer.devices],
            "shards": self.options.shards,
            "epochs": self.epochs,
            "train_samples": len(self.task.train_set),
            "test_samples": len(self.task.test_set),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "score": self._rule,
            "best": self._best,
            # Clears an earlier end, if a finished run resumes with more epochs.
            "finished": None,
            "fingerprint": None,
            "ended": None,
            "remarks": [],
            **self.facts,
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_saved(extra: object, checkpoints: Path) -> Saved:
    """Read the ``extra`` of a run's checkpoint.

    Args:
        extra: ``extra`` of the checkpoint that ``Trainer.load`` loaded.
        checkpoints: folder of the run's checkpoints, for the error.

    Raises:
        CheckpointError: ``onefold train`` did not save the checkpoint.
    """
    try:
        return msgspec.convert(extra, Saved)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoints}: the newest checkpoint was not saved by onefold train "
            f"({error}). Remove it, or start a new run with another --name"
        ) from error


KEPT = 2
"""Number of recent checkpoints to keep in addition to the best: two, in case one is damaged."""

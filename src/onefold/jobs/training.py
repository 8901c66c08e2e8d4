"""Trains a task: the epochs, evaluations, checkpoints and records that all jobs have in common.

It uses nothing but the public interface, so it is also an example of how to use that.

`read_saved` reads what a run keeps in its checkpoints besides the model: how far it is, and its
best epoch. A checkpoint that is sound by its digests may still be another script's, put in the
run's folder. `Meter` adds up losses and times of an epoch's steps, without waiting for a GPU in
each.

Note: what an end at any point leaves
-------------------------------------
Only the checkpoints decide where a run resumes; ``run.record`` and ``run.json`` follow them. A
checkpoint counts the entries of the record that it has seen, and those that came after it count no
more once the run has resumed. The scores and times of an epoch are in the record before the
checkpoint that ends the epoch, so none can be missing. ``run.json`` names the best checkpoint only
once that is on the disk; what it named before may be gone by then, and
`onefold.jobs.finetune.best_checkpoint` then looks for the best that is there.

Note: when a loss is read
-------------------------
To read the loss of a step, Python must wait until the GPU has computed it, and meanwhile queues
no further work. So steps are only collected, and read together every half a second, for a line of
events, or for a checkpoint. The order in which they are added up stays that of the steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

import onefold
from onefold.errors import CheckpointError, LaunchError
from onefold.jobs.data.files import ReadData, counted_bad, visible
from onefold.jobs.finetune import freeze, parameter_groups
from onefold.jobs.options import TrainOptions, make_optimizer, rate_factor
from onefold.jobs.progress import PHASES, TrainingBar, epoch_line
from onefold.jobs.runfolder import CHECKPOINTS, RunFolder, SavedName
from onefold.jobs.scores import (
    Baseline,
    Measure,
    Measured,
    Predict,
    count_line,
    rule_of,
    spell,
)
from onefold.system.process import STOPPED_CODE
from onefold.system.words import counted

__all__ = ["Task", "begin_training"]


_log = logging.getLogger("onefold")
_LINES = 20
"""How often an epoch's numbers become events, besides those of the epoch as a whole."""
_FEW_STEPS = 100
"""With fewer steps in all, hardly anything is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a job makes of its options and data: everything that `begin_training` needs."""

    model: nn.Module
    head: str | tuple[str, ...]
    """Names of the parts that make up the model's last layer."""
    loss: Callable[[nn.Module, Any], Any]
    """As `onefold.Trainer` takes it."""
    measure: Measure
    """What is computed of each test sample, as ``Trainer.predict`` takes it."""
    score: Callable[[Measured], dict[str, float]]
    """What that amounts to over the test set: the scores by name, ``loss`` among them."""
    baseline: Baseline | None = None
    """The scores of a model that has learned nothing."""
    class_counts: tuple[Sequence[int], Sequence[int]] | None = None
    """Number of training and of test samples of each class."""
    class_weights: Sequence[float] | None = None
    """What the loss of each class is multiplied by; None if all count alike."""
    sample_weights: Sequence[float] | None = None
    """How often each training sample is drawn, relative to the others; None draws each once."""
    train_set: Any
    test_set: Any
    collate: Callable[[list[Any]], Any] | None = None
    lengths: Sequence[int] | None = None
    """The training samples' lengths, if those of similar length are to share a batch."""
    least_shard: int = 1
    """How many samples each shard needs, such as 2 for batch norm; a last batch that is too short
    for that is left out."""
    evaluation_batch_size: int = 256
    examples: Callable[[Predict, RunFolder], dict[str, Any]]
    """What the report shows of the trained model; called on every device."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What ``run.json`` records besides: classes, the model's name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files without which the model cannot be used later: content by name."""


def begin_training(options: TrainOptions, job: str, task: Task, data: ReadData) -> Training:
    """Build the trainer of a run without writing anything yet; called on every device.

    Args:
        options: settled ones.
        job: whose run it is.
        task: what to train.
        data: what the task was made of.

    Raises:
        ValueError: the options do not suit the task, or the devices.
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
        "notes": data.notes,
        "frozen": freeze(task.model, options, task.head),
        **task.facts,
    }
    optimizer = make_optimizer(options, parameter_groups(task.model, options, task.head))
    factor = rate_factor(options, epochs=epochs, steps=steps)
    trainer = onefold.Trainer(
        task.model,
        optimizer,
        task.loss,
        shards=options.shards,
        seed=options.seed,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        clip_norm=options.clip_norm,
        precision=None if options.precision == "fp32" else options.precision,
    )
    # Only now is it known which process is the lead, and so who may write.
    folder = RunFolder(options.folder, is_lead=trainer.is_lead)
    return Training(
        options, job, task, trainer, folder, optimizer, facts, data.scan, epochs=epochs, steps=steps
    )


def _steps_of_epoch(options: TrainOptions, task: Task) -> int:
    """Number of batches in a pass over the training set, without a last one that is too short.

    Raises:
        ValueError: not even a full batch has enough samples for each shard.
    """
    samples, size = len(task.train_set), options.batch_size
    # An empty shard is skipped. One with a single sample is not, and batch norm fails on it, or
    # learns nothing: where a shard needs two samples, every shard of a batch must have them.
    least = task.least_shard * options.shards if task.least_shard > 1 else 1
    most = min(size, samples)
    if most < least:
        raise ValueError(
            f"a batch has {most} samples at most (--batch-size {size}, {samples} samples to train "
            f"with): this model needs {task.least_shard} or more in each of its {options.shards} "
            f"shards; give fewer --shards or a larger batch"
        )
    return samples // size + int(samples % size >= least)


_Count = Annotated[int, msgspec.Meta(ge=0)]


class Best(TypedDict):
    """The best epoch so far."""

    epoch: _Count
    score: str
    value: float
    # Nothing but a checkpoint of the run: it is loaded for the examples.
    checkpoint: SavedName


class Saved(TypedDict):
    """What a run keeps in its checkpoints besides the model."""

    part: dict[str, float]
    """The numbers of an epoch that was begun, as `Meter.saved` returned them."""
    epochs_done: _Count
    best: Best | None


@dataclass(slots=True)
class Training:
    """One training, from its beginning or last checkpoint to its end. Made by `begin_training`."""

    options: TrainOptions
    job: str
    task: Task
    trainer: onefold.Trainer
    folder: RunFolder
    optimizer: torch.optim.Optimizer
    facts: Mapping[str, Any]
    """What ``run.json`` records of the data and the task."""
    scan: str
    """What the look through the data's files found, for a run that resumes."""
    epochs: int
    steps: int
    """Of an epoch."""
    saved: Saved = field(default_factory=lambda: Saved(part={}, epochs_done=0, best=None))

    def run(self) -> dict[str, Any]:
        """Train to the end, and return what ``run.json`` then holds.

        Raises:
            CheckpointError: the run's checkpoints cannot be loaded; nothing was trained.
            LaunchError: the run's folder cannot be written to, or is in use; nothing was trained.
            OSError: something could not be written later, for instance because the disk is full.
            SystemExit: the launcher asked the run to stop, and it has been saved.
        """
        self._begin()
        try:
            self._train()
            return self._finish()
        finally:
            self.folder.close()

    def _begin(self) -> None:
        """Create the folder, or load its last checkpoint."""
        # Loaded before the folder is touched: what cannot be loaded changes nothing. A run that was
        # killed before its first checkpoint begins again, in its folder.
        if self.options.resume:
            loaded = self.trainer.load(self.folder.checkpoints, if_any=True)
            if loaded is not None:
                self.saved = read_saved(loaded.extra, self.folder.checkpoints)
        self._agree(self._open_folder)
        self.trainer.record(self.folder.path)

    def _open_folder(self) -> None:
        if self.options.resume:
            self.folder.go_on(self.options, self.job)
        else:
            self.folder.create(self.options, self.job, self.task.files)
            self.folder.say(started=_now())
        self.folder.keep_scan(self.scan)
        # TensorBoard drops events from this step on: those of steps that are now done again.
        self.folder.open_events(self.trainer.steps + 1)
        self.folder.say(**self._facts())

    def _agree(self, write: Callable[[], None]) -> None:
        """Have the lead write, and let a failure end the run in the same way on all devices.

        Raises:
            LaunchError: another process is using the folder, or it cannot be written to.
        """
        failure: LaunchError | None = None
        try:
            write()
        except LaunchError as error:
            failure = error
        except OSError as error:
            words = error.strerror or str(error)
            failure = LaunchError(f"{self.folder.path}: the run cannot be written there: {words}")
            failure.__cause__ = error
        # On every device, failed or not: if the lead raised at once, the others would wait for it
        # until their time is up, and then report a lost device rather than the folder.
        failed = self.trainer.gather({"failed": float(failure is not None)})
        if failure is None and any(device["failed"] for device in failed):
            failure = LaunchError(f"{self.folder.path}: the lead device could not write there")
        if failure is not None:
            self.folder.close()
            raise failure

    def _opening(self) -> list[str]:
        """Lines to begin with: what is trained on what, and anything that looks wrong."""
        facts, trainer = self._facts(), self.trainer
        classes = f" in {counted(len(facts['classes']), 'class')}" if facts.get("classes") else ""
        opening = (
            f"{self.folder.path}: {facts['train_samples']:,} samples to train with, "
            f"{facts['test_samples']:,} to test with{classes}; {facts['model']} of "
            f"{facts['parameters']:,} parameters; {counted(len(trainer.devices), 'device')}"
        )
        lines = [opening]
        if self.task.class_counts:
            lines.append(visible(count_line(facts["classes"], *self.task.class_counts)))
        if self.task.baseline:
            rule, baseline = self._rule, self.task.baseline
            name = rule.partition(" ")[2]
            lines.append(
                f"baseline: {baseline.answer!r} for every sample has test {name} "
                f"{spell(name, baseline.scores[name])}; the {rule} chooses the best epoch"
            )
        if trainer.steps:
            epoch = self.saved["epochs_done"] + 1
            lines.append(f"goes on after step {trainer.steps:,}, in epoch {epoch}")
        total = self.steps * self.epochs
        if total < _FEW_STEPS:
            lines.append(f"only {total} steps in all: a smaller --batch-size gives more of them")
        return lines

    def _train(self) -> None:
        """Train the epochs that remain."""
        task, options, trainer = self.task, self.options, self.trainer
        if task.sample_weights is None:
            order: dict[str, Any] = {"shuffle": True, "lengths": task.lengths}
        else:
            drawn = WeightedRandomSampler(task.sample_weights, len(task.train_set))
            order = {"sampler": drawn}
        batches = trainer.loader(
            task.train_set,
            batch_size=options.batch_size,
            **order,
            # Only a last batch that is too short for the shards is dropped; see `_steps_of_epoch`.
            drop_last=self.steps * options.batch_size <= len(task.train_set),
            workers=options.workers,
            collate=task.collate,
        )
        samples = len(task.train_set)
        done = self.saved["epochs_done"] * samples + int(self.saved["part"].get("samples", 0))
        with TrainingBar(trainer, samples=samples, epochs=self.epochs, done=done) as bar:
            for line in self._opening():
                bar.say(line)
            for epoch in trainer.epochs(self.epochs):
                meter = Meter(self.saved["part"])
                self._train_epoch(epoch, batches, meter, bar)
                self._evaluate(epoch, meter, bar)

    def _finish(self) -> dict[str, Any]:
        """Record examples of the best model and the end of the run."""
        # Of the last model, so before the examples put the best one in its place for a while.
        fingerprint = self.trainer.fingerprint()
        examples = self._examples()
        self.folder.write_examples(examples)
        end = {"finished": _now(), "fingerprint": fingerprint, "best": self.saved["best"]}
        self.folder.say(**end)
        shown = {"confusion": examples.get("confusion"), "is_lead": self.trainer.is_lead}
        return {**self._facts(), **end, **shown}

    def _examples(self) -> dict[str, Any]:
        """Predictions of the best model for the test set; the trainer is left as it was.

        If the best checkpoint cannot be read, the last model's are taken instead.
        """
        epoch, best = self.saved["epochs_done"] - 1, self.saved["best"]
        # Before the best one is loaded, and with it its number of steps.
        last = self._checkpoint
        is_last = best is None or best["checkpoint"] == last
        if best is not None and not is_last:
            try:
                self.trainer.load(self.folder.path / best["checkpoint"])
                epoch = best["epoch"]
            except CheckpointError:
                # Raised alike on all devices, with nothing changed: none of them is left behind.
                is_last = True
        examples = self.task.examples(partial(self.trainer.predict, **self._reading), self.folder)
        if not is_last:
            try:
                self.trainer.load(self.folder.path / last)
            # Raised alike on all devices. Nothing that follows needs the model, and a training that
            # is over must not end in an error; but it could not be resumed from here.
            except CheckpointError as error:
                if self.trainer.is_lead:
                    _log.warning("the last checkpoint cannot be loaded any more: %s", error)
        return {**examples, "epoch": epoch}

    def _train_epoch(self, epoch: int, batches: Any, meter: Meter, bar: TrainingBar) -> None:
        every = max(1, len(batches) // _LINES)
        for batch in batches:
            # Read first: the step ends by moving the schedule on to the next rate.
            rate = self.optimizer.param_groups[0]["lr"]
            step = self.trainer.step(batch)
            meter.add(step, rate)
            bar.advance(step, mean_loss=meter.mean_loss)
            if step.number % every == 0:
                self.folder.add_events("train", step.number, meter.take_line())
            # The devices agreed on this in the step, so that all of them save now, or none does.
            stop = self.trainer.asked_to_stop
            if stop or step.number % self.options.save_every == 0:
                extra = {**self.saved, "part": meter.saved()}
                # In the background while training continues; before leaving, it must be on disk.
                self.trainer.save(self.folder.checkpoints, keep=KEPT, wait=stop, extra=extra)
            if stop:
                raise SystemExit(STOPPED_CODE)

    def _evaluate(self, epoch: int, meter: Meter, bar: TrainingBar) -> None:
        # Taken before the evaluation, during which the clock runs on.
        training, task, start_s = meter.whole(), self.task, time.perf_counter()
        # The same rows on any number of devices, and so the same scores.
        scores = task.score(self.trainer.predict(task.measure, task.test_set, **self._reading))
        training["evaluate_s"] = time.perf_counter() - start_s
        # The record keeps what this returns: the report has the numbers of the epoch from it.
        own = {"epoch": epoch, "scores": scores, **training, **meter.phases}
        devices = self.trainer.gather(own)
        # The checkpoint below holds the best so far; for the order of the rest, see the note.
        self._note_best(epoch, scores)
        self.folder.add_events("epoch", self.trainer.steps, training)
        self.folder.add_events("test", self.trainer.steps, scores)
        line = {**devices[0], "devices": devices}
        bar.say(epoch_line(line, self.epochs))
        # The pass is over, so a run that resumes from here starts with the next epoch: it must find
        # this one counted, and nothing of it in its meter.
        self.saved = Saved(part={}, epochs_done=epoch + 1, best=self.saved["best"])
        self.trainer.save(
            self.folder.checkpoints,
            scores=scores,
            keep=KEPT,
            best=self._rule,
            extra={**self.saved},
        )
        self.folder.say(best=self.saved["best"])

    def _note_best(self, epoch: int, scores: Mapping[str, float]) -> None:
        direction, _, name = self._rule.partition(" ")
        value = scores[name]
        sign = 1 if direction == "highest" else -1
        before = self.saved["best"]["value"] if self.saved["best"] else math.nan
        # A tie goes to the later epoch, as it does where old checkpoints are deleted; the other
        # way round, run.json would name one that is gone. A score that is NaN beats nothing.
        if math.isnan(before) or sign * value >= sign * before:
            self.saved["best"] = Best(
                epoch=epoch, score=name, value=value, checkpoint=self._checkpoint
            )

    @property
    def _reading(self) -> dict[str, Any]:
        """How test samples are read."""
        return {
            "batch_size": self.task.evaluation_batch_size,
            "workers": self.options.workers,
            "collate": self.task.collate,
        }

    @property
    def _rule(self) -> str:
        """Which checkpoint is the best, as ``Trainer.save`` takes it."""
        return rule_of(str(self.options.best_by))

    @property
    def _checkpoint(self) -> str:
        """Path of the checkpoint of the last step, below the run's folder."""
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
            "best": self.saved["best"],
            # Of an earlier end, if the run had finished and now resumes with more epochs.
            "finished": None,
            "fingerprint": None,
            **self.facts,
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_saved(extra: object, checkpoints: Path) -> Saved:
    """Read the ``extra`` of a run's checkpoint.

    Args:
        extra: what ``Trainer.load`` returned of it.
        checkpoints: the folder of the run's checkpoints, for the error.

    Raises:
        CheckpointError: it was not saved by ``onefold train``.
    """
    try:
        return msgspec.convert(extra, Saved)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoints}: expected checkpoints of onefold train, the newest was saved by "
            f"something else ({error}): remove it, or begin a new run with another --name"
        ) from error


KEPT = 2
"""How many of the newest checkpoints stay, besides the best: two, in case one is damaged."""
_LOOK_S = 0.5
"""How long losses and times go unread while steps are made."""


class Meter:
    """Sums of losses, samples and seconds over the steps of an epoch.

    Args:
        so_far: what `saved` returned, if the run resumes in the middle of an epoch; else empty.
    """

    def __init__(self, so_far: Mapping[str, float]) -> None:
        self._sums = defaultdict(float, so_far)
        self._pending: list[onefold.Step] = []
        now_s = self._looked_s = time.perf_counter()
        # As if both had begun earlier by the time that they took before the run was stopped.
        self._start_s = now_s - so_far.get("seconds", 0.0)
        self._line_start_s = now_s - so_far.get("line_seconds", 0.0)

    def add(self, step: onefold.Step, rate: float) -> None:
        """Count a step, which was made at this learning rate."""
        self._sums["rate"] = rate
        # Unread, or Python would wait for the GPU here: see the note.
        self._pending.append(step)
        if time.perf_counter() - self._looked_s > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Read the losses and times of the steps that were only collected so far."""
        for step in self._pending:
            total = float(step.loss) * step.samples
            for line in ("", "line_"):
                self._sums[f"{line}total"] += total
                self._sums[f"{line}samples"] += step.samples
            for phase, seconds in asdict(step.seconds).items():
                self._sums[phase] += seconds
        self._pending.clear()
        # Only now: the reading itself may have waited for long.
        self._looked_s = time.perf_counter()

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase of the steps read so far."""
        return {phase: self._sums[phase] for phase in PHASES}

    @property
    def mean_loss(self) -> float:
        """Mean loss of the samples read so far; NaN if there are none."""
        samples = self._sums["samples"]
        return self._sums["total"] / samples if samples else math.nan

    def whole(self) -> dict[str, float]:
        """Return the loss, rate, seconds and speed of the epoch, those before a stop included."""
        self.look()
        train_s = time.perf_counter() - self._start_s
        speed = self._sums["samples"] / train_s
        rate = self._sums["rate"]
        return {"loss": self.mean_loss, "lr": rate, "train_s": train_s, "samples_per_s": speed}

    def take_line(self) -> dict[str, float]:
        """Begin a new line of events; return the loss, speed and rate of the one that ends."""
        self.look()
        total, samples = self._sums.pop("line_total", 0.0), self._sums.pop("line_samples", 0.0)
        now_s = time.perf_counter()
        # A line may follow another so closely that the clock has not moved.
        speed = samples / max(now_s - self._line_start_s, 1e-9)
        self._line_start_s = now_s
        loss = total / samples if samples else math.nan
        return {"loss": loss, "samples_per_s": speed, "lr": self._sums["rate"]}

    def saved(self) -> dict[str, float]:
        """The numbers that a checkpoint in the middle of the epoch keeps."""
        # All steps so far are part of the checkpoint, so their losses must be in it as well.
        self.look()
        now_s = time.perf_counter()
        passed_s = {"seconds": now_s - self._start_s, "line_seconds": now_s - self._line_start_s}
        return {**self._sums, **passed_s}

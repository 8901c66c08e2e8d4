"""Trains a task: the epochs, evaluations, checkpoints and records that all jobs have in common.

It uses nothing but the public interface, so it is also an example of how to use that.

`read_saved` reads what a run keeps in its checkpoints besides the model: how far it is, and its
best epoch. A checkpoint that is sound by its digests may still be another script's, put in the
run's folder.

Note: what an end at any point leaves
-------------------------------------
Only the checkpoints decide where a run resumes; ``run.record`` and ``run.json`` follow them. A
checkpoint counts the entries of the record that it has seen, and those that came after it count no
more once the run has resumed. The scores and times of an epoch are in the record before the
checkpoint that ends the epoch, so none can be missing. ``run.json`` names the best checkpoint only
once that is on the disk; what it named before may be gone by then, and
`onefold_jobs.finetune.best_checkpoint` then looks for the best that is there.
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
from onefold_jobs.runfolder import CHECKPOINTS, RunFolder, SavedName
from onefold_jobs.scores import Baseline, Measure, Measured, Predict, count_line, rule_of, spell

__all__ = ["Task", "begin_training"]


_log = logging.getLogger("onefold")
STOPPED_CODE = 75
"""The exit code of a run that was asked to stop and has saved itself (EX_TEMPFAIL)."""
_LINES = 20
"""How often an epoch's numbers become events, besides those of the epoch as a whole."""
_FEW_STEPS = 100
"""With fewer steps in all, hardly anything is learned."""


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
    train_collate: Callable[[list[Any]], Any] | None = None
    """What makes a shard to train with, if that is not ``collate``."""
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
    notes: Sequence[str] = ()
    """What the user should know of the samples, besides the notes of the data."""
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
        "notes": [*data.notes, *task.notes],
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
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        clip_norm=options.clip_norm,
        precision=None if options.precision == "fp32" else options.precision,
        compile=options.compile,
        microbatch=options.pieces,
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


class Peak(TypedDict):
    """What ``--patience`` remembers. Only whole epochs count, or a run that ended by ``--max-time``
    and resumed would run out of it at another time than one that never stopped."""

    value: float
    stale: _Count
    """Epochs since the score was better than ever before."""


class Saved(TypedDict):
    """What a run keeps in its checkpoints besides the model."""

    part: dict[str, float]
    """The numbers of an epoch that was begun, as `Meter.saved` returned them."""
    epochs_done: _Count
    best: Best | None
    peak: NotRequired[Peak]


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
    ended: Literal["patience", "max-time"] | None = None
    """The option that has ended the training before its last epoch."""
    _cut: Best | None = None
    """The model where ``--max-time`` ended an epoch. It is not saved: a run that resumes evaluates
    whole epochs alone, as a run that never stopped does."""

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
        if self.options.ema is not None:
            self.trainer.average(decay=self.options.ema)
        if self.options.resume:
            loaded = self.trainer.load(self.folder.checkpoints, if_any=True)
            if loaded is not None:
                self.saved = read_saved(loaded.extra, self.folder.checkpoints)
        if self.trainer.steps > self.epochs * self.steps:
            raise LaunchError(
                f"--epochs {self.epochs}: the run {self.options.name} has made "
                f"{self.trainer.steps:,} steps, of {self.steps:,} in an epoch: expected more epochs"
            )
        self._agree(self._open_folder)
        self.trainer.record(self.folder.path)

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
        side = facts.get("picture_model", {}).get("image_size")
        pixels = f" for pictures of {side}x{side} pixels" if side else ""
        opening = (
            f"{self.folder.path}: {facts['train_samples']:,} samples to train with, "
            f"{facts['test_samples']:,} to test with{classes}; {facts['model']} of "
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
                f"baseline: {baseline} has test {name} "
                f"{spell(name, baseline.scores[name])}; the {rule} chooses the best epoch"
            )
        lines.extend(self.task.notes)
        if trainer.steps:
            epoch = self.saved["epochs_done"] + 1
            lines.append(f"goes on after step {trainer.steps:,}, in epoch {epoch}")
        total = self.steps * self.epochs
        if total < _FEW_STEPS and not trainer.steps:
            more = "more --epochs or a smaller --batch-size gives more of them"
            lines.append(f"only {total} steps in all: {more}")
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
            collate=task.train_collate or task.collate,
        )
        samples = len(task.train_set)
        done = self.saved["epochs_done"] * samples + int(self.saved["part"].get("samples", 0))
        with TrainingBar(trainer, samples=samples, epochs=self.epochs, done=done) as bar:
            for line in self._opening():
                bar.say(line)
            limit = TimeLimit(trainer, options.time_limit_s)
            for epoch in trainer.epochs(self.epochs):
                if self._has_ended(limit):
                    break
                meter = Meter(self.saved["part"])
                self._train_epoch(epoch, batches, meter, bar, limit)
            if self.ended:
                bar.say(self._reason)

    def _has_ended(self, limit: TimeLimit) -> bool:
        """Whether an option ends the training before the epoch that would come next."""
        if self.ended is None and self._stale >= (self.options.patience or math.inf):
            self.ended = "patience"
        elif self.ended is None and limit.is_over():
            self.ended = "max-time"
        return self.ended is not None

    @property
    def _reason(self) -> str:
        """The line that says why the training ended early."""
        if self.ended == "patience":
            direction, _, score = self._rule.partition(" ")
            better = f"{direction.removesuffix('est')}er {score}"
            return f"ended by --patience: {counted(self._stale, 'epoch')} without a {better}"
        where = f"after step {self.trainer.steps:,} of {self.steps * self.epochs:,}"
        return f"ended by --max-time {self.options.max_time}, {where}; --resume goes on"

    def _averaged(self) -> AbstractContextManager[None]:
        """A block in which the model is the one that is tested and used later."""
        return nullcontext() if self.options.ema is None else self.trainer.averaged()

    def _finish(self) -> dict[str, Any]:
        """Record examples of the best model and the end of the run."""
        # Of the last model, so before the examples put the best one in its place for a while.
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
        }
        self.folder.say(**end)
        shown = {name: examples.get(name) for name in ("confusion", "labels", "ious")}
        return {**self._facts(), **end, **shown, "is_lead": self.trainer.is_lead}

    def _examples(self) -> dict[str, Any]:
        """Predictions of the best model for the test set; the trainer is left as it was.

        If the best checkpoint cannot be read, the last model's are taken instead.
        """
        epoch, best = self.saved["epochs_done"] - (not self.saved["part"]), self._best
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
        predict = partial(self.trainer.predict, **self._reading)
        with self._averaged():
            examples = self.task.examples(predict, self.folder)
        if not is_last:
            try:
                self.trainer.load(self.folder.path / last)
            # Raised alike on all devices. Nothing that follows needs the model, and a training that
            # is over must not end in an error; but it could not be resumed from here.
            except CheckpointError as error:
                if self.trainer.is_lead:
                    _log.warning("the last checkpoint cannot be loaded any more: %s", error)
        return {"kind": self.job, **examples, "epoch": epoch}

    def _train_epoch(
        self, epoch: int, batches: Any, meter: Meter, bar: TrainingBar, limit: TimeLimit
    ) -> None:
        """Train to the end of an epoch, or until the time is over, and evaluate."""
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
            # After the last step of an epoch comes its evaluation first.
            if step.number % self.steps and limit.is_over():
                self.ended = "max-time"
                # Inside of the loop: a pass that has been left is over for a run that resumes.
                with self._averaged():
                    self._evaluate(epoch, meter, bar, done=False)
                return
        with self._averaged():
            self._evaluate(epoch, meter, bar, done=True)

    def _evaluate(self, epoch: int, meter: Meter, bar: TrainingBar, *, done: bool) -> None:
        """Evaluate and save, at the end of an epoch or, if that is not done, in its midst."""
        # Taken before the evaluation, during which the clock runs on.
        training, task, start_s = meter.whole(), self.task, time.perf_counter()
        part = {} if done else meter.saved()
        # The same rows on any number of devices, and so the same scores.
        scores = task.score(self.trainer.predict(task.measure, task.test_set, **self._reading))
        training["evaluate_s"] = time.perf_counter() - start_s
        # The record keeps what this returns: the report has the numbers of the epoch from it.
        own = {"epoch": epoch, "scores": scores, **training, **meter.phases}
        devices = self.trainer.gather(own)
        # The checkpoint below holds the best so far; for the order of the rest, see the note.
        self._note_best(epoch, scores, done=done)
        self.folder.add_events("epoch", self.trainer.steps, training)
        self.folder.add_events("test", self.trainer.steps, scores)
        line = {**devices[0], "devices": devices}
        bar.say(epoch_line(line, self.epochs))
        # If the pass is over, a run that resumes from here starts with the next epoch: it must find
        # this one counted, and nothing of it in its meter.
        self.saved["part"], self.saved["epochs_done"] = part, epoch + done
        # Scores of a part would have the best whole epoch deleted.
        rule: dict[str, Any] = {"scores": scores, "best": self._rule} if done else {}
        self.trainer.save(self.folder.checkpoints, keep=KEPT, extra={**self.saved}, **rule)
        self.folder.say(best=self._best)

    def _note_best(self, epoch: int, scores: Mapping[str, float], *, done: bool) -> None:
        name = self._rule.partition(" ")[2]
        found = Best(epoch=epoch, score=name, value=scores[name], checkpoint=self._checkpoint)
        if not done:
            self._cut = found
            return
        self._note_peak(scores[name], self._sign)
        self.saved["best"] = self._better(found)

    def _better(self, found: Best) -> Best:
        """The best whole epoch, or a model that is better."""
        best, sign = self.saved["best"], self._sign
        # A tie stays with the earlier epoch, as it does where old checkpoints are deleted; the
        # other way round, run.json would name one that is gone. A score that is NaN beats nothing.
        if best is None or math.isnan(best["value"]):
            return found
        return found if sign * found["value"] > sign * best["value"] else best

    @property
    def _best(self) -> Best | None:
        return self._better(self._cut) if self._cut else self.saved["best"]

    @property
    def _sign(self) -> int:
        """1 if the highest score is the best, and -1 if the lowest is."""
        return 1 if self._rule.startswith("highest") else -1

    def _note_peak(self, value: float, sign: int) -> None:
        peak = self.saved.get("peak", Peak(value=math.nan, stale=0))
        # A tie is no progress: a model of one answer would never run out of patience.
        if sign * value > sign * peak["value"] or math.isnan(peak["value"]) > math.isnan(value):
            self.saved["peak"] = Peak(value=value, stale=0)
        else:
            self.saved["peak"] = Peak(value=peak["value"], stale=peak["stale"] + 1)

    @property
    def _stale(self) -> int:
        """Epochs since the score was better than ever before."""
        return self.saved["peak"]["stale"] if "peak" in self.saved else 0

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
            "best": self._best,
            # Of an earlier end, if the run had finished and now resumes with more epochs.
            "finished": None,
            "fingerprint": None,
            "ended": None,
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

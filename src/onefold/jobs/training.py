"""Trains a task: the epochs, evaluations, checkpoints and records that all jobs have in common.

It uses nothing but the public interface, so it is also an example of how to use that.

`read_saved` reads what a run keeps in its checkpoints besides the model: how far it is, and its
best epoch. A checkpoint that is sound by its digests may still be another script's, put in the
run's folder. `Meter` adds up losses and times of an epoch's steps, without waiting for a GPU in
each.

Note: what an end at any point leaves
-------------------------------------
Only the checkpoints decide where a run resumes; ``metrics.jsonl`` and ``run.json`` follow them.
A line of metrics is written before the checkpoint that counts it, so no line can be missing, and
`RunFolder.go_on` removes those that came after the checkpoint. ``run.json`` names the best
checkpoint only once that is on the disk; what it named before may be gone by then, and
`onefold.jobs.finetune.best_checkpoint` then looks for the best that is there.

Note: when a loss is read
-------------------------
To read the loss of a step, Python must wait until the GPU has computed it, and meanwhile queues
no further work. So steps are only collected, and read together every half a second, for a line of
metrics, or for a checkpoint. The order in which they are added up stays that of the steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

import msgspec
import torch
from torch import nn

import onefold
from onefold.errors import CheckpointError, LaunchError
from onefold.jobs.data.files import BadFile
from onefold.jobs.options import TrainOptions, make_optimizer, rate_factor
from onefold.jobs.progress import PHASES, TrainingBar, epoch_line
from onefold.jobs.runfolder import CHECKPOINTS, RunFolder
from onefold.system.process import STOPPED_CODE
from onefold.system.words import counted

__all__ = ["Task", "begin_training", "facts_of"]


_log = logging.getLogger("onefold")
_LINES = 20
"""Lines of metrics in an epoch, besides that of the epoch itself."""
_FEW_STEPS = 100
"""With fewer steps in all, hardly anything is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a job makes of its options and data: everything that `train` needs."""

    model: nn.Module
    groups: Sequence[dict[str, Any]]
    """Parameters to train, each group with its full learning rate ``lr``."""
    loss: Callable[[nn.Module, Any], Any]
    """As `onefold.Trainer` takes it."""
    score: Callable[[nn.Module, Any], dict[str, Any]]
    """As ``Trainer.evaluate`` takes it."""
    best: str
    """Which checkpoint is the best, as ``Trainer.save`` takes it: ``"highest accuracy"``."""
    train_set: Any
    test_set: Any
    collate: Callable[[list[Any]], Any] | None = None
    lengths: Sequence[int] | None = None
    """The training samples' lengths, if those of similar length are to share a batch."""
    least_shard: int = 1
    """How many samples each shard needs, such as 2 for batch norm; a last batch that is too short
    for that is left out."""
    evaluation_batch_size: int = 256
    examples: Callable[[onefold.Trainer, RunFolder], dict[str, Any]]
    """What the report shows of the trained model; called on every device."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What ``run.json`` records besides: classes, the model's name, what was left out."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files without which the model cannot be used later: content by name."""
    scan: str = ""
    """What the look through the data's files found, for a run that resumes."""


class Described(Protocol):
    """Data that a job has prepared, as far as every run's record describes it."""

    @property
    def digest(self) -> str: ...
    @property
    def left_out(self) -> list[BadFile]: ...
    @property
    def notes(self) -> list[str]: ...


def facts_of(data: Described) -> dict[str, Any]:
    """What ``run.json`` records about the data, whatever the job."""
    left_out = [str(each) for each in data.left_out]
    return {"data": data.digest, "left_out": left_out, "notes": data.notes}


def train(options: TrainOptions, job: str, task: Task) -> dict[str, Any]:
    """Train on the devices of this run, and leave everything in the run's folder.

    Args:
        options: settled ones.
        job: whose run it is.
        task: what to train.

    Returns:
        What ``run.json`` holds in the end.
    """
    return begin_training(options, job, task).run()


def begin_training(options: TrainOptions, job: str, task: Task) -> Training:
    """Build the trainer of a run without writing anything yet; called on every device.

    Args:
        options: settled ones.
        job: whose run it is.
        task: what to train.

    Raises:
        ValueError: the options do not suit the task, or the devices.
    """
    _check_task(options, task)
    epochs, steps = options.epochs or 1, _steps_of_epoch(options, task)
    optimizer = make_optimizer(options, task.groups)
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
    return Training(options, job, task, trainer, folder, optimizer, epochs, steps)


def _check_task(options: TrainOptions, task: Task) -> None:
    """Refuse a batch size with which not even a full batch has enough samples for each shard.

    Raises:
        ValueError: the largest batch has too few samples.
    """
    most = min(options.batch_size, len(task.train_set))
    if most < _least_batch(options, task):
        raise ValueError(
            f"a batch has {most} samples at most (--batch-size {options.batch_size}, "
            f"{len(task.train_set)} samples to train with): this model needs {task.least_shard} or "
            f"more in each of its {options.shards} shards; give fewer --shards or a larger batch"
        )


def _steps_of_epoch(options: TrainOptions, task: Task) -> int:
    """Number of batches in a pass over the training set, without a last one that is too short."""
    whole, rest = divmod(len(task.train_set), options.batch_size)
    return whole + (1 if rest >= _least_batch(options, task) else 0)


def _least_batch(options: TrainOptions, task: Task) -> int:
    """The fewest samples that a batch may have."""
    # An empty shard is skipped. One with a single sample is not, and batch norm fails on it, or
    # learns nothing: where a shard needs two samples, every shard of a batch must have them.
    return task.least_shard * options.shards if task.least_shard > 1 else 1


class Training:
    """One training, from its beginning or last checkpoint to its end. Made by `begin_training`."""

    def __init__(
        self,
        options: TrainOptions,
        job: str,
        task: Task,
        trainer: onefold.Trainer,
        folder: RunFolder,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        steps: int,
    ) -> None:
        self._options = options
        self._job = job
        self._task = task
        self._trainer = trainer
        self._folder = folder
        self._optimizer = optimizer
        self._epochs = epochs
        self._steps = steps
        self._part: dict[str, float] = {}
        self._epochs_done = 0
        self._best: dict[str, Any] | None = None

    @property
    def is_lead(self) -> bool:
        """Whether this process writes."""
        return self._trainer.is_lead

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
            self._folder.close()

    def _begin(self) -> None:
        """Create the folder, or load its last checkpoint."""
        loaded, checkpoints = None, self._folder.checkpoints
        # Loaded before the folder is touched: how much of the metrics stays depends on the step of
        # the checkpoint. A run that was killed before its first one begins again, in its folder.
        if self._options.resume:
            loaded = self._trainer.load(checkpoints, if_any=True)
        if loaded is not None:
            self._part, self._epochs_done, self._best = read_saved(loaded.extra, checkpoints)
        self._agree(self._open_folder)

    def _open_folder(self) -> None:
        if self._options.resume:
            self._folder.go_on(
                self._options, self._job, steps=self._trainer.steps, epochs=self._epochs_done
            )
        else:
            self._folder.create(self._options, self._job, self._task.files)
            self._folder.say(started=_now())
        self._folder.keep_scan(self._task.scan)
        # TensorBoard drops events from this step on: those of steps that are now done again.
        self._folder.open_events(self._trainer.steps + 1)
        self._folder.say(**self._facts())

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
            failure = LaunchError(f"{self._folder.path}: the run cannot be written there: {words}")
            failure.__cause__ = error
        # On every device, failed or not: if the lead raised at once, the others would wait for it
        # until their time is up, and then report a lost device rather than the folder.
        failed = self._trainer.gather({"failed": float(failure is not None)})
        if failure is None and any(device["failed"] for device in failed):
            failure = LaunchError(f"{self._folder.path}: the lead device could not write there")
        if failure is not None:
            self._folder.close()
            raise failure

    def _opening(self) -> list[str]:
        """Lines to begin with: what is trained on what, and anything that looks wrong."""
        facts, trainer = self._facts(), self._trainer
        classes = f" in {counted(len(facts['classes']), 'class')}" if "classes" in facts else ""
        opening = (
            f"{self._folder.path}: {facts['train_samples']:,} samples to train with, "
            f"{facts['test_samples']:,} to test with{classes}; {facts['model']} of "
            f"{facts['parameters']:,} parameters; {counted(len(trainer.devices), 'device')}"
        )
        lines = [opening]
        if trainer.steps:
            epoch = self._epochs_done + 1
            lines.append(f"goes on after step {trainer.steps:,}, in epoch {epoch}")
        total = self._steps * self._epochs
        if total < _FEW_STEPS:
            lines.append(f"only {total} steps in all: a smaller --batch-size gives more of them")
        return lines

    def _train(self) -> None:
        """Train the epochs that remain."""
        task, options, trainer = self._task, self._options, self._trainer
        batches = trainer.loader(
            task.train_set,
            batch_size=options.batch_size,
            shuffle=True,
            # Only a last batch that is too short for the shards is dropped; see `_steps_of_epoch`.
            drop_last=self._steps * options.batch_size <= len(task.train_set),
            lengths=task.lengths,
            workers=options.workers,
            collate=task.collate,
        )
        done = self._epochs_done * len(task.train_set) + int(self._part.get("samples", 0))
        with TrainingBar(
            trainer, samples=len(task.train_set), epochs=self._epochs, done=done
        ) as bar:
            for line in self._opening():
                bar.say(line)
            for epoch in trainer.epochs(self._epochs):
                meter = Meter(self._part)
                self._train_epoch(epoch, batches, meter, bar)
                self._evaluate(epoch, meter, bar)

    def _finish(self) -> dict[str, Any]:
        """Record examples of the best model and the end of the run."""
        # Of the last model, so before the examples put the best one in its place for a while.
        fingerprint = self._trainer.fingerprint()
        self._folder.write_examples(self._examples())
        end = {"finished": _now(), "fingerprint": fingerprint, "best": self._best}
        self._folder.say(**end)
        return {**self._facts(), **end, "is_lead": self._trainer.is_lead}

    def _examples(self) -> dict[str, Any]:
        """Predictions of the best model for the test set; the trainer is left as it was.

        If the best checkpoint cannot be read, the last model's are taken instead.
        """
        epoch, last = self._epochs_done - 1, f"step-{self._trainer.steps:08d}"
        best = self._best or {}
        is_last = Path(best.get("checkpoint", last)).name == last
        if not is_last:
            try:
                self._trainer.load(self._folder.path / best["checkpoint"])
                epoch = best["epoch"]
            except CheckpointError:
                # Raised alike on all devices, with nothing changed: none of them is left behind.
                is_last = True
        examples = self._task.examples(self._trainer, self._folder)
        if not is_last:
            self._go_back(last)
        return {**examples, "epoch": epoch}

    def _go_back(self, checkpoint: str) -> None:
        """Put the last model back in the place of the best one, if it can still be read."""
        try:
            self._trainer.load(self._folder.checkpoints / checkpoint)
        # Raised alike on all devices. Nothing that follows needs the model, and a training that is
        # over must not end in an error; but it could not be resumed from here.
        except CheckpointError as error:
            if self.is_lead:
                _log.warning("the last checkpoint cannot be loaded any more: %s", error)

    def _train_epoch(self, epoch: int, batches: Any, meter: Meter, bar: TrainingBar) -> None:
        every = max(1, len(batches) // _LINES)
        for batch in batches:
            # Read first: the step ends by moving the schedule on to the next rate.
            rate = self._optimizer.param_groups[0]["lr"]
            step = self._trainer.step(batch)
            meter.add(step, rate)
            bar.advance(step, mean_loss=meter.mean_loss)
            if step.number % every == 0:
                where = {"kind": "steps", "epoch": epoch, "step": step.number}
                self._folder.add({**where, **meter.take_line()})
            # The devices agreed on this in the step, so that all of them save now, or none does.
            stop = self._trainer.asked_to_stop
            if stop or step.number % self._options.save_every == 0:
                extra = self._extra(self._epochs_done, meter.saved())
                # In the background while training continues; before leaving, it must be on disk.
                self._trainer.save(self._folder.checkpoints, keep=KEPT, wait=stop, extra=extra)
            if stop:
                raise SystemExit(STOPPED_CODE)
        meter.look()

    def _evaluate(self, epoch: int, meter: Meter, bar: TrainingBar) -> None:
        # Taken before the evaluation, during which this clock runs on.
        train_s, task = meter.seconds, self._task
        scores = self._trainer.evaluate(
            task.score,
            task.test_set,
            batch_size=task.evaluation_batch_size,
            workers=self._options.workers,
            collate=task.collate,
        )
        names = [str(device) for device in self._trainer.devices]
        phases = self._trainer.gather(meter.phases)
        line = {
            "kind": "epoch",
            "epoch": epoch,
            "step": self._trainer.steps,
            "loss": meter.mean_loss,
            "scores": scores,
            "lr": meter.rate,
            "train_s": train_s,
            "evaluate_s": meter.seconds - train_s,
            "samples_per_s": meter.samples / train_s,
            "devices": [
                {"device": name, **seconds} for name, seconds in zip(names, phases, strict=True)
            ],
        }
        # The checkpoint below holds the best so far; for the order of the rest, see the note.
        self._note_best(epoch, scores)
        self._folder.add(line)
        bar.say(epoch_line(line, self._epochs))
        # The pass is over, so a run that resumes from here starts with the next epoch: it must find
        # this one counted, and nothing of it in its meter.
        self._epochs_done, self._part = epoch + 1, {}
        self._trainer.save(
            self._folder.checkpoints,
            scores=scores,
            keep=KEPT,
            best=task.best,
            extra=self._extra(epoch + 1, {}),
        )
        self._folder.say(best=self._best)

    def _note_best(self, epoch: int, scores: Mapping[str, float]) -> None:
        direction, _, name = self._task.best.partition(" ")
        value = scores[name]
        sign = 1 if direction == "highest" else -1
        before = self._best["value"] if self._best else math.nan
        # A tie goes to the later epoch, as it does where old checkpoints are deleted; the other
        # way round, run.json would name one that is gone. A score that is NaN beats nothing.
        if math.isnan(before) or sign * value >= sign * before:
            checkpoint = Path(self._folder.checkpoints.name) / f"step-{self._trainer.steps:08d}"
            self._best = {
                "epoch": epoch,
                "score": name,
                "value": value,
                "checkpoint": str(checkpoint),
            }

    def _extra(self, epochs_done: int, part: dict[str, float]) -> dict[str, Any]:
        return {"epochs_done": epochs_done, "part": part, "best": self._best}

    def _facts(self) -> dict[str, Any]:
        model = self._trainer.model
        return {
            "job": self._job,
            "name": self._options.name,
            "onefold": onefold.__version__,
            "torch": torch.__version__,
            "devices": [str(device) for device in self._trainer.devices],
            "shards": self._options.shards,
            "epochs": self._epochs,
            "train_samples": len(self._task.train_set),
            "test_samples": len(self._task.test_set),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "score": self._task.best,
            "best": self._best,
            # Of an earlier end, if the run had finished and now resumes with more epochs.
            "finished": None,
            "fingerprint": None,
            **self._task.facts,
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Best(TypedDict):
    epoch: _Count
    score: str
    value: float
    # Nothing but a checkpoint of the run: it is loaded for the examples.
    checkpoint: Annotated[str, msgspec.Meta(pattern=rf"\A{CHECKPOINTS}/step-[0-9]{{8,}}\Z")]


class _Saved(TypedDict):
    part: dict[str, float]
    epochs_done: _Count
    best: _Best | None


def read_saved(
    extra: object, checkpoints: Path
) -> tuple[dict[str, float], int, dict[str, Any] | None]:
    """Read the ``extra`` of a run's checkpoint.

    Args:
        extra: what ``Trainer.load`` returned of it.
        checkpoints: the folder of the run's checkpoints, for the error.

    Returns:
        The numbers of the epoch that was begun, the number of whole epochs, and the best of them.

    Raises:
        CheckpointError: it was not saved by ``onefold train``.
    """
    try:
        saved = msgspec.convert(extra, _Saved)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise CheckpointError(
            f"{checkpoints}: expected checkpoints of onefold train, the newest was saved by "
            f"something else ({error}): remove it, or begin a new run with another --name"
        ) from error
    best = saved["best"]
    return saved["part"], saved["epochs_done"], None if best is None else {**best}


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
        self.total = so_far.get("total", 0.0)
        self.samples = int(so_far.get("samples", 0))
        self._before_s = so_far.get("seconds", 0.0)
        self.phases = {phase: so_far.get(phase, 0.0) for phase in PHASES}
        self.rate = so_far.get("rate", 0.0)
        self._start_s = self._looked_s = time.perf_counter()
        self._pending: list[onefold.Step] = []
        self._line = (so_far.get("line_total", 0.0), int(so_far.get("line_samples", 0)))
        # As if the line had begun earlier by the time that it took before the run was stopped.
        self._line_start_s = self._start_s - so_far.get("line_seconds", 0.0)

    def add(self, step: onefold.Step, rate: float) -> None:
        """Count a step, which was made at this learning rate."""
        self.rate = rate
        # Unread, or Python would wait for the GPU here: see the note.
        self._pending.append(step)
        if time.perf_counter() - self._looked_s > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Read the losses and times of the steps that were only collected so far."""
        line_total, line_samples = self._line
        for step in self._pending:
            total = float(step.loss) * step.samples
            self.total, self.samples = self.total + total, self.samples + step.samples
            line_total, line_samples = line_total + total, line_samples + step.samples
            for phase, seconds in asdict(step.seconds).items():
                self.phases[phase] += seconds
        self._line = line_total, line_samples
        self._pending.clear()
        # Only now: the reading itself may have waited for long.
        self._looked_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the epoch began, those before a stop included."""
        return self._before_s + time.perf_counter() - self._start_s

    @property
    def mean_loss(self) -> float:
        """Mean loss of the samples read so far; NaN if there are none."""
        return self.total / self.samples if self.samples else float("nan")

    def take_line(self) -> dict[str, float]:
        """Begin a new line of metrics; return the loss, speed and rate of the one that ends."""
        self.look()
        total, samples = self._line
        now_s = time.perf_counter()
        # A line may follow another so closely that the clock has not moved.
        speed = samples / max(now_s - self._line_start_s, 1e-9)
        self._line, self._line_start_s = (0.0, 0), now_s
        loss = total / samples if samples else math.nan
        return {"loss": loss, "samples_per_s": speed, "lr": self.rate}

    def saved(self) -> dict[str, float]:
        """The numbers that a checkpoint in the middle of the epoch keeps."""
        # All steps so far are part of the checkpoint, so their losses must be in it as well.
        self.look()
        return {
            "total": self.total,
            "samples": float(self.samples),
            "seconds": self.seconds,
            "rate": self.rate,
            "line_total": self._line[0],
            "line_samples": float(self._line[1]),
            "line_seconds": time.perf_counter() - self._line_start_s,
            **self.phases,
        }

"""The face of onefold: `Trainer`. Everything that computes lies below it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.checkpoint.autosave import Autosave
from onefold.checkpoint.resume import Checkpoint, Checkpoints, Keeping
from onefold.core.batch import ShardedBatch, cut_batch
from onefold.core.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.core.head import Call, StepHead
from onefold.core.jsonvalue import to_json
from onefold.core.numbers import check_seconds
from onefold.core.settings import BufferRule, Settings
from onefold.core.shard import Plan
from onefold.engine.assembly import assemble
from onefold.engine.evaluation import DataCall, ScoreFunction, evaluate
from onefold.engine.modelcheck import check_model
from onefold.engine.prediction import gather, predict
from onefold.engine.replica import LossFunction
from onefold.engine.schedule import check_schedule
from onefold.engine.step import Step
from onefold.engine.update import check_optimizer
from onefold.errors import CheckpointError
from onefold.exchange.progress import progress_of
from onefold.reading.loader import Collate, Loader, SizedDataset
from onefold.reading.position import Position
from onefold.run.membership import at_good_end, register
from onefold.run.observers import observers_of
from onefold.run.team import form_team, settle_process
from onefold.run.world import current_world
from onefold.system.interrupt import STOPPED_CODE
from onefold.verifying import Verifying
from onefold.watch.timing import Span, host_now_s

__all__ = ["Trainer"]

_log = logging.getLogger("onefold")


class Trainer:
    """Trains a model on any number of devices, to the same bits as on one.

    Args:
        model: any module; it stays yours, keeps its parameters' names, and always holds the
            current values.
        optimizer: made from the model's parameters; it is kept, so schedulers attached to it work.
        loss: ``loss(model, batch)`` for one shard on one device. Returns a tensor (n,) of one loss
            a sample, a scalar (the mean over the shard's samples), ``onefold.Mean``,
            ``onefold.Sum``, or a sum of these two. The step's loss is the sum of totals over the
            sum of weights across the whole batch; `onefold.losses` has PyTorch's losses so.
        shards: V, into how many parts every batch is cut: the most devices that may ever share a
            batch. Like the batch size it is part of the result.
        seed: of dropout, augmentation, the order of samples and all other randomness.
        devices: several devices for this one process to drive, such as ``["cuda:0", "cuda:1"]``.
            Without it a launcher decides, or one device is used.
        plan: how many shards each device runs, such as ``(3, 1)``; even shares by default.
        threads: of each CPU device; ``max(1, cores // shards)`` by default.
        schedule: a ``torch.optim.lr_scheduler`` of the optimizer, to be stepped once a step, the
            same on any number of devices, and saved with the run.
        clip_norm: scale the whole gradient down to this norm where it is larger.
        deterministic: use kernels that repeat their bits, and refuse those that cannot.
        buffers: what becomes of buffers that shards change, by name or pattern, where it is not the
            mean over the shards (floating point) or the largest (other numbers): ``"mean"``,
            ``"max"``, ``"sum"`` (of what each shard added) or ``"first"`` (the first shard's).
        timeout_s: the longest that a device waits for another one; 600 s by default.

    Raises:
        TypeError, ValueError: an argument is not usable.
        LaunchError: a device is not there.
        DisagreementError: another device of the run was given something else.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss(model, batch):
        ...     x, y = batch
        ...     return (model(x) - y).square().mean(dim=1)
        >>> trainer = Trainer(model, optimizer, loss, shards=2)
        >>> step = trainer.step((torch.ones(6, 2), torch.zeros(6, 1)))
        >>> step.number, step.samples
        (1, 6)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        shards: int,
        seed: int = 0,
        devices: Sequence[str | torch.device] | None = None,
        plan: Sequence[int] | None = None,
        threads: int | None = None,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = None,
        deterministic: bool = True,
        buffers: Mapping[str, BufferRule] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._world = current_world()
        if timeout_s is None:
            timeout_s = self._world.options.timeout_s
        settings = Settings(
            shards=shards,
            seed=seed,
            clip_norm=clip_norm,
            deterministic=deterministic,
            timeout_s=check_seconds("timeout_s", timeout_s),
            threads=threads,
            buffers=dict(buffers or {}),
        )
        check_model(model)
        check_optimizer(optimizer, model)
        if schedule is not None:
            check_schedule(schedule, optimizer)
        if not callable(loss):
            raise TypeError(f"expected loss to be a function of model and batch, got {loss!r}")
        self._settings = settings
        self._team = form_team(self._world, devices, shards=shards, module=model)
        chosen = self._checked_plan(plan)
        settle_process(self._team, shards=shards, threads=threads)
        self._verifying = Verifying(self._world, model, loss)
        self._engine = assemble(
            model,
            optimizer,
            self._verifying.loss,
            settings=settings,
            team=self._team,
            plan=chosen,
            schedule=schedule,
            joined=register,
        )
        self._verifying.begin(self._engine, self._team)
        self._schedule = schedule
        self._left = False
        self._process = os.getpid()
        self._asked_to_stop = False
        self._position = Position()
        self._checkpoints = Checkpoints(
            self._engine, settings, self._team, self._position, schedule
        )
        self._check_can_be_saved()
        self._progress = progress_of(self._world)
        with self._telling_others():
            self._autosave = Autosave.of(
                self._team, self._checkpoints, self._position, self._progress
            )
        if self._autosave is not None:
            at_good_end(self._finish)
        self._note_progress()
        watches = {replica.number: replica.watch for replica in self._engine.replicas}
        self._observers = observers_of(self._team, model, watches, self.steps)

    @property
    def model(self) -> torch.nn.Module:
        """The user's own module with the current parameters."""
        return self._engine.replicas[0].module

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the run, by number."""
        return self._team.devices

    @property
    def shards(self) -> int:
        """V."""
        return self._settings.shards

    @property
    def is_lead(self) -> bool:
        """Whether this process has device 0."""
        return 0 in self._team.own

    @property
    def asked_to_stop(self) -> bool:
        """Whether the launcher has asked the run to save itself and stop, see `onefold.launch`.

        Settled in each step, so it is the same on all devices.
        """
        return self._asked_to_stop

    @property
    def steps(self) -> int:
        """Steps done, those before a checkpoint included."""
        return self._position.step

    @property
    def plan(self) -> tuple[int, ...]:
        """How many shards each device runs.

        May be set between steps, alike on all devices; it holds from the next batch that a loader
        hands out, however many were read ahead. The result does not depend on it.
        """
        return self._engine.roster.plan.counts

    @plan.setter
    def plan(self, counts: Sequence[int]) -> None:
        plan = self._checked_plan(counts)
        self._engine.bind(self._engine.roster.next(plan=plan))

    def loader(
        self,
        dataset: SizedDataset,
        *,
        batch_size: int,
        shuffle: bool = False,
        lengths: Sequence[int] | None = None,
        workers: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> Loader:
        """Batches of a data set, for `step`; each device reads its own shards alone.

        Make loaders in the same order on all devices and in every run: their order and random
        numbers depend on how many were made before. What is changed in the data set between passes
        is seen by the next pass, with any number of workers.

        In a run that goes on from a checkpoint, the first pass begins with the first sample that no
        step has used.

        Args:
            dataset: has a length and an item for each index.
            batch_size: samples of a whole batch, over all devices.
            shuffle: visit the samples in another order in each pass.
            lengths: of every sample, with ``shuffle``: those of near length come together, so that
                little is padded. The order depends on them and on the batch size.
            workers: processes that read ahead, for each device.
            drop_last: leave out a last batch that is short.
            collate: makes a shard's payload from a list of samples; PyTorch's default if None.

        Raises:
            TypeError: the data set has no length or no items.
            ValueError: it is empty, or a number is out of range.
            CheckpointError: the run goes on from a checkpoint, and the loader that was made in this
                place had another batch size, another length of data or another number.
        """
        collate = self._verifying.collate(collate, keeps=True)
        made = self._loader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            lengths=lengths,
            workers=workers,
            drop_last=drop_last,
            collate=collate,
        )
        self._position.add(made.track)
        self._verifying.add(made, dataset, collate)
        return made

    def _loader(self, dataset: SizedDataset, **choices: Any) -> Loader:
        return Loader(
            dataset,
            **choices,
            seed=self._settings.seed,
            plan=lambda: self._engine.roster.plan,
            own=self._team.own,
            first_epoch=self._position.epoch,
            pin_memory=self._team.devices[0].type == "cuda",
            timeout_s=self._settings.timeout_s,
            digest=self._engine.with_others,
        )

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is up to ``number``.

        A run that was saved in the middle of an epoch goes on in that one.
        """
        return self._position.epochs(number)

    def step(self, batch: object) -> Step:
        """One update from one whole batch.

        Args:
            batch: what `loader` yields; or tensors or NumPy arrays (n, ...), or tuples, lists and
                dicts of them, the same on every device, which are cut along the first dimension.

        Raises:
            ValueError: the tensors of the batch disagree in length, or it is empty.
            DisagreementError: another device is in another step, or was given something else.
            StateError: a shard has changed what it must not, such as a parameter.
            GradientError: a gradient cannot be added up.
            LossError: the loss is of the wrong shape, or not finite; names step and shard.
            PeerError: another device failed or is lost.
            OSError: a checkpoint of before could not be written in the background.
            SystemExit: the launcher asked the run to stop, and it has been saved.
        """
        self._engine.take_spans()  # of a step that failed and was survived
        start = host_now_s()
        cut = self._cut(self._verifying.batch(batch))
        waited = cut.waited or (start, host_now_s())
        number = self._position.step + 1
        if self._before_step(cut):
            raise SystemExit(STOPPED_CODE)
        with self._telling_others():
            asked = self._world.options.may_stop and self._is_asked_to_stop()
            with self._verifying.step(cut, number) as given:
                outcome = self._engine.step(given, number, asked_to_stop=asked)
            if self._schedule is not None and outcome.verdict.updates:
                self._schedule.step()
        self._asked_to_stop |= outcome.verdict.stops
        self._position.note_step(cut)
        self._engine.end_step()
        self._note_progress()
        spans = self._engine.take_spans()
        first = [Span("data", "batch", *waited), *spans[self._team.own[0]]]
        spans[self._team.own[0]] = first
        step = Step(number, cut.samples, cut.epoch, outcome, first)
        for observe in self._observers:
            observe(step, spans)
        if self._after_step(cut, stop=outcome.verdict.stops):
            raise SystemExit(STOPPED_CODE)
        return step

    def evaluate(
        self,
        score: ScoreFunction,
        dataset: SizedDataset,
        *,
        batch_size: int,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> dict[str, float]:
        """Scores over a data set, each sample exactly once, the same on any number of devices.

        Args:
            score: ``score(model, batch)`` for one shard; returns a dict of names to what a loss may
                return. The model is in evaluation mode and no gradient is recorded.
            dataset: as for `loader`.
            batch_size: samples of a whole batch, over all devices.
            workers: processes that read ahead, for each device.
            collate: as for `loader`.

        Returns:
            For each name the sum of totals over the sum of weights, on every device.

        Raises:
            LossError: a value is of the wrong shape.
            DisagreementError: the names differ between shards.
        """
        collate = self._verifying.collate(collate)
        batches = self._loader(dataset, batch_size=batch_size, workers=workers, collate=collate)
        with self._telling_others():
            self._checkpoints.check()
            call = self._data_call(Call.EVALUATE, score, batches, batch_size)
            return evaluate(self._engine, score, batches, call)

    def predict(
        self,
        function: ScoreFunction,
        dataset: SizedDataset,
        *,
        batch_size: int,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> dict[str, torch.Tensor]:
        """What the model says of every sample, in the data set's order, on every device.

        Called on every device.

        Args:
            function: ``function(model, batch)`` for one shard; returns a dict of names to tensors
                (n, ...), one row a sample, alike in dtype and shape for all samples. The model is
                in evaluation mode and no gradient is recorded.
            dataset: as for `loader`.
            batch_size: samples of a whole batch, over all devices.
            workers: processes that read ahead, for each device.
            collate: as for `loader`.

        Returns:
            For each name a tensor (samples, ...) on the host, in memory as a whole.

        Raises:
            LossError: a value is no tensor with one row a sample.
            DisagreementError: names, dtypes or shapes differ between shards.

        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model, optimizer, lambda m, x: m(x).square().mean(dim=1), shards=2)
        >>> said = trainer.predict(lambda m, x: {"sum": x.sum(1)}, torch.ones(5, 2), batch_size=4)
        >>> said["sum"]
        tensor([2., 2., 2., 2., 2.])
        """
        collate = self._verifying.collate(collate)
        batches = self._loader(dataset, batch_size=batch_size, workers=workers, collate=collate)
        with self._telling_others():
            self._checkpoints.check()
            call = self._data_call(Call.PREDICT, function, batches, batch_size)
            return predict(self._engine, function, batches, call)

    def gather(self, numbers: Mapping[str, float]) -> list[dict[str, float]]:
        """Numbers of every device's process, such as seconds or bytes; called on every device.

        Args:
            numbers: of this process, by name; the same names in all processes. Where one process
                drives several devices, each of them has these.

        Returns:
            One dict for each of `devices`, in their order, on every device.

        Raises:
            DisagreementError: the names differ between devices.
            ValueError: a name is empty, or of several lines.
        """
        with self._telling_others():
            self._engine.agree(StepHead(Call.GATHER, self.steps + 1))
            return gather(self._engine.exchange, dict.fromkeys(self._team.own, numbers))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block in which the model may be changed between steps; called on every device.

        When it ends, the parameters and buffers of the lead, and the settings of its optimizer's
        groups, are everybody's. What other devices write in it is theirs until then and dropped
        afterwards, so the same lines may run on all of them, or on the lead alone. With several
        devices, what is changed outside such a block is refused at the next call.

        Raises:
            DisagreementError: another device is somewhere else.
            RuntimeError: the trainer is called inside the block.

        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model, optimizer, lambda m, x: m(x).square().mean(dim=1), shards=2)
        >>> with trainer.changing(), torch.no_grad():
        ...     _ = model.weight.clamp_(-0.1, 0.1)
        """
        with self._telling_others(), self._engine.changing(self.steps + 1):
            yield

    def barrier(self) -> None:
        """Wait until every device has come to this point of the script.

        Raises:
            DisagreementError: another device is somewhere else.
            PeerError: another device failed, is lost or does not come.
        """
        with self._telling_others():
            self._engine.agree(StepHead(Call.BARRIER, self.steps + 1))

    def fingerprint(self) -> str:
        """16 hexadecimal digits over parameters and buffers: the same for the same bits."""
        return fingerprint_of(tensor_digests(named_tensors(self.model)))

    def save(
        self,
        directory: str | Path,
        *,
        scores: Mapping[str, float] | None = None,
        keep: int | None = 3,
        best: str | None = None,
        wait: bool = True,
        extra: object = None,
    ) -> Path:
        """Write the run as it is now to ``directory/step-00001234/``, from where `load` goes on.

        ``model.safetensors`` there holds the parameters and buffers under the user's own names,
        ``optimizer.safetensors`` the optimizer's tensors, ``run.json`` the rest. The folder is
        there whole or not at all; it does not depend on the number of devices. Called on every
        device; the lead writes.

        Args:
            directory: holds the checkpoints of a run; made if it is not there.
            scores: numbers to remember with this checkpoint, such as what `evaluate` returned.
            keep: how many of the newest checkpoints of this run stay in the directory; with None
                this one stays for good. What anybody else put there is left alone.
            best: ``"highest NAME"`` or ``"lowest NAME"`` of ``scores``: from here on, of those of
                this run, the checkpoint with that score stays too.
            wait: return when all is on the disk. If not, when it has been copied in memory; what
                then fails in writing is raised by the next call.
            extra: None, numbers, text, or lists, tuples and dicts of these; `load` gives it back.

        Returns:
            The folder.

        Raises:
            OSError: it could not be written; what was there before is still there.
            StateError: a parameter is not finite, or a step broke off in the middle of its update.
            TypeError: ``extra`` holds something else, or the model or optimizer what no file holds.
            ValueError: an argument is out of range.

        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model, optimizer, lambda m, x: m(x).square().mean(dim=1), shards=2)
        >>> step = trainer.step(torch.ones(6, 2))
        >>> directory = tempfile.mkdtemp()
        >>> trainer.save(directory, extra={"note": "first try"}).name
        'step-00000001'
        >>> trainer.load(directory).extra
        {'note': 'first try'}
        """
        keeping = Keeping.checked(keep, best, scores or {})
        copied = to_json(extra, "extra")
        with self._telling_others():
            return self._checkpoints.save(
                self._verifying.writes_to(directory), keeping=keeping, wait=wait, extra=copied
            )

    @overload
    def load(
        self,
        directory: str | Path,
        *,
        changed: Collection[str] = (),
        if_any: Literal[False] = False,
    ) -> Checkpoint: ...

    @overload
    def load(
        self, directory: str | Path, *, changed: Collection[str] = (), if_any: bool
    ) -> Checkpoint | None: ...

    def load(
        self, directory: str | Path, *, changed: Collection[str] = (), if_any: bool = False
    ) -> Checkpoint | None:
        """Go on from the newest checkpoint of a directory, on any number of devices.

        Afterwards model, optimizer and schedule are as they were, and `epochs` and loaders, made
        before or after, go on at the sample where the run was saved. A checkpoint that is damaged
        is left out with a warning. Called on every device; the lead reads.

        Args:
            directory: what was given to `save`, or the folder of one checkpoint.
            changed: what may differ from the run that was saved, each giving up a part of the
                promise: ``"seed"``, ``"shards"``, ``"batch_size"``, ``"dataset"``,
                ``"clip_norm"``, ``"optimizer"``, ``"schedule"``.
            if_any: where there is no checkpoint yet, do nothing, and return None.

        Raises:
            CheckpointError: there is no checkpoint, none is whole, or it does not fit this run:
                another model, or something else of the above. It is raised alike on all devices,
                and nothing has been changed, so the script may go on from its beginning.
        """
        names = (changed,) if isinstance(changed, str) else tuple(changed)
        try:
            with self._telling_others(but=CheckpointError):
                place = self._verifying.reads_from(directory, if_any=if_any)
                found = self._checkpoints.load(place, changed=names, if_any=if_any)
        finally:
            self._note_progress()
        return found

    def close(self) -> None:
        """Leave the run; the model keeps its values. Also done at the end of the program.

        With ``onefold run --checkpoint``, where an exception is being handled on one of several
        devices, the run is left at the end of the script, and saved there if that ends well.

        Raises:
            OSError: a checkpoint could not be written in the background.
        """
        if self._saves_with_others and not self._left and _is_failing():
            return
        self._finish()
        self._left = True
        self._engine.exchange.close()

    def _check_can_be_saved(self) -> None:
        """At the start, where nothing is lost yet; a run that saves nothing may go on."""
        try:
            self._checkpoints.check_can_be_saved()
        except TypeError as error:
            if self._world.options.checkpoint:
                raise
            if self.is_lead:
                _log.warning("trainer.save will refuse this run: %s", error)

    def _data_call(
        self, call: Call, function: ScoreFunction, batches: Loader, batch_size: int
    ) -> DataCall:
        return DataCall(call, self.steps + 1, batches.track.size.samples, batch_size, function)

    def _before_step(self, batch: ShardedBatch) -> bool:
        """Look after checkpoints; whether the process is to stop, as was asked."""
        with self._telling_others():
            self._checkpoints.check()
            if self._autosave is None:
                return False
            self._autosave.check(batch)
            return self._autosave.before_step()

    def _after_step(self, batch: ShardedBatch, *, stop: bool) -> bool:
        """Save if it is time; whether the process is to stop."""
        if self._autosave is None:
            return False
        with self._telling_others():
            return self._autosave.after_step(batch, stop=stop)

    @property
    def _saves_with_others(self) -> bool:
        return self._autosave is not None and self._engine.with_others

    def _finish(self) -> None:
        """Bring everything that is to be saved to the disk."""
        if self._autosave is not None and not self._left:
            with self._telling_others(), self._only_noting():
                self._autosave.finish()
        with self._telling_others():
            self._checkpoints.finish()

    @contextmanager
    def _only_noting(self) -> Iterator[None]:
        """Where the script fails already, that is what its user must see."""
        failing = _is_failing()
        try:
            yield
        except Exception as error:
            if not failing:
                raise
            _log.error("the end of the run was not saved: %s: %s", type(error).__name__, error)

    def _cut(self, batch: object) -> ShardedBatch:
        if isinstance(batch, ShardedBatch):
            cut = self._checked_batch(batch)
        else:
            own = [
                s for number in self._team.own for s in self._engine.roster.plan.shards_of(number)
            ]
            cut = cut_batch(
                batch,
                self._engine.roster.plan,
                own,
                self._position.epoch,
                digest=self._engine.with_others,
            )
        if cut.samples == 0:
            raise ValueError("the batch is empty: expected at least one sample")
        return cut

    def _checked_batch(self, batch: ShardedBatch) -> ShardedBatch:
        ours, theirs = self._engine.roster.plan, batch.plan
        if (theirs.shards, theirs.devices) != (ours.shards, ours.devices):
            raise ValueError(
                f"the batch was cut for {theirs.shards} shards and {theirs.devices} devices, this "
                f"run has {ours.shards} and {ours.devices}: use a loader of this trainer"
            )
        self._position.check(batch)
        return batch

    def _checked_plan(self, counts: Sequence[int] | None) -> Plan:
        shards, devices = self._settings.shards, len(self._team.devices)
        if counts is None:
            return Plan.even(shards=shards, devices=devices)
        if not isinstance(counts, Sequence) or not all(isinstance(c, int) for c in counts):
            raise TypeError(f"expected plan to be a list of numbers, got {counts!r}")
        return Plan.given(counts, shards=shards, devices=devices)

    @contextmanager
    def _telling_others(self, but: type[Exception] | None = None) -> Iterator[None]:
        """Tell the other devices what is raised here, ``but`` what they raise as well."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the Trainer was made in process {self._process}, and this is process "
                f"{os.getpid()}, a forked child of it: what it does would be done twice. Use the "
                f"Trainer where it was made"
            )
        try:
            yield
        except BaseException as error:
            if but is None or not isinstance(error, but):
                # Alone, nobody is left behind: a script that survives the error may go on.
                self._left |= self._engine.with_others
                self._engine.exchange.close(error)
            raise

    def _is_asked_to_stop(self) -> bool:
        """Whether this process has been."""
        return self._progress is not None and self._progress.stop_requested()

    def _note_progress(self) -> None:
        """What comes before a step ends badly is told as a failure in that step."""
        if self._progress is not None:
            self._progress.set_step(self._world.rank, self._position.step + 1)


def _is_failing() -> bool:
    """Whether an exception is under way that ends the script, and not in order."""
    error = sys.exc_info()[1]
    ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
    return error is not None and not ends_well

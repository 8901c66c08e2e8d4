"""The face of onefold: `Trainer`. Everything that computes lies below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from onefold.assembly import Settings, assemble
from onefold.batch import ShardedBatch, cut_batch
from onefold.checkpoint import write_checkpoint
from onefold.evaluation import ScoreFunction, evaluate
from onefold.fingerprint import fingerprint_of, tensor_digests
from onefold.loader import Collate, Loader, SizedDataset
from onefold.modelcheck import check_model
from onefold.observers import observers_of
from onefold.replica import LossFunction
from onefold.shard import Plan
from onefold.step import Step
from onefold.team import form_team, settle_process
from onefold.timing import Span, host_now_s
from onefold.update import check_optimizer
from onefold.world import current_world

__all__ = ["Trainer"]


class Trainer:
    """Trains a model on any number of devices, to the same bits as on one.

    Args:
        model: any module; it stays yours, keeps its parameters' names, and always holds the
            current values.
        optimizer: made from the model's parameters; it is kept, so schedulers attached to it work.
        loss: ``loss(model, batch)`` for one shard on one device. Returns a tensor (n,) of one loss
            a sample, a scalar (the mean over the shard's samples), or ``onefold.Mean``. The step's
            loss is the sum of totals over the sum of weights across the whole batch.
        shards: V, into how many parts every batch is cut: the most devices that may ever share a
            batch. Like the batch size it is part of the result.
        seed: of dropout, augmentation, the order of samples and all other randomness.
        devices: several devices for this one process to drive, such as ``["cuda:0", "cuda:1"]``.
            Without it a launcher decides, or one device is used.
        plan: how many shards each device runs, such as ``(3, 1)``; even shares by default.
        threads: of each CPU device; ``max(1, cores // shards)`` by default.
        clip_norm: scale the whole gradient down to this norm where it is larger.
        deterministic: use kernels that repeat their bits, and refuse those that cannot.
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
        clip_norm: float | None = None,
        deterministic: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self._world = current_world()
        settings = Settings(
            shards=shards,
            seed=seed,
            clip_norm=clip_norm,
            deterministic=deterministic,
            timeout_s=self._world.timeout_s if timeout_s is None else timeout_s,
            threads=threads,
        )
        check_model(model)
        check_optimizer(optimizer, model)
        if not callable(loss):
            raise TypeError(f"expected loss to be a function of model and batch, got {loss!r}")
        self._settings = settings
        self._team = form_team(self._world, devices, shards=shards, module=model)
        self._plan = self._checked_plan(plan)
        settle_process(self._team, shards=shards, threads=threads)
        self._loss = loss
        self._engine = assemble(model, optimizer, settings=settings, team=self._team)
        self._steps = 0
        self._epoch = 0
        self._progress = directory.progress() if (directory := self._world.run_directory) else None
        self._note_progress()
        watches = {replica.number: replica.watch for replica in self._engine.replicas}
        self._observers = observers_of(self._team, model, watches)

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
    def plan(self) -> tuple[int, ...]:
        """How many shards each device runs.

        May be set between steps, alike on all devices; batches that a loader has already begun to
        read keep the plan that they were read for. The result does not depend on it.
        """
        return self._plan.counts

    @plan.setter
    def plan(self, counts: Sequence[int]) -> None:
        self._plan = self._checked_plan(counts)

    def loader(
        self,
        dataset: SizedDataset,
        *,
        batch_size: int,
        shuffle: bool = False,
        workers: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> Loader:
        """Batches of a data set, for `step`; each device reads its own shards alone.

        Args:
            dataset: has a length and an item for each index.
            batch_size: samples of a whole batch, over all devices.
            shuffle: visit the samples in another order in each pass.
            workers: processes that read ahead, for each device.
            drop_last: leave out a last batch that is short.
            collate: makes a shard's payload from a list of samples; PyTorch's default if None.

        Raises:
            TypeError: the data set has no length or no items.
            ValueError: it is empty, or a number is out of range.
        """
        return Loader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            workers=workers,
            drop_last=drop_last,
            collate=collate,
            seed=self._settings.seed,
            plan=lambda: self._plan,
            own=self._team.own,
            first_epoch=self._epoch,
            pin_memory=self._team.devices[0].type == "cuda",
            timeout_s=self._settings.timeout_s,
        )

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is up to ``number``."""
        for epoch in range(self._epoch, number):
            self._epoch = epoch
            yield epoch
        self._epoch = max(self._epoch, number)

    def step(self, batch: object) -> Step:
        """One update from one whole batch.

        Args:
            batch: what `loader` yields; or tensors (n, ...), or tuples, lists and dicts of them,
                the same on every device, which are cut along the first dimension.

        Raises:
            ValueError: the tensors of the batch disagree in length, or it is empty.
            LossError: the loss is of the wrong shape, or not finite; names step and shard.
            PeerError: another device failed or is lost.
        """
        self._engine.take_spans()  # of a step that failed and was survived
        start = host_now_s()
        cut = self._cut(batch)
        waited = cut.waited or (start, host_now_s())
        number = self._steps + 1
        with self._telling_others():
            outcome = self._engine.step(cut, self._loss, number)
        self._steps = number
        self._note_progress()
        spans = self._engine.take_spans()
        first = [Span("data", "batch", *waited), *spans[self._team.own[0]]]
        spans[self._team.own[0]] = first
        step = Step(number, cut.samples, cut.epoch, outcome, first)
        for observe in self._observers:
            observe(step, spans)
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
        batches = self.loader(dataset, batch_size=batch_size, workers=workers, collate=collate)
        with self._telling_others():
            return evaluate(self._engine, score, batches)

    def fingerprint(self) -> str:
        """16 hexadecimal digits over parameters and buffers: the same for the same bits."""
        return fingerprint_of(tensor_digests(self.model))

    def save(self, directory: str | Path) -> Path:
        """Write the model to ``directory/step-00001234/``; returns that folder, on every device.

        ``model.safetensors`` holds the user's own names, ``run.json`` where the run is. The folder
        is there whole or not at all.

        Raises:
            OSError: it could not be written.
        """
        folder = Path(directory) / f"step-{self._steps:08d}"
        with self._telling_others():
            if self.is_lead:
                write_checkpoint(folder, self.model, self._run_record())
            arrived = {number: torch.zeros(1, dtype=torch.float64) for number in self._team.own}
            self._engine.exchange.share(
                {n: row.to(self._team.devices[n]) for n, row in arrived.items()}
            )
        return folder

    def close(self) -> None:
        """Leave the run; the model keeps its values. Also done at the end of the program."""
        self._engine.exchange.close()

    def _cut(self, batch: object) -> ShardedBatch:
        if isinstance(batch, ShardedBatch):
            cut = self._checked_batch(batch)
        else:
            own = [s for number in self._team.own for s in self._plan.shards_of(number)]
            cut = cut_batch(batch, self._plan, own, self._epoch)
        if cut.samples == 0:
            raise ValueError("the batch is empty: expected at least one sample")
        return cut

    def _checked_batch(self, batch: ShardedBatch) -> ShardedBatch:
        ours, theirs = self._plan, batch.plan
        if (theirs.shards, theirs.devices) != (ours.shards, ours.devices):
            raise ValueError(
                f"the batch was cut for {theirs.shards} shards and {theirs.devices} devices, this "
                f"run has {ours.shards} and {ours.devices}: use a loader of this trainer"
            )
        return batch

    def _checked_plan(self, counts: Sequence[int] | None) -> Plan:
        shards, devices = self._settings.shards, len(self._team.devices)
        if counts is None:
            return Plan.even(shards=shards, devices=devices)
        if not isinstance(counts, Sequence) or not all(isinstance(c, int) for c in counts):
            raise TypeError(f"expected plan to be a list of numbers, got {counts!r}")
        return Plan.given(counts, shards=shards, devices=devices)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._engine.exchange.close(error)
            raise

    def _note_progress(self) -> None:
        """What comes before a step ends badly is told as a failure in that step."""
        if self._progress is not None:
            self._progress.set_step(self._world.rank, self._steps + 1)

    def _run_record(self) -> dict[str, object]:
        return {
            "format": 1,
            "step": self._steps,
            "epoch": self._epoch,
            "seed": self._settings.seed,
            "shards": self._settings.shards,
            "fingerprint": self.fingerprint(),
            "torch": torch.__version__,
        }

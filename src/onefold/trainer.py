"""The face of onefold: `Trainer`. Everything that computes lies below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import torch

from onefold.core.head import Call
from onefold.core.precision import Precision, PrecisionName
from onefold.core.settings import BufferRule, Microbatch, OnNonfinite, ScheduleEvery, Settings
from onefold.engine.evaluation import ScoreFunction, evaluate, predict
from onefold.engine.replica import LossFunction
from onefold.engine.step import Step
from onefold.reading.indexed import BatchRule, Rule
from onefold.reading.loader import Loader
from onefold.reading.reader import Collate, as_it_is
from onefold.reading.takeover import DataSource, TorchNames, choose
from onefold.run.session import Session
from onefold.run.userparts import GivenOptimizer, GivenSchedule, UserParts
from onefold.run.world import current_world
from onefold.trainedmodel import TrainedModel

__all__ = ["Trainer"]


class Trainer(TrainedModel):
    """Trains a model on any number of devices, to the same bits as on one.

    Args:
        model: any module; it stays yours and always holds the current values. Or several by name,
            such as ``{"generator": ..., "discriminator": ...}``: functions then get all of them, as
            a ``torch.nn.ModuleDict``.
        optimizer: made from the model's parameters; it is kept, so schedulers attached to it work.
            Or several in a list, such as Muon beside AdamW, or in a dict by name, of which no two
            have a parameter in common: all of them update in each step, unless there are several
            losses. With None the script updates by itself, with the gradients of `gradient`.
        loss: ``loss(model, batch)`` for one shard on one device. Returns (n,) losses, one a sample;
            a scalar, the mean over the shard; or ``onefold.Mean``, ``onefold.Sum``, or their sum. A
            step's loss is the sum of totals over the sum of weights across the whole batch. May
            return ``(loss, {"accuracy": ...})``; such values are averaged alike in `Step.values`.
            Or several losses by name: each step is of one of them, and updates the parameters of
            the optimizer with that name, or of the only one.
        shards: V, into how many parts every batch is cut: the most devices that may ever share a
            batch. Like the batch size it is part of the result.
        seed: of dropout, augmentation, the order of samples and all other randomness.
        devices: several for this one process to drive, such as ``["cuda:0", "cuda:1"]``; without
            it a launcher decides, or one device is used.
        plan: how many shards each device runs, such as ``(3, 1)``; even shares by default.
        threads: of each CPU device; ``max(1, cores // shards)`` by default.
        schedule: a ``torch.optim.lr_scheduler`` of the optimizer; part of every checkpoint. Of
            several optimizers a dict, under their names, or beside a list a list with None for
            those without; each follows the steps of its optimizer.
        schedule_every: when the schedule is stepped: after each ``"step"`` that updates, when an
            ``"epoch"`` of `epochs` ends, or only where the ``"script"`` calls its ``step`` itself,
            with a score if it takes one, alike on every device.
        clip_norm: scale the whole gradient down to this norm where it is larger.
        clip_value: limit each element of the gradient to this magnitude, after ``clip_norm``.
        precision: ``"bf16"`` or ``"fp16"`` computes by autocast; with ``"bf16-params"`` and
            ``"fp16-params"`` the model also holds such parameters, and the optimizer updates
            float32 ones; ``"fp32"`` expects float32; None leaves all to the model.
        on_nonfinite: ``"raise"`` on a loss or gradient that is not finite, or ``"skip"`` the step.
        microbatch: run a shard in pieces of at most so many samples, where the device's memory is
            too small for all of them at once; ``"auto"`` finds the largest that fit.
        compile: compile the model and the loss of a shard together, by ``torch.compile``; other
            kernels, and so other rounding. Evaluation and prediction stay as they are.
        deterministic: use kernels that repeat their bits, and refuse others.
        buffers: what becomes of buffers that shards change, by name or pattern, where it is not the
            mean over the shards (floating point) or the largest (other numbers): ``"mean"``,
            ``"max"``, ``"sum"`` (of what each shard added), ``"first"`` (the first shard's), or
            ``"shard"``: every shard goes on with its own, such as a recurrent model's hidden state.
        stages: modules at which a model may be cut that is too large for a device, see ``onefold
            run --keep``; no part of the result. ``"auto"`` takes the items of its module lists.
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
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: GivenOptimizer,
        loss: LossFunction | Mapping[str, LossFunction],
        *,
        shards: int,
        seed: int = 0,
        devices: Sequence[str | torch.device] | None = None,
        plan: Sequence[int] | None = None,
        threads: int | None = None,
        schedule: GivenSchedule = None,
        schedule_every: ScheduleEvery = "step",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: PrecisionName | None = None,
        on_nonfinite: OnNonfinite = "raise",
        microbatch: Microbatch | None = None,
        compile: bool = False,
        deterministic: bool = True,
        buffers: Mapping[str, BufferRule] | None = None,
        stages: Sequence[torch.nn.Module] | Literal["auto"] = "auto",
        timeout_s: float | None = None,
    ) -> None:
        world = current_world()
        settings = Settings(
            shards=shards,
            seed=seed,
            clip_norm=clip_norm,
            clip_value=clip_value,
            precision=Precision(precision),
            on_nonfinite=on_nonfinite,
            microbatch=microbatch,
            compile=compile,
            deterministic=deterministic,
            timeout_s=world.options.timeout_s if timeout_s is None else timeout_s,
            threads=threads,
            buffers=dict(buffers or {}),
            schedule_every=schedule_every,
        )
        user = UserParts.of(model, optimizer, loss, schedule, stages)
        super().__init__(Session(world, user, settings, devices=devices, plan=plan))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the run, by number."""
        return self._session.team.devices

    @property
    def shards(self) -> int:
        """How many shards every batch is cut into."""
        return self._session.settings.shards

    @property
    def is_lead(self) -> bool:
        """Whether this process has device 0."""
        return self._session.team.has_lead

    @property
    def asked_to_stop(self) -> bool:
        """Whether the launcher has asked the run to stop; alike on all devices."""
        return self._session.asked_to_stop

    @property
    def plan(self) -> tuple[int, ...]:
        """How many shards each device runs; may be set between steps, alike on all devices."""
        return self._session.engine.roster.plan.counts

    @plan.setter
    def plan(self, counts: Sequence[int]) -> None:
        self._session.set_plan(counts)

    def loader(
        self,
        dataset: DataSource,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        lengths: Sequence[int] | None = None,
        workers: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
        **names: Unpack[TorchNames],
    ) -> Loader:
        """Batches of a data set, for `step`; each device reads its own shards alone.

        Make loaders in the same order on all devices and in every run: their random numbers depend
        on how many were made before. After a checkpoint, the first pass begins with the first
        unused sample.

        Args:
            dataset: has a length and an item for each index; or is a stream: an `IterableDataset`,
                or anything to iterate, which every device reads whole; or is a `DataLoader` of
                PyTorch, whose settings are taken over.
            batch_size: over all devices; not with a `DataLoader` or a ``batch_sampler``.
            shuffle: visit the samples in another order in each pass.
            lengths: of every sample, with ``shuffle``: those of near length come together.
            workers: processes that read ahead, for each device.
            drop_last: leave out a last batch that is short.
            collate: makes a shard's payload from a list of samples; PyTorch's if None.
            names: PyTorch's ``sampler``, ``batch_sampler`` (of whole batches) and
                ``worker_init_fn``; ``num_workers`` and ``collate_fn`` for workers and collate.

        Raises:
            TypeError, ValueError: arguments that do not fit together, or a number out of range.
            CheckpointError: the saved run's loader in this place had other sizes.
        """
        chosen = choose(
            dataset,
            names,
            batch_size=batch_size,
            workers=workers,
            collate=collate,
            shuffle=shuffle,
            lengths=lengths,
            drop_last=drop_last,
        )
        return self._session.loader_of_steps(chosen.dataset, chosen.collate, **chosen.choices)

    def batches(self, rule: BatchRule, *, per_epoch: int) -> Loader:
        """Whole batches by a rule of your own, for `step`; they go on after a checkpoint.

        Args:
            rule: ``rule(step, generator)`` returns a whole batch, as `step` takes it: tensors
                (n, ...) or tuples, lists and dicts of them. ``step`` is the number of the pass
                times ``per_epoch``, and the place in it; both count from 0, and passes from the
                epoch in which `batches` is called. ``generator`` is on the host, seeded from the
                run's seed and ``step``, as are the global generators. Called on every device.
            per_epoch: number of batches in a pass.

        Raises:
            TypeError, ValueError: no function, or a number below 1.

        >>> def rule(step, generator):
        ...     return torch.randn(6, 2, generator=generator)
        >>> for batch in trainer.batches(rule, per_epoch=3):
        ...     step = trainer.step(batch)
        >>> step.number, step.samples
        (3, 6)
        """
        return self._session.loader_of_steps(Rule(rule, per_epoch), as_it_is, batch_size=None)

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is, which may be inside of one, up to ``number``.

        With ``schedule_every="epoch"`` the schedule is stepped where an epoch with steps ends.
        """
        return self._session.position.epochs(number)

    def step(self, batch: object, loss: str | None = None, *, dim: int = 0) -> Step:
        """One update from one whole batch.

        Args:
            batch: what `loader` yields; or tensors or NumPy arrays (n, ...), `onefold.Shared`,
                `onefold.OwnLength`, or tuples, lists, mappings and dataclasses of all of these, the
                same on every device, which are cut into shards and keep their type. Several
                loaders' batches are each cut by their own size; ``samples`` are the first's.
            loss: the name of the loss, where the Trainer has several.
            dim: the dimension of all tensors in which the samples lie, such as 1 for time-major
                ones (time, n, ...). Of what `loader` yields only ``microbatch`` asks for it.

        Raises:
            TypeError: a loss is not named, or named where there is only one; or the batch holds
                something that cannot be cut.
            ValueError: the tensors of the batch disagree in length, lack the dimension, or it is
                empty; or some shards have samples of some parts alone; or the step is in no epoch,
                and ``schedule_every`` is ``"epoch"``.
            RuntimeError: the script has stepped a schedule that is not its own to step.
            DisagreementError: another device is in another step, or was given something else.
            StateError, GradientError: a shard changed what it must not, or cannot be added up.
            LossError: the loss is of the wrong shape, or not finite; names step and shard.
            PeerError: another device failed or is lost.
            OSError: an earlier checkpoint could not be written in the background.
            SystemExit: the launcher asked the run to stop, and it has been saved.
        """
        return self._session.step(batch, loss, dim)

    def gradient(self, batch: object, loss: str | None = None, *, dim: int = 0) -> Step:
        """The gradient of one whole batch, in ``.grad``; the script makes the update.

        Every parameter that is trained has the batch's whole gradient in ``.grad``, on every
        device, or None if no shard gave it one. It is that of `step`: divided, unscaled, looked at,
        and clipped if Trainer was given ``clip_norm`` or ``clip_value``. It replaces what was
        there, and is not added to it. Update in `changing`, inside of which this may be called.

        Calls with the very same batch object are one step, with the same number and random numbers,
        until a block of `changing` ends in which it was given. See docs/guides.

        Args:
            batch, loss, dim: as for `step`.

        Raises:
            RuntimeError: another batch is given in the same block of `changing`.
            ValueError: the precision or an average needs Trainer's own update.
            As for `step`.

        >>> step = trainer.gradient(torch.ones(4, 2))
        >>> with trainer.changing(), torch.no_grad():
        ...     _ = model.weight.sub_(model.weight.grad)
        """
        return self._session.gradient(batch, loss, dim)

    def on_step(self, observe: Callable[[Step], object]) -> None:
        """Have a function called with every finished step, on the lead alone: for logs.

        It is called inside `step`, before a checkpoint of that step, so that what it writes is
        there for every step that is saved. Random numbers that it draws do not shift the run's. It
        must not make calls that all devices must make, such as `step`, `save` or `evaluate`.

        Args:
            observe: called with the step; of `gradient` with the first call of each step. Functions
                are called in the order in which they were given; what one raises ends the step.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> trainer = Trainer(model, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
            >>> trainer.on_step(lambda step: print("step", step.number))
            >>> step = trainer.step(torch.ones(6, 2))
            step 1
        """
        self._session.observers.add(observe)

    def evaluate(
        self,
        score: ScoreFunction,
        dataset: DataSource,
        *,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Collate | None = None,
        model: str | None = None,
        **names: Unpack[TorchNames],
    ) -> dict[str, float]:
        """Scores over a data set, each sample exactly once, the same on any number of devices.

        Args:
            score: ``score(model, batch)`` for one shard, in evaluation mode and without gradients;
                returns a dict of names to what a loss may return.
            dataset, batch_size, workers, collate, names: as for `loader`; but a `DataLoader` that
                shuffles is read in the order of its data set.
            model: the name of one of several models, which ``score`` is given alone.

        Returns:
            For each name the sum of totals over the sum of weights, on every device.

        Raises:
            LossError: a value is of the wrong shape.
            DisagreementError: the names differ between shards.
        """
        part = self._session.parts.on_part(score, model)
        sizes = {"batch_size": batch_size, "workers": workers, "collate": collate}
        batches = self._in_order(dataset, names, sizes)
        compute = partial(evaluate, self._session.engine, part, batches)
        found: dict[str, float] = self._session.over_data(
            Call.EVALUATE, score, model, batches, compute
        )
        return found

    def predict(
        self,
        function: ScoreFunction,
        dataset: DataSource,
        *,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Collate | None = None,
        model: str | None = None,
        **names: Unpack[TorchNames],
    ) -> dict[str, Any]:
        """The model's values for every sample, in the data set's order.

        Args:
            function: ``function(model, batch)`` for one shard, as in `evaluate`; returns a dict of
                names to tensors (n, ...), one row a sample, alike in dtype and shape for all; or to
                lists with one tensor a sample, of any sizes, alike in dtype and number of
                dimensions, or one dict of such tensors a sample.
            dataset, batch_size, workers, collate, names: as for `loader`; but a `DataLoader` that
                shuffles is read in the order of its data set.
            model: the name of one of several models, which ``function`` is given alone.

        Returns:
            For each name a tensor (samples, ...) on the host, or such a list for all samples.

        Raises:
            LossError: a value has not one row, tensor or dict a sample.
            DisagreementError: names, dtypes or shapes differ between shards.

        >>> said = trainer.predict(lambda m, x: {"sum": x.sum(1)}, torch.ones(5, 2), batch_size=4)
        >>> said["sum"]
        tensor([2., 2., 2., 2., 2.])
        """
        part = self._session.parts.on_part(function, model)
        sizes = {"batch_size": batch_size, "workers": workers, "collate": collate}
        batches = self._in_order(dataset, names, sizes)
        compute = partial(predict, self._session.engine, part, batches)
        found: dict[str, Any] = self._session.over_data(
            Call.PREDICT, function, model, batches, compute
        )
        return found

    def _in_order(self, dataset: DataSource, names: TorchNames, sizes: Mapping[str, Any]) -> Loader:
        """Batches of all samples in the data set's order, for one pass."""
        chosen = choose(dataset, names, in_order=True, **sizes)
        return self._session.loader(chosen.dataset, chosen.collate, **chosen.choices)

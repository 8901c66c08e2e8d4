"""The face of onefold: `Trainer`. Everything that computes lies below it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, Unpack, overload

import torch

from onefold.core import encoding
from onefold.core.call_digest import Call, CallDigest
from onefold.core.encoding import to_json
from onefold.core.flat import fingerprint_of
from onefold.core.late import load
from onefold.core.randomness import forked_generators
from onefold.core.settings import (
    BufferRule,
    Microbatch,
    OnNonfinite,
    Precision,
    PrecisionName,
    SchedulerEvery,
    Settings,
)
from onefold.data_order.indexed import BatchFunction, FunctionBatches
from onefold.data_order.loader import DataSource, Loader, TorchNames, choose
from onefold.data_order.reader import Collate, SizedDataset, as_it_is
from onefold.exchange.memory import Memory
from onefold.launcher.environment import current_context
from onefold.session.session import Session
from onefold.session.user_parts import GivenOptimizer, GivenScheduler, UserParts
from onefold.shard.replica import LossFunction
from onefold.step.result import Step
from onefold.system.safe_files import local_path
from onefold.tools.registry import Tools
from onefold.update.averages import AverageRule

if TYPE_CHECKING:
    from onefold.checkpoint.folder import Checkpoint
    from onefold.passes.evaluation import ScoreFunction

__all__ = ["Trainer"]

_State = TypeVar("_State")


class Trainer:
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
        shares: how many shards each device runs, such as ``(3, 1)``; even shares by default.
        threads: of each CPU device; ``max(1, cores // shards)`` by default.
        scheduler: a ``torch.optim.lr_scheduler`` of the optimizer; part of every checkpoint. Of
            several optimizers a dict, under their names, or beside a list a list with None for
            those without; each follows the steps of its optimizer.
        scheduler_every: when the scheduler is stepped: after each ``"step"`` that updates, when an
            ``"epoch"`` of `epochs` ends, or only where the ``"script"`` calls its ``step`` itself,
            with a score if it takes one, alike on every device.
        clip_norm: scale the whole gradient down to this norm where it is larger.
        clip_value: limit each element of the gradient to this magnitude, after ``clip_norm``.
        precision: ``"bf16"`` or ``"fp16"`` computes by autocast; with ``"bf16-params"`` and
            ``"fp16-params"`` the model also holds such parameters, and the optimizer updates
            float32 ones; ``"fp32"`` expects float32; None leaves all to the model.
        on_nonfinite: ``"raise"`` on a loss or gradient that is not finite, or ``"skip"`` the step.
        microbatch: run a shard in microbatches of at most so many samples, where the device's
            memory is too small for all of them at once; ``"auto"`` finds the largest that fit.
        compile: compile the model and the loss of a shard together, by ``torch.compile``; other
            kernels, and so other rounding. Evaluation and prediction stay as they are.
        deterministic: use kernels that repeat their bits, and refuse others.
        buffers: what becomes of buffers that shards change, by name or pattern, where it is not the
            mean over the shards (floating point) or the largest (other numbers): ``"mean"``,
            ``"max"``, ``"sum"`` (of what each shard added), ``"first"`` (the first shard's), or
            ``"per_shard"``: every shard goes on with its own, such as a recurrent model's hidden
            state.
        stages: modules at which a model may be cut that is too large for a device, see ``onefold
            run --placement``; no part of the result. ``"auto"`` takes the items of its module
            lists.
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
        shares: Sequence[int] | None = None,
        threads: int | None = None,
        scheduler: GivenScheduler = None,
        scheduler_every: SchedulerEvery = "step",
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
        **unknown: Never,
    ) -> None:
        if unknown:
            raise load("shard.advice").unknown_name(type(self), *unknown)
        context = current_context()
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
            timeout_s=context.options.timeout_s if timeout_s is None else timeout_s,
            threads=threads,
            buffers=dict(buffers or {}),
            scheduler_every=scheduler_every,
        )
        user = UserParts.of(model, optimizer, loss, scheduler, stages)
        self._tools = Tools(context)
        self._session = session = Session(
            context, user, settings, devices=devices, shares=shares, tools=self._tools
        )
        # The model outlives a Trainer that the script drops. By a weak reference, as an observer of
        # the session may refer to this Trainer; the memory refers to nothing of the script's.
        memory = session.engine.context.exchange.memory
        weakref.finalize(self, _dropped, weakref.ref(session), memory).atexit = False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the run, by number."""
        return self._session.devices.all

    @property
    def shards(self) -> int:
        """How many shards every batch is cut into."""
        return self._session.settings.shards

    @property
    def is_lead(self) -> bool:
        """Whether this process has device 0."""
        return self._session.devices.has_lead

    @property
    def asked_to_stop(self) -> bool:
        """Whether the script should save and end; alike on all devices.

        Always False with ``onefold run --checkpoint``, where the run saves and ends by itself.
        """
        return self._session.asked_to_stop

    @property
    def shares(self) -> tuple[int, ...]:
        """How many shards each device runs; may be set between steps, alike on all devices."""
        return self._session.engine.assignment.shares.counts

    @shares.setter
    def shares(self, counts: Sequence[int]) -> None:
        self._session.set_shares(counts)

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

        >>> data = torch.utils.data.TensorDataset(torch.arange(10.0).view(5, 2))
        >>> loader = trainer.loader(data, batch_size=4, shuffle=True)
        >>> len(loader)
        2
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
        return self._session.batches.loader_of_steps(**chosen)

    def batches(
        self, batch_fn: BatchFunction, *, per_epoch: int, stateless: bool = False
    ) -> Loader:
        """Whole batches from a function of your own, for `step`; they go on after a checkpoint.

        Args:
            batch_fn: ``batch_fn(step, generator)`` returns a whole batch, as `step` takes it:
                tensors (n, ...) or tuples, lists and dicts of them. ``step`` is the number of the
                pass times ``per_epoch``, and the place in it; both count from 0, and passes from
                the epoch in which `batches` is called. ``generator`` is on the host, seeded from
                the run's seed and ``step``, as are the global generators. Called on every device.
            per_epoch: number of batches in a pass.
            stateless: whether a batch depends on the arguments alone. A resumed run then makes no
                batch again that is done. Otherwise it calls the function for each of them, so that
                a generator or a position in the data that the function keeps is what it was.

        Raises:
            TypeError, ValueError: no function, or a number below 1.

        >>> def batch_fn(step, generator):
        ...     return torch.randn(6, 2, generator=generator)
        >>> for batch in trainer.batches(batch_fn, per_epoch=3):
        ...     step = trainer.step(batch)
        >>> step.number, step.samples
        (3, 6)
        """
        return self._session.batches.loader_of_steps(
            FunctionBatches(batch_fn, per_epoch, stateless), as_it_is, batch_size=None
        )

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs from where the run is, which may be inside of one, up to ``number``.

        With ``scheduler_every="epoch"`` the scheduler is stepped where an epoch with steps ends.

        Args:
            number: the epoch before which to stop, counted from 0. The iterator yields the numbers
                of those that are left, so a run that goes on after `load` does no epoch twice.

        >>> loader = trainer.loader(torch.ones(4, 2), batch_size=4)
        >>> [trainer.step(batch).epoch for epoch in trainer.epochs(3) for batch in loader]
        [0, 1, 2]
        """
        return self._session.position.epochs(number)

    def step(self, batch: object, loss: str | None = None, *, dim: int = 0) -> Step:
        """One update from one whole batch.

        Args:
            batch: what `loader` yields; or tensors or NumPy arrays (n, ...), `onefold.Broadcast`,
                `onefold.Scatter`, or tuples, lists, mappings and dataclasses of all of these, the
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
                and ``scheduler_every`` is ``"epoch"``.
            RuntimeError: the script has stepped a scheduler that is not its own to step.
            DisagreementError: another device is in another step, or was given something else.
            StateError, GradientError: a shard changed what it must not, or cannot be added up.
            LossError: the loss is of the wrong shape, or not finite; names step and shard.
            PeerError: another device failed or is lost.
            OSError: an earlier checkpoint could not be written in the background.
            SystemExit: the launcher asked the run to stop, and it has been saved.

        >>> step = trainer.step(torch.ones(4, 2))
        >>> step.samples, step.loss.dtype, step.loss.shape
        (4, torch.float64, torch.Size([]))
        """
        return self._session.step(batch, loss, dim)

    def gradient(self, batch: object, loss: str | None = None, *, dim: int = 0) -> Step:
        """The gradient of one whole batch, in ``.grad``; the script makes the update.

        Every parameter that is trained has the batch's whole gradient in ``.grad``, on every
        device, or None if no shard gave it one. It is that of `step`: divided, unscaled, looked at,
        and clipped if Trainer was given ``clip_norm`` or ``clip_value``. It replaces what was
        there, and is not added to it. Update in `modifying`, inside of which this may be called.

        Calls with the very same batch object are one step, with the same number and random numbers,
        until a block of `modifying` ends in which it was given. See
        docs/do/gradient-without-update.md.

        Args:
            batch, loss, dim: as for `step`.

        Raises:
            RuntimeError: another batch is given in the same block of `modifying`.
            ValueError: the precision or an average needs Trainer's own update.

        It also raises what `step` raises.

        >>> step = trainer.gradient(torch.ones(4, 2))
        >>> with trainer.modifying(), torch.no_grad():
        ...     _ = model.weight.sub_(model.weight.grad)
        """
        step: Step = self._session.gradients.gradient(batch, loss, dim)
        return step

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
        self._tools.on_step.add(observe)

    def evaluate(
        self,
        score: ScoreFunction,
        dataset: DataSource,
        *,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Collate | None = None,
        model: str | None = None,
        whole_batches: bool = False,
        **names: Unpack[TorchNames],
    ) -> dict[str, float]:
        """Scores over a data set, each sample exactly once, the same on any number of devices.

        Args:
            score: ``score(model, batch)`` for one shard, in evaluation mode and without gradients;
                returns a dict of names to what a loss may return.
            dataset, batch_size, workers, collate, names: as for `loader`; but a `DataLoader` that
                shuffles is read in the order of its data set.
            model: the name of one of several models, which ``score`` is given alone.
            whole_batches: give ``score`` whole batches in place of shards, for a score that is
                computed over a batch, such as a ranking. The first device computes all of them.

        Returns:
            For each name the sum of totals over the sum of weights, on every device.

        Raises:
            LossError: a value is of the wrong shape.
            DisagreementError: the names differ between shards.

        >>> def score(model, x):
        ...     return {"positive": (x.sum(dim=1) > 0).float()}
        >>> trainer.evaluate(score, torch.ones(5, 2), batch_size=4)
        {'positive': 1.0}
        """
        chosen = choose(
            dataset, names, batch_size=batch_size, workers=workers, collate=collate, in_order=True
        )
        evaluate = load("passes.evaluation").evaluate
        over_data = load("session.data_calls").over_data
        found: dict[str, Any] = over_data(
            self._session, Call.EVALUATE, evaluate, score, model, chosen, whole=whole_batches
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
        chosen = choose(
            dataset, names, batch_size=batch_size, workers=workers, collate=collate, in_order=True
        )
        predict = load("passes.evaluation").predict
        over_data = load("session.data_calls").over_data
        found: dict[str, Any] = over_data(
            self._session, Call.PREDICT, predict, function, model, chosen
        )
        return found

    @property
    def model(self) -> torch.nn.Module:
        """The user's own module with the current parameters."""
        return self._session.engine.context.replicas[0].module

    def record(self, directory: str | Path) -> None:
        """Write down what the run computes from here on, to ``run.record``; called on every device.

        As ``onefold run --record`` does for a script: each step with its shards, results of
        `evaluate` and its like, checkpoints. The lead writes. A record that is there is gone on
        with: what it has of later steps than the run's no longer counts. `onefold.Record` reads it.

        Args:
            directory: the folder, which is made if it is missing.

        Raises:
            OSError: the file cannot be written, or another run writes to it.
            RecordError: the file is something else, or damaged.
            RuntimeError: the run is recorded already.

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> trainer.record(directory)
        >>> step = trainer.step(torch.ones(4, 2))
        >>> onefold.Record(directory).steps["loss"].tolist() == [float(step.loss)]
        True
        """
        with self._session.telling_others():
            self._tools.record(local_path("directory", directory))

    @property
    def replaying(self) -> bool:
        """Whether a resumed script runs through what is done; always False without a resume.

        With ``onefold run --checkpoint`` a script that goes on runs again from its beginning. Up to
        the place where its checkpoint was made nothing is computed: steps, evaluations and
        predictions are answered from the record of the run, and what is printed is not shown.
        Guard by this what the script writes elsewhere.

        >>> if not trainer.replaying:
        ...     trainer.steps
        0
        """
        return self._session.replaying

    def state(self, name: str, value: _State) -> _State:
        """Keep a value of the script in the record, for when it is resumed; called on every device.

        A script that is resumed cannot be asked again for what it computed by itself, outside of
        this trainer. It is given back what it had then, on every device that of the lead.

        Args:
            name: of the value, for errors.
            value: what `gather` may have.

        Returns:
            A copy of the value, with dicts for mappings and tensors on the host; in a resumed
            script, up to where its run goes on, that of the run before.

        >>> best = trainer.state("best", 0.5)
        >>> best
        0.5
        """
        session = self._session
        with session.telling_others():
            what = f"trainer.state of {name}"
            # The same kinds as a resumed script is given.
            kept: _State = encoding.decode(encoding.encode(value, what))
            return session.result(what, lambda: kept)

    @property
    def steps(self) -> int:
        """Steps done, those before a checkpoint included."""
        return self._session.position.step

    def modifying(self, *, optimizer_state: bool | None = None) -> AbstractContextManager[None]:
        """A block in which the model may be changed between steps; called on every device.

        When it ends, the lead's parameters, buffers and optimizer settings are everybody's; what
        other devices wrote is dropped, so the lines may run on all of them or on the lead alone.
        With several devices, other changes are refused at the next call.

        Args:
            optimizer_state: whether ``optimizer.state`` of whole parameters is there, to read and
                to change; it is brought to every device, and the lead's goes back to those that
                update it. None has it there for optimizers with methods of their own, such as
                ``train()`` and ``eval()``. Elsewhere it is refused where it is divided.

        Raises:
            DisagreementError: another device is somewhere else.
            RuntimeError: the trainer is called inside the block, other than by `gradient`.

        >>> with trainer.modifying():
        ...     _ = model.weight.data.clamp_(-0.1, 0.1)
        """
        return self._session.modifying(optimizer_state=optimizer_state)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A block in which every device has all parameters; called on every device.

        They always do, unless the run was started with ``--placement partition`` and its devices do
        not share memory (GPUs, several hosts): then each keeps its partition, and what is brought
        for a step goes again with it. Outside of this block the parameters of such a model are NaN,
        and ``state_dict()`` is refused. The model may be read in the block; what is written to it
        is lost, and belongs into `modifying`.

        Raises:
            DisagreementError: another device is somewhere else.

        >>> with trainer.gathered():
        ...     largest = max(float(p.detach().abs().max()) for p in model.parameters())
        """
        session = self._session
        with session.telling_others(), session.engine.gathered(self.steps + 1):
            yield

    def average(
        self,
        *,
        decay: float | None = None,
        mean: bool = False,
        every: int = 1,
        after: str | None = None,
    ) -> None:
        """Keep an average of the model from here on, beside the values that are trained.

        It begins with the values as they are now. Steps that are skipped do not move it. It is in
        every checkpoint, and goes on with it; the line may then stand before `load` or after it, or
        be left out. Called on every device, before the first step or later.

        Args:
            decay: of an exponential average, how much of it stays in each update: at least 0, and
                less than 1. In update k it is ``(1 + k) / (10 + k)`` where that is less.
            mean: average all values alike, as stochastic weight averaging does. The values at the
                beginning do not count.
            every: update after each so many steps.
            after: the name of a loss, where there are several: count and follow its steps alone.

        Raises:
            TypeError, ValueError: both kinds are chosen or none, a number is out of range, there is
                no such loss, or another average is kept.

        >>> trainer.average(decay=0.999)
        >>> with trainer.averaged():
        ...     said = trainer.predict(lambda m, x: {"y": m(x)}, torch.ones(5, 2), batch_size=4)
        >>> said["y"].shape
        torch.Size([5, 1])
        """
        session = self._session
        loss = "" if after is None else session.parts.loss_name(after)
        rule = AverageRule.chosen(decay=decay, mean=mean, every=every, after=loss)
        session.averaging.check_begin(rule)
        with session.telling_others():
            session.averaging.start_average(rule, self.steps + 1)

    @contextmanager
    def averaged(
        self,
        *,
        update_bn: SizedDataset | None = None,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> Iterator[None]:
        """A block in which the model holds its averages; called on every device.

        Evaluate, predict, save and read the model there. Afterwards, also after an exception, the
        values that are trained are back, to the bit. A checkpoint that is saved there has the
        averages in ``model.safetensors``, and `load` goes on with the values that are trained all
        the same.

        Args:
            update_bn: a data set over which the statistics of batch norms are recomputed with the
                averaged weights, as `torch.optim.swa_utils.update_bn` does: by the loss function,
                in training mode. Without it they are averaged like everything else.
            batch_size, workers, collate: of ``update_bn``, as for `loader`.

        Raises:
            ValueError: no average is kept, or only one of update_bn and batch_size is given.
            RuntimeError: `step`, `load`, `modifying` or `average` is called inside the block.
            DisagreementError: another device is somewhere else.

        >>> trainer.average(mean=True)
        >>> steps = [trainer.step(torch.ones(4, 2)) for _ in range(3)]
        >>> trained = trainer.fingerprint()
        >>> with trainer.averaged():
        ...     trainer.fingerprint() == trained
        False
        """
        if (update_bn is None) != (batch_size is None):
            raise ValueError("expected update_bn and batch_size together, or neither of them")
        session = self._session
        with session.telling_others():
            session.engine.check_last_step()
            averaged = load("session.data_calls").averaged
            with averaged(session, update_bn, batch_size, workers=workers, collate=collate):
                yield

    def barrier(self) -> None:
        """Wait until every device is here; called on every device.

        Raises:
            PeerError: another device failed, or did not come within ``timeout_s``.
            DisagreementError: another device makes another call.

        >>> trainer.barrier()
        """
        with self._session.telling_others():
            self._session.engine.agree(CallDigest(Call.BARRIER, self.steps + 1))

    def broadcast(self, value: object = None) -> Any:
        """The lead's value on every device; called on every device.

        Args:
            value: on the lead what `gather` may have; elsewhere it is ignored, and may be left out.

        Returns:
            A copy of the lead's value, as `gather` returns it.

        Raises:
            TypeError: the lead's value is, or holds, something that cannot be sent.

        >>> trainer.broadcast({"name": "run 7", "order": torch.arange(3)})
        {'name': 'run 7', 'order': tensor([0, 1, 2])}
        """
        session = self._session
        with session.telling_others():
            text = load("passes.collectives").written(value) if session.devices.has_lead else None
            return session.result("trainer.broadcast", partial(self._broadcast, text))

    def gather(self, value: object) -> list[Any]:
        """A value of every device's process, such as seconds or a score; called on every device.

        Args:
            value: of this process and so of all its devices: None, a bool, int, float, str or
                bytes; a tensor or a NumPy array or scalar of any numbers and shape; or lists,
                tuples and dicts of these, with text for keys.

        Returns:
            A copy of it for each of `devices`, in their order, on every device, to the bit; tensors
            on the host, other mappings as dicts. Where every device has a dict of numbers alone
            (0-d tensors count), the numbers are floats, of the same names everywhere.

        Raises:
            TypeError: the value is, or holds, something that cannot be sent; raised before
                anything is.
            DisagreementError, ValueError: the names of numbers differ between devices, or are not
                of one line.

        >>> trainer.gather({"seconds": 2}), trainer.gather(("a", None))
        ([{'seconds': 2.0}], [('a', None)])
        """
        session = self._session
        with session.telling_others():
            text = load("passes.collectives").written(value)
            return session.result("trainer.gather", partial(self._gather, text))

    def fork_rng(self) -> AbstractContextManager[None]:
        """A block whose random numbers do not shift those that come after it.

        When it ends, the generators of PyTorch (this process's devices included), ``random`` and
        NumPy are where they were when it began. What only the lead draws (samples to look at,
        names) belongs in such a block, or what a script draws later differs between devices. It
        waits for nobody, so the lead alone may open it; steps, evaluations and loaders have seeds
        of their own and need none.

        >>> state = torch.get_rng_state()
        >>> if trainer.is_lead:
        ...     with trainer.fork_rng():
        ...         noise = torch.randn(3)
        >>> torch.equal(torch.get_rng_state(), state)
        True
        """
        return forked_generators(*self._session.devices.own_devices.values())

    def fingerprint(self) -> str:
        """16 hexadecimal digits over parameters and buffers: the same for the same bits.

        Called on every device where each keeps its partition (see `gathered`); elsewhere on any.

        Raises:
            DisagreementError: another device that keeps its partition makes another call.

        >>> before = trainer.fingerprint()
        >>> step = trainer.step(torch.ones(4, 2))
        >>> len(before), trainer.fingerprint() == before
        (16, False)
        """
        session = self._session
        digests = partial(load("passes.collectives").model_digests, session.engine, self.steps + 1)
        with session.telling_others():
            return session.result("trainer.fingerprint", lambda: fingerprint_of(digests()))

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
        """Write the run as it is now to ``directory/step-00001234/``, and return that folder.

        ``model.safetensors`` there holds parameters and buffers under the user's own names. The
        folder is there whole or not at all. Called on every device; the lead writes. In
        `averaged` it holds the averages, and what is trained is in another file there.

        Args:
            directory: holds the checkpoints of a run; made if it is not there.
            scores: numbers to remember with this checkpoint, such as what `evaluate` returned.
            keep: how many of the newest of this run stay there; with None this one stays for good.
                What anybody else put there is left alone.
            best: ``"highest NAME"`` or ``"lowest NAME"`` of ``scores``: from here on, of those of
                this run, the checkpoint with that score stays too.
            wait: return when all is on the disk; else a failure is raised by the next call. Where
                devices share no memory and keep their partitions, it is waited for all the same.
            extra: None, numbers, text, or lists, tuples and dicts of these; `load` gives it back.

        Raises:
            OSError: it could not be written; what was there before is still there.
            StateError: a parameter is not finite, or a step broke off in its update.
            TypeError, ValueError: an argument is not usable, or no file can hold the state.

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> trainer.save(directory, extra={"note": "first try"}).name
        'step-00000000'
        >>> trainer.load(directory).extra
        {'note': 'first try'}
        """
        keeping = load("checkpoint.folder").Keeping.checked(keep, best, scores or {})
        copied = to_json(extra, "extra")
        session = self._session
        folder = local_path("directory", directory)
        return session.save(folder, keeping=keeping, wait=wait, extra=copied)

    @overload
    def load(
        self, directory: str | Path, *, allow_changed: Collection[str] = ...
    ) -> Checkpoint: ...

    @overload
    def load(
        self, directory: str | Path, *, allow_changed: Collection[str] = ..., if_any: bool
    ) -> Checkpoint | None: ...

    def load(
        self, directory: str | Path, *, allow_changed: Collection[str] = (), if_any: bool = False
    ) -> Checkpoint | None:
        """Go on from the newest checkpoint of a directory, on any number of devices.

        Model, optimizer and scheduler are then as they were, and `epochs` and loaders go on at the
        sample where the run was saved. What the script changes from here on acts on that, also
        where the whole run has done it before. A checkpoint that is damaged is left out with a
        warning. Called on every device; the lead reads.

        Args:
            directory: what was given to `save`, or the folder of one checkpoint.
            allow_changed: what may differ from the run that was saved, each giving up a part of the
                promise: ``"seed"``, ``"shards"``, ``"batch_size"``, ``"dataset"``,
                ``"clip_norm"``, ``"precision"``, ``"microbatch"``, ``"compile"``, ``"optimizer"``,
                ``"scheduler"``, ``"average"``.
            if_any: where there is no checkpoint yet, do nothing, and return None.

        Raises:
            CheckpointError: there is no checkpoint, none is whole, or it does not fit this run.
                Raised alike on all devices; nothing has changed, so the script may start afresh.

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> trainer.load(directory, if_any=True) is None
        True
        >>> folder = trainer.save(directory)
        >>> trainer.load(directory).step
        0
        """
        names = (allow_changed,) if isinstance(allow_changed, str) else tuple(allow_changed)
        found: Checkpoint | None = self._session.load(
            local_path("directory", directory), allow_changed=names, if_any=if_any
        )
        return found

    def close(self) -> None:
        """Leave the run, and have the model be the script's; called on every device.

        Each process then has all values of the model for itself, the same everywhere, and may
        change them. The optimizer's state, which lies in parts on the devices, is let go: what
        follows needs another optimizer. Another Trainer of the model, or of a part of it, closes
        this one first. So need no call: the end of the program, after which nothing changes.

        With ``onefold run --checkpoint``, while an exception is handled on one of several devices,
        that happens only at its end. A device that is handling one waits for no other.

        Raises:
            DisagreementError: with several devices, the script has changed parameters since the
                last call, outside of `modifying`; or another device is somewhere else.
            OSError: a checkpoint could not be written.
            PeerError: another device failed.

        >>> import onefold
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> run = onefold.Trainer(net, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
        >>> step = run.step(torch.ones(6, 2))
        >>> run.close()
        >>> _ = net.weight.data.mul_(0.5)
        """
        self._session.close()

    def _broadcast(self, text: bytes | None) -> Any:
        session = self._session
        session.engine.agree(CallDigest(Call.BROADCAST, self.steps + 1))
        return load("passes.collectives").broadcast(session.engine.context.exchange, text)

    def _gather(self, text: bytes) -> list[Any]:
        session = self._session
        session.engine.agree(CallDigest(Call.GATHER, self.steps + 1))
        own = dict.fromkeys(session.devices.own, text)
        found: list[Any] = load("passes.collectives").gather(session.engine.context.exchange, own)
        return found


def _dropped(reference: weakref.ref[Session], memory: Memory) -> None:
    """Leave the model to the script, which has dropped its Trainer."""
    session = reference()
    if session is not None:
        session.drop()
    else:  # both were garbage together
        memory.make_own()

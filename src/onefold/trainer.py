"""Defines `Trainer`, the public interface of onefold. It delegates all computation."""

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

_Value = TypeVar("_Value")


class Trainer:
    """Trains a model on any number of devices, to the same bits as on one.

    Args:
        model: any module. It stays yours, and always holds the current values. Or several by name,
            such as ``{"generator": ..., "discriminator": ...}``: functions then get all of them, as
            a ``torch.nn.ModuleDict``.
        optimizer: made from the model's parameters. The object is kept, so schedulers attached to
            it work. Or several without common parameters, in a list, such as Muon and AdamW, or in
            a dict by name: all of them update in each step, unless there are several losses. With
            None, the script makes the updates itself, with the gradients of `gradient`.
        loss: ``loss(model, batch)`` for one shard on one device. It returns (n,) losses, one per
            sample; a scalar, the mean over the shard; or ``onefold.Mean``, ``onefold.Sum``, or
            their sum. The loss of a step is the sum of totals over the sum of weights, across the
            whole batch. It may also return metrics, as ``(loss, {"accuracy": ...})``, which
            `Step.values` averages in the same way. Or several losses by name: each step uses one of
            them, and updates the parameters of the optimizer with that name, or of the only one.
        shards: V, the number of parts of every batch, and so the maximum number of devices. Like
            the batch size, it affects the result.
        seed: seed of dropout, augmentation, the order of samples and all other randomness.
        devices: several devices for this one process to drive, such as ``["cuda:0", "cuda:1"]``. By
            default a launcher decides, or one device is used.
        shares: number of shards on each device, such as ``(3, 1)``; even shares by default.
        threads: number of threads per CPU device; ``max(1, cores // shards)`` by default.
        scheduler: a ``torch.optim.lr_scheduler`` of the optimizer, saved in every checkpoint. For
            several optimizers, a dict with the same names, or a list with None for optimizers
            without one; each scheduler follows the steps of its optimizer.
        scheduler_every: when the scheduler is stepped: after each ``"step"`` that updates, when an
            ``"epoch"`` of `epochs` ends, or only if the ``"script"`` calls its ``step``, with a
            metric if it takes one, the same on every device.
        clip_norm: maximum norm of the whole gradient; a larger gradient is scaled down to it.
        clip_value: maximum magnitude of each element of the gradient, applied after ``clip_norm``.
        precision: ``"bf16"`` or ``"fp16"`` computes with autocast. With ``"bf16-params"`` and
            ``"fp16-params"`` the model also holds such parameters, and the optimizer updates
            float32 ones. ``"fp32"`` requires float32. None leaves all dtypes to the model.
        on_nonfinite: ``"raise"`` an error if a loss or gradient is not finite, or ``"skip"`` the
            step.
        microbatch: maximum number of samples of a shard that run at once, for devices whose memory
            is too small for a shard; ``"auto"`` finds the largest microbatch that fits.
        compile: whether to compile the model and the loss of a shard together, with
            ``torch.compile``. Other kernels round differently. Evaluation and prediction are not
            compiled.
        graphs: whether an accelerator captures the kernels of a shard once and replays them, with
            the same bits. The host then launches a shard in two calls. Other devices ignore it.
        deterministic: whether to use kernels that repeat their bits, and refuse others.
        buffers: rules for buffers that shards change, by name or pattern. The default is the mean
            over the shards for floating point, and the largest for other numbers. Rules are
            ``"mean"``, ``"max"``, ``"sum"`` (of what each shard added), ``"first"`` (the first
            shard's), and ``"per_shard"``: every shard keeps its own buffer, such as the hidden
            state of a recurrent model.
        stages: modules for cutting a model that is too large for a device (FSDP's wrapping units,
            or pipeline stages), see ``onefold run --placement``. They do not affect the result.
            ``"auto"`` uses the items of its module lists.
        timeout_s: the longest wait for another device, in seconds; 600 by default.

    Raises:
        TypeError, ValueError: an argument is invalid.
        LaunchError: a device is not available.
        DisagreementError: another device of the run got other arguments.

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
        graphs: bool = False,
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
            graphs=graphs,
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
        # The script may drop its Trainer and keep the model. Use a weak reference, because an
        # observer of the session may refer to this Trainer; the memory refers to nothing of the
        # script's.
        memory = session.engine.context.exchange.memory
        weakref.finalize(self, _dropped, weakref.ref(session), memory).atexit = False

    def __repr__(self) -> str:
        model, devices = type(self.model).__name__, len(self.devices)
        return f"Trainer({model}, devices={devices}, shards={self.shards}, steps={self.steps})"

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the run, by number."""
        return self._session.devices.all

    @property
    def shards(self) -> int:
        """Number of shards of every batch."""
        return self._session.settings.shards

    @property
    def is_lead(self) -> bool:
        """Whether this process has device 0."""
        return self._session.devices.has_lead

    @property
    def asked_to_stop(self) -> bool:
        """Whether the script should save and end; the same on all devices.

        Always False with ``onefold run --checkpoint``, because that run saves and ends by itself.
        """
        return self._session.asked_to_stop

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of shards on each device; may be set between steps, the same on all devices."""
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
        """Return batches of a data set for `step`; each device reads only its own shards.

        Create loaders in the same order on all devices and in every run, because their random
        numbers depend on how many were created before. After a checkpoint, the first pass starts
        with the first unused sample.

        Args:
            dataset: a data set with a length and an item for each index; a stream, that is, an
                `IterableDataset` or any other iterable, which every device reads completely; or a
                `DataLoader` of PyTorch, whose settings are adopted.
            batch_size: the global batch size; omit it with a `DataLoader` or a ``batch_sampler``.
            shuffle: whether to visit the samples in a new order in each pass.
            lengths: length of every sample, with ``shuffle``: batches then have samples of similar
                length.
            workers: number of processes that read ahead, for each device.
            drop_last: whether to drop a last batch that is short.
            collate: makes a shard's payload from a list of samples; PyTorch's by default.
            names: PyTorch's ``sampler``, ``batch_sampler`` (of whole batches) and
                ``worker_init_fn``; also ``num_workers`` and ``collate_fn``, for ``workers`` and
                ``collate``.

        Raises:
            TypeError, ValueError: arguments do not fit together, or a number is out of range.
            CheckpointError: the corresponding loader of the saved run had other sizes.

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
        """Return whole batches from your own function, for `step`; they resume after a checkpoint.

        Args:
            batch_fn: ``batch_fn(step, generator)`` returns a whole batch, as `step` takes it:
                tensors (n, ...) or tuples, lists and dicts of them. ``step`` is the number of the
                pass times ``per_epoch``, plus the index in the pass. Both count from 0, and passes
                from the epoch in which `batches` is called. ``generator`` is on the host, seeded
                from the run's seed and ``step``, as are the global generators. It is called on
                every device.
            per_epoch: number of batches in a pass.
            stateless: whether a batch depends only on the arguments. A resumed run then creates no
                completed batch again. Otherwise it calls the function for each completed batch, so
                that a generator or a position that the function keeps is restored.

        Raises:
            TypeError, ValueError: the function is not callable, or the number is below 1.

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
        """Count epochs up to ``number``, from the position of the run, maybe inside an epoch.

        With ``scheduler_every="epoch"``, the scheduler is stepped at the end of each epoch with
        steps.

        Args:
            number: the epoch before which to stop, counted from 0. The iterator yields the
                remaining numbers, so that a run that resumes after `load` repeats no epoch. If an
                exception or ``break`` left a loop in the middle of a pass, the next loop continues
                there, with the same loaders.

        >>> loader = trainer.loader(torch.ones(4, 2), batch_size=4)
        >>> [trainer.step(batch).epoch for epoch in trainer.epochs(3) for batch in loader]
        [0, 1, 2]
        """
        return self._session.position.epochs(number)

    def step(self, batch: object, loss: str | None = None, *, dim: int = 0) -> Step:
        """Update the model once from one whole batch.

        Args:
            batch: a batch of a `loader`; or tensors or NumPy arrays (n, ...), `onefold.Broadcast`,
                `onefold.Scatter`, or tuples, lists, mappings and dataclasses of all of these, the
                same on every device. They are cut into shards and keep their type. Batches of
                several loaders are each cut by their own size; ``samples`` counts the first one's.
            loss: the name of the loss, if the Trainer has several.
            dim: the sample dimension of all tensors, such as 1 for time-major ones (time, n, ...).
                For batches of a `loader`, only ``microbatch`` uses it.

        Raises:
            TypeError: a loss is not named, or is named although there is only one; or the batch
                contains a value that cannot be cut.
            ValueError: the batch is empty, or its tensors differ in length or lack the dimension;
                or some shards have samples of only some parts; or the step is in no epoch, but
                ``scheduler_every`` is ``"epoch"``.
            RuntimeError: the script stepped a scheduler that the trainer steps.
            DisagreementError: another device is in another step, or got other arguments.
            StateError, GradientError: a shard changed state that it must not change, or has a
                gradient that cannot be summed.
            LossError: the loss has the wrong shape, or is not finite; names step and shard.
            PeerError: another device failed or is lost.
            OSError: an earlier checkpoint could not be written in the background.
            SystemExit: the launcher asked the run to stop, and the run was saved.

        >>> step = trainer.step(torch.ones(4, 2))
        >>> step.samples, step.loss.dtype, step.loss.shape
        (4, torch.float64, torch.Size([]))
        """
        return self._session.step(batch, loss, dim)

    def gradient(self, batch: object, loss: str | None = None, *, dim: int = 0) -> Step:
        """Compute the gradient of one whole batch, in ``.grad``; the script makes the update.

        On every device, each trained parameter gets the batch's whole gradient in ``.grad``, or
        None if no shard gave it one. The gradient is the one that `step` would use: divided,
        unscaled, checked, and clipped if Trainer got ``clip_norm`` or ``clip_value``. It replaces
        the old gradient instead of being added to it. Update in `modifying`, inside of which this
        may be called.

        Calls with the same batch object are one step, with the same number and random numbers,
        until a block of `modifying` ends in which the batch was passed. See
        https://onefold.example/do/gradient-without-update.html.

        Args:
            batch, loss, dim: as for `step`.

        Raises:
            RuntimeError: another batch is passed in the same block of `modifying`.
            ValueError: the precision or an average requires Trainer's own update.

        It also raises what `step` raises.

        >>> step = trainer.gradient(torch.ones(4, 2))
        >>> with trainer.modifying(), torch.no_grad():
        ...     _ = model.weight.sub_(model.weight.grad)
        """
        step: Step = self._session.gradients.gradient(batch, loss, dim)
        return step

    def on_step(self, observe: Callable[[Step], object]) -> None:
        """Register a function that the lead calls after every step, for logging.

        The lead calls it inside `step`, before a checkpoint of that step, so that what it writes
        exists for every saved step. Random numbers that it draws do not shift the run's. It must
        not make calls that all devices must make, such as `step`, `save` or `evaluate`.

        Args:
            observe: called with the step; for `gradient`, with the first call of each step.
                Functions are called in the order of registration; an exception ends the step.

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
        """Compute metrics over a data set, with each sample exactly once, on any number of devices.

        Args:
            score: ``score(model, batch)`` for one shard, in evaluation mode and without gradients;
                returns a dict of names to values that a loss may return.
            dataset, batch_size, workers, collate, names: as for `loader`; but a `DataLoader` that
                shuffles is read in the order of its data set.
            model: the name of one of several models, to pass only this one to ``score``.
            whole_batches: pass whole batches instead of shards to ``score``, for a metric that is
                computed over a batch, such as a ranking. The first device computes all of them.

        Returns:
            For each name the sum of totals over the sum of weights; the same on every device.

        Raises:
            LossError: a value has the wrong shape.
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
        found: dict[str, float] = over_data(
            self._session, Call.EVALUATE, evaluate, score, model, chosen, whole=whole_batches
        )
        return found

    def predict(
        self,
        function: Callable[[Any, Any], Mapping[str, _Value]],
        dataset: DataSource,
        *,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Collate | None = None,
        model: str | None = None,
        **names: Unpack[TorchNames],
    ) -> dict[str, _Value]:
        """Compute the model's outputs for every sample, in the order of the data set.

        Args:
            function: ``function(model, batch)`` for one shard, as in `evaluate`. It returns a dict
                of names to tensors (n, ...), one row per sample, with one dtype and row shape for
                all shards; or to lists with one tensor per sample, of any sizes, with one dtype and
                number of dimensions; or to lists with one dict of such tensors per sample.
            dataset, batch_size, workers, collate, names: as for `loader`; but a `DataLoader` that
                shuffles is read in the order of its data set.
            model: the name of one of several models, to pass only this one to ``function``.

        Returns:
            For each name a tensor (samples, ...) on the host, or such a list for all samples.

        Raises:
            LossError: a value does not have one row, tensor or dict per sample.
            DisagreementError: names, dtypes or shapes differ between shards.

        >>> said = trainer.predict(lambda m, x: {"sum": x.sum(1)}, torch.ones(5, 2), batch_size=4)
        >>> said["sum"]
        tensor([2., 2., 2., 2., 2.])
        """
        chosen = choose(
            dataset, names, batch_size=batch_size, workers=workers, collate=collate, in_order=True
        )
        predict = load("passes.evaluation").predict
        run = load("session.data_calls").over_data
        rows: dict[str, _Value] = run(self._session, Call.PREDICT, predict, function, model, chosen)
        return rows

    @property
    def model(self) -> torch.nn.Module:
        """The user's own module, with the current parameters."""
        return self._session.engine.context.replicas[0].module

    def record(self, directory: str | Path) -> None:
        """Record the run from here on, in ``run.record``. Call it on every device.

        It records what ``onefold run --record`` records for a script: each step with its shards,
        results of `evaluate` and similar calls, and checkpoints. The lead writes. If there is a
        record already, the run continues it; entries of steps after the run's current step no
        longer count. `onefold.Record` reads it.

        Args:
            directory: the folder, which is created if it does not exist.

        Raises:
            OSError: the file cannot be written, or another run writes to it.
            RecordError: the file is not a record, or is damaged.
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
        """Whether a resumed script is replaying completed steps; always False without a resume.

        With ``onefold run --checkpoint``, a resumed script runs again from its start. Up to its
        checkpoint nothing is computed: steps, evaluations and predictions are replayed from the
        record of the run, and printed lines are not shown. Check this property before the script
        writes elsewhere.

        >>> if not trainer.replaying:
        ...     trainer.steps
        0
        """
        return self._session.replaying

    def state(self, name: str, value: _Value) -> _Value:
        """Record a value of the script, for replay. Call it on every device.

        A resumed script cannot compute again what it computed outside of this trainer. During
        replay, every device gets the value that the lead recorded.

        Args:
            name: the name of the value, for errors.
            value: any value that `gather` supports.

        Returns:
            A copy of the value, with dicts for mappings and tensors on the host; during replay, the
            recorded value.

        >>> best = trainer.state("best", 0.5)
        >>> best
        0.5
        """
        session = self._session
        with session.telling_others():
            what = f"trainer.state of {name}"
            # Encode and decode, so that the types are the same as in a replayed script.
            kept: _Value = encoding.decode(encoding.encode(value, what))
            return session.result(what, lambda: kept)

    @property
    def steps(self) -> int:
        """Number of finished steps, including those before a checkpoint."""
        return self._session.position.step

    def modifying(self, *, optimizer_state: bool | None = None) -> AbstractContextManager[None]:
        """Return a context manager for changing the model between steps. Call it on every device.

        At its end, the lead's parameters, buffers and optimizer settings are broadcast, and what
        other devices wrote is dropped. So the lines may run on all devices or on the lead only.
        With several devices, other changes to the model are refused at the next call.

        Args:
            optimizer_state: whether to show ``optimizer.state`` of whole parameters, for reading
                and writing. It is gathered on every device, and the lead's is scattered at the end.
                By default it is shown if the optimizer has its own methods, such as ``train()`` and
                ``eval()``. Otherwise reading it is refused while it is partitioned.

        Raises:
            DisagreementError: another device made another call.
            RuntimeError: a trainer call other than `gradient` was made inside the block.

        >>> with trainer.modifying():
        ...     _ = model.weight.data.clamp_(-0.1, 0.1)
        """
        return self._session.modifying(optimizer_state=optimizer_state)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters on every device for a block. Call it on every device.

        Devices have all parameters anyway, unless the run uses ``--placement partition`` and its
        devices share no memory (GPUs, several hosts). Then each device keeps its partition, gathers
        parameters for a step, and frees them afterwards. Outside of this block, the parameters of
        such a model are NaN, and ``state_dict()`` is refused. Only read the model in the block;
        changes to it are lost, and belong in `modifying`.

        Raises:
            DisagreementError: another device made another call.

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
        """Keep an average of the model (EMA or SWA) from here on, in addition to its values.

        It starts with the current values. Skipped steps do not change it. Every checkpoint contains
        it, and a resumed run continues it; the line may then come before `load` or after it, or be
        omitted. Call it on every device, before the first step or later.

        Args:
            decay: fraction of an EMA that stays in each update: at least 0, and less than 1. In
                update k it is ``(1 + k) / (10 + k)`` if that is less.
            mean: average all values with equal weight, as stochastic weight averaging (SWA) does.
                The initial values do not count.
            every: number of steps between updates.
            after: name of a loss, if there are several, to count and follow only its steps.

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
        """Show the averages in the model for a block. Call it on every device.

        Evaluate, predict, save and read the model there. Afterwards the training values are
        restored, bit for bit, also after an exception. A checkpoint saved there has the averages in
        ``model.safetensors``; `load` continues with the training values anyway.

        Args:
            update_bn: a data set over which the statistics of batch norms are recomputed with the
                averaged weights, as `torch.optim.swa_utils.update_bn` does: with the loss function,
                in training mode. By default they are averaged like all other buffers.
            batch_size, workers, collate: settings for ``update_bn``, as for `loader`.

        Raises:
            ValueError: no average is kept, or only one of update_bn and batch_size is given.
            RuntimeError: `step`, `load`, `modifying` or `average` is called inside the block.
            DisagreementError: another device made another call.

        >>> trainer.average(mean=True)
        >>> steps = [trainer.step(torch.ones(4, 2)) for _ in range(3)]
        >>> trained = trainer.fingerprint()
        >>> with trainer.averaged():
        ...     trainer.fingerprint() == trained
        False
        """
        if (update_bn is None) != (batch_size is None):
            raise ValueError("pass both update_bn and batch_size, or neither of them")
        session = self._session
        with session.telling_others():
            session.engine.check_last_step()
            averaged = load("session.data_calls").averaged
            with averaged(session, update_bn, batch_size, workers=workers, collate=collate):
                yield

    def barrier(self) -> None:
        """Wait until every device makes this call. Call it on every device.

        Raises:
            PeerError: another device failed, or did not arrive within ``timeout_s``.
            DisagreementError: another device made another call.

        >>> trainer.barrier()
        """
        with self._session.telling_others():
            self._session.engine.agree(CallDigest(Call.BARRIER, self.steps + 1))

    def broadcast(self, value: _Value | None = None) -> _Value:
        """Return the lead's value on every device. Call it on every device.

        Args:
            value: on the lead, any value that `gather` supports; on other devices it is ignored,
                and may be omitted.

        Returns:
            A copy of the lead's value, as `gather` returns it.

        Raises:
            TypeError: the lead's value is, or contains, a value that cannot be sent.

        >>> trainer.broadcast({"name": "run 7", "order": torch.arange(3)})
        {'name': 'run 7', 'order': tensor([0, 1, 2])}
        """
        session = self._session
        with session.telling_others():
            text = load("passes.collectives").written(value) if session.devices.has_lead else None
            found: _Value = session.result("trainer.broadcast", partial(self._broadcast, text))
            return found

    @overload
    def gather(self, value: Mapping[str, float]) -> list[dict[str, float]]: ...

    @overload
    def gather(self, value: _Value) -> list[_Value]: ...

    def gather(self, value: object) -> object:
        """Gather a value from every device's process, such as seconds or a metric, on every device.

        Args:
            value: the value of this process, and so of all its devices: None, a bool, int, float,
                str or bytes; a tensor or a NumPy array or scalar of any numbers and shape; or
                lists, tuples and dicts of these, with str keys.

        Returns:
            A copy for each of `devices`, in their order, on every device, with the same bits.
            Tensors are on the host; other mappings are dicts. If every device has a dict that
            contains only numbers (0-d tensors count), they are returned as floats, with the same
            names everywhere.

        Raises:
            TypeError: the value is, or contains, a value that cannot be sent; raised before
                anything is sent.
            DisagreementError, ValueError: the names of numbers differ between devices, or contain
                line breaks.

        >>> trainer.gather({"seconds": 2}), trainer.gather(("a", None))
        ([{'seconds': 2.0}], [('a', None)])
        """
        session = self._session
        with session.telling_others():
            text = load("passes.collectives").written(value)
            return session.result("trainer.gather", partial(self._gather, text))

    def fork_rng(self) -> AbstractContextManager[None]:
        """Return a context manager whose random numbers do not shift later ones.

        At its end, the generators of PyTorch (including this process's devices), ``random`` and
        NumPy are restored. If only the lead draws numbers (for samples to look at, or names), it
        must do so in such a block, or later draws of the script differ between devices. The block
        waits for no device, so the lead alone may open it. Steps, evaluations and loaders have
        their own seeds and do not need it.

        >>> state = torch.get_rng_state()
        >>> if trainer.is_lead:
        ...     with trainer.fork_rng():
        ...         noise = torch.randn(3)
        >>> torch.equal(torch.get_rng_state(), state)
        True
        """
        return forked_generators(*self._session.devices.own_devices.values())

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over parameters and buffers: equal for equal bits.

        Call it on every device if each keeps its partition (see `gathered`); otherwise on any.

        Raises:
            DisagreementError: another device that keeps its partition made another call.

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
        """Save the run to ``directory/step-00001234/``, and return that folder.

        ``model.safetensors`` in it contains parameters and buffers under the user's own names. The
        folder is complete or absent. Call it on every device; the lead writes. In `averaged`,
        ``model.safetensors`` contains the averages, and another file the training values.

        Args:
            directory: folder for the checkpoints of a run; created if it does not exist.
            scores: metrics to store with this checkpoint, such as a result of `evaluate`.
            keep: number of recent checkpoints of this run to keep; None keeps this one permanently.
                Other files in the folder are left alone.
            best: ``"highest NAME"`` or ``"lowest NAME"`` of ``scores``: from here on, also keep
                this run's best checkpoint by that metric, the newest of equal ones. In ``"highest
                accuracy, lowest loss"``, the loss decides between equal accuracies.
            wait: whether to return only when all is on the disk; otherwise the next call raises a
                failure. If devices share no memory and each keeps its partition, the call always
                waits.
            extra: None, numbers, text, or lists, tuples and dicts of these; `load` returns it.

        Raises:
            OSError: the checkpoint could not be written; earlier ones still exist.
            StateError: a parameter is not finite, or a step was interrupted during its update.
            TypeError, ValueError: an argument is invalid, or the state cannot be saved.

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
        """Resume from the newest checkpoint of a directory, on any number of devices.

        Model, optimizer and scheduler are restored, and `epochs` and loaders continue at the sample
        at which the run was saved. Changes that the script makes after this call act on the
        restored state, even if the saved run had already made them. A damaged checkpoint is skipped
        with a warning. Call it on every device; the lead reads.

        Args:
            directory: the directory passed to `save`, or the folder of one checkpoint.
            allow_changed: settings that may differ from the saved run; each gives up a part of the
                guarantees: ``"seed"``, ``"shards"``, ``"batch_size"``, ``"dataset"``,
                ``"clip_norm"``, ``"precision"``, ``"microbatch"``, ``"compile"``, ``"optimizer"``,
                ``"scheduler"``, ``"average"``.
            if_any: if there is no checkpoint yet, do nothing and return None.

        Raises:
            CheckpointError: there is no checkpoint, none is complete, or it does not fit this run.
                Raised on all devices; nothing has changed, so the script may start from scratch.

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
        """Leave the run and return the model to the script. Call it on every device.

        Each process then has all values of the model, the same everywhere, in its own memory, and
        may change them. The optimizer's state, of which each device has a part, is dropped: create
        another optimizer for further training. Another Trainer of the model, or of a part of it,
        closes this one first. A program that changes nothing afterwards does not have to call it.

        With ``onefold run --checkpoint`` and several devices, a call during the handling of an
        exception does nothing: the device leaves the run at its end. Otherwise a device that is
        handling an exception leaves without waiting for others.

        Raises:
            DisagreementError: with several devices, the script changed parameters since the last
                call, outside of `modifying`; or another device made another call.
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

    def _gather(self, text: bytes) -> Any:
        session = self._session
        session.engine.agree(CallDigest(Call.GATHER, self.steps + 1))
        own = dict.fromkeys(session.devices.own, text)
        return load("passes.collectives").gather(session.engine.context.exchange, own)


def _dropped(reference: weakref.ref[Session], memory: Memory) -> None:
    """Return the model to the script, which has dropped its Trainer."""
    session = reference()
    if session is not None:
        session.drop()
    else:
        # Session and Trainer were garbage together.
        memory.make_own()

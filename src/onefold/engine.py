"""Drives one step through replicas, exchange and update. Holds no memory of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils import deterministic as torch_deterministic

from onefold.batch import ShardedBatch
from onefold.errors import DisagreementError, LossError
from onefold.exchange.base import Board, Exchange
from onefold.fold import fold_shards
from onefold.randomness import kept_generators
from onefold.replica import LossFunction, Replica
from onefold.timing import Span
from onefold.update import SpanOptimizer

__all__ = ["Engine", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step came to."""

    totals: torch.Tensor
    """(V,) float64, where the lead computes: each shard's part of the loss."""
    weight: float
    """What their sum is divided by; where it is 0 nothing was updated."""
    asked_to_stop: bool
    """Whether some device has been asked to stop; all devices say the same."""


class Engine:
    """The devices of this process, at work together with all others.

    Args:
        replicas: of this process's devices.
        exchange: with all devices.
        update: the optimizer on this process's spans.
        seed: of the run.
        clip_norm: the largest norm of the whole gradient, or None.
        deterministic: whether kernels that do not repeat their bits are refused.
        frozen: parameters that must go on being frozen, by name.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[Replica],
        exchange: Exchange,
        update: SpanOptimizer,
        seed: int,
        clip_norm: float | None,
        deterministic: bool,
        frozen: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self.replicas = replicas
        self.exchange = exchange
        self.seed = seed
        self.update = update
        self._clip_norm = clip_norm
        self._deterministic = deterministic
        self._frozen = frozen
        self._marks = replicas[0].marks()
        self._unread: tuple[int, torch.Tensor] | None = None

    def step(
        self, batch: ShardedBatch, loss: LossFunction, number: int, *, asked_to_stop: bool = False
    ) -> Outcome:
        """One update of the parameters.

        Args:
            batch: this process's shards of it.
            loss: of one shard.
            number: of the step.
            asked_to_stop: whether this process has been; all devices are told.

        Raises:
            LossError: a loss is of the wrong kind, or not finite.
            PeerError: another device is lost or has failed.
        """
        watch = self.replicas[0].watch
        self._check_frozen()
        with self.computing(training=True):
            for replica in self.replicas:
                replica.run(batch, loss, seed=self.seed, step=number, exchange=self.exchange)
                self.exchange.board.heads[replica.number, 2] = asked_to_stop
        start = watch.now()
        self.exchange.collect(batch.plan)
        watch.note("exchange", "collect", start)
        board = self.exchange.board
        _check_heads(board)
        self._check_finite(board, number)
        outcome = Outcome(
            board.totals.clone(),
            fold_shards(board.weights.tolist(), _add),
            bool(board.heads[:, 2].any()),
        )
        if outcome.weight > 0:
            self._apply(batch, outcome.weight)
        for replica in self.replicas:
            replica.buffers.end_step(board, batch)
        start = watch.now()
        self.exchange.spread()  # from here on the board is no longer ours to read
        watch.note("exchange", "spread", start)
        if len(self.replicas) > 1:
            self._marks = self.replicas[0].marks()
        return outcome

    def check_last_step(self) -> None:
        """Wait for the last step's loss where nobody has looked at it yet.

        Raises:
            LossError: it is not finite.
        """
        if self._unread is not None:
            (step, totals), self._unread = self._unread, None
            _raise_if_not_finite(totals.cpu(), step)

    def take_spans(self) -> dict[int, list[Span]]:
        """What each device of this process has done since the last time, by its number."""
        return {replica.number: replica.watch.take() for replica in self.replicas}

    @contextmanager
    def computing(self, *, training: bool) -> Iterator[None]:
        """The state in which models run; generators, modes and buffers are put back afterwards."""
        self._follow_first()
        modules = [replica.module for replica in self.replicas]
        with (
            kept_generators(*(replica.device for replica in self.replicas)),
            _kernels(deterministic=self._deterministic),
            _modes(modules, training=training),
        ):
            for replica in self.replicas:
                replica.buffers.begin_step()
            try:
                yield
            finally:
                for replica in self.replicas:
                    replica.buffers.restore()

    def _follow_first(self) -> None:
        """Bring what the user did to the model since the last step to its copies as well."""
        first, *copies = self.replicas
        changed = bool(copies) and first.marks() != self._marks
        for replica in copies:
            replica.follow(first, values=changed)

    def _apply(self, batch: ShardedBatch, weight: float) -> None:
        watch = self.replicas[0].watch
        start = watch.now()
        totals = [t for replica in self.replicas for t in self.exchange.totals(replica.number)]
        gave = self.exchange.board.gave
        counts = (gave[0] if len(gave) == 1 else gave.sum(axis=0)).tolist()
        self.update.take(totals, counts, shards=batch.plan.shards)
        divisor = batch.divisor(weight)
        if divisor != weight:
            self.update.scale(divisor / weight)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self.update.step()
        watch.note("update", "update", start)

    def _clip(self, clip_norm: float) -> None:
        norms = self.exchange.share(self.update.squared_norms())
        norm = norms.sum(dim=0).sum().sqrt()  # a piece has one owner: adding zeros is exact
        self.update.scale((clip_norm / (norm + 1e-6)).clamp(max=1.0))

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} was frozen when Trainer was made, so it has no place in the "
                    f"gradient buffers. Make Trainer first and freeze afterwards, or make a new one"
                )

    def _check_finite(self, board: Board, step: int) -> None:
        """On the processor before the update; on a GPU a step later, so that nobody waits."""
        if board.totals.device.type == "cpu":
            _raise_if_not_finite(board.totals, step)
            return
        self.check_last_step()
        self._unread = (step, board.totals.clone())


def _raise_if_not_finite(totals: torch.Tensor, step: int) -> None:
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            raise LossError(
                f"the loss of step {step}, shard {shard} is {total}: expected a finite number. "
                f"Look at the samples of that shard, lower the learning rate, or set clip_norm"
            )


def _check_heads(board: Board) -> None:
    """All devices must be in the same step of the same batch."""
    heads = board.heads[:, :2].tolist()
    for device, head in enumerate(heads):
        if head != heads[0]:
            raise DisagreementError(
                f"device {device} is in step {head[0]} with a batch of {head[1]} samples, device 0 "
                f"in step {heads[0][0]} with {heads[0][1]}: every device must be given the same "
                f"whole batch, or batches of trainer.loader"
            )


def _add(left: float, right: float) -> float:
    return left + right


@contextmanager
def _modes(modules: Sequence[torch.nn.Module], *, training: bool) -> Iterator[None]:
    """Training or evaluation mode, and each submodule's own mode again afterwards."""
    before: list[tuple[torch.nn.Module, bool]] = []
    for module in modules:
        parts = list(module.modules())
        before += [(part, part.training) for part in parts]
        if not all(part.training is training and _is_plain(part) for part in parts):
            module.train(training)
    try:
        yield
    finally:
        for part, mode in before:
            if part.training is not mode:
                part.training = mode


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether setting a module's mode sets the flag and nothing else."""
    return type(module).train is torch.nn.Module.train and "train" not in module.__dict__


@contextmanager
def _kernels(*, deterministic: bool) -> Iterator[None]:
    """Kernels that repeat their bits, where asked for; the caller's settings again afterwards."""
    if not deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch_deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    # The public function would load the compiler, for a second or two, to tell it as well.
    choose = torch._C._set_deterministic_algorithms
    choose(True, warn_only=False)
    torch_deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        choose(before, warn_only=warn_only)
        torch_deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark

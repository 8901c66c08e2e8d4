"""One device's model: runs shards, and keeps the partial sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from onefold.batch import ShardedBatch, move
from onefold.buffers import BufferSet
from onefold.errors import GradientError, LossError
from onefold.exchange.base import Exchange
from onefold.fold import Block, blocks_of, fold
from onefold.mean import Contribution, weigh
from onefold.randomness import derive_seed, seed_generators
from onefold.timing import Stopwatch

__all__ = ["LossFunction", "Replica"]

LossFunction = Callable[[torch.nn.Module, Any], object]
"""Takes the model and one shard; see `onefold.mean.weigh` for what it may return."""

Gradients = list[torch.Tensor | None]
Counts = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Replica:
    """The model on one device.

    Args:
        number: of the device, among all of the run.
        device: where it computes.
        module: the model, already there.
        trained: names of the parameters that the optimizer updates.
        buffers: the module's buffers.
    """

    def __init__(
        self,
        number: int,
        device: torch.device,
        module: torch.nn.Module,
        trained: Sequence[str],
        buffers: BufferSet,
    ) -> None:
        named = dict(module.named_parameters())
        self.number = number
        self.device = device
        self.module = module
        self.buffers = buffers
        self.watch = Stopwatch(device)
        self._names = list(trained)
        self._trained = [named[name] for name in trained]
        self._all = named
        self._placed = {name: p for name, p in named.items() if p.numel()}
        self._places = _places(self._placed)

    def run(
        self, batch: ShardedBatch, loss: LossFunction, *, seed: int, step: int, exchange: Exchange
    ) -> None:
        """Forward and backward of this device's shards; publishes one partial sum a block.

        Raises:
            LossError: the loss is of the wrong kind.
            GradientError: a gradient is sparse.
        """
        self._check_places()
        self._drop_gradients()
        board = exchange.board
        shards_run = batch.plan.shards_of(self.number)
        board.clear_rows(self.number, shards_run)
        board.heads[self.number] = step, batch.samples, 0
        run = _StepRun(self, batch, loss, seed, step)
        for slot, block in enumerate(blocks_of(shards_run, batch.plan.shards)):
            gradients = run.sum_of(block, exchange)
            start = self.watch.now()
            exchange.publish(self.number, slot, gradients)
            self.watch.note("exchange", "publish", start)
        self._drop_gradients()

    def marks(self) -> list[int]:
        """Numbers that differ once somebody has changed a parameter in place."""
        return [parameter._version for parameter in self._all.values()]

    def follow(self, first: Replica, *, values: bool) -> None:
        """Be a copy of the first device's model again, as the user has made it."""
        self.buffers.follow(first.buffers)
        for name, parameter in self._all.items():
            original = first._all[name]
            parameter.requires_grad_(original.requires_grad)
            if values:
                parameter.data.copy_(original.data)

    def _check_places(self) -> None:
        places = _places(self._placed)
        if places != self._places:
            pairs = zip(self._placed, places, self._places, strict=True)
            moved = next(name for name, now, before in pairs if now != before)
            raise ValueError(
                f"parameter {moved} has been given other memory since Trainer was made, by "
                f"model.to(), .data = ... or a second Trainer. Change values in place, or make "
                f"Trainer afterwards"
            )

    def _drop_gradients(self) -> None:
        for parameter in self._all.values():
            if parameter.grad is not None:
                parameter.grad = None

    def gradients(self) -> Gradients:
        """What backward has left in ``.grad``."""
        return [parameter.grad for parameter in self._trained]

    def take_gradients(self) -> Gradients:
        """Hand over what backward left in ``.grad``, and leave nothing there."""
        gradients = self.gradients()
        for parameter in self._trained:
            parameter.grad = None
        return gradients

    def count_gradients(self, before: Gradients, gave: Counts, where: str) -> None:
        """Count one more shard for every parameter that backward gave a gradient.

        Args:
            before: what lay in ``.grad`` before backward, of version 0.
            gave: (P,) int32, one count a parameter.
            where: step and shard, for errors.
        """
        after = self._unshared(self.gradients())
        if any(new is not None and new.layout is not torch.strided for new in after):
            self._refuse_sparse(after, where)
        pairs = list(zip(before, after, strict=True))
        if any(new is not None and new is old and new._version > 1 for old, new in pairs):
            self._refuse_portions(pairs, where)
        given = [new is not None and (new is not old or new._version > 0) for old, new in pairs]
        gave += 1 if all(given) else given

    def _unshared(self, gradients: Gradients) -> Gradients:
        """Give each parameter a gradient in memory of its own, where backward gave two the same.

        It does so where parameters are added up through views, for instance. Whatever is added to
        one of the gradients later would be added to the other as well.
        """
        places = [g.data_ptr() for g in gradients if g is not None and g.layout is torch.strided]
        if len(set(places)) == len(places):
            return gradients
        seen: set[int] = set()
        for number, gradient in enumerate(gradients):
            if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
                continue
            if gradient.data_ptr() in seen:
                gradients[number] = self._trained[number].grad = gradient.clone()
            seen.add(gradient.data_ptr())
        return gradients

    def _refuse_sparse(self, gradients: Gradients, where: str) -> NoReturn:
        name = next(
            name
            for name, gradient in zip(self._names, gradients, strict=True)
            if gradient is not None and gradient.layout is not torch.strided
        )
        raise GradientError(
            f"{where}: parameter {name} got a sparse gradient, a dense one is expected. Make its "
            f"layer with sparse=False"
        )

    def _refuse_portions(
        self, pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], where: str
    ) -> NoReturn:
        name = next(
            name
            for name, (old, new) in zip(self._names, pairs, strict=True)
            if new is not None and new is old and new._version > 1
        )
        raise GradientError(
            f"{where}: the gradient of parameter {name} came in several portions, unlike that of "
            f"the shard before. Use checkpoints with use_reentrant=False"
        )


def _places(parameters: Mapping[str, torch.Tensor]) -> list[int]:
    return [parameter.data_ptr() for parameter in parameters.values()]


def _came_in_portions(gradients: Gradients) -> bool:
    """Whether backward may have added up a gradient of one shard bit by bit.

    It does so where a part of the model runs again in backward (reentrant checkpoints). Were the
    next shard's portions added to this one's sum, the order would not be the fold's.
    """
    return any(gradient is not None and gradient._version > 0 for gradient in gradients)


class _StepRun:
    """The shards of one device in one step."""

    def __init__(
        self, replica: Replica, batch: ShardedBatch, loss: LossFunction, seed: int, step: int
    ) -> None:
        self._replica = replica
        self._batch = batch
        self._loss = loss
        self._seed = seed
        self._step = step

    def sum_of(self, block: Block, exchange: Exchange) -> Gradients:
        """Add up the gradients of a block's shards in the fold's order."""

        def pair(node: Block) -> Gradients | None:
            if node.stop - node.start > 2:
                return None
            filled = [s for s in range(node.start, node.stop) if s in self._batch.shards]
            left: Gradients | None = None
            for shard in filled:
                before = replica.gradients()
                if _came_in_portions(before):
                    left = replica.take_gradients()
                    before = replica.gradients()
                self._run_shard(shard, before, exchange)
            # Where nothing was set aside, autograd itself has added the second shard's gradients.
            right = replica.take_gradients()
            return right if left is None else _add(left, right)

        replica = self._replica
        return fold(pair, block, _add)

    def _run_shard(self, shard: int, before: Gradients, exchange: Exchange) -> None:
        replica, watch, where = self._replica, self._replica.watch, self._where(shard)
        board = exchange.board
        payload = self._batch.shards[shard]
        there = watch.now()
        if replica.device.type != "cpu":
            payload, start = move(payload, replica.device), there
            there = watch.now()
            watch.note("data", f"move shard {shard}", start, there)
        replica.buffers.begin_shard()
        seed_generators(derive_seed("shard", self._seed, self._step, shard), replica.device)
        try:
            result = self._loss(replica.module, payload)
            part = weigh(result, self._batch.size_of(shard), f"the loss of {where}")
            middle = watch.now()
            watch.note("forward", f"forward shard {shard}", there, middle)
            self._backward(part, where)
        except Exception as error:
            error.add_note(f"raised in {where}, on device {replica.number} ({replica.device})")
            raise
        watch.note("backward", f"backward shard {shard}", middle)
        replica.buffers.end_shard(shard, board)
        board.weights[shard] = part.weight
        board.set_total(shard, part.total())
        replica.count_gradients(before, board.gave[replica.number], where)

    def _backward(self, part: Contribution, where: str) -> None:
        if not part.root.requires_grad:
            raise LossError(
                f"the loss of {where} does not depend on any parameter that requires a gradient: "
                f"was it computed under no_grad, or detached?"
            )
        divisor = self._batch.divisor(part.weight)
        if divisor:
            part.backward(divisor)

    def _where(self, shard: int) -> str:
        return f"step {self._step}, shard {shard}"


def _add(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients, in place of the left one where both have one."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]

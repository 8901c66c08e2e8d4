"""Hands over the gradients of one piece of a shard, stage by stage, while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from onefold.engine.gradients import Gradients
from onefold.engine.shardpiece import ShardPiece
from onefold.engine.stagemodules import StageModules
from onefold.exchange.carrier import Gift

__all__ = ["Handing"]


class Handing:
    """What has been handed over of one piece, and what has not.

    Args:
        modules: the stages.
        piece: of which shard.
        take: takes the gradients of a stage out of ``.grad``.
        give: is given each stage.
    """

    def __init__(
        self,
        modules: StageModules,
        piece: ShardPiece,
        take: Callable[[int], Gradients],
        give: Callable[[Gift], None],
    ) -> None:
        self._modules = modules
        self._entries = modules.stages.entries
        self._piece = piece
        self._take = take
        self._give = give
        self._left = list(reversed(range(len(self._entries))))
        self.given = [False] * len(modules.stages.stage_of)
        """For each trained parameter, whether there was a gradient."""
        self.begin_backward: Callable[[], None]
        """To be called between the two."""
        self.is_late = False
        """Whether a gradient came after its stage had been handed over."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surround a forward pass and its backward."""
        with self._modules.watched(self._hand_over_early) as self.begin_backward:
            yield

    def finish(self) -> None:
        """Hand over all stages that are left, after backward.

        A gradient that came after its stage had been handed over is dropped, and the stage is
        handed over last from now on: the step has to be computed once more.
        """
        for stage in range(len(self._entries)):
            if stage not in self._left and any(g is not None for g in self._take(stage)):
                self._modules.last.add(stage)
                self.is_late = True
        self._hand_over(list(self._left))

    def _hand_over_early(self, stages: Sequence[int]) -> None:
        self._hand_over([s for s in stages if s in self._left and s not in self._modules.last])

    def _hand_over(self, stages: Sequence[int]) -> None:
        for stage in stages:
            self._left.remove(stage)
            numbers = self._entries[stage]
            gradients = self._take(stage)
            for number, gradient in zip(numbers, gradients, strict=True):
                self.given[number] = gradient is not None
            last = self._piece.stop == self._piece.of
            self._give(Gift(self._piece.shard, stage, last, gradients))

"""Hands over the gradients of one piece of a shard, stage by stage, while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from onefold.engine.gradients import Gradients
from onefold.engine.shardpiece import ShardPiece
from onefold.engine.stagemodules import StageModules
from onefold.errors import StateError
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

    @contextmanager
    def watched(self) -> Iterator[Callable[[], None]]:
        """Surround a forward pass and its backward, between which the result is called."""
        with self._modules.watched(self._hand_over) as begin:
            yield begin

    def finish(self, where: str) -> None:
        """Hand over all stages that are left, after backward.

        Raises:
            StateError: a stage got a gradient after it was handed over.
        """
        late = [
            number
            for stage in range(len(self._entries))
            if stage not in self._left
            for number, gradient in zip(self._entries[stage], self._take(stage), strict=True)
            if gradient is not None
        ]
        if late:
            stage = self._modules.stages.names[self._modules.stages.stage_of[late[0]]]
            raise StateError(
                f"{where}: a parameter of stage {stage} got a gradient after those of the stage "
                f"had been handed over, as it is also used before the stage runs: leave {stage} "
                f"out of the stages of Trainer(stages=...), so that it is handed over last"
            )
        self._hand_over(list(self._left))

    def _hand_over(self, stages: Sequence[int]) -> None:
        for stage in stages:
            if stage not in self._left:
                continue
            self._left.remove(stage)
            numbers = self._entries[stage]
            gradients = self._take(stage)
            for number, gradient in zip(numbers, gradients, strict=True):
                self.given[number] = gradient is not None
            last = self._piece.stop == self._piece.of
            self._give(Gift(self._piece.shard, stage, last, gradients))

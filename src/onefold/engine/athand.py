"""Devices that always have all parameters, and what is asked of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onefold.core.head import Call
from onefold.engine.hollow import Reach
from onefold.engine.shardtask import ShardTask

__all__ = ["Function", "Lending"]

Function = Callable[[torch.nn.Module, Any], object]
"""Takes the model and one shard."""


class Lending:
    """The parameters of the model on devices that always have all of them."""

    is_whole = True
    """Whether this process has all parameters just now."""

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Those that this process does not always have, as `Storage.lent_layout` numbers them."""
        return ()

    def whole(self, *, look: bool = False) -> AbstractContextManager[None]:
        """A block in which this process has all parameters; called on all devices alike.

        Args:
            look: whether to look, when it ends, for what was written to trained parameters.

        Raises:
            StateError: parameters were written to, which is not kept.
        """
        return nullcontext()

    def stay_whole(self) -> None:
        """Have all parameters from here on; called on all devices alike."""

    def refuse_call(self, call: Call) -> None:
        """Refuse a call of the trainer where other devices wait for other things.

        Raises:
            RuntimeError: it was made while a shard is computed whose parameters are brought.
        """

    def rounds(self, task: ShardTask) -> AbstractContextManager[ShardTask]:
        """Surround the shards of a step, in which all devices take part in rounds.

        Yields:
            The task, which then has parameters brought while they are needed.
        """
        return nullcontext(task)

    def in_line(self, *, due: bool) -> AbstractContextManager[None]:
        """Surround the shards of a step that go through a line of devices.

        Args:
            due: whether costly checks are due in this step.
        """
        return nullcontext()

    def on_the_way(self, reach: Reach) -> AbstractContextManager[None]:
        """Surround a shard on a device of a line, which has come so far in the loss."""
        return nullcontext()

    def passes(self, function: Function) -> AbstractContextManager[Function]:
        """Surround forward passes without a backward, of which each device has as many as it has.

        Yields:
            The function, which then has parameters brought while they are needed.
        """
        return nullcontext(function)

    def visit(self, stages: Iterable[int], look: Callable[[Sequence[int]], None]) -> None:
        """Have one stage after the other brought, to be read; called on all devices together.

        Args:
            stages: those that this device reads, which may be others than another one's.
            look: called while a stage is here, with the numbers of its parameters.
        """
        raise RuntimeError("this process has all parameters: expected them to be read at once")

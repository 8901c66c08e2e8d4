"""State that follows a place in the batch: each shard goes on with what it left in the step before.

A recurrent model that reads one long text in every row of its batches begins each batch with the
hidden state in which the one before ended. With the rule ``"shard"`` such a state is a buffer of
the model, as large as a shard, of which every shard has values of its own.

Note: where the values are
--------------------------
What shards leave in buffers travels to all devices in any case (see `onefold.exchange.board`). So
every process keeps the values of all shards, and whichever device runs a shard next has them. The
module itself keeps the value that it was made with: that is what each shard begins with, what
evaluation sees, and what a script changes to have all shards begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from onefold.core.flat import FlatTensors, same_bits

__all__ = ["Carried"]


class Carried:
    """The buffers that each shard has for itself.

    Args:
        rules: of all buffers of the module.
    """

    def __init__(self, rules: Sequence[str | None]) -> None:
        self.indices = [index for index, rule in enumerate(rules) if rule == "shard"]
        """Numbers of these buffers among all."""
        self.is_paused = False
        """Whether the module shows averages, which are no change of a script's."""
        self.values: dict[int, dict[int, torch.Tensor]] = {index: {} for index in self.indices}
        """For each of them what a shard left, by the shard's number; without those that have left
        nothing since the beginning."""

    def begin_anew_where_changed(self, now: FlatTensors, before: FlatTensors) -> None:
        """Forget what shards have left in buffers that a script has changed between steps."""
        for index in self.indices if not self.is_paused else ():
            if self.values[index] and not same_bits(now.views[index], before.views[index]):
                self.values[index].clear()

    def left(self, names: Sequence[str]) -> Iterable[tuple[str, int, torch.Tensor]]:
        """Yield what shards have left: name of the buffer, number of the shard, value.

        Args:
            names: of all buffers of the module.
        """
        for index, by_shard in self.values.items():
            for shard, value in sorted(by_shard.items()):
                yield names[index], shard, value

    def go_on(self, left: Mapping[int, Mapping[int, torch.Tensor]]) -> None:
        """Go on with what shards have left in a run that was saved; by buffer and shard."""
        self.values = {index: dict(left.get(index, {})) for index in self.indices}

    def put(self, flat: FlatTensors, shard: int) -> None:
        """Have the module compute with what a shard goes on with."""
        for index in self.indices:
            left = self.values[index].get(shard)
            if left is not None:
                flat.views[index].copy_(left)

    def keep(
        self,
        rows: Sequence[FlatTensors],
        changed: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
        device: torch.device,
    ) -> None:
        """Keep what the shards of a step have left.

        Args:
            rows: all buffers as each shard left them.
            changed: (V, buffers) whether a shard's row is of this step.
            device: where the values are kept.
        """
        for index in self.indices:
            for shard in changed[:, index].nonzero()[0].tolist():
                self.values[index][shard] = rows[shard].views[index].to(device, copy=True)

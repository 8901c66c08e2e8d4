"""Generators and buffers of a shard, which go from device to device with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onefold.core.flat import same_bits, storage_order
from onefold.core.randomness import packed_generators, put_generators
from onefold.placement.pipeline.shape_tensor import ShapeTensor
from onefold.shard.buffers import BufferSet
from onefold.shard.replica import Replica

__all__ = ["ShardState"]


@dataclass(frozen=True, slots=True)
class ShardState:
    """Where the generators stand, and the buffers that are no longer as the step began."""

    generators: torch.Tensor  # (n,) uint8
    indices: Sequence[int] = ()
    """Numbers of the changed buffers."""
    values: Sequence[torch.Tensor] = ()
    """The buffers left by the shard, each (numel,)."""

    @classmethod
    def of(cls, replica: Replica) -> ShardState:
        """Copy the state that a device is in.

        Raises:
            StateError: a buffer has been resized, or is new.
        """
        generators = packed_generators(replica.device)
        changed = replica.buffers.changed(exactly=True)
        if changed is None:
            return cls(generators)
        views = [storage_order(changed.flat.views[number]) for number in changed.indices]
        return cls(generators, changed.indices, views)

    @property
    def parts(self) -> tuple[object, ...]:
        """What another device makes it of, as `onefold.core.wire` knows it."""
        return self.generators, list(self.indices), list(self.values)

    def put(self, replica: Replica, shard: int) -> None:
        """Have a device go on in this state, whatever it has changed itself."""
        put_generators(self.generators, replica.device)
        buffers = replica.buffers
        # What a stage of another device gives may have taken their places.
        buffers.discard(ShapeTensor)
        buffers.restore(shard)
        for number, values in zip(self.indices, self.values, strict=True):
            storage_order(buffers.flat.views[number]).copy_(values)

    def differing(self, buffers: BufferSet, numbers: Sequence[int]) -> bool:
        """Whether some of these buffers have other values by now."""
        here = dict(zip(self.indices, self.values, strict=True))
        views = {number: storage_order(buffers.flat.views[number]) for number in numbers}
        return any(
            number not in here or not same_bits(here[number].to(view.device), view)
            for number, view in views.items()
        )

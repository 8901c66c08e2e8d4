"""The model lies on the host, in a file, and each device has what it computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onefold.core.storage import Storage
from onefold.placement.base import Estimates
from onefold.placement.partitioned import Partitioned
from onefold.system.allocator import TensorAllocator
from onefold.system.file_memory import MmapAllocator

if TYPE_CHECKING:
    from onefold.placement.footprint import Footprint

__all__ = ["Offloaded"]


class Offloaded(Partitioned):
    """Parameters, gradients and optimizer state lie in a file of which memory holds what it can.

    A processor computes with what is in the file. A GPU has the parameters of a stage gathered from
    there, as from another device, and the optimizer's state comes to it segment by segment.
    """

    @classmethod
    def estimate(cls, sizes: Footprint, devices: int, *, together: bool) -> Estimates:
        if together:
            held = sizes.EXCHANGED * sizes.stage
        else:
            # What it sends of a stage it must have there, as well.
            sent = sizes.stage // devices if devices > 1 else 0
            held = sizes.other + sizes.in_transit(devices, begun=True) + sent
        sums = sizes.gradients * (1 + sizes.levels())
        file = sizes.parameters + sizes.frozen + sizes.other + sizes.state + sums
        return {"offload": held, "offload:file": file}

    def allocator(self) -> TensorAllocator:
        devices = self.devices
        kind = devices.all[devices.own[0]].type
        if kind != "cpu" and len(devices.own) > 1:
            raise ValueError(
                f"expected one {kind} device in each process for placement=offload, got "
                f"{len(devices.own)} of Trainer(devices=...): leave them out, and start the script "
                f"by onefold run --devices"
            )
        return MmapAllocator.at(devices.context.options.offload_dir, apart=kind != "cpu")

    def shards_frozen(self, allocator: TensorAllocator) -> bool:
        return allocator.apart

    def check(self, storage: Storage) -> None:
        if self.chosen.allocator.apart:
            super().check(storage)
        else:
            # Parameters stay in the file, so that the gradient alone must fit.
            self._check(storage, [0] * len(storage.stage_layout().stage_bytes), "gradient")

    def leave(self, *, together: bool) -> None:
        # What is kept apart from a device has no room there as a whole.
        if not self.chosen.allocator.apart:
            super().leave(together=together)

"""Chooses the type of a run's placement by its options."""

from __future__ import annotations

from onefold.core.assignment import Devices
from onefold.core.options import PlacementName
from onefold.core.settings import Settings
from onefold.placement.base import Placement
from onefold.placement.offload import Offloaded
from onefold.placement.pipeline.placement import Pipelined
from onefold.placement.replicated import Replicated
from onefold.placement.sharded import Sharded

__all__ = ["PLACEMENTS", "placement_of"]


PLACEMENTS: dict[PlacementName, type[Placement]] = {
    "replicate": Replicated,
    "shard": Sharded,
    "offload": Offloaded,
    "pipeline": Pipelined,
}


def placement_of(devices: Devices, settings: Settings) -> Placement:
    """Make the placement of a run.

    Args:
        devices: all of them; their options say which placement was asked for.
        settings: the settings of the run.
    """
    name = devices.context.options.placement_name
    # A pipeline of one device computes all stages by itself.
    if name == "pipeline" and devices.context.options.pipeline_of(len(devices.all)) == 1:
        name = "shard"
    # One shard is added to nothing, so there is nothing to hand over stage by stage.
    if name == "shard" and settings.shards == 1:
        name = "replicate"
    return PLACEMENTS[name](devices, settings)

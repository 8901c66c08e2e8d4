"""Chooses the type of a run's placement by its options."""

from __future__ import annotations

from collections.abc import Callable

from onefold.core.assignment import Devices
from onefold.core.options import PlacementName
from onefold.core.settings import Settings
from onefold.placement.base import Placement
from onefold.placement.replicated import Replicated

__all__ = ["PLACEMENTS", "placement_of"]


# Loaded when they are chosen: a run without them needs none of what they are made of.
def _partitioned(devices: Devices, settings: Settings) -> Placement:
    from onefold.placement.partitioned import Partitioned

    return Partitioned(devices, settings)


def _offloaded(devices: Devices, settings: Settings) -> Placement:
    from onefold.placement.offload import Offloaded

    return Offloaded(devices, settings)


def _pipelined(devices: Devices, settings: Settings) -> Placement:
    from onefold.placement.pipeline.placement import Pipelined

    return Pipelined(devices, settings)


PLACEMENTS: dict[PlacementName, Callable[[Devices, Settings], Placement]] = {
    "replicate": Replicated,
    "partition": _partitioned,
    "offload": _offloaded,
    "pipeline": _pipelined,
}
"""What makes each of them."""


def placement_of(devices: Devices, settings: Settings) -> Placement:
    """Make the placement of a run.

    Args:
        devices: all of them; their options say which placement was asked for.
        settings: the settings of the run.
    """
    name = devices.context.options.placement_name
    # A pipeline of one device computes all stages by itself.
    if name == "pipeline" and devices.context.options.pipeline_of(len(devices.all)) == 1:
        name = "partition"
    # One shard is added to nothing, so there is nothing to hand over stage by stage.
    if name == "partition" and settings.shards == 1:
        name = "replicate"
    return PLACEMENTS[name](devices, settings)

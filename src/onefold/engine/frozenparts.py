"""Which frozen parameters devices need not have all of, where each keeps a part of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onefold.core.flat import lay_out
from onefold.core.frozen import Frozen
from onefold.core.stages import ROOT
from onefold.engine.stagemodules import StageModules

__all__ = ["frozen_in_stages", "frozen_of"]


def frozen_in_stages(other: Mapping[str, torch.nn.Parameter], modules: StageModules) -> list[str]:
    """Name the frozen parameters that can be brought with the stage that they lie in.

    Args:
        other: the parameters that the optimizer does not train.
        modules: the stages.
    """
    # What has a gradient, which nobody takes, is read by hooks perhaps, whenever they like.
    return [
        name for name, p in other.items() if not p.requires_grad and modules.stage_of(p) != ROOT
    ]


def frozen_of(
    parameters: Mapping[str, torch.nn.Parameter], modules: StageModules, devices: int
) -> Frozen | None:
    """Share frozen parameters out to the devices; None if there are none.

    Args:
        parameters: those that `frozen_in_stages` has named.
        modules: the stages.
        devices: how many there are.
    """
    if not parameters:
        return None
    stage_of = tuple(map(modules.stage_of, parameters.values()))
    return Frozen.cut(lay_out(parameters), stage_of, modules.stages.places, devices)

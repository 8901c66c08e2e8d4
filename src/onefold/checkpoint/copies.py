"""What the lead copies for a checkpoint, which is then written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from onefold.checkpoint.model import ModelCopy
from onefold.system.tensorfile import TensorParts

__all__ = ["Copies"]


class Copies(NamedTuple):
    """What the lead has copied for a checkpoint."""

    trained: ModelCopy
    """The model that the run goes on with."""
    shown: ModelCopy | None
    """The model with its averages, if it is they that are saved as the model."""
    averages: Mapping[str, torch.Tensor]
    """The averages of the buffers, by name."""
    carried: Sequence[TensorParts]
    """What shards carry in buffers."""

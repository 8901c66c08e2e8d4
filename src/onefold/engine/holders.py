"""Which Trainer a model belongs to: the last one that was made of it.

Another Trainer may take the model, or a part of it. The one before leaves the run first, as by
`Trainer.close`: its memory may be that of several processes, and its optimizer has the state.

Note: values after a Trainer
----------------------------
Of a model that no Trainer has held, the lead's values become everybody's, so that it may be drawn
from unseeded random numbers. One that comes from a Trainer had the same values on every device. If
they differ now, the script has changed them on one device alone, and that is refused.
"""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from onefold.core.flat import named_tensors, tensor_digests

__all__ = ["digests_of_held", "hold", "take_from_holders"]


class Holder(Protocol):
    """What a model belongs to."""

    def close(self) -> None:
        """Leave the run, so that the model is the script's."""


# By identity, as tensors compare by element, and weakly on both sides: nothing here keeps a model
# or a Trainer. An entry stays when its Trainer is gone.
_holders = WeakTensorKeyDictionary()


def take_from_holders(module: torch.nn.Module) -> None:
    """Have every Trainer that holds a part of a model leave the run; called on all devices."""
    # By its parameters alone: Trainers may share buffers, which each has in memory of its own.
    found = [_holders[tensor]() for tensor in module.parameters() if tensor in _holders]
    for holder in dict.fromkeys(each for each in found if each is not None):
        holder.close()


def hold(module: torch.nn.Module, holder: Holder) -> None:
    """Note that a model now belongs to a Trainer."""
    reference = weakref.ref(holder)
    for tensor in chain(module.parameters(), module.buffers()):
        _holders[tensor] = reference


def digests_of_held(module: torch.nn.Module) -> dict[str, str]:
    """Digest the parameters and buffers that have belonged to a Trainer, by name."""
    tensors = named_tensors(module)
    return tensor_digests({n: tensor for n, tensor in tensors.items() if tensor in _holders})

"""A piece of the model that a device of this process updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from onefold.core.flat import FlatTensors, Piece, laid_out, same_bits, storage_order

__all__ = ["OwnedPiece", "cut_state", "shown_otherwise"]


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """A piece that a device of this process updates."""

    number: int
    """The piece's number among all pieces of the model."""
    device: int
    """Number of the device that updates it."""
    piece: Piece
    """Which elements of which parameter it covers."""
    parameter: torch.nn.Parameter
    """The user's own parameter that it is cut from; its group and earlier state are found by it."""
    values: torch.Tensor
    """The piece's values on its device, which the optimizer updates in place: (numel,), or shaped
    as the parameter where the piece is whole. Models compute with these very values, unless they
    hold parameters in a lower precision, or only for a while."""
    home: FlatTensors | None = None
    """The device's memory of parameters, where models then see the values, rounded or not."""

    @property
    def shown(self) -> torch.Tensor | None:
        """Where models see the values, if that is elsewhere; there must be memory for it."""
        return None if self.home is None else self.home.piece(self.piece)


def shown_otherwise(
    owned: Iterable[OwnedPiece], values_of: Callable[[int], torch.Tensor]
) -> OwnedPiece | None:
    """Find a piece of which models see other values than its owner keeps.

    Args:
        owned: pieces that are kept elsewhere than models see them; there is memory for both.
        values_of: given the number of a piece, returns what is kept, as models ought to see it.
    """
    for item in owned:
        assert item.shown is not None
        shown = storage_order(item.shown.detach())
        kept = values_of(item.number)
        if same_bits(shown, kept):
            continue
        # A zero of the other sign is no other value: owners keep their own when they follow.
        kept = kept.to(shown.device)
        if bool(((shown != kept) & ~(shown.isnan() & kept.isnan())).any()):
            return item
    return None


def cut_state(value: Any, item: OwnedPiece, stride: tuple[int, ...]) -> Any:
    """Return one piece's part of a value of a parameter's state, in memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    # A count of steps is cloned for each piece: optimizers add to it in place, and pieces that had
    # one in common would each add to it.
    if value.shape != item.parameter.shape or value.dim() == 0:
        return value.clone()
    # Pieces are stretches of storage order, so the strides of the layout come first.
    laid = laid_out(value, stride)
    device = item.values.device
    if item.piece.whole:
        return laid.to(device, copy=True)
    return storage_order(laid)[item.piece.start : item.piece.stop].to(device, copy=True)

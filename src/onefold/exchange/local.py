"""Exchange between the devices of one process: copies, and nothing to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onefold.core.flat import FlatTensors, Piece, storage_order
from onefold.core.fold import Published
from onefold.core.shard import Plan
from onefold.exchange.base import Board, LoneExchange, Start, Storage
from onefold.exchange.spans import Partial, SpanFold

__all__ = ["LocalExchange", "SoloExchange"]


class SoloExchange(LoneExchange):
    """One device: the gradients are used where backward left them."""

    def __init__(self, storage: Storage, start: Start, device: torch.device) -> None:
        self.trained, self.other = _own_flats(storage, start, [device])
        self._pieces = storage.pieces
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._entries = storage.trained.entries
        self.board = Board.private(storage.board, device)

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._gradients = gradients

    def collect(self, plan: Plan) -> None:
        pass  # all there is lies here already

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        return [self._total(piece) for piece in self._pieces]

    def _total(self, piece: Piece) -> torch.Tensor | None:
        gradient = self._gradients[piece.entry]
        if gradient is None or piece.whole:
            return gradient
        entry = self._entries[piece.entry]
        if gradient.stride() != entry.stride:
            moved = torch.empty_strided(
                entry.shape, entry.stride, dtype=gradient.dtype, device=gradient.device
            )
            gradient = moved.copy_(gradient)
        return storage_order(gradient)[piece.start : piece.stop]

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return rows[0].unsqueeze(0)

    def spread(self) -> None:
        self._gradients = ()


class LocalExchange(LoneExchange):
    """Several devices driven by one process, each with flat memory of its own.

    Args:
        storage: the sizes.
        start: the values of the lead's model.
        devices: all D of them.
    """

    def __init__(self, storage: Storage, start: Start, devices: Sequence[torch.device]) -> None:
        self.trained, self.other = _own_flats(storage, start, devices)
        self._storage = storage
        self._devices = devices
        self._partials: dict[Published, Partial] = {}
        spans = [[storage.pieces[i] for i in span] for span in storage.spans]
        self._folds = [SpanFold(storage.trained, span, storage.shards) for span in spans]
        self.board = Board.private(storage.board, devices[0])

    def _slot(self, place: Published) -> Partial:
        """The memory of one partial sum; a plan that has many blocks makes more of them."""
        if place not in self._partials:
            device = self._devices[place.device]
            self._partials[place] = Partial.private(self._storage.trained, device)
        return self._partials[place]

    def publish(self, device: int, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self._slot(Published(device, slot)).write(gradients)

    def collect(self, plan: Plan) -> None:
        for number, span_fold in enumerate(self._folds):
            one_memory = self._devices[number].type == "cpu"
            home = None if one_memory else self._slot(Published(number, 0)).flat
            span_fold.fold(plan, self._slot, home=home)

    def totals(self, device: int) -> Sequence[torch.Tensor | None]:
        return self._folds[device].totals

    def share(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return torch.stack([rows[number].to(self._devices[0]) for number in sorted(rows)])

    def spread(self) -> None:
        for owner, span_fold in enumerate(self._folds):
            source = self.trained[owner]
            for receiver, parameters in self.trained.items():
                for chunk in span_fold.chunks if receiver != owner else ():
                    parameters.chunk(chunk).copy_(source.chunk(chunk), non_blocking=True)
            span_fold.release()
        for partial in self._partials.values():
            partial.release()


def _own_flats(
    storage: Storage, start: Start, devices: Sequence[torch.device]
) -> tuple[dict[int, FlatTensors], dict[int, FlatTensors]]:
    """The start values in flat memory of each device: trained parameters, and other ones."""
    trained, other = (
        {number: FlatTensors(layout, device=device) for number, device in enumerate(devices)}
        for layout in (storage.trained, storage.other)
    )
    for number in trained:
        trained[number].write(start.trained)
        other[number].write(start.other)
    return trained, other

"""Recomputes the statistics of batch norms over a data set, for weights that were averaged.

The weights of an average never computed with each other, so the mean of the statistics that others
have left is not theirs. As `torch.optim.swa_utils.update_bn` does: every batch norm begins anew,
the model runs over the data in training mode and without gradients, and all batches count alike.

Note: the order of addition
---------------------------
Every shard starts from empty statistics, and its own are added to a sum for its number, in float64,
in the order of the batches; in the end the sums are folded over shard numbers. So the order does
not depend on which device ran which shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.fold import fold_shards
from onefold.core.gathering import SyncBatchNorm
from onefold.passes.evaluation import DataCall, Place, ScoreFunction, compute_shard, compute_shards
from onefold.shard.replica import Replica
from onefold.step.engine import Engine
from onefold.system.compat import BatchNorm

__all__ = ["recompute_statistics"]

_TAKEN_WITH = ("running_mean", "running_var", "num_batches_tracked")


def recompute_statistics(engine: Engine, batches: Iterable[ShardedBatch], call: DataCall) -> None:
    """Give batch norms the statistics of a data set, on all devices; nothing without batch norms.

    Layers that the model does not use, or keeps in evaluation mode, stay as they are.

    Args:
        engine: the devices of this process; its loss is what runs the model.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.

    Raises:
        DisagreementError: another device was given other data.
        ValueError: a batch norm is one over the whole batch, which shards alone cannot compute.
    """
    first = engine.context.replicas[0]
    kept = _kept(first.module)
    layers = [layer for layer in _layers(first.module) if layer not in kept]
    for layer in layers:
        if isinstance(layer, SyncBatchNorm):
            raise ValueError(
                "update_bn: the model has an onefold.SyncBatchNorm, whose variance over a whole "
                "batch is not that of its shards: expected batch norms that normalize by the "
                "shard. Open the block without update_bn: averaged statistics are there"
            )
    if not layers:
        return
    first.buffers.absorb()
    number_of = {id(tensor): n for n, tensor in enumerate(first.buffers.places.tensors)}
    places = [[number_of[id(getattr(layer, name))] for name in _TAKEN_WITH] for layer in layers]
    before = first.buffers.flat.clone()
    try:
        with _beginning_anew(layers):
            sums = _sums(engine, batches, call, places, kept)
    finally:
        first.buffers.flat.copy_(before)
    if sums:
        _write(first, places, sums)


def _kept(module: torch.nn.Module) -> set[torch.nn.Module]:
    """The batch norms that the script keeps in evaluation mode in a model that trains."""
    if not module.training:
        return set()
    return {m for m in module.modules() if isinstance(m, BatchNorm) and not m.training}


def _layers(module: torch.nn.Module) -> list[Any]:
    """The batch norms that keep statistics."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, BatchNorm)
        and all(getattr(layer, name) is not None for name in _TAKEN_WITH)
    ]


@contextmanager
def _beginning_anew(layers: Sequence[Any]) -> Iterator[None]:
    """Have batch norms compute the plain mean of what they see, from nothing."""
    before = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


def _sums(
    engine: Engine,
    batches: Iterable[ShardedBatch],
    call: DataCall,
    places: list[list[int]],
    kept: Iterable[torch.nn.Module],
) -> list[torch.Tensor]:
    """Add up the statistics of all shards of all batches, which count alike.

    Returns:
        For each shard (k,) float64, layer by layer; nothing where there were no batches.
    """
    sums: dict[int, torch.Tensor] = {}
    seed = engine.context.settings.seed

    def add(replica: Replica, loss: ScoreFunction, batch: ShardedBatch, place: Place) -> None:
        _, shard = place
        compute_shard(replica, loss, batch, place, "update_bn", seed)
        replica.buffers.absorb()
        found = _read(replica, places, batch.count_of(shard).samples / batch.samples)
        sums[shard] = sums[shard] + found if shard in sums else found

    with engine.gathered(call.step), engine.evaluating(training=True):
        for layer in kept:
            layer.training = False  # put back with the modes of all others
        _, last = compute_shards(engine, engine.loss, batches, call, "update_bn", add)
    found = engine.context.of_all_shards(sums)
    if last is None:
        return []
    empty = torch.zeros_like(found[0])
    return [found.get(shard, empty) for shard in range(last.shares.shards)]


def _read(replica: Replica, places: list[list[int]], weight: float) -> torch.Tensor:
    """The statistics of one shard, weighted, and its counts: (k,) float64."""
    views = replica.buffers.flat.views
    parts = []
    for mean, variance, counted in places:
        seen = views[counted].double().reshape(1)
        # Where the layer did not run, what it began with must not count.
        share = weight * (seen > 0)
        parts += [views[mean].double() * share, views[variance].double() * share, share, seen]
    return torch.cat(parts)


def _write(first: Replica, places: list[list[int]], sums: Sequence[torch.Tensor]) -> None:
    """Write the means over all batches in which a layer ran to the first device's buffers."""
    total, most = fold_shards(sums, torch.add), fold_shards(sums, torch.maximum)
    views, start = first.buffers.flat.views, 0
    for mean, variance, counted in places:
        numel = views[mean].numel()
        share = total[start + 2 * numel]
        if share > 0:
            views[mean].copy_(total[start : start + numel] / share)
            views[variance].copy_(total[start + numel : start + 2 * numel] / share)
            views[counted].copy_(most[start + 2 * numel + 1])
        start += 2 * numel + 2

"""Into microbatches of how many samples shards are run, and how that number is found.

Note: the search
----------------
With ``"auto"`` the first step is computed for trial, with smaller and smaller microbatches, until
it fits on every device; nothing is handed over and nothing is updated. The optimizer makes its
state in the first update, which leaves less room, so the step after it begins with a trial as well.
From then on the number stays, also for a run that goes on from a checkpoint: another one would be
another sum. A checkpoint holds how many trials are left, so that a run that goes on looks when this
one would.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

from onefold.core.gathering import SyncBatchNorm
from onefold.core.results import Gradients, total_weight
from onefold.placement.base import StepContext
from onefold.placement.replicated import partial_sums
from onefold.shard.advice import is_shortage
from onefold.shard.replica import Replica, ShardTask
from onefold.system.accelerator import release_cached_memory
from onefold.system.compat import BatchNorm

__all__ = ["MicrobatchSearch", "largest_fitting"]

_log = logging.getLogger("onefold")
_TRIALS = 2
"""Steps that begin with a search: the first, and that after the first update."""


class MicrobatchSearch:
    """Knows the most samples of a shard that run at once.

    Args:
        context: this process's part of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context, chosen = context, context.settings.microbatch
        self.samples = chosen if isinstance(chosen, int) else None
        """The most samples of a shard that run at once; None for all of them."""
        self.trials = _TRIALS if chosen == "auto" else None
        """How many steps will begin with a search; None where the number is given."""
        self._updated = False
        self._warned = False

    def adopt(self, samples: int | None, trials: int | None) -> None:
        """Go on where a saved run was in its search, or with the number that it was given."""
        self.samples, self.trials, self._updated = samples, trials or 0, trials == 1

    def search_anew(self) -> None:
        """Forget what was found."""
        self.samples, self.trials, self._updated = None, _TRIALS, False

    def note_update(self) -> None:
        """Note that the optimizer has made an update, and with the first one its state."""
        self._updated = True

    def fitted(self, task: ShardTask) -> ShardTask:
        """Have a step run its shards in microbatches that fit.

        Raises:
            MemoryError: not even a single sample fits; raised alike on all devices.
        """
        largest = task.batch.size_of(0)
        if self.trials == _TRIALS or (self.trials and self._updated):
            self.trials -= 1
            self._find(task, largest)
        self._warn_of_batch_norm(largest)
        return task if self.samples is None else replace(task, microbatch=self.samples)

    def _find(self, task: ShardTask, largest: int) -> None:
        def fits(size: int) -> bool:
            return self._fits(replace(task, microbatch=size))

        before = self.samples
        if before is not None and fits(before):
            return
        found = largest_fitting(largest, fits, too_large=before)
        if not found:
            raise MemoryError(
                f"not even a single sample of step {task.step} fits into the memory of every "
                f"device: expected room for a forward and a backward pass. Use a smaller model, or "
                f"checkpoint its layers (torch.utils.checkpoint)"
            )
        self.samples = None if found == largest else found
        if self.samples is not None and self._context.leads:
            _log.warning(
                'microbatch="auto": shards of up to %d samples run in microbatches of %d, the '
                "largest that fit into the memory of every device. The number is part of the "
                "result: to have the same elsewhere, write microbatch=%d",
                largest,
                self.samples,
                self.samples,
            )

    def _fits(self, task: ShardTask) -> bool:
        """Whether a step can be computed everywhere; called on all devices."""
        fits = {}
        for replica in self._context.replicas:
            with self._context.attached(replica):
                fits[replica.number] = _fits_here(replica, task)
        return all(self._context.exchange.transport.all_gather_values(fits))

    def _warn_of_batch_norm(self, largest: int) -> None:
        size = self.samples
        if self._warned or size is None or size >= largest:
            return
        self._warned = True
        modules = self._context.module.modules()
        if self._context.leads and any(
            isinstance(module, BatchNorm)
            and module.training
            and not isinstance(module, SyncBatchNorm)
            for module in modules
        ):
            _log.warning(
                "batch norm normalizes by the samples that run at once: with microbatch=%d by %d "
                "of a shard's %d. If that is too few: model.eval() for these layers, group norm, "
                "or, with more shards in place of microbatch, onefold.SyncBatchNorm",
                size,
                size,
                largest,
            )


def _fits_here(replica: Replica, task: ShardTask) -> bool:
    """Compute a device's share and drop what comes out."""
    fits, sums = True, list[Gradients]()
    replica.start_step(task)
    try:
        # All of them are kept, as a step would keep them.
        sums, terms = _share(replica, task)
        if terms > 1 and task.divisors is None:
            # Without divisors backward has not run; any others do, as nothing is used.
            sums, _ = _share(replica, replace(task, divisors=(1.0,) * terms))
    except Exception as error:
        if not is_shortage(error):
            raise
        fits = False
    del sums
    # Drops the gradients of a pass that broke off.
    replica.start_step(task)
    replica.end()
    if not fits:
        # What broke off may be held by cycles, and blocks of the wrong size by the allocator.
        gc.collect()
        release_cached_memory(replica.device)
    return fits


def _share(replica: Replica, task: ShardTask) -> tuple[list[Gradients], int]:
    """Compute a device's partial sums, and find how many terms the loss has."""
    weights: list[float] = []
    sums = list(partial_sums(replica, task, lambda _, result: weights.append(result.known_weight)))
    terms = total_weight(weights, [1] * len(weights), task.step).terms if weights else 1
    return sums, terms


def largest_fitting(
    samples: int, fits: Callable[[int], bool], *, too_large: int | None = None
) -> int:
    """Find the largest microbatches that fit; 0 if none do.

    Sizes are halved until one fits. Then those are tried that would make fewer microbatches.

    Args:
        samples: how many samples the largest shard has.
        fits: tries a size.
        too_large: the smallest size that is known not to fit.

    >>> largest_fitting(8, lambda size: size <= 3)
    3
    """
    found = 0
    while sizes := _open_sizes(samples, found, too_large):
        size = sizes[len(sizes) // 2]
        if fits(size):
            found = size
        else:
            too_large = size
    return found


def _open_sizes(samples: int, found: int, too_large: int | None) -> list[int]:
    """The sizes that might be tried, from the smallest."""
    if too_large is None:
        return [] if found else [samples]
    if not found:
        return [(too_large + 1) // 2] if too_large > 1 else []
    # Two sizes that make the same number of microbatches cost the same time.
    fewest, most = (-(-samples // size) for size in (too_large, found))
    sizes = {-(-samples // microbatches) for microbatches in range(fewest, most)}
    return sorted(size for size in sizes if found < size < too_large)

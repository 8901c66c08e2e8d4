"""The microbatch size, and the search for the largest one that fits.

Note: the search
----------------
With ``"auto"`` the first step starts with trials: whole shards first, then halves of them, until
the step fits on every device, then larger sizes again. Trials send no gradients and update nothing.
The optimizer creates its state in the first update, which leaves less memory, so the next step also
starts with a trial. From then on the size stays fixed, also in a resumed run, because with another
size gradients would be added in another order. A checkpoint stores the number of trials left, so
that a resumed run searches in the same steps.
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
"""Number of steps that start with a search: the first, and the one after the first update."""


class MicrobatchSearch:
    """Finds and keeps the microbatch size: the samples of a shard that run at once.

    Args:
        context: this process's part of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context, chosen = context, context.settings.microbatch
        self.samples = chosen if isinstance(chosen, int) else None
        """Maximum number of samples that run at once; None for a whole shard."""
        self.trials = _TRIALS if chosen == "auto" else None
        """Number of steps that will still start with a search; None if the user chose the size."""
        self._updated = False
        self._warned = False

    def adopt(self, samples: int | None, trials: int | None) -> None:
        """Continue the search of a saved run, or use its chosen size."""
        self.samples, self.trials, self._updated = samples, trials or 0, trials == 1

    def search_anew(self) -> None:
        """Reset the search."""
        self.samples, self.trials, self._updated = None, _TRIALS, False

    def note_update(self) -> None:
        """Note that the optimizer made an update, and with the first one created its state."""
        self._updated = True

    def fitted(self, task: ShardTask) -> ShardTask:
        """Set a microbatch size that fits in the task of a step.

        Raises:
            MemoryError: not even a single sample fits; raised on all devices.
        """
        largest = task.batch.size_of(0)
        # The first step, and the first one after an update: the optimizer's new state takes memory.
        if self.trials == _TRIALS or (self.trials and self._updated):
            self.trials -= 1
            self._find(task, largest)
        self._warn_of_batch_norm(largest)
        return task if self.samples is None else replace(task, microbatch=self.samples)

    def _find(self, task: ShardTask, largest: int) -> None:
        def fits(size: int) -> bool:
            return self._fits(replace(task, microbatch=size))

        # The size of the first search usually still fits. Keep it: a smaller one changes the bits.
        before = self.samples
        if before is not None and fits(before):
            return
        found = largest_fitting(largest, fits, too_large=before)
        if not found:
            raise MemoryError(
                f"not even one sample of step {task.step} fits into the memory of every device, "
                f"which must hold a forward and a backward pass. Use a smaller model, or "
                f"checkpoint its layers (torch.utils.checkpoint)"
            )
        # If the size holds the largest shard, no shard is cut.
        self.samples = None if found == largest else found
        if self.samples is not None and self._context.leads:
            _log.warning(
                'microbatch="auto": shards of up to %d samples run in microbatches of %d, the '
                "largest that fit into the memory of every device. The size affects the result: to "
                "reproduce it elsewhere, pass microbatch=%d",
                largest,
                self.samples,
                self.samples,
            )

    def _fits(self, task: ShardTask) -> bool:
        """Whether every device can compute a step with this task. Call it on all devices."""
        fits = {}
        for replica in self._context.replicas:
            with self._context.attached(replica):
                fits[replica.number] = _fits_here(replica, task)
        # All devices must use one size: gather every answer before deciding.
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
                "batch norm normalizes over a microbatch: microbatch=%d gives it %d of a shard's "
                "%d samples at a time. If these are too few, call eval() on these layers, use "
                "group norm, or use more shards instead of microbatch with onefold.SyncBatchNorm",
                size,
                size,
                largest,
            )


def _fits_here(replica: Replica, task: ShardTask) -> bool:
    """Compute a device's shards, and discard the result."""
    fits, sums = True, list[Gradients]()
    replica.start_step(task)
    try:
        # Keep all partial sums, as a step does: they count toward the memory.
        sums, terms = _share(replica, task)
        if terms > 1 and task.divisors is None:
            # Without denominators backward did not run. Use any: the result is discarded.
            sums, _ = _share(replica, replace(task, divisors=(1.0,) * terms))
    except Exception as error:
        if not is_shortage(error):
            raise
        fits = False
    del sums
    # Free the gradients of a pass that ran out of memory.
    replica.start_step(task)
    replica.end()
    if not fits:
        # Reference cycles may keep tensors of the failed pass alive, and the allocator may cache
        # blocks of a size that the next trial cannot use.
        gc.collect()
        release_cached_memory(replica.device)
    return fits


def _share(replica: Replica, task: ShardTask) -> tuple[list[Gradients], int]:
    """Compute a device's partial sums, and count the terms of the loss."""
    weights: list[float] = []
    sums = list(partial_sums(replica, task, lambda _, result: weights.append(result.known_weight)))
    terms = total_weight(weights, [1] * len(weights), task.step).terms if weights else 1
    return sums, terms


def largest_fitting(
    samples: int, fits: Callable[[int], bool], *, too_large: int | None = None
) -> int:
    """Find the largest microbatch size that fits; 0 if none does.

    Halve the size until one fits, then try larger sizes that make fewer microbatches.

    Args:
        samples: number of samples in the largest shard.
        fits: tries a size.
        too_large: the smallest size known not to fit.

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
    """Sizes still worth trying, in ascending order."""
    if too_large is None:
        return [] if found else [samples]
    if not found:
        return [(too_large + 1) // 2] if too_large > 1 else []
    # Sizes with the same number of microbatches take the same time, so try one of each number.
    fewest, most = (-(-samples // size) for size in (too_large, found))
    sizes = {-(-samples // microbatches) for microbatches in range(fewest, most)}
    return sorted(size for size in sizes if found < size < too_large)

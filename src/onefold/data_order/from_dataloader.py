"""Takes over the settings of a `torch.utils.data.DataLoader`.

Note: what becomes of a DataLoader's settings
---------------------------------------------
Honored: ``dataset``, ``batch_size`` (over all devices), ``shuffle``, ``sampler``,
``batch_sampler``, ``collate_fn``, ``drop_last``, ``num_workers``, ``worker_init_fn``,
``prefetch_factor``, ``multiprocessing_context``.

Left alone, as none of them changes what a model is given: ``pin_memory`` and ``pin_memory_device``
(memory is pinned where the devices are GPUs), ``persistent_workers`` (workers are started for each
pass), ``timeout`` (the Trainer's ``timeout_s`` holds), ``in_order`` (batches always come in order)
and, with ``shuffle``, ``generator`` (the order follows from the Trainer's seed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from onefold.data_order.indexed import Items
from onefold.data_order.order import Workers, check_sampler
from onefold.data_order.reader import is_stream

__all__ = ["arguments_of"]

_STATEFUL = "StatefulDataLoader"
"""torchdata's, which is made like PyTorch's own; known by its name, as few have torchdata."""


def arguments_of(loader: DataLoader[Any], given: Sequence[str], in_order: bool) -> dict[str, Any]:
    """Read the arguments of `onefold.data_order.loader.Loader` from a DataLoader.

    Args:
        loader: PyTorch's.
        given: names of arguments that were given in addition.
        in_order: visit samples in the order of the data set if the DataLoader would shuffle.

    Raises:
        TypeError: there are such arguments, or the DataLoader reads in a way of its own.
    """
    if given:
        raise TypeError(
            f"a DataLoader was given together with {', '.join(given)}: expected it alone, as "
            f"it has settings of its own; or give its data set, with all settings here"
        )
    _check_class(loader)
    dataset: Any = loader.dataset
    stream = is_stream(dataset)
    workers = Workers(
        # A stream is read by one process, whatever number would share it in PyTorch.
        number=min(loader.num_workers, 1) if stream else loader.num_workers,
        init=loader.worker_init_fn,
        prefetch=loader.prefetch_factor if loader.num_workers and not stream else None,
        context=loader.multiprocessing_context,
    )
    collate: Any = loader.collate_fn
    same: dict[str, Any] = {"dataset": dataset, "workers": workers}
    if loader.batch_size is None and loader.batch_sampler is None:
        if stream:
            raise TypeError(
                f"the DataLoader has batch_size=None, and its {type(dataset).__name__} is a stream "
                f"of whole batches: expected one of samples, with the batch size over all devices "
                f"in the DataLoader; or give each batch to trainer.step itself, or make them in a "
                f"function for trainer.batches"
            )
        if _is(loader.sampler, BatchSampler):
            raise TypeError(
                f"the DataLoader has batch_size=None and a BatchSampler as its sampler, so that "
                f"{type(dataset).__name__} gets the numbers of a whole batch at once: expected "
                f"DataLoader(..., batch_sampler=...), which reads sample by sample; or make whole "
                f"batches in a function for trainer.batches"
            )
        order = _order_of(loader.sampler, dataset, in_order)
        items = Items(dataset, **order)
        return {**same, "dataset": items, "collate": collate, "batch_size": None}
    same["collate"] = None if collate is default_collate else collate
    if stream:
        drop_last = loader.drop_last and not in_order
        return {**same, "batch_size": loader.batch_size, "drop_last": drop_last}
    if _is(loader.batch_sampler, BatchSampler):
        # Also where a script has made it itself: PyTorch then says nothing of its size.
        batches: Any = loader.batch_sampler
        order = _order_of(batches.sampler, dataset, in_order)
        # Each sample counts in an evaluation, and has a row in a prediction.
        drop_last = batches.drop_last and not in_order
        return {**same, "batch_size": batches.batch_size, "drop_last": drop_last, **order}
    return {**same, "batch_size": None, "batch_sampler": loader.batch_sampler}


def _check_class(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    if kind is DataLoader or (kind.__name__ == _STATEFUL and _is_torchdata(kind)):
        return
    # First, as its message says more: what Accelerate or Lightning prepared deals samples out.
    for name in ("sampler", "batch_sampler"):
        if getattr(loader, name, None) is not None and not is_stream(loader.dataset):
            check_sampler(getattr(loader, name), name)
    # The second is private: where a PyTorch has no such method, neither has the class.
    ways = ("__iter__", "_get_iterator")
    own = any(getattr(kind, way, None) != getattr(DataLoader, way, None) for way in ways)
    if own or kind.__module__.startswith("accelerate."):
        raise TypeError(
            f"{kind.__name__} reads its data in its own way, which onefold would not follow: "
            f"expected a plain torch.utils.data.DataLoader, such as the one that Accelerate or "
            f"Lightning was given; or give the data set, with batch_size and collate_fn here"
        )


def _order_of(sampler: Any, dataset: Any, in_order: bool) -> dict[str, Any]:
    """Recognize PyTorch's two usual orders; any other sampler is the script's own."""
    usual = _is(sampler, RandomSampler) or _is(sampler, SequentialSampler)
    # The sampler of a part of the data set is not the usual order of all of it.
    if usual and len(sampler.data_source) == len(sampler) == len(dataset):
        if _is(sampler, SequentialSampler):
            return {}
        if not sampler.replacement:
            return {"shuffle": not in_order}
    return {"sampler": sampler}


def _is(sampler: object, kind: type) -> bool:
    """Whether a sampler is PyTorch's own of this kind, or what torchdata puts in its place."""
    same = type(sampler).__name__ == kind.__name__ and _is_torchdata(type(sampler))
    return type(sampler) is kind or same


def _is_torchdata(kind: type) -> bool:
    return kind.__module__.startswith("torchdata.")

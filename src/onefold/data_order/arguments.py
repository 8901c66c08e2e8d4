"""The arguments of `Trainer.loader` and its like, by our names or by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

from torch.utils.data import DataLoader

from onefold.core.late import load
from onefold.data_order.reader import Collate, SizedDataset
from onefold.data_order.workers import Workers

__all__ = ["DataSource", "TorchNames", "choose"]

DataSource = SizedDataset | Iterable[Any] | DataLoader[Any]
"""What a loader can be made of: a data set with an index, a stream, or a DataLoader."""


class TorchNames(TypedDict, total=False):
    """The arguments of `torch.utils.data.DataLoader` that may stand beside ours."""

    sampler: Iterable[int] | None
    """Yields the numbers of the samples in the order of a pass; its length is the pass."""
    batch_sampler: Iterable[Sequence[int]] | None
    """Yields the numbers of the samples of whole batches, over all devices."""
    num_workers: int
    """The same as ``workers``."""
    collate_fn: Collate | None
    """The same as ``collate``."""
    worker_init_fn: Callable[[int], object] | None
    """Called in each worker with its number, before it reads."""


def choose(
    dataset: Any,
    names: TorchNames,
    *,
    batch_size: int | None,
    workers: int,
    collate: Collate | None,
    shuffle: bool = False,
    lengths: Sequence[int] | None = None,
    drop_last: bool = False,
    in_order: bool = False,
) -> dict[str, Any]:
    """Read the arguments of `Trainer.loader`, `evaluate` or `predict`.

    Returns:
        Those of `onefold.data_order.loader.Loader`, by name.

    Args:
        dataset: a data set, a stream, or a DataLoader with its own settings.
        names: what was given by PyTorch's names.
        batch_size, workers, collate, shuffle, lengths, drop_last: what was given by ours.
        in_order: visit samples in the order of the data set where a DataLoader would shuffle.

    Raises:
        TypeError: a name is unknown, one thing was given by two names, a DataLoader was given
            settings beside its own, or cannot be taken over.
    """
    unknown = names.keys() - TorchNames.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unexpected argument {', '.join(sorted(unknown))}: expected those of trainer.loader, "
            f"or of PyTorch's DataLoader {', '.join(TorchNames.__annotations__)}"
        )
    if isinstance(dataset, DataLoader):
        ours = {
            "batch_size": batch_size is not None,
            "workers": workers != 0,
            "collate": collate is not None,
            "shuffle": shuffle,
            "lengths": lengths is not None,
            "drop_last": drop_last,
        }
        given = [*(name for name, is_given in ours.items() if is_given), *names]
        made: dict[str, Any]
        made = load("data_order.from_dataloader").arguments_of(dataset, given, in_order)
        return made
    _once("workers", workers != 0, "num_workers", names)
    _once("collate", collate is not None, "collate_fn", names)
    batch_sampler = names.get("batch_sampler")
    if batch_size is None and batch_sampler is None:
        raise TypeError(
            "expected batch_size, the number of samples in a batch over all devices; or a "
            "batch_sampler, or a DataLoader, which have their own"
        )
    number = names.get("num_workers", workers)
    return {
        "dataset": dataset,
        "collate": names.get("collate_fn", collate),
        "workers": Workers(number=number, init=names.get("worker_init_fn")),
        "batch_size": batch_size,
        "sampler": names.get("sampler"),
        "batch_sampler": batch_sampler,
        "shuffle": shuffle,
        "lengths": lengths,
        "drop_last": drop_last,
    }


def _once(ours: str, is_given: bool, theirs: str, names: TorchNames) -> None:
    if is_given and theirs in names:
        raise TypeError(f"{ours} and {theirs} are the same thing: expected one of the two names")

"""Decides how a data set is read: by its index, as a stream, or as whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.reading.indexed import Indexed, Source
from onefold.reading.reader import Collate
from onefold.reading.stream import Stream, is_stream
from onefold.reading.wholebatches import Items, Rule, WholeBatches
from onefold.reading.workers import Workers

__all__ = ["source_of"]


def source_of(
    dataset: Any,
    collate: Collate | None,
    seed: int,
    own: Sequence[int],
    workers: Workers,
    **choices: Any,
) -> Source:
    """Find how a data set is read.

    Args:
        dataset: what the user gave; see `Loader`.
        collate: makes a shard's payload.
        seed: seed of the run.
        own: numbers of this process's devices.
        workers: how many processes read ahead.
        choices: the other arguments of `Loader` that decide which samples come when.

    Raises:
        TypeError: the data set has neither an index nor passes.
        ValueError: the choices do not fit the data set, or each other.
    """
    if isinstance(dataset, Rule | Items):
        return WholeBatches(dataset, collate, seed, own)
    if _is_loader(dataset) or not is_stream(dataset):
        _check_index(dataset)
        return Indexed(dataset, collate, seed, **choices)
    if workers.number > 1:
        raise ValueError(
            f"{type(dataset).__name__} is a stream, which one process reads from beginning to end: "
            f"expected workers of 0 or 1, got {workers.number}"
        )
    refused = {
        "shuffle": choices.pop("shuffle"),
        **{name: choices.pop(name) is not None for name in ("lengths", "sampler", "batch_sampler")},
    }
    return Stream(dataset, collate, seed, own, **choices, refused=refused)


def _is_loader(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("batch_size", "dataset", "__iter__"))


def _check_index(dataset: Any) -> None:
    if _is_loader(dataset):
        raise TypeError(
            f"expected a data set, got a {type(dataset).__name__}, which makes batches: give "
            f"its dataset, or to trainer.loader, evaluate and predict a DataLoader of PyTorch"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"expected a data set with a length and an item for each index, or a stream that can "
            f"be iterated again and again in one order, got {type(dataset).__name__}. An iterator "
            f"or generator ends with its first pass: give what makes it, such as an object with "
            f"__iter__. Batches that the script makes itself: trainer.batches, or trainer.step"
        )

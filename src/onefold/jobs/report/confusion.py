"""Finds the classes that a model confuses most often."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["frequent_confusions"]

Counts = Sequence[Sequence[int]]  # (classes, classes): true class by row, predicted by column


def frequent_confusions(counts: Counts) -> list[tuple[int, int, int]]:
    """List mistakes as (true class, predicted class, count), the most frequent first.

    >>> frequent_confusions([[5, 1], [3, 7]])
    [(1, 0, 3), (0, 1, 1)]
    """
    mistakes = [
        (true, predicted, count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count > 0
    ]
    # Negated and not reversed: sorting is stable, so equal counts stay in the order of classes.
    return sorted(mistakes, key=lambda mistake: -mistake[2])

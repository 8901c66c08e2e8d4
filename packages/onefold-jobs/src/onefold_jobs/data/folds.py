"""Divides data into folds for cross-validation: each fold is the test set of one run.

Folds depend on the seed and on the contents of the samples. Names, order and copies of samples do
not matter, so data that were renamed or moved have the same folds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from onefold.cli import listed
from onefold.errors import DataError
from onefold_jobs.data.files import readable

__all__ = ["Fold", "deal", "unused"]


class Fold(NamedTuple):
    """A part of the data that one run tests on."""

    number: int
    """Number of the part, from 1; 0 means all parts, one after the other."""
    of: int
    """Number of parts."""


def deal(labels: Sequence[str], contents: Sequence[str], *, seed: int, folds: int) -> list[int]:
    """Return the fold of each sample, from 1.

    Every class is spread evenly over the folds. Copies of a sample share a fold, or a model would
    be tested on samples that it was trained on.

    Args:
        labels: class of each sample; an empty one for samples without classes.
        contents: content of each sample, or its digest.
        seed: seed of the division.
        folds: number of folds.

    Raises:
        DataError: there are fewer different samples than folds, or only one of a class.

    >>> deal(["a", "a", "b", "b", "a"], ["1", "2", "3", "4", "1"], seed=0, folds=2)
    [2, 1, 1, 2, 2]
    """
    label_of: dict[str, str] = {}
    for label, content in zip(labels, contents, strict=True):
        # The order of samples must not decide for copies with two labels.
        label_of[content] = min(label, label_of.get(content, label))
    by_label: dict[str, list[str]] = {}
    for content, label in label_of.items():
        by_label.setdefault(label, []).append(content)
    if len(label_of) < folds:
        raise DataError(
            f"--folds {folds}: expected {folds} or more different samples, got {len(label_of)}"
        )
    if alone := sorted(label for label, each in by_label.items() if label and len(each) < 2):
        raise DataError(
            f"--folds {folds}: expected two or more different samples of every class, because each "
            f"training set needs one, got one of {listed(alone)}: add samples or leave it out"
        )

    def place(content: str) -> bytes:
        return hashlib.blake2b(f"{seed}/{content}".encode("utf-8", "surrogatepass")).digest()

    # Keep counting from class to class, so that folds of many small classes have equal sizes.
    turn = count()
    dealt = {
        content: next(turn) % folds + 1
        for _, members in sorted(by_label.items())
        for content in sorted(members, key=place)
    }
    return [dealt[content] for content in contents]


def unused(test: Path) -> str:
    """Note that a separate test set takes no part in a cross-validation."""
    return (
        f"{readable(test)}: not used by --folds, which divides the training set; score the runs on "
        f"it with onefold evaluate"
    )

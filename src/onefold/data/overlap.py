"""Finds samples that are in both the training and the test set, or in more than one class."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.errors import DataError

__all__ = ["check_apart", "check_one_label"]


def check_apart(
    train: Sequence[str],
    test: Sequence[str],
    *,
    train_names: Sequence[str],
    test_names: Sequence[str],
    where: str,
) -> list[str]:
    """Refuse a test set of which more than half is in the training set.

    Args:
        train: the content of every training sample, or a digest of it; empty if not known.
        test: the same for the test samples.
        train_names: what to call each training sample.
        test_names: what to call each test sample.
        where: file or folder of the data, for errors.

    Returns:
        What to mention before training, if some test samples, but not most, are in both.

    Raises:
        DataError: more than half of the test samples are training samples.

    Example:
        >>> names = {"train_names": ["a", "b"], "test_names": ["c", "d", "e"]}
        >>> check_apart(["1", "2"], ["3", "2", "4"], where="pets", **names)
        ['pets: 1 of 3 test samples is in the training set as well: d is the same as b']
    """
    first: dict[str, str] = {}
    for content, name in zip(train, train_names, strict=True):
        first.setdefault(content, name)
    # Two contents that are not known are not the same.
    first.pop("", None)
    same = [
        (name, first[content])
        for content, name in zip(test, test_names, strict=True)
        if content in first
    ]
    if not same:
        return []
    verb = "is" if len(same) == 1 else "are"
    both = f"{len(same):,} of {len(test):,} test samples {verb} in the training set as well"
    example = f"{same[0][0]} is the same as {same[0][1]}"
    if 2 * len(same) > len(test):
        raise DataError(
            f"{where}: {both} ({example}), so the score would say little about new data: expected "
            f"test samples that are not in the training set"
        )
    return [f"{where}: {both}: {example}"]


def check_one_label(
    contents: Sequence[str], labels: Sequence[object], names: Sequence[str], where: str
) -> list[str]:
    """Mention samples that are the same and have different labels.

    Args:
        contents: the content of every sample, or a digest of it; empty if not known.
        labels: the label of every sample.
        names: what to call each sample.
        where: file or folder of the data.

    Example:
        >>> check_one_label(["1", "2", "1"], ["cat", "dog", "dog"], ["a", "b", "c"], "pets")
        ['pets: 1 sample is the same as one with another label: c is the same as a']
    """
    first: dict[str, tuple[object, str]] = {}
    # No error: a model can be trained all the same, and only a person can tell which is right.
    torn = []
    for content, label, name in zip(contents, labels, names, strict=True):
        before = first.setdefault(content, (label, name))
        if content and before[0] != label:
            torn.append((name, before[1]))
    if not torn:
        return []
    which = "1 sample is" if len(torn) == 1 else f"{len(torn):,} samples are"
    note = (
        f"{where}: {which} the same as one with another label: {torn[0][0]} is the same as "
        f"{torn[0][1]}"
    )
    return [note]

"""Finds labels that are probably not classes, before a model learns them.

`check_apart` and `check_one_label` compare the samples of training and test, and equal samples.

To a program a label is any text. Measured numbers, lists of labels, and one label in two spellings
all look like classes, and training on them raises no error: it ends with a model of something else
than was asked for. The numbers below are rules of thumb, which --labels-as-is switches off.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

from onefold.errors import DataError
from onefold.system.words import listed

__all__ = ["check_apart", "check_labels", "check_one_label", "untested"]


_MANY = 20
"""With more classes than these, labels may be refused as measured numbers, or as no classes."""
_FEW_EACH = 5
"""Samples of a class, on average: whole numbers that have fewer are measured, not chosen."""
_NOTED = 50
"""With more classes than these, whole numbers are worth a note, whatever samples they have."""
_LISTED = 3
"""Labels that an error gives as examples."""
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")
_SEVERAL = re.compile(r"[,;|]")
_SWITCHES = re.compile(r"[\[(]?[01](?:[ ,;|]+[01])+[\])]?")
_OTHERWISE = "; or accept each of them as a class with --labels-as-is"


def check_labels(counts: Mapping[str, int], where: str) -> list[str]:
    """Refuse labels that are probably not classes.

    Args:
        counts: how many samples each label has.
        where: file or folder of the labels, for errors.

    Returns:
        What to mention before training.

    Raises:
        DataError: two labels differ by spelling alone; one has control characters; or the labels
            are measured numbers, lists of several labels, or texts that mostly occur once.

    Example:
        >>> check_labels({"lob": 10, "smash": 12}, "train.tsv")
        []
    """
    _refuse_names(counts, where)
    _refuse_lists(counts, where)
    samples = sum(counts.values())
    if len(counts) <= _MANY:
        return []
    many = f"{where}: expected labels that name classes, got {len(counts):,} different ones"
    # Fractions are measured however often they occur; whole numbers may well be names of classes,
    # such as article numbers, as long as each has its samples.
    numbers = all(map(_NUMBER.fullmatch, counts))
    whole = all(map(_WHOLE.fullmatch, counts))
    if numbers and (not whole or samples < _FEW_EACH * len(counts)):
        raise DataError(
            f"{many} on {samples:,} samples, all of them numbers, such as {_some(counts)}. To "
            f"predict measured values is a different kind of task: group them into a few named "
            f"ranges{_OTHERWISE}"
        )
    once = sum(1 for count in counts.values() if count == 1)
    if 2 * once > len(counts):
        raise DataError(
            f"{many} on {samples:,} samples, {once:,} of them only once, such as {_some(counts)}: "
            f"check that these are the labels{_OTHERWISE}"
        )
    if not whole or len(counts) <= _NOTED:
        return []
    note = (
        f"{where}: {len(counts)} classes, all of them whole numbers: if these are measured values, "
        "note that the model is not told which of them are close to each other"
    )
    return [note]


def _refuse_names(labels: Collection[str], where: str) -> None:
    """Refuse names that a reader cannot tell apart, or that would move a screen's cursor.

    Raises:
        DataError: only case, spaces or the way Unicode encodes them differ between two labels; or
            one has control characters.
    """
    seen: dict[str, str] = {}
    for label in labels:
        other = seen.setdefault(_plain(label), label)
        if other != label:
            raise DataError(
                f"{where}: expected one spelling of every class, got {other!r} and {label!r}"
                f"{_difference(other, label)}: give them one name{_OTHERWISE}"
            )
        if any(unicodedata.category(letter) == "Cc" for letter in label):
            raise DataError(
                f"{where}: expected names of classes in letters, got {label!r} with a character "
                f"that controls a screen: give it another name{_OTHERWISE}"
            )


def _plain(label: str) -> str:
    """Reduce a label to what a reader takes in of it."""
    # Twice: folding case can make letters that NFKC changes again, and the other way round.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", label).casefold())
    # Zero-width spaces, soft hyphens and marks of direction, which spreadsheets leave behind.
    unseen = {letter for letter in folded if unicodedata.category(letter) == "Cf"}
    return " ".join(folded.translate({ord(each): None for each in unseen}).split())


def _difference(one: str, other: str) -> str:
    same = unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
    return ", the same letters in two ways of Unicode" if same else ""


def _refuse_lists(counts: Mapping[str, int], where: str) -> None:
    """Refuse labels that are lists of others, or lists of switches."""
    # In much of the world a comma stands for the decimal point.
    if all(map(_NUMBER.fullmatch, counts)):
        return
    lists = [label for label in counts if _SEVERAL.search(label)]
    parts = {part.strip() for label in counts for part in _SEVERAL.split(label)}
    # A comma alone is no list: "fish, other" may be a class. If taking the lists apart leaves fewer
    # different words than there are labels, the same words are combined again and again.
    switches = all(map(_SWITCHES.fullmatch, counts))
    if switches or (len(lists) > 1 and len(parts) < len(counts)):
        raise DataError(
            f"{where}: expected one label for each sample, got lists of them, such as "
            f"{_some(lists or list(counts))}. To predict several labels for a sample is a "
            f"different kind of task: keep one label for each sample{_OTHERWISE}"
        )


def _some(labels: Collection[str]) -> str:
    return ", ".join(map(repr, list(labels)[:_LISTED]))


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
    tested = zip(test, test_names, strict=True)
    same = [(name, first[content]) for content, name in tested if content in first]
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
    example = f"{torn[0][0]} is the same as {torn[0][1]}"
    return [f"{where}: {which} the same as one with another label: {example}"]


def untested(classes: Sequence[str], tested: Collection[str], where: str) -> list[str]:
    """Mention classes that no test sample has."""
    missing = [name for name in classes if name not in tested]
    if not missing:
        return []
    note = (
        f"{where}: the test set has no sample of {len(missing)} of the {len(classes)} classes "
        f"({listed(missing)}): the score says nothing about them"
    )
    return [note]

"""Finds labels that are probably not classes, before a model learns them.

`check_same` finds samples that occur twice.

To a program a label is any text. Measured numbers, lists of labels, and one label in two spellings
all look like classes, and training on them raises no error: it ends with a model of something else
than was asked for. The numbers below are rules of thumb, which --labels-as-is switches off.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onefold.errors import DataError
from onefold.jobs.data.files import readable
from onefold.system.words import listed

__all__ = ["Sample", "check_labels", "check_same", "untested"]


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
            alike = unicodedata.normalize("NFC", label) == unicodedata.normalize("NFC", other)
            how = ", the same letters in two ways of Unicode" if alike else ""
            raise DataError(
                f"{where}: expected one spelling of every class, got {other!r} and {label!r}{how}: "
                f"give them one name{_OTHERWISE}"
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


class Sample(NamedTuple):
    """What is compared of a sample."""

    name: str
    """What to call it."""
    label: object
    content: str
    """Its content, or a digest of it; empty if not known."""


def check_same(parts: Sequence[Sequence[Sample]], where: str) -> list[str]:
    """Look for samples that occur twice, and refuse a test set of which most was trained with.

    Args:
        parts: the training and the test samples.
        where: file or folder of the data, for errors.

    Returns:
        What to mention before training: that some test samples, but not most, are training samples;
        that samples are the same and have different labels.

    Raises:
        DataError: more than half of the test samples are training samples.

    Example:
        >>> train = [Sample("a", "cat", "1"), Sample("b", "dog", "2")]
        >>> test = [Sample("c", "dog", "3"), Sample("d", "dog", "2"), Sample("e", "cat", "4")]
        >>> check_same([train, test], "pets")
        ['pets: 1 of 3 test samples is in the training set as well: d is the same as b']
        >>> check_same([[*train, Sample("f", "dog", "1")], []], "pets")
        ['pets: 1 sample is the same as one with another label: f is the same as a']
    """
    train, test = parts
    # The first of those that are the same.
    trained = {each.content: each for each in reversed(train)}
    first = {each.content: each for each in reversed([*train, *test])}
    # Two contents that are not known are not the same.
    trained.pop("", None)
    notes = []
    both = [(each, trained[each.content]) for each in test if each.content in trained]
    if both:
        verb = "is" if len(both) == 1 else "are"
        words = f"{len(both):,} of {len(test):,} test samples {verb} in the training set as well"
        if 2 * len(both) > len(test):
            raise DataError(
                f"{where}: {words} ({_alike(both)}), so the score would say little about new data: "
                f"expected test samples that are not in the training set"
            )
        notes.append(f"{where}: {words}: {_alike(both)}")
    # No error: a model can be trained all the same, and only a person can tell which is right.
    torn = [(each, first[each.content]) for each in [*train, *test] if each.content]
    torn = [(each, other) for each, other in torn if each.label != other.label]
    if torn:
        which = "1 sample is" if len(torn) == 1 else f"{len(torn):,} samples are"
        notes.append(f"{where}: {which} the same as one with another label: {_alike(torn)}")
    return notes


def _alike(pairs: Sequence[tuple[Sample, Sample]]) -> str:
    one, other = (readable(Path(sample.name)) for sample in pairs[0])
    return f"{one} is the same as {other}"


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

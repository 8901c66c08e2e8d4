"""Finds labels that are probably not classes, before a model learns them.

What a file says is text. Measured numbers, lists of labels, and one label in two spellings look
like classes, and training on them ends well, with a model of something else than was asked for.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

from onefold.errors import DataError

__all__ = ["check_labels", "refuse_spellings"]

_MANY = 20
"""More classes than these are looked at for being measured numbers."""
_FEW_EACH = 5
"""Samples of a class, on average: numbers that have fewer are measured, not chosen from a list."""
_NOTED = 50
"""More classes than these that are whole numbers are mentioned, however many samples they have."""
_LISTED = 3
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")
_SEVERAL = re.compile(r"[,;|]")
_SWITCHES = re.compile(r"[\[(]?[01](?:[ ,;|]+[01])+[\])]?")
_OTHERWISE = "; or accept each of them as a class with --labels-as-is"


def check_labels(counts: Mapping[str, int], where: str) -> list[str]:
    """Refuse labels that are probably not classes.

    Args:
        counts: how many samples each label has.
        where: they are, for errors.

    Returns:
        What to mention before training.

    Raises:
        DataError: two labels differ by spelling alone, or one has control characters, or they are
            measured numbers, or lists of several labels, or mostly occur once.

    Example:
        >>> check_labels({"lob": 10, "smash": 12}, "train.tsv")
        []
    """
    refuse_spellings(counts, where)
    _refuse_controls(counts, where)
    _refuse_lists(counts, where)
    samples = sum(counts.values())
    if len(counts) <= _MANY:
        return []
    told = f"{where}: expected labels that name classes, got {len(counts):,} different ones"
    numbers = all(_NUMBER.fullmatch(label) for label in counts)
    whole = numbers and all(_WHOLE.fullmatch(label) for label in counts)
    if numbers and (not whole or samples < _FEW_EACH * len(counts)):
        raise DataError(
            f"{told} on {samples:,} samples, all of them numbers, such as {_some(counts)}. To "
            f"predict measured values is a different kind of task: group them into a few named "
            f"ranges{_OTHERWISE}"
        )
    once = sum(1 for count in counts.values() if count == 1)
    if 2 * once > len(counts):
        raise DataError(
            f"{told} on {samples:,} samples, {once:,} of them only once, such as {_some(counts)}: "
            f"check that these are the labels{_OTHERWISE}"
        )
    if whole and len(counts) > _NOTED:
        note = (
            f"{where}: {len(counts)} classes, all of them whole numbers: if these are measured "
            f"values, note that the model is not told which of them are close to each other"
        )
        return [note]
    return []


def refuse_spellings(labels: Collection[str], where: str) -> None:
    """Refuse labels that differ by case, by spaces, by letters that nobody sees, or by how Unicode
    writes the same letters.

    Raises:
        DataError: two of them do.
    """
    seen: dict[str, str] = {}
    for label in labels:
        other = seen.setdefault(_plain(label), label)
        if other != label:
            raise DataError(
                f"{where}: expected one spelling of every class, got {other!r} and {label!r}"
                f"{_difference(other, label)}: give them one name{_OTHERWISE}"
            )


def _refuse_controls(labels: Collection[str], where: str) -> None:
    """Refuse names that would move the cursor, or break a line, wherever they are shown."""
    for label in labels:
        if any(unicodedata.category(letter) == "Cc" for letter in label):
            raise DataError(
                f"{where}: expected names of classes in letters, got {label!r} with a character "
                f"that controls a screen: give it another name{_OTHERWISE}"
            )


def _plain(label: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", label).casefold())
    unseen = {letter for letter in folded if unicodedata.category(letter) == "Cf"}
    return " ".join(folded.translate({ord(each): None for each in unseen}).split())


def _difference(one: str, other: str) -> str:
    same = unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
    return ", the same letters in two ways of Unicode" if same else ""


def _refuse_lists(counts: Mapping[str, int], where: str) -> None:
    """Refuse labels that are lists of others, or lists of switches."""
    if all(_NUMBER.fullmatch(label) for label in counts):
        return  # a comma may stand for a point
    lists = [label for label in counts if _SEVERAL.search(label)]
    parts = {part.strip() for label in counts for part in _SEVERAL.split(label)}
    switches = all(_SWITCHES.fullmatch(label) for label in counts)
    if switches or (len(lists) > 1 and len(parts) < len(counts)):
        raise DataError(
            f"{where}: expected one label for each sample, got lists of them, such as "
            f"{_some(lists or list(counts))}. To predict several labels for a sample is a "
            f"different kind of task: keep one label for each sample{_OTHERWISE}"
        )


def _some(labels: Collection[str]) -> str:
    chosen: Sequence[str] = list(labels)[:_LISTED]
    return ", ".join(map(repr, chosen))

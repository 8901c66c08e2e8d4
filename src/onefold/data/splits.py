"""Divides pictures by class into a training and a test set."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from onefold.data.bad import BadFile
from onefold.data.files import digest_of
from onefold.data.labels import check_apart, check_one_label
from onefold.data.pictures import Mode, Pictures, Sums
from onefold.system.words import listed

__all__ = ["PictureClasses", "Split", "digest", "held_out", "notes_of_same", "untested"]


@dataclass(frozen=True, slots=True)
class Split:
    """The training or the test pictures."""

    pictures: Pictures
    labels: list[int]
    """Number of each picture's class."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureClasses:
    """A data set of pictures with one label each."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    """Names, by number."""
    mode: Mode
    """Mode that all pictures are converted to."""
    sizes: list[tuple[int, int]]
    """Width and height of the training pictures, in pixels."""
    sums: Sums
    """Sums over the pixels of the training pictures."""
    left_out: list[BadFile]
    """Files that cannot be used."""
    white: int | None = None
    """White of pictures of more than 8 bits a pixel; None if there are none."""
    notes: list[str] = field(default_factory=list)
    """What to mention before training."""
    scan: str = ""
    """What was seen of the files, as `onefold.data.scan.unpack_scan` reads it."""
    digest: str
    """The same for the same pictures under the same names, in the same classes and sets."""


def digest(
    classes: Sequence[str],
    train: Sequence[tuple[str, str, str]],
    test: Sequence[tuple[str, str, str]],
) -> str:
    """Digest the classes, and the name, the class and the content of every picture."""
    return digest_of(list(classes), train, test, size_bytes=16)


def notes_of_same(
    contents: Sequence[Sequence[str]],
    names: Sequence[Sequence[str]],
    labels: Sequence[object],
    where: str,
) -> list[str]:
    """Mention pictures that occur twice; contents and names are those of each of the two sets."""
    train, test = contents
    apart = check_apart(train, test, train_names=names[0], test_names=names[1], where=where)
    whole, all_names = ([*parts[0], *parts[1]] for parts in (contents, names))
    return [*apart, *check_one_label(whole, labels, all_names, where)]


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


def held_out(labels: Sequence[str], *, share: float, seed: int) -> set[int]:
    """Draw the positions of the samples to set aside: a share of each class, but at least one.

    A class of two or more keeps at least one to train with.
    """
    # A generator of its own, or a draw elsewhere would change which samples are held out, and a
    # resumed run would train on what the first one tested with.
    generator = torch.Generator().manual_seed(seed)
    by_label: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        by_label.setdefault(label, []).append(number)
    held: set[int] = set()
    # Sorted, so that the draws of a class do not depend on which class comes first in the list.
    for _, members in sorted(by_label.items()):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen = torch.randperm(len(members), generator=generator)[:count]
        held.update(members[i] for i in chosen.tolist())
    return held

"""Pictures by class, in a training and a test part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from onefold.data.bad import BadFile
from onefold.data.digest import digest_of
from onefold.data.overlap import check_apart, check_one_label
from onefold.data.pictures import (
    Mode,
    Pictures,
    Sums,
)
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
    """Of all pictures."""
    sizes: list[tuple[int, int]]
    """Width and height of the training pictures, in pixels."""
    sums: Sums
    """Over the pixels of the training pictures."""
    left_out: list[BadFile]
    """What cannot be used."""
    white: int | None = None
    """Of pictures of more than 8 bits a pixel."""
    notes: list[str] = field(default_factory=list)
    """What to mention before training."""
    scan: str = ""
    """What was seen of the files, for `onefold.data.scan.read_scan`."""
    digest: str
    """The same for the same pictures under the same names, in the same classes and sets."""


def digest(
    classes: Sequence[str],
    train: Sequence[tuple[str, str, str]],
    test: Sequence[tuple[str, str, str]],
) -> str:
    """Of the name, the class and the content of every picture."""
    return digest_of(list(classes), train, test, size_bytes=16)


def notes_of_same(
    contents: Sequence[Sequence[str]],
    names: Sequence[Sequence[str]],
    labels: Sequence[object],
    where: str,
) -> list[str]:
    """What to mention of pictures that are there twice; contents and names of each set."""
    train, test = contents
    apart = check_apart(train, test, train_names=names[0], test_names=names[1], where=where)
    whole, all_names = ([*parts[0], *parts[1]] for parts in (contents, names))
    return [*apart, *check_one_label(whole, labels, all_names, where)]


def untested(classes: Sequence[str], tested: Collection[str], where: str) -> list[str]:
    """What to mention of classes that no test sample has."""
    missing = [name for name in classes if name not in tested]
    if not missing:
        return []
    note = (
        f"{where}: the test set has no sample of {len(missing)} of the {len(classes)} classes "
        f"({listed(missing)}): the score says nothing about them"
    )
    return [note]


def held_out(labels: Sequence[str], *, share: float, seed: int) -> set[int]:
    """Numbers of the samples to set aside: the same share of each class, one at the least."""
    generator = torch.Generator().manual_seed(seed)
    by_label: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        by_label.setdefault(label, []).append(number)
    held: set[int] = set()
    for _, members in sorted(by_label.items()):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen = torch.randperm(len(members), generator=generator)[:count]
        held.update(members[i] for i in chosen.tolist())
    return held

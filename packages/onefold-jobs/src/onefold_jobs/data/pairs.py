"""Reads pictures with a mask each: folders ``images`` and ``masks`` with the same names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cli import listed, tell
from onefold.errors import DataError
from onefold_jobs.data.files import BadFile, digest_of, readable, refuse
from onefold_jobs.data.labels import Sample, check_same
from onefold_jobs.data.masks import (
    AUTO,
    MOST_CLASSES,
    MaskClass,
    MaskLook,
    MaskRule,
    colors_of,
    look_at_mask,
)
from onefold_jobs.data.pictures import (
    Look,
    PictureData,
    look_at,
    picture_paths,
    sum_looks,
    white_of,
)
from onefold_jobs.data.samples import hold_out
from onefold_jobs.data.scan import Scanning, Seen, by_one_white, notes_of, pack_scan, scan_files
from onefold_jobs.data.splits import Folders, find_folders

__all__ = ["MaskedPictures", "Pair", "read_pairs", "read_pairs_to_test"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture and its mask."""

    image: Path
    mask: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPictures(PictureData):
    """A data set of pictures with a mask each."""

    train: list[Pair]
    test: list[Pair]
    foreground: int
    """Pixels of the training masks that are foreground."""
    pixels: int
    """Pixels of the training masks that are not void."""
    void: int = 0
    """Pixels of the training masks that count for neither side."""
    counts: tuple[list[int], list[int]] = ([], [])
    """Pixels of the training and of the test masks by class, or of background and foreground."""
    shortest: int
    """The shortest side of any training picture, in pixels."""
    rule: MaskRule = field(default_factory=MaskRule)
    """Which values of the masks are foreground or which class, and which void."""
    classes: tuple[MaskClass, ...] = ()
    """The classes of the pixels; none if they are foreground or background."""


def read_pairs(
    directory: Path,
    *,
    holdout: float,
    seed: int,
    skip_bad: bool,
    rule: MaskRule | None = None,
    scanning: Scanning | None = None,
) -> MaskedPictures:
    """Find pictures and masks, and read each once to see whether it can be used.

    Args:
        directory: holds a training and a test set, as `find_folders` finds them, with ``images``
            and ``masks`` each, or ``images`` and ``masks`` themselves, which may hold both sets.
        holdout: share that becomes the test set where there is none, 0 to 1.
        seed: seed of the generator that draws that share.
        skip_bad: leave out files that cannot be used, rather than refuse the data set.
        rule: which values of the masks are foreground; None lets brightness decide.
        scanning: what is known of the files already, and who watches; None for neither.

    Raises:
        DataError: the folder has no such layout, or something in it cannot be used.
    """
    rule = rule or MaskRule()
    bad: list[BadFile] = []
    train, given, folders = pairs_in(directory, bad)
    # One class for all: pairs have no labels by which the share could be taken.
    train, test = (
        (train, given)
        if given is not None
        else hold_out(train, ["pair"] * len(train), share=holdout, seed=seed)
    )
    looks = _look_through([*train, *test], directory, rule, scanning, bad)
    # Divided again, for both sets were looked through at once, and some of their pairs are gone.
    known = set(train)
    white = white_of(x.seen.look for x in looks if x.pair in known)
    looks = by_one_white(looks, white, bad)
    if not skip_bad:
        refuse(bad, looks)
    _require_one_scale(looks)
    _require_named(directory, rule, looks)
    parts = [[look for look in looks if (look.pair in known) is first] for first in (True, False)]
    if not parts[0] or not parts[1]:
        raise DataError(
            f"{directory}: expected pictures with masks to train and to test with, found "
            f"{len(parts[0])} and {len(parts[1])}"
        )
    # Over no foreground at all, a Dice score is 0 / 0.
    if not any(look.mask.look.foreground for look in parts[1]):
        raise DataError(
            f"{directory}: expected masks to score with, none of the {len(parts[1])} to test with "
            f"has a foreground pixel"
        )
    data = _of_looks(directory, parts[0], parts[1], bad, rule)
    return replace(data, notes=[*folders.notes, *data.notes], own_test=given is not None)


def read_pairs_to_test(
    directory: Path, rule: MaskRule, bad: list[BadFile], scanning: Scanning
) -> tuple[Path, list[Pair]]:
    """Find pictures and masks to score a trained model with, and read each once.

    Args:
        directory: as in training, or a part of it: its test set is taken, or all of it if there is
            no split.
        rule: which values of the masks are foreground, as in training.
        bad: list to which what cannot be used is added.
        scanning: how to look through files.

    Returns:
        The folder that holds ``images`` and ``masks``, and the pairs.

    Raises:
        DataError: there are no such folders, or the masks are of two kinds.
    """
    pairs, given, folders = pairs_in(directory, bad, choosing=False)
    where = folders.train if folders.test is None else folders.test
    looks = _look_through(pairs if given is None else given, where, rule, scanning, bad)
    _require_one_scale(looks)
    for note in notes_of([look.seen.look for look in looks]):
        tell(note)
    return where, [look.pair for look in looks]


def _of_looks(
    directory: Path,
    train: Sequence[_Look],
    test: Sequence[_Look],
    bad: list[BadFile],
    rule: MaskRule,
) -> MaskedPictures:
    both = [*train, *test]
    pictures = [look.seen.look for look in both]
    files: list[tuple[Path, Seen[Any]]] = []
    for pair, picture, mask in both:
        files += [(pair.image, picture), (pair.mask, mask)]
    masks = [look.mask.look for look in train]
    void = sum(mask.void for mask in masks)
    samples = [[look.sample(directory) for look in part] for part in (train, test)]
    # A mask is its picture's label: one picture with two masks contradicts itself.
    labeled = [[Sample(name, mask, image) for name, _, image, mask in part] for part in samples]
    rule, classes, notes = _with_classes(rule, [look.mask.look for look in both], masks)
    names = [name for name, _ in rule.named]
    return MaskedPictures(
        train=[look.pair for look in train],
        test=[look.pair for look in test],
        sums=sum_looks(pictures[: len(train)], gray=False),
        foreground=sum(mask.foreground for mask in masks),
        pixels=sum(math.prod(mask.size) for mask in masks) - void,
        void=void,
        counts=(_class_pixels(masks, names), _class_pixels([x.mask.look for x in test], names)),
        shortest=min(min(picture.size) for picture in pictures[: len(train)]),
        left_out=bad,
        rule=rule,
        classes=classes,
        white=white_of(pictures[: len(train)]),
        notes=[*notes, *notes_of(pictures, len(train)), *check_same(labeled, readable(directory))],
        scan=pack_scan(files, directory),
        digest=digest_of(*samples, str(rule), size_bytes=16),
    )


def _with_classes(
    rule: MaskRule, looks: Sequence[MaskLook], train: Sequence[MaskLook]
) -> tuple[MaskRule, tuple[MaskClass, ...], list[str]]:
    """Settle the classes of masks: their values, their colors, and what is odd about them.

    Raises:
        DataError: the masks have a single class.
    """
    if not rule.classes:
        return rule, (), []
    colors = {value: color for look in reversed(looks) for value, color in look.colors.items()}
    found: list[str] = []
    if rule.classes == AUTO:
        # As numbers in their order, or 10 would come before 2; colors by their text.
        found = sorted({value for look in looks for value in look.counts}, key=_in_order)
        if len(found) > MOST_CLASSES:
            raise DataError(
                f"--classes auto: expected masks of at most {MOST_CLASSES} classes, got "
                f"{len(found):,} different values"
            )
        rule = replace(rule, classes=tuple(f"{value}={value}" for value in found))
    named = [(name, [span.text for span in spans]) for name, spans in rule.named]
    if len(named) < 2:
        raise DataError(f"--classes: expected masks of two classes or more, got {len(named)}")
    seen = {name for look in train for name in look.counts}
    lacking = [name for name, _ in named if name not in seen]
    notes = [f"no training mask has a pixel of {listed(lacking)}"] if lacking else []
    if found:
        notes.insert(0, f"--classes auto: a class for each value of the masks, {listed(found, 20)}")
    return rule, colors_of(named, colors), notes


def _class_pixels(looks: Sequence[MaskLook], names: Sequence[str]) -> list[int]:
    """Pixels of each class in these masks; of background and foreground if there are none."""
    if names:
        return [sum(look.counts.get(name, 0) for look in looks) for name in names]
    foreground = sum(look.foreground for look in looks)
    counted = sum(math.prod(look.size) - look.void for look in looks)
    return [counted - foreground, foreground]


def _in_order(value: str) -> tuple[int, str]:
    return (int(value) if value.isdecimal() else 0, value)


class _Look(NamedTuple):
    """A pair that can be used, and what was seen of its two files."""

    pair: Pair
    seen: Seen[Look]
    """Of the picture."""
    mask: Seen[MaskLook]

    @property
    def path(self) -> Path:
        """The picture's."""
        return self.pair.image

    def sample(self, root: Path) -> list[str]:
        """List the names and the digests of the contents of picture and mask."""
        names = [str(path.relative_to(root)) for path in (self.path, self.pair.mask)]
        return [*names, self.seen.content, self.mask.content]


def _look_through(
    pairs: Sequence[Pair],
    directory: Path,
    rule: MaskRule,
    scanning: Scanning | None,
    bad: list[BadFile],
) -> list[_Look]:
    """Look at all pairs; return the usable ones, and add the files that cannot be used to bad."""
    # The rule is part of the masks' kind: under another rule what was seen of them does not hold.
    scanning = scanning or Scanning()
    see, see_mask = partial(look_at, white=scanning.white), partial(look_at_mask, rule=rule)
    files = [(pair.image, "picture", see) for pair in pairs]
    masks = [(pair.mask, f"mask:{rule}", see_mask) for pair in pairs]
    found = scan_files([*files, *masks], directory, scanning)
    looks = []
    for pair, picture, mask in zip(pairs, found[: len(pairs)], found[len(pairs) :], strict=True):
        if isinstance(picture, Seen) and isinstance(mask, Seen):
            # Both after turning by EXIF: a picture that is turned needs a mask that is upright.
            width, height = picture.look.size
            if mask.look.size == (width, height):
                looks.append(_Look(pair, picture, mask))
                continue
            expected = f"{width}x{height} pixels, the size of {readable(pair.image)}"
            came = "x".join(map(str, mask.look.size))
            bad.append(BadFile(pair.mask, f"expected a mask of {expected}, got {came}"))
        bad += [each for each in (picture, mask) if isinstance(each, BadFile)]
    return looks


def _require_one_scale(looks: Sequence[_Look]) -> None:
    """Refuse masks of 0 and 1 among masks of 0 and 255, as numbers of classes look like that.

    Raises:
        DataError: both kinds occur.
    """
    # A mask of only the classes 0 and 255 looks fine on its own; the others reveal that 1 is one.
    first: dict[int, _Look] = {}
    for look in looks:
        first.setdefault(look.mask.look.scale, look)
    if 1 in first and 255 in first:
        small, large = (readable(first[scale].pair.mask) for scale in (1, 255))
        values = {scale: ", ".join(look.mask.look.values) for scale, look in first.items()}
        raise DataError(
            f"{small}: expected masks that are all of 0 and 1, or all of 0 and 255; this one has "
            f"{values[1]}, and {large} has {values[255]}. Name the foreground, such as "
            f"--foreground 1, and what belongs to neither side, such as --void 255"
        )


def _require_named(directory: Path, rule: MaskRule, looks: Sequence[_Look]) -> None:
    """Refuse a rule with values that occur in no mask, which is probably a slip.

    Raises:
        DataError: a value of the rule occurs in no mask.
    """
    found = {text for look in looks for text in look.mask.look.named}
    for option in ("foreground", "void"):
        for text in getattr(rule, option):
            if looks and text not in found:
                values = dict.fromkeys(value for x in looks for value in x.mask.look.values)
                raise DataError(
                    f"--{option} {text}: expected a value of the masks, none in "
                    f"{readable(directory)} has it; among theirs are {', '.join([*values][:8])}"
                )


def pairs_in(
    directory: Path, bad: list[BadFile], *, choosing: bool = True
) -> tuple[list[Pair], list[Pair] | None, Folders]:
    """Find the pairs to train and to test with; None of the latter if there is no split.

    Raises:
        DataError: there are no such folders.
    """
    folders = find_folders(directory, choosing=choosing, masks=True)
    if folders.is_split:
        tested = folders.require_test()
        train = _pairs(folders.train, bad) if choosing else []
        return train, _pairs(tested, bad), folders
    pairs, images = _pairs(folders.train, bad), folders.train / "images"
    # As images/train and masks/train, beside those to test with.
    within = find_folders(images, choosing=choosing, as_is=True)
    if not within.is_split or within.test is None:
        return pairs, None, folders
    train, test = (
        [pair for pair in pairs if pair.image.is_relative_to(part)]
        for part in (within.train, within.test)
    )
    return train, test, replace(folders, notes=within.notes)


def _pairs(directory: Path, bad: list[BadFile]) -> list[Pair]:
    """Find pictures and masks of the same name, whatever the ending; add the others to bad."""
    images, masks = (_by_stem(directory / name, bad) for name in ("images", "masks"))
    if not images:
        raise DataError(f"{directory / 'images'}: expected pictures, found none")
    # Each file is named for one reason: one that is there twice is not reported as unmatched, too.
    bad += [*_doubles(images), *_doubles(masks)]
    for mine, others, missing, folder in (
        (images, masks, "mask", "masks"),
        (masks, images, "picture", "images"),
    ):
        bad += [
            BadFile(paths[0], f"there is no {missing} of that name in {directory / folder}")
            for stem, paths in mine.items()
            if stem not in others and len(paths) == 1
        ]
    return [
        Pair(paths[0], masks[stem][0])
        for stem, paths in images.items()
        if len(paths) == len(masks.get(stem, ())) == 1
    ]


def _doubles(by_stem: Mapping[str, Sequence[Path]]) -> list[BadFile]:
    """Report files that differ by their ending alone, so that it is not clear which to use."""
    return [
        BadFile(path, f"expected one file of that name, there is {other.name} as well")
        for paths in by_stem.values()
        if len(paths) > 1
        for path, other in zip(paths, [*paths[1:], paths[0]], strict=True)
    ]


def _by_stem(directory: Path, bad: list[BadFile]) -> dict[str, list[Path]]:
    """Find pictures, and group them by their path without the ending."""
    if not directory.is_dir():
        raise DataError(
            f"{directory.parent}: expected the folders images and masks, there is no "
            f"{directory.name}"
        )
    found: dict[str, list[Path]] = {}
    for path in picture_paths(directory, bad):
        found.setdefault(str(path.relative_to(directory).with_suffix("")), []).append(path)
    return found

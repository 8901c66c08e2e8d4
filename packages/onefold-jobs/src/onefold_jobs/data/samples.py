"""Finds and reads the training and test samples that files list: texts, or paths of images.

The files are TSV files with text and label, or tables. `read_splits` makes a text dataset;
`onefold_jobs.data.classes` makes image datasets. `hold_out` splits off test samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from onefold.cli import counted, listed
from onefold.errors import DataError
from onefold_jobs.data.columns import Columns
from onefold_jobs.data.files import BadFile, ReadData, digest_of, readable
from onefold_jobs.data.folds import Fold, deal, unused
from onefold_jobs.data.labels import (
    Label,
    TaskName,
    check_numbers,
    classes_of,
    divided,
    parts_of,
    separator,
    shortened,
    spelled,
)
from onefold_jobs.data.tables import (
    TABLES,
    Line,
    column_names,
    is_table,
    none_of,
    part_notes,
    read_table,
    read_tsv,
)

__all__ = [
    "ListedSamples",
    "TextSplits",
    "files_to_test",
    "hold_out",
    "known_samples",
    "read_listed",
    "read_splits",
    "read_to_score",
    "require_two",
    "strata",
]

_Item = TypeVar("_Item")

_TEST_NAMES = ("dev", "validation", "valid", "val", "test")
_SHOWN_CLASSES = 10


class ListedSamples(NamedTuple):
    """The samples of one or two files, before unusable ones are detected."""

    train: list[Line]
    test: list[Line] | None
    """Test samples; None if a fraction of the others is held out."""
    paths: tuple[Path, Path]
    """Paths of the two files, which may be the same."""
    bad: list[BadFile]
    notes: list[str]
    columns: Columns
    """Columns of the files, if they are tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSplits(ReadData):
    """A training and a test set with the same classes."""

    train: list[Line]
    """Training samples."""
    dev: list[Line]
    """Test samples."""
    classes: list[str]
    """Classes of the training set, in order; empty for regression."""
    paths: tuple[Path, Path]
    """Paths of both files."""


def find_splits(path: Path, dev: str | None) -> tuple[Path, list[Path]]:
    """Find the training file, and candidates for the test file.

    Args:
        path: a file, or a folder with ``train`` and ``dev`` in any supported format.
        dev: test file, if named.

    Raises:
        DataError: the files do not exist.
    """
    kinds = f"a TSV file, or a table ({', '.join(TABLES)})"
    if not path.exists():
        raise DataError(
            f"--data {readable(path)}: expected a folder with train.tsv and dev.tsv, or {kinds}, "
            f"but it does not exist (relative to {Path.cwd()})"
        )
    train: Path | None = path
    found: list[Path] = []
    if path.is_dir() and not is_table(path):
        train = next(iter(_named(path, "train")), None)
        found = files_to_test(path)
    if train is None:
        others = sorted(each.name for each in path.iterdir() if _is_read(each))
        what = listed(others) + " in it" if others else "a table of samples and labels"
        raise DataError(
            f"{readable(path)}: expected train.tsv, or a table called train, such as train.csv, "
            f"found none. Name {what} with --data"
        )
    if dev is not None and not Path(dev).exists():
        raise DataError(f"--dev {dev}: expected {kinds}, but it does not exist")
    return train, found if dev is None else [Path(dev)]


def files_to_test(data: Path) -> list[Path]:
    """List the files with test samples: the path itself, or test files in a folder."""
    if data.is_file() or is_table(data):
        return [data]
    return [each for name in _TEST_NAMES for each in _named(data, name)] if data.is_dir() else []


def read_to_score(
    data: Path, columns: Columns, task: TaskName, is_known: Callable[[Label], bool]
) -> tuple[Path, list[Line], list[BadFile]]:
    """Read the samples to score a finished run on, from a file or from a file in a folder.

    In a folder, this is ``test`` if it contains labels, because the other files may have selected
    the best epoch; without any test file, it is ``train``, of which the run held out a fraction.

    Args:
        data: the path.
        columns: columns of a table.
        task: type of the labels.
        is_known: whether the run knows a label.

    Raises:
        OSError: a file cannot be read.
        DataError: the file does not exist, or has no valid row.
    """
    found = files_to_test(data) or (_named(data, "train") if data.is_dir() else [])
    if not found:
        raise DataError(
            f"{readable(data)}: expected a TSV file or a table, or a folder that contains dev.tsv; "
            f"found none"
        )
    for path in _named(data, "test") if data.is_dir() else ():
        # The test file of a competition has no labels.
        with suppress(DataError):
            lines, bad, _ = read_file(path, columns, task)
            if any(is_known(line.label) for line in lines):
                return path, lines, bad
    lines, bad, _ = read_file(found[0], columns, task)
    _label_notes(lines, found[0], task)
    return found[0], lines, bad


def _label_notes(lines: Sequence[Line], path: Path, task: TaskName) -> list[str]:
    """Reject or report labels that may mean something else than they are read as."""
    if task == "regression":
        return check_numbers([(line.line_number, line.written) for line in lines], readable(path))
    # Only a multi-label sample can have no label; a list or columns without a class are explicit.
    empty, of = sum(line.label == "" for line in lines), counted(len(lines), "sample")
    verb = "has" if empty == 1 else "have"
    return [f"{readable(path)}: {empty:,} of {of} {verb} no class (empty cells)"] if empty else []


def _is_read(path: Path) -> bool:
    return is_table(path) or path.suffix.lower() == ".tsv"


def _named(folder: Path, name: str) -> list[Path]:
    """Return the files with this name and a supported suffix, and such a saved dataset."""
    paths = [folder / f"{name}{ending}" for ending in ("", ".tsv", *TABLES)]
    return [path for path in paths if path.exists() and _is_read(path)]


def read_file(
    path: Path, columns: Columns, task: TaskName | None
) -> tuple[list[Line], list[BadFile], Columns]:
    """Read a TSV file or a table; arguments, result and errors are those of `read_table`."""
    named = columns.sample or columns.label or columns.kind == "image"
    if task is None or is_table(path) or named:
        return read_table(path, columns, task)
    return (*read_tsv(path, task), columns)


def read_listed(
    path: Path,
    dev: str | None,
    columns: Columns,
    task: TaskName = "single-label",
    *,
    labels_as_is: bool = False,
) -> ListedSamples:
    """Read the samples of a dataset.

    Args:
        path: argument of ``--data``.
        dev: test file, if named.
        columns: columns of a table.
        task: type of the labels.
        labels_as_is: treat spaces as part of a name, not as separators of several classes.

    Raises:
        OSError: a file cannot be read.
        DataError: a file is missing, or has no valid row.
    """
    train_path, others = find_splits(path, dev)
    train, bad, settled = read_file(train_path, columns, task)
    notes = []
    if settled != columns:
        notes.append(f"{readable(train_path)}: {settled.described()}")
    notes += _label_notes(train, train_path, task)
    sign = None
    if task == "multi-label" and len(settled.label) < 2:
        sign = separator([line.label for line in train], spaces=not labels_as_is)
    if sign == " ":
        several = next(spelled(line.label) for line in train if " " in spelled(line.label))
        notes.append(
            f"{readable(train_path)}: classes are separated by spaces, so {several!r} is "
            f"{len(several.split())} classes; --labels-as-is makes it one class"
        )
    train = [replace(line, label=divided(line.label, sign)) for line in train]
    for other in others:
        # A test set of a competition has no labels, so it is ignored unless it was named.
        names = column_names(other) if settled.label else []
        lacking = [name for name in settled.label if names and name not in names]
        if lacking and dev is None:
            notes.append(f"{readable(other)}: not used, because it has no column {lacking[0]}")
            continue
        test, test_bad, _ = read_file(other, settled, task)
        notes += _label_notes(test, other, task)
        notes += part_notes(train_path, settled, tested=True) if settled.label else []
        test = [replace(line, label=divided(line.label, sign)) for line in test]
        return ListedSamples(train, test, (train_path, other), [*bad, *test_bad], notes, settled)
    notes += part_notes(train_path, settled) if settled.label else []
    return ListedSamples(train, None, (train_path, train_path), bad, notes, settled)


def hold_out(
    samples: Sequence[_Item],
    labels: Sequence[str],
    *,
    share: float,
    seed: int,
    fold: Fold | None = None,
    content: Callable[[_Item], str] = str,
) -> tuple[list[_Item], list[_Item]]:
    """Draw the samples to hold out: a fraction of each class, but at least one; or a fold.

    A class with two or more samples keeps at least one for training.

    Args:
        samples: the samples.
        labels: stratum of each sample.
        share: fraction to hold out, unless there is a fold.
        seed: seed of the draws, or of the folds.
        fold: fold to hold out; see `onefold_jobs.data.folds`.
        content: content of a sample, or its digest, for folds.

    Returns:
        The remaining and the held-out samples, both in their original order.
    """
    if fold is not None:
        dealt = deal(labels, [*map(content, samples)], seed=seed, folds=fold.of)
        both = [*zip(samples, dealt, strict=True)]
        held_out = [each for each, number in both if number == fold.number]
        return [each for each, number in both if number != fold.number], held_out
    # A separate generator, or a draw elsewhere would change which samples are held out, and a
    # resumed run would train on the test samples of the first one.
    generator = torch.Generator().manual_seed(seed)
    by_label: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        by_label.setdefault(label, []).append(number)
    held: set[int] = set()
    # Sort, so that the draws of a class do not depend on the order of classes in the list.
    for _, members in sorted(by_label.items()):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen = torch.randperm(len(members), generator=generator)[:count]
        held.update(members[i] for i in chosen.tolist())
    # Keep the original order, because the numbers of samples seed their augmentation.
    kept = [sample for number, sample in enumerate(samples) if number not in held]
    return kept, [sample for number, sample in enumerate(samples) if number in held]


def strata(labels: Sequence[Label]) -> list[str]:
    """Return the strata that `hold_out` draws from: classes, for single-label samples."""
    return [label if isinstance(label, str) else "" for label in labels]


def known_samples(
    lines: Sequence[Line], classes: Sequence[str], path: Path, of: str = "the training set"
) -> tuple[list[Line], list[BadFile]]:
    """Return the samples with known classes, and the others as bad ones."""
    learned, known, strange = set(classes), [], []
    expected = f"expected a label of {of} ({listed(classes, _SHOWN_CLASSES)})"
    for line in lines:
        others = [name for name in parts_of(line.label) if name not in learned]
        if others:
            reason = f"{expected}, got {shortened(others[0])}"
            strange.append(BadFile(path, reason, line.line_number))
        else:
            known.append(line)
    return known, strange


def read_splits(
    listed_samples: ListedSamples, *, holdout: float, seed: int, fold: Fold | None = None
) -> TextSplits:
    """Make a text dataset.

    Args:
        listed_samples: result of `read_listed`.
        holdout: fraction of each class for the test set, if there is no test file, 0 to 1.
        seed: seed of the generator that draws the test set.
        fold: fold of the training file to test on, instead of a test file.

    Returns:
        The valid samples of both sets, the classes, and the bad lines of both.

    Raises:
        DataError: a set has no valid line, or there are fewer than two labels.
    """
    train, dev, (train_path, dev_path), bad, notes, columns = listed_samples
    labels = [line.label for line in train]
    classes = classes_of(labels)
    require_two(labels, train_path, bad)
    strange: list[BadFile] = []
    if fold and dev is not None:
        dev, dev_path, notes = None, train_path, [*notes, unused(dev_path)]
    own_test = dev is not None
    if dev is None:
        how: Any = {"share": holdout, "seed": seed, "fold": fold}
        train, dev = hold_out(train, strata(labels), **how, content=lambda line: line.text)
    else:
        dev, strange = known_samples(dev, classes, dev_path)
    if not dev:
        raise DataError(f"{dev_path}: expected a usable line, got {none_of(strange)}")
    samples = ([[line.text, line.label] for line in lines] for lines in (train, dev))
    return TextSplits(
        train=train,
        dev=dev,
        classes=classes,
        paths=(train_path, dev_path),
        columns=columns if columns.sample else None,
        left_out=sorted(
            [*bad, *strange], key=lambda each: (each.path != train_path, each.line or 0)
        ),
        notes=notes,
        own_test=own_test,
        digest=digest_of(*samples),
    )


def require_two(labels: Sequence[Label], path: Path, bad: Sequence[BadFile]) -> None:
    """Reject a training set with a single label, from which nothing can be learned."""
    if len(set(labels)) < 2:
        alone = f"only {labels[0]!r}, on " if labels else ""
        others = f"; {len(bad)} others are unusable, such as {bad[0]}" if bad else ""
        raise DataError(
            f"{readable(path)}: expected two different labels, got {alone}"
            f"{counted(len(labels), 'usable sample')}{others}"
        )

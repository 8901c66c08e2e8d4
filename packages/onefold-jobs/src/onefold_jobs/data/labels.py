"""Reads labels, and detects labels that probably mean something else.

`read_label` reads the label of a sample: a class, several classes, or a number. `check_labels`
detects labels that are probably not classes before a model learns them, and `check_numbers` numbers
with separators of thousands. `check_same` finds duplicate samples.

For a program, any string can be a label. Measured numbers, lists of labels, and two spellings of a
label all look like classes, and training on them raises no error but produces a useless model. The
thresholds below are heuristics, which --labels-as-is disables.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from onefold.cli import counted, listed
from onefold.errors import DataError
from onefold_jobs.data.files import readable

__all__ = [
    "MISSING",
    "Label",
    "Sample",
    "TaskName",
    "check_labels",
    "check_numbers",
    "check_same",
    "check_task",
    "classes_of",
    "divided",
    "numbered",
    "parts_of",
    "read_label",
    "separator",
    "shortened",
    "spelled",
    "thousands_in",
    "untested",
]

TaskName = Literal["single-label", "multi-label", "regression"]
"""Target of the predictions: one class, any number of classes, or a number."""
Label: TypeAlias = str | tuple[str, ...] | float
"""The label of a sample, by task."""

_LONGEST_LABEL = 200
"""Maximum characters of a label: longer ones are texts, and Python rejects numbers of 4,300
digits."""

_MANY = 20
"""Number of classes above which labels may be rejected as measured numbers, or as texts."""
_FEW_EACH = 5
"""Samples per class, on average: integers with fewer are measurements, not classes."""
_NOTED = 10
"""Number of classes above which integer labels deserve a note, whatever their samples."""
_SHOWN_CHARACTERS = 40
_LISTED = 3
"""Number of labels that an error gives as examples."""
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?")
_FRACTION = re.compile(r"[-+]?\d+[.,]\d*[1-9]")
_WHOLE = re.compile(r"[-+]?\d+")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}[.,]\d{3}")
"""A number whose point or comma may separate thousands."""
_HUNDREDS = re.compile(r"[-+]?[1-9]\d{0,2}")
"""A number that has no separator even if others have one."""
_OF_DECIMALS = 20
"""Among so many different decimals, some end with a zero, unless such zeros are not written."""
_SEPARATORS = "|;,"
"""Separators of a sample's classes in addition to spaces, strongest first."""
_SEVERAL = re.compile(f"[{_SEPARATORS}]")
_QUOTED = re.compile(r"""(['"])(.*?)\1""")
_LIST_OF_QUOTED = re.compile(r"\[[,\s]*\]|\([,\s]*\)")
_SWITCHES = re.compile(r"[\[(]?[01](?:[ ,;|]+[01])+[\])]?")
MISSING = {
    **dict.fromkeys(("nan", "NaN", "NAN", "<NA>", "NaT"), "pandas and NumPy write"),
    "NA": "R writes",
    "#N/A": "Excel writes",
    **dict.fromkeys(("NULL", "\\N"), "databases write"),
}
"""Marks of a missing value, with the programs that write them."""
_OTHERWISE = "; or accept all labels as classes with --labels-as-is"


def read_label(value: object, task: TaskName = "single-label") -> Label:
    """Read a label from a file's value.

    Args:
        value: a string, a number, or a list of strings; for ``multi-label``, a string may contain
            several classes, which `divided` splits once their `separator` is known.
        task: type of the labels.

    Raises:
        ValueError: the value is not a label of this task.

    Example:
        >>> read_label(" good "), read_label(["toxic", "rude"], "multi-label")
        ('good', ('toxic', 'rude'))
        >>> read_label("3.5", "regression")
        3.5
    """
    # pandas and NumPy represent missing values as NaN, which differs from itself.
    text = "" if value is None or value != value else str(value).strip()
    # Lists as Python, pandas and NumPy write them to CSV.
    as_list = isinstance(value, str) and _LIST_OF_QUOTED.fullmatch(_QUOTED.sub("", text))
    if as_list and task == "multi-label":
        value = [name for _, name in _QUOTED.findall(text) if name]
    if isinstance(value, list | tuple):
        if task != "multi-label":
            raise ValueError(
                f"expected one label, got the list {shortened(value)}: --task multi-label predicts "
                f"several classes for a sample"
            )
        names = [str(part).strip() for part in value]
    else:
        # Numbers in JSON and Parquet are spelled as in CSV; null is an empty cell.
        if task == "regression":
            return _number(text)
        if not text and task == "single-label":
            raise ValueError("expected a label, got nothing")
        names = [*filter(None, _SEVERAL.split(text))] if task == "multi-label" else [text]
    for name in names:
        if not name or len(name) > _LONGEST_LABEL:
            raise ValueError(
                f"expected a label of at most {_LONGEST_LABEL} characters, got {len(name):,}: "
                f"{shortened(name)}"
            )
    return tuple(dict.fromkeys(names)) if isinstance(value, list | tuple) else text


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        way = ": write digits and a decimal point only" if re.search(r"\d", text) else ""
        # Three digits after a comma may be thousands.
        if _NUMBER.fullmatch(text) and not re.search(r",\d{3}$", text):
            way = ": write a point for the decimal comma"
        raise ValueError(f"expected a number, such as 3.5, got {shortened(text)}{way}")
    return number


class Thousands(NamedTuple):
    """Separators of thousands that would be read as decimal points."""

    text: str
    """Where they are, and what to do."""
    certain: bool


def thousands_in(cells: Iterable[tuple[int, str]], signs: Collection[str] = ()) -> Thousands | None:
    """Find separators of thousands, each a point or a comma before the last three digits.

    They are certain next to a number without a separator: a program that keeps the zeros of
    decimals writes 554.000, and one that drops them writes 4.12 for 4.120.

    Args:
        cells: numbers as written, with their line numbers.
        signs: signs before the decimals of other columns.

    >>> thousands_in([(2, "554"), (3, "5.130")]).text
    "'5.130' in line 3, and '554' in line 2: write 5130, or 5.1300 if its point precedes decimals"
    >>> thousands_in([(2, "554.5"), (3, "5.130")])
    """
    read = [(line, cell.strip()) for line, cell in cells]
    separated = [(line, cell) for line, cell in read if "." in cell or "," in cell]
    if not separated or not all(_THOUSANDS.fullmatch(cell) for _, cell in separated):
        return None
    line, cell = separated[0]
    sign, word = (".", "point") if "." in cell else (",", "comma")
    place, beside = f"{cell!r} in line {line}", ""
    different = {cell for _, cell in separated}
    kept = any(cell.endswith("0") for cell in different) or len(different) >= _OF_DECIMALS
    plain = next(((n, each) for n, each in read if _HUNDREDS.fullmatch(each)), None)
    if plain and kept and not any(re.fullmatch(r"[-+]?\d{4,}", each) for _, each in read):
        beside = f"{plain[1]!r} in line {plain[0]}"
    if signs and sign not in signs:
        beside = f"decimal {'commas' if sign == '.' else 'points'} in other columns"
    if beside:
        way = f"write {cell.replace(sign, '')}, or {cell}0 if its {word} precedes decimals"
        return Thousands(f"{place}, and {beside}: {way}", True)
    return Thousands(
        f"{place} is read as {cell.replace(',', '.')}; if its {word} separates thousands, write "
        f"the number without it",
        False,
    )


def check_numbers(
    cells: Iterable[tuple[int, str]], where: str, signs: Collection[str] = ()
) -> list[str]:
    """Reject numbers with separators of thousands, or report numbers that may have them.

    Args:
        cells: numbers as written, with their line numbers.
        where: file of the numbers, for messages.
        signs: signs before the decimals of other columns.
    """
    found = thousands_in(cells, signs)
    if found and found.certain:
        raise DataError(
            f"{where}: expected numbers without separators of thousands, got {found.text}"
        )
    return [f"{where}: {found.text}"] if found else []


def shortened(value: object) -> str:
    """Quote the beginning of a value.

    >>> shortened("x" * 60)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…'"
    """
    if not isinstance(value, str):
        return str(value)[:_SHOWN_CHARACTERS]
    return repr(value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…")


def parts_of(label: Label) -> tuple[str, ...]:
    """Return the classes of a label; none if it is a number."""
    if isinstance(label, str):
        return (label,)
    return label if isinstance(label, tuple) else ()


def spelled(label: Label) -> str:
    """Spell a label, with bars between several classes.

    >>> spelled(("rude", "toxic")), spelled(0.5)
    ('rude|toxic', '0.5')
    """
    return "|".join(label) if isinstance(label, tuple) else str(label)


def classes_of(labels: Iterable[Label]) -> list[str]:
    """Return the sorted classes of labels: numerically if all are integers, otherwise as strings.

    >>> classes_of(["10", "9"]), classes_of([("rude", "toxic"), ()]), classes_of([0.5])
    (['9', '10'], ['rude', 'toxic'], [])
    """
    names = {name for label in labels for name in parts_of(label)}
    # If classes were sorted as strings, 10 would precede 2, and class 2 would not be output 2.
    # Spellings such as 1 and 01 have the same value, so the string breaks the tie.
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def separator(labels: Sequence[Label], *, spaces: bool = True) -> str:
    """Find the separator between the classes of labels: the strongest one that any label contains.

    Without another separator it is a space, but only if, as for commas, the same words are combined
    repeatedly, unlike in names of two words.

    Args:
        labels: labels from `read_label`.
        spaces: whether it may be a space.

    >>> separator(["cell|cell, dead", "a, b"]), separator(["a, b", "c"]), separator(["hot dog"])
    ('|', ',', '')
    >>> separator(["cat", "cat dog", "dog cow", "cow"])
    ' '
    """
    signs = (sign for sign in _SEPARATORS if any(sign in x for x in labels if type(x) is str))
    parts = [parts_of(label) for label in labels]
    names = {name for each in parts for name in each}
    words = {word for name in names for word in name.split()}
    combined = len(words) < len(names) or len(_spaced(names)) > 1
    alone = combined and all(len(each) < 2 for each in parts) and any(" " in each for each in names)
    return next(signs, " " if spaces and alone else "")


def divided(label: Label, sign: str | None) -> Label:
    """Split a label with several classes at a separator, or nowhere if it is empty.

    With None, the label is returned unchanged. Only spaces split labels that come from a list.

    >>> divided("cell|cell, dead", "|"), divided("[1, 2]", ","), divided("(a) b (c)", "")
    (('cell', 'cell, dead'), ('1', '2'), ('(a) b (c)',))
    """
    if sign is None or (isinstance(label, tuple) and sign != " "):
        return label
    # A list of numbers as Python writes it; other brackets inside belong to names.
    lists = rf"\[[^][]*\]|\([^()]*[{sign or ','}][^()]*\)"
    if isinstance(label, str) and re.fullmatch(lists, label):
        label = label[1:-1]
    parts = (part for name in parts_of(label) for part in (name.split(sign) if sign else [name]))
    return tuple(dict.fromkeys(filter(None, map(str.strip, parts))))


def numbered(labels: Sequence[Label], classes: Sequence[str]) -> list[Any]:
    """Convert labels to numbers: class number; 1.0 or 0.0 per class; or the number itself.

    >>> numbered(["b", "a"], "ab"), numbered([("b",), ()], "ab"), numbered([2.5], "")
    ([1, 0], [[0.0, 1.0], [0.0, 0.0]], [2.5])
    """
    numbers = {name: number for number, name in enumerate(classes)}

    def number(label: Label) -> int | float | list[float]:
        if isinstance(label, str):
            return numbers[label]
        return [float(name in label) for name in classes] if isinstance(label, tuple) else label

    return [number(label) for label in labels]


def check_labels(counts: Mapping[str, int], where: str) -> list[str]:
    """Reject labels that are probably not classes.

    Args:
        counts: number of samples of each label.
        where: file or folder of the labels, for errors.

    Returns:
        Messages for the user.

    Raises:
        DataError: two labels differ only in spelling; one contains control characters; or the
            labels are measured numbers, lists of several labels, or mostly unique texts.

    Example:
        >>> check_labels({"lob": 10, "smash": 12}, "train.tsv")
        []
    """
    _refuse_names(counts, where)
    _refuse_lists(counts, where)
    samples = sum(counts.values())
    whole = all(map(_WHOLE.fullmatch, counts))
    measured = counts if whole else [label for label in counts if _FRACTION.fullmatch(label)]
    note = (
        f"{where}: labels are numbers, such as {_some(measured)}, treated as {len(counts)} "
        f"classes: --task regression predicts them as values"
    )
    notes = [note] if measured and (not whole or len(counts) > _NOTED) else []
    if len(counts) <= _MANY:
        return notes
    many = f"{where}: expected labels that name classes, got {len(counts):,} different ones"
    # Fractions are measurements however often they occur; integers may be class names, such as
    # article numbers, as long as each has enough samples.
    numbers = all(map(_NUMBER.fullmatch, counts))
    if numbers and (not whole or samples < _FEW_EACH * len(counts)):
        raise DataError(
            f"{many} on {samples:,} samples, all of them numbers, such as {_some(counts)}: use "
            f"--task regression for measured values, or group them into a few named "
            f"ranges{_OTHERWISE}"
        )
    once = sum(1 for count in counts.values() if count == 1)
    if 2 * once > len(counts):
        raise DataError(
            f"{many} on {samples:,} samples, {once:,} of them only once, such as {_some(counts)}: "
            f"check that these are the labels{_OTHERWISE}"
        )
    return notes


def check_task(
    labels: Sequence[Label], task: TaskName, where: str, *, labels_as_is: bool
) -> list[str]:
    """Reject labels that probably do not fit a task; see `check_labels` for classes.

    Args:
        labels: labels of the training samples.
        task: type of the labels.
        where: file or folder of the labels, for errors.
        labels_as_is: accept all labels.
    """
    if labels_as_is or task == "regression":
        return []
    counts = Counter(name for label in labels for name in parts_of(label))
    if task == "single-label":
        return check_labels(counts, where)
    _refuse_names(counts, where)
    return []


def _refuse_names(counts: Mapping[str, int], where: str) -> None:
    """Reject names that a reader cannot distinguish, or that contain control characters.

    Raises:
        DataError: two labels differ only in case, spaces or Unicode encoding; or one contains
            control characters.
    """
    seen: dict[str, str] = {}
    for label in counts:
        if label in MISSING:
            raise DataError(
                f"{where}: expected class names, got {label!r} for "
                f"{counted(counts[label], 'sample')}, which {MISSING[label]} for a missing value: "
                f"remove these rows, or rename the class{_OTHERWISE}"
            )
        other = seen.setdefault(_plain(label), label)
        if other != label:
            alike = unicodedata.normalize("NFC", label) == unicodedata.normalize("NFC", other)
            how = ", the same letters in two Unicode encodings" if alike else ""
            raise DataError(
                f"{where}: expected one spelling of every class, got {other!r} and {label!r}{how}: "
                f"use one name{_OTHERWISE}"
            )
        if any(unicodedata.category(letter) == "Cc" for letter in label):
            raise DataError(
                f"{where}: expected printable class names, got {label!r} with a control character, "
                f"such as a tab or a line break: if it is not a label, name the label column with "
                f"--label-column; otherwise rename it{_OTHERWISE}"
            )


def _plain(label: str) -> str:
    """Reduce a label to its visible content."""
    # Normalize twice, because casefold can produce letters that NFKC changes, and vice versa.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", label).casefold())
    # Zero-width spaces, soft hyphens and direction marks, which spreadsheets leave behind.
    unseen = {letter for letter in folded if unicodedata.category(letter) == "Cf"}
    return " ".join(folded.translate({ord(each): None for each in unseen}).split())


def _refuse_lists(counts: Mapping[str, int], where: str) -> None:
    """Reject labels that are lists of others, or lists of 0 and 1."""
    # In many countries, a comma is the decimal separator.
    if all(map(_NUMBER.fullmatch, counts)):
        return
    lists = [label for label in counts if _SEVERAL.search(label)]
    parts = {part.strip() for label in counts for part in _SEVERAL.split(label)}
    # A comma alone does not make a list: "fish, other" may be a class. If splitting leaves fewer
    # distinct words than labels, the same words are combined repeatedly.
    switches = all(map(_SWITCHES.fullmatch, counts))
    combined = len(lists) > 1 and len(parts) < len(counts)
    if not combined and len(spaced := _spaced(counts)) > 1:
        lists, combined = spaced, True
    if switches or combined:
        raise DataError(
            f"{where}: expected one label per sample, got lists of them, such as "
            f"{_some(lists or list(counts))}: use --task multi-label to predict several classes "
            f"per sample, or keep one label each{_OTHERWISE}"
        )


def _spaced(labels: Collection[str]) -> list[str]:
    """Return labels that combine other labels with spaces, such as ``cat dog`` for cat and dog."""
    words = {label: label.split() for label in labels}
    return [label for label in labels if len(words[label]) > 1 and words.keys() >= {*words[label]}]


def _some(labels: Collection[str]) -> str:
    return ", ".join(map(repr, list(labels)[:_LISTED]))


class Sample(NamedTuple):
    """Properties of a sample that duplicates are detected by."""

    name: str
    """Name of the sample in messages."""
    label: object
    content: str
    """Content or its digest; empty if unknown."""
    place: str = ""
    """Line and table of the sample, which tell samples of the same name apart."""


def check_same(parts: Sequence[Sequence[Sample]], where: str) -> list[str]:
    """Detect duplicate samples, and reject a test set that consists mostly of training samples.

    Args:
        parts: training and test samples.
        where: file or folder of the data, for errors.

    Returns:
        Messages for the user: some test samples, but not most, are training samples; identical
        samples have different labels.

    Raises:
        DataError: more than half of the test samples are training samples.

    Example:
        >>> train = [Sample("a", "cat", "1"), Sample("b", "dog", "2")]
        >>> test = [Sample("c", "dog", "3"), Sample("d", "dog", "2"), Sample("e", "cat", "4")]
        >>> check_same([train, test], "pets")
        ['pets: 1 of 3 test samples is also in the training set: d is the same as b']
        >>> check_same([[*train, Sample("f", "dog", "1")], []], "pets")
        ['pets: 1 sample is the same as one with another label: f is the same as a']
    """
    train, test = parts
    # Keep the first of several identical samples.
    trained = {each.content: each for each in reversed(train)}
    first = {each.content: each for each in reversed([*train, *test])}
    # Unknown contents are not identical.
    trained.pop("", None)
    notes = []
    both = [(each, trained[each.content]) for each in test if each.content in trained]
    if both:
        verb = "is" if len(both) == 1 else "are"
        words = f"{len(both):,} of {len(test):,} test samples {verb} also in the training set"
        if 2 * len(both) > len(test):
            raise DataError(
                f"{where}: {words} ({_alike(both)}), so the score would say little about new data: "
                f"use test samples that are not in the training set"
            )
        notes.append(f"{where}: {words}: {_alike(both)}")
    # This is not an error: a model can still be trained, and only the user knows the right label.
    torn = [(each, first[each.content]) for each in [*train, *test] if each.content]
    torn = [(each, other) for each, other in torn if each.label != other.label]
    if torn:
        which = "1 sample is" if len(torn) == 1 else f"{len(torn):,} samples are"
        notes.append(f"{where}: {which} the same as one with another label: {_alike(torn)}")
    return notes


def _alike(pairs: Sequence[tuple[Sample, Sample]]) -> str:
    one, other = (
        readable(Path(sample.name)) + (f" ({readable(Path(sample.place))})" if sample.place else "")
        for sample in pairs[0]
    )
    return f"{one} is the same as {other}"


def untested(classes: Sequence[str], tested: Collection[str], where: str) -> list[str]:
    """Report classes without a test sample."""
    missing = [name for name in classes if name not in tested]
    if not missing:
        return []
    note = (
        f"{where}: the test set has no samples of {len(missing)} of the {len(classes)} classes "
        f"({listed(missing)}), so the score does not cover them"
    )
    return [note]

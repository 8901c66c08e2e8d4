"""Which classes are taken for which: the matrix, and the confusions that are most frequent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onefold.jobs.report.markup import Markup, card, scrolling, section, table, tag
from onefold.jobs.report.style import SHADES
from onefold.jobs.report.words import percent

__all__ = ["confusion_section", "frequent_confusions"]

_MANY_CLASSES = 12
"""More than these are drawn small, with headings upright and without shares."""
_TOLD_CONFUSIONS = 10

Counts = Sequence[Sequence[int]]  # (classes, classes): true class by row, predicted by column


def frequent_confusions(counts: Counts) -> list[tuple[int, int, int]]:
    """Mistakes as (true class, predicted class, how often), the most frequent first.

    >>> frequent_confusions([[5, 1], [3, 7]])
    [(1, 0, 3), (0, 1, 1)]
    """
    mistakes = [
        (true, predicted, count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count > 0
    ]
    return sorted(mistakes, key=lambda mistake: -mistake[2])


def confusion_section(examples: Mapping[str, Any]) -> Markup:
    """The matrix and what stands out in it; nothing where the job has no classes."""
    counts: Counts = examples.get("confusion") or ()
    if not counts:
        return Markup("")
    classes = [str(name) for name in examples.get("classes") or range(len(counts))]
    return section(
        "Confusion matrix",
        card(_matrix(counts, classes)),
        tag("h3", "Most frequent confusions"),
        _confusions(counts, classes),
    )


def _matrix(counts: Counts, classes: Sequence[str]) -> Markup:
    many = len(classes) > _MANY_CLASSES
    head = [tag("th", tag("span", name, title=name), scope="col") for name in classes]
    corner = tag("th", "true \N{RIGHTWARDS ARROW} predicted", scope="col")
    rows = [_row(true, row, classes, many=many) for true, row in enumerate(counts)]
    caption = "Test samples by true class (rows) and predicted class (columns)"
    inside = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", corner, *head)),
        tag("tbody", *rows),
        class_="many confusion" if many else "confusion",
    )
    return scrolling(inside, label=caption)


def _row(true: int, row: Sequence[int], classes: Sequence[str], *, many: bool) -> Markup:
    total = sum(row)
    cells = [
        _cell(
            count,
            total,
            right=true == predicted,
            many=many,
            title=f"{classes[true]} taken for {classes[predicted]}",
        )
        for predicted, count in enumerate(row)
    ]
    name = classes[true]
    return tag("tr", tag("th", tag("span", name, title=name), scope="row"), *cells)


def _cell(count: int, total: int, *, right: bool, many: bool, title: str) -> Markup:
    """One count, the darker the larger its share of the true class; small shares are seen too."""
    if not count:
        return Markup("<td></td>") if many else tag("td", "0")
    share = count / total
    shade = f"{'r' if right else 'w'}{max(1, round(math.sqrt(share) * SHADES))}"
    if many:
        return tag("td", f"{count}", class_=shade, title=title)
    return tag("td", f"{count:,}", tag("small", percent(share)), class_=shade)


def _confusions(counts: Counts, classes: Sequence[str]) -> Markup:
    mistakes = frequent_confusions(counts)
    if not mistakes:
        return tag("p", "There are none: every test sample was classified rightly.")
    rows = [
        [classes[true], classes[predicted], f"{count:,}", percent(count / sum(counts[true]))]
        for true, predicted, count in mistakes[:_TOLD_CONFUSIONS]
    ]
    headings = ["true class", "taken for", "how often", "share of the true class"]
    return card(table(headings, rows, caption="The most frequent first", words=2))

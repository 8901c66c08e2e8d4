"""HTML as values: whatever text is not `Markup` already is escaped where it enters an element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from onefold.jobs.report.style import STYLE

__all__ = [
    "Markup",
    "card",
    "definitions",
    "is_page",
    "joined",
    "page",
    "scrolling",
    "section",
    "table",
    "tag",
]

_WITHOUT_CONTENT = {"br", "img", "meta"}

_NOTHING_FROM_ELSEWHERE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""So that the browser itself refuses what the page should not hold: scripts, and other hosts."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: object) -> Markup:
    """An element.

    Args:
        name: of the element.
        content: what is in it, one after the other; plain text is escaped.
        attributes: as Python can write them, ``class_`` for ``class`` and ``aria_label`` for
            ``aria-label``; those that are None are left out.

    Returns:
        Its HTML.

    Example:
        >>> tag("p", "a < b", tag("b", "c"), class_="note")
        '<p class="note">a &lt; b<b>c</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _WITHOUT_CONTENT:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after the other; plain text is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def section(heading: str, *content: str) -> Markup:
    """A part of the page under its heading."""
    return tag("section", tag("h2", heading), *content)


def card(*content: str) -> Markup:
    """What belongs together, in a box."""
    return tag("div", *content, class_="card")


def scrolling(content: str, *, label: str) -> Markup:
    """A box that scrolls by itself, with the keyboard too, where its content is too wide."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, words: int = 1
) -> Markup:
    """A table; the first cell of every row names the row.

    Args:
        headings: of the columns.
        rows: their cells.
        caption: what the table shows.
        words: number of columns, from the left, that hold words; the others hold numbers.
    """
    kinds = ["" if index < words else "number" for index in range(len(headings))]
    head = [
        tag("th", text, scope="col", class_=kind or None)
        for text, kind in zip(headings, kinds, strict=True)
    ]
    body = [tag("tr", *_cells(row, kinds)) for row in rows]
    inside = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
    )
    return scrolling(inside, label=caption)


def _cells(row: Sequence[str], kinds: Sequence[str]) -> list[Markup]:
    first = tag("th", row[0], scope="row")
    others = zip(row[1:], kinds[1:], strict=True)
    return [first, *(tag("td", text, class_=kind or None) for text, kind in others)]


def definitions(pairs: Iterable[tuple[str, str]], *, class_: str) -> Markup:
    """Names with what they stand for."""
    items = [tag("div", tag("dt", name), tag("dd", meaning)) for name, meaning in pairs]
    return tag("dl", *items, class_=class_)


def page(title: str, *content: str) -> str:
    """A whole page that needs nothing but itself."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_NOTHING_FROM_ELSEWHERE),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", tag("main", *content))}</html>\n'


def is_page(head: bytes) -> bool:
    """Whether a file that begins so is a page that `page` has made.

    >>> is_page(page("title").encode()), is_page(b"<!doctype html><title>mine</title>")
    (True, False)
    """
    policy = escape(_NOTHING_FROM_ELSEWHERE).encode()
    return head.startswith(b"<!doctype html>") and policy in head

"""Makes pages from the templates beside this module; all text of a run is escaped in them."""

from __future__ import annotations

from functools import cache
from html import escape

from jinja2 import Environment, PackageLoader, StrictUndefined

from onefold.jobs.report import words
from onefold.system.words import counted

__all__ = ["is_page", "page"]

_NOTHING_FROM_ELSEWHERE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A policy by which the browser itself refuses what no page of ours holds: scripts, other hosts."""

_QUOTES = {"&#34;": "&quot;", "&#39;": "&#x27;"}
"""Spelling of quotes by jinja, and by Python's escape, with which `is_page` finds the policy."""


def page(template: str, **values: object) -> str:
    """Make a page that needs no other file.

    Args:
        template: name of the template's file.
        values: what the template shows. Plain text is escaped; markupsafe.Markup is HTML already.

    Raises:
        LaunchError: the page has a chart, and matplotlib is not installed.
    """
    text = _environment().get_template(template).render(values)
    for spelling, ours in _QUOTES.items():
        text = text.replace(spelling, ours)
    return text


def is_page(head: bytes) -> bool:
    """Whether the beginning of a file is that of a page that `page` has made.

    >>> ours = page("page.html.j2", title="title").encode()
    >>> is_page(ours[:512]), is_page(b"<!doctype html><title>mine</title>")
    (True, False)
    """
    # The policy marks a page as ours: hardly any other file has this one at its very beginning.
    policy = escape(_NOTHING_FROM_ELSEWHERE).encode()
    return head.startswith(b"<!doctype html>") and policy in head


@cache
def _environment() -> Environment:
    # StrictUndefined, or a misspelt name in a template would leave a gap that nobody notices.
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {name: getattr(words, name) for name in words.__all__}
    environment.globals["counted"] = counted
    environment.globals["policy"] = _NOTHING_FROM_ELSEWHERE
    return environment

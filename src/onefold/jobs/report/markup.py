"""Pages from the templates beside this module; what a run says is escaped where it enters one."""

from __future__ import annotations

from functools import cache
from html import escape

from jinja2 import Environment, PackageLoader, StrictUndefined

from onefold.jobs.report import words
from onefold.system.words import counted

__all__ = ["is_page", "page"]

_NOTHING_FROM_ELSEWHERE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""So that the browser itself refuses what the page should not hold: scripts, and other hosts."""

_QUOTES = {"&#34;": "&quot;", "&#39;": "&#x27;"}
"""As jinja escapes them, and as Python does, by whose spelling `is_page` knows a policy."""


def page(template: str, **values: object) -> str:
    """A whole page that needs nothing but itself.

    Args:
        template: name of its file.
        values: what it shows. Plain text is escaped; markupsafe.Markup is HTML already.

    Raises:
        LaunchError: there is a chart, and matplotlib is not installed.
    """
    text = _environment().get_template(template).render(values)
    for spelling, ours in _QUOTES.items():
        text = text.replace(spelling, ours)
    return text


def is_page(head: bytes) -> bool:
    """Whether a file that begins so is a page that `page` has made.

    >>> ours = page("page.html.j2", title="title").encode()
    >>> is_page(ours[:512]), is_page(b"<!doctype html><title>mine</title>")
    (True, False)
    """
    policy = escape(_NOTHING_FROM_ELSEWHERE).encode()
    return head.startswith(b"<!doctype html>") and policy in head


@cache
def _environment() -> Environment:
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

"""Reading pages back: whether they are sound, and what they say."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

WITHOUT_END = {"meta", "img", "br", "wbr"}


class Page(HTMLParser):
    """A page's elements, headings and rows; an element that is not closed in order is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.headings: list[tuple[int, str]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        """What a reader reads, each piece of text after the other."""
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> dict[str, str]:
        found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", self.source)
        return {name: " ".join(re.sub("<[^>]*>", " ", text).split()) for name, text in found}

    def course(self, title: str) -> str:
        """How a chart is described to those who do not see it; none where there is no chart."""
        told = [label for label in self.attributes("aria-label") if label.startswith(f"{title} by")]
        return told[0].partition(". ")[2] if told else ""

    def attributes(self, name: str) -> list[str]:
        return [given[name] for _, given in self.elements if name in given]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in WITHOUT_END:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if self.headings and self.open and re.fullmatch("h[1-6]", self.open[-1]):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] = " ".join(f"{self.rows[-1][-1]} {data}".split())


def check_sound(page: Page) -> None:
    """A page asks for no script, no file and no other host, and everybody can read it."""
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    names = [name for name, _ in page.elements]
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(names)
    assert all(source.startswith("data:image/png;base64,") for source in page.attributes("src"))
    hrefs = [*page.attributes("href"), *page.attributes("xlink:href")]
    assert not [href for href in hrefs if re.match(r"[a-z+]+:|//", href)]
    assert not re.search(r"url\(\s*[\"']?\s*(?!#)|@import", page.source)
    assert not [name for _, given in page.elements for name in given if name.startswith("on")]
    assert all(given.get("alt") for name, given in page.elements if name == "img")
    pictures = [given for name, given in page.elements if name == "svg"]
    assert all("aria-label" in given or "aria-hidden" in given for given in pictures if given)
    assert names.count("table") == names.count("caption")
    assert all("scope" in given for name, given in page.elements if name == "th")
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"|url\()#([^\")]+)", page.source)) <= set(ids)

"""Code and docs use American spelling, as PyTorch does."""

import re

from tests.conftest import ROOT
from tests.tables import for_each

SUFFIXES = {".py", ".md", ".j2", ".toml", ".css", ".svg"}
LEFT_OUT = ("docs/studies/log.md", "docs/inventories/", "tests/test_spelling.py")
"""A dated log, names of other libraries, and the words below."""
ENDING = r"is(?:e[sdr]?|ing|ation)\b"
STEMS = (
    *("normal", "initial", "synchron", "serial", "optim", "minim", "maxim", "recogn", "organ"),
    *("general", "special", "vector", "random", "quant", "penal", "priorit", "memor", "summar"),
)
WORDS = (
    *("colour", "grey", "neighbour", "behaviour", "favour", "honour", "labelled", "modelling"),
    *("centre", "spelt", "learnt", "towards", "catalogue", "licence", "whilst", "artefact"),
    *("analyse", "judgement"),
)
BRITISH = re.compile(
    "|".join([*WORDS, rf"\b\w*(?:{'|'.join(STEMS)}){ENDING}"]), flags=re.IGNORECASE
)


@for_each(
    "room", ["src", "packages", "tests", "docs", "examples", "benchmarks", "README.md", "Makefile"]
)
def test_words_are_american(room: str) -> None:
    place = ROOT / room
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in ([place] if place.is_file() else sorted(place.rglob("*")))
        if path.suffix in SUFFIXES or path == place
        if path.is_file() and not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT)
        for word in BRITISH.findall(path.read_text())
    ]
    assert found == []

"""Train with other libraries, plain and with onefold: ``python -m ecosystem [NAME ...]``.

Each folder beside this file belongs to a library:

- ``plain.py``: a plain loop in the library's idiom, which prints a digest of the trained weights.
- ``with_onefold.py``: the same script moved to onefold.
- ``about.toml``: ``library``, the name of the distribution; ``remark``, for the page; ``random`` if
  the plain loop draws other random numbers; and if onefold must refuse the script, ``refused``
  (words of the message) and ``stage``.
- ``prepare.py``: if it exists, writes files that both scripts read.

All runs of a library must have equal digests or be refused as expected; else the exit code is 1.
The results are written to ``docs/reference/works-with.md``. With names, only their rows change.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
PAGE = ROOT / "docs" / "reference" / "works-with.md"
# Loaded by its path: a library may install a package called `examples`.
lines_changed = runpy.run_path(str(ROOT / "examples/ports/count_lines.py"))["lines_changed"]
LIMIT_S = 300
DIGEST = re.compile(r"^sha256 ([0-9a-f]{64})$", re.MULTILINE)
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Failed)): (.+)$", re.MULTILINE)
KILLED_AFTER, SAVED, SAVE_EVERY = 17, 15, 5
"""Steps of the interrupted run: its last one and its newest checkpoint, both in the second pass."""
OFFLINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "WANDB_MODE": "offline",
}
START = "| library | version | result | lines changed | remark |\n|---|---|---|---|---|\n"


class Outcome(NamedTuple):
    """How a run ended: with a digest, or with an error."""

    digest: str
    error: str


class Verdict(NamedTuple):
    """The result for a library, and the stage and message that explain it."""

    result: str
    stage: str = ""
    message: str = ""

    def __str__(self) -> str:
        return self.result + (f" ({self.stage})" if self.stage else "")


class Library:
    """The scripts of a library, and the folder in which they run."""

    def __init__(self, name: str, folder: Path) -> None:
        self.scripts, self.folder = FOLDER / name, folder
        self.about = about_of(name)

    def run(self, script: str, *options: str, shards: int = 0, kill: str = "") -> Outcome:
        """Run a script by Python itself, or with options by ``onefold run``."""
        command = ["-m", "onefold", "run", *options] if options else []
        given = {"PYTHONPATH": str(ROOT), "ECOSYSTEM_SHARDS": str(shards)}
        done = subprocess.run(
            [sys.executable, *command, str(self.scripts / script)],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            cwd=self.folder,
            env=os.environ | OFFLINE | given | ({"ECOSYSTEM_KILL": kill} if kill else {}),
        )
        digests = DIGEST.findall(done.stdout)
        if done.returncode == 0 and digests:
            return Outcome(digests[-1], "")
        return Outcome("", error_of(done.stderr) or f"exit {done.returncode}: {done.stderr[-300:]}")

    def compare(self) -> Verdict:
        """Make all runs, until one of them fails, is refused or differs."""
        if (self.scripts / "prepare.py").exists():
            self.run("prepare.py")
        plain = self.run("plain.py")
        if not plain.digest:
            return Verdict("fails", "plain loop", plain.error)
        one = self.run("with_onefold.py", shards=1)
        if not one.digest or (one.digest != plain.digest and not self.about.get("random")):
            return unlike("one shard", one)
        alone = self.run("with_onefold.py", "--devices", "cpu:1", shards=4)
        if not alone.digest:
            return unlike("four shards", alone)
        both = self.run("with_onefold.py", "--devices", "cpu:2", shards=4)
        if both.digest != alone.digest:
            return unlike("two devices", both)
        saved = self.folder / "saved"
        options = ("--checkpoint", str(saved), "--save-every", str(SAVE_EVERY))
        stopped, resumed = (
            self.run("with_onefold.py", "--devices", f"cpu:{n}", *options, shards=4, kill=kill)
            for n, kill in ((1, f"{KILLED_AFTER} {SAVED} {saved}"), (2, ""))
        )
        if "SIGKILL" not in stopped.error:
            return unlike("checkpoint", stopped)
        return Verdict("works") if resumed.digest == alone.digest else unlike("resume", resumed)


def about_of(name: str) -> dict[str, Any]:
    """Read what a folder says of its library."""
    return tomllib.loads((FOLDER / name / "about.toml").read_text(encoding="utf-8"))


def unlike(stage: str, found: Outcome) -> Verdict:
    """Return the verdict on a run that did not end with the expected digest."""
    return Verdict("differs" if found.digest else "refused", stage, found.error)


def error_of(printed: str) -> str:
    """Return the first line of the first error that a run printed."""
    found = ERROR.search(printed)
    return f"{found[1]}: {found[2]}" if found else ""


def as_expected(verdict: Verdict, about: dict[str, Any]) -> bool:
    """Whether a verdict is the one that the folder of the library announces."""
    if "refused" not in about:
        return verdict.result == "works"
    refused = (verdict.result, verdict.stage) == ("refused", about["stage"])
    return refused and about["refused"] in verdict.message


def title_of(about: dict[str, Any]) -> str:
    """Return the first cell of a library's row."""
    return str(about.get("title", about["library"]))


def row_of(name: str, verdict: Verdict) -> str:
    """Return the row of a library."""
    about = about_of(name)
    pair = (FOLDER / name / "plain.py", FOLDER / name / "with_onefold.py")
    lines_out, lines_in = lines_changed(*pair)
    cells = [title_of(about), version(about["library"]), str(verdict), f"-{lines_out} +{lines_in}"]
    return f"| {' | '.join([*cells, about['remark']])} |"


def with_rows(page: str, new: dict[str, str], titles: set[str]) -> str:
    """Return the page with new rows, without rows of libraries that have no folder."""
    head, rest = page.split(START)
    table = "".join(takewhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    old = {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines()}
    kept = {title: row for title, row in (old | new).items() if title in titles}
    rows = [kept[title] for title in sorted(kept, key=str.lower)]
    return "".join([head, START, *(f"{row}\n" for row in rows), rest.removeprefix(table)])


def main(names: list[str]) -> int:
    """Compare some libraries or all of them, and write the page; 1 after an unexpected verdict."""
    known = sorted(path.parent.name for path in FOLDER.glob("*/about.toml"))
    surprises = 0
    for name in names or known:
        with tempfile.TemporaryDirectory() as folder:
            verdict = Library(name, Path(folder)).compare()
        expected = as_expected(verdict, about_of(name))
        surprises += not expected
        print(f"{name}: {verdict}{'' if expected else ', NOT EXPECTED'} {verdict.message}".rstrip())
        new = {title_of(about_of(name)): row_of(name, verdict)}
        titles = {title_of(about_of(each)) for each in known}
        page = with_rows(PAGE.read_text(encoding="utf-8"), new, titles)
        PAGE.write_text(page, encoding="utf-8")
    return int(surprises > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

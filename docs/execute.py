"""Runs the examples of the pages: ``python -m docs.execute [--write] [PAGE ...]``.

A page is run from top to bottom, in a temporary folder that also contains ``examples``:

- A ``python`` block that begins with a line ``# NAME.py`` is this file. A later block without such
  a line continues the file.
- A ``console`` block has commands, each after ``$ ``, with their output below. A line ``...``
  matches any omitted lines.
- A ``diff`` block that begins with ``# BEFORE -> AFTER`` is the difference of two files.

- A ``python`` block that belongs to no file is a fragment: a test runs it separately, with the
  names that pages use. A test parses the onefold commands of ``sh`` blocks.

A notebook is run in a kernel. Its results and stdout are compared, without bars, percentages and
the remarks that depend on the speed.

A ``py`` block is not run. A command must succeed and print the output of the page. Decimal numbers
and fingerprints may differ, because they depend on the processor, but a fingerprint that the page
shows twice must be printed twice. ``--write`` writes the printed output into the pages.

A page with a comment ``<!-- made on MACHINE -->`` has pictures and samples that its commands make.
On this machine, with the packages that MACHINE names, each output and each picture must have the
bytes of the page. On another one, only the fingerprints are compared with each other. ``--write``
also renews the pictures and the comment.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from examples.ports.count_lines import compared
from tests.golden import processor

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(python|console|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# ([\w./-]+\.py)\b[^\n]*\n")
PAIR = re.compile(r"# (\S+) -> (\S+)\n")
FINGERPRINT = re.compile(r"\b[0-9a-f]{16}\b")
NUMBER = re.compile(r"-?\d*\.\d+(?:e[+-]?\d+)?")
BY_SPEED = re.compile(r".*(?:\d%\|| is limited by ).*")
DRAWN = re.compile(r"[─-╿]")
MADE_ON = re.compile(r"<!-- made on (.*) -->")
PICTURE = re.compile(r"!\[[^\]]*\]\(([\w/-]+\.png)\)")
PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "pillow")
LEFT_OUT = "..."
LONG_S, LIMIT_S = 20, 600


def pages() -> list[Path]:
    """Return all pages, including README and CONTRIBUTING."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def notebooks() -> list[Path]:
    """Return all notebooks."""
    return sorted((ROOT / "docs").rglob("*.ipynb"))


def is_run(page: Path) -> bool:
    """Whether a page has outputs or diffs to compare."""
    if page.suffix == ".ipynb":
        return True
    blocks = BLOCK.findall(page.read_text())
    return any(kind == "console" or (kind == "diff" and PAIR.match(text)) for kind, text in blocks)


def files(page: Path) -> dict[str, str]:
    """Return the files that a page shows, by name."""
    found: dict[str, str] = {}
    name = None
    for kind, text in BLOCK.findall(page.read_text()):
        if kind != "python":
            continue
        if named := NAME.match(text):
            name = named[1]
            found[name] = text
        elif name is not None:
            found[name] += f"\n\n{text}"
    return found


def fragments(page: Path) -> list[str]:
    """Return the Python blocks before the first file of a page."""
    texts = [text for kind, text in BLOCK.findall(page.read_text()) if kind == "python"]
    return [*takewhile(lambda text: not NAME.match(text), texts)]


def run(page: Path, *, write: bool = False) -> list[str]:
    """Run a page.

    Args:
        page: the file.
        write: write the output into the page, unless the page omits lines, and copy the pictures
            that the commands made.

    Returns:
        A text for each command, diff and picture that differs from the page.
    """
    if page.suffix == ".ipynb":
        return run_notebook(page, write=write)
    wrong: list[str] = []
    known: dict[str, str] = {}
    text = page.read_text()
    made_on = MADE_ON.search(text)
    here = machine() if made_on else ""

    def same(shown: str, printed: str) -> bool:
        """Whether the output is that of the page, with the fingerprints of earlier commands."""
        if made_on is None:
            pairs = matched(shown, printed)
        elif here == made_on[1]:
            pairs = [] if shown == printed else None
        else:
            names = FINGERPRINT.findall(shown), FINGERPRINT.findall(printed)
            pairs = [*zip(*names, strict=True)] if len(names[0]) == len(names[1]) else None
        return pairs is not None and all(known.setdefault(a, b) == b for a, b in pairs)

    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        at = Path(folder)
        (at / "examples").symlink_to(ROOT / "examples")
        for name, script in files(page).items():
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            (at / name).write_text(script)

        def renewed(block: re.Match[str]) -> str:
            kind, text = block.groups()
            if kind == "console":
                new = "".join(_executed(text, at, wrong, same))
            elif kind == "diff" and (pair := PAIR.match(text)):
                new = pair[0] + difference(ROOT / pair[1], ROOT / pair[2])
                if new != text:
                    wrong.append(f"the difference is now:\n{new}")
            else:
                return block[0]
            return f"```{kind}\n{new}```"

        new = BLOCK.sub(renewed, text)
        for link in sorted({*PICTURE.findall(text)}) if made_on else ():
            made, shown = at / Path(link).name, page.parent / link
            if not made.exists():
                wrong.append(f"no command of the page makes {made.name}")
            elif write:
                shown.write_bytes(made.read_bytes())
            elif made_on and here == made_on[1] and made.read_bytes() != shown.read_bytes():
                wrong.append(f"{link} is another picture now")
    new = MADE_ON.sub(f"<!-- made on {here} -->", new)
    if write and new != text:
        page.write_text(new)
    return wrong


def run_notebook(page: Path, *, write: bool = False) -> list[str]:
    """Run a notebook; arguments and result are those of `run`."""
    import nbformat
    from nbclient import NotebookClient

    shown = nbformat.read(page, as_version=4)
    new = copy.deepcopy(shown)
    how = {"timeout": LIMIT_S, "record_timing": False, "coalesce_streams": True}
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        client = NotebookClient(new, resources={"metadata": {"path": folder}}, **how)
        quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)  # the kernel keeps a copy
        client.execute(env=environment(), **quiet)
    if write:
        nbformat.write(new, page)
    pairs = zip(shown.cells, new.cells, strict=True)
    texts = [(cell.source, _printed(cell), _printed(executed)) for cell, executed in pairs]
    return [f"{source}\nprints:\n{now}" for source, was, now in texts if not agrees(was, now)]


def _printed(cell: Any) -> str:
    """Return the results and the stdout of a cell, without all that depends on the speed."""
    outputs = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs]
    lines = [line for line in "\n".join(texts).splitlines() if line and not BY_SPEED.match(line)]
    return re.sub(r"\b\d+%", "#%", "\n".join(lines))


def _executed(
    text: str, at: Path, wrong: list[str], same: Callable[[str, str], bool]
) -> Iterator[str]:
    """Yield a block's commands with their current output, unless the page omits lines."""
    for command, shown in re.findall(
        r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE
    ):
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=at,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        if (seconds := time.monotonic() - begun) > LONG_S:
            print(f"{seconds:.0f} s: {command}", flush=True)
        printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
        if done.returncode != 0 or not same(shown, printed):
            wrong.append(f"$ {command}\nends with {done.returncode}, and prints:\n{printed}")
        yield f"$ {command}\n{shown if LEFT_OUT in shown.splitlines() else printed}"


def machine() -> str:
    """Name everything that decides the bits of a picture: the processor, and the packages."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{processor()}, Python {platform.python_version()}, {packages}"


def environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ONEFOLD_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = os.pathsep.join(str(ROOT / each) for each in ("src", "packages/onefold-jobs/src"))
    return {**kept, "PATH": path, "COLUMNS": "80", "PYTHONPATH": sources}


def agrees(shown: str, printed: str) -> bool:
    """Whether a command's output agrees with the page, except for numbers and drawn lines.

    >>> agrees("a 0.25\\n...\\nend\\n", "a 0.26\\nb\\nend\\n")
    True
    >>> agrees(f"{'a' * 16} {'a' * 16}", f"{'b' * 16} {'c' * 16}")
    False
    """
    return matched(shown, printed) is not None


def matched(shown: str, printed: str) -> list[tuple[str, str]] | None:
    """Return each fingerprint of the page with the printed one, if the output agrees."""
    parts = re.split(rf"^{re.escape(LEFT_OUT)}$", shown, flags=re.MULTILINE)
    texts = [" ".join(DRAWN.sub(" ", NUMBER.sub("#", part)).split()) for part in (*parts, printed)]
    named: dict[str, str] = {}

    def grouped(found: re.Match[str]) -> str:
        """Match a repeated fingerprint with the earlier one."""
        group = named.setdefault(found[0], f"f{len(named)}")
        known = group in made
        made.add(group)
        return f"(?P={group})" if known else f"(?P<{group}>[0-9a-f]{{16}})"

    made: set[str] = set()
    pattern = ".*".join(FINGERPRINT.sub(grouped, re.escape(text)) for text in texts[:-1])
    found = re.fullmatch(pattern, texts[-1])
    return [(name, found[group]) for name, group in named.items()] if found else None


def difference(before: Path, after: Path) -> str:
    """Return the difference of two scripts: every hunk, with one line of context.

    A hunk is headed by the function or class it is in, without line numbers, as docstrings of the
    two files are left out.
    """
    printed = compared(before, after, "--unified=1")
    hunks = printed[printed.index("\n@@ ") + 1 :]
    within = r"^@@ -\S+ \+\S+ @@(?: ((?:def|class) .*)|.*)$"
    hunks = re.sub(within, lambda hunk: f"@@ {hunk[1] or ''}", hunks, flags=re.MULTILINE)
    return "".join(f"{line.rstrip()}\n" for line in hunks.rstrip().splitlines())


def main() -> int:
    options = argparse.ArgumentParser(description="Run the examples of the pages.")
    options.add_argument("pages", nargs="*", type=Path, help="default: all that have commands")
    options.add_argument(
        "--write", action="store_true", help="write the printed output into the pages"
    )
    given = options.parse_args()
    chosen = given.pages or [page for page in (*notebooks(), *pages()) if is_run(page)]
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        ran = pool.map(lambda page: run(page.resolve(), write=given.write), chosen)
        for page, wrong in zip(chosen, ran, strict=True):
            print(
                f"{page.resolve().relative_to(ROOT)}: {len(wrong) or 'nothing'} differs", flush=True
            )
            failed += len(wrong)
            print(*wrong, sep="\n")
    return 1 if failed and not given.write else 0


if __name__ == "__main__":
    sys.exit(main())

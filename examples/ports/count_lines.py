"""Count the lines of a plain loop that change with onefold and with other libraries.

Prints a Markdown table of removed and added lines, as ``git diff --no-index --numstat`` counts them
from ``plain/NAME.py`` to ``NAME.py``, ``ddp/NAME.py`` and ``accelerate/NAME.py``, each without its
docstring.

    python examples/ports/count_lines.py
"""

from __future__ import annotations

import ast
import subprocess
import tempfile
from pathlib import Path

PORTS = Path(__file__).resolve().parent
WAYS = {"onefold": PORTS, "DDP": PORTS / "ddp", "Accelerate": PORTS / "accelerate"}
ALIKE_EVERYWHERE = ("--no-ext-diff", "--no-color", "--diff-algorithm=myers")
"""Options that override the user's own git settings."""


def without_docstring(script: Path) -> str:
    """Return a script's text without its docstring and the empty lines after it."""
    text = script.read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0]
    return "".join(text.splitlines(keepends=True)[docstring.end_lineno :]).lstrip("\n")


def compared(before: Path, after: Path, *options: str) -> str:
    """Return the output of ``git diff`` for two scripts without their docstrings."""
    with tempfile.TemporaryDirectory() as folder:
        for name, script in (("before", before), ("after", after)):
            (Path(folder) / name).write_text(without_docstring(script), encoding="utf-8")
        done = subprocess.run(
            ["git", "diff", "--no-index", *ALIKE_EVERYWHERE, *options, "before", "after"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,  # exit code 1: the files differ
        )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"git diff {before} {after} failed: {done.stderr}")
    return done.stdout


def lines_changed(before: Path, after: Path) -> tuple[int, int]:
    """Return the number of removed and of added lines from ``before`` to ``after``."""
    found = compared(before, after, "--numstat")
    if not found:
        return 0, 0
    lines_in, lines_out = found.split()[:2]
    return int(lines_out), int(lines_in)


def counts() -> dict[str, dict[str, tuple[int, int]]]:
    """Return removed and added lines by script and library, for existing scripts."""
    return {
        plain.stem: {
            way: lines_changed(plain, folder / plain.name)
            for way, folder in WAYS.items()
            if (folder / plain.name).exists()
        }
        for plain in sorted((PORTS / "plain").glob("*.py"))
    }


def table() -> str:
    """Return the Markdown table of all counts; a cell is empty if there is no such script."""
    lines = [f"| script | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    for name, found in counts().items():
        cells = ("-{} +{}".format(*found[way]) if way in found else "" for way in WAYS)
        lines.append(f"| {name}.py | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

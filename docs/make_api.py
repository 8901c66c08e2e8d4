"""Makes a page of each public module from its docstrings: `python -m docs.make_api FOLDER`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

MODULES = (
    "onefold",
    "onefold.integrations.loggers",
    "onefold.integrations.transformers",
)
"""With what they make public."""


def make(folder: Path) -> None:
    """Write the pages.

    Args:
        folder: made if it is not there; its ``index.html`` leads to all of them.

    Raises:
        UserWarning: a docstring or a module cannot be read.
    """
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("expected the folder for the pages: python -m docs.make_api FOLDER")
    make(Path(sys.argv[1]))

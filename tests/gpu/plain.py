"""Runs test modules of this folder without pytest: ``python -m tests.gpu.plain MODULE LINES``.

Functions whose names begin with ``test_`` are called with every case that `each` gives them, and
with a folder where they take ``tmp_path``. What became of each is written to a file at once, as one
line of JSON.
"""

import importlib
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import SkipTest

from tests.gpu.device import cases_of

__all__ = ["main"]


def main(module: str, lines: Path) -> int:
    """Run all tests of a module; 1 if one of them failed."""
    # PyTorch looks for it once, when cuBLAS is first used, and in some tests a script is the first.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    failed = False
    for name, test in vars(importlib.import_module(f"tests.gpu.{module}")).items():
        if name.startswith("test_") and callable(test):
            for label, arguments in calls_of(test):
                line = {"test": f"{module}.py::{name}{label}", **outcome_of(test, arguments)}
                failed |= line["outcome"] == "failed"
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(line["outcome"], line["test"], line["text"], flush=True)
    return int(failed)


def calls_of(test: Callable[..., None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every call of a test that its cases ask for: a label, and the arguments."""
    cases = cases_of(test)
    for numbered in product(*(enumerate(values) for _, values in cases)):
        arguments = {name: value for (name, _), (_, value) in zip(cases, numbered, strict=True)}
        plain = (str, int, float, type(None))
        words = [
            str(v if isinstance(v, plain) else f"{name}{n}")
            for name, (n, v) in zip(arguments, numbered, strict=True)
        ]
        yield (f"[{'-'.join(words)}]" if cases else ""), arguments


def outcome_of(test: Callable[..., None], arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a test once, and say how it ended."""
    start = time.monotonic()
    outcome, text = "passed", ""
    with tempfile.TemporaryDirectory() as folder:
        if "tmp_path" in inspect.signature(test).parameters:
            arguments = {**arguments, "tmp_path": Path(folder)}
        try:
            test(**arguments)
        except SkipTest as why:
            outcome, text = "skipped", str(why)
        except Exception:
            outcome, text = "failed", traceback.format_exc()
    return {"outcome": outcome, "seconds": round(time.monotonic() - start, 2), "text": text}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))

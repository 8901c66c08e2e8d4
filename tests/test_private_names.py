"""Tests use public names of onefold: the exceptions are few, and listed here."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SOURCES = (ROOT / "src" / "onefold", ROOT / "packages" / "onefold-jobs" / "src")

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("apart.py", "_live"): "tells in which memory a tensor lies",
    ("checkpoint/inprocess.py", "_trainers"): "each of its starts counts trainers anew",
    ("placement/test_early.py", "_start_next"): "tells when a part of a sum leaves",
    ("step/test_engine.py", "_finite"): "to look late happens on accelerators alone",
    ("step/test_engine.py", "_is_late"): "to look late happens on accelerators alone",
    (
        "exchange/test_attempts.py",
        "_stores",
    ): "stores that the process keeps, of attempts that are over",
    ("exchange/together.py", "_Options"): "PyTorch's, of a group by gloo",
    ("exchange/together.py", "_devices"): "PyTorch's, of a group by gloo",
    ("gpu/net.py", "_trainers"): "each of its runs counts trainers anew",
    ("inside.py", "_session"): "the one way into a trainer",
    ("data_order/test_samplers.py", "_PART"): "a part of an order is 131,072 samples long",
    ("data_order/test_samplers.py", "_PART_BATCHES"): "a part of an order is 131,072 samples long",
    ("test_compile.py", "_MANY_SHAPES"): "the real number takes many compilations",
    ("test_compile.py", "_SHAPES"): "the real number takes many compilations",
    ("pretended/test_captured.py", "_EAGER"): "the problems have few steps",
    ("pretended/test_captured.py", "_FIRST_STEPS"): "the problems have few steps",
    ("pretended/test_captured.py", "_checked"): "the problems name CPU devices",
    ("pretended/test_captured.py", "_default"): "the problems name CPU devices",
    ("tools/test_registry.py", "_progress"): "trainers of earlier tests would be compared too",
    ("tools/test_registry.py", "_trainers"): "each of its runs counts trainers anew",
    ("tools/verifying/compared.py", "_progress"): "trainers of earlier tests would be compared too",
    ("tools/verifying/test_verifying.py", "_LONGEST"): "the real limit is 100,000 steps",
    ("tools/verifying/test_verifying.py", "_READ_ON"): "the real limit is 1,000 batches",
    ("warm.py", "_pid"): "Python's, of a process that it believes to have started",
}
"""Why a file below tests/ uses a private name of onefold."""
MOST = 40
THEIRS = {
    "_C",
    "_asdict",
    "_buffers",
    "_fields",
    "_modules",
    "_parameters",
    "_render_traceback_",
    "_replace",
}
"""What Python, PyTorch and IPython have under such names."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Names of functions, classes, variables and attributes that a file itself makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def used(tree: ast.AST) -> Iterator[str]:
    """Names of attributes and imports, and texts that may be names for ``monkeypatch``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2]


def test_private_names_are_listed_with_a_reason() -> None:
    private = {
        name
        for source in SOURCES
        for path in source.rglob("*.py")
        for name in defined(ast.parse(path.read_text()))
        if is_private(name) and name not in THEIRS
    }
    assert len(private) > 100
    found = set()
    for path in set(TESTS.rglob("*.py")) - {TESTS / "mutants.py", Path(__file__)}:
        tree = ast.parse(path.read_text())
        foreign = private.difference(defined(tree)).intersection(used(tree))
        found |= {(path.relative_to(TESTS).as_posix(), name) for name in foreign}
    assert sorted(found) == sorted(EXCEPTIONS)
    assert len(EXCEPTIONS) <= MOST

"""Programs that are built on onefold see the type of every result."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tables import for_each

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    {
        module
        for page in (ROOT / "docs" / "reference" / "api").glob("*.md")
        for module in re.findall(r"automodule:: (\S+)", page.read_text())
    }
    | {"onefold"}
)
"""Modules that the reference describes."""

EXCEPTIONS = {
    "onefold.Record.steps": "a column has the dtype of its values",
    "onefold.Record.shards": "a column has the dtype of its values",
    "onefold.Record.blocks": "a column has the dtype of its values",
    "onefold.Record.checkpoints": "a column has the dtype of its values",
    "onefold.RunOptions.tools": "a value that the commands pass to their own tools",
    "onefold.files.parse_json": "as json.loads",
    "onefold.cli.LateCommand.make_context": "typer calls it",
}
"""Results that contain Any, and why."""


def names_of(module: str) -> list[str]:
    """The public names of a module, without importing it: transformers takes seconds."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


@for_each("name", MODULES)
def test_every_public_name_is_used(name: str) -> None:
    tree = ast.parse((ROOT / "tests" / "typed_use.py").read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    known = {f"{name.rpartition('.')[2]}.{each}" for each in names_of(name)}
    # Modules are public names of onefold, too.
    known -= {f"onefold.{module.rpartition('.')[2]}" for module in MODULES}
    assert sorted(known - used) == []
    assert known


def results(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of what a function returns, or of what a class has and its methods return."""
    # Names that a module imports for type checkers alone, such as Checkpoint.
    others: dict[str, Any] = {}
    for module in ("onefold.checkpoint.folder", "onefold.core.values", "onefold.passes.evaluation"):
        others |= vars(importlib.import_module(module))
    if inspect.isclass(value):
        known = vars(sys.modules[value.__module__])
        for field, kind in inspect.get_annotations(value).items():
            if not field.startswith("_"):
                given = {**others, **known}
                yield f"{name}.{field}", eval(kind, given) if isinstance(kind, str) else kind
        for part, method in vars(value).items():
            if not part.startswith("_") or part in ("__call__", "__iter__", "__enter__"):
                function = method.fget if isinstance(method, property) else method
                yield from results(f"{name}.{part}", getattr(function, "__func__", function))
    elif inspect.isfunction(value):
        known = vars(sys.modules[value.__module__])
        yield name, typing.get_type_hints(value, {**others, **known}).get("return")


def contains_any(kind: Any) -> bool:
    return kind is Any or any(map(contains_any, typing.get_args(kind)))


def test_no_result_is_any() -> None:
    # What its Trainer inherits is typed by transformers, or not.
    modules = {name for name in MODULES if name != "onefold.integrations.transformers"}
    found = {
        name
        for module in modules
        for public in names_of(module)
        for name, kind in results(
            f"{module}.{public}", getattr(importlib.import_module(module), public)
        )
        if contains_any(kind)
    }
    assert sorted(found) == sorted(EXCEPTIONS)

"""Tests over a table of cases that need no fixture of their own: one test for the whole table."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

__all__ = ["for_each", "some"]

Test = Callable[..., None]
Case = TypeVar("Case")
wanted: list[str] = []
"""``full`` if the tests that are marked so are run as well, see `tests.conftest`."""


def some(cases: Iterable[Case], one_of: int) -> list[Case]:
    """Return one case of so many, beginning with the first; all of them in a full run."""
    return list(cases)[:: 1 if wanted else one_of]


def for_each(
    names: str | Sequence[str], rows: Iterable[Any], ids: object = None
) -> Callable[[Test], Test]:
    """Call a test with each row of a table, as ``pytest.mark.parametrize`` does, in one test.

    All rows are tried, and each that fails is told with its values. Each has a ``tmp_path`` and a
    ``monkeypatch`` of its own, and sees nothing of what ``capsys`` and ``caplog`` caught before.
    Use it where a case is quick: what a test costs around its body is more than many bodies cost.

    Args:
        names: of the arguments, in one text or several.
        rows: a value, or one for each name; `pytest.param` too.
        ids: for rows that `pytest.mark.parametrize` could not name; not used here.
    """
    chosen = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [_values(row, len(chosen)) for row in rows]

    def wrap(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            failed: list[Exception] = []
            skipped: list[BaseException] = []
            for number, values in enumerate(table):
                given = dict(zip(chosen, values, strict=True))
                try:
                    with _of_a_row(kwargs, number) as fixtures:
                        test(*args, **fixtures, **given)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except Exception as error:
                    error.add_note(f"with {given}")
                    failed.append(error)
            if failed:
                raise failed[0] if len(failed) == 1 else ExceptionGroup("of a table", failed)
            if skipped and len(skipped) == len(table):
                raise skipped[0]

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in chosen]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return wrap


@contextmanager
def _of_a_row(fixtures: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures of a test, as one row of its table is to have them."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    for name, forget in (("capsys", "readouterr"), ("capfd", "readouterr"), ("caplog", "clear")):
        if name in own:
            getattr(own[name], forget)()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        yield own


def _values(row: Any, count: int) -> Sequence[Any]:
    if hasattr(row, "values") and hasattr(row, "marks"):  # of pytest.param
        assert not row.marks, f"a row of a table has no marks: {row}"
        return tuple(row.values)
    return (row,) if count == 1 else tuple(row)

"""Hints name what the devices saw."""

from __future__ import annotations

from typing import Any

from onefold.cli.verify import State, hints_of
from tests.tables import for_each


def state(step: int, **changes: Any) -> State:
    fields = {"states": {}, "unseeded": [], "attributes": [], "generators": []}
    return State(step=step, **{**fields, **changes})


@for_each(
    ("name", "digests", "found"),
    [
        ("torch's", [["a", "b"], ["a", "b"]], False),
        ("torch's", [["a", "b"], ["a", "c"]], True),
        ("NumPy's", [["a", "a"], ["x", "x"]], False),
        ("NumPy's", [["a", "b"], ["x", "y"]], False),
        ("NumPy's", [["a", "b"], ["x", "x"]], True),
    ],
)
def test_draws_of_some_devices_alone_are_named(
    name: str, digests: list[list[str]], found: bool
) -> None:
    run = {
        device: [state(step, states={name: digest}) for step, digest in enumerate(each, 1)]
        for device, each in enumerate(digests)
    }
    hints = hints_of(2, {0: run[0]}, run)
    assert [hint.startswith(f"{name} before step 2: ") for hint in hints] == [True] * found

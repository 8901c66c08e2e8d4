"""Hints name what the devices saw."""

from __future__ import annotations

from typing import Any

from onefold.cli.verify import State, hints_of
from tests.tables import for_each


def state(step: int, **changes: Any) -> State:
    fields = {"states": {}, "unseeded": [], "attributes": [], "generators": []}
    return State(step=step, **{**fields, **changes})


def test_what_was_seen_is_named_and_nothing_else() -> None:
    assert hints_of(1, {0: [state(1)]}, {0: [state(1)], 1: [state(1)]}) == []
    calls = {"unseeded": ["numpy.random.seed() without a seed (x.py:3)"]}
    start, call = hints_of(0, {0: [state(1, **calls)]}, {0: [state(1)]})
    assert "torch.manual_seed(0)" in start
    assert call.startswith("numpy.random.seed() without a seed (x.py:3): ")
    seen = {"attributes": ["attribute a of module m"], "generators": ["g"]}
    hints = hints_of(1, {0: [state(1)]}, {0: [state(1)], 1: [state(1, **seen)]})
    assert [hint.split(":")[0] for hint in hints] == ["g", "attribute a of module m"]


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

"""A process's place in a run, and its way through an environment and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from onefold.core.options import RunOptions
from onefold.core.world import World
from tests.tables import for_each


def test_only_what_nobody_else_knows_proves_that_a_process_belongs() -> None:
    known: dict[str, Any] = {"launcher": "torch", "run_id": "known to all"}
    for fields, proof in (
        ({"launcher": "onefold", "run_id": "drawn"}, b"drawn"),
        (known, b""),
        ({**known, "launcher": "none"}, b""),
        ({**known, "secret": "given"}, b"given"),
        ({"launcher": "onefold", "run_id": "drawn", "secret": "given"}, b"given"),
    ):
        assert World(**fields).proof == proof
        assert "given" not in repr(World(**fields))


def other_than(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if value in ("all", "same"):
        return {"all": "span", "same": "fewer"}[str(value)]
    return (*value, 'more\n"文"') if isinstance(value, tuple) else "collective"


@for_each("field", [each.name for each in dataclasses.fields(World) if each.name != "network"])
def test_every_field_travels(field: str) -> None:
    value: object = RunOptions(keep_last=9)
    if field != "options":
        value = "torch" if field == "launcher" else other_than(getattr(World(), field))
    world = dataclasses.replace(World(), **{field: value})
    assert world != World()
    back = getattr(World.from_json(world.to_json()), field)
    assert back == value
    assert type(back) is type(value)


@for_each("field", [field.name for field in dataclasses.fields(RunOptions)])
def test_every_option_travels(field: str) -> None:
    chosen = {field: other_than(getattr(RunOptions(), field)), "checkpoint": "kept"}
    options = RunOptions(**chosen)  # type: ignore[arg-type]
    text = World(options=options).to_json()
    assert World.from_json(text).options == options
    fields = json.loads(text)
    fields["options"]["keep_last"] = 0
    with pytest.raises(ValueError, match="keep_last of at least 1"):
        World.from_json(json.dumps(fields))

"""Waiting for tensors that are on their way, whether each has a handle or all have one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from onefold.exchange.collective import Moving, Operation


class Work:
    """Notes when it is waited for; gloo would hang the second time."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self._name = name
        self._waited = waited

    def wait(self) -> None:
        assert self._name not in self._waited
        self._waited.append(self._name)


def operations() -> list[Operation]:
    part = torch.zeros(1)
    return [
        Operation(False, 1, part, None),
        Operation(False, 1, part, 0),
        Operation(False, 2, part, 0),
        Operation(True, 1, part, 0),
        Operation(False, 1, part, 1),
    ]


@pytest.mark.parametrize(
    ("names", "after_first_chunk"),
    [(["row", "1", "2", "out", "3"], ["1", "2"]), (["all"], ["all"])],
)
def test_each_is_waited_for_once(names: list[str], after_first_chunk: list[str]) -> None:
    waited: list[str] = []
    works = cast(Any, [Work(name, waited) for name in names])
    moving = Moving(operations(), works)
    moving.wait_for(0)
    assert waited == after_first_chunk
    moving.wait_for(0)
    moving.wait_for(1)
    moving.finish()
    moving.finish()
    assert sorted(waited) == sorted(names)

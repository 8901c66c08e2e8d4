"""What is seen of values that somebody else has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onefold.core.flat import FlatTensors, lay_out
from onefold.engine.guard import Samples, Turns, ValueGuard
from tests.tables import for_each

Change = Callable[[nn.Parameter], object]


def guarded(numel: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, ValueGuard]:
    flat = FlatTensors(lay_out({"first": torch.zeros(3), "value": torch.ones(numel, dtype=dtype)}))
    flat.write([torch.ones_like(view) for view in flat.views])
    parameters = {name: nn.Parameter(torch.zeros(0)) for name in ("first", "value")}
    for parameter, view in zip(parameters.values(), flat.views, strict=True):
        parameter.data = view
    return parameters["value"], ValueGuard(parameters, [flat])


@for_each("numel", [1, 100, 100_000])
def test_a_change_in_place_is_seen_and_named(numel: int) -> None:
    parameter, guard = guarded(numel)
    with torch.no_grad():
        parameter[0] = 5  # a value that is not among those looked at, where there are many
    assert guard.name_of(guard.changed(values=False)) == "parameter value"
    guard.note()
    assert guard.changed() == 0


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@for_each("numel", [1, 100, 100_000])
def test_a_change_of_all_values_is_seen_behind_pytorchs_back(
    numel: int, dtype: torch.dtype
) -> None:
    parameter, guard = guarded(numel, dtype)
    before = guard.look(due=True)[1]
    parameter.data.mul_(0.5)
    assert guard.name_of(guard.changed()) == "parameters (through .data)"
    assert guard.changed(values=False) == 0
    assert guard.look(due=True)[1] != before


def test_a_value_that_is_no_number_is_no_change() -> None:
    parameter, guard = guarded(10)
    parameter.data.fill_(float("nan"))
    guard.note()
    assert guard.changed() == 0


def test_a_few_values_of_every_tensor_are_looked_at() -> None:
    tensors = {str(n): torch.zeros(7) for n in range(20)}
    flat = FlatTensors(lay_out(tensors))
    samples = Samples([flat])
    before = samples.read()
    for view in flat.views:
        view[3] = 1
        assert samples.read() != before
        view[3] = 0
    assert samples.read() == before


def test_memory_of_nothing_has_nothing_to_look_at() -> None:
    assert Samples([FlatTensors(lay_out({}))]).read() == b""
    assert Samples([FlatTensors(lay_out({"none": torch.zeros(0)}))]).read() == b""


def test_complex_numbers_and_bytes_are_looked_at() -> None:
    tensors = {"complex": torch.zeros(5, dtype=torch.complex128), "byte": torch.zeros(5).bool()}
    flat = FlatTensors(lay_out(tensors))
    samples = Samples([flat])
    before = samples.read()
    flat.views[0].fill_(1)
    flat.views[1].fill_(True)
    assert samples.read() != before


def test_what_costs_more_is_looked_at_in_the_first_steps_and_now_and_then() -> None:
    turns = Turns()
    due = []
    for step in range(1, 120):
        turns.advance()
        due += [step] if turns.due else []
    assert due == [1, 2, 3, 50, 100]
    turns.restart()
    turns.advance()
    assert turns.due


def test_all_values_are_added_up_where_they_are_due() -> None:
    parameter, guard = guarded(100_000)
    sampled, whole = guard.look(due=True)[1], guard.look(due=True, of_all=True)[1]
    parameter.data[1] = 5
    assert guard.look(due=True)[1] == sampled
    assert guard.look(due=False, of_all=True)[1] == sampled
    assert guard.look(due=True, of_all=True)[1] != whole


def test_a_failed_evaluation_hides_no_change_that_was_made_before_it() -> None:
    parameter, guard = guarded(3)
    with torch.no_grad():
        parameter[0] = 5
    with pytest.raises(ArithmeticError), guard.refusing_writing(values=True):
        raise ArithmeticError
    assert guard.name_of(guard.changed()) == "parameter value"

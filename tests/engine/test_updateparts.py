"""One step of an optimizer that is called for one part of the model after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from onefold.engine.stephooks import refuse_hooks, refuse_own_steps
from onefold.engine.updateparts import Part, RepeatedCalls, parts_of
from onefold.errors import StateError

VALUES = [torch.nn.Parameter(torch.full((2,), float(n))) for n in range(5)]
GROUPS = (0, 1, 0, 1, 1)


def same(found: list[list[torch.Tensor]], expected: list[list[int]]) -> bool:
    numbers = {id(each): number for number, each in enumerate(VALUES)}
    return [[numbers[id(each)] for each in group] for group in found] == expected


def places(parts: list[Part]) -> list[list[int]]:
    return [list(part.places) for part in parts]


def test_each_stage_is_a_part_and_each_piece_in_one() -> None:
    parts = parts_of(VALUES, GROUPS, 2, [2, 0, 2, 1, 0])
    assert places(parts) == [[0, 2], [1, 4], [3]]
    assert same(parts[0].divided, [[0, 2], []])
    assert same(parts[1].divided, [[], [1, 4]])
    assert same(parts[2].divided, [[], [3]])


def test_a_process_without_pieces_makes_one_call_all_the_same() -> None:
    (part,) = parts_of([], [], 2, [])
    assert list(part.places) == []
    assert part.divided == [[], []]


class Counting(torch.optim.Optimizer):
    """Keeps its count in the groups, as optimizers without schedules do."""

    def __init__(self, parameters: Any, **more: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "count": 0, **more})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for each in group["params"]:
                each.data -= group["lr"] * group["count"] * each.grad


def stepped(optimizer: torch.optim.Optimizer, stages: list[list[torch.Tensor]]) -> None:
    calls = RepeatedCalls(optimizer)
    for stage in stages:
        optimizer.param_groups[0]["params"] = stage
        calls.begin_call()
        optimizer.step()
        calls.end_call()


def fresh() -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    for each in found:
        each.grad = torch.ones(3)
    return found


def test_a_count_in_the_groups_counts_once() -> None:
    alone, cut = fresh(), fresh()
    plain, repeated = Counting(alone), Counting(cut)
    for _ in range(3):
        plain.step()
        stepped(repeated, [cut[:1], cut[1:3], cut[3:]])
    assert repeated.param_groups[0]["count"] == plain.param_groups[0]["count"] == 3
    assert all(map(torch.equal, alone, cut))


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_values_of_the_groups_may_be_tensors(lr: Any) -> None:
    alone, cut = fresh(), fresh()
    plain = torch.optim.AdamW(alone, lr=copy.deepcopy(lr), foreach=False)
    repeated = torch.optim.AdamW(cut, lr=copy.deepcopy(lr), foreach=False)
    for _ in range(2):
        plain.step()
        stepped(repeated, [cut[:2], cut[2:]])
    assert all(map(torch.equal, alone, cut))


class Estimating(Counting):
    """Changes a value of its groups by what the parameters are, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] += sum(float(each.detach().sum()) for each in group["params"])


def test_an_optimizer_that_looks_at_the_whole_model_is_refused() -> None:
    cut = fresh()
    with pytest.raises(StateError, match=r"Estimating made group 0\['lr'\] 4.0 for one stage.*7.0"):
        stepped(Estimating(cut), [cut[:1], cut[1:3]])


class Hoarding(Counting):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all of it"] = {"norm": 3.0}


def test_state_under_no_parameter_is_refused() -> None:
    cut = fresh()
    with pytest.raises(StateError, match=r"Hoarding keeps 'all of it' in its state.*--keep span"):
        stepped(Hoarding(cut), [cut])


def test_what_groups_hold_is_not_shared_with_what_is_put_back() -> None:
    cut = fresh()
    optimizer = Counting(cut, history=[])
    before = copy.deepcopy(optimizer.param_groups[0]["history"])
    calls = RepeatedCalls(optimizer)
    optimizer.param_groups[0]["history"].append(1)
    calls.end_call()
    calls.begin_call()
    assert optimizer.param_groups[0]["history"] == before


# Hooks.


def test_hooks_of_the_script_are_refused_and_ours_are_not() -> None:
    optimizer = Counting(fresh())
    refuse_own_steps([optimizer], lambda: True)
    refuse_hooks([optimizer])
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(StateError, match=r"Counting has hooks on step\(\), which keep=host"):
        refuse_hooks([optimizer])
    handle.remove()
    refuse_hooks([optimizer])
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(StateError, match=r"Call what they do after trainer\.step"):
        refuse_hooks([optimizer])

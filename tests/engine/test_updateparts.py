"""One step of an optimizer that is called for one part of the model after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from onefold.engine.optimizers import refuse_own_steps, steps_by_parameter
from onefold.engine.update import Part, parts_of
from tests.tables import for_each

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


# Which optimizers may be called so.


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1)


class Own(torch.optim.AdamW):
    """A script's own: it may count its calls, or look at all parameters together."""


def wrapped() -> torch.optim.Optimizer:
    made = adamw()
    made.step = functools.partial(made.step)  # type: ignore[method-assign]
    return made


def hooked() -> torch.optim.Optimizer:
    made = adamw()
    made.register_step_post_hook(lambda *_: None)
    return made


def scheduled() -> torch.optim.Optimizer:
    made = adamw()
    torch.optim.lr_scheduler.StepLR(made, 1)
    return made


@for_each(
    ("make", "expected"),
    [
        (adamw, True),
        (scheduled, True),
        (lambda: Own([torch.nn.Parameter(torch.ones(3))]), False),
        (wrapped, False),
        (hooked, False),
    ],
    ids=["pytorch's", "with a schedule", "of the script", "wrapped", "with a hook"],
)
def test_only_pytorchs_own_are_known_to_step_by_parameter(
    make: Callable[[], torch.optim.Optimizer], expected: bool
) -> None:
    optimizer = make()
    refuse_own_steps([optimizer], lambda: True)
    assert steps_by_parameter([optimizer]) == expected
    plain = adamw()
    refuse_own_steps([plain], lambda: True)
    assert steps_by_parameter([plain, optimizer]) == expected


def test_hooks_of_all_optimizers_count() -> None:
    optimizer = adamw()
    refuse_own_steps([optimizer], lambda: True)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert not steps_by_parameter([optimizer])
    handle.remove()
    assert steps_by_parameter([optimizer])

"""Buffers of a comparison: put back, told apart, and with the rule that makes them agree."""

import math

import torch
from torch import nn

from onefold.tools.verifying.surroundings import KeptBuffers
from tests.tables import for_each


def holding(**values: object) -> nn.Module:
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, None if value is None else torch.as_tensor(value))
    return model


def test_buffers_are_put_back_in_the_tensors_that_the_model_had() -> None:
    model = holding(own=torch.zeros(2), other=torch.zeros(2), none=None)
    kept, own = KeptBuffers(model), model.get_buffer("own")
    own.fill_(3.0)
    model.other = torch.full((2,), 5.0)
    kept.put_back()
    assert model.own is own
    assert own.tolist() == model.get_buffer("other").tolist() == [0.0, 0.0]


def compared(
    alone: object, folded: object, *, start: object = 0.0, shards: tuple[object, ...] = ()
) -> dict[str, str]:
    """One buffer: what one shard made of it, what there is after the step, and the parts."""
    kept = [KeptBuffers(holding(it=value)) for value in (alone, folded, start)]
    parts = {number: KeptBuffers(holding(it=value)) for number, value in enumerate(shards)}
    return kept[0].compare(kept[1], kept[2], parts, (3, 3, 2), 1e-9)


@for_each(
    "value",
    [
        *(1.0, [1.0, 2.0], [], 3, True, 1 + 2j),
        *([0.0, -math.inf], [math.nan, 1.0], [math.inf] * 3),
        torch.tensor([1.0, -math.inf], dtype=torch.bfloat16),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
)
def test_what_is_alike_does_not_differ(value: object) -> None:
    """Masks of infinities, and values that are not known yet, are like themselves."""
    assert compared(value, value) == {}


@for_each(
    ("alone", "folded"),
    [
        (1.0, 1.0 + 1e-6),
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0, -math.inf], [1.0 + 1e-6, -math.inf]),
        ([0.0, math.inf], [0.0, -math.inf]),
        ([0.0, math.nan], [0.0, 1.0]),
        ([0.0, 1.0], [0.0, math.nan]),
        (3, 4),
        (True, False),
        (1 + 2j, 1 + 3j),
        ([1.0], [1.0, 1.0]),
    ],
)
def test_what_differs_is_named(alone: object, folded: object) -> None:
    assert list(compared(alone, folded)) == ["it"]


def test_a_difference_is_measured_by_the_largest_value() -> None:
    assert compared([1e6, 1.0, math.inf], [1e6, 1.0 + 1e-5, math.inf]) == {}
    assert compared([1.0, 1.0], [1.0, 1.0 + 1e-5])
    words = compared([3.0, 4.0], [0.0, 0.0])["it"]
    assert words.startswith("values of norm 0 with the shards, values of norm 5 with one;")


@for_each(
    ("alone", "shards", "start", "rule"),
    [
        (11.0, (4.0, 5.0, 6.0), 2.0, "sum"),
        (4.875, (4.0, 5.0, 6.0), 0.5, "mean"),
        (6.0, (4.0, 6.0, 5.0), 0.5, "max"),
        (4.0, (4.0, 5.0, 6.0), 0.5, "first"),
        ([4.0, 1.0], ([4.0, 1.0], [5.0, 0.0], [6.0, 7.0]), [0.5, 0.5], "first"),
        (15, (4, 5, 6), 0, "sum"),
        (15 + 3j, (4 + 1j, 5 + 1j, 6 + 1j), 0j, "sum"),
    ],
)
def test_the_rule_that_would_give_what_one_shard_does_is_advised(
    alone: object, shards: tuple[object, ...], start: object, rule: str
) -> None:
    found = compared(alone, torch.zeros_like(torch.as_tensor(alone)), start=start, shards=shards)
    assert f'Trainer(buffers={{"it": "{rule}"}}) gives the result of one shard' in found["it"]
    none = compared(99.0, 5.0, shards=(4.0, 5.0, 6.0))["it"]
    assert none.startswith("5 with the shards, 99 with one; no rule of Trainer(buffers=...) gives")

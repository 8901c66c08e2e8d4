"""Averages of pieces and buffers: how they move, travel and are kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from onefold.core.averaging import AverageRule
from onefold.core.flat import FlatTensors, lay_out, storage_order
from onefold.engine.optimizerstate import AVERAGE, Averages
from tests.engine.assembled import bytes_of, cut_for, engine_of
from tests.small import line, points
from tests.tables import for_each


def flat_of(**tensors: torch.Tensor) -> FlatTensors:
    flat = FlatTensors(lay_out(tensors))
    flat.write(list(tensors.values()))
    return flat


NONE = flat_of()


def begun(rule: AverageRule, *values: torch.Tensor) -> Averages:
    averages = Averages()
    averages.begin(rule, dict(enumerate(values)), NONE)
    return averages


def test_nothing_is_kept_until_it_is_begun() -> None:
    averages = Averages()
    averages.follow({0: torch.ones(2)}, NONE)
    assert (averages.rule, averages.steps, averages.states()) == (None, 0, [])


def test_it_follows_each_so_many_steps() -> None:
    values = torch.zeros(3)
    averages = begun(AverageRule(None, every=2), values)
    seen = []
    for step in range(1, 7):
        values.fill_(step)
        averages.follow({0: values}, NONE)
        seen.append(float(averages.pieces[0][0]))
    assert seen == [0, 2, 2, 3, 3, 4]


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_averaged_in_float32(dtype: torch.dtype) -> None:
    """In which a decay of 0.9999 does not stand still."""
    values = torch.zeros(4, dtype=dtype)
    averages = begun(AverageRule(0.9999), values)
    averages.steps = 10**6
    values.fill_(1.0)
    for _ in range(3):
        averages.follow({0: values}, NONE)
    assert averages.pieces[0].dtype == torch.float32
    assert averages.pieces[0].tolist() == pytest.approx([1 - 0.9999**3] * 4, rel=1e-3)


def test_values_of_several_dtypes_and_strides_move_together() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(5, generator=generator),
        torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(6, generator=generator, dtype=torch.float64),
        torch.randn(3, generator=generator, dtype=torch.complex64),
        torch.empty(0),
    ]
    averages = begun(AverageRule(0.5), *values)
    before = [average.clone() for average in averages.pieces.values()]
    averages.follow({n: value + 1 for n, value in enumerate(values)}, NONE)
    for number, start in enumerate(before):
        moved = averages.pieces[number]
        assert moved.stride() == values[number].stride()
        assert torch.allclose(moved, start + (1 - 2 / 11), rtol=1e-5)


def test_they_travel_in_storage_order() -> None:
    values = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    averages = begun(AverageRule(0.5), values)
    (state,) = averages.states()
    assert (state.piece, state.key, state.by_element) == (0, AVERAGE, True)
    assert torch.equal(state.value, storage_order(values))
    other = Averages()
    other.adopt(0, torch.zeros_like(values), state.value)
    assert torch.equal(other.pieces[0], values)
    other.begin(AverageRule(0.5), {0: values + 1, 1: values}, NONE, steps=4)
    assert torch.equal(other.pieces[0], values)
    assert torch.equal(other.pieces[1], values)
    assert other.steps == 4
    other.keep({1})
    assert other.pieces.keys() == {1}


def test_buffers_are_averaged_and_whole_numbers_are_the_newest() -> None:
    mask = torch.tensor([0.0, -math.inf])
    low = torch.zeros(2, dtype=torch.bfloat16)
    buffers = flat_of(mean=torch.zeros(2), mask=mask, count=torch.tensor(3), low=low)
    averages = Averages()
    averages.begin(AverageRule(0.5), {}, buffers)
    buffers.write([torch.ones(2), mask, torch.tensor(9), low + 1])
    averages.follow({}, buffers)
    assert averages.buffers is not None
    mean, kept, count, wide = averages.buffers.views
    assert mean.tolist() == pytest.approx([9 / 11] * 2)
    assert kept.tolist() == [0.0, -math.inf]
    assert int(count) == 9
    assert wide.dtype == torch.float32
    assert wide.tolist() == pytest.approx([9 / 11] * 2)


def test_what_does_not_change_does_not_drift() -> None:
    values = torch.randn(1000) * 1e3
    buffers = flat_of(table=values)
    averages = Averages()
    averages.begin(AverageRule(0.9), {0: values}, buffers)
    for _ in range(50):
        averages.follow({0: values}, buffers)
    assert averages.buffers is not None
    assert bytes_of(averages.pieces[0]) == bytes_of(values)
    assert bytes_of(averages.buffers.views[0]) == bytes_of(values)


def test_an_engine_shows_them_and_puts_everything_back() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), line())
    engine = engine_of(module, devices=2)
    engine.averaging.begin(AverageRule(0.5), 1)
    for number in (1, 2):
        engine.step(cut_for(engine, points(8)), number)
        engine.end_step()
    before = {name: bytes_of(value) for name, value in module.state_dict().items()}
    with engine.averaging.block(3):
        shown = {name: bytes_of(value) for name, value in module.state_dict().items()}
        with engine.averaging.training_values():
            inside = {name: bytes_of(value) for name, value in module.state_dict().items()}
        again = {name: bytes_of(value) for name, value in module.state_dict().items()}
    after = {name: bytes_of(value) for name, value in module.state_dict().items()}
    assert before == inside == after
    assert shown == again
    differing = {name for name in before if before[name] != shown[name]}
    assert differing == before.keys() - {"0.num_batches_tracked"}
    flats = [replica.trained.sections for replica in engine.replicas]
    assert all(map(torch.equal, *flats))

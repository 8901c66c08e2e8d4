"""The optimizer's state as bytes, joined to whole tensors, and in segments again; and averages."""

from typing import Any

import pytest
import torch

from onefold.core.flat import FlatTensors, lay_out
from onefold.core.storage import cut_segments
from onefold.system.accelerator import DTYPES
from onefold.system.allocator import DEFAULT_ALLOCATOR
from onefold.update.averages import AverageRule, Averages
from onefold.update.staging import SegmentState, Staging
from onefold.update.state import check_saved, pack, packed, take_apart, unpack
from tests.step.assembled import bytes_of
from tests.tables import for_each


def plain(states: Any) -> list[tuple[object, ...]]:
    """Comparable: tensors as type, shape and bits."""

    def seen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), bytes_of(value)
        return type(value), value

    return [(state.segment, state.key, seen(state.value), state.by_element) for state in states]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randint(0, 255, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        wide = wide % 2
    return wide.view(dtype).squeeze(-1)


VALUES = [None, 3, 2.5, float("inf"), "word", True, [1, [2]], (0.9, 0.999), {"a": (1,)}]


def test_all_that_an_optimizer_may_keep_comes_back_in_its_order() -> None:
    """Tensors of sizes that leave gaps between them; in a room that has held another state."""
    shapes = [(7,), (), (3, 5), (0,), (2, 0, 3)]
    states = [SegmentState(0, "row", numbers(4, 2)[:, 0], False)]  # with gaps between its elements
    for number, dtype in enumerate(DTYPES):
        states += [
            SegmentState(number, f"{n}", numbers(*s, dtype=dtype), True)
            for n, s in enumerate(shapes)
        ]
        states.append(SegmentState(number, "betas", VALUES[number % len(VALUES)], False))
    assert plain(unpack(packed(states))) == plain(states)
    assert list(unpack(packed([]))) == []
    held = torch.full((1 << 16,), 0xAB, dtype=torch.uint8)
    pack(states, lambda nbytes: held)
    states[1].value.fill_(1)  # packing copies
    assert plain(unpack(held))[2:] == plain(states)[2:]
    assert plain(unpack(held))[1] != plain(states)[1]
    assert bool((held[packed(states).numel() :] == 0xAB).all())


@for_each(
    ("value", "words"),
    [
        (
            torch.zeros(2, dtype=torch.complex128),
            r"optimizer's it has dtype torch\.complex128, which",
        ),
        (object(), r"optimizer's it is of type object, which cannot be saved in a checkpoint"),
    ],
)
def test_what_no_file_holds_is_refused(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        packed([SegmentState(0, "it", value, False)])


LAYOUT = lay_out(
    {
        "wide": torch.zeros(70, 600),  # of three segments, the last one short
        "turned": torch.zeros(5, 4).t(),
        "scale": torch.zeros(()),
    }
)
PIECES = cut_segments(LAYOUT, by_element=True)


KEYS = {"wide": ["exp_avg", "step"], "turned": ["exp_avg"]}
SAVED: dict[str, Any] = {
    "wide.exp_avg": ((70, 600), "F32"),
    "wide.step": ((), "F32"),
    "turned.exp_avg": ((4, 5), "F32"),
}


@for_each(
    ("name", "saved", "words"),
    [
        ("wide.step", None, r"^the optimizer's wide\.step is missing from its tensors"),
        ("wide.exp_avg", ((70,), "F32"), r"has shape \(70,\), but .* \(70, 600\)"),
        ("turned.exp_avg", ((4, 5), "F4"), r"turned\.exp_avg has the unknown dtype F4"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, saved: Any, words: str) -> None:
    check_saved(KEYS, SAVED.get, PIECES, LAYOUT, {"turned.exp_avg": [1, 4]})
    # A whole parameter may have state of a shape of its own, as Adafactor keeps it.
    check_saved(KEYS, {**SAVED, "turned.exp_avg": ((4,), "F32")}.get, PIECES, LAYOUT)
    with pytest.raises(ValueError, match=words):
        check_saved(KEYS, {**SAVED, name: saved}.get, PIECES, LAYOUT)


@for_each("stride", [[1], [5, 2], [2, 8], [1, 0], [1, 1 << 40]])
def test_strides_with_gaps_are_refused(stride: list[int]) -> None:
    with pytest.raises(ValueError, match=r"turned\.exp_avg has strides .*\(4, 5\) without gaps"):
        check_saved(KEYS, SAVED.get, PIECES, LAYOUT, {"turned.exp_avg": stride})


def test_a_divided_parameter_has_no_state_of_another_shape() -> None:
    taken = take_apart({"wide": ["row"]}, {}, lambda name: torch.zeros(70), [1], PIECES, LAYOUT)
    with pytest.raises(ValueError, match=r"wide\.row has shape \(70,\), but its parameter"):
        list(taken)


def begun(rule: AverageRule, *values: torch.Tensor, **buffers: torch.Tensor) -> Averages:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    staging = Staging(torch.device("cpu"), DEFAULT_ALLOCATOR, optimizer)
    averages = Averages(DEFAULT_ALLOCATOR, staging)
    averages.start(rule, dict(enumerate(values)), flat_of(**buffers))
    return averages


def flat_of(**tensors: torch.Tensor) -> FlatTensors:
    flat = FlatTensors(lay_out(tensors))
    flat.write(list(tensors.values()))
    return flat


def test_it_follows_each_so_many_steps_and_warms_up_by_its_updates() -> None:
    for rule, expected in (
        (AverageRule(None, every=2), [0, 2, 2, 3, 3, 4]),
        (AverageRule(0.9, every=2), [0, 2 * 9 / 11, 2 * 9 / 11, None, None, None]),
    ):
        values = torch.zeros(3)
        averages = begun(rule, values)
        seen = []
        for step in range(1, 7):
            values.fill_(step)
            averages.follow({0: values}, flat_of())
            seen.append(float(averages.segments[0][0]))
        pairs = [(s, e) for s, e in zip(seen, expected, strict=True) if e is not None]
        assert [s for s, _ in pairs] == pytest.approx([e for _, e in pairs])


def test_what_does_not_change_does_not_drift() -> None:
    values = torch.randn(1000) * 1e3
    averages = begun(AverageRule(0.9), values, table=values)
    for _ in range(50):
        averages.follow({0: values}, flat_of(table=values))
    assert averages.buffers is not None
    assert bytes_of(averages.segments[0]) == bytes_of(averages.buffers.views[0]) == bytes_of(values)

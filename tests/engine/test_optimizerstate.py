"""The optimizer's state as bytes, joined to whole tensors, and in pieces again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from onefold.core.flat import Layout, Piece, lay_out
from onefold.core.storage import cut_pieces
from onefold.engine.optimizerstate import (
    JoinedState,
    PieceState,
    check_saved,
    is_by_element,
    join,
    pack,
    packed,
    take_apart,
    unpack,
)
from onefold.system.tensorfile import DTYPES
from tests.engine.assembled import bytes_of, engine_of
from tests.inside import engine_in
from tests.small import line, make_trainer, points
from tests.tables import for_each


def plain(states: Sequence[PieceState] | Any) -> list[tuple[object, ...]]:
    """Comparable: tensors as type, shape and bits."""
    return [
        (
            state.piece,
            state.key,
            (state.value.dtype, tuple(state.value.shape), bytes_of(state.value))
            if isinstance(state.value, torch.Tensor)
            else state.value,
            state.by_element,
        )
        for state in states
    ]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randint(0, 255, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        wide = wide % 2
    return wide.view(dtype).squeeze(-1)


# Bytes.


@for_each("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@for_each("shape", [(7,), (), (3, 5), (0,), (2, 0, 3)])
def test_a_tensor_of_any_type_and_shape_comes_back(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    states = [PieceState(4, "exp_avg", numbers(*shape, dtype=dtype), True)]
    assert plain(unpack(packed(states))) == plain(states)


VALUES = [None, 3, 2.5, float("inf"), "word", True, [1, [2]], (0.9, 0.999), {"a": (1,)}]


@for_each("value", VALUES, ids=repr)
def test_what_is_no_tensor_comes_back(value: object) -> None:
    (state,) = unpack(packed([PieceState(0, "betas", value, False)]))
    assert (state.value, type(state.value)) == (value, type(value))
    assert not state.by_element


def mixed() -> list[PieceState]:
    """Sizes that leave gaps between them, and values that are no tensors in between."""
    return [
        PieceState(0, "step", torch.tensor(3.0), False),
        PieceState(0, "exp_avg", numbers(5), True),
        PieceState(0, "name", "first", False),
        PieceState(1, "exp_avg", numbers(0), True),
        PieceState(1, "count", numbers(3, dtype=torch.int64), False),
        PieceState(2, "half", numbers(33, dtype=torch.bfloat16), True),
        PieceState(2, "sign", numbers(17, dtype=torch.bool), True),
        PieceState(2, "row", numbers(4, 2)[:, 0], False),  # with gaps between its elements
    ]


def test_many_come_back_in_their_order() -> None:
    assert plain(unpack(packed(mixed()))) == plain(mixed())


def test_nothing_comes_back_as_nothing() -> None:
    assert list(unpack(packed([]))) == []


def test_there_may_be_bytes_behind_and_none_before() -> None:
    """A room is as large as the largest state that it has held."""
    held = torch.full((1 << 14,), 0xAB, dtype=torch.uint8)
    asked: list[int] = []

    def room(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return held

    pack(mixed(), room)
    assert plain(unpack(held)) == plain(mixed())
    assert asked == [packed(mixed()).numel()]
    assert bool((held[asked[0] :] == 0xAB).all())


def test_what_is_unpacked_lies_in_the_same_memory() -> None:
    memory = packed(mixed())
    first = next(state for state in unpack(memory) if state.key == "exp_avg")
    first.value.fill_(8.0)
    again = next(state for state in unpack(memory) if state.key == "exp_avg")
    assert again.value.tolist() == [8.0] * 5


def test_packing_copies() -> None:
    value = torch.ones(3)
    memory = packed([PieceState(0, "exp_avg", value, True)])
    value.fill_(5.0)
    assert next(unpack(memory)).value.tolist() == [1.0] * 3


@for_each(
    ("value", "words"),
    [
        (torch.zeros(2, dtype=torch.complex128), r"optimizer's it is of torch\.complex128, which"),
        (object(), r"optimizer's it is of type object, which a checkpoint cannot hold"),
    ],
)
def test_what_no_file_holds_is_refused(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        packed([PieceState(0, "it", value, False)])


@for_each(
    ("key", "value", "shape", "expected"),
    [
        ("exp_avg", torch.zeros(3, 2), (3, 2), True),
        ("exp_avg", torch.zeros(6), (3, 2), False),
        ("exp_avg", torch.zeros(()), (), True),
        ("step", torch.zeros(()), (), False),
        ("step", torch.zeros(()), (3,), False),
        ("step", torch.zeros(3), (3,), True),
        ("exp_avg", [0.0, 0.0, 0.0], (3,), False),
        ("momentum_buffer", None, (3,), False),
    ],
)
def test_what_goes_element_by_element(
    key: str, value: object, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_by_element(key, value, shape) is expected


# Whole tensors.

WIDE = (70, 600)
"""Of three pieces, the last one short."""


def model() -> tuple[Layout, tuple[Piece, ...]]:
    """One parameter of several pieces, one whose strides are turned, one that is a number."""
    parameters = {
        "wide": torch.zeros(WIDE),
        "turned": torch.zeros(5, 4).t(),
        "scale": torch.zeros(()),
    }
    layout = lay_out(parameters)
    return layout, cut_pieces(layout, by_element=True)


def states_of(pieces: Sequence[Piece]) -> list[PieceState]:
    """Values that tell where an element lies in memory."""
    found = []
    for number, piece in enumerate(pieces):
        found.append(PieceState(number, "step", torch.tensor(9.0), False))
        found.append(PieceState(number, "lr", 0.5 + piece.entry, False))
        run = torch.arange(piece.start, piece.stop, dtype=torch.float64) + 100_000 * piece.entry
        found.append(PieceState(number, "exp_avg", run, True))
    return found


def whole_of(joined: JoinedState) -> dict[str, torch.Tensor]:
    """As the file of a checkpoint would give them."""
    found = {}
    for parts in joined.tensors:
        data = b"".join(bytes(stretch) for stretch in parts.in_order())
        flat = torch.frombuffer(bytearray(data), dtype=parts.dtype)
        found[parts.name] = flat.view(parts.shape)
    return found


def test_pieces_of_all_devices_are_joined_whoever_brought_them() -> None:
    layout, pieces = model()
    assert [piece.entry for piece in pieces] == [0, 0, 0, 1, 2]
    states = states_of(pieces)
    joined = join(reversed(states), pieces, layout)
    wholes = whole_of(joined)
    assert {name: sorted(keys) for name, keys in joined.keys.items()} == {
        name: ["exp_avg", "step"] for name in ("wide", "turned", "scale")
    }
    assert joined.values == {"wide": {"lr": 0.5}, "turned": {"lr": 1.5}, "scale": {"lr": 2.5}}
    run = torch.arange(70 * 600, dtype=torch.float64)
    assert torch.equal(wholes["wide.exp_avg"], run.view(WIDE))
    expected = (torch.arange(20, dtype=torch.float64) + 100_000).view(5, 4).t()
    assert torch.equal(wholes["turned.exp_avg"], expected)
    assert wholes["scale.exp_avg"].tolist() == 200_000.0
    assert all(float(wholes[f"{name}.step"]) == 9.0 for name in ("wide", "turned", "scale"))


@for_each("owned", [range(5), [0], [1, 2, 3], [4], []])
def test_any_pieces_can_be_taken_of_what_was_joined(owned: Sequence[int]) -> None:
    layout, pieces = model()
    states = states_of(pieces)
    joined = join(states, pieces, layout)
    wholes = whole_of(joined)
    taken = take_apart(joined.keys, joined.values, wholes.__getitem__, owned, pieces, layout)

    def ordered(found: Any) -> list[tuple[object, ...]]:
        return sorted(plain(found), key=lambda each: (each[0], each[1]))

    assert ordered(taken) == ordered([state for state in states if state.piece in owned])


def test_each_tensor_is_read_once_for_all_its_pieces() -> None:
    layout, pieces = model()
    joined = join(states_of(pieces), pieces, layout)
    wholes = whole_of(joined)
    read: list[str] = []

    def note(name: str) -> torch.Tensor:
        read.append(name)
        return wholes[name]

    assert list(take_apart(joined.keys, joined.values, note, range(5), pieces, layout))
    assert sorted(read) == sorted(wholes)


@for_each("devices", [1, 2, 3])
def test_the_state_of_a_real_optimizer_goes_through_all_of_it(devices: int) -> None:
    """From its pieces to bytes, to whole tensors, to the pieces of another engine."""

    def adam() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = line(40_000)
        return module, torch.optim.Adam(module.parameters(), lr=0.1, amsgrad=True)

    module, optimizer = adam()
    trainer = make_trainer(module, optimizer=optimizer, devices=devices)
    trainer.step(points(8, 40_000))
    update = engine_in(trainer).update
    storage = update.storage
    joined = join(unpack(packed(update.states())), storage.pieces, storage.masters)
    wholes = whole_of(joined)
    assert wholes["weight.max_exp_avg_sq"].shape == (1, 40_000)
    twin, other = adam()
    fresh = engine_of(twin, optimizer=other).update
    owned = range(len(storage.pieces))
    fresh.take_states(
        take_apart(
            joined.keys, joined.values, wholes.__getitem__, owned, storage.pieces, storage.masters
        )
    )
    ours = sorted(plain(update.states()), key=lambda each: (each[0], each[1]))
    theirs = sorted(plain(fresh.states()), key=lambda each: (each[0], each[1]))
    assert ours == theirs
    assert len(ours) == 4 * len(storage.pieces) > 8


# What was saved is looked at first.


def kinds(**changed: tuple[tuple[int, ...], str] | None) -> Any:
    known: dict[str, Any] = {
        "wide.exp_avg": (WIDE, "F32"),
        "wide.step": ((), "F32"),
        "turned.exp_avg": ((4, 5), "F32"),
        **{name.replace("_of_", "."): kind for name, kind in changed.items()},
    }
    return known.get


KEYS = {"wide": ["exp_avg", "step"], "turned": ["exp_avg"]}


def test_tensors_that_fit_are_not_refused() -> None:
    layout, pieces = model()
    check_saved(KEYS, kinds(), pieces, layout)
    # A whole parameter may have state of a shape of its own, as Adafactor keeps it.
    check_saved(KEYS, kinds(turned_of_exp_avg=((4,), "F32")), pieces, layout)


@for_each(
    ("changed", "words"),
    [
        ({"wide_of_step": None}, r"^the optimizer's wide\.step is not among its tensors"),
        ({"wide_of_exp_avg": ((70,), "F32")}, r"has shape \(70,\), expected .* \(70, 600\)"),
        ({"turned_of_exp_avg": ((4, 5), "F4")}, r"turned\.exp_avg is of F4, which is not known"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changed: dict[str, Any], words: str) -> None:
    layout, pieces = model()
    with pytest.raises(ValueError, match=words):
        check_saved(KEYS, kinds(**changed), pieces, layout)


@for_each("stride", [[1], [5, 2], [2, 8], [1, 0], [1, 1 << 40]])
def test_strides_with_gaps_are_refused(stride: list[int]) -> None:
    layout, pieces = model()
    check_saved(KEYS, kinds(), pieces, layout, {"turned.exp_avg": [1, 4]})
    with pytest.raises(ValueError, match=r"turned\.exp_avg has strides .*\(4, 5\) without gaps"):
        check_saved(KEYS, kinds(), pieces, layout, {"turned.exp_avg": stride})


def test_a_divided_parameter_has_no_state_of_another_shape() -> None:
    layout, pieces = model()
    taken = take_apart({"wide": ["row"]}, {}, lambda name: torch.zeros(70), [1], pieces, layout)
    with pytest.raises(ValueError, match=r"wide\.row has shape \(70,\), expected"):
        list(taken)

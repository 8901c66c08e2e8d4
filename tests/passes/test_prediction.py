"""What a model says of every sample, and what devices tell each other."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from onefold.errors import DisagreementError, LossError
from tests import simulated
from tests.small import make_trainer, points
from tests.tables import for_each

Agreed = dict[str, Any]

both = for_each("devices", [1, 3])

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every pattern of bits may come, so every kind of NaN as well."""
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
    )


def raw(value: Any) -> Any:
    """Of tensors in any containers: shape, dtype and bits."""
    if isinstance(value, dict):
        return [(key, raw(each)) for key, each in value.items()]
    if isinstance(value, list):
        return [raw(each) for each in value]
    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tuple(value.shape), str(value.dtype), str(value.device), data


def predict(values: torch.Tensor, function: Callable[..., Agreed], **settings: Any) -> Agreed:
    batch_size = settings.pop("batch_size", 7)
    trainer = make_trainer(**settings)
    return trainer.predict(function, TensorDataset(values), batch_size=batch_size)


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, ...]:
    counts = st.lists(st.integers(0, 4), min_size=1, max_size=5)
    return tuple(draw(counts.filter(lambda counts: sum(counts) >= len(counts))))


@settings(max_examples=25)
@given(samples=st.integers(1, 40), batch_size=st.integers(1, 45), shares=shares())
def test_values_come_in_their_order(samples: int, batch_size: int, shares: tuple[int, ...]) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        return {"number": batch[0], "half": batch[0].double() / 2, "odd": batch[0] % 2 == 1}

    values = torch.arange(samples)
    chosen = {"shares": shares, "shards": sum(shares), "devices": len(shares)}
    said = predict(values, say, batch_size=batch_size, **chosen)
    assert raw(said) == raw(say(nn.Identity(), [values]))


@both
def test_every_dtype_and_shape_keeps_its_bits(devices: int) -> None:
    shapes = [(), (1,), (5,), (2, 3, 4), (0,), (2, 0)]
    columns = [any_bits(dtype, 11, *shapes[n % 6]) for n, dtype in enumerate(DTYPES)]
    columns += [any_bits(dtype, 11, 4, 3) for dtype in (torch.bool, torch.float32)]

    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        named: Agreed = {f"é {number}": value for number, value in enumerate(batch)}
        return named | {"turned": batch[-1].mT, "flat": batch[-1][:, :1, 0].expand(-1, 2)}

    trainer = make_trainer(devices=devices)
    said = trainer.predict(say, TensorDataset(*columns), batch_size=6)
    assert raw(said) == raw(say(trainer.model, columns))


def sizes(inputs: torch.Tensor) -> list[int]:
    return [int(row.abs().sum() * 10) % 4 for row in inputs]


def boxes(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
    """Detections; a list of tensors, of masks of any size, and a row a sample."""
    inputs = batch[0]
    scores = model(inputs)[:, 0]
    noise = torch.rand(()) + random.random() + np.random.rand()
    found = [
        {"boxes": row[:2].repeat(n, 2) + noise, "scores": score.repeat(n), "id": torch.arange(n)}
        for row, score, n in zip(inputs, scores, sizes(inputs), strict=True)
    ]
    masks = [torch.ones(n, n + 1, dtype=torch.bool) for n in sizes(inputs)]
    return {"found": found, "masks": masks, "mean": scores, "whole": [s.sum() for s in scores]}


def said_of_boxes(devices: int | None = 1, samples: int = 23, **settings: Any) -> Agreed:
    return predict(points(samples)[0], boxes, devices=devices, **settings)


def test_every_sample_has_its_own_in_the_order_of_the_data() -> None:
    said = said_of_boxes()
    inputs = points(23)[0]
    assert list(said) == ["found", "masks", "mean", "whole"]
    assert [len(each["boxes"]) for each in said["found"]] == sizes(inputs)
    assert [list(each) for each in said["found"]] == [["boxes", "scores", "id"]] * 23
    assert [tuple(mask.shape) for mask in said["masks"]] == [(n, n + 1) for n in sizes(inputs)]
    assert torch.equal(torch.stack(said["whole"]), said["mean"])
    for each, row in zip(said["found"], inputs, strict=True):
        assert each["boxes"].shape[1] == 4
        if len(each["boxes"]):
            torch.testing.assert_close(each["boxes"][0, 1] - each["boxes"][0, 0], row[1] - row[0])


@for_each("samples", [1, 3, 23])
def test_the_bits_do_not_depend_on_the_devices(samples: int) -> None:
    alone = raw(said_of_boxes(samples=samples))
    for shares in ((2, 2), (0, 4), (1, 0, 3), (1, 1, 1, 1)):
        assert raw(said_of_boxes(len(shares), samples, shares=shares)) == alone
    for exchange in ("shared", "collective"):
        found = simulated.launch(
            said_of_boxes, devices="cpu:3", args=(None, samples), exchange=exchange
        )
        assert raw(found) == alone


@for_each(
    ("entry", "words"),
    [
        (lambda row, n: row[:n] if n else torch.zeros(0, 4), r"alike in dtype and number of dim"),
        (lambda row, n: row.double() if n % 2 else row, "float32 .* and float64 .* for sample"),
        (lambda row, n: {"a": row} if n % 2 else {"b": row}, "dicts of 'value' to have the same"),
        (lambda row, n: row if n % 2 else {"a": row}, "or a list with one tensor or dict of"),
        (lambda row, n: {"a": 1}, "or a list with one tensor or dict"),
    ],
)
def test_entries_of_other_kinds_are_refused(entry: Callable[..., object], words: str) -> None:
    def function(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        return {"value": [entry(row, n) for n, row in enumerate(batch[0])]}

    with pytest.raises(LossError, match=words):
        predict(points(23)[0], function, batch_size=23)


OTHERS: list[Callable[[torch.Tensor], Agreed]] = [
    lambda value: {"other": value},
    lambda value: {"value": value, "more": value},
    lambda value: {"value": value.double()},
    lambda value: {"value": value[:, None]},
    lambda value: {"value": list(value)},
]


@for_each(
    ("call", "other"),
    [("predict", other) for other in OTHERS] + [("evaluate", other) for other in OTHERS[:2]],
)
@for_each("shares", [(4,), (1, 3), (1, 1, 1, 1)])
def test_what_differs_between_shards_or_batches_is_refused(
    call: str, other: Callable[[torch.Tensor], Agreed], shares: tuple[int, ...]
) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        return {"value": batch[0]} if batch[0][0] == 0 else other(batch[0])

    trainer = make_trainer(devices=len(shares), shares=shares)
    for batch_size in (8, 2):
        with pytest.raises(DisagreementError, match=r"expected the same names"):
            getattr(trainer, call)(say, TensorDataset(torch.arange(8.0)), batch_size=batch_size)


@for_each(
    ("value", "came"),
    [
        (torch.tensor(1.0), r"got \(\)"),
        (torch.ones(1, 2), r"got \(1, 2\)"),
        (torch.ones(0), r"got \(0,\)"),
        (0.5, r"got 0\.5"),
        (np.ones(2), r"got array"),
    ],
)
@both
def test_what_has_not_one_row_a_sample_is_refused(value: object, came: str, devices: int) -> None:
    words = rf"^batch 0 of a prediction, shard \d: expected 'value' to be a .* 2 samples, {came}"
    with pytest.raises(LossError, match=words):
        predict(
            torch.arange(8.0), lambda model, batch: {"value": value}, batch_size=8, devices=devices
        )


def test_names_of_numbers_have_one_line() -> None:
    with pytest.raises(ValueError, match="expected names of one line for numbers"):
        make_trainer().gather({"two\nlines": 1.0})

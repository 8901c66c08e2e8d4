"""What a model says of every sample, and what devices tell each other."""

from __future__ import annotations

import hashlib
import math
import os
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

import onefold
from onefold.engine.between import gather, written
from onefold.errors import DisagreementError, LossError, RunFailed, SampleError
from tests.inside import engine_in
from tests.small import Batch, bits, line, make_trainer, points
from tests.tables import for_each

Said = dict[str, Any]

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


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """In shape, dtype and bits."""
    kinds = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return kinds and raw(found) == raw(expected)


def as_it_is(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
    return {"value": batch[0]}


def predict(
    values: torch.Tensor, function: Callable[..., Said] = as_it_is, **settings: Any
) -> dict[str, torch.Tensor]:
    batch_size = settings.pop("batch_size", 7)
    trainer = make_trainer(**settings)
    return trainer.predict(function, TensorDataset(values), batch_size=batch_size)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, ...]:
    counts = st.lists(st.integers(0, 4), min_size=1, max_size=5)
    return tuple(draw(counts.filter(lambda counts: sum(counts) >= len(counts))))


@settings(max_examples=25)
@given(samples=st.integers(1, 40), batch_size=st.integers(1, 45), plan=plans())
def test_values_come_in_the_order_of_the_data(
    samples: int, batch_size: int, plan: tuple[int, ...]
) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {"number": batch[0], "half": batch[0].double() / 2, "odd": batch[0] % 2 == 1}

    values = torch.arange(samples)
    chosen = {"plan": plan, "shards": sum(plan), "devices": len(plan)}
    said = predict(values, say, batch_size=batch_size, **chosen)
    assert list(said) == ["number", "half", "odd"]
    assert same(said["number"], values)
    assert same(said["half"], values.double() / 2)
    assert same(said["odd"], values % 2 == 1)


@for_each("dtype", DTYPES, ids=str)
@for_each("devices", [1, 2, 3])
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, devices: int) -> None:
    values = any_bits(dtype, 23)
    assert same(predict(values, devices=devices)["value"], values)


@both
def test_numbers_that_a_float_has_no_room_for_are_kept(devices: int) -> None:
    whole = torch.tensor([2**53 + 1, -(2**63), 2**63 - 1, 0, -1])
    real = torch.tensor([-0.0, math.nan, -math.nan, math.inf, 5e-324], dtype=torch.float64)

    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {"whole": batch[0], "real": batch[1], "single": batch[1].float()}

    trainer = make_trainer(devices=devices)
    said = trainer.predict(say, TensorDataset(whole, real), batch_size=4)
    assert same(said["whole"], whole)
    assert same(said["real"], real)
    assert same(said["single"], real.float())


@for_each("shape", [(), (1,), (5,), (2, 3, 4), (0,), (2, 0)], ids=str)
@for_each("dtype", [torch.bool, torch.int16, torch.float64], ids=str)
@both
def test_a_value_may_have_any_shape(
    shape: tuple[int, ...], dtype: torch.dtype, devices: int
) -> None:
    values = any_bits(dtype, 10, *shape)
    assert same(predict(values, devices=devices)["value"], values)


@both
def test_values_of_several_kinds_lie_beside_each_other(devices: int) -> None:
    columns = [any_bits(dtype, 11, size) for size, dtype in enumerate(DTYPES)]

    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {f"é {number}": value for number, value in enumerate(batch)}

    trainer = make_trainer(devices=devices)
    said = trainer.predict(say, TensorDataset(*columns), batch_size=6)
    assert list(said) == [f"é {number}" for number in range(len(columns))]
    for found, expected in zip(said.values(), columns, strict=True):
        assert same(found, expected)


@both
def test_a_view_with_other_strides_is_told_as_it_looks(devices: int) -> None:
    values = any_bits(torch.float32, 9, 4, 3)

    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {"turned": batch[0].transpose(1, 2), "flat": batch[0][:, :1, 0].expand(-1, 2)}

    said = predict(values, say, devices=devices)
    assert same(said["turned"], values.transpose(1, 2))
    assert same(said["flat"], values[:, :1, 0].expand(-1, 2))


@for_each("samples", [1, 2, 5])
def test_fewer_samples_than_shards_leave_devices_without_any(samples: int) -> None:
    values = torch.arange(samples)
    assert same(predict(values, shards=8, devices=4, batch_size=9)["value"], values)
    assert same(predict(values, shards=8, devices=4, plan=(0, 1, 6, 1))["value"], values)


@both
def test_the_model_says_what_it_says_in_a_plain_loop(devices: int) -> None:
    model, (inputs, _) = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line()), points(23)
    modes: set[bool] = set()

    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        modes.update(part.training for part in model.modules())
        said = model(batch[0])
        modes.add(said.requires_grad)
        return {"said": said}

    said = predict(inputs, say, model=model, devices=devices)["said"]
    assert modes == {False}
    assert all(part.training for part in model.modules())
    torch.testing.assert_close(said, model.eval()(inputs).detach())


@for_each("plan", [(2, 2), (0, 4), (3, 1), (1, 1, 1, 1)])
def test_the_bits_do_not_depend_on_the_devices(plan: tuple[int, ...]) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"noisy": model(batch[0]) * noise}

    inputs, _ = points(23)
    alone = predict(inputs, say)["noisy"]
    assert same(predict(inputs, say, devices=len(plan), plan=plan)["noisy"], alone)


@both
def test_nothing_of_the_run_is_changed(devices: int) -> None:
    trainers = [
        make_trainer(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line()), devices=devices)
        for _ in range(2)
    ]
    state = torch.get_rng_state()
    for trainer, predicts in zip(trainers, (True, False), strict=True):
        for _ in range(2):
            trainer.step(points(9))
            if predicts:
                before = bits(trainer.model)
                trainer.predict(
                    lambda model, batch: {"said": model(batch[0])},
                    TensorDataset(*points(9)),
                    batch_size=4,
                )
                assert bits(trainer.model) == before
    assert trainers[0].fingerprint() == trainers[1].fingerprint()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_said_is_the_callers_own() -> None:
    values = torch.arange(8.0)
    predict(values)["value"].zero_()
    assert values.sum() > 0


@for_each(
    "other",
    [
        lambda value: {"other": value},
        lambda value: {"value": value, "more": value},
        lambda value: {"value": value.double()},
        lambda value: {"value": value[:, None]},
        lambda value: {"value": value.int()},
    ],
    ids=["name", "one more", "dtype", "shape", "whole numbers"],
)
@for_each(("devices", "plan"), [(1, (4,)), (2, (1, 3)), (4, (1, 1, 1, 1))])
def test_what_differs_between_shards_is_refused(
    other: Callable[[torch.Tensor], Said], devices: int, plan: tuple[int, ...]
) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {"value": batch[0]} if batch[0][0] == 0 else other(batch[0])

    with pytest.raises(DisagreementError, match=r"expected the same names"):
        predict(torch.arange(8.0), say, devices=devices, plan=plan, batch_size=8)


def test_what_differs_between_batches_is_refused_with_the_place() -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {"value": batch[0] if batch[0][0] < 4 else batch[0].double()}

    words = r"^batch 1 of a prediction, shard 0: .*float64.*float32.* before; expected the same"
    with pytest.raises(DisagreementError, match=words):
        predict(torch.arange(8.0), say, batch_size=4)


@for_each(
    ("value", "came"),
    [
        (torch.tensor(1.0), r"got \(\)"),
        (torch.ones(3), r"got \(3,\)"),
        (torch.ones(1, 2), r"got \(1, 2\)"),
        (torch.ones(0), r"got \(0,\)"),
        (0.5, r"got 0\.5"),
        ([1.0, 2.0], r"got \[1\.0, 2\.0\]"),
        (None, "got None"),
        (np.ones(2), r"got array"),
    ],
    ids=["scalar", "longer", "shorter", "empty", "number", "list", "none", "numpy"],
)
@both
def test_what_has_not_one_row_a_sample_is_refused(value: object, came: str, devices: int) -> None:
    words = rf"^batch 0 of a prediction, shard \d: expected 'value' to be a .* 2 samples, {came}"
    with pytest.raises(LossError, match=words):
        predict(torch.arange(8.0), lambda model, batch: {"value": value}, batch_size=8)


@for_each("result", [torch.ones(2), None, {}, [("value", torch.ones(2))]])
def test_what_is_no_dict_of_values_is_refused(result: Any) -> None:
    with pytest.raises(LossError, match="expected the function to return a dict of values by name"):
        predict(torch.arange(8.0), lambda model, batch: result, batch_size=8)


@for_each("name", [0, "", "two\nlines"])
def test_names_must_be_words(name: Any) -> None:
    with pytest.raises(LossError, match="expected names of one line"):
        predict(torch.arange(8.0), lambda model, batch: {name: batch[0]})


@for_each("choice", [{"batch_size": 0}, {"batch_size": 4, "workers": -1}])
def test_wrong_numbers_are_refused(choice: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="of at least"):
        make_trainer().predict(as_it_is, TensorDataset(*points(8)), **choice)


def test_a_run_goes_on_after_a_prediction_that_failed() -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("an item")

    trainers = [make_trainer(devices=2) for _ in range(2)]
    with pytest.raises(
        SampleError, match="reading sample 0 in epoch 0 failed: KeyError: 'an item'"
    ):
        trainers[0].predict(as_it_is, Broken(*points(8)), batch_size=4)
    for trainer in trainers:
        trainer.step(points(7))
    assert trainers[0].fingerprint() == trainers[1].fingerprint()


def doubled(samples: list[int]) -> list[torch.Tensor]:
    return [2 * torch.tensor(samples)]


@pytest.mark.processes
def test_workers_and_collate_are_those_of_a_loader() -> None:
    for workers in (0, 2):
        said = make_trainer().predict(
            as_it_is, range(10), batch_size=4, workers=workers, collate=doubled
        )
        assert same(said["value"], 2 * torch.arange(10))


@both
def test_a_device_tells_its_numbers_to_all(devices: int) -> None:
    numbers = {"b": 0.1, "a é": -0.0, "nan": math.nan, "inf": math.inf, "whole": 3}
    told = make_trainer(devices=devices).gather(numbers)
    assert len(told) == devices
    for each in told:
        assert list(each) == list(numbers)
        assert raw(torch.tensor(list(each.values()), dtype=torch.float64)) == raw(
            torch.tensor(list(numbers.values()), dtype=torch.float64)
        )


def test_numbers_come_in_the_order_of_the_devices() -> None:
    exchange = engine_in(make_trainer(devices=3)).exchange
    own = {number: {"number": float(number), "half": number / 2} for number in (2, 0, 1)}
    texts = {number: written(value) for number, value in own.items()}
    assert gather(exchange, texts) == [own[0], own[1], own[2]]


@for_each("other", [{"b": 1.0}, {"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}, {"A": 0.0}])
def test_other_names_on_another_device_are_refused(other: dict[str, float]) -> None:
    exchange = engine_in(make_trainer(devices=2)).exchange
    with pytest.raises(DisagreementError, match=r"^device 1 has \[.*\] and another one \['a'\]"):
        gather(exchange, {0: written({"a": 1.0}), 1: written(other)})


# Processes of their own


def digests(values: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(raw(value)).hexdigest() for name, value in values.items()}


def say_much(model: nn.Module, batch: Batch) -> Said:
    inputs, targets = batch
    return {
        "said": model(inputs) + torch.rand(()),
        "right": (inputs > 0).any(dim=1),
        "bits": inputs.view(torch.int32).long() << 31,
        "zero": targets.double() * 0.0,
        "bytes": inputs.abs().to(torch.uint8),
    }


def say_in_processes(devices: int | None) -> tuple[dict[str, str], list[dict[str, float]]]:
    """More values than fit into one message of the shared exchange."""
    trainer = make_trainer(line(300), devices=devices, shards=4)
    inputs, targets = points(50, 300)
    inputs[3] = math.nan
    said = trainer.predict(say_much, TensorDataset(inputs, targets), batch_size=21)
    rank = float(os.environ.get("RANK", 0))
    return digests(said), trainer.gather({"rank": rank, "half": rank / 2})


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_processes_say_the_same_as_one_device(exchange: Any) -> None:
    said, told = onefold.launch(say_in_processes, devices="cpu:3", args=(None,), exchange=exchange)
    assert said == say_in_processes(1)[0]
    assert told == [{"rank": rank, "half": rank / 2} for rank in (0.0, 1.0, 2.0)]


def disagree() -> None:
    """The second device says something else."""
    name = "odd" if os.environ["RANK"] == "1" else "even"
    make_trainer(devices=None, shards=2).gather({name: 1.0})


@pytest.mark.full
@pytest.mark.processes
def test_a_process_that_says_something_else_is_named() -> None:
    words = r"DisagreementError: device 1 has \['odd'\] and another one \['even'\]"
    with pytest.raises(RunFailed, match=words):
        onefold.launch(disagree, devices="cpu:2")


@for_each("devices", [1, 3])
def test_nothing_is_gathered_of_nothing(devices: int) -> None:
    assert make_trainer(devices=devices).gather({}) == [{}] * devices


def test_a_buffer_that_is_used_again_is_copied() -> None:
    buffer = torch.zeros(2)

    def function(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        buffer.copy_(batch)
        return {"number": buffer}

    said = make_trainer().predict(function, range(8), batch_size=8)
    assert said["number"].tolist() == list(range(8))


def test_names_that_are_gathered_have_one_line() -> None:
    with pytest.raises(ValueError, match="expected names of one line for numbers"):
        make_trainer().gather({"two\nlines": 1.0})

"""Predictions of another size for every sample, such as boxes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from onefold.errors import DisagreementError, LossError
from tests import simulated
from tests.small import line, make_trainer, points
from tests.tables import for_each

Said = dict[str, Any]


def sizes(inputs: torch.Tensor) -> list[int]:
    return [int(row.abs().sum() * 10) % 4 for row in inputs]


def boxes(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
    """Detections; a list of tensors, of masks of any size, and a row a sample."""
    inputs = batch[0]
    scores = model(inputs)[:, 0]
    found = [
        {
            "boxes": (row[:2].repeat(n, 2) + torch.rand(())),
            "scores": score.repeat(n),
            "labels": torch.arange(n),
        }
        for row, score, n in zip(inputs, scores, sizes(inputs), strict=True)
    ]
    masks = [torch.ones(n, n + 1, dtype=torch.bool) for n in sizes(inputs)]
    return {"found": found, "masks": masks, "mean": scores, "whole": [s.sum() for s in scores]}


def predict(function: Callable[..., Said] = boxes, *, samples: int = 23, **settings: Any) -> Said:
    settings = {"model": line(), **settings}
    batch_size = settings.pop("batch_size", 7)
    trainer = make_trainer(**settings)
    said = trainer.predict(function, TensorDataset(*points(samples)), batch_size=batch_size)
    trainer.close()
    return said


def digest(said: Said) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                found.update(key.encode())
                add(each)
        elif isinstance(value, list):
            found.update(str(len(value)).encode())
            for each in value:
                add(each)
        else:
            found.update(f"{value.dtype} {tuple(value.shape)} {value.device}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    add(said)
    return found.hexdigest()


def test_every_sample_has_its_own_in_the_order_of_the_data() -> None:
    said = predict()
    inputs = points(23)[0]
    assert list(said) == ["found", "masks", "mean", "whole"]
    assert [len(each["boxes"]) for each in said["found"]] == sizes(inputs)
    assert [list(each) for each in said["found"]] == [["boxes", "scores", "labels"]] * 23
    assert [tuple(mask.shape) for mask in said["masks"]] == [(n, n + 1) for n in sizes(inputs)]
    assert torch.equal(torch.stack(said["whole"]), said["mean"])
    for each, row in zip(said["found"], inputs, strict=True):
        assert each["boxes"].shape[1] == 4
        if len(each["boxes"]):
            torch.testing.assert_close(each["boxes"][0, 1] - each["boxes"][0, 0], row[1] - row[0])


@for_each("samples", [1, 3, 23])
@for_each("plan", [(2, 2), (0, 4), (1, 0, 3), (1, 1, 1, 1)])
def test_the_bits_do_not_depend_on_the_devices(samples: int, plan: tuple[int, ...]) -> None:
    alone = digest(predict(samples=samples))
    assert digest(predict(samples=samples, devices=len(plan), plan=plan)) == alone


def in_processes() -> str:
    return digest(predict(devices=None, batch_size=9))


@for_each("exchange", ["shared", "collective"])
def test_processes_say_the_same_as_one_device(exchange: Any) -> None:
    found = simulated.launch(in_processes, devices="cpu:3", exchange=exchange)
    assert found == digest(predict(batch_size=9))


@for_each(
    ("entry", "words"),
    [
        (lambda row, n: row[:n] if n else torch.zeros(0, 4), r"alike in dtype and number of dim"),
        (lambda row, n: row.double() if n % 2 else row, "float32 .* and float64 .* for sample"),
        (lambda row, n: {"a": row} if n % 2 else {"b": row}, "dicts of 'value' to have the same"),
        (lambda row, n: {"a": row.int() if n % 2 else row}, "'a' of 'value' to be alike"),
        (lambda row, n: row if n % 2 else {"a": row}, "or a list with one tensor or dict of"),
        (lambda row, n: {}, "or a list with one tensor or dict"),
        (lambda row, n: {"a": 1}, "or a list with one tensor or dict"),
    ],
)
def test_entries_of_other_kinds_are_refused(
    entry: Callable[[torch.Tensor, int], object], words: str
) -> None:
    def function(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        return {"value": [entry(row, n) for n, row in enumerate(batch[0])]}

    with pytest.raises(LossError, match=words):
        predict(function, batch_size=23)


@for_each("other", [lambda rows: torch.stack(rows), lambda rows: rows[:1]])
def test_lists_in_one_shard_and_not_in_another_are_refused(other: Any) -> None:
    def function(model: nn.Module, batch: Sequence[torch.Tensor]) -> Said:
        rows = list(batch[0])
        first = bool((batch[0][0] == points(8)[0][0]).all())
        return {"value": rows if first else other(rows)}

    with pytest.raises((DisagreementError, LossError), match="expected"):
        predict(function, samples=8, devices=2, batch_size=8)


def test_a_buffer_that_is_used_again_is_copied() -> None:
    buffer = torch.zeros(2)

    def function(model: nn.Module, batch: torch.Tensor) -> Said:
        buffer.copy_(batch)
        return {"number": [buffer[:1], buffer[1:]]}

    said = make_trainer().predict(function, range(8), batch_size=8)
    assert [int(each) for each in said["number"]] == list(range(8))

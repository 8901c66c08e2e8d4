from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from onefold.run.observers import Probe
from onefold.system.record import read_record
from tests.small import line
from tests.tables import for_each


def with_buffer(value: torch.Tensor) -> nn.Module:
    model = line()
    model.register_buffer("odd", value)
    return model


def compared(tmp_path: Path, reference: nn.Module, other: nn.Module) -> dict[str, Any]:
    """What a second run writes when it ends in another model."""
    Probe(tmp_path, records=True, run="0").observe(1, reference, 0.5)
    Probe(tmp_path, records=False, run="1").observe(1, other, 0.5)
    (record,) = read_record(tmp_path, "1-0")
    return record


def test_a_run_that_records_writes_digests_and_tensors(tmp_path: Path) -> None:
    model = line()
    probe = Probe(tmp_path, records=True, run="0")
    probe.observe(0, model, None)
    probe.observe(1, model, 0.5)
    lines = read_record(tmp_path, "0-0")
    assert [(line["step"], line["loss"]) for line in lines] == [(0, None), (1, 0.5)]
    for record in lines:
        assert record["digests"] == tensor_digests(named_tensors(model))
        assert record["fingerprint"] == fingerprint_of(tensor_digests(named_tensors(model)))
        assert "differences" not in record
    kept = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert kept == ["trainer-0-step-0.safetensors", "trainer-0-step-1.safetensors"]


def test_runs_that_agree_have_no_differences(tmp_path: Path) -> None:
    record = compared(tmp_path, line(), line())
    assert record["differences"] == {}


def test_the_largest_difference_of_every_tensor_is_told(tmp_path: Path) -> None:
    other = line()
    with torch.no_grad():
        other.weight[0, 1] += 0.25
        other.weight[0, 2] -= 0.5
    assert compared(tmp_path, line(), other)["differences"] == {"weight": 0.5}


@for_each("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_buffers_of_any_type_are_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    ones, zeros = (with_buffer(f(2).to(dtype)) for f in (torch.ones, torch.zeros))
    assert compared(tmp_path, ones, zeros)["differences"] == {"odd": 1.0}


def test_another_shape_has_no_difference_in_numbers(tmp_path: Path) -> None:
    record = compared(tmp_path, with_buffer(torch.ones(2)), with_buffer(torch.ones(3)))
    assert record["differences"] == {"odd": None}


def test_a_tensor_that_the_reference_lacks_differs(tmp_path: Path) -> None:
    assert compared(tmp_path, line(), with_buffer(torch.ones(2)))["differences"] == {"odd": None}


def test_only_the_first_step_that_differs_is_compared(tmp_path: Path) -> None:
    reference = Probe(tmp_path, records=True, run="0")
    other = Probe(tmp_path, records=False, run="1")
    for step, value in enumerate((0.0, 1.0, 2.0)):
        reference.observe(step, with_buffer(torch.zeros(1)), None)
        other.observe(step, with_buffer(torch.full((1,), value)), None)
    assert [record.get("differences") for record in read_record(tmp_path, "1-0")] == [
        {},
        {"odd": 1.0},
        None,
    ]


def test_steps_that_the_reference_did_not_make_are_not_compared(tmp_path: Path) -> None:
    Probe(tmp_path, records=False, run="1").observe(3, line(), 0.5)
    (record,) = read_record(tmp_path, "1-0")
    assert "differences" not in record


def test_tied_weights_are_recorded_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert compared(tmp_path, model, model)["differences"] == {}


def test_numbers_that_are_not_equal_to_themselves_do_not_differ(tmp_path: Path) -> None:
    odd = torch.tensor([math.nan])
    assert compared(tmp_path, with_buffer(odd), with_buffer(odd))["differences"] == {}


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    zero = torch.zeros(1)
    assert compared(tmp_path, with_buffer(zero), with_buffer(-zero))["differences"] == {"odd": 0.0}


def test_complex_buffers_are_compared(tmp_path: Path) -> None:
    record = compared(
        tmp_path, with_buffer(torch.tensor([1j])), with_buffer(torch.tensor([3 + 1j]))
    )
    assert record["differences"] == {"odd": 3.0}

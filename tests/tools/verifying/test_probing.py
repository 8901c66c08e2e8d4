"""What a comparison of two runs notes of each step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from onefold.system.safe_files import read_record
from onefold.tools.verifying.probing import Probe, VerifyOptions
from tests.small import line
from tests.tables import for_each


def having(value: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """A model with a buffer of this value."""
    model = line()
    model.register_buffer("odd", torch.tensor(value, dtype=dtype))
    return model


def moved() -> nn.Module:
    model = line()
    with torch.no_grad():
        model.weight.sub_(torch.tensor([0, 0.25, 0.5]))
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


TIED = tied()


def probes(folder: Path) -> tuple[Probe, Probe]:
    """Of a run that is recorded, and of one that is compared with it."""
    options = VerifyOptions(folder=str(folder), run="0", records=True)
    return Probe(options), Probe(replace(options, run="1", records=False))


@for_each(
    ("reference", "other", "differences"),
    [
        (line(), line(), {}),
        (line(), moved(), {"weight": 0.5}),
        *(
            (having([1, 1], dtype), having([0, 0], dtype), {"odd": 1.0})
            for dtype in (torch.bfloat16, torch.int64, torch.bool)
        ),
        (having([1.0, 1.0]), having([1.0]), {"odd": None}),
        (line(), having([1.0]), {"odd": None}),
        (TIED, TIED, {}),
        (having([torch.nan]), having([torch.nan]), {}),
        (having([0.0]), having([-0.0]), {"odd": 0.0}),
        (having([1j]), having([3 + 1j]), {"odd": 3.0}),
    ],
)
def test_the_largest_difference_of_every_tensor_is_noted(
    reference: nn.Module, other: nn.Module, differences: dict[str, Any], tmp_path: Path
) -> None:
    recorded, compared = probes(tmp_path)
    recorded.observe(1, reference, 0.5)
    compared.observe(1, other, 0.5)
    (record,) = read_record(tmp_path, "1-0")
    assert record["differences"] == differences


def test_the_first_step_that_differs_is_compared_alone(tmp_path: Path) -> None:
    recorded, compared = probes(tmp_path)
    for step, value in enumerate((0.0, 1.0, 2.0)):
        recorded.observe(step, having([0.0]), None)
        compared.observe(step, having([value]), None)
    compared.observe(3, line(), 0.5)  # which the recorded run has not made
    first, other = read_record(tmp_path, "0-0"), read_record(tmp_path, "1-0")
    assert [each.get("differences") for each in other] == [{}, {"odd": 1.0}, None, None]
    digests = tensor_digests(named_tensors(having([0.0])))
    for each in (*first, other[0]):
        assert (each["digests"], each["fingerprint"]) == (digests, fingerprint_of(digests))
    kept = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert kept == [f"trainer-0-step-{step}.safetensors" for step in range(3)]

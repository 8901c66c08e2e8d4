"""The recipe of `docs/do/large-models.md`: one layer in several modules, each of them a stage."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onefold.placement import partitioned
from tests import simulated
from tests.conftest import ROOT


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """The names of the page's script."""
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs/do/large-models.md").read_text())
    (script,) = (block for block in blocks if "ModuleList" in block)
    (tmp_path / "script.py").write_text(script)
    return runpy.run_path(str(tmp_path / "script.py"))


def gradients_with(cut: nn.Module, whole: nn.Module, dim: int, given: torch.Tensor) -> None:
    """Give the parts the values of the whole layer, and compute with both."""
    with torch.no_grad():
        for name, values in whole.named_parameters():
            pieces = values.chunk(len(cut.parts), dim if values.dim() > 1 else 0)
            for part, piece in zip(cut.parts, pieces, strict=True):
                part.get_parameter(name).copy_(piece)
    found, expected = cut(given), whole(given)
    torch.testing.assert_close(found, expected)
    for result in (found, expected):
        result.square().sum().backward()


def test_an_embedding_in_parts_has_the_bits_of_the_whole_one(recipe: dict[str, Any]) -> None:
    whole, tokens = nn.Embedding(64, 16), torch.randint(64, (3, 5))
    cut = recipe["Joined"](nn.Embedding(64, 4) for _ in range(4))
    gradients_with(cut, whole, 1, tokens)
    assert torch.equal(cut(tokens), whole(tokens))
    joined = torch.cat([part.weight.grad for part in cut.parts], 1)
    assert torch.equal(joined, whole.weight.grad)


def test_a_linear_layer_in_parts_has_the_values_of_the_whole_one(recipe: dict[str, Any]) -> None:
    whole = nn.Linear(16, 64)
    cut = recipe["Joined"](nn.Linear(16, 16) for _ in range(4))
    gradients_with(cut, whole, 0, torch.randn(3, 5, 16))
    for name, parameter in whole.named_parameters():
        joined = torch.cat([part.get_parameter(name).grad for part in cut.parts])
        torch.testing.assert_close(joined, parameter.grad)


def test_only_the_parts_fit_and_the_devices_do_not_matter(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned, "capacity_bytes", lambda _: 3000)
    options: dict[str, Any] = {"devices": "cpu:3", "placement": "partition"}
    assert simulated.launch(recipe["main"], args=(4,), **options) == recipe["main"](4)
    for placement in ("partition", "offload"):
        with pytest.raises(ValueError, match=r"cut its largest layer into modules of their own: "):
            simulated.launch(recipe["main"], args=(1,), **options | {"placement": placement})

"""The recipes of `docs/do/split-a-layer.md`: one layer in several modules, each of them a stage."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from docs import execute
from torch import nn

from onefold.placement import partitioned
from tests import simulated
from tests.conftest import ROOT
from tests.tables import for_each, some

SCRIPTS = execute.files(ROOT / "docs/do/split-a-layer.md")
PARTS = {"linear.py": 6, "block.py": 3, "vocabulary.py": 6}


def run(name: str, parts: int | None = None) -> dict[str, Any]:
    """Run a script of the page, with another number of parts if one is given."""
    text = SCRIPTS[name]
    if parts is not None:
        text = text.replace(f"parts={PARTS[name]})", f"parts={parts})")
        assert text != SCRIPTS[name]
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), names)
    return names


def fingerprint(name: str, parts: int | None = None) -> str:
    found: str = run(name, parts)["trainer"].fingerprint()
    return found


@pytest.mark.parametrize(
    ("name", "placement"),
    some(
        [
            ("linear.py", "partition"),
            ("vocabulary.py", "partition"),
            ("block.py", "pipeline"),
            ("vocabulary.py", "pipeline"),
        ],
        2,
    ),
)
def test_only_the_parts_fit_and_the_devices_do_not_matter(
    name: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if placement == "partition":
        monkeypatch.setattr(partitioned, "capacity_bytes", lambda _: 6000)
    launch: dict[str, Any] = {"devices": "cpu:3", "placement": placement}
    assert simulated.launch(fingerprint, args=(name,), **launch) == fingerprint(name)


@for_each("placement", some(["partition", "offload"], 2))
def test_an_uncut_layer_does_not_fit(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned, "capacity_bytes", lambda _: 6000)
    with pytest.raises(ValueError, match=r"split its largest layer into several modules: "):
        simulated.launch(
            fingerprint, devices="cpu:3", placement=placement, args=("vocabulary.py", 1)
        )


def set_parts(parts: Any, whole: nn.Linear, dim: int) -> None:
    """Copy the values of a linear layer as the page says."""
    with torch.no_grad():
        for part, rows in zip(parts, whole.weight.chunk(len(parts), dim), strict=True):
            part.weight.copy_(rows)
        biases = whole.bias.chunk(len(parts)) if dim == 0 else [whole.bias]
        for part, values in zip(parts, biases, strict=False):
            part.bias.copy_(values)


def test_columns_and_rows_have_the_values_of_the_uncut_layers() -> None:
    model = run("linear.py")["model"]
    wide, narrow, x = nn.Linear(16, 96), nn.Linear(96, 16), torch.randn(5, 16)
    set_parts(model.wide, wide, 0)
    set_parts(model.narrow, narrow, 1)
    model.zero_grad()
    found, expected = model(x), x + narrow(wide(x).relu())
    torch.testing.assert_close(found, expected)
    for result in (found, expected):
        result.square().sum().backward()
    for parts, whole, dim in ((model.wide, wide, 0), (model.narrow, narrow, 1)):
        joined = torch.cat([part.weight.grad for part in parts], dim)
        torch.testing.assert_close(joined, whole.weight.grad)


def test_heads_have_the_values_of_uncut_attention() -> None:
    heads_of, parts = run("block.py")["Heads"], 3
    whole, x = nn.MultiheadAttention(24, 6, batch_first=True), torch.randn(2, 5, 24)
    nn.init.normal_(whole.in_proj_bias)
    given = total = x
    for n in range(parts):
        part = heads_of(24, 2, 4)
        with torch.no_grad():
            for name, values in (("weight", whole.in_proj_weight), ("bias", whole.in_proj_bias)):
                rows = values.unflatten(0, (3, parts, -1))[:, n].flatten(0, 1)
                part.qkv.get_parameter(name).copy_(rows)
            part.out.weight.copy_(whole.out_proj.weight.chunk(parts, dim=1)[n])
        given, total = part(given, total)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected, _ = whole(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(total, x + expected)


def test_a_vocabulary_in_parts_has_the_values_of_the_uncut_one() -> None:
    model = run("vocabulary.py")["model"]
    model.zero_grad()
    rows, columns = (
        torch.cat([part.weight.detach() for part in parts]).requires_grad_()
        for parts in (model.embedding, model.softmax)
    )
    tokens, targets = torch.randint(128, (2, 3, 8))
    embedded: Any = 0.0
    for part in model.embedding:
        _, embedded = part(tokens, embedded)
    assert torch.equal(embedded, F.embedding(tokens, rows))
    logits = F.embedding(tokens, rows) @ columns.t()
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    found = model(tokens, targets)
    torch.testing.assert_close(found, expected)
    for result in (found, expected):
        result.sum().backward()
    for parts, whole in ((model.embedding, rows), (model.softmax, columns)):
        torch.testing.assert_close(torch.cat([part.weight.grad for part in parts]), whole.grad)

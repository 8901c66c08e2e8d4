"""Layers in slices take and give what the whole ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.sliced import Sliced
from tests import simulated
from tests.tables import for_each

CLOSE = {"atol": 1e-9, "rtol": 1e-9}
WIDE = torch.float64


def gradients(layer: nn.Module, *inputs: Any, **more: Any) -> list[torch.Tensor]:
    given = inputs[0].clone().requires_grad_()
    result = layer(given, *inputs[1:], **more)
    result = result[0] if isinstance(result, tuple) else result
    result.square().sum().backward()
    assert given.grad is not None
    return [result.detach(), given.grad]


def test_a_linear_layer() -> None:
    for dim, slices, bias, shape in (
        (None, 3, False, (4, 5)),
        (0, 5, True, (2, 3, 5)),
        (0, 2, False, (0, 5)),
        (1, 1, False, (2, 3, 5)),
        (1, 2, True, (4, 5)),
        (1, 5, True, (0, 5)),
    ):
        layer = nn.Linear(5, 7, bias=bias, dtype=WIDE)
        sliced = Sliced(copy.deepcopy(layer), slices, dim)
        inputs = torch.randn(shape, dtype=WIDE)
        torch.testing.assert_close(gradients(sliced, inputs), gradients(layer, inputs), **CLOSE)
        joined = torch.cat([part.weight.grad for part in sliced.slices], dim=dim or 0)
        torch.testing.assert_close(joined, layer.weight.grad, **CLOSE)
        numbers = [sum(p.numel() for p in each.parameters()) for each in (sliced, layer)]
        assert numbers[0] == numbers[1]


def attention(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(12, 6, dtype=WIDE, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


SAMPLES, LENGTH, SOURCE = 3, 4, 5
PADDING = torch.arange(SOURCE) > torch.tensor([[2], [4], [3]])
AFTER = torch.ones(LENGTH, SOURCE).triu(2).bool()


@for_each(
    ("slices", "masks", "options"),
    [
        (1, {"key_padding_mask": PADDING, "attn_mask": AFTER, "is_causal": False}, {}),
        (2, {}, {"batch_first": True}),
        (2, {"attn_mask": torch.randn(SAMPLES * 6, LENGTH, SOURCE, dtype=WIDE)}, {"kdim": 9}),
        (4, {"attn_mask": torch.randn(LENGTH, SOURCE, dtype=WIDE)}, {"bias": False}),
        (4, {"key_padding_mask": PADDING}, {"kdim": 9, "vdim": 10}),
        (6, {"attn_mask": AFTER}, {"batch_first": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_attention(slices: int, masks: dict[str, Any], options: dict[str, Any]) -> None:
    layer = attention(**options)
    sliced = Sliced(copy.deepcopy(layer), slices)
    shapes = [(SAMPLES, LENGTH, 12), (SAMPLES, SOURCE, layer.kdim), (SAMPLES, SOURCE, layer.vdim)]
    inputs = [torch.randn(shape, dtype=WIDE) for shape in shapes]
    if not layer.batch_first:
        inputs = [each.transpose(0, 1) for each in inputs]
    more = {**masks, "need_weights": False}
    found, expected = gradients(sliced, *inputs, **more), gradients(layer, *inputs, **more)
    torch.testing.assert_close(found, expected, **CLOSE)
    if layer.kdim == layer.vdim == 12:  # one sample without a batch
        alone = [torch.randn(LENGTH, 12, dtype=WIDE)] * 3
        found = sliced(*alone, need_weights=False)[0]
        torch.testing.assert_close(found, layer(*alone, need_weights=False)[0], **CLOSE)


@for_each("masked", ["time", "padding", "no"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of")
def test_pytorchs_own_layers_take_it(masked: str) -> None:
    layer = nn.TransformerEncoderLayer(12, 6, 24, 0.0, batch_first=True, dtype=WIDE)
    whole = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    sliced = copy.deepcopy(whole)
    for part in sliced.layers:
        part.self_attn = Sliced(part.self_attn, 3)
        part.linear1 = Sliced(part.linear1, 2, dim=0)
        part.linear2 = Sliced(part.linear2, 2, dim=1)
    inputs = torch.randn(2, 5, 12, dtype=WIDE)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=WIDE)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    more = {"time": {"mask": mask}, "padding": {"src_key_padding_mask": padding}, "no": {}}[masked]
    for training in (True, False):
        with torch.set_grad_enabled(training):
            expected, found = (each.train(training)(inputs, **more) for each in (whole, sliced))
        if masked == "padding":  # what is padded is zeros by one kernel and anything by another
            expected, found = expected[~padding], found[~padding]
        torch.testing.assert_close(found, expected, **CLOSE)


def test_dtypes_dropout_and_numbers_are_those_of_the_layer() -> None:
    layer, inputs = nn.Linear(8, 6).eval(), torch.randn(2, 40, 8)
    heads = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    sliced = Sliced(heads, 2)
    for dim in (0, 1):
        part = Sliced(layer, 2, dim)
        assert (part.in_features, part.out_features, part.training) == (8, 6, False)
        assert torch.equal(part.weight, layer.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert part(inputs).dtype == torch.bfloat16
            one, other = (each(*[inputs] * 3, need_weights=False)[0] for each in (sliced, heads))
            assert one.dtype == other.dtype
    for same in (False, True):
        one, other = (sliced(inputs, inputs, inputs, need_weights=False)[0] for _ in range(2))
        assert torch.equal(one, other) is same
        sliced.eval()


def test_values_are_copied_nothing_is_drawn_and_what_is_frozen_stays_frozen() -> None:
    layer = nn.Linear(4, 6)
    layer.bias.requires_grad_(False)
    state = torch.get_rng_state()
    rows, columns = Sliced(layer, 2, dim=0), Sliced(layer, 2, dim=1)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        joined = torch.cat([part.weight for part in rows.slices])
        assert torch.equal(joined, layer.weight)
        layer.weight.zero_()
    assert all(bool(part.weight.all()) for part in rows.slices)
    assert [part.bias for part in columns.slices] == [None, None]
    assert not any(p.requires_grad for p in (rows.slices[0].bias, columns.bias))
    heads = attention()
    heads.in_proj_weight.requires_grad_(False)
    names = {name for name, p in Sliced(heads, 2).named_parameters() if p.requires_grad}
    parts = ("query.bias", "key.bias", "value.bias", "out.weight")
    assert names == {"added", *(f"slices.{n}.{part}" for n in (0, 1) for part in parts)}
    with torch.device("meta"):
        elsewhere = Sliced(nn.Linear(4, 6, dtype=torch.bfloat16), 2)
    assert {(p.device.type, p.dtype) for p in elsewhere.parameters()} == {("meta", torch.bfloat16)}


LINEAR, HOOKED = nn.Linear(3, 4), nn.Linear(3, 4)
HOOKED.register_forward_hook(lambda *_: None)


def test_what_cannot_be_cut_is_refused() -> None:
    for layer, arguments, text in (
        (LINEAR, (5,), "expected 1 to 4 slices, as the layer has 4 outputs"),
        (LINEAR, (4, 1), "expected 1 to 3 slices, as the layer has 3 input"),
        (LINEAR, (True,), "expected 1 to 4 slices, .* got True"),
        (LINEAR, (2, 2), "expected dim 0, the outputs, or 1, .* got 2"),
        (attention(), (2, 0), "expected no dim for attention, .* got 0"),
        (attention(), (7,), "expected 1 to 6 slices, as the layer has 6 heads"),
        (attention(add_bias_kv=True), (2,), "has bias_k, bias_v besides"),
        (attention(add_zero_attn=True), (2,), "expected attention without add_zero"),
        (nn.Conv2d(1, 2, 3), (2,), r"expected an nn\.Linear or .* got Conv2d"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (2,), "got ParametrizedLinear"),
        (HOOKED, (2,), "expected a layer without hooks"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            Sliced(layer, *arguments)


def test_what_attention_cannot_be_given_is_refused() -> None:
    sliced, inputs = Sliced(attention(), 2), [torch.randn(2, 3, 12, dtype=WIDE)] * 3
    with pytest.raises(TypeError, match=r"expected a mask of bool or .* got torch\.int64"):
        sliced(*inputs, torch.zeros(3, 2, dtype=torch.int64), need_weights=False)
    with pytest.raises(ValueError, match="expected need_weights=False"):
        sliced(*inputs)
    with pytest.raises(ValueError, match="expected attn_mask with is_causal=True"):
        sliced(*inputs, need_weights=False, is_causal=True)
    # An encoder that was made with whole layers looks for this.
    with pytest.raises(TypeError, match="enable_nested_tensor=False"):
        sliced.in_proj_weight  # noqa: B018


def trained(slices: int) -> str:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.1, batch_first=True)
    layer.self_attn = Sliced(layer.self_attn, slices)
    layer.linear1 = Sliced(layer.linear1, slices, dim=0)
    layer.linear2 = Sliced(layer.linear2, slices, dim=1)
    model = nn.Sequential(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=(1, 2))

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, seed=3)
    for number in range(3):
        trainer.step(torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(number)))
    return trainer.fingerprint()


def test_the_number_of_slices_decides_the_result_and_that_of_devices_does_not() -> None:
    alone = [trained(slices) for slices in (1, 2, 4)]
    assert len(set(alone)) == 3
    for keep in ("span", "host"):
        assert simulated.launch(trained, devices="cpu:3", keep=keep, args=(4,)) == alone[2]

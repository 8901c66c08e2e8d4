"""Devices that keep partitions, between steps: fingerprints, evaluation and prediction have
one stage after the other brought, and give what devices with all give."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.placement.partitioned import (
    FEATURES,
    LAYER_BYTES,
    LAYERS,
    Layered,
    run,
    samples,
    trained,
    watched,
)
from tests.tables import for_each


def fingerprints(settings: dict[str, Any]) -> tuple[list[str], list[int], int, int]:
    trainer = trained(**settings)
    with watched(trainer) as found:
        ours = trainer.fingerprint()
    with trainer.gathered():
        theirs = trainer.fingerprint()
    trainer.step(samples())
    return [ours, theirs, trainer.fingerprint()], found.stages, found.most_bytes, found.whole


@for_each(("settings", "devices"), [({}, 3), ({"precision": "bf16-params"}, 2)])
def test_a_fingerprint_brings_a_stage_at_a_time(settings: dict[str, Any], devices: int) -> None:
    expected, *_ = fingerprints(settings)
    values, stages, most_bytes, whole = run(fingerprints, settings, devices=devices)
    assert values == expected
    assert whole == 0
    # The lead digests every second, or third, stage.
    assert stages == list(range(0, 1 + LAYERS, devices))
    assert 0 < most_bytes <= LAYER_BYTES


def scored(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs = model(batch)
    return {"loss": outputs.square().mean(dim=1), "high": outputs[:, 0] > 0}


def evaluated(
    make: Callable[[], nn.Module] = Layered, score: Any = scored, batch_size: int = 5
) -> tuple[Any, str, list[int], int, int]:
    trainer = trained(make)
    with watched(trainer) as found:
        scores = trainer.evaluate(score, samples(), batch_size=batch_size)
        predicted = trainer.predict(
            lambda m, b: {"outputs": m(b)}, samples(7), batch_size=batch_size
        )["outputs"]
    trainer.step(samples())
    values = scores, predicted.tolist()
    return values, trainer.fingerprint(), found.stages, found.most_bytes, found.whole


# In batches of one, some devices have no sample, and with three of them not all shards are even.
@for_each(("devices", "batch_size"), [(2, 5), (3, 1)])
def test_forward_passes_bring_a_stage_at_a_time(devices: int, batch_size: int) -> None:
    expected = evaluated(batch_size=batch_size)
    values, fingerprint, stages, most_bytes, whole = run(
        evaluated, Layered, scored, batch_size, devices=devices
    )
    assert (values, fingerprint) == expected[:2]
    assert whole == 0
    # The root, one layer after the other, and the next one on its way.
    assert most_bytes == 2 * LAYER_BYTES + 4 * FEATURES
    assert stages[: 1 + LAYERS] == list(range(1 + LAYERS))


def looking(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    """Reads parameters where no layer that holds them runs, and keeps what it has read."""
    assert isinstance(model, Layered)
    layers: Any = model.layers
    weight = layers[4].weight
    state = model.state_dict()
    direct = nn.functional.linear(batch, weight)
    total: Any = sum(p.abs().sum() for p in model.parameters())
    return {
        "direct": (model(direct) @ state["layers.2.weight"]).square().mean(dim=1),
        "bias": onefold.Mean(layers[3].bias.sum() * len(batch), len(batch)),
        "total": onefold.Mean(total * len(batch), len(batch)),
    }


class Attending(nn.Module):
    """A transformer, which PyTorch computes in another way in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(len(x), 8, 8)
        padding = torch.arange(8) > 2 + 5 * (tokens[:, :1, 0] > 0)
        return self.head(self.encoder(tokens, src_key_padding_mask=padding)).flatten(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@for_each(("make", "score"), [(Layered, looking), (Attending, scored)])
def test_a_score_may_use_the_model_as_it_likes(make: Callable[[], nn.Module], score: Any) -> None:
    assert run(evaluated, make, score)[:2] == evaluated(make, score)[:2]


class Row(nn.Module):
    """Layers that a pipeline can share out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def changed_in_a_block(how: str) -> str:
    trainer = trained(Row)
    model: Any = trainer.model
    weight = model.layers[2].weight
    try:
        with trainer.gathered():
            with torch.no_grad():
                (weight.data if "data" in how else weight).mul_(2.0)
            if "step" in how:
                trainer.step(samples())
        trainer.step(samples())
    except onefold.errors.OnefoldError as error:
        return str(error)
    return "none"


@for_each(
    ("how", "placement", "words"),
    [
        ("in place", "pipeline", "layers.2.weight was written to in `with trainer.gathered():`"),
        ("data", "partition", "layers.2.weight was written to in `with trainer.gathered():`"),
        ("step in place", "partition", "layers.2.weight changed since the previous call"),
        ("step data", "pipeline", "a parameter (through .data) changed since the previous call"),
    ],
)
def test_changes_where_the_model_is_read_are_refused(how: str, placement: Any, words: str) -> None:
    assert words in run(changed_in_a_block, how, placement=placement)


def refusal(call: str, whole: bool) -> str:
    trainer = trained()

    def score(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if call == "torch.func":
            slope = torch.func.grad(lambda x: model(x).square().sum())(batch)
            return {"slope": slope.mean(dim=1)}
        getattr(trainer, call)(*([1.0] if call == "gather" else []))
        return scored(model, batch)

    try:
        with trainer.gathered() if whole else nullcontext():
            trainer.evaluate(score, samples(8), batch_size=8)
    except RuntimeError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "none"


@for_each("call", ["gather", "barrier", "fingerprint", "torch.func"])
def test_what_an_evaluation_cannot_do_is_said_and_works_in_the_block(call: str) -> None:
    by_func, words = "with trainer.gathered():", "was called while a shard was computed"
    assert (by_func if call == "torch.func" else words) in run(refusal, call, False)
    assert run(refusal, call, True) == "none"

"""Devices that keep their spans alone, between steps: fingerprints, evaluation and prediction have
one stage after the other brought, and give what devices with all give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.errors import PeerFailed
from onefold.testing import outcomes
from tests.engine.lent import (
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
    with trainer.whole():
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


# Evaluation and prediction


def scored(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs = model(batch)
    return {"loss": outputs.square().mean(dim=1), "high": outputs[:, 0] > 0}


def rows(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"outputs": model(batch)}


def evaluated(
    make: Callable[[], nn.Module] = Layered, score: Any = scored, batch_size: int = 5
) -> tuple[Any, str, list[int], int, int]:
    trainer = trained(make)
    with watched(trainer) as found:
        scores = trainer.evaluate(score, samples(), batch_size=batch_size)
        predicted = trainer.predict(rows, samples(7), batch_size=batch_size)["outputs"]
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
    weight = model.layers[4].weight
    state = model.state_dict()
    direct = nn.functional.linear(batch, weight)
    total = sum(p.abs().sum() for p in model.parameters())
    return {
        "direct": (model(direct) @ state["layers.2.weight"]).square().mean(dim=1),
        "bias": onefold.Mean(model.layers[3].bias.sum() * len(batch), len(batch)),
        "total": onefold.Mean(total * len(batch), len(batch)),
    }


def differentiating(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    """Has gradients computed in an evaluation."""
    with torch.enable_grad():
        inputs = batch.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(model(inputs).square().sum(), inputs)
    return {"slope": slopes.square().mean(dim=1)}


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
        return self.head(self.encoder(tokens, src_key_padding_mask=padding)).flatten(1)  # type: ignore[no-any-return]


class AttendingInside(Attending):
    """Calls a part of a layer and not the layer itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(len(x), 8, 8)
        layer: Any = self.encoder.layers[1]
        return super().forward(x + layer.self_attn(tokens, tokens, tokens)[0].flatten(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@for_each(
    ("make", "score"),
    [
        (Layered, looking),
        (Layered, differentiating),
        (Attending, scored),
        (AttendingInside, scored),
    ],
)
def test_a_score_may_use_the_model_as_it_likes(make: Callable[[], nn.Module], score: Any) -> None:
    assert run(evaluated, make, score)[:2] == evaluated(make, score)[:2]


def in_blocks() -> tuple[Any, list[int]]:
    trainer = trained()
    trainer.average(decay=0.5)
    trainer.step(samples())
    with torch.inference_mode():
        found = [trainer.evaluate(scored, samples(), batch_size=4)]
    with torch.no_grad():
        found.append(trainer.evaluate(scored, samples(), batch_size=4))
    with trainer.whole():
        found.append(trainer.evaluate(scored, samples(), batch_size=4))
    with trainer.averaged():
        found.append(trainer.evaluate(scored, samples(), batch_size=4))
        found.append(trainer.predict(rows, samples(), batch_size=4)["outputs"].tolist())
    trainer.step(samples())
    found.append(trainer.fingerprint())
    return found, [part.numel() for part in trainer.model.parameters()]


def test_in_blocks_of_the_script() -> None:
    found = run(in_blocks)
    assert found == in_blocks()
    assert found[0][0] == found[0][1] == found[0][2] != found[0][3]


def with_compiled_score() -> tuple[Any, int]:
    trainer = trained()
    score: Any = torch.compile(scored, backend="eager")
    with watched(trainer) as found:
        scores = trainer.evaluate(score, samples(8), batch_size=8)
    return scores, found.whole


def test_compiled_code_has_all_parameters() -> None:
    scores, whole = run(with_compiled_score)
    assert scores == with_compiled_score()[0]
    assert whole == 1


# What is refused


class Row(nn.Module):
    """Layers that a line of devices can share out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def changed_in_a_block(how: str, factors: tuple[float, ...] = (2.0,)) -> str:
    """What the error says of a change to one parameter, or the fingerprint."""
    trainer = trained(Row)
    model: Any = trainer.model
    weight = model.layers[2].weight
    try:
        with trainer.whole():
            for factor in factors:
                with torch.no_grad():
                    (weight.data if "data" in how else weight).mul_(factor)
            if "step" in how:
                trainer.step(samples())
        trainer.step(samples())
    except onefold.errors.OnefoldError as error:
        return str(error)
    return trainer.fingerprint()


@for_each(
    ("how", "keep", "words"),
    [
        ("in place", "stages", "layers.2.weight was written to in `with trainer.whole():`"),
        ("data", "span", "layers.2.weight was written to in `with trainer.whole():`"),
        ("step in place", "span", "layers.2.weight changed since the call before"),
        ("step data", "stages", "parameters (through .data) changed since the call before"),
    ],
)
def test_what_is_changed_where_the_model_is_read_is_refused(
    how: str, keep: Any, words: str
) -> None:
    assert words in run(changed_in_a_block, how, keep=keep)


def refusal(call: str, whole: bool) -> str:
    """What is said of a score that calls the trainer, or uses torch.func."""
    trainer = trained()

    def score(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if call == "torch.func":
            slope = torch.func.grad(lambda x: model(x).square().sum())(batch)
            return {"slope": slope.mean(dim=1)}
        getattr(trainer, call)(*([1.0] if call == "gather" else []))
        return scored(model, batch)

    try:
        if whole:
            with trainer.whole():
                trainer.evaluate(score, samples(8), batch_size=8)
        else:
            trainer.evaluate(score, samples(8), batch_size=8)
    except RuntimeError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "none"


@for_each(
    ("call", "words"),
    [
        ("gather", "was called while a shard was computed"),
        ("barrier", "was called while a shard was computed"),
        ("fingerprint", "was called while a shard was computed"),
        ("torch.func", "with trainer.whole():"),
    ],
)
def test_what_an_evaluation_cannot_do_is_said_and_works_in_the_block(call: str, words: str) -> None:
    assert words in run(refusal, call, False)
    assert run(refusal, call, True) == "none"


def failing_on_one_device() -> None:
    trainer = trained()

    def failing(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        model(batch)
        if not trainer.is_lead:
            raise ZeroDivisionError("of device 1")
        return scored(model, batch)

    trainer.evaluate(failing, samples(), batch_size=9)


def test_a_failure_on_one_device_ends_the_others_wait() -> None:
    options = RunOptions(keep="span", exchange="collective")
    lead, other = outcomes(failing_on_one_device, 2, options=options)
    with pytest.raises(PeerFailed, match="of device 1"):
        raise lead.error
    assert isinstance(other.error, ZeroDivisionError)

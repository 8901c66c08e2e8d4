"""Devices that keep their spans alone, between steps: fingerprints, evaluation, prediction and
checkpoints have one stage after the other brought, and give what devices with all give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.engine.lending import SpanLending
from onefold.errors import PeerFailed
from onefold.exchange.carrier import Want
from onefold.testing import outcomes
from tests import simulated
from tests.inside import engine_in
from tests.tables import for_each

FEATURES, LAYERS = 64, 6
LAYER_BYTES = 4 * (FEATURES * FEATURES + FEATURES)


class AtHand:
    """What of the parameters was on this device in a block, besides what it keeps."""

    whole = 0
    """How many times all of them were brought."""
    most_bytes = 0
    """The most that was brought for a while."""
    stages: list[int]

    def __init__(self) -> None:
        self.stages = []


@contextmanager
def watched(trainer: onefold.Trainer) -> Iterator[AtHand]:
    found = AtHand()
    lending = engine_in(trainer).lending
    if not isinstance(lending, SpanLending):
        yield found
        return
    # Of this device: what is patched in a class would be patched for all that are simulated.
    fold, flat = lending._fold, lending._flat
    want, get_back = fold.want, flat.get_back

    def noting_want(wish: Want) -> None:
        found.stages.append(wish.stage)
        here = [room.numel() for room in lending._rooms.values()]
        found.most_bytes = max(found.most_bytes, sum(here) + wish.room.numel())
        want(wish)

    def noting_whole() -> None:
        found.whole += 1
        get_back()

    with (
        mock.patch.object(fold, "want", noting_want),
        mock.patch.object(flat, "get_back", noting_whole),
    ):
        yield found


class Layered(nn.Module):
    """Layers of one size, a frozen one among them, weights that are shared, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS))
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.again = self.layers[1]
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.frozen(x) * self.scale  # type: ignore[no-any-return]


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)  # type: ignore[no-any-return]


def samples(count: int = 9) -> torch.Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(5))


def trained(
    make: Callable[[], nn.Module] = Layered,
    loss: Callable[[Any, Any], Any] = squared,
    **settings: Any,
) -> onefold.Trainer:
    torch.manual_seed(3)
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, **settings)
    for _ in range(2):
        trainer.step(samples())
    return trainer


def launched(function: Callable[..., Any], *given: Any, devices: int = 2, **options: Any) -> Any:
    return simulated.launch(
        function,
        devices=f"cpu:{devices}",
        args=given,
        exchange="collective",
        **{"keep": "span", **options},
    )


# Fingerprints


def fingerprints(precision: str | None) -> tuple[list[str], list[int], int, int]:
    settings = {} if precision is None else {"precision": precision}
    trainer = trained(**settings)
    with watched(trainer) as found:
        ours = trainer.fingerprint()
    with trainer.whole():
        theirs = trainer.fingerprint()
    trainer.step(samples())
    return [ours, theirs, trainer.fingerprint()], found.stages, found.most_bytes, found.whole


@for_each(("precision", "devices"), [(None, 2), (None, 3), ("bf16-params", 2)], ids=str)
def test_a_fingerprint_brings_a_stage_at_a_time(precision: str | None, devices: int) -> None:
    expected, *_ = fingerprints(precision)
    values, stages, most_bytes, whole = launched(fingerprints, precision, devices=devices)
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


# In batches of two, some devices have no sample, and with three of them not all shards are even.
@for_each(("devices", "batch_size"), [(2, 5), (3, 5), (2, 2), (3, 1)])
def test_forward_passes_bring_a_stage_at_a_time(devices: int, batch_size: int) -> None:
    expected = evaluated(batch_size=batch_size)
    found = launched(evaluated, Layered, scored, batch_size, devices=devices)
    assert found[:2] == expected[:2]
    assert found[-1] == 0
    # The root, one layer after the other, and the next one on its way.
    assert found[-2] == 2 * LAYER_BYTES + 4 * FEATURES
    assert found[2][: 1 + LAYERS] == list(range(1 + LAYERS))


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


def mapped(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    return {"loss": torch.vmap(lambda x: model(x).square().mean())(batch)}


@for_each("score", [looking, differentiating, mapped])
def test_a_score_may_use_the_model_as_it_likes(score: Any) -> None:
    assert launched(evaluated, Layered, score)[:2] == evaluated(Layered, score)[:2]


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
@pytest.mark.parametrize("make", [Attending, AttendingInside])
def test_transformers_have_the_same_bits(make: Callable[[], nn.Module]) -> None:
    assert launched(evaluated, make)[:2] == evaluated(make)[:2]


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
    found = launched(in_blocks)
    assert found == in_blocks()
    assert found[0][0] == found[0][1] == found[0][2] != found[0][3]


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


@for_each("keep", ["span", "stages"])
@for_each(
    ("how", "words"),
    [
        ("in place", "layers.2.weight was written to in `with trainer.whole():`"),
        ("data", "layers.2.weight was written to in `with trainer.whole():`"),
        ("step in place", "layers.2.weight changed since the call before"),
        ("step data", "parameters (through .data) changed since the call before"),
    ],
)
def test_what_is_changed_where_the_model_is_read_is_refused(
    how: str, words: str, keep: Any
) -> None:
    assert words in launched(changed_in_a_block, how, keep=keep)


@for_each("how", ["data", "step data"])
def test_what_is_as_it_was_is_no_change(how: str) -> None:
    found = launched(changed_in_a_block, how, (-1.0, -1.0))
    assert found == launched(changed_in_a_block, how, ())
    assert len(found) == 16


def compiled_score() -> Callable[[Any, Any], Any]:
    return torch.compile(scored, backend="eager")


def with_compiled_score() -> tuple[Any, int]:
    trainer = trained()
    with watched(trainer) as found:
        scores = trainer.evaluate(compiled_score(), samples(8), batch_size=8)
    return scores, found.whole


def test_compiled_code_has_all_parameters() -> None:
    scores, whole = launched(with_compiled_score)
    assert scores == with_compiled_score()[0]
    assert whole == 1


def with_torch_func(whole: bool) -> str:
    def sloped(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"slope": torch.func.grad(lambda x: model(x).square().sum())(batch).mean(dim=1)}

    trainer = trained()
    try:
        if whole:
            with trainer.whole():
                trainer.evaluate(sloped, samples(), batch_size=4)
        else:
            trainer.evaluate(sloped, samples(), batch_size=4)
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return "none"


def test_what_an_evaluation_cannot_use_is_said() -> None:
    assert "with trainer.whole():" in launched(with_torch_func, False)
    assert launched(with_torch_func, True) == "none"


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


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Yields so many samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(samples(self.count))


def streams_that_differ(longer: int) -> str:
    trainer = trained()
    try:
        stream = Stream(longer if trainer.is_lead else 8)
        trainer.evaluate(scored, stream, batch_size=4)
    except onefold.errors.DisagreementError as error:
        return str(error)
    return ""


@for_each(("longer", "what"), [(12, "samples"), (0, "batch_size of 4")])
def test_devices_that_read_other_data_are_told_so(longer: int, what: str) -> None:
    assert what in launched(streams_that_differ, longer)


class Beside(nn.Module):
    """No part of the model, and computes with one of its parameters."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.own = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.own) @ self.weight


def with_a_module_beside() -> list[Any]:
    held: list[Beside] = []

    def beside(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return held[0](model(batch)).square().mean(dim=1)  # type: ignore[no-any-return]

    torch.manual_seed(3)
    model = Layered()
    held.append(Beside(model.layers[2].weight))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    trainer = onefold.Trainer(model, optimizer, beside, shards=4, threads=1)
    trainer.step(samples())
    scores = trainer.evaluate(lambda m, b: {"loss": beside(m, b)}, samples(), batch_size=4)
    return [scores, trainer.fingerprint()]


def test_a_module_beside_the_model_that_shares_a_parameter() -> None:
    assert launched(with_a_module_beside) == with_a_module_beside()


def calling(call: str, whole: bool) -> str:
    trainer = trained()

    def score(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        getattr(trainer, call)(*([1.0] if call == "gather" else []))
        return scored(model, batch)

    try:
        if whole:
            with trainer.whole():
                trainer.evaluate(score, samples(8), batch_size=8)
        else:
            trainer.evaluate(score, samples(8), batch_size=8)
    except RuntimeError as error:
        return str(error)
    return "none"


@for_each("call", ["gather", "barrier", "fingerprint"])
def test_a_score_that_calls_the_trainer_is_refused(call: str) -> None:
    assert "was called while a shard was computed" in launched(calling, call, False)
    assert launched(calling, call, True) == "none"

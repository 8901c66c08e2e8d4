"""Devices of one card have its bits: every model, precision, option, reader and placement."""

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from onefold.core.settings import PRECISIONS
from tests.bits.cases import Case, covering, run
from tests.gpu.device import DEVICE, KIND, ON_GPU, cards, each, needs
from tests.gpu.net import (
    adafactor,
    adamw,
    batches,
    keeping,
    logits_of,
    result,
    score,
    sgd,
    trained,
    trainer_of,
)

COVERING = covering() if ON_GPU else covering()[:3]
"""The processor has them in `tests.bits`: here a few try these tests themselves."""


@cache
def reference(case: Case) -> tuple[str, str]:
    """On one device."""
    return run(case, [DEVICE])


@each("number", range(len(COVERING)))
def test_the_bits_do_not_depend_on_the_devices_of_a_card(number: int) -> None:
    case = COVERING[number]
    assert run(case, [DEVICE] * (2 + number % 2)) == reference(case.reference), case


CHOICES: list[dict[str, Any]] = [
    *({"precision": name} for name in PRECISIONS),
    *({"precision": name, "clip_norm": 0.5, "clip_value": 0.01} for name in PRECISIONS),
]


@each("options", CHOICES)
def test_every_precision(options: dict[str, Any]) -> None:
    steps = batches(4)
    found = {trained(steps, devices=devices, **options) for devices in (1, 2, 3)}
    found.add(trained(steps, devices=3, shares=(0, 3, 1), **options))
    assert len(found) == 1, found


ON_HOST: list[dict[str, Any]] = [
    *(
        {"optimizer": partial(adamw, **dict[str, Any]({name: ON_GPU}))}
        for name in ("fused", "capturable")
    ),
    *({"optimizer": kind} for kind in (sgd, adafactor)),
    *({}, {"clip_norm": 0.1}, {"clip_value": 1e-3}, {"shards": 1, "clip_norm": 0.1}),
    *({"precision": "bf16", "clip_norm": 0.1}, {"precision": "fp16"}, {"microbatch": 2}),
    {"precision": "bf16-params", "clip_norm": 0.1},
]


@each("options", ON_HOST)
def test_a_card_that_keeps_nothing(options: dict[str, Any]) -> None:
    """The model lies in a file of the host; it is averaged and scored there as well."""
    found = set()
    data = TensorDataset(*batches(1, 61)[0])
    for placement in ("replicate", "offload"):
        with keeping(placement):
            trainer = trainer_of(**options)
            trainer.average(decay=0.9)
            bits = result(trainer, batches(3))
            with trainer.averaged():
                found.add((bits, str(trainer.evaluate(score, data, batch_size=7))))
            trainer.close()
    assert len(found) == 1


@each("precision", [None, "bf16"])
def test_scores_and_predictions(precision: str | None) -> None:
    scores, values = set(), set()
    data = TensorDataset(*batches(1, 61)[0])
    for devices in (1, 2, 3):
        trainer = trainer_of(devices, precision=precision)
        trainer.step(batches(1)[0])
        scores.add(str(trainer.evaluate(score, data, batch_size=16)))
        found = trainer.predict(logits_of, data, batch_size=16)
        assert {value.device.type for value in found.values()} == {"cpu"}
        assert found["labels"].tolist() == data.tensors[1].tolist()
        values.add(found["logits"].double().numpy().tobytes())
    assert len(scores) == len(values) == 1


@each("way", [(1, 2), (2, 0), (2, 2)])
def test_whoever_reads(way: tuple[int, int]) -> None:
    found = set()
    for devices, workers in ((1, 0), way):
        trainer = trainer_of(devices)
        data = TensorDataset(*batches(1, 90)[0])
        loader = trainer.loader(data, batch_size=18, shuffle=True, workers=workers)
        for _ in trainer.epochs(2):
            for batch in loader:
                trainer.step(batch)
        found.add(trainer.fingerprint())
        trainer.close()
    assert len(found) == 1


@each("samples", [19, 400])
def test_batches_may_lie_anywhere(samples: int) -> None:
    """Slices of one on the card begin where its copies do not; large ones go by pinned memory."""
    found = {trained(batches(4, samples, device=place), devices=2) for place in ("cpu", DEVICE)}
    assert len(found) == 1


@each("fused", [False, True])
def test_an_optimizer_that_has_worked_brings_its_state(fused: bool) -> None:
    """Where it was made, and whether its count of steps lies on the card, is of no matter."""
    steps = batches(3)

    def worked(model: nn.Module) -> torch.optim.Optimizer:
        model.eval().to(DEVICE)
        optimizer = adamw(model, fused=fused)
        images, labels = (tensor.to(DEVICE) for tensor in steps[0])
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.train()
        return optimizer

    found = {trained(steps[1:], devices=devices, optimizer=worked) for devices in (1, 2)}
    assert len(found) == 1


def test_two_cards_have_the_bits_of_one() -> None:
    needs(cards() > 1, "two GPUs")
    found = {result(trainer_of(1), batches(6))}
    for place in ("cpu", f"{KIND}:0"):
        trainer = trainer_of(on=[f"{KIND}:0", f"{KIND}:1"])
        found.add(result(trainer, batches(6, device=place)))
    assert len(found) == 1

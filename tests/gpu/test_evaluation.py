"""Evaluation, prediction and fingerprints: the same on any number of devices of a card."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from tests.gpu.device import DEVICE, ON_GPU, each, needs
from tests.gpu.net import Batch, batches, trainer_of


def score(model: nn.Module, batch: Batch) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    losses = F.cross_entropy(logits, labels, reduction="none")
    kept = (labels != 3).float()
    by_label = onefold.Mean((losses * kept).sum(), float(len(labels)))
    return {"loss": losses, "accuracy": logits.argmax(1) == labels, "kept": by_label}


def logits_of(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"logits": model(batch[0]), "labels": batch[1]}


def data() -> TensorDataset:
    return TensorDataset(*batches(1, 61)[0])


@each("precision", [None, "bf16"])
def test_scores_and_values_do_not_depend_on_the_devices(precision: str | None) -> None:
    scores, values = set(), set()
    for devices in (1, 2, 3):
        trainer = trainer_of(devices, precision=precision)
        trainer.step(batches(1)[0])
        scores.add(str(trainer.evaluate(score, data(), batch_size=16)))
        found = trainer.predict(logits_of, data(), batch_size=16)
        assert {value.device.type for value in found.values()} == {"cpu"}
        assert found["labels"].tolist() == data().tensors[1].tolist()
        values.add(found["logits"].double().numpy().tobytes())
    assert len(scores) == len(values) == 1


def test_the_scores_are_those_of_a_plain_loop() -> None:
    trainer = trainer_of()
    for batch in batches(3):
        trainer.step(batch)
    found = trainer.evaluate(score, data(), batch_size=16)
    plain = copy.deepcopy(trainer.model).eval()
    with torch.no_grad():
        images, labels = (tensor.to(DEVICE) for tensor in data().tensors)
        logits = plain(images)
    assert abs(found["loss"] - float(F.cross_entropy(logits, labels))) < 1e-3
    assert abs(found["accuracy"] - float((logits.argmax(1) == labels).float().mean())) < 0.02


def test_no_shard_of_an_evaluation_waits() -> None:
    """Only the end does, which brings the totals to the host."""
    needs(ON_GPU, "a GPU")
    trainer = trainer_of(2)
    seen = [0]

    def counted(model: nn.Module, batch: Batch) -> dict[str, Any]:
        seen[0] += 1
        # The first batch is looked at more closely, and the last shard is followed by the sums.
        if seen[0] in (5, 16):
            torch.cuda.set_sync_debug_mode("error" if seen[0] == 5 else "default")
        return score(model, batch)

    try:
        trainer.evaluate(counted, data(), batch_size=16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen[0] == 16


def test_a_fingerprint_is_that_of_the_values_wherever_they_lie() -> None:
    trainer = trainer_of(2)
    trainer.step(batches(1)[0])
    moved = copy.deepcopy(trainer.model).cpu()
    assert fingerprint_of(tensor_digests(named_tensors(moved))) == trainer.fingerprint()

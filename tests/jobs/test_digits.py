from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.jobs import digits
from onefold.jobs.digits import Epoch, Run

pytestmark = pytest.mark.full

# scikit-learn sets variables of the environment when it is imported: here, before any test looks.
pytest.importorskip("sklearn", reason='needs pip install "onefold[demo]"')
pytest.importorskip("matplotlib", reason='needs pip install "onefold[demo]"')

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PRINT = "0123456789abcdef"


def run(devices: int, *, fingerprint: str = PRINT, epoch_s: float = 2.0, epochs: int = 3) -> Run:
    """A run of three epochs, of which the first is slow."""
    made = [
        Epoch(loss=1.0 / number, accuracy=1 - 0.1 / number, duration_s=duration_s)
        for number, duration_s in ((1, 9.0), (2, epoch_s), (3, epoch_s))
    ]
    told: dict[str, Any] = {"devices": ("cpu",) * devices, "fingerprint": fingerprint}
    return Run(samples=1000, epochs=tuple(made[:epochs]), **told)


def test_the_split_is_stratified_disjoint_and_always_the_same() -> None:
    (train_set, test_set), again = digits.digits(), digits.digits()
    assert (len(train_set), len(test_set)) == (1437, 360)
    trained = train_set.labels.bincount(minlength=10)
    tested = test_set.tensors[1].bincount(minlength=10)
    assert (tested - (trained + tested) * 0.2).abs().max() <= 1
    assert torch.equal(train_set.images, again[0].images)
    assert all(map(torch.equal, test_set.tensors, again[1].tensors))
    of_training = {image.numpy().tobytes() for image in train_set.images[:, 0, 1:-1, 1:-1]}
    of_test = {image.numpy().tobytes() for image in test_set.tensors[0][:, 0]}
    assert of_training.isdisjoint(of_test)


@pytest.mark.processes
def test_the_network_learns_on_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = onefold.launch(digits.train, devices="cpu:1", args=(4,))
    assert trained.devices == ("cpu",)
    assert trained.epochs[-1].loss < 0.3 < trained.epochs[0].loss
    assert trained.epochs[-1].accuracy > 0.9
    assert digits.demo(tmp_path, devices="cpu:2", epochs=1) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The same model, to the last bit: 1 x cpu and 2 x cpu" in text

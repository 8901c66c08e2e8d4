from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import onefold
from onefold.errors import LaunchError
from onefold.jobs import digits
from onefold.jobs.digits import Epoch, Run, draw_curves

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


@pytest.mark.parametrize(
    ("second", "code", "words"),
    [
        (run(2), 0, [f"1 x cpu and 2 x cpu have the fingerprint {PRINT}"]),
        (
            run(1),
            0,
            [f"both runs on 1 x cpu have the fingerprint {PRINT}", "Only one device was f"],
        ),
        (run(2, fingerprint="f" * 16), 1, [f"{PRINT} on 1 x cpu, ffffffffffffffff on"]),
    ],
)
def test_the_report_says_and_returns_whether_fingerprints_agree(
    tmp_path: Path, second: Run, code: int, words: list[str]
) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        assert digits.report(console, run(1), second, tmp_path / "new") == code
    said = " ".join(capture.get().split())
    assert f"The learning curves are in {tmp_path}/new/digits.png" in said
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(PNG_MAGIC)
    assert all(each in said for each in words)
    assert ("Only one device" in said) == (len(words) == 2)


def test_a_picture_of_others_is_not_written_over(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    picture.write_bytes(PNG_MAGIC + b"theirs")
    with pytest.raises(ValueError, match="expected a new file, or the curves of before"):
        digits.demo(picture)
    assert picture.read_bytes() == PNG_MAGIC + b"theirs"
    picture.unlink()
    for each in (run(1), run(1, epochs=1)):
        draw_curves([each], picture)
        assert picture.read_bytes().startswith(PNG_MAGIC)


def test_what_cannot_begin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for epochs in (0, -1):
        with pytest.raises(ValueError, match=f"expected 1 epoch or more, got {epochs}"):
            digits.demo(tmp_path, epochs=epochs)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = r"not installed here \(sklearn, matplotlib\); run: pip install \"onefold\[demo\]\""
    with pytest.raises(LaunchError, match=words):
        digits.demo(tmp_path)


@pytest.mark.processes
def test_the_network_learns_to_read_digits_alike_on_two_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = onefold.launch(digits.train, devices="cpu:1", args=(4,))
    assert trained.devices == ("cpu",)
    assert trained.epochs[-1].loss < 0.3 < trained.epochs[0].loss
    assert trained.epochs[-1].accuracy > 0.9
    assert digits.demo(tmp_path, devices="cpu:2", epochs=1) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The same model, to the last bit: 1 x cpu and 2 x cpu" in text

"""The demo trains the same model on several devices, and says when it does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from onefold.cli import Screen

# scikit-learn sets variables of the environment when it is imported: here, before any test looks.
pytest.importorskip("sklearn", reason='needs pip install "onefold[demo]"')
pytest.importorskip("matplotlib", reason='needs pip install "onefold[demo]"')

from onefold.cli import demo as digits
from onefold.cli.demo import Epoch, Run

EPOCH = Epoch(loss=0.5, accuracy=0.9, duration_s=2.0)
ONE = Run(devices=("cpu",), samples=1000, epochs=(EPOCH,), fingerprint="0123456789abcdef")
TWO = replace(ONE, devices=("cpu",) * 2)


def test_no_image_is_both_trained_on_and_tested() -> None:
    train_set, test_set = digits.read_digits()
    assert (len(train_set), len(test_set)) == (1438, 359)


def test_the_verdict_compares_fingerprints(tmp_path: Path) -> None:
    console = Screen(width=200)
    for second, code, words in (
        (TWO, 0, "1 x cpu and 2 x cpu have the fingerprint 0123456789abcdef"),
        (ONE, 0, "Only one device was found, so the second run repeats the first."),
        (replace(TWO, fingerprint="f" * 16), 1, "on 1 x cpu, ffffffffffffffff on"),
    ):
        with console.capture() as capture:
            assert digits.report(console, ONE, second, tmp_path / "new") == code
        assert words in capture.get()
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_picture_of_others_is_not_written_over(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    picture.write_bytes(b"theirs")
    with pytest.raises(ValueError, match="exists and is not a figure of an earlier demo"):
        digits.demo(picture)
    assert picture.read_bytes() == b"theirs"


@pytest.mark.full
@pytest.mark.processes
def test_the_demo_on_two_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.demo(tmp_path, devices="cpu:2", epochs=1) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The same model, to the last bit: 1 x cpu and 2 x cpu" in text

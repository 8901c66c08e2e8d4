from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import onefold
from onefold.errors import LaunchError
from onefold.jobs import digits
from onefold.jobs.digits import Epoch, Run, draw_curves, results_table, verdict

pytestmark = pytest.mark.full

# scikit-learn sets variables of the environment when it is imported: here, before any test looks.
pytest.importorskip("sklearn", reason='needs pip install "onefold[demo]"')
pytest.importorskip("matplotlib", reason='needs pip install "onefold[demo]"')

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def run(devices: int, *, fingerprint: str = "0123456789abcdef", epoch_s: float = 2.0) -> Run:
    """A run of three epochs, of which the first is slow."""
    epochs = [
        Epoch(loss=1.0 / number, accuracy=1 - 0.1 / number, duration_s=duration_s)
        for number, duration_s in ((1, 9.0), (2, epoch_s), (3, epoch_s))
    ]
    return Run(
        devices=("cpu",) * devices, samples=1000, epochs=tuple(epochs), fingerprint=fingerprint
    )


def shown(*runs: Run, width: int = 80) -> str:
    """The table as it comes on a screen."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(results_table(runs))
    return capture.get()


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if scikit-learn and matplotlib were not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_the_split_is_stratified() -> None:
    train_set, test_set = digits.digits()
    assert (len(train_set), len(test_set)) == (1437, 360)
    trained = train_set.labels.bincount(minlength=10)
    tested = test_set.tensors[1].bincount(minlength=10)
    assert (tested - (trained + tested) * 0.2).abs().max() <= 1


def test_the_split_is_always_the_same() -> None:
    torch.manual_seed(1)
    first = digits.digits()
    torch.manual_seed(2)
    second = digits.digits()
    assert torch.equal(first[0].images, second[0].images)
    assert all(map(torch.equal, first[1].tensors, second[1].tensors))


def test_no_image_is_both_trained_on_and_tested() -> None:
    train_set, test_set = digits.digits()
    trained = {image.numpy().tobytes() for image in train_set.images[:, 0, 1:-1, 1:-1]}
    tested = {image.numpy().tobytes() for image in test_set.tensors[0][:, 0]}
    assert trained.isdisjoint(tested)


def test_images_are_moved_by_at_most_one_pixel() -> None:
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 3, 4] = 1.0
    moved = digits.ShiftedDigits(image, torch.tensor([7]))
    torch.manual_seed(0)
    places = {tuple(moved[0][0][0].nonzero()[0].tolist()) for _ in range(200)}
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert moved[0][0].shape == (1, 8, 8)
    assert int(moved[0][1]) == 7


def test_the_table_has_a_row_for_each_run() -> None:
    lines = shown(run(1, epoch_s=2.0), run(2, epoch_s=1.25), width=120).splitlines()
    rows = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in lines if line[0] in "│┃"]
    assert rows == [
        ["devices", "s/epoch", "samples/s", "speed-up", "test accuracy", "fingerprint"],
        ["1 x cpu", "2.00", "500", "1.00", "96.67%", "0123456789abcdef"],
        ["2 x cpu", "1.25", "800", "1.60", "96.67%", "0123456789abcdef"],
    ]


def test_the_fingerprint_is_whole_on_a_narrow_screen() -> None:
    assert shown(run(1), run(2), width=80).count("0123456789abcdef") == 2


@pytest.mark.parametrize(
    ("second", "same", "sentence"),
    [
        (run(2), True, "1 x cpu and 2 x cpu have the fingerprint 0123456789abcdef"),
        (run(1), True, "both runs on 1 x cpu have the fingerprint 0123456789abcdef"),
        (run(2, fingerprint="f" * 16), False, "0123456789abcdef on 1 x cpu, ffffffffffffffff on"),
    ],
)
def test_the_verdict_compares_fingerprints(second: Run, same: bool, sentence: str) -> None:
    judged, text = verdict(run(1), second)
    assert judged is same
    assert sentence in text


@pytest.mark.parametrize(("fingerprint", "code"), [("0123456789abcdef", 0), ("f" * 16, 1)])
def test_the_report_returns_the_verdict(tmp_path: Path, fingerprint: str, code: int) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        second = run(2, fingerprint=fingerprint)
        assert digits.report(console, run(1), second, tmp_path / "new") == code
    assert f"The learning curves are in {tmp_path}/new/digits.png" in capture.get()
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(PNG_MAGIC)
    assert "Only one device" not in capture.get()


def test_one_device_is_said_to_be_one_device(tmp_path: Path) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        digits.report(console, run(1), run(1), tmp_path / "curves.png")
    assert "Only one device was found, so the second run repeats the first." in capture.get()
    assert (tmp_path / "curves.png").is_file()


def test_a_run_of_one_epoch_can_be_drawn(tmp_path: Path) -> None:
    single = Run(devices=("cpu",), samples=1, epochs=run(1).epochs[:1], fingerprint="0" * 16)
    draw_curves([single], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(PNG_MAGIC)


def test_a_picture_of_others_is_not_written_over(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    picture.write_bytes(PNG_MAGIC + b"theirs")
    with pytest.raises(ValueError, match="expected a new file, or the curves of before"):
        digits.demo(picture)
    assert picture.read_bytes() == PNG_MAGIC + b"theirs"
    picture.unlink()
    draw_curves([run(1)], picture)
    draw_curves([run(2)], picture)


@pytest.mark.parametrize(
    ("devices", "one"),
    [
        ("auto", "1"),
        ("4", "1"),
        ("cpu:2", "cpu:1"),
        ("cpu", "cpu:1"),
        ("cuda:3,cuda:1", "cuda:3"),
    ],
)
def test_the_single_device_is_of_the_kind_asked_for(devices: str, one: str) -> None:
    assert digits.one_of(devices) == one


@pytest.mark.usefixtures("without_extras")
def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path: Path) -> None:
    message = r"not installed here \(sklearn, matplotlib\); run: pip install \"onefold\[demo\]\""
    with pytest.raises(LaunchError, match=message):
        digits.demo(tmp_path)


@pytest.mark.parametrize("epochs", [0, -1])
def test_no_epochs_are_refused(tmp_path: Path, epochs: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 epoch or more, got {epochs}"):
        digits.demo(tmp_path, epochs=epochs)


@pytest.mark.processes
def test_the_network_learns_to_read_digits() -> None:
    trained = onefold.launch(digits.train, devices="cpu:1", args=(4,))
    assert trained.devices == ("cpu",)
    assert trained.epochs[-1].loss < 0.3 < trained.epochs[0].loss
    assert trained.epochs[-1].accuracy > 0.9


@pytest.mark.processes
def test_the_demo_trains_the_same_model_on_two_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert digits.demo(tmp_path, devices="cpu:2", epochs=1) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The same model, to the last bit: 1 x cpu and 2 x cpu" in text

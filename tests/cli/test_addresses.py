"""Addresses of object storage are refused where a folder is named: they would become folders.

``--checkpoint`` alone takes them: see tests/checkpoint/test_remote.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.cli.main import main
from onefold.core.options import RunOptions
from onefold.errors import LaunchError
from tests.small import make_trainer

ADDRESS = "s3://bucket/run"
OPTIONS = ("record", "logs", "profile", "offload-dir")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        *(["run", f"--{option}", ADDRESS, "train.py"] for option in OPTIONS),
        ["verify", "--offload-dir", ADDRESS, "train.py"],
        ["replay", ADDRESS],
        ["export", ADDRESS, "--to", "onnx"],
        ["train", "classify", "--data", "digits", "--runs", ADDRESS],
        ["demo", "--output", "gs://bucket/a.png"],
    ],
)
def test_commands_refuse_an_address(
    words: list[str],
    in_a_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (in_a_folder / "train.py").touch()
    monkeypatch.setattr("sys.argv", ["onefold", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "must be a local folder or file, but got" in " ".join(capfd.readouterr().err.split())
    assert [each.name for each in in_a_folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.save(ADDRESS),
        lambda trainer: trainer.load(ADDRESS),
        lambda trainer: trainer.record(Path(ADDRESS)),
    ],
)
def test_a_trainer_refuses_an_address(call: Callable[..., object], in_a_folder: Path) -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match="directory must be a local folder or file"):
        call(trainer)
    assert list(in_a_folder.iterdir()) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_a_launch_refuses_an_address(option: str, in_a_folder: Path) -> None:
    name = option.replace("-", "_")
    given: dict[str, Any] = {name: ADDRESS}
    options = RunOptions(**given)
    with pytest.raises(LaunchError, match=f"{name} must be a local folder or file"):
        onefold.supervise(["train.py"], onefold.Selection(("cpu",)), options)
    assert list(in_a_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere://bucket/run", "Protocol not known: nowhere"),
        ("s3:/run", "must be a local folder"),
    ],
)
def test_checkpoints_need_a_known_protocol(
    address: str,
    words: str,
    in_a_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (in_a_folder / "train.py").touch()
    monkeypatch.setattr("sys.argv", ["onefold", "run", "--checkpoint", address, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert words in " ".join(capfd.readouterr().err.split())
    assert [each.name for each in in_a_folder.iterdir()] == ["train.py"]
    options = RunOptions(checkpoint=address)
    with pytest.raises(LaunchError, match=words):
        onefold.supervise(["train.py"], onefold.Selection(("cpu",)), options)

"""The benchmark beside another version: no place in the row is worth anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from against import arguments, there_and_back
from measure import ratio

pytestmark = pytest.mark.full

SOURCE = str(Path(__file__).resolve().parents[2] / "src")


def test_two_rounds_count_together() -> None:
    assert there_and_back([1.0, 2.0, 4.0, 8.0]) == [3.0, 12.0]


def test_a_round_without_its_way_back_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        there_and_back([1.0, 2.0, 4.0])


def test_the_place_in_a_row_is_worth_nothing() -> None:
    # Two equal versions; the one measured second takes 2 s, the other 3 s, and all slow down.
    this, other = there_and_back([3.0, 4.0]), there_and_back([2.0, 5.0])
    assert ratio(other, this).median == 1.0


@pytest.mark.parametrize("starts", ["1", "3", "0", "-2"])
def test_each_version_starts_first_as_often_as_the_other(
    starts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["against.py", SOURCE, "--starts", starts])
    with pytest.raises(SystemExit):
        arguments()
    assert f"expected an even number, got {starts}" in capsys.readouterr().err


def test_a_folder_without_the_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["against.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        arguments()
    assert "the folder that holds the package onefold" in capsys.readouterr().err

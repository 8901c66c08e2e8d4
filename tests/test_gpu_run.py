"""The command behind `make gpu`: no part loses another, and what is found is written at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu import __main__ as command
from tests.gpu import parts, plain
from tests.gpu.parts import Part, parts_of, run_part
from tests.gpu.report import as_text
from tests.tables import for_each

pytestmark = [pytest.mark.full, pytest.mark.processes]

LINE = """
import json, os, time
def say(**line):
    with open(os.environ["ONEFOLD_GPU_LINES"], "a") as file:
        file.write(json.dumps(line) + "\\n")
say(test="a", outcome="passed", text="")
"""
HANGS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
say(child=child.pid)
time.sleep(600)
"""


def part(code: str, name: str = "a part", limit_s: float = 30.0, **choices: Any) -> Part:
    return Part(name=name, command=["-c", LINE + code], limit_s=limit_s, **choices)


@for_each(
    ("code", "limit_s", "ended", "lines", "tail"),
    [
        ("", 30, "well", 1, ""),
        ("print('so it is'); exit(3)", 30, "with exit code 3", 1, "so it is"),
        ("raise ValueError('this one')", 30, "with exit code 1", 1, "ValueError: this one"),
        ("say(test='b', outcome='failed', text='why')", 30, "well", 2, ""),
        ("open(os.environ['ONEFOLD_GPU_LINES'], 'a').write('{\"tes')", 30, "well", 1, ""),
        (HANGS, 5, "cut off after 5 s", 2, ""),
    ],
)
def test_how_a_part_ends(
    code: str, limit_s: float, ended: str, lines: int, tail: str, tmp_path: Path
) -> None:
    result = run_part(part(code, limit_s=limit_s), dict(os.environ), tmp_path, limit_s)
    assert (result.ended, len(result.lines)) == (ended, lines)
    assert tail in result.tail
    # All that it has started is ended with it.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _lives(result.lines[-1].get("child")):
        time.sleep(0.02)
    assert not _lives(result.lines[-1].get("child"))


def _lives(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_known_is_written_after_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[int] = []
    real = command.write

    def noting(found: Any, results: Path) -> None:
        real(found, results)
        written.append(len(json.loads((results / "gpu.json").read_text())["parts"]))

    monkeypatch.setattr(command, "write", noting)
    wanted = [
        part(""),
        part("exit(1)", "another", alone=True),
        part("", "a third", needs=("no_such_package",)),
    ]
    machine = {"card": "a card", "versions": {"torch": "2"}}
    assert command.run(wanted, machine, "cpu", tmp_path / "there") == 1
    assert written == [1, 2, 2]
    found = json.loads((tmp_path / "there" / "gpu.json").read_text())
    assert found["left_out"]["a third"] == "there is no no_such_package"
    assert [p["ended"] for p in found["parts"]] == ["well", "with exit code 1"]
    text = (tmp_path / "there" / "gpu.txt").read_text()
    assert text in capsys.readouterr().out
    assert "left out: a third: there is no no_such_package" in text
    late = command.begun(part(""), environment={}, folder=tmp_path, end=time.monotonic())
    assert late.ended == "without being begun: no time left"


@for_each("device", ["cuda:0", "cpu"])
def test_all_modules_have_a_part_and_what_measures_comes_last(device: str) -> None:
    found = parts_of(device)
    names = [part.name for part in found]
    assert len(set(names)) == len(names)
    modules = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert modules == {f"test_{n.removeprefix('tests: ')}" for n in names if n.startswith("tests")}
    alone = [part.alone for part in found]
    assert alone == sorted(alone)
    # Tests run beside each other, so their limits do not add up.
    assert parts.TEST_LIMIT_S + sum(part.limit_s for part in found if part.alone) < command.LIMIT_S


def test_tests_run_without_pytest_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.gpu.device import each, needs

    @each("one", [1, None])
    @each("other", [{"a": 1}])
    def case(one: int | None, other: dict[str, int], tmp_path: Path) -> None:
        needs(one != 1, "another number")
        assert tmp_path.is_dir()
        assert other == {}, "it is not empty"

    assert "pytest" in parts.test_command("test_bits")
    monkeypatch.setattr(parts, "missing", list)
    assert parts.test_command("test_bits") == ["-m", "tests.gpu.plain", "test_bits", "LINES"]
    calls = list(plain.calls_of(case))
    assert [label for label, _ in calls] == ["[other0-1]", "[other0-None]"]
    skipped, failed = (plain.outcome_of(case, arguments) for _, arguments in calls)
    assert (skipped["outcome"], skipped["text"]) == ("skipped", "needs another number")
    assert failed["outcome"] == "failed"
    assert "it is not empty" in failed["text"]


def test_the_text_has_what_failed_and_the_figures() -> None:
    lines = [
        {"test": "a.py::one", "outcome": "failed", "text": "first\nlast", "seconds": 1.0},
        {"test": "a.py::two", "outcome": "skipped", "text": "Skipped: needs two GPUs"},
    ]
    figure = {"workload": "mlp", "group": "shards", "side": "V = 1", "samples_s": 1234.5}
    figure |= {"of_first": 0.5, "step_ms": 2.0, "queued_ms": 1.5, "peak_bytes": 3 << 20}
    figures = [figure, {**figure, "side": "V = 2", "failed": "OutOfMemoryError: too much"}]

    def of_part(name: str, ended: str, lines: Any, tail: str = "") -> dict[str, Any]:
        return {"name": name, "ended": ended, "seconds": 3.0, "lines": lines, "tail": tail}

    text = as_text(
        {
            "onefold": "0.1.0",
            "date": "today",
            "device": "cuda:0",
            "machine": {"card": "1 x a card", "versions": {"torch": "2.11"}},
            "left_out": {},
            "parts": [
                of_part("tests: a", "well", lines),
                of_part("figures", "well", figures),
                of_part("hung", "cut off", [], "here"),
            ],
        }
    )
    assert "onefold 0.1.0 on 1 x a card (cuda:0), today\ntorch 2.11\n" in text
    assert "FAILED a.py::one\n    first\n    last\n" in text
    assert "       1 needs two GPUs\n" in text
    assert "hung ended cut off\n    here\n" in text
    for words in ("1,234", "0.500", "2.00", "1.50", "V = 2", "OutOfMemoryError: too much"):
        assert words in text


def make(folder: Path, *choices: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", "--results", str(folder / "results"), *choices]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=without, check=False
    )


def test_the_whole_way_on_the_processor(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 2
    assert "there is no GPU that PyTorch sees" in done.stderr
    assert not (tmp_path / "results").exists()
    done = make(tmp_path, "--device", "cpu", "--parts", "timing")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results" / "gpu.json").read_text())
    (only,) = found["parts"]
    assert (only["name"], only["ended"]) == ("tests: timing", "well")
    assert {line["outcome"] for line in only["lines"]} == {"passed"}
    assert found["machine"]["versions"]["torch"] == torch.__version__

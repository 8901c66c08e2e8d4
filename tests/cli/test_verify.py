"""``onefold verify`` says that all agrees when it does, and finds what does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from onefold import RunOptions
from onefold.cli.verify import (
    Difference,
    State,
    _Comparison,
    _hints,
    _Run,
    _Way,
    first_difference,
    verify_script,
)
from onefold.errors import LaunchError
from onefold.run import devices as found
from tests.tables import for_each

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "COLUMNS": "300", "PYTHONPATH": str(ROOT / "src")}


def verify(
    folder: Path,
    script: Path,
    *arguments: str,
    devices: str = "1,2",
    steps: int = 2,
    keep: str = "all",
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onefold", "verify", "--devices", devices, "--keep", keep]
    return subprocess.run(
        [*command, "--steps", str(steps), str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=folder,
        env=ENVIRONMENT,
    )


def verify_fault(folder: Path, fault: str, devices: str = "1,2") -> tuple[int, str]:
    """The exit code, and what was printed, on one line."""
    done = verify(folder, SCRIPTS / "verified.py", fault, devices=devices)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def line(step: int, **digests: str) -> dict[str, object]:
    return {"step": step, "digests": digests}


def test_the_first_difference_is_found() -> None:
    reference = [line(0, a="1", b="2"), line(1, a="3", b="4"), line(2, a="5", b="6")]
    other = [line(0, a="1", b="2"), line(1, a="3", b="x"), line(2, a="y", b="z")]
    other[1]["differences"] = {"b": 0.25}
    assert first_difference(reference, other) == Difference(1, "b", 1, 0.25)
    assert first_difference(reference, reference) is None


TWO_STEPS = [line(0, a="1"), line(1, a="3"), line(2, a="5")]


@for_each(
    ("again", "words"),
    [
        ([TWO_STEPS, TWO_STEPS], "1 device twice gives the same bits"),
        ([TWO_STEPS, [*TWO_STEPS[:2], line(2, a="x")]], "1 device twice differs as well"),
        ([TWO_STEPS, TWO_STEPS[:2]], "1 device twice differs as well"),
        ([TWO_STEPS], "1 device twice differs as well"),
    ],
    ids=["the same", "other bits", "fewer steps", "fewer trainers"],
)
def test_a_run_repeats_itself_if_it_makes_the_same_trainers_steps_and_bits(
    again: list[list[dict[str, object]]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[dict[int, list[State]]] = [{0: []}, {0: []}]
    one, two = (_Way(devices, "all", tells_keep=False, on="") for devices in (1, 2))
    monkeypatch.setattr(_Comparison, "run", lambda *_: _Run(one, again, states))
    compare = _Comparison.__new__(_Comparison)
    reference, other = _Run(one, [TWO_STEPS] * 2, states), _Run(two, [TWO_STEPS] * 2, states)
    (hint,) = _hints(compare, 1, reference, other, Difference(1, "a", 1, 0.5))
    assert hint.startswith(words)


@pytest.mark.full
@pytest.mark.processes
def test_a_right_script_agrees_whatever_its_real_run_has_left(tmp_path: Path) -> None:
    """Batch norm, dropout, augmentation, and code that goes on from checkpoints."""
    script = SCRIPTS / "verified.py"
    real = [sys.executable, str(script), "real"]
    subprocess.run(real, cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=600)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path.name for path in tmp_path.glob("run/*")} == {"step-00000001", "step-00000002"}
    done = verify(tmp_path, script, "none", devices="1,2,3", steps=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The bits agree after each of 3 steps." in done.stdout
    assert done.stdout.count("the same ") >= 2
    assert "The mathematics agree: 4 shards and one give the same" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.full
@pytest.mark.processes
def test_the_shortest_script_of_the_readme_agrees(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = text.split("## The shortest script")[1].split("```python\n")[1].split("```")[0]
    script = tmp_path / "train.py"
    script.write_text(code)
    done = verify(tmp_path, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The bits agree after each of 2 steps." in done.stdout
    assert "The mathematics agree: 8 shards and one give the same" in done.stdout


@pytest.mark.full
@pytest.mark.processes
def test_losses_that_are_not_meant_are_named(tmp_path: Path) -> None:
    done = verify(tmp_path, SCRIPTS / "losses_meant.py")
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    for trainer in range(7):
        assert f"The bits of trainer {trainer} agree after each of 2 steps." in said
    assert "The mathematics of trainer 0 agree" in said
    assert "The mathematics of trainer 1 agree" in said
    for trainer, name, cause in (
        (2, "summed", "a sum over the shard (cross_entropy or nll_loss with reduction='sum')"),
        (3, "weighted", "a mean by class weights (cross_entropy or nll_loss with weight=)"),
        (4, "ignoring", "a mean over targets of which"),
        (5, "contrastive", "a sample's loss depends on the other samples of its batch"),
        (6, "along_time", "the batch was cut along time: layer (LSTM)"),
    ):
        verdict = rf"The mathematics of trainer {trainer} differ, first in step 1: the loss, {name}"
        found = re.search(
            verdict + r" \(\S*losses_meant\.py:\d+\), is (\S+) with 3 shards and (\S+) with one"
            r"(.*?)Likely cause: (.*?)\. ",
            said,
        )
        assert found, said
        assert float(found[1]) != float(found[2])
        assert cause in found[4]
    assert "Likely cause: unknown" not in said


@pytest.mark.full
@pytest.mark.processes
def test_every_trainer_is_compared_and_what_differs_is_named(tmp_path: Path) -> None:
    done = verify(tmp_path, SCRIPTS / "bits_differ.py")
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "The bits of trainer 0 agree after each of 2 steps." in said
    assert "Trainer 6 made no step" in said
    for trainer, step, hint in (
        (1, 1, "attribute calls of module model (Counting): changed while the shards"),
        (2, 1, "attribute generator of module model (OwnGenerator): a generator of its own"),
        (3, 1, "torch's global generator before step 1: it was drawn from between steps on some"),
        (4, 1, "numpy.random.default_rng() without a seed ("),
        (5, 0, "the models differ before the first step: seed the initial values"),
    ):
        verdict = f"The bits of trainer {trainer} differ, first after step {step}, in "
        assert verdict in said
        after = said.split(verdict)[1].split("rainer ")[0]
        assert re.search(r"weight: largest difference \d\S*;", after)
        assert f"Hint: {hint}" in after


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("end", ["", "fail"])
def test_trainers_one_after_the_other_are_all_compared(end: str, tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_bytes(b"of the real run")
    done = verify(tmp_path, SCRIPTS / "rounds.py", end, devices="1,2", steps=2)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for trainer in range(3):
        assert f"The bits of trainer {trainer} agree after each of 2 steps." in said
        assert f"The mathematics of trainer {trainer} agree" in said
    assert "Compared: 6 steps of 3 Trainers, at most 2 of each." in said
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]
    assert (tmp_path / "best.pt").read_bytes() == b"of the real run"
    failed = "The script failed after the compared steps on 2 devices: "
    assert (failed in said) == bool(end)
    assert ("AssertionError: the accuracy is too low" in said) == bool(end)


@pytest.mark.processes
def test_a_script_that_looks_at_its_rank_is_found(tmp_path: Path) -> None:
    """Nothing that changes is seen, so the first run is made again."""
    code, said = verify_fault(tmp_path, "rank")
    assert code == 1, said
    found = r"The bits differ, first after step 1, in first\.weight: largest difference \d\S*;"
    assert re.search(found, said), said
    assert "Hint: 1 device twice gives the same bits" in said
    assert "reads the rank or the number of devices" in said


@pytest.mark.full
@pytest.mark.processes
def test_unseeded_data_are_named(tmp_path: Path) -> None:
    code, said = verify_fault(tmp_path, "data")
    assert code == 1, said
    assert "onefold refuses the script on 2 devices: DisagreementError: " in said
    assert "the data set of device 1 has other samples than that of device 0" in said


@pytest.mark.full
@pytest.mark.processes
def test_a_loss_of_zero_is_no_agreement_and_a_script_in_float32_is_compared(tmp_path: Path) -> None:
    code, said = verify_fault(tmp_path, "zero")
    assert code == 1, said
    assert "Nothing was trained: the loss was exactly 0 in each of 2 steps" in said
    assert "The script does not run in float64" in said
    assert "same loss and gradient, to 0.0001 (float32" in said


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16", "fp16-params"])
def test_the_mathematics_are_compared_whatever_the_precision(
    tmp_path: Path, precision: str
) -> None:
    code, said = verify_fault(tmp_path, precision)
    assert code == 0, said
    assert "The bits agree" in said
    assert "same loss and gradient, to 1e-09 (float64" in said


@pytest.mark.processes
def test_a_script_that_fails_is_no_verdict(tmp_path: Path) -> None:
    code, said = verify_fault(tmp_path, "raise")
    assert code == 2
    assert "RuntimeError: no run at all" in said


@pytest.mark.full
@pytest.mark.processes
def test_what_devices_keep_is_compared_as_well(tmp_path: Path) -> None:
    script = SCRIPTS / "verified.py"
    done = verify(tmp_path, script, "none", devices="2", steps=2, keep="all,span")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The bits agree after each of 2 steps." in done.stdout
    rows = [line.split("│")[1:3] for line in done.stdout.splitlines() if line.startswith("│ 2")]
    # The mathematics of the second step have a row of their own.
    assert [[cell.strip() for cell in row] for row in rows[:2]] == [["2", "all"], ["2", "span"]]


def test_what_devices_cannot_keep_is_refused(tmp_path: Path) -> None:
    done = verify(tmp_path, SCRIPTS / "verified.py", "none", keep="all,spam")
    assert done.returncode != 0
    assert "expected keep to be one of all, span, host, stages, got 'spam'" in done.stderr


def test_where_there_are_too_few_gpus_that_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = found.DeviceInfo(
        index=0, kind="cuda", name="NVIDIA H200", total_bytes=1 << 37, free_bytes=1 << 37
    )
    monkeypatch.setattr(found, "_gpus", lambda: [gpu])
    script = [str(SCRIPTS / "verified.py"), "none"]
    with pytest.raises(LaunchError, match=r"number of GPUs here is 1.*at most 1, or for cpu:2"):
        verify_script(["missing.py"], "1,2", steps=2, options=RunOptions(quiet=True))
    assert verify_script(script, "cpu:1, cpu:2", steps=2, options=RunOptions(quiet=True)) == 0
    assert "The bits agree after each of 2 steps." in capfd.readouterr().out


@for_each("devices", ["1", "", "1,x", "0,1", "1,cpu:2", "cpu:2"])
def test_counts_that_cannot_be_read_are_refused(tmp_path: Path, devices: str) -> None:
    code, said = verify_fault(tmp_path, "none", devices)
    assert code == 2
    assert "expected two or more counts" in said

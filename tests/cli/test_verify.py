"""``onefold verify`` says that all agrees when it does, and finds what does not."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onefold import RunOptions
from onefold.cli.verdicts import State, hints_of
from onefold.cli.verify import Difference, first_difference, verify_script
from onefold.core.placements import described
from tests.started import ended
from tests.tables import for_each, some

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
BITS_AGREE = "The bits agree after each of 2 steps."


def verify(folder: Path, script: str | Path, *arguments: str, **options: object) -> tuple[int, str]:
    """The exit code, and what was printed, with single spaces."""
    given = {"devices": "1,2", "steps": 2, **options}
    words = [f"--{name}={value}" for name, value in given.items()]
    words += [str(SCRIPTS / script), *arguments]
    done = ended("verify", *words, cwd=folder, COLUMNS="300")
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def line(step: int, **digests: str) -> dict[str, object]:
    return {"step": step, "digests": digests}


def test_the_first_difference_is_found() -> None:
    reference = [line(0, a="1", b="2"), line(1, a="3", b="4"), line(2, a="5", b="6")]
    other = [line(0, a="1", b="2"), line(1, a="3", b="x"), line(2, a="y", b="z")]
    other[1]["differences"] = {"b": 0.25}
    assert first_difference(reference, other) == Difference(1, "b", 1, 0.25)
    assert first_difference(reference, reference) is None


@pytest.mark.full
@pytest.mark.processes
def test_a_right_script_agrees_whatever_its_real_run_has_left(tmp_path: Path) -> None:
    """Batch norm, dropout, augmentation, and code that goes on from checkpoints."""
    real = [sys.executable, str(SCRIPTS / "verified.py"), "real"]
    subprocess.run(real, cwd=tmp_path, check=True, timeout=600)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path.name for path in tmp_path.glob("run/*")} == {"step-00000001", "step-00000002"}
    code, said = verify(tmp_path, "verified.py", "none", devices="1,2,3", steps=3)
    assert code == 0, said
    assert "The bits agree after each of 3 steps." in said
    assert said.count("the same ") >= 2
    assert "The mathematics agree: 4 shards and one give the same" in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.full
@pytest.mark.processes
def test_losses_that_are_not_meant_are_named(tmp_path: Path) -> None:
    code, said = verify(tmp_path, "losses_meant.py")
    assert code == 1, said
    for trainer in range(3):
        assert f"The bits of trainer {trainer} agree after each of 2 steps." in said
    assert "The mathematics of trainer 0 agree" in said
    for trainer, name, cause in (
        (1, "summed", "a sum over the shard (cross_entropy or nll_loss with reduction='sum')"),
        (2, "along_time", "the batch was cut along time: layer (LSTM)"),
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
    code, said = verify(tmp_path, "bits_differ.py")
    assert code == 1, said
    # The third has a generator of its own, which is seeded for each shard.
    for trainer in (0, 2):
        assert f"The bits of trainer {trainer} agree after each of 2 steps." in said
    assert "Trainer 6 made no step" in said
    for trainer, step, hint in (
        (1, 1, "attribute calls of module model (Counting): changed while the shards"),
        (3, 1, "torch's global generator before step 1: drawn from between steps on some devices"),
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
def test_counts_of_calls_are_found(tmp_path: Path) -> None:
    """In a loss, a hook, an optimizer and a score, where nothing else finds them."""
    code, said = verify(tmp_path, "counting.py")
    assert code == 1, said
    for trainer in (0, 1, 2):
        assert f"The bits of trainer {trainer} differ, first after step 1" in said
    assert "Hint: in_loss, which train.<locals>.loss" in said
    assert "The bits of trainer 3 agree after each of 2 steps." in said
    assert "A score of trainer 3 differs: 'loss' of train.<locals>.score" in said


SMALL = """
import os, sys, torch, onefold
from onefold.launcher.environment import current_context
fault, runs = sys.argv[1:]
def loss(model, x):
    by = {"rank": current_context().rank, "clock": int.from_bytes(os.urandom(4), "big") / 2**32}
    return model(x).square().mean(dim=1) * (1 + 1e-3 * by.get(fault, by["rank"]))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=2)
if trainer.is_lead:
    open(runs, "a").write("x")
again = len(open(runs).read()) > 2
trainer.step(torch.ones(4, 4))
if not (fault == "short" and again):
    trainer.step(torch.ones(4, 4))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "words"),
    some(
        [
            ("rank", "1 device twice gives the same bits"),
            ("short", "1 device twice differs as well"),
            ("clock", "1 device twice differs as well"),
        ],
        2,
    ),
)
def test_without_a_hint_the_first_run_is_repeated(fault: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SMALL)
    code, said = verify(tmp_path, script, fault, str(tmp_path / "runs"))
    assert code == 1, said
    found = r"The bits differ, first after step 1, in weight: largest difference \d\S*;"
    assert re.search(found, said), said
    assert f"Hint: {words}" in said


FLOAT64 = f"{BITS_AGREE}|same loss and gradient, to 1e-09 (float64"
SAID = [("bf16", 0, FLOAT64), ("fp16-params", 0, FLOAT64)]
SAID += [
    ("data", 1, "onefold rejects the script on 2 devices: DisagreementError: |data set of device")
]
SAID += [("zero", 1, "Nothing was trained: the loss was exactly 0 in each of 2|to 0.0001 (float32")]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("fault", "code", "words"), SAID)
def test_what_a_script_does_is_said(fault: str, code: int, words: str, tmp_path: Path) -> None:
    found, said = verify(tmp_path, "verified.py", fault)
    assert found == code, said
    assert all(each in said for each in words.split("|")), said


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    code, said = verify(tmp_path, "verified.py", "raise")
    assert code == 2
    assert "RuntimeError: no run at all" in said
    missing, options = ["missing.py"], RunOptions(quiet=True)
    for devices in ("1", "", "1,x", "0,1", "1,cpu:2", "cpu:2"):
        with pytest.raises(ValueError, match=r"compares two or more runs|must be device counts"):
            verify_script(missing, devices, options=options)
    words = f"placement must be one of {re.escape(described())}, but got 'spam'"
    with pytest.raises(ValueError, match=words):
        verify_script(missing, "1,2", options=options, placement="replicate,spam")


@for_each(
    ("name", "digests", "found"),
    [
        ("torch's", [["a", "b"], ["a", "b"]], False),
        ("torch's", [["a", "b"], ["a", "c"]], True),
        ("NumPy's", [["a", "a"], ["x", "x"]], False),
        ("NumPy's", [["a", "b"], ["x", "y"]], False),
        ("NumPy's", [["a", "b"], ["x", "x"]], True),
    ],
)
def test_draws_of_some_devices_are_named(name: str, digests: list[list[str]], found: bool) -> None:
    none: dict[str, Any] = {"unseeded": [], "attributes": [], "generators": []}
    run = {
        device: [State(step=n, states={name: digest}, **none) for n, digest in enumerate(each, 1)]
        for device, each in enumerate(digests)
    }
    hints = hints_of(2, {0: run[0]}, run)
    assert [hint.startswith(f"{name} before step 2: ") for hint in hints] == [True] * found


READS_BACK = """
import glob, os, shutil, torch, onefold
from pathlib import Path

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
loss = lambda m, b: m(b[0]).square().mean(1)
trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, shards=2)
data = torch.utils.data.TensorDataset(torch.randn(8, 3))
for batch in trainer.loader(data, batch_size=4):
    trainer.step(batch)
    if trainer.is_lead:
        torch.save(model.state_dict(), "kept/best.pt")
        assert os.path.isfile("kept/best.pt") and Path("kept/best.pt").exists()
        assert os.path.getsize("kept/best.pt") > 100 < Path("kept/best.pt").stat().st_size
        assert os.listdir("kept") == ["best.pt"] == [p.name for p in Path("kept").glob("*")]
        assert glob.glob("kept/*.pt") == ["kept/best.pt"]
        assert {"kept", "real.txt"} <= set(os.listdir("."))
        with open("kept/best.pt", "rb") as file:
            assert torch.load(file).keys() == model.state_dict().keys()
        with open("real.txt") as file, open("written.txt", "w") as other:
            other.write(file.read())
        assert open("written.txt").read() == "mine"
        os.remove("kept/best.pt")
        assert not os.path.isfile("kept/best.pt")
"""


@pytest.mark.full
@pytest.mark.processes
def test_what_a_script_saves_it_finds_and_reads(tmp_path: Path) -> None:
    """As it does in a plain run: by os.path, pathlib, open, and lists of folders."""
    (tmp_path / "reads_back.py").write_text(READS_BACK)
    (tmp_path / "real.txt").write_text("mine")
    code, said = verify(tmp_path, tmp_path / "reads_back.py")
    assert code == 0, said
    assert not (tmp_path / "kept").exists()

"""``onefold replay``, ``why`` and ``compare``, as somebody types them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.started import ended

pytestmark = pytest.mark.full

SCRIPT = """
import sys
import torch, onefold

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs, targets = torch.randn(64, 4), torch.randn(64)
for word in sys.argv[1:]:
    if word.startswith("bad="):
        targets[int(word[4:])] = 1000.0
    if word == "short":
        inputs, targets = inputs[:50], targets[:50]
    if word == "tanh":
        model[1] = torch.nn.Tanh()
heavy = 1000.0 if "heavy" in sys.argv else 1.0
weight = lambda batch: heavy if len(batch[1]) < 4 else 1.0
loss = lambda m, batch: (m(batch[0])[:, 0] - batch[1]).square() * weight(batch)
trainer = onefold.Trainer(model, optimizer, loss, shards=4)
data = torch.utils.data.TensorDataset(inputs, targets)
loader = trainer.loader(data, batch_size=16, shuffle=True)
for epoch in trainer.epochs(3):
    for batch in loader:
        for word in sys.argv[1:]:
            if word.startswith(f"shift={trainer.steps}:"):
                with trainer.modifying():
                    model[0].weight.data[0, 0] += float(word.split(":")[1])
        trainer.step(batch)
    torch.save(model.state_dict(), "model.pt")
"""


def onefold(folder: Path, *words: str) -> tuple[int, str]:
    done = ended(*words, cwd=folder, COLUMNS="200")
    return done.returncode, done.stdout + done.stderr


def read_json(text: str) -> Any:
    """The object that a command has printed with ``--json``, which is a line of its own."""
    (line,) = (each for each in text.splitlines() if each.startswith("{"))
    return json.loads(line)


def trained(
    folder: Path, name: str, *words: str, devices: str = "cpu:2", script: str = SCRIPT
) -> None:
    file = "train.py" if script == SCRIPT else f"{name}.py"
    (folder / file).write_text(script)
    command = ["run", "--devices", devices, "--checkpoint", name, "--save-every", "5"]
    code, text = onefold(folder, *command, file, *words)
    assert code == 0, text


def content(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_step_is_computed_again_and_put_into_a_bundle(tmp_path: Path) -> None:
    trained(tmp_path, "run")
    before = content(tmp_path)
    code, text = onefold(tmp_path, "replay", "run", "--step", "7", "--shard", "2")
    assert code == 0, text
    assert "step 7, recomputed from step 5: 16 samples" in text
    assert "8 shards have the bits of the record." in text
    assert "float32 (1, 4), from " in text
    assert content(tmp_path) == before
    (tmp_path / "look.py").write_text(
        "def look(model, shards, step):\n    print(step, '\\nlast')\n"
    )
    code, text = onefold(tmp_path, "replay", "run", "--step", "7", "--call", "look.py:look")
    assert (code, "\n7 \nlast\n" in text) == (0, True), text
    code, text = onefold(tmp_path, "replay", "run", "--step", "3", "--bundle", "step.zip")
    assert code == 0, text
    for path in ("train.py", "model.pt"):
        (tmp_path / path).unlink()
    code, text = onefold(tmp_path, "replay", "step.zip", "--yes", "--devices", "cpu:2", "--json")
    assert code == 0, text
    assert len(read_json(text)["shards"]) == 4
    assert "4 shards have the bits of the record." in text
    code, text = onefold(tmp_path, "replay", "run", "--step", "3")
    assert code == 2
    assert "train.py is missing, but the run's script is needed to recompute it" in text


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "run")
    for words, said in (
        (
            ["replay", "run", "--step", "13"],
            "has steps 1 to 12, but got step 13. Pass one of its steps",
        ),
        (["replay", "run"], "has steps 1 to 12, but got no --step N"),
        (["replay", "run", "--step", "1", "--call", "no.py:look"], "--call must be FILE:FUNCTION"),
        (["replay", "run", "--step", "1", "--bundle", "train.py"], "must be a new file"),
        (["replay", "other", "--step", "1"], "other does not exist. Pass the directory of a run"),
        (["compare", "run"], "compare takes two runs, after all options, but got run"),
        (["compare", "--git", "HEAD", "--", "onefold", "run"], "--git must be GOOD..BAD"),
    ):
        code, text = onefold(tmp_path, *words)
        assert code == 2, text
        assert said in text


def test_the_sample_that_made_the_loss_jump_is_named(tmp_path: Path) -> None:
    trained(tmp_path, "run", "bad=41")
    code, text = onefold(tmp_path, "why", "run")
    assert code == 0, text
    assert ", number 41 of the data set: loss " in text
    assert "first operation whose result is " in text
    code, text = onefold(tmp_path, "why", "--json", "run")
    said = read_json(text)
    assert said["departure"]["step"] == said["findings"]["step"]
    samples = {each["shard"]: each["samples"] for each in said["findings"]["shards"]}
    assert 41 in [each["number"] for shard in said["shards"] for each in samples[shard]]
    # A last batch of 2 samples counts only where no other batch stands out.
    trained(tmp_path, "both", "short", "bad=41")
    code, text = onefold(tmp_path, "why", "both")
    assert (code, ": 16 samples, loss " in text, ", number 41 of" in text) == (0, True, True), text
    trained(tmp_path, "last", "short", "heavy")
    code, text = onefold(tmp_path, "why", "last")
    assert code == 0, text
    assert (
        "It has 2 samples instead of the usual 16, and fewer samples give larger gradients" in text
    )
    trained(tmp_path, "sound")
    code, text = onefold(tmp_path, "why", "sound")
    assert (code, "Nothing stands out in 12 steps." in text) == (1, True), text


def test_two_runs_are_compared_down_to_sample_and_operation(tmp_path: Path) -> None:
    trained(tmp_path, "one")
    trained(tmp_path, "same", devices="cpu:3")
    trained(tmp_path, "other", "tanh")
    trained(tmp_path, "bad", "bad=41")
    code, text = onefold(tmp_path, "compare", "one", "same")
    assert code == 0, text
    assert "12 steps and all results are equal." in text
    code, text = onefold(tmp_path, "compare", "one", "other")
    assert code == 1, text
    assert "Step 1: the loss of shards 0, 1, 2, 3 differs." in text
    assert "forward, aten.relu in 1 (" in text
    assert "in the other run forward, aten.tanh in 1 (" in text
    assert "the arguments: none, and tanh" in text
    code, text = onefold(tmp_path, "compare", "--json", "one", "other")
    found = read_json(text)
    assert (code, found["equal"], found["causes"]) == (1, False, ["the arguments: none, and tanh"])
    assert found["first"]["shards"] == [0, 1, 2, 3]
    same = read_json(onefold(tmp_path, "compare", "--json", "one", "same")[1])
    assert (same["equal"], same["steps"], same["first"]) == (True, 12, None)
    code, text = onefold(tmp_path, "compare", "one", "bad")
    assert code == 1, text
    assert "(numbers 41, 41 of the data)" in text


def test_a_block_that_changed_the_model_is_named(tmp_path: Path) -> None:
    for name, words in (("one", []), ("six", ["shift=6:0.1"]), ("more", ["shift=6:0.2"])):
        trained(tmp_path, name, *words)
    trained(tmp_path, "begin", "shift=0:0.1")
    line = 1 + SCRIPT[: SCRIPT.index("with trainer.modifying")].count("\n")
    code, text = onefold(tmp_path, "compare", "one", "six")
    assert code == 1, text
    assert "Before step 7 the model differs in 0.weight." in text
    assert "All operations of step 6 have equal results. Only /" in text, text
    assert f"/six/run.record then ran trainer.modifying, at train.py:{line}." in text, text
    _, text = onefold(tmp_path, "compare", "six", "more")
    what = f"or the next change by trainer.modifying differs, at train.py:{line}"
    assert f"Its update differs, {what}." in text, text
    _, text = onefold(tmp_path, "compare", "begin", "one")
    assert "No step has been made yet. Only /" in text, text
    assert f"/begin/run.record then ran trainer.modifying, at train.py:{line}." in text, text
    trained(tmp_path, "wide", "shift=0:0.2")
    _, text = onefold(tmp_path, "compare", "begin", "wide")
    assert f"No step has been made yet. The models differ from the start, {what}." in text, text
    trained(tmp_path, "twice", "shift=0:0.1", "shift=0:0.1")
    _, text = onefold(tmp_path, "compare", "begin", "twice")
    alone = "/twice/run.record then ran trainer.modifying 2 times, not 1, at train.py"
    assert f"{alone}:{line}." in text, text
    # A line above the block is edited; and a model that the script has made otherwise.
    trained(tmp_path, "edited", "shift=6:0.2", script=f"# A comment.\n{SCRIPT}")
    _, text = onefold(tmp_path, "compare", "six", "edited")
    assert f"Its update differs, {what}, edited.py:{line + 1}." in text, text
    trained(tmp_path, "seeded", script=SCRIPT.replace("manual_seed(0)", "manual_seed(1)"))
    _, text = onefold(tmp_path, "compare", "one", "seeded")
    assert "No step has been made yet. The models differ from the start.\n" in text, text


def test_the_commit_that_changed_the_bits_is_named(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        named = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *named, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    rates = ("0.01", "0.01", "0.02", "0.02", "0.02")
    for number, rate in enumerate(rates):
        text = SCRIPT.replace("lr=0.01", f"lr={rate}") + f"# {number}\n"
        (tmp_path / "train.py").write_text(text)
        git("add", "train.py")
        git("commit", "-m", f"change {number}")
    command = ["onefold", "run", "--devices", "cpu:1", "train.py"]
    code, text = onefold(tmp_path, "compare", "--git", "HEAD~4..HEAD", "--", *command)
    assert code == 1, text
    assert text.strip().endswith("A: change 2 is the first commit with other bits")
    code, text = onefold(tmp_path, "compare", "--git", "HEAD~1..HEAD", "--", *command)
    assert code == 0, text

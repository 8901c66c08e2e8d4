"""Launching a function or a script on several devices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import LaunchError
from onefold.launcher.environment import current_context
from tests.started import ended
from tests.tables import for_each

processes = pytest.mark.processes

TRAINING = """
import sys, torch, onefold
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = onefold.Trainer(model, optimizer, lambda m, b: m(b).square().mean(dim=1), shards={shards})
for _ in range(3):
    trainer.step(torch.randn(6, 4))
print(len(trainer.devices), trainer.fingerprint(), sys.argv[1:])
"""


def ranks(extra: int) -> tuple[int, str, int]:
    print("this is printed once")
    context = current_context()
    return context.rank + extra, str(context.size), torch.get_num_threads()


@processes
def test_the_leads_result_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    rank, size, _ = onefold.launch(ranks, devices="cpu:2", args=(10,))
    assert (rank, size) == (10, "2")
    assert capfd.readouterr().out == "this is printed once\n"


@processes
@for_each(
    ("devices", "code", "words"),
    [("auto", 0, ""), ("2", 1, "ValueError: 2 devices cannot share 1 shard: ")],
)
def test_no_more_devices_than_shards(devices: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.format(shards=1))
    done = ended("run", "--devices", devices, "train.py", cwd=tmp_path)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert done.stdout.startswith("1 " if not code else "")


FAILING = """
def loss(m, b):
    if {inside} and trainer.steps == 1:
        raise ArithmeticError
    return m(b).square().mean(dim=1)
trainer = onefold.Trainer(model, optimizer, loss, shards=2)
for _ in range(1 + {inside}):
    trainer.step(torch.randn(6, 4))
raise ArithmeticError
"""


@processes
@for_each(("inside", "when"), [(True, "in step 2"), (False, "after step 1")])
def test_a_failure_between_steps_is_not_in_one(inside: bool, when: str, tmp_path: Path) -> None:
    lines = TRAINING.partition("trainer =")[0] + FAILING.format(inside=inside)
    (tmp_path / "train.py").write_text(lines)
    done = ended("run", "--devices", "cpu:1", "train.py", cwd=tmp_path)
    assert f") failed {when}: ArithmeticError" in done.stderr.splitlines()[-1]


@processes
def test_the_scripts_own_arguments_and_the_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.format(shards=2))
    options = ("--devices", "2", "--record", "record", "--logs", "logs")
    done = ended("run", *options, "train.py", "--devices", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("['--devices', 'mine']")
    shown = ended("record", "show", "record", "--json", cwd=tmp_path)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3]
    assert "['--devices', 'mine']" in (tmp_path / "logs" / "device-1.log").read_text()


@for_each(
    ("asked", "said", "launcher"),
    [
        ("partition", "replicate", "onefold"),
        ("partition", "offload", "torch"),
        (None, "replicate", "torch"),
        ("replicate:state", "replicate:state", "torch"),
        ("partition", "replicate", "torch"),
        ("replicate:state", "replicate", "torch"),
    ],
)
def test_the_command_decides_what_is_kept(
    asked: str | None, said: str, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = LaunchContext(size=2, launcher=launcher, options=RunOptions(placement=said))
    monkeypatch.setattr("onefold.launcher.launch.current_context", lambda: context)
    if asked and asked != said == "replicate" and launcher == "torch":  # it was not asked to
        with pytest.raises(
            LaunchError, match=f"Set ONEFOLD_PLACEMENT={asked} for all of its processes"
        ):
            onefold.launch(lambda: 42, placement=asked)
    else:
        assert onefold.launch(lambda: 42, placement=asked) == 42


def test_what_is_no_function_is_refused_before_a_device_starts() -> None:
    made: Any = float
    words = r"main must be a function, but got float\. Write onefold\.launch"
    with pytest.raises(TypeError, match=words):
        onefold.launch(made("1"), devices="cpu:2")

"""The sides of a comparison: all train the same, and their processes are heard and ended."""

from __future__ import annotations

import itertools
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import catalog
from catalog import PEERS, SIDES, Precision, left_out
from loops import LOOPS
from sides import Side, SideError
from training import COMPARISONS, command_of
from workloads import WORKLOADS

pytestmark = [pytest.mark.full, pytest.mark.processes]

WORKER = """
    import json, os, socket, sys
    child = {child}
    link = socket.socket(socket.AF_UNIX)
    link.connect(sys.argv[-1])
    lines = link.makefile("rw")
    for line in lines:
        {action}
        answer = dict(seconds=int(line) * {step_s}, cpu_seconds=0.0, loss={loss}, peak_bytes=1)
        lines.write(json.dumps(answer) + "\\n")
        lines.flush()
"""


def test_every_side_has_a_loop_and_what_cannot_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {spec.loop for spec in SIDES.values()} == set(LOOPS)
    assert {name for one in COMPARISONS for name in (one.over, *one.under)} <= set(SIDES)
    side = SIDES["onefold-2-collective"]
    assert side.command("cpu")[2:5] == ["run", "--devices", "cpu:2"]
    assert side.command("cuda")[2:5] == ["run", "--devices", "cuda:0,cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert left_out(["plain-1", "ddp-2"], "cuda") == {"ddp-2": "needs 2 GPUs, and 1 are here"}
    monkeypatch.setattr(catalog, "find_spec", lambda package: package == "torch" or None)
    assert left_out(["ddp-2", "fabric-2"], "cpu") == {
        "fabric-2": "lightning_fabric is not installed"
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    first, second = WORKLOADS[name].batches(), WORKLOADS[name].batches()
    for (inputs, labels), (same_inputs, same_labels) in zip(first, second, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(labels, same_labels)
        assert len(inputs) == len(labels) == WORKLOADS[name].batch_size
    (one, _), (other, _) = WORKLOADS[name].build(), WORKLOADS[name].build()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def losses_of(side: str, precision: Precision) -> list[float]:
    """Of a loop of one process, in its first steps."""
    workload = replace(WORKLOADS["mlp"], precision=precision)
    loop = LOOPS[SIDES[side].loop](workload, SIDES[side], "cpu")
    return [loop.step(batch)() for batch in itertools.islice(itertools.cycle(loop.batches), 6)]


@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_onefold_trains_what_the_plain_loop_trains(precision: Precision, off: float) -> None:
    plain = losses_of("plain-1", precision)
    assert (plain == losses_of("plain-1", "fp32")) == (precision == "fp32")
    for side in ("onefold-1", "onefold-1-two-shards", "onefold-2-one-process"):
        assert losses_of(side, precision) == pytest.approx(plain, rel=off)


@pytest.mark.parametrize("name", [*PEERS, "onefold-2-collective"])
def test_sides_of_two_processes_train(name: str, tmp_path: Path) -> None:
    if reason := left_out([name], "cpu").get(name):
        pytest.skip(reason)
    command = command_of(name, "mlp", precision="bf16")
    with Side(name, command, processes=2, folder=tmp_path, environment={}) as running:
        assert running.train(3).seconds > 0


def worker(
    folder: Path, *, action: str = "pass", step_s: str = "0.5", loss: str = "1.0", child: str = "0"
) -> Side:
    """A side whose processes do `action` before they answer; with a fork for its second one."""
    folder = folder / f"{step_s} {loss} {action}"[:20]
    folder.mkdir()
    program = folder / "worker.py"
    text = WORKER.format(action=action, step_s=step_s, loss=loss, child=child)
    program.write_text(textwrap.dedent(text))
    processes = 1 if child == "0" else 2
    command = [sys.executable, str(program)]
    environment = {"STEP_S": "0.25"}
    return Side("worker", command, processes=processes, folder=folder, environment=environment)


def test_a_side_trains_as_often_as_asked_and_its_slowest_process_counts(tmp_path: Path) -> None:
    with worker(tmp_path, step_s="float(os.environ['STEP_S'])") as running:
        assert [running.train(steps).seconds for steps in (2, 10)] == [0.5, 2.5]
    with worker(tmp_path, step_s="(2.0 if child else 0.5)", child="os.fork() == 0") as running:
        assert running.train(3).seconds == 6.0


def test_what_goes_wrong_in_a_side_is_reported(tmp_path: Path) -> None:
    dies = "print('out of luck', flush=True); os._exit(3)"
    with (
        pytest.raises(SideError, match=r"worker: a process ended early(.|\n)*out of luck"),
        worker(tmp_path, action=dies) as running,
    ):
        running.train(1)
    with (
        pytest.raises(SideError, match="the loss came to nan"),
        worker(tmp_path, loss="float('nan')") as running,
    ):
        running.train(1)
    command = [sys.executable, "-c", "exit('no')"]
    broken = Side("broken", command, processes=1, folder=tmp_path, environment={})
    with pytest.raises(SideError, match=r"broken: ended at the start with code 1(.|\n)*no"):
        broken.__enter__()

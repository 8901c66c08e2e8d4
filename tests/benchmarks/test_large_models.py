"""What a large model takes of each process: what is read of memory, and a run of small sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import large_models
from _large import GPT, Size, filled, losses
from large_models import FIELDS, MIB, WATCH_S, kept_by, most, reason_of, watched
from loops import plain_step
from sides import SideError

pytestmark = pytest.mark.full

SMALL = Size(width=32, layers=2, vocabulary=50, length=16, batch_size=4, shards=4)


def test_the_most_of_two_processes() -> None:
    one = dict.fromkeys(FIELDS, 1)
    other = {**dict.fromkeys(FIELDS, 0), "Pss_Anon": 2}
    assert most(one, other) == {**one, "Pss_Anon": 2}


def test_memory_is_watched_in_the_meantime() -> None:
    before = kept_by([os.getpid()])
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    with watched([os.getpid()]) as found:
        time.sleep(5 * WATCH_S)
    del held
    assert found["Pss_Anon"] > before["Pss_Anon"] + 48 * MIB


def test_a_process_that_has_ended_has_nothing() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert set(kept_by([done.pid]).values()) == {0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("zero3 is not installed", "zero3 is not installed"),
        ("ended early\n[rank0]:     x()\n[rank0]: ValueError: odd\n[rank1]: OSError: b", "odd"),
        ("ended early\nTypeError: no\n", "TypeError: no"),
    ],
)
def test_a_side_that_fails_has_one_line(text: str, reason: str) -> None:
    assert reason_of(SideError(text)).endswith(reason)


def test_the_model_sees_nothing_of_what_follows() -> None:
    model = filled(GPT(SMALL))
    tokens = torch.arange(SMALL.length)[None]
    changed = tokens.clone()
    changed[0, 8:] += 1
    logits, others = model(tokens), model(changed)
    assert logits.shape == (1, SMALL.vocabulary, SMALL.length)
    assert torch.equal(logits[..., :8], others[..., :8])
    assert not torch.equal(logits[..., 8:], others[..., 8:])


def test_losses_of_sequences_make_up_that_of_the_plain_step() -> None:
    model = filled(GPT(SMALL))
    batch = torch.arange(32).view(2, 16), torch.arange(1, 33).view(2, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ours = losses(model, batch)
    assert ours.shape == (2,)
    assert ours.mean().item() == pytest.approx(plain_step(model, optimizer)(batch)())


@pytest.mark.processes
def test_two_small_sides_train_the_same_model(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    sizes = ["--width", "32", "--layers", "2", "--vocabulary", "50", "--length", "16"]
    done = subprocess.run(
        [
            *(sys.executable, str(Path(large_models.__file__)), *sizes),
            *("--batch-size", "4", "--shards", "4", "--processes", "2", "--steps", "2"),
            *("--sides", "onefold-all-shared,ddp", "--json", str(output)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.count("|") for line in lines[:4]] == [9] * 4
    assert json.loads(lines[-1]) == json.loads(output.read_text(encoding="utf-8"))
    ours, ddp = json.loads(lines[-1])["results"]
    assert (ours["side"], ddp["side"]) == ("onefold-all-shared", "ddp")
    assert ours["loss"] == pytest.approx(ddp["loss"], rel=1e-5)
    assert len(ours["step_s"]) == 2
    assert all(one["kept_bytes"]["Pss"] > 0 and one["cpu_s"] > 0 for one in (ours, ddp))

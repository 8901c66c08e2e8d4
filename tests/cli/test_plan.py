"""``onefold plan`` tells the stages of a script's model and what they take."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from onefold import RunOptions, list_devices
from onefold.cli.plan import plan_script
from tests.started import ended

SCRIPT = Path(__file__).parents[1] / "scripts" / "planned.py"

pytestmark = pytest.mark.processes


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


# Of the trained parameters: a first layer, three wide ones, a norm.
NUMBERS = 17 * 256 + 3 * 257 * 256 + 2 * 256
FROZEN_BYTES = 4 * 257 * 256 + 2 * 4 * 256 + 8


def test_stages_and_memory_are_shown(tmp_path: Path) -> None:
    done = ended(
        *["plan", "--devices", "1,4", "--offload-dir"], str(tmp_path), str(SCRIPT), "adamw"
    )
    assert done.returncode == 0, done.stderr
    assert f"Model: {NUMBERS:,} trained parameters, 0.8 MiB; AdamW; 4 shards" in done.stdout
    wide = 257 * 256
    assert rows(done.stdout)[:-2] == [
        ["first", f"{17 * 256:,}", "0.0"],
        ["layers.0 to layers.2, each of 3", f"{wide:,}", "0.3"],
        ["norm", "512", "0.0"],
    ]
    p, stage, disk = 4 * NUMBERS, 16 * wide, 6 * 4 * NUMBERS + FROZEN_BYTES
    part = (p + FROZEN_BYTES) / 4
    # Of four devices the last has the frozen layer and the norm, the first a wide one and its own.
    in_pipeline = 4 * (wide + 17 * 256)
    # Devices of one host have the optimizer's state once with replicate:state, too.
    expected = {
        "1": (disk, disk, disk, disk, stage, disk),
        "4": (
            *(part + 2.5 * p, part + 2.5 * p),
            *(part + 0.75 * p + stage, part + 5 * in_pipeline, stage, disk),
        ),
    }
    assert rows(done.stdout)[-2:] == [
        [devices, *(f"{size / 2**20:,.1f}" for size in sizes)]
        for devices, sizes in expected.items()
    ]
    assert "nothing after it runs" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("what", "options", "text"),
    [
        ("none", "", "onefold: the script created no Trainer"),
        ("broken", "", "ArithmeticError: the fault that was asked for"),
        ("adamw", "--devices 2,many", "device counts, such as 1,2,4, but got 2,many"),
        ("adamw", "--devices 0", "device counts, such as 1,2,4, but got 0"),
        (
            "adamw",
            "--offload-dir absent",
            "--offload-dir or ONEFOLD_OFFLOAD_DIR must be an existing folder",
        ),
        pytest.param("lbfgs", "--devices 1", "", marks=pytest.mark.full),  # no Trainer takes it
    ],
)
def test_what_cannot_be_planned_is_told(what: str, options: str, text: str) -> None:
    done = ended("plan", *options.split(), str(SCRIPT), what)
    assert done.returncode == 2
    assert text in re.sub(r"\s+", " ", done.stderr)


MIB = 2**20


@pytest.mark.parametrize(
    ("free_bytes", "shards", "text"),
    [
        (2**30, 1, "with 1 device all; with 4 devices pipeline."),
        (5 * MIB, 4, "with 1 device all; with 4 devices offload."),
        (8 * MIB, 4, "with 1 device all; with 4 devices partition, pipeline, offload."),
        (MIB, 4, "with 1 device nothing; with 4 devices nothing. Too large for a device"),
    ],
)
def test_what_fits_is_told_by_placement(
    free_bytes: int,
    shards: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = [replace(list_devices()[-1], free_bytes=free_bytes)]
    monkeypatch.setattr("onefold.cli.plan.list_devices", lambda: machine)
    for as_json in (False, True):
        options = RunOptions(placement="offload")
        assert not plan_script([str(SCRIPT), str(shards)], "1,4", options=options, as_json=as_json)
    shown, _, found = capsys.readouterr().out.partition("{")
    assert text in " ".join(shown.split())
    for row in json.loads("{" + found)["rows"]:
        for each in ("partition", "pipeline", "offload"):
            # Only a pipeline can use more devices than shards.
            assert (row[each] is None) == (row["devices"] > shards and each != "pipeline")
            fits = row[each] is not None and row[each] * row["devices"] <= free_bytes
            assert fits == (each in row["fits"])


def test_nothing_fits_a_gpu_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = json.loads
    monkeypatch.setattr("onefold.cli.plan.list_devices", lambda: list_devices()[-1:])
    monkeypatch.setattr("onefold.cli.plan.json.loads", lambda text: read(text) | {"together": 0})
    assert not plan_script([str(SCRIPT), "1"], "4,1", options=RunOptions(), as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    # Where the first row has no offload, no stage is too large for it.
    assert shown.endswith("optimizer state: with 4 devices nothing; with 1 device nothing."), shown

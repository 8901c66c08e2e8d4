"""The options of a run as variables of the environment."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from onefold.core.options import RunOptions
from onefold.errors import LaunchError
from onefold.launcher.environment import read_context
from onefold.launcher.launch import worker_environment
from onefold.options import OPTIONS, options_of, variable, variables_of
from tests.tables import for_each

GIVEN = RunOptions(
    placement="partition",
    checkpoint="/tmp/run",
    save_every=500,
    save_every_s=3600.0,
    keep_last=7,
    max_restarts=2,
    restart_devices="fewer",
    grace_period_s=12.5,
    allow_changed=("seed", "scheduler"),
    record="/tmp/record",
    logs="/tmp/logs",
    profile="/tmp/profile",
    audit=0.25,
    on_corruption="stop",
    exchange="collective",
    timeout_s=7.5,
    offload_dir="/tmp/disk",
    stop_signals=("USR1",),
    hosts=("node1", "node2"),
    via="ssh -p 2222 {host}",
    stop_notice="/tmp/stop",
)
INTERNAL = {"program", "quiet", "remote", "saves", "save_every_s", "stops_after", "tools"}
"""Fields that no user sets; and the seconds of ``--save-every``, which has both of its fields."""


def test_every_option_is_a_variable() -> None:
    known = {option.field or name for name, option in OPTIONS.items()}
    assert known | INTERNAL == {field.name for field in fields(RunOptions)}
    variables = variables_of(GIVEN)
    assert set(variables) == set(map(variable, OPTIONS))
    assert options_of(variables) == GIVEN
    assert variables_of(RunOptions()) == {}


@for_each("text", ["300", "90s", "500,1h"])
def test_intervals_are_written_as_they_are_read(text: str) -> None:
    options = options_of({"ONEFOLD_SAVE_EVERY": text})
    assert options_of(variables_of(options)) == options


def test_other_launchers_read_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for launcher in ({}, torchrun):
        options = read_context({**launcher, "ONEFOLD_CHECKPOINT": "run"}).options
        assert options.checkpoint == str(tmp_path / "run")
        assert options.stop_signals == ("TERM", "USR1", "USR2")


@for_each(
    ("name", "text", "words"),
    [
        ("AUDIT", "often", "could not convert"),
        ("CHECKPOINT", "s3:/bucket/run", "must be a local folder"),
        ("RECORD", "gs://bucket/run", "must be a local folder"),
        ("AUDIT", "2", "fraction from 0 to 1"),
        ("KEEP_LAST", "0", "keep_last"),
        ("SAVE_EVERY", "soon", "a number of steps .at least 1"),
        ("STOP_SIGNAL", "KILL", "INT, TERM, HUP, USR1, USR2"),
        ("STOP_NOTICE", "awz", "choose from aws, gcp, azure, or a file"),
        ("STOP_NOTICE", "s3://bucket/stop", "must be a local"),
    ],
)
def test_a_wrong_value_is_named(name: str, text: str, words: str) -> None:
    said = re.escape(f"ONEFOLD_{name}='{text}' is not valid: ")
    with pytest.raises(LaunchError, match=f"{said}.*{words}"):
        options_of({f"ONEFOLD_{name}": text})


@for_each(
    ("name", "meant"),
    [("CHECKPONT", "CHECKPOINT"), ("SAVE_EVRY", "SAVE_EVERY"), ("RECORDS", "RECORD")],
)
def test_a_misspelled_name_is_refused(name: str, meant: str) -> None:
    words = f"ONEFOLD_{name} is unknown. Set ONEFOLD_{meant}"
    with pytest.raises(LaunchError, match=words):
        read_context({f"ONEFOLD_{name}": "x"})


def test_names_of_others_are_left_alone() -> None:
    assert options_of({"ONEFOLD_EXPERIMENT": "x", "ONEFOLD_DATA": "y"}) == RunOptions()


def test_no_program_of_a_worker_gets_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECKPOINT", "RECORD"):
        monkeypatch.setenv(f"ONEFOLD_{name}", "/tmp/run")
    assert not [name for name in worker_environment(read_context({})) if name.endswith("RECORD")]
    assert "ONEFOLD_CHECKPOINT" not in worker_environment(read_context({}))

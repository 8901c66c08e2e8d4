from __future__ import annotations

import importlib.util
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from onefold.errors import DataError, LaunchError
from onefold.jobs import runfolder
from onefold.jobs.classify import PictureModel
from onefold.jobs.options import TrainOptions, from_mapping, read_config
from onefold.jobs.runfolder import RunFolder, check_folder, next_name, read_run
from tests.tables import for_each

OPTIONS = TrainOptions(data="digits", name="one")


def begun(path: Path, *, is_lead: bool = True, options: TrainOptions = OPTIONS) -> RunFolder:
    folder = RunFolder(path, is_lead=is_lead)
    folder.create(options, "classify", {"words.json": "[1]"})
    folder.say(job="classify", best=None)
    return folder


def steps_line(step: int, epoch: int = 0) -> dict[str, Any]:
    return {"kind": "steps", "epoch": epoch, "step": step, "loss": 1 / step, "lr": 0.1}


def epoch_line(epoch: int, step: int) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": epoch, "step": step, "loss": 0.5, "scores": {"loss": 0.25}}


def metrics(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def tree(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


def test_a_run_without_a_name_gets_the_first_free_number(tmp_path: Path) -> None:
    assert next_name(tmp_path / "none", "text") == "text-1"
    for taken in ("text-1", "text-3", "classify-2"):
        (tmp_path / taken).mkdir()
    (tmp_path / "text-2").touch()
    assert next_name(tmp_path, "text") == "text-4"
    assert next_name(tmp_path, "classify") == "classify-1"


def test_a_new_run_needs_a_new_folder(tmp_path: Path) -> None:
    check_folder(tmp_path / "new", resume=False)
    begun(tmp_path / "old")
    words = "old is there already: --resume goes on with it, another --name begins a new run"
    with pytest.raises(LaunchError, match=words):
        check_folder(tmp_path / "old", resume=False)


def test_what_a_run_writes_does_not_follow_links(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    run = tmp_path / "run"
    run.mkdir()
    names = [".config.toml.new", ".run.json.new", ".words.json.new", "run.json", "words.json"]
    for name in names:
        (run / name).symlink_to(theirs)
    folder = begun(run)
    folder.close()
    assert theirs.read_text() == "theirs"
    assert read_run(run)["job"] == "classify"


def test_metrics_are_not_added_to_a_file_elsewhere(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    (tmp_path / "theirs").touch()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        folder.add(steps_line(1))
    folder.close()
    assert (tmp_path / "theirs").read_bytes() == b""


@for_each("content", ["[" * 100_000, "[]", "{", '"text"'])
def test_what_is_no_note_of_a_run_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DataError, match=r"run\.json: expected"):
        read_run(tmp_path)


@for_each("size", [None, 10**9, "large"])
def test_a_note_of_another_model_is_one_error(tmp_path: Path, size: object) -> None:
    facts = {"name": "resnet18", "classes": ["a"], "mean": [0], "std": [1], "image_size": size}
    model = {**facts, "mode": "RGB", "small_stem": True}
    for kept in ({"picture_model": model}, {"picture_model": facts}, {"picture_model": 3}, {}):
        (tmp_path / "run.json").write_text(json.dumps({"job": "classify", **kept}))
        with pytest.raises(DataError, match=r"run\.json: expected what the run has kept of its m"):
            PictureModel.of_run(tmp_path)


def test_a_run_that_goes_on_must_be_there(tmp_path: Path) -> None:
    begun(tmp_path / "old")
    check_folder(tmp_path / "old", resume=True)
    words = "--resume: there is no run in .*new; leave --resume out to begin one"
    with pytest.raises(LaunchError, match=words):
        check_folder(tmp_path / "new", resume=True)


@for_each("resume", [False, True])
@for_each("kind", ["folder", "file"])
def test_what_is_no_run_is_left_alone(tmp_path: Path, resume: bool, kind: str) -> None:
    """Neither answer may be to try the other one."""
    path = tmp_path / "photos"
    path.mkdir() if kind == "folder" else path.touch()
    with pytest.raises(LaunchError, match="photos is there, but holds no run: another --name"):
        check_folder(path, resume=resume)


def test_a_run_begins_with_its_options_and_files(tmp_path: Path) -> None:
    begun(tmp_path / "a" / "b")
    assert tree(tmp_path / "a" / "b") == [".lock", "config.toml", "run.json", "words.json"]
    values = read_config(tmp_path / "a" / "b" / "config.toml", "classify")
    assert from_mapping(TrainOptions, values, "it") == OPTIONS
    assert (tmp_path / "a" / "b" / "words.json").read_text() == "[1]"
    assert read_run(tmp_path / "a" / "b") == {"job": "classify", "best": None}


def test_only_the_lead_writes(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", is_lead=False)
    folder.open_events(1)
    folder.add(steps_line(1))
    folder.go_on(OPTIONS, "classify", steps=1, epochs=0)
    folder.write_examples({})
    folder.close()
    assert tree(tmp_path) == []
    assert folder.lines() == []


def test_a_device_that_is_not_the_lead_changes_nothing_of_a_run(tmp_path: Path) -> None:
    lead = begun(tmp_path)
    lead.add(steps_line(1))
    before = {path: (tmp_path / path).read_bytes() for path in tree(tmp_path)}
    other = begun(tmp_path, is_lead=False, options=TrainOptions(name="other"))
    other.go_on(TrainOptions(name="other"), "text", steps=0, epochs=0)
    other.say(best=3)
    other.add(steps_line(2))
    assert {path: (tmp_path / path).read_bytes() for path in tree(tmp_path)} == before


def test_what_is_said_is_added_to_what_was_said(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.say(best={"epoch": 1}, finished=None)
    folder.say(finished="now")
    expected = {"job": "classify", "best": {"epoch": 1}, "finished": "now"}
    assert read_run(tmp_path) == expected
    again = RunFolder(tmp_path, is_lead=True)
    again.go_on(OPTIONS, "classify", steps=0, epochs=0)
    again.say(finished=None)
    assert read_run(tmp_path) == {**expected, "finished": None}


@for_each("fails", ["fsync", "replace"])
def test_what_was_there_stays_whole_if_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    folder = begun(tmp_path)
    before = {path: (tmp_path / path).read_bytes() for path in ("run.json", "config.toml")}

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="no space left"):
        folder.say(notes="x" * 9000)
    with pytest.raises(OSError, match="no space left"):
        folder.go_on(TrainOptions(name="other"), "text", steps=0, epochs=0)
    assert {path: (tmp_path / path).read_bytes() for path in before} == before


def test_a_file_is_whole_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []

    def note(source: Path, target: Path) -> None:
        placed.append((target.name, len(source.read_bytes()), target.exists()))
        source.rename(target)

    monkeypatch.setattr(runfolder.os, "replace", note)
    folder = begun(tmp_path)
    folder.say(notes="x" * 9000)
    assert [name for name, _, _ in placed] == ["words.json", "config.toml", "run.json", "run.json"]
    assert all(length > 2 for _, length, _ in placed)
    assert placed[-1][1] == (tmp_path / "run.json").stat().st_size


def test_lines_come_back_as_they_were_added(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    assert folder.lines() == []
    added = [steps_line(1), steps_line(2), epoch_line(0, 2)]
    for line in added:
        folder.add(line)
    assert folder.lines() == metrics(tmp_path) == added


def test_a_line_may_hold_any_text(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    line = {**steps_line(1), "note": "a\nb\u2028c\x85é"}
    folder.add(line)
    assert folder.lines() == [line]


@for_each("cut", ['{"kind": "ste', "{", '{"kind": "steps", "epoch": 0}'])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, cut: str) -> None:
    folder = begun(tmp_path)
    folder.add(steps_line(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    assert folder.lines() == [steps_line(1)]
    folder.go_on(OPTIONS, "classify", steps=1, epochs=0)
    folder.add(steps_line(2))
    assert metrics(tmp_path) == [steps_line(1), steps_line(2)]


def test_a_single_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "ste')
    assert folder.lines() == []


@for_each(
    ("steps", "epochs", "kept"),
    [
        (6, 2, [0, 1, 2, 3, 4, 5, 6, 7]),
        (6, 1, [0, 1, 2, 3, 4, 5, 6]),
        (4, 1, [0, 1, 2, 3, 4]),
        (3, 1, [0, 1, 2, 3]),
        (3, 0, [0, 1, 2]),
        (1, 0, [0]),
        (0, 0, []),
    ],
)
def test_lines_after_the_checkpoint_are_taken_back(
    tmp_path: Path, steps: int, epochs: int, kept: list[int]
) -> None:
    """Two epochs of three steps; a step of number 3 may have been saved before its evaluation."""
    lines = [
        *(steps_line(step) for step in (1, 2, 3)),
        epoch_line(0, 3),
        *(steps_line(step, 1) for step in (4, 5, 6)),
        epoch_line(1, 6),
    ]
    folder = begun(tmp_path)
    for line in lines:
        folder.add(line)
    again = RunFolder(tmp_path, is_lead=True)
    again.go_on(OPTIONS, "classify", steps=steps, epochs=epochs)
    order = [0, 1, 2, 3, 4, 5, 6, 7]
    assert metrics(tmp_path) == [lines[number] for number in order if number in kept]


def test_a_run_that_goes_on_has_the_options_of_now(tmp_path: Path) -> None:
    begun(tmp_path)
    again = TrainOptions(data="digits", name="one", epochs=30, resume=True)
    RunFolder(tmp_path, is_lead=True).go_on(again, "classify", steps=0, epochs=0)
    values = read_config(tmp_path / "config.toml", "classify")
    assert values["epochs"] == 30
    assert "resume" not in values


def test_a_run_that_was_stopped_before_it_said_anything_goes_on(tmp_path: Path) -> None:
    RunFolder(tmp_path, is_lead=True).create(OPTIONS, "classify", {})
    check_folder(tmp_path, resume=True)
    folder = RunFolder(tmp_path, is_lead=True)
    folder.go_on(OPTIONS, "classify", steps=0, epochs=0)
    folder.say(job="classify")
    assert read_run(tmp_path) == {"job": "classify"}


def strict(text: str) -> Any:
    """As readers other than Python's read JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@for_each("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_written_as_none(tmp_path: Path, number: float) -> None:
    folder = begun(tmp_path)
    value = {"a": number, "b": [number, 1.0, {"c": number}], "d": (number, 2)}
    told = {"a": None, "b": [None, 1.0, {"c": None}], "d": [None, 2]}
    folder.add({**steps_line(1), "value": value})
    folder.say(value=value)
    folder.write_examples(value)
    assert strict((tmp_path / "metrics.jsonl").read_text())["value"] == told
    assert strict((tmp_path / "run.json").read_text())["value"] == told
    assert strict((tmp_path / "examples.json").read_text()) == told


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected the folder of a run, with run\.json in it"):
        read_run(tmp_path)


@for_each("content", ["", "{", "\0\0\0"])
def test_a_damaged_run_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DataError, match=r"run\.json: expected JSON: "):
        read_run(tmp_path)


def test_files_and_folders_have_their_places(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    assert folder.pictures == tmp_path / "pictures"
    assert folder.checkpoints == tmp_path / "checkpoints"


def events_in(path: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_metrics_are_events_as_well_and_later_ones_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason='needs pip install "onefold[report]"')
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read by their number in the process, as text: 10 would come before 9.
    counter = type(event_file_writer._global_uid)(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    folder = begun(tmp_path)
    folder.open_events(1)
    for line in (steps_line(1), steps_line(2), epoch_line(0, 2), steps_line(4, 1)):
        folder.add(line)
    folder.close()
    folder.open_events(3)
    folder.add(steps_line(8, 1))
    folder.close()
    folder.close()
    found = events_in(tmp_path / "tensorboard")
    assert found["train/loss"] == [(1, 1.0), (2, 0.5), (8, 0.125)]
    assert found["epoch/loss"] == [(2, 0.5)]
    assert found["test/loss"] == [(2, 0.25)]
    assert [step for step, _ in found["train/lr"]] == [1, 2, 8]


@for_each("failure", [None, OSError("no space left")])
def test_the_events_are_whole_before_others_may_write(
    tmp_path: Path, failure: Exception | None
) -> None:
    folder = begun(tmp_path)
    held = []

    class Events:
        def close(self) -> None:
            held.append((tmp_path / ".lock").exists())
            if failure is not None:
                raise failure

    folder._events = Events()
    with pytest.raises(OSError, match="no space left") if failure else nullcontext():
        folder.close()
    assert held == [True]
    # Closing again does nothing, and whoever comes next finds the lock free.
    folder.close()
    assert not (tmp_path / ".lock").exists()
    again = RunFolder(tmp_path, is_lead=True)
    again.go_on(OPTIONS, "classify", steps=0, epochs=0)
    again.close()


def test_without_tensorboard_there_are_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = begun(tmp_path)
    folder.open_events(1)
    folder.add(steps_line(1))
    folder.close()
    assert metrics(tmp_path) == [steps_line(1)]
    assert not (tmp_path / "tensorboard").exists()

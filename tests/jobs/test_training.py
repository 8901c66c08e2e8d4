from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.cli.verify import verify_script
from onefold.core.options import RunOptions
from onefold.errors import DataError, LaunchError
from onefold.jobs.catalog import JOBS, job_of
from onefold.jobs.finetune import best_checkpoint
from onefold.jobs.run import read_options, run_job
from tests.jobs.tiny import SMALL, WRITERS, run_here, write_pictures

pytestmark = pytest.mark.full

BAD: dict[str, Callable[[Path], object]] = {
    "classify": lambda data: (data / "train" / "pear" / "3.png").write_bytes(b"no picture"),
    "segment": lambda data: (data / "train" / "masks" / "2.png").unlink(),
    "text": lambda data: (data / "dev.tsv").write_text(f"no tab\n{(data / 'dev.tsv').read_text()}"),
}
"""Ways to make one sample of a data set useless."""

all_jobs = pytest.mark.parametrize("job", [job.name for job in JOBS])


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The metrics of a run."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


@all_jobs
def test_a_run_leaves_everything_in_its_folder(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    folder, said = run_here(job, data, tmp_path / "runs", epochs=2)
    assert folder == tmp_path / "runs" / f"{job}-1"
    assert said["fingerprint"] == json.loads((folder / "run.json").read_text())["fingerprint"]
    assert len(said["fingerprint"]) == 16
    epochs = lines(folder, "epoch")
    assert [line["epoch"] for line in epochs] == [0, 1]
    assert all(line["devices"][0]["forward"] > 0 for line in epochs)
    assert {"loss"} < set(epochs[0]["scores"])
    assert lines(folder, "steps")
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    best = best_checkpoint(folder).name
    assert best in checkpoints
    assert checkpoints[-1] == f"step-{epochs[-1]['step']:08d}"
    examples = json.loads((folder / "examples.json").read_text())
    assert examples["kind"] == job
    named = [value for each in examples["samples"] for value in each.values()]
    assert all((folder / name).is_file() for name in named if str(name).startswith("pictures/"))


@all_jobs
def test_the_saved_options_give_the_same_run(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    folder, said = run_here(job, data, tmp_path / "runs", seed=3, precision="bf16")
    kind = job_of(job)
    asked = read_options(kind, {"name": "again"}, folder / "config.toml")
    assert run_job(kind, asked)["fingerprint"] == said["fingerprint"]
    other = read_options(kind, {"name": "full", "precision": "fp32"}, folder / "config.toml")
    assert run_job(kind, other)["fingerprint"] != said["fingerprint"]


@all_jobs
@pytest.mark.processes
def test_every_job_has_the_same_bits_on_any_number_of_devices(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    BAD[job](data)
    options = {"data": data, "runs": tmp_path / "runs", "workers": 1, "epochs": 2, **SMALL[job]}
    if job == "segment":
        options["turns"] = "yes"
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    command = ["-m", "onefold", "train", job, "--skip-bad", *words]
    assert verify_script(command, "1,2,3", steps=4, options=RunOptions(quiet=True)) == 0


@pytest.mark.processes
def test_what_devices_keep_is_no_part_of_the_result(tmp_path: Path) -> None:
    data, kind = WRITERS["text"](tmp_path / "data"), job_of("text")
    values = {"data": str(data), "runs": str(tmp_path / "runs"), "devices": "cpu:2", "epochs": 1}
    results = [
        run_job(kind, read_options(kind, {**values, **SMALL["text"], "keep": keep}, None))
        for keep in ("all", "span", "host")
    ]
    assert len({result["fingerprint"] for result in results}) == 1


@pytest.mark.parametrize("epochs_first", [0, 1])
def test_a_run_goes_on_where_it_was_saved(
    epochs_first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_pictures(tmp_path / "data")
    whole, said = run_here("classify", data, tmp_path / "runs", epochs=3, name="whole")
    steps = 3 * epochs_first + 2
    real_step = onefold.Trainer.step

    def step(self: onefold.Trainer, batch: object) -> onefold.Step:
        if self.steps == steps:
            raise KeyboardInterrupt
        return real_step(self, batch)

    monkeypatch.setattr(onefold.Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt):
        run_here("classify", data, tmp_path / "runs", epochs=3, name="cut", save_every=1)
    monkeypatch.undo()
    assert lines(tmp_path / "runs" / "cut", "steps")[-1]["step"] == steps
    folder, resumed = run_here("classify", data, tmp_path / "runs", name="cut", resume=True)
    assert resumed["fingerprint"] == said["fingerprint"]
    for kind in ("steps", "epoch"):
        pairs = zip(lines(whole, kind), lines(folder, kind), strict=True)
        assert all((a["step"], a["lr"]) == (b["step"], b["lr"]) for a, b in pairs)
    pairs = zip(lines(whole, "epoch"), lines(folder, "epoch"), strict=True)
    assert all((a["loss"], a["scores"]) == (b["loss"], b["scores"]) for a, b in pairs)


def test_a_run_that_goes_on_keeps_its_options(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    run_here("classify", data, tmp_path / "runs", name="it", lr=0.02)
    kind = job_of("classify")
    here = {"runs": str(tmp_path / "runs"), "name": "it", "resume": True}
    again = read_options(kind, {**here, "workers": 2, "epochs": 7}, None)
    assert (again.lr, again.workers, again.epochs) == (0.02, 2, 7)
    with pytest.raises(ValueError, match=r"--lr 0.5: the run it was begun with 0.02"):
        read_options(kind, {**here, "lr": 0.5}, None)


def test_a_run_may_be_given_more_epochs(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    folder, _ = run_here("classify", data, tmp_path / "runs", name="it")
    run_here("classify", data, tmp_path / "runs", name="it", resume=True, epochs=2)
    assert [line["epoch"] for line in lines(folder, "epoch")] == [0, 1]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "--data: expected where the data are"),
        ({"resume": True}, ValueError, "--resume: expected with --name"),
        ({"data": "x", "name": "new", "resume": True}, LaunchError, "there is no run in"),
        ({"data": "x", "name": "old"}, LaunchError, "is there already: --resume goes on with it"),
    ],
)
def test_what_cannot_begin_is_refused(
    given: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").touch()
    with pytest.raises(error, match=words):
        read_options(job_of("classify"), {"runs": str(tmp_path), **given}, None)


def test_bad_data_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    (data / "train" / "pear" / "0.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"train/pear/0\.png: expected a picture"):
        run_here("classify", data, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_what_is_left_out_is_told_in_the_run(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    (data / "train" / "pear" / "0.png").write_bytes(b"not a picture")
    _, said = run_here("classify", data, tmp_path / "runs", skip_bad=True)
    assert said["train_samples"] == 23
    assert len(said["left_out"]) == 1
    assert "pear/0.png" in said["left_out"][0]


@pytest.mark.processes
def test_the_command_trains_and_predicts(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    onefold_command = [sys.executable, "-m", "onefold"]
    options = "--model resnet18 --epochs 2 --shards 2 --batch-size 8 --name first --devices 2"
    trained = subprocess.run(
        [*onefold_command, "train", "classify", "--data", str(data), *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "epoch 2/2  loss" in trained.stdout
    assert "Report: runs/first/report.html" in trained.stdout
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    told = subprocess.run(
        [*onefold_command, "predict", "runs/first", str(data / "test"), "--devices", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = told.stdout.splitlines()
    assert rows[0] == "file,class,confidence"
    assert len(rows) == 13


def test_the_events_are_those_of_the_metrics(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    data = write_pictures(tmp_path / "data")
    folder, _ = run_here("classify", data, tmp_path / "runs", epochs=2)
    read = events.EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    told = [(event.step, event.value) for event in read.Scalars("test/accuracy")]
    epochs = lines(folder, "epoch")
    assert told == [(line["step"], pytest.approx(line["scores"]["accuracy"])) for line in epochs]
    assert len(read.Scalars("train/loss")) == len(lines(folder, "steps"))


def test_a_run_goes_on_with_its_own_data_alone(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    run_here("classify", data, tmp_path / "runs", name="it")
    kind = job_of("classify")
    given = {"runs": str(tmp_path / "runs"), "name": "it", "resume": True, "epochs": 2}
    (data / "train" / "pear" / "0.png").rename(data / "train" / "pear" / "99.png")
    with pytest.raises(DataError, match="expected the data that the run it was begun with"):
        run_job(kind, read_options(kind, given, None))


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    folder, _ = run_here("classify", data, tmp_path / "runs", name="it")
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    kind = job_of("classify")
    again = {"runs": str(tmp_path / "runs"), "name": "it", "resume": True}
    with pytest.raises(LaunchError, match="the run has finished its 1 epochs; --resume with more"):
        run_job(kind, read_options(kind, again, None))
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_two_processes_cannot_be_at_work_in_one_run(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    folder, _ = run_here("classify", data, tmp_path / "runs", name="it")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LaunchError, match="another process is at work in this folder"):
            run_here("classify", data, tmp_path / "runs", name="it", resume=True, epochs=2)
        holder.kill()
    run_here("classify", data, tmp_path / "runs", name="it", resume=True, epochs=2)
    assert len(lines(folder, "epoch")) == 2


def test_the_best_is_found_where_a_run_was_killed_before_it_said_so(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    folder, said = run_here("classify", data, tmp_path / "runs", epochs=2)
    best = folder / said["best"]["checkpoint"]
    assert best_checkpoint(folder) == best
    record = json.loads((folder / "run.json").read_text())
    record["best"]["checkpoint"] = "checkpoints/step-00000001"
    (folder / "run.json").write_text(json.dumps(record))
    assert best_checkpoint(folder) == best


@pytest.mark.processes
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--freeze=layer9", "--freeze layer9: the model has no such part"),
        ("--pretrained=nothing.pth", "nothing.pth"),
        ("--shards=30", "this model needs 2 or more in each of its 30 shards"),
        ("--shards=1", "2 devices cannot share 1 shards"),
    ],
)
def test_what_does_not_suit_the_model_is_told_in_one_line(
    option: str, words: str, tmp_path: Path
) -> None:
    data = write_pictures(tmp_path / "data")
    options = ["--data", str(data), "--runs", str(tmp_path / "runs"), "--devices", "cpu:2", option]
    done = subprocess.run(
        [sys.executable, "-m", "onefold", "train", "classify", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("onefold: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_training_that_is_over_ends_without_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is damaged while the examples of the best model are made."""
    real_load, real_evaluate = onefold.Trainer.load, onefold.Trainer.evaluate
    values = iter([0.9, 0.1])

    def load(self: onefold.Trainer, path: Path, **options: Any) -> Any:
        loaded = real_load(self, path, **options)
        (path.parent / "step-00000006" / "model.safetensors").write_bytes(b"damaged")
        return loaded

    def evaluate(self: onefold.Trainer, *given: Any, **options: Any) -> dict[str, float]:
        return {**real_evaluate(self, *given, **options), "accuracy": next(values)}

    monkeypatch.setattr(onefold.Trainer, "load", load)
    monkeypatch.setattr(onefold.Trainer, "evaluate", evaluate)
    data = write_pictures(tmp_path / "data")
    with caplog.at_level(logging.WARNING, "onefold"):
        folder, said = run_here("classify", data, tmp_path / "runs", epochs=2)
    assert said["finished"]
    assert json.loads((folder / "examples.json").read_text())["epoch"] == 0
    (record,) = caplog.records
    told = record.getMessage()
    assert told.startswith("the last checkpoint cannot be loaded any more: ")
    assert "step-00000006 is damaged" in told
    assert "\n" not in told

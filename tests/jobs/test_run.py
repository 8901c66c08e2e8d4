"""From options to a finished run: what is refused first, what is read again, how it may end."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import onefold
from onefold.data import scan
from onefold.errors import CheckpointError, DataError, LaunchError, RunFailed
from onefold.jobs import run as running
from onefold.jobs.catalog import JOBS, job_of
from onefold.jobs.run import Job, read_options, run_job
from onefold.jobs.training import Task
from onefold.system.process import stopped_by_signals
from onefold.system.record import read_record
from tests.checkpoint.folders import steps_in
from tests.jobs.tiny import SMALL, WRITERS, run_here, write_pictures, write_texts
from tests.tables import for_each

COMMAND = [sys.executable, "-m", "onefold"]


def options_of(job: str, data: Path | str, runs: Path, **chosen: Any) -> Any:
    given = {"data": str(data), "runs": str(runs), "epochs": 1, "devices": "cpu:1", **SMALL[job]}
    return read_options(job_of(job), {**given, **chosen}, None)


def resumed(runs: Path, name: str, **chosen: Any) -> Any:
    given = {"runs": str(runs), "name": name, "resume": True, "devices": "cpu:1", **chosen}
    return read_options(job_of("classify"), given, None)


def unread(job: str) -> Job:
    """A job that must not come as far as to read its data."""
    return replace(job_of(job), prepare=lambda *_: pytest.fail("the data were read"))


def train(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """The command, as a user has it."""
    return subprocess.run(
        [*COMMAND, "train", *map(str, words)], capture_output=True, text=True, check=False, **how
    )


@pytest.mark.processes
def test_a_run_whose_checkpoints_are_damaged_is_one_line(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    folder, _ = run_here("classify", data, tmp_path / "runs", name="it")
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"damaged")
    again = ["--runs", tmp_path / "runs", "--name", "it", "--resume", "--epochs", 2]
    done = train("classify", *again, "--devices", "cpu:2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"onefold: no checkpoint of {folder}/checkpoints can be used: ")


@for_each("epochs", ["x", None, [1]])
def test_a_number_of_epochs_that_is_none_is_one_error(epochs: object, tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "config.toml").write_text('data = "digits"\nname = "it"')
    (tmp_path / "it" / "run.json").write_text(json.dumps({"finished": "now", "epochs": epochs}))
    with pytest.raises(DataError, match=r"run\.json: expected a number of epochs, got"):
        run_job(unread("classify"), resumed(tmp_path, "it"))


# What is refused before the data are read.


@for_each(
    ("job", "chosen", "error", "words"),
    [
        ("classify", {"pretrained": "no.pth"}, CheckpointError, "--pretrained no.pth: expected a"),
        ("segment", {"pretrained": "no.pth"}, CheckpointError, "there is nothing of that name"),
        ("text", {"model": "no"}, CheckpointError, "--model no: expected tiny, or a folder with a"),
        (
            "classify",
            {"pretrained": __file__, "pretrained_classes": "no.txt"},
            CheckpointError,
            "--pretrained-classes no.txt: expected a file of class names",
        ),
        ("classify", {"freeze_until": "layer9"}, ValueError, "layer9: the model has no such part"),
        ("segment", {"freeze": ["layer9"]}, ValueError, "layer9: the model has no such part"),
    ],
)
def test_what_can_be_known_early_is_refused_early(
    job: str, chosen: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    data = WRITERS[job](tmp_path / "data")
    with pytest.raises(error, match=words):
        run_job(unread(job), options_of(job, data, tmp_path / "runs", **chosen))
    assert not (tmp_path / "runs").exists()


def test_a_run_of_another_job_is_refused_early(tmp_path: Path) -> None:
    folder, _ = run_here("text", write_texts(tmp_path / "texts"), tmp_path / "runs")
    chosen = options_of("classify", "x", tmp_path / "runs", pretrained=str(folder))
    with pytest.raises(DataError, match="expected a run of onefold train classify, got text"):
        run_job(unread("classify"), chosen)


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_model_of_a_library_that_is_missing_is_refused_early(tmp_path: Path) -> None:
    chosen = options_of("classify", "x", tmp_path, model="timm:resnet10t")
    with pytest.raises(LaunchError, match="needs the timm library"):
        run_job(unread("classify"), chosen)


@for_each("place", ["a file", "no place for files"])
def test_a_folder_that_cannot_be_written_to_is_refused_early(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    runs = tmp_path / "file" / "runs" if place == "a file" else Path("/proc/self")
    words = "expected a folder that can be written to, got .*: --runs names another one"
    with pytest.raises(LaunchError, match=words):
        run_job(unread("classify"), options_of("classify", "x", runs, name="it"))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A small disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(how: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        return disk

    try:
        yield mount
    finally:
        if disk.is_mount():
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.full
@pytest.mark.processes
def test_a_read_only_disk_is_one_line(mounted: Callable[..., Path], tmp_path: Path) -> None:
    disk = mounted("size=1m,ro")
    done = train("classify", "--data", write_pictures(tmp_path / "data"), "--runs", disk / "runs")
    assert done.returncode == 2
    assert done.stderr == (
        f"onefold: {disk}/runs/classify-1: expected a folder that can be written to, got Read-only "
        f"file system in {disk}: --runs names another one\n"
    )


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("devices", [1, 2])
def test_a_full_disk_is_one_line_and_the_run_can_go_on(
    mounted: Callable[..., Path], tmp_path: Path, devices: int
) -> None:
    disk, data = mounted("size=110m"), write_pictures(tmp_path / "data")
    choice = "--model resnet18 --shards 2 --batch-size 8 --epochs 4 --name it --runs runs"
    words = ["classify", "--data", data, *choice.split(), "--devices", devices]
    done = train(*words, cwd=disk)
    assert done.returncode == 2
    told = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert told[-1].startswith("onefold: runs/it: the run cannot be written any more: ")
    assert "No space left on device" in told[-1]
    assert told[-1].endswith("--runs runs --name it --resume goes on from its last checkpoint")
    left = [path.name for path in (disk / "runs/it/checkpoints").iterdir()]
    assert left, "the disk was full before there was a checkpoint"


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_run_that_another_process_is_at_is_refused_early(tmp_path: Path) -> None:
    folder, _ = run_here(
        "classify", write_pictures(tmp_path / "data"), tmp_path / "runs", name="it"
    )
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        done = train("classify", "--runs", folder.parent, "--name=it", "--resume", "--epochs=2")
        holder.kill()
    assert done.returncode == 2
    assert done.stderr.startswith(f"onefold: {folder}: another process is at work in this folder")
    assert done.stderr.count("\n") == 1


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_run_that_was_begun_meanwhile_is_no_traceback(devices: str, tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    chosen = options_of("classify", data, tmp_path / "runs", name="it", devices=devices)

    def prepare(options: Any, scanning: Any) -> Any:
        options.folder.mkdir(parents=True)
        (options.folder / "config.toml").touch()
        return job_of("classify").prepare(options, scanning)

    with pytest.raises(LaunchError, match="runs/it is there already: --resume goes on with it"):
        run_job(replace(job_of("classify"), prepare=prepare), chosen)


# What is read.


@pytest.mark.full
def test_a_run_that_goes_on_reads_no_picture_again_even_if_they_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, runs = write_pictures(tmp_path / "data"), tmp_path / "runs"
    for name in ("here", "moved"):
        run_job(job_of("classify"), options_of("classify", data, runs, name=name))
    monkeypatch.setattr(scan, "look_at", lambda *_: pytest.fail("a picture was read"))
    stayed = run_job(job_of("classify"), resumed(runs, "here", epochs=2))
    shutil.copytree(data, tmp_path / "elsewhere")
    shutil.rmtree(data)
    options = resumed(runs, "moved", epochs=2, data=str(tmp_path / "elsewhere"))
    moved = run_job(job_of("classify"), options)
    assert moved["fingerprint"] == stayed["fingerprint"]
    assert f'data = "{tmp_path}/elsewhere"' in (runs / "moved" / "config.toml").read_text()


@for_each("job", [job.name for job in JOBS])
def test_other_data_in_another_place_are_refused(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    run_here(job, data, tmp_path / "runs", name="it")
    other = WRITERS[job](tmp_path / "other", train=9)
    given = {"runs": str(tmp_path / "runs"), "name": "it", "resume": True, "epochs": 2}
    options = read_options(job_of(job), {**given, "data": str(other)}, None)
    with pytest.raises(DataError, match="expected the data that the run it was begun with"):
        run_job(job_of(job), options)


def test_pictures_exchanged_between_classes_are_other_data(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    run_here("classify", data, tmp_path / "runs", name="it")
    one, other = data / "test/apple/0.png", data / "test/pear/0.png"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(DataError, match="expected the data that the run it was begun with"):
        run_job(job_of("classify"), resumed(tmp_path / "runs", "it", epochs=2))


def test_a_run_that_noted_less_of_its_data_is_not_gone_on_with(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    folder, _ = run_here("classify", data, tmp_path / "runs", name="it")
    said = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**said, "data": "0ef90b3a28133b26"}))
    with pytest.raises(DataError, match="was begun by a onefold that noted less of its data"):
        run_job(job_of("classify"), resumed(tmp_path / "runs", "it", epochs=2))


def test_ctrl_c_while_the_data_are_read_writes_nothing(tmp_path: Path) -> None:
    def prepare(options: Any, scanning: Any) -> Any:
        raise KeyboardInterrupt

    job = replace(job_of("classify"), prepare=prepare)
    with pytest.raises(RunFailed, match="stopped while the data were read, before") as caught:
        run_job(job, options_of("classify", write_pictures(tmp_path / "data"), tmp_path / "runs"))
    assert caught.value.exit_code == 130
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.processes
def test_ctrl_c_is_heard_while_large_pictures_are_read(tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "data" / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4000, 3000), (number, 0, 0)).save(path, compress_level=1)
    with subprocess.Popen(
        [*COMMAND, "train", "classify", "--data", "data"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "onefold: reading 24 files\n"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert rest == (
        "onefold: stopped while the data were read, before anything was trained or written\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_data_are_read_writes_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    def prepare(options: Any, scanning: Any) -> Any:
        with stopped_by_signals():
            signal.raise_signal(number)

    job = replace(job_of("classify"), prepare=prepare)
    with pytest.raises(RunFailed, match="stopped while the data were read, before") as caught:
        run_job(job, options_of("classify", write_pictures(tmp_path / "data"), tmp_path / "runs"))
    assert caught.value.exit_code == 128 + number
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGHUP, signal.SIGINT)),
    ],
)
def test_a_signal_saves_and_the_run_goes_on_from_there(
    number: signal.Signals, tmp_path: Path
) -> None:
    data, epochs = write_texts(tmp_path / "data", train=160), 5
    choice = "--vocabulary 300 --width 16 --heads 2 --shards 2 --batch-size 4 --save-every 100000"
    words = ["text", "--data", data, *choice.split(), "--epochs", epochs]
    command = [*COMMAND, "train", *map(str, words), "--devices", "cpu:2", "--name", "it"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        metrics = tmp_path / "runs" / "it" / "metrics.jsonl"
        while not metrics.exists() or not metrics.read_text():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    told = errors.splitlines()[-1]
    found = re.fullmatch(
        rf"onefold: stopped by {number.name} after step (\d+) and saved: onefold train text --runs "
        r"runs --name it --resume goes on from there",
        told,
    )
    assert found, told
    saved = [path.name for path in (tmp_path / "runs" / "it" / "checkpoints").iterdir()]
    assert f"step-{int(found[1]):08d}" in saved


@for_each("step", [4, 10], ids=["in an epoch", "at its end"])
def test_a_run_that_was_asked_to_stop_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    data, runs = write_texts(tmp_path / "data"), tmp_path / "runs"
    options = {"epochs": 2, "batch_size": 4}
    _, whole = run_here("text", data, runs, name="whole", **options)
    with monkeypatch.context() as patch:
        asked = property(lambda trainer: trainer.steps == step)
        patch.setattr(onefold.Trainer, "asked_to_stop", asked)
        with pytest.raises(SystemExit, match="75"):
            run_here("text", data, runs, name="it", **options)
    assert steps_in(runs / "it" / "checkpoints") == [step]
    folder, rest = run_here("text", data, runs, name="it", resume=True)
    assert rest["fingerprint"] == whole["fingerprint"]
    numbers = [line["epoch"] for line in read_record(folder, "metrics") if line["kind"] == "epoch"]
    assert numbers == [0, 1]


# What is mentioned.


def test_notes_and_the_want_of_a_report_are_mentioned_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_pictures(tmp_path / "data")
    shutil.copy(data / "train/plum/0.png", data / "test/plum/9.png")
    find_spec = importlib.util.find_spec
    missing = lambda name: None if name == "matplotlib" else find_spec(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", missing)
    before: list[str] = []

    def launch(*_: Any, **__: Any) -> Any:
        before.append(capsys.readouterr().err)
        return {"is_lead": True}

    monkeypatch.setattr(onefold, "launch", launch)
    result = run_job(job_of("classify"), options_of("classify", data, tmp_path / "runs"))
    assert result["report"] is None
    expected = (
        "onefold: reading 37 files\n"
        f"onefold: {data}: 1 of 13 test samples is in the training set as well: test/plum/9.png is "
        "the same as train/plum/0.png\n"
        "onefold: there will be no report, as matplotlib is not installed here: after pip install "
        '"onefold[report]", onefold report makes it from the folder of the run\n'
    )
    assert before == [expected]


def test_with_matplotlib_there_is_nothing_to_mention() -> None:
    pytest.importorskip("matplotlib")
    assert running._without_report() == []


def test_notes_are_kept_with_the_run(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    shutil.copy(data / "train/plum/0.png", data / "test/plum/9.png")
    folder, said = run_here("classify", data, tmp_path / "runs")
    assert len(said["notes"]) == 1
    assert json.loads((folder / "run.json").read_text())["notes"] == said["notes"]


# Whose examples.


class _Chosen:
    """Scores that are given, so that a certain epoch is the best."""

    def __init__(self, *values: float) -> None:
        self._values = list(values)
        self._evaluate = onefold.Trainer.evaluate

    def evaluate(self, trainer: onefold.Trainer, *arguments: Any, **how: Any) -> Any:
        scores = self._evaluate(trainer, *arguments, **how)
        value = self._values.pop(0)
        return {name: value if name != "loss" else loss for name, loss in scores.items()}


@pytest.mark.full
@for_each("job", [job.name for job in JOBS])
@for_each(("scores", "best"), [((0.9, 0.2, 0.1), 0), ((0.1, 0.2, 0.9), 2)])
def test_examples_are_of_the_best_model_and_the_last_one_stays(
    job: str, scores: tuple[float, ...], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = WRITERS[job](tmp_path / "data")
    chosen = _Chosen(*scores)
    monkeypatch.setattr(onefold.Trainer, "evaluate", lambda *a, **how: chosen.evaluate(*a, **how))
    shown: list[str] = []
    predict = onefold.Trainer.predict

    def note(trainer: onefold.Trainer, *arguments: Any, **how: Any) -> Any:
        shown.append(trainer.fingerprint())
        return predict(trainer, *arguments, **how)

    monkeypatch.setattr(onefold.Trainer, "predict", note)
    folder, said = run_here(job, data, tmp_path / "runs", epochs=3, name="three")
    assert said["best"]["epoch"] == best
    checkpoints = folder / "checkpoints"
    kept = json.loads((folder / said["best"]["checkpoint"] / "run.json").read_text())
    last = max(checkpoints.iterdir())
    assert set(shown) == {kept["fingerprint"]}
    assert json.loads((last / "run.json").read_text())["fingerprint"] == said["fingerprint"]
    assert (shown[0] == said["fingerprint"]) == (best == 2)
    assert json.loads((folder / "examples.json").read_text())["epoch"] == best


def test_without_the_best_checkpoint_the_examples_are_of_the_last_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = _Chosen(0.9, 0.2)
    monkeypatch.setattr(onefold.Trainer, "evaluate", lambda *a, **how: chosen.evaluate(*a, **how))
    real_load = onefold.Trainer.load

    def load(trainer: onefold.Trainer, *arguments: Any, **how: Any) -> Any:
        shutil.rmtree(arguments[0])
        return real_load(trainer, *arguments, **how)

    monkeypatch.setattr(onefold.Trainer, "load", load)
    data = write_pictures(tmp_path / "data")
    folder, said = run_here("classify", data, tmp_path / "runs", epochs=2)
    assert said["best"]["epoch"] == 0
    assert json.loads((folder / "examples.json").read_text())["epoch"] == 1


def make_early_task(options: Any, data: Any, *, make_task: Callable[..., Task]) -> Task:
    """A task whose best epoch is the first, by a score that falls from step to step."""
    task = make_task(options, data)

    def score(model: Any, batch: Any) -> dict[str, Any]:
        counts = [b for n, b in model.named_buffers() if n.endswith("num_batches_tracked")]
        early = onefold.Mean(-counts[0].to(torch.float64), torch.ones((), dtype=torch.float64))
        return {**task.score(model, batch), "early": early}

    return replace(task, score=score, best="highest early")


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("job", ["classify", "segment"])
def test_examples_of_the_best_model_are_the_same_on_two_devices(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    make_task = partial(make_early_task, make_task=job_of(job).make_task)
    told = []
    for devices in ("cpu:1", "cpu:2"):
        chosen = options_of(job, data, tmp_path / devices, epochs=2, devices=devices)
        result = run_job(replace(job_of(job), make_task=make_task), chosen)
        examples = json.loads((Path(result["folder"]) / "examples.json").read_text())
        assert (result["best"]["epoch"], examples["epoch"]) == (0, 0)
        told.append((result["fingerprint"], examples))
    assert told[0] == told[1]
    plain = options_of(job, data, tmp_path / "plain", epochs=2)
    assert run_job(job_of(job), plain)["fingerprint"] == told[0][0]

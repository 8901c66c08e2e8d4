"""From options to a finished run: what is refused first, what is read again, how it may end."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onefold
import onefold_jobs
from onefold.errors import CheckpointError, DataError, LaunchError, RunFailed
from onefold.system.stop_signals import stopped_by_signals
from onefold_jobs import report
from onefold_jobs.catalog import JOBS
from onefold_jobs.data import scan
from onefold_jobs.job import Job
from onefold_jobs.progress import TrainingBar
from onefold_jobs.report.folder import read_reported
from onefold_jobs.run import read_options, run_job
from tests.capabilities import needs_text
from tests.checkpoint.folders import full_disk, steps_in
from tests.jobs.tiny import SMALL, WRITERS, direct, job_of, run_here, write_pictures, write_texts
from tests.tables import for_each, some

needs_text()

COMMAND = [sys.executable, "-m", "onefold", "train"]


def options_of(job: str, in_: Path | str, to: Path, **chosen: Any) -> Any:
    given = {"data": str(in_), "runs": str(to), "epochs": 1, "devices": "cpu:1", **SMALL[job]}
    return read_options(job_of(job), {**given, **chosen}, None)


def resumed(runs: Path, name: str = "it", *, job: str = "classify", **chosen: Any) -> Any:
    given = {"runs": str(runs), "name": name, "resume": True, "devices": "cpu:1", **chosen}
    return read_options(job_of(job), given, None)


def unread(job: str) -> Job:
    """A job that must not come as far as to read its data."""
    return replace(job_of(job), prepare=lambda *_: pytest.fail("the data were read"))


def train(*words: object, **how: Any) -> tuple[int, str]:
    """The command, as a user has it: its exit code, and the last of its errors."""
    command = [*COMMAND, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@for_each(
    ("given", "error", "words"),
    [
        ({}, ValueError, "--data is missing: give the folder or file of the data"),
        ({"resume": True}, ValueError, "--resume: expected --name with it"),
        ({"data": "x", "name": "new", "resume": True}, LaunchError, "there is no run in"),
        ({"data": "x", "name": "old"}, LaunchError, "exists already: continue it with --resume"),
        (
            {"name": "old", "resume": True, "lr": 0.5},
            ValueError,
            "--lr 0.5: the run old was started with 0.02, and --resume cannot change it",
        ),
    ],
)
def test_what_cannot_begin_is_refused(given: Any, error: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").write_text('data = "x"\nname = "old"\nlr = 0.02\n')
    with pytest.raises(error, match=words):
        read_options(job_of("classify"), {"runs": str(tmp_path), **given}, None)
    config = (tmp_path / "old" / "config.toml").read_text()
    # What the file says of its own place may be another run's.
    others = 'runs = "elsewhere"\nname = "other"\n'
    (tmp_path / "old" / "config.toml").write_text(config.replace('name = "old"\n', others))
    again = resumed(tmp_path, "old", workers=2, epochs=7)
    assert again.folder == tmp_path / "old"
    assert (again.lr, again.workers, again.epochs, again.data) == (0.02, "2", 7, "x")


def test_checkpoints_are_never_written_through_a_link(tmp_path: Path) -> None:
    data, runs, elsewhere = tmp_path / "data", tmp_path / "runs", tmp_path / "elsewhere"
    folder, _ = run_here("classify", write_pictures(data), runs, name="it", model="lenet")
    (folder / "checkpoints").rename(elsewhere)
    (folder / "checkpoints").symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(OSError, match="not followed below a folder, but got checkpoints"):
        run_job(unread("classify"), resumed(runs, epochs=2))
    with pytest.raises(LaunchError, match=r"cannot write the run there: .*but got checkpoints"):
        run_here("classify", data, runs, name="it", resume=True, epochs=2)
    assert sorted(elsewhere.rglob("*")) == before


@for_each(
    ("job", "chosen", "error", "words"),
    [
        ("classify", {"pretrained": "no.pth"}, CheckpointError, "--pretrained no.pth: expected a"),
        ("segment", {"pretrained": "no.pth"}, CheckpointError, "but it does not exist"),
        ("text", {"model": "no"}, CheckpointError, "--model no: expected tiny, or a folder with a"),
        (
            "classify",
            {"pretrained": __file__, "pretrained_classes": "no.txt"},
            CheckpointError,
            "--pretrained-classes no.txt: expected a file of class names",
        ),
        ("classify", {"freeze_until": "layer9"}, ValueError, "layer9: the model has no such part"),
        ("segment", {"freeze": ["layer9"]}, ValueError, "layer9: the model has no such part"),
        (
            "classify",
            {"runs": "/proc/self"},
            LaunchError,
            "re: .*: name another one with --runs",
        ),
        ("classify", {"runs": f"{__file__}/runs"}, LaunchError, "cannot write there: "),
    ],
)
def test_much_is_refused(job: str, chosen: Any, error: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        run_job(unread(job), options_of(job, "data", tmp_path / "runs", **chosen))
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onefold, "launch", direct)
    options = options_of("text", write_texts(tmp_path / "data"), tmp_path / "runs", name="it")
    words = "runs/it: cannot write the run: .*from the last checkpoint: onefold .* it --resume"
    with full_disk(20_000), pytest.raises(RunFailed, match=words) as failed:
        run_job(job_of("text"), options)
    assert failed.value.exit_code == 2


@for_each("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_the_report_is_made_leaves_the_report(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "onefold-jobs[report]"')
    monkeypatch.setattr(onefold, "launch", direct)
    build = report.build_report

    def stopped_meanwhile(folder: Path) -> Path:
        signal.raise_signal(number)
        return build(folder)

    monkeypatch.setattr(report, "build_report", stopped_meanwhile)
    options = options_of("text", write_texts(tmp_path / "data"), tmp_path / "runs", name="it")
    with stopped_by_signals():
        result = run_job(job_of("text"), options)
    assert result["report"] == str(tmp_path / "runs" / "it" / "report.html")
    assert Path(result["report"]).is_file()


@pytest.mark.processes
def test_a_run_whose_checkpoints_are_damaged_is_one_line(tmp_path: Path) -> None:
    data, runs = write_pictures(tmp_path / "data"), tmp_path / "runs"
    folder, _ = run_here("classify", data, runs, name="it", model="lenet", augment="none")
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"damaged")
    again = ["--runs", runs, "--name", "it", "--resume", "--epochs", 2]
    code, told = train("classify", *again, "--devices", "cpu:2")
    assert code == 2
    assert told.startswith(f"onefold: no checkpoint in {folder}/checkpoints is usable: ")


@pytest.mark.processes
def test_a_copy_of_a_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    data, runs = write_pictures(tmp_path / "data"), tmp_path / "runs"
    folder, _ = run_here("classify", data, runs, name="it", model="lenet", augment="none")
    shutil.copytree(folder, runs / "copy")
    before = (folder / "run.json").read_bytes()
    said = run_job(job_of("classify"), resumed(runs, "copy", epochs=2))
    assert (said["folder"], said["epochs"]) == (str(runs / "copy"), 2)
    assert (folder / "run.json").read_bytes() == before


LOGGER = """
from pathlib import Path
from types import SimpleNamespace

def init(**how):
    with Path(__file__).with_name("opened").open("a") as file:
        file.write("once ")
    return SimpleNamespace(id="run-1", log=lambda numbers, step: None, finish=lambda: None)
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_run_that_ended_early_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is logged or written of it a second time."""
    (tmp_path / "wandb.py").write_text(LOGGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = write_texts(tmp_path / "data")
    still: dict[str, Any] = {"lr": 1e-12, "patience": 1, "epochs": 4}
    still |= {"log": "wandb", "max_time": "9m"}
    options = options_of("text", data, tmp_path / "runs", name="it", **still)
    said = run_job(job_of("text"), options)
    assert (said["ended"], (tmp_path / "opened").read_text()) == ("patience", "once ")
    before = {each: each.lstat().st_mtime_ns for each in (tmp_path / "runs").rglob("*")}
    replay = [sys.executable, "-m", "onefold", "replay", said["folder"], "--step", "1"]
    done = subprocess.run(replay, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 1, recomputed from step" in done.stdout
    assert (tmp_path / "opened").read_text() == "once "
    assert {each: each.lstat().st_mtime_ns for each in (tmp_path / "runs").rglob("*")} == before


@pytest.mark.full
def test_no_picture_is_read_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_other_data_are_refused(job: str, tmp_path: Path) -> None:
    data, runs = WRITERS[job](tmp_path / "data"), tmp_path / "runs"
    run_here(job, data, runs, name="it")

    def refused(words: str, **chosen: Any) -> None:
        with pytest.raises(DataError, match=words):
            run_job(job_of(job), resumed(runs, job=job, epochs=2, **chosen))

    others = "the data differ from those that the run it was started with"
    refused(others, data=str(WRITERS[job](tmp_path / "other", train=9)))
    if job == "classify":  # two pictures are exchanged between classes
        one, other = data / "test/apple/0.png", data / "test/pear/0.png"
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        refused(others)


@for_each("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_data_are_read_stops(number: signal.Signals, tmp_path: Path) -> None:
    def prepare(options: Any, scanning: Any = None) -> Any:
        with stopped_by_signals():
            signal.raise_signal(number)

    job = replace(job_of("text"), prepare=prepare)
    with pytest.raises(RunFailed, match="stopped while reading the data; nothing") as caught:
        run_job(job, options_of("text", "data", tmp_path / "runs"))
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
def test_a_signal_saves_and_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", train=160)
    choice = "--vocabulary 300 --width 16 --heads 2 --shards 2 --batch-size 4 --save-every 100000"
    words = ["text", "--data", str(data), *choice.split(), "--epochs", "5"]
    with subprocess.Popen(
        [*COMMAND, *words, "--devices", "cpu:2", "--name", "it"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        record = tmp_path / "runs" / "it" / "run.record"
        while not record.exists() or not len(onefold.Record(record).steps["step"]):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    found = re.fullmatch(
        rf"onefold: stopped by {number.name} after step (\d+) and saved: onefold train text --runs "
        r"runs --name it --resume continues from there",
        errors.splitlines()[-1],
    )
    assert found, errors
    assert int(found[1]) in steps_in(tmp_path / "runs" / "it" / "checkpoints")


def test_a_stop_changes_no_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an epoch or at its end, after a signal; or after an error, from a checkpoint of before."""
    data, runs = write_texts(tmp_path / "data"), tmp_path / "runs"
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4}
    whole, said = run_here("text", data, runs, name="whole", **options)
    for step, fails in some(((4, False), (10, False), (5, True)), 2):

        def asked(trainer: onefold.Trainer, step: int = step, fails: bool = fails) -> bool:
            if fails and trainer.steps == step:
                raise KeyboardInterrupt
            return trainer.steps == step

        options |= {"name": f"stopped {step}", "save_every": 2 if fails else 100}
        with monkeypatch.context() as patch:
            patch.setattr(onefold.Trainer, "asked_to_stop", property(asked))
            with pytest.raises(KeyboardInterrupt if fails else SystemExit):
                run_here("text", data, runs, **options)
        assert fails or steps_in(runs / f"stopped {step}" / "checkpoints") == [step]
        folder, resumed = run_here("text", data, runs, name=options["name"], resume=True)
        assert resumed["fingerprint"] == said["fingerprint"]
        for kind, names in (("steps", "step lr loss"), ("epochs", "epoch step lr loss scores")):
            lines = [getattr(read_reported(each), kind) for each in (whole, folder)]
            for one, two in zip(*lines, strict=True):
                assert all(getattr(one, name) == getattr(two, name) for name in names.split())


def test_notes_and_the_want_of_a_report_are_mentioned_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, before = write_pictures(tmp_path / "data"), []
    shutil.copy(data / "train/plum/0.png", data / "test/plum/9.png")
    find = importlib.util.find_spec
    without = lambda name: None if name == "matplotlib" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)

    def launch(*_: Any, **__: Any) -> Any:
        before.append(capsys.readouterr().err)
        return {"is_lead": True}

    monkeypatch.setattr(onefold, "launch", launch)
    options = options_of("classify", data, tmp_path / "runs")
    assert run_job(job_of("classify"), options)["report"] is None
    (said,) = before
    assert said == (
        "onefold: reading 37 files\n"
        f"onefold: {data}: 1 of 13 test samples is also in the training set: test/plum/9.png is "
        "the same as train/plum/0.png\n"
        "onefold: no report will be written, because matplotlib is not installed: after pip "
        'install "onefold-jobs[report]", write it with onefold report\n'
    )


@for_each(
    ("job", "chosen"), [("classify", {}), ("classify", {"seed": 1}), ("segment", {"seed": 1})]
)
def test_test_images_that_a_pretrained_run_was_trained_on_are_counted(
    job: str, chosen: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, runs = WRITERS[job](tmp_path / "data") / "train", tmp_path / "runs"
    first, _ = run_here(job, data, runs, name="first", holdout=0.4)
    # Elsewhere, the images are the same ones.
    moved = data.rename(tmp_path / "moved")
    how: dict[str, Any] = {"name": "next", "holdout": 0.4, "pretrained": str(first)}
    options = [options_of(job, moved, runs, **how), options_of(job, moved, runs, **how, **chosen)]
    tested = [{*job_of(job).tested(job_of(job).prepare(each, None))} for each in options]
    monkeypatch.setattr(onefold, "launch", lambda *_, **__: {"is_lead": False})
    capsys.readouterr()
    run_job(job_of(job), options[1])
    seen = len(tested[1] - tested[0])
    said = f"{seen} of {len(tested[1])} test images are in the training set of {first}, so the"
    assert (seen > 0) == bool(chosen) == (said in capsys.readouterr().err)


@pytest.mark.processes
def test_a_job_is_a_function(tmp_path: Path) -> None:
    data, runs = write_texts(tmp_path / "data"), tmp_path / "runs"
    how: dict[str, Any] = {"runs": runs, "epochs": 2, **SMALL["text"]}
    result = onefold_jobs.text(data=data, devices=2, **how)
    assert result.folder == runs / "text-1"
    assert result.epoch in (1, 2)
    assert result.scores == read_reported(result.folder).epochs[result.epoch - 1].scores
    assert result.report is None or result.report.is_file()
    assert onefold_jobs.load_run(result.folder).classes == ("bad", "good")
    words = r"no option mixup in onefold_jobs\.text: it belongs to onefold_jobs\.classify$"
    with pytest.raises(ValueError, match=words):
        onefold_jobs.text(data=data, mixup=0.2, cutmix=0.2, foreground="1")
    with pytest.raises(AttributeError, match=r"module 'onefold_jobs' has no attribute 'cook'"):
        onefold_jobs.cook  # noqa: B018


def test_where_there_is_no_terminal_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert not sys.stdout.isatty()
    trainer: Any = SimpleNamespace(is_lead=True, devices=("cpu", "cpu"))
    step: Any = SimpleNamespace(epoch=0, samples=10)
    with TrainingBar(trainer, samples=1000, epochs=1) as bar:
        bar.say("begun")
        for _ in range(70):
            clock[0] += 1
            bar.advance(step, mean_loss=0.5)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "begun"
    assert [line[:27] for line in told[1:]] == [
        "epoch 1/1  loss 0.500  31% ",
        "epoch 1/1  loss 0.500  62% ",
    ]
    assert all(line.endswith(" left") for line in told[1:])
    # After the first step, which may take minutes to compile, nobody knows yet.
    with TrainingBar(trainer, samples=1000, epochs=1) as bar:
        clock[0] += 100
        bar.advance(step, mean_loss=0.5)
    assert capsys.readouterr().out.splitlines() == ["epoch 1/1  loss 0.500  1%"]
